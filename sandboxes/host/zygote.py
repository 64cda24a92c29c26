"""The host's handle of a zygote: starts the launcher, waits for the zygote, has it fork sessions."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Final

from agentrl.sandboxes.base import Limits, SandboxError
from agentrl.sandboxes.host import requirements, users
from agentrl.sandboxes.inside import launcher, rootfs, wire

_READY_S: Final = 120.0
_CLOSE_S: Final = 10.0
_PATIENCE_S: Final = 20.0


class Zygote:
    """A running launcher and zygote; every method may be called from any thread."""

    def __init__(self, limits: Limits, preload: tuple[str, ...], packages: Sequence[str] = ()) -> None:
        """Start it and wait until it has imported everything.

        Args:
            limits: What each session may use.
            preload: Modules to import besides the standard library; must be installed.
            packages: Packages that programs may import beside the usual ones.

        Raises:
            SandboxUnavailable: This machine forbids it; the message names the way out.
        """
        requirements.check_kernel()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life = os.pidfd_open(os.getpid())
        root = tempfile.mkdtemp(prefix="agentrl-root-")
        os.chmod(root, 0o755)
        with tempfile.TemporaryFile() as errors, theirs:
            try:
                self._process = _start(limits, preload, rootfs.plan(root, packages), (theirs.fileno(), life), errors)
                theirs.close()
                self._await_ready(errors)
            finally:
                os.close(life)
                os.rmdir(root)

    def _await_ready(self, errors: IO[bytes]) -> None:
        self._control.settimeout(_READY_S)
        try:
            answer = wire.receive(self._control, wire.Decoder(wire.MAX_ORDER))
        except (OSError, wire.WireError) as error:
            self.close()
            raise SandboxError(f"the zygote did not start: {error}") from error
        self._control.settimeout(None)
        if answer is None or answer["t"] != "ready":
            self.close()
            errors.seek(0)
            why = str(answer["why"]) if answer else errors.read().decode("utf-8", "replace").strip()[-2000:]
            raise requirements.explain(why)
        self.separates_users = bool(answer["users"])
        """Each session has a user id of its own."""

    def open(self, descriptors: tuple[int, int, int]) -> None:
        """Have the zygote fork a session on these descriptors: channel, standard output, standard error.

        Raises:
            SandboxError: The zygote is gone, or this user has too many descriptors under way.
        """
        try:
            with self._lock:
                wire.send_with(self._control, b"session", descriptors, _PATIENCE_S)
        except OSError as error:
            raise SandboxError(f"no session can be asked for: {error}") from error

    def alive(self) -> bool:
        """Return whether the zygote still runs."""
        # The kernel closes a process's descriptors before it ends its namespace, and long before its parent can wait
        # for it: so a thread that saw a session die with the zygote finds the socket closed.
        try:
            return self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """End every session and wait until all their processes are gone."""
        with self._lock:
            self._control.close()
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _start(
    limits: Limits, preload: tuple[str, ...], plan: rootfs.MountPlan, passed: tuple[int, int], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    zygote: launcher.ZygoteConfig = {
        "control": passed[0],
        "life": passed[1],
        "limits": dataclasses.asdict(limits),
        "preload": list(preload),
        "users": 0,
    }
    config: launcher.LauncherConfig = {"plan": plan, "zygote": zygote, "users": users.of_sessions(plan)}
    return start_inside("launcher", json.dumps(config), streams=subprocess.DEVNULL, errors=errors, passed=passed)


def start_inside(
    module: str, *arguments: str, streams: int, errors: IO[bytes], passed: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a module of ``inside/`` in an interpreter that knows nothing of this process.

    Args:
        module: Its name.
        arguments: Its arguments.
        streams: Standard input and output, as ``subprocess`` takes them.
        errors: Standard error.
        passed: Further descriptors that it keeps.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    boot = launcher.BOOT.format(folder=package, module=module)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", boot, *arguments],
        stdin=streams,
        stdout=streams,
        stderr=errors,
        pass_fds=passed,
        env={},
        cwd="/",
        # A Ctrl-C in the terminal is for the host alone, which closes the sandbox or keeps it.
        start_new_session=True,
    )
