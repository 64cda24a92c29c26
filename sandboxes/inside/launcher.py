"""The first stage of a local sandbox: enters the namespaces and starts the zygote there.

Started as a process of its own with an empty environment. Real root builds the file system while it is root and then
becomes an ordinary user, for whom the kernel's limits hold; an ordinary user does both in a user namespace. What is
executed then, inside, is the zygote.
"""

import json
import os
import signal
import socket
import sys
from typing import Final, TypedDict

from agentrl.sandboxes.inside import kernel, rootfs, wire

ROOT_BECOMES: Final = 64_999
"""The user and group that real root turns into."""
INSIDE: Final = 1000
"""The user and group that programs see themselves as."""
BOOT: Final = (
    "import sys,types;a,s=map(types.ModuleType,('agentrl','agentrl.sandboxes'));a.__path__,s.__path__=[],[{folder!r}];"
    "sys.modules.update({{a.__name__:a,s.__name__:s}});from agentrl.sandboxes.inside.{module} import main;main()"
)
"""Starts a module of this folder, which ``folder`` holds, without running what the packages around it import."""


class ZygoteConfig(TypedDict):
    """Settings of the zygote: nothing about the host, since every program can read its memory."""

    control: int
    """Descriptor of the socket to the host."""
    life: int
    """Descriptor that becomes readable when the host process has ended."""
    limits: dict[str, float]
    """``Limits`` as a dictionary."""
    preload: list[str]
    """Modules to import before the first session."""


class LauncherConfig(TypedDict):
    """Settings of the launcher; plain data, so that it can travel as JSON."""

    plan: rootfs.Plan
    """The file system."""
    zygote: ZygoteConfig
    """Passed on to the zygote."""


def fixed_environment(python: str) -> dict[str, str]:
    """Return the environment variables of programs that are the same on every machine, but for the interpreter."""
    folders = [os.path.dirname(python), "/usr/local/bin", "/usr/bin", "/bin"]
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
    return {
        "PATH": ":".join(dict.fromkeys(folders)),
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": rootfs.SITE,
        # Else each thread reserves 128 MiB of address space, and eight honest threads are beyond the memory limit.
        "MALLOC_ARENA_MAX": "1",
        **threads,
    }


def environment(plan: rootfs.Plan) -> dict[str, str]:
    """Return the environment variables of the zygote and of every program."""
    libraries = {"LD_LIBRARY_PATH": plan["libraries"]} if plan["libraries"] else {}
    return {**fixed_environment(plan["python"]), **libraries}


def _enter(plan: rootfs.Plan) -> None:
    # The order differs: root must mount before it gives up its rights, another user gets them with the namespace.
    if os.geteuid() == 0:
        kernel.unshare(kernel.NEWNS)
        rootfs.build(plan)
        os.setgroups([])
        os.setresgid(ROOT_BECOMES, ROOT_BECOMES, ROOT_BECOMES)
        os.setresuid(ROOT_BECOMES, ROOT_BECOMES, ROOT_BECOMES)
        # Changing the user made /proc/self root's, and with it the map that is to be written.
        kernel.set_dumpable(True)
        _fresh_namespaces()
    else:
        _fresh_namespaces()
        rootfs.build(plan)


def _fresh_namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NEW_ALL)
    kernel.write_maps(INSIDE, uid, gid)


def _become_zygote(config: LauncherConfig) -> None:
    # Where the launcher is killed, nobody else would end the zygote.
    kernel.die_with_parent()
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    zygote = config["zygote"]
    for descriptor in (zygote["control"], zygote["life"]):
        os.set_inheritable(descriptor, True)
    python = config["plan"]["python"]
    # A fresh interpreter: a fork of the launcher would hold memory that names folders of the host.
    boot = BOOT.format(folder=rootfs.RUNNER, module="zygote")
    arguments = [python, "-s", "-S", "-P", "-c", boot, json.dumps(zygote)]
    os.execve(python, arguments, environment(config["plan"]))


def main() -> None:
    """Build the sandbox, start the zygote as its pid 1 and wait until that has ended."""
    config: LauncherConfig = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(config["zygote"]["control"]))
    child = 0
    try:
        _enter(config["plan"])
        child = os.fork()
        if child == 0:
            _become_zygote(config)
    except OSError as error:
        control.sendall(wire.pack({"t": "fault", "why": str(error), "errno": error.errno}))
        os._exit(1)
    # Only the zygote keeps them now: the host sees it end by the closed socket.
    control.close()
    os.close(config["zygote"]["control"])
    os.close(config["zygote"]["life"])
    # It must outlive the zygote, whose end the host waits for by waiting for this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.waitpid(child, 0)
    os._exit(0)
