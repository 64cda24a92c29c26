#!/usr/bin/env bash
# Run the tests in a virtual environment that is made when it is missing.
set -euo pipefail
source -- "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<USAGE
Usage: scripts/test.sh [OPTION of pytest ...]

Installs agentrl and its tools into .venv (once) and runs the tests from the repository's root, on all cores.
For example:

  scripts/test.sh                          everything that this machine can run
  scripts/test.sh -m "not slow"            without what takes more than a second
  scripts/test.sh --durations=50           prints the seconds of the slowest tests and their fixtures
  scripts/test.sh -n 0 tests/toolenv/test_base.py   one file, in one process: options like --pdb and -s need that

With AGENTRL_EVERYTHING=1 tests run too that are for CI: they say nothing about this machine that the others don't.
With AGENTRL_CI=1 they run as well, and a test that would be skipped fails.

  -h, --help   show this page and stop
USAGE
}

main() {
  case "${1:-}" in -h | --help) usage && return ;; esac
  install_extra dev
  cd -- "$ROOT"
  "$VENV/bin/python" -m pytest -n logical --maxprocesses 8 --dist worksteal "$@"
}

main "$@"
