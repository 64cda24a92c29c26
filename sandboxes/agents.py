"""Runs an agent, a command that nobody has read, where it reaches one socket of the host and nothing else."""

import dataclasses
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Literal

from agentrl.sandboxes.base import Limits, SandboxError
from agentrl.sandboxes.host import requirements
from agentrl.sandboxes.host.zygote import start_inside
from agentrl.sandboxes.inside import agent, relay, rootfs
from agentrl.sandboxes.inside.limits import MIB

AGENT_LIMITS: Final = Limits(
    memory_bytes=2048 * MIB, processes=256, open_files=1024, file_bytes=256 * MIB, tmp_bytes=256 * MIB, tmp_inodes=65536
)
"""What an agent may use, unless something else is asked for."""
_GRACE_S: Final = 60.0
"""Seconds after its own limit in which a command must have been ended from inside."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """How an agent's command ended."""

    status: Literal["exit", "killed", "timeout", "memory"]
    """It ended itself, by a signal, or at a limit."""
    code: int
    """Its exit code, or the number of the signal; 0 at a limit."""
    output: str
    """The tail of standard output and standard error."""
    files: Mapping[str, bytes]
    """The regular files of its working folder, by their relative paths."""


class AgentProcess:
    """An agent's command that runs.

    Args:
        command: its words; the first is looked for in the folders of ``PATH`` inside.
        hole: the Unix socket that it may reach.
        port: of the loopback interface inside, behind which that socket is.
        files: contents of files in its working folder, by their relative paths.
        env: environment variables, beside those that every program has.
        packages: a folder of installed Python packages that it may import, such as the ``site-packages`` of a virtual
            environment; by default those of sandboxes.
        binds: folders of the host that it may read, and where it finds them.
        limits: what it may use; CPU time is not bounded.
        seconds: wall seconds until it is ended.

    Raises:
        SandboxUnavailable: this machine can't isolate programs; the message names the way out.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        hole: Path,
        port: int = 8000,
        files: Mapping[str, bytes] | None = None,
        env: Mapping[str, str] | None = None,
        packages: Path | None = None,
        binds: Mapping[str, str] | None = None,
        limits: Limits = AGENT_LIMITS,
        seconds: float = 600.0,
    ) -> None:
        requirements.check_kernel()
        self._seconds = seconds
        self._root = tempfile.TemporaryDirectory(prefix="agentrl-root-")
        os.chmod(self._root.name, 0o755)
        plan = rootfs.plan(self._root.name)
        if packages is not None:
            plan["binds"] = [pair for pair in plan["binds"] if not pair[1].startswith(f"{rootfs.SITE}/")]
            plan["binds"].append((str(packages.resolve()), rootfs.SITE))
        plan["binds"] += [(str(Path(source).resolve()), target) for source, target in (binds or {}).items()]
        plan["binds"].append((str(hole.resolve()), relay.HOLE))
        config: agent.AgentConfig = {
            "plan": plan,
            "command": [plan["python"] if word == "{python}" else word for word in command],
            "env": dict(env or {}),
            "port": port,
            "limits": dataclasses.asdict(limits),
            "seconds": seconds,
        }
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 wait() closes it
        self._process = start_inside("agent", streams=subprocess.PIPE, errors=self._errors)
        self._input = json.dumps(config).encode() + b"\n" + packed(files or {})

    def wait(self) -> AgentRun:
        """Wait for the command's end.

        Raises:
            SandboxUnavailable: this machine can't isolate programs.
            SandboxError: the sandbox failed, or was killed.
        """
        try:
            out, _ = self._process.communicate(self._input, self._seconds + _GRACE_S)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise SandboxError("an agent's command could not be ended from inside") from error
        finally:
            self._root.cleanup()
        line, _, left = out.partition(b"\n")
        self._errors.seek(0)
        errors = self._errors.read(4000).decode("utf-8", "replace").strip()
        self._errors.close()
        if not line:
            raise SandboxError(f"an agent's sandbox has died: {errors or 'it was killed'}")
        report: agent.Report = json.loads(line)
        if report["status"] == "fault":
            raise requirements.explain(report["output"])
        return AgentRun(
            status=report["status"],  # pyright: ignore[reportArgumentType]
            code=report["code"],
            output=report["output"],
            files=_unpacked(left),
        )

    def kill(self) -> None:
        """End the command and all that it has started; its files are lost."""
        with suppress(ProcessLookupError):
            self._process.kill()


def packed(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """Return a tar of files, by their relative paths."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _unpacked(tar: bytes) -> Mapping[str, bytes]:
    files = dict[str, bytes]()
    with tarfile.open(fileobj=io.BytesIO(tar), mode="r") as archive:
        for info in archive:
            if info.isreg() and (file := archive.extractfile(info)) is not None:
                files[info.name] = file.read()
    return files
