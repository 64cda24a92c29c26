# Shared by the scripts: find Python, make the virtual environment, install agentrl into it. To be sourced by bash.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV="${AGENTRL_VENV:-$ROOT/.venv}"
unset AGENTRL_VENV # what is started from here may have an environment of its own
unset PYTHONDONTWRITEBYTECODE # each of hundreds of processes would compile every module again
# Exists while pip runs: a run that finds it knows that the last one was interrupted.
INSTALLING="$VENV/.agentrl-installing"

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }

die() {
  printf '%s\n' "$*" >&2
  exit 1
}

# Print the path of a Python that is new enough and can make virtual environments; $PYTHON is tried first.
find_python() {
  local candidate path
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    # A version manager has a shim even for versions that are not enabled: only running it tells.
    path=$("$candidate" -c 'import sys; print(sys.executable if sys.version_info >= (3, 11) else "")' 2>/dev/null) || continue
    [[ -n $path ]] || continue
    "$path" -c 'import ensurepip, venv' 2>/dev/null ||
      die "$path can't make virtual environments yet; install the missing part with: apt-get install ${path##*/}-venv"
    printf '%s\n' "$path"
    return
  done
  die "agentrl needs Python 3.11 or newer, and none was found; install it with: apt-get install python3 python3-venv"
}

# Install Debian packages where a command is missing: need COMMAND PACKAGE ….
need() {
  command -v "$1" >/dev/null || apt_install "${@:2}"
}

apt_install() {
  local -a root=()
  [[ $(id -u) == 0 ]] || root=(sudo)
  say "Installing with apt-get: $*"
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# Hash what an installation depends on: the two files, and the repository's path (installed scripts name it).
fingerprint() {
  { cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" && printf '%s\n' "$ROOT"; } | sha256sum | cut -d ' ' -f 1
}

# Succeed when .venv can be reused: made here, by a Python that still works, with no interrupted installation, and with
# the packages that its stamps name.
sound() {
  local stamp python="$VENV/bin/python"
  [[ ! -e $INSTALLING ]] || return 1
  # Its output counts, not its exit status: a truncated, empty file exits with 0.
  [[ $("$python" -c 'import sys; print(sys.version_info >= (3, 11) and sys.prefix)') == "$VENV" ]] || return 1
  # A folder that was moved keeps the old path in its scripts.
  grep -qF "$VENV/bin/" "$VENV/bin/pip" && "$python" -m pip --version || return 1
  for stamp in "$VENV"/.agentrl-*; do
    [[ -e $stamp ]] || continue
    "$python" -c 'import agentrl, sys, importlib.util as u; sys.exit(not (u.find_spec("torch") and u.find_spec("rich")))'
    return
  done
}

# Succeed when the given extra, or one that contains it, is installed as pyproject.toml and constraints.txt want it.
installed() {
  local extra wanted extras="train dev ci" # each contains those before it
  sound >/dev/null 2>&1 || return 1
  wanted=$(fingerprint)
  for extra in $1 ${extras#*"$1"}; do
    [[ -f $VENV/.agentrl-$extra && $(<"$VENV/.agentrl-$extra") == "$wanted" ]] && return
  done
  return 1
}

# Make .venv unless a sound one is there.
make_venv() {
  local python
  sound >/dev/null 2>&1 && return
  python=$(find_python)
  say "Making a virtual environment in $VENV with $python"
  "$python" -m venv --clear "$VENV" || die "Making $VENV failed: the lines above say why."
}

# Install into the given environment, and show of what pip says what takes long: large downloads, and the unpacking.
pip_install() {
  "$1/bin/python" -m pip install --disable-pip-version-check "${@:2}" | sed -un \
    -e 's|^ *Downloading \(.*/\)\{0,1\}\([^ /]*\) (\([0-9.]* [MG]B\)).*|    downloading \2, \3|p' \
    -e 's|^ *Installing collected packages.*|    unpacking all of them|p' >&2
}

# Bring .venv up to date with the given extra: train, dev or ci.
install_extra() {
  installed "$1" && return # without waiting for who installs into another environment
  (
    # Two scripts started at once take turns; the lock goes with this subshell.
    flock 9
    installed "$1" && exit
    make_venv
    say "Installing agentrl and its '$1' extra into .venv (only when they change; PyTorch is large: 1 to 15 minutes)"
    touch "$INSTALLING"
    cd -- "$ROOT"
    local wanted
    wanted=$(fingerprint) # before pip reads the files: they may change while it runs
    pip_install "$VENV" -c constraints.txt -e ".[$1]" ||
      die "Installing failed: the lines above say why. Run this again to start over."
    printf '%s\n' "$wanted" >"$VENV/.agentrl-$1"
    rm "$INSTALLING"
  ) 9<"$ROOT"
}
