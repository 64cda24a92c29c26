#!/usr/bin/env bash
# Try the README as strangers do: in containers with Docker's default profile, and nothing but Python, venv and git.
set -euo pipefail
source -- "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
source -- "$ROOT/scripts/engine.sh"

STRANGERS=(bookworm-root bookworm-user trixie-root)
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/agentrl-strangers"
LOGS="$ROOT/build/strangers"

usage() {
  cat <<USAGE
Usage: scripts/strangers.sh [STRANGER ...]

Makes a container for each stranger, clones this repository's last commit there, and runs the README's first command to
its report, its Python example, and the quick tests. The containers have neither user namespaces nor a compiler.
Their images are made by debootstrap and kept in $CACHE.
Each log is build/strangers/STRANGER.log. Needs root. For example:

  scripts/strangers.sh                    all of them: ${STRANGERS[*]}
  scripts/strangers.sh bookworm-user      Debian 12, as an ordinary user

  -h, --help   show this page and stop
USAGE
}

# Make the image of a Debian release, unless the engine has it.
make_image() {
  local suite=$1 root="$CACHE/$1"
  docker image inspect "agentrl-stranger:$suite" >/dev/null 2>&1 && return
  if [[ ! -e $root.tar ]]; then
    say "Making a Debian $suite with debootstrap, a minute or two"
    mkdir -p "$CACHE"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,procps,git "$suite" "$root" \
      >"$root.log" 2>&1 || die "debootstrap failed: $root.log says why"
    tar -C "$root" -cf "$root.part" .
    rm -rf "$root"
    mv "$root.part" "$root.tar"
  fi
  docker import "$root.tar" "agentrl-stranger:$suite" >/dev/null
}

# Print docker's options for pip's settings of this machine: its variables, and the files and folders that they name.
pip_options() {
  local name value word
  for name in $(compgen -e | grep -E '^(PIP_|SSL_CERT_|REQUESTS_CA_)' || true); do
    printf '%s\n' --env "$name=${!name}"
  done
  {
    printf '%s\n' /etc/pip.conf /etc/xdg/pip
    compgen -e | grep -E '^(PIP_|SSL_CERT_|REQUESTS_CA_)' | while read -r name; do printf '%s\n' "${!name}"; done
    "$(find_python)" -m pip config list 2>/dev/null | sed -n "s/^[^=]*='\(.*\)'$/\1/p"
  } | tr ' ' '\n' | sed 's|^file://||' | grep '^/' | sort -u | while read -r word; do
    # An index is a folder of a larger one, whose other folders its pages name.
    [[ $word != */simple ]] || word=${word%/simple}
    [[ ! -e $word ]] || printf '%s\n' --volume "$word:$word:ro"
  done
}

# Print what a stranger types; the options are those that the error names where there is no sandbox.
script() {
  cat <<'SCRIPT'
set -euo pipefail
git clone -q /source agentrl
cd agentrl
began=$SECONDS
timeout 1800 ./scripts/quickstart.sh --set env.id=agentrl/Countdown-v0 --set 'env.args={level=1,tool=false}'
echo "stranger: the quickstart took $((SECONDS - began)) s"
! .venv/bin/agentrl train --preset quickstart --name refused 2>refused.txt
grep -q "no sandbox can be opened here" refused.txt
sed -n '/^```python$/,/^```$/p' README.md | sed '1d;/^```$/,$d' >example.py
if .venv/bin/python example.py >example.txt 2>&1; then
  echo "stranger: the example of the README ran"
else
  tail -n 1 example.txt
  grep -q "no sandbox can be opened here" example.txt
fi
began=$SECONDS
timeout 3000 scripts/test.sh -m "not slow"
echo "stranger: the quick tests took $((SECONDS - began)) s"
SCRIPT
}

# Be one stranger; its log is shown where it fails.
meet() {
  local name=$1 suite=${1%-*} user=${1#*-} status=0
  local -a options
  make_image "$suite"
  mapfile -t options < <(pip_options)
  mkdir -p "$LOGS" "$CACHE/pip-$name"
  [[ $user == root ]] || chown 1000:1000 "$CACHE/pip-$name"
  local become='cd; exec bash -c "$0"'
  [[ $user == root ]] || become='useradd -m -u 1000 stranger; cd /home/stranger; exec runuser -u stranger -- env HOME=/home/stranger bash -c "$0"'
  say "$name: its log is build/strangers/$name.log"
  # The network is the host's, since the engine has no bridge: it is for pip alone.
  docker run --rm --init --network host --env PIP_CACHE_DIR=/pip-cache --env HOME=/root "${options[@]}" \
    --volume "$ROOT:/source:ro" --volume "$CACHE/pip-$name:/pip-cache" "agentrl-stranger:$suite" \
    bash -c "git config --system --add safe.directory '*'; $become" "$(script)" >"$LOGS/$name.log" 2>&1 || status=$?
  ((status == 0)) || tail -n 100 "$LOGS/$name.log"
  printf '%s: %s; %s\n' "$name" "$( ((status == 0)) && echo passed || echo "FAILED with $status")" \
    "$(grep -E '^stranger: |^=+ .*(passed|failed)' "$LOGS/$name.log" | tr '\n' ';')"
  return "$status"
}

main() {
  case "${1:-}" in -h | --help) usage && return ;; esac
  (($#)) || set -- "${STRANGERS[@]}"
  [[ $(id -u) == 0 ]] || die "making a container's image needs root"
  need debootstrap debootstrap
  install_engine
  trap stop_engine EXIT
  start_engine
  local name failed=0
  for name in "$@"; do
    [[ " ${STRANGERS[*]} " == *" $name "* ]] || die "there is no stranger $name: choose among ${STRANGERS[*]}"
    meet "$name" || failed=1
  done
  return "$failed"
}

main "$@"
