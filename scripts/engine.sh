# A Docker engine for the tests, with gVisor as a second runtime where Debian's package is there. To be sourced by bash.
#
#   source scripts/engine.sh; start_engine; scripts/test.sh -m docker; stop_engine
#
# Only root can start one. An engine that runs already is used as it is, and stop_engine leaves it alone.

ENGINE="${XDG_RUNTIME_DIR:-/run}/agentrl-engine"

# Print the settings of the engine. Neither bridge nor firewall: the sandboxes have no network. For the same reason
# gVisor is told so itself: Debian's takes every network namespace of a new kernel for the host's. ptrace is the one
# platform of gVisor that runs inside a virtual machine without nested virtualisation.
engine_settings() {
  local runtimes=""
  command -v runsc >/dev/null &&
    runtimes="\"runsc\": {\"path\": \"$(command -v runsc)\", \"runtimeArgs\": [\"--platform=ptrace\", \"--network=none\"]}"
  printf '{"bridge": "none", "iptables": false, "ip6tables": false, "runtimes": {%s}}\n' "$runtimes"
}

# Succeed when an engine answers on the socket that DOCKER_HOST or the default names.
engine_answers() {
  docker version --format '{{.Server.Version}}' >/dev/null 2>&1
}

# Install an engine where none answers. To be sourced after lib.sh.
install_engine() {
  engine_answers || need dockerd docker.io
  need docker docker-cli # from Debian 13 on, docker.io comes without its command line
}

# Start an engine and wait until it answers.
start_engine() {
  engine_answers && return
  [[ $(id -u) == 0 ]] || { printf 'only root can start a Docker engine\n' >&2 && return 1; }
  command -v dockerd >/dev/null || { printf 'no dockerd here: apt-get install docker.io\n' >&2 && return 1; }
  mkdir -p "$ENGINE"
  engine_settings >"$ENGINE/daemon.json"
  ENGINE_IS_OURS=yes
  # In a session of its own: a Ctrl-C in the terminal is for the tests.
  setsid dockerd --config-file "$ENGINE/daemon.json" --pidfile "$ENGINE/pid" >"$ENGINE/log" 2>&1 </dev/null &
  local _
  for _ in {1..150}; do
    engine_answers && return
    # The first tenth of a second is bash's, before dockerd has replaced it.
    sleep 0.2
    kill -0 $! 2>/dev/null || break
  done
  printf 'the Docker engine did not start; the end of %s/log says:\n' "$ENGINE" >&2
  tail -n 5 "$ENGINE/log" >&2
  return 1
}

# Stop the engine that start_engine started, and every container with it.
stop_engine() {
  local pid
  [[ ${ENGINE_IS_OURS:-} == yes && -f $ENGINE/pid ]] || return 0
  pid=$(<"$ENGINE/pid")
  kill "$pid" 2>/dev/null || return 0
  local _
  for _ in {1..100}; do
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  rm -rf "$ENGINE"
}
