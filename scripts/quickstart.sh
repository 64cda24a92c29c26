#!/usr/bin/env bash
# From a fresh clone to a trained agent, its evaluation and a report.
set -euo pipefail
source -- "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<USAGE
Usage: scripts/quickstart.sh [--real] [OPTION of 'agentrl train' ...]

Installs agentrl into .venv (once), trains a small agent on a CPU with the preset 'quickstart', evaluates it on 200
problems that it was not trained on, and says where the report is. Needs bash and Python 3.11 or newer.

  --real       train a real language model, SmolLM2-135M-Instruct: scripts/get_smollm2.sh gets it (93 MB), and the preset
               'smollm2-135m' trains it in about ten minutes on two cores and 8 GB of memory
  -h, --help   show this page and stop
USAGE
}

main() {
  local preset=quickstart
  case "${1:-}" in
    -h | --help) usage && return ;;
    --real) preset=smollm2-135m && shift ;;
  esac
  install_extra train
  cd -- "$ROOT"
  [[ $preset == quickstart ]] || scripts/get_smollm2.sh
  # train writes the run's folder to standard output and everything else to standard error.
  local run
  run=$("$VENV/bin/agentrl" train --preset "$preset" "$@")
  "$VENV/bin/agentrl" eval "$run" --greedy
  echo "Open the report in a browser: $ROOT/$run/report.html"
}

main "$@"
