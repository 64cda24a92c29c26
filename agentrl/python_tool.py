"""The ``python`` tool: one sandbox session per episode, its state kept between calls."""

import atexit
import os
import threading
from collections.abc import Mapping

from agentrl.errors import InfrastructureError
from agentrl.sandboxes import Counters, Result, Sandbox, SandboxError, Session, open_sandbox
from agentrl.tools import ToolContext, ToolError, cut_middle


class PythonTool:
    """Runs the model's Python and shows what a REPL would show.

    The session is opened at the first call of an episode, so an episode that never calls pays nothing.

    Args:
        timeout: seconds of CPU time per call.
        max_chars: characters of output the model gets to read; more is cut in the middle.
    """

    name = "python"
    description = "Run Python code and read what it prints. Variables are kept between calls."

    def __init__(self, *, timeout: float = 5.0, max_chars: int = 1000) -> None:
        self.timeout = timeout
        self.max_chars = max_chars
        self._seed = 0
        self._session: Session | None = None

    @property
    def parameters(self) -> Mapping[str, object]:
        """The JSON schema of the arguments."""
        code = {"type": "string", "description": "The value of its last line is shown, as in a REPL."}
        return {"type": "object", "properties": {"code": code}, "required": ["code"], "additionalProperties": False}

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        """Run ``arguments["code"]``; the episode it is called in makes no difference.

        Raises:
            ToolError: the code is missing, raised, ran too long or was stopped; the text says which.
            InfrastructureError: the sandbox failed.
        """
        code = arguments.get("code")
        if not isinstance(code, str) or set(arguments) != {"code"}:
            raise ToolError("python takes one argument, code, a string")
        try:
            first = self._session is None
            if self._session is None:
                self._session = shared_sandbox().session(seed=self._seed)
            # Before the first call there is no state worth a snapshot: a fresh session is the way back.
            result = self._session.run(code, timeout=self.timeout, transaction=not first)
            if result.state == "lost":
                self.close()
        except SandboxError as error:
            self.close()
            raise InfrastructureError(f"sandbox failed: {error}") from error
        text = cut_middle(_shown(result, self.timeout), self.max_chars)
        if result.status != "ok":
            raise ToolError(text)
        return text

    def open(self, seed: int) -> None:
        """Begin an episode: the next call gets a fresh session, seeded with ``seed``."""
        self.close()
        self._seed = seed % 2**31

    def close(self) -> None:
        """End the episode's session, if it has one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _shown(result: Result, timeout: float) -> str:
    parts = [result.stdout.rstrip("\n")]
    if result.status == "ok" and result.value is not None:
        parts.append(result.value)
    elif result.status == "error":
        parts.append(result.traceback.rstrip("\n") if result.traceback else str(result.exc_type))
    elif result.status != "ok":
        parts.append(_verdict(result, timeout))
    return "\n".join(part for part in parts if part) or "(no output)"


def _verdict(result: Result, timeout: float) -> str:
    reasons = {
        "exit": f"the program ended itself with exit code {result.exit_code}",
        "timeout": f"stopped: the code ran longer than {timeout:g} s",
        "memory": "stopped: the code used too much memory",
        "output_limit": "stopped: the code printed too much",
    }
    return f"({reasons.get(result.status, f'the program was stopped: {result.status}')})"


_lock = threading.Lock()
_shared: dict[int, Sandbox] = {}


def shared_sandbox() -> Sandbox:
    """The sandbox that all tools of this process share; a forked child gets one of its own.

    Raises:
        SandboxUnavailable: no back end works on this machine; the message says what stands in the way.
    """
    with _lock:
        if os.getpid() not in _shared:
            _shared.clear()
            _shared[os.getpid()] = open_sandbox()
            atexit.register(close_shared_sandbox)
        return _shared[os.getpid()]


def sandbox_counters() -> Counters | None:
    """What this process's shared sandbox has done so far; ``None`` while there is none."""
    with _lock:
        sandbox = _shared.get(os.getpid())
    return None if sandbox is None else sandbox.counters()


def close_shared_sandbox() -> None:
    """Close the process's sandbox with every process in it; the next use opens a new one."""
    with _lock:
        sandbox = _shared.pop(os.getpid(), None)
    if sandbox is not None:
        sandbox.close()
