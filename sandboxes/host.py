"""The host's side of a local sandbox: starts the launcher, waits for the zygote, asks it for sessions."""

import dataclasses
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO, Final, cast

from agentrl.sandboxes import kernel, launcher, rootfs, wire
from agentrl.sandboxes.base import Limits, SandboxError, SandboxUnavailable

OLDEST_KERNEL: Final = (5, 14)
PRELOADED: Final = ("numpy", "sympy")
_READY_S: Final = 120.0
_CLOSE_S: Final = 10.0

# Settings of the kernel that forbid what the sandbox is made of: file, forbidding value, the way out.
_OBSTACLES: Final = (
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for this Python with 'userns,'",
    ),
)


class Zygote:
    """A running launcher and zygote; every method may be called from any thread."""

    def __init__(self, limits: Limits) -> None:
        """Start it and wait until it has imported everything.

        Raises:
            SandboxUnavailable: This machine forbids it; the message names the way out.
        """
        _check_kernel()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life = os.pidfd_open(os.getpid())
        root = tempfile.mkdtemp(prefix="agentrl-root-")
        os.chmod(root, 0o755)
        with tempfile.TemporaryFile() as errors, theirs:
            try:
                self._process = _start(limits, root, (theirs.fileno(), life), errors)
                theirs.close()
                self.modules = self._await_ready(errors)
            finally:
                os.close(life)
                os.rmdir(root)

    def _await_ready(self, errors: IO[bytes]) -> list[str]:
        self._control.settimeout(_READY_S)
        try:
            answer = wire.receive(self._control, wire.Frames(wire.MAX_ORDER))
        except (OSError, wire.WireError) as error:
            self.close()
            raise SandboxError(f"the zygote did not start: {error}") from error
        self._control.settimeout(None)
        if answer is None or answer["t"] != "ready":
            self.close()
            errors.seek(0)
            why = str(answer["why"]) if answer else errors.read().decode("utf-8", "replace").strip()[-2000:]
            raise SandboxUnavailable(_explain(why))
        return [str(name) for name in cast(list[object], answer["modules"])]

    def open(self, channel: socket.socket, out: int, err: int) -> None:
        """Have a session made that talks over these descriptors.

        Raises:
            SandboxError: The zygote is gone.
        """
        try:
            with self._lock:
                socket.send_fds(self._control, [b"session"], [channel.fileno(), out, err])
        except OSError as error:
            raise SandboxError(f"the zygote is gone: {error}") from error

    def close(self) -> None:
        """End every session and wait until all their processes are gone."""
        with self._lock:
            self._control.close()
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _start(limits: Limits, root: str, passed: tuple[int, int], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    orders: launcher.Orders = {
        "control": passed[0],
        "life": passed[1],
        "limits": dataclasses.asdict(limits),
        "preload": [name for name in PRELOADED if importlib.util.find_spec(name) is not None],
    }
    config: launcher.Config = {"plan": rootfs.plan(root), "orders": orders}
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    boot = launcher.BOOT.format(folder=package, module="launcher")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", boot, json.dumps(config)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        pass_fds=passed,
        env={},
        cwd="/",
        # A Ctrl-C in the terminal is for the host; the sandbox ends with it, or goes on with it.
        start_new_session=True,
    )


def _check_kernel() -> None:
    if not kernel.supported():
        raise SandboxUnavailable(f"the local back end needs Linux on x86_64 or aarch64, not {kernel.MACHINE}")
    version = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if version < OLDEST_KERNEL:
        raise SandboxUnavailable(
            f"the local back end needs Linux 5.14, which counts processes per sandbox, not {version}"
        )


def _explain(why: str) -> str:
    """Say what stands in the way and how to remove it."""
    for path, forbidding, remedy in _OBSTACLES:
        if os.path.exists(path):
            with open(path) as file:
                if file.read().strip() == forbidding:
                    return (
                        f"this kernel forbids user namespaces ({path} is {forbidding}): run as root `{remedy}` ({why})"
                    )
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    if status["Seccomp"].strip() != "0":
        return (
            "an outer sandbox or container forbids namespaces by seccomp: start it with "
            f"`--security-opt seccomp=unconfined --security-opt systempaths=unconfined` ({why})"
        )
    if why.startswith("mount(proc"):
        return f"an outer container masks parts of /proc: start it with `--security-opt systempaths=unconfined` ({why})"
    return f"the local sandbox could not be set up: {why}"
