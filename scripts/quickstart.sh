#!/usr/bin/env bash
# From a fresh clone to a trained agent, its evaluation and a report.
set -euo pipefail
source -- "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<USAGE
Usage: scripts/quickstart.sh [OPTION of 'agentrl train' ...]

Installs agentrl into .venv (once), trains a small agent on a CPU with the preset 'quickstart', evaluates it on 200
problems that it was not trained on, and says where the report is. Needs bash and Python 3.11 or newer.

  -h, --help   show this page and stop
USAGE
}

main() {
  case "${1:-}" in -h | --help) usage && return ;; esac
  install_extra train
  cd -- "$ROOT"
  # train writes the run's folder to standard output and everything else to standard error.
  local run
  run=$("$VENV/bin/agentrl" train --preset quickstart "$@")
  "$VENV/bin/agentrl" eval "$run" --greedy
  echo "Open the report in a browser: $ROOT/$run/report.html"
}

main "$@"
