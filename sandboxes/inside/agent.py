"""Runs one command, an agent, in namespaces of its own, from which one socket of the host can be reached.

The first stage is that of the sessions, ``launcher.enter``. Then pid 1, which is trusted, unpacks the agent's files,
passes connections to a port of the loopback interface on to the socket, starts the command without rights, and watches
over its time and memory. At the end it kills everything and packs the files of the working folder.
"""

import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import tarfile
import time
from contextlib import suppress
from typing import IO, Final, TypedDict

from agentrl.sandboxes.inside import kernel, launcher, processes, relay, rootfs, scratch, seccomp
from agentrl.sandboxes.inside.limits import Limits

_LOG: Final = "/dev/shm/agentrl.log"
_LOOPBACK_UP: Final = struct.pack("16sh", b"lo", 0x1 | 0x40)
_SET_FLAGS: Final = 0x8914
_GLANCE_S: Final = 0.05


class AgentConfig(TypedDict):
    """What to run; plain data, so that it can travel as JSON."""

    plan: rootfs.MountPlan
    """The file system."""
    command: list[str]
    """The words of the command."""
    env: dict[str, str]
    """Its environment variables, beside those of every program."""
    port: int
    """The port of the loopback interface behind which the socket is."""
    limits: dict[str, float]
    """``Limits`` as a dictionary."""
    seconds: float
    """Wall seconds until the command is ended."""


class Report(TypedDict):
    """How the command ended."""

    status: str
    """``exit``, ``killed`` by a signal, ``timeout``, ``memory``, or ``fault`` if it never began."""
    code: int
    """Its exit code, or the number of the signal."""
    output: str
    """The tail of what it has printed, or why it never began."""


def main() -> None:
    """Run a command.

    Reads its configuration, a line of JSON, and its files from standard input; writes a report, likewise a line, and
    the files to standard output.
    """
    config: AgentConfig = json.loads(sys.stdin.buffer.readline())
    zygote: launcher.ZygoteConfig = {"control": -1, "life": -1, "limits": {}, "preload": [], "users": 0}
    try:
        kernel.die_with_parent()
        launcher.enter({"plan": config["plan"], "zygote": zygote, "users": None})
        child = os.fork()
        if child == 0:
            kernel.die_with_parent()
            _report(_play(config), int(config["limits"]["tmp_bytes"]))
            os._exit(0)
    except Exception as error:
        _report({"status": "fault", "code": 0, "output": f"{type(error).__name__}: {error}"}, 0)
        os._exit(1)
    os.waitpid(child, 0)
    os._exit(0)


def _play(config: AgentConfig) -> Report:
    limits = Limits(**config["limits"])  # pyright: ignore[reportArgumentType]
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    scratch.mount(limits)
    # Nobody may look into pid 1, whose descriptors lead outside.
    kernel.set_dumpable(False)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, _LOOPBACK_UP + bytes(22))
    os.makedirs(relay.WORK)
    _unpack(sys.stdin.buffer, relay.WORK)
    listening = relay.listen(config["port"])
    if os.fork() == 0:
        relay.relay(listening)
    listening.close()
    # Without a name, under which the command could put something else.
    log = os.open(_LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.unlink(_LOG)
    command = os.fork()
    if command == 0:
        _become(config, limits, log)
    status, code = _watch(command, limits, config["seconds"])
    return {"status": status, "code": code, "output": _tail(log, limits.output_kept_bytes)}


def _unpack(stream: IO[bytes], folder: str) -> None:
    """Write the files of a tar into an empty folder.

    Raises:
        ValueError: it has something that is no regular file within the folder.
    """
    # Python has filters of extractall from 3.11.4 on. What makes no link needs none.
    with tarfile.open(fileobj=stream, mode="r|") as files:
        for member in files:
            file = files.extractfile(member) if member.isreg() else None
            if file is None or ".." in member.name.split("/") or member.name.startswith("/"):
                raise ValueError(f"{member.name!r} is no file within the agent's folder")
            path = os.path.join(folder, member.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as copy:
                shutil.copyfileobj(file, copy)
                os.fchmod(copy.fileno(), member.mode & 0o755)


def _become(config: AgentConfig, limits: Limits, log: int) -> None:
    """Become the command, without rights."""
    try:
        nothing = os.open("/dev/null", os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        os.setsid()
        os.chdir(relay.WORK)
        bounds = {
            resource.RLIMIT_NPROC: limits.processes,
            resource.RLIMIT_NOFILE: limits.open_files,
            resource.RLIMIT_FSIZE: limits.file_bytes,
            resource.RLIMIT_CORE: 0,
        }
        for kind, bound in bounds.items():
            resource.setrlimit(kind, (int(bound), int(bound)))
        kernel.drop_privileges()
        channel = limits.open_files + 1  # it has none
        seccomp.install(seccomp.assemble(kernel.MACHINE, channel, shared_files=False, see_locks=True))
        variables = {**launcher.environment(config["plan"]), "HOME": "/tmp", **config["env"]}
        os.execvpe(config["command"][0], config["command"], variables)
    except BaseException as error:
        os.write(2, f"{config['command'][0]} can't be started: {error}\n".encode())
    os._exit(127)


def _watch(command: int, limits: Limits, seconds: float) -> tuple[str, int]:
    """Wait for the command's end, or end it; return how it ended, and its exit code or signal."""
    deadline, ended, why = time.monotonic() + seconds, 0, ""
    while not why:
        # No child is left where the command has killed all others, and then ended.
        with suppress(ChildProcessError):
            pid = 1
            while pid:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == command:
                    ended, why = status, "killed" if os.WIFSIGNALED(status) else "exit"
        if not why and time.monotonic() > deadline:
            why = "timeout"
        if not why and processes.usage().rss > limits.memory_bytes:
            why = "memory"
        time.sleep(0 if why else _GLANCE_S)
    # Pid 1 itself is spared. Whoever forks meanwhile is met the next time.
    with suppress(ChildProcessError):
        while True:
            processes.signal_every(signal.SIGKILL)
            os.waitpid(-1, 0)
    return why, abs(os.waitstatus_to_exitcode(ended))


def _tail(log: int, length: int) -> str:
    return os.pread(log, length, max(0, os.fstat(log).st_size - length)).decode("utf-8", "replace")


def _report(report: Report, room: int) -> None:
    """Write how it ended, and the regular files of the working folder, as many as fit into ``room`` bytes."""
    out = sys.stdout.buffer
    out.write(json.dumps(report).encode() + b"\n")
    if report["status"] != "fault":
        # The command may have nested folders deeper than can be walked, or have put a link there.
        with tarfile.open(fileobj=out, mode="w|", dereference=True) as files, suppress(RecursionError):
            for folder, _, names in os.walk(relay.WORK) if not os.path.islink(relay.WORK) else ():
                for name in names:
                    room -= _pack(files, os.path.join(folder, name), room)
    out.flush()


def _pack(files: tarfile.TarFile, path: str, room: int) -> int:
    """Pack a file if it fits; return its size."""
    # The names are the agent's: no link is followed, and nothing but files is read. A file of holes has any size.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            info = files.gettarinfo(arcname=os.path.relpath(path, relay.WORK), fileobj=file)
            if info.isreg() and info.size <= room:
                files.addfile(info, file)
                return info.size
    return 0
