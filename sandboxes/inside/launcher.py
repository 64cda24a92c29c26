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
FIRST_USER: Final = 2000
"""The first of the sessions' own users and groups, as the zygote sees them."""
BOOT: Final = (
    "import sys,types;a,s=map(types.ModuleType,('agentrl','agentrl.sandboxes'));a.__path__,s.__path__=[],[{folder!r}];"
    "sys.modules.update({{a.__name__:a,s.__name__:s}});from agentrl.sandboxes.inside.{module} import main;main()"
)
"""Starts a module of this folder, which ``folder`` holds, without running what the packages around it import."""


class Users(TypedDict):
    """Users and groups of the host, of which each session gets one: the kernel counts much by user."""

    uid: int
    """The first user."""
    gid: int
    """The first group."""
    count: int
    """How many there are of each."""


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
    users: int
    """Users that sessions may have; 0 where all sessions have the zygote's."""


class LauncherConfig(TypedDict):
    """Settings of the launcher; plain data, so that it can travel as JSON."""

    plan: rootfs.MountPlan
    """The file system."""
    zygote: ZygoteConfig
    """Passed on to the zygote."""
    users: Users | None
    """Users for the sessions, where the host has any."""


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


def environment(plan: rootfs.MountPlan) -> dict[str, str]:
    """Return the environment variables of the zygote and of every program."""
    libraries = {"LD_LIBRARY_PATH": plan["libraries"]} if plan["libraries"] else {}
    return {**fixed_environment(plan["python"]), **libraries}


def enter(config: LauncherConfig) -> None:
    """Enter fresh namespaces, with the file system of the plan.

    Raises:
        OSError: The kernel refused.
    """
    plan = config["plan"]
    # The order differs: root must mount before it gives up its rights, another user gets them with the namespace.
    if os.geteuid() == 0:
        kernel.unshare(kernel.NEWNS)
        rootfs.build(plan)
        mapper = _fork_mapper(config["users"], ROOT_BECOMES, ROOT_BECOMES)
        os.setgroups([])
        os.setresgid(ROOT_BECOMES, ROOT_BECOMES, ROOT_BECOMES)
        os.setresuid(ROOT_BECOMES, ROOT_BECOMES, ROOT_BECOMES)
        # Changing the user made /proc/self root's, and with it the map that is to be written.
        kernel.set_dumpable(True)
        _fresh_namespaces(config, mapper)
    else:
        _fresh_namespaces(config, _fork_mapper(config["users"], os.geteuid(), os.getegid()))
        rootfs.build(plan)


def _fresh_namespaces(config: LauncherConfig, mapper: tuple[int, int] | None) -> None:
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NEW_ALL)
    if mapper is not None:
        process, order = mapper
        os.write(order, b"x")
        os.close(order)
        if os.waitpid(process, 0)[1] == 0 and config["users"] is not None:
            config["zygote"]["users"] = config["users"]["count"]
            return
    kernel.write_maps(INSIDE, uid, gid)


def _fork_mapper(users: Users | None, uid: int, gid: int) -> tuple[int, int] | None:
    """Fork a process that will map ids for this one, outside of the namespaces that this one is about to enter.

    Args:
        users: To be mapped beside this process's own.
        uid: This process's user by then.
        gid: And its group.

    Returns:
        The process and the descriptor that orders it to begin; ``None`` where there are no users to map.
    """
    if users is None:
        return None
    launcher, (reader, order) = os.getpid(), os.pipe()
    process = os.fork()
    if process:
        os.close(reader)
        return process, order
    try:
        os.close(order)
        # Nothing comes where the launcher has ended.
        if os.read(reader, 1):
            _map_ids(launcher, "uid", [INSIDE, uid, 1, FIRST_USER, users["uid"], users["count"]])
            _map_ids(launcher, "gid", [INSIDE, gid, 1, FIRST_USER, users["gid"], users["count"]])
            os._exit(0)
    finally:
        os._exit(1)  # the sessions share one user then


def _map_ids(process: int, kind: str, numbers: list[int]) -> None:
    if os.geteuid() == 0:
        with open(f"/proc/{process}/{kind}_map", "w") as file:
            file.write("{} {} {}\n{} {} {}\n".format(*numbers))
        return
    # A program with the right to map the ids that /etc/subuid and /etc/subgid grant this user.
    name = f"new{kind}map"
    if os.waitpid(os.posix_spawnp(name, [name, str(process), *map(str, numbers)], {}), 0)[1]:
        raise OSError(f"{name} refused")


def _become_zygote(config: LauncherConfig) -> None:
    # Where the launcher is killed, nobody else would end the zygote.
    kernel.die_with_parent()
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    zygote = config["zygote"]
    if zygote["users"]:
        # To make each session's first process another user's.
        kernel.keep_capabilities(kernel.CAP_SETGID, kernel.CAP_SETUID)
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
        enter(config)
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
