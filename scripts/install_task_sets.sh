#!/usr/bin/env bash
# Install other projects whose task sets we play, each into an environment of its own: they pin other versions than we.
set -euo pipefail
source -- "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

# Install packages into build/task_sets/NAME, unless these versions are there.
install_project() {
  local folder="$ROOT/build/task_sets/$1"
  [[ -f $folder/.installed && $(<"$folder/.installed") == "${*:2}" ]] && return
  say "Installing ${*:2} into build/task_sets/$1"
  "$(find_python)" -m venv --clear "$folder"
  pip_install "$folder" -q "${@:2}"
  printf '%s\n' "${*:2}" >"$folder/.installed"
}

main() {
  install_project verifiers verifiers==0.4.0
  install_project openenv openenv==0.10.0
  install_project gem gem-llm==0.1.0
  install_project inspect inspect-ai==0.3.285 openai==3.57.0
}

main "$@"
