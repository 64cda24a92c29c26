"""The ``python`` tool: one sandbox session per episode, its state kept between calls."""

import atexit
import functools
import operator
import os
import threading
from collections.abc import Mapping, Sequence

from agentrl.errors import InfrastructureError
from agentrl.sandboxes import Counters, Result, Sandbox, SandboxError, Session, open_sandbox
from agentrl.tools import ToolContext, ToolError, cut_middle


class PythonTool:
    """Runs the model's Python and shows what a REPL would show.

    The session is opened at the first call of an episode, so an episode that never calls pays nothing.

    Args:
        timeout: seconds of CPU time per call.
        max_chars: characters of output the model gets to read; more is cut in the middle.
        packages: packages that the code may import beside the sandbox's usual ones.
    """

    name = "python"
    description = "Run Python code and read what it prints. Variables are kept between calls."

    def __init__(self, *, timeout: float = 5.0, max_chars: int = 1000, packages: Sequence[str] = ()) -> None:
        self.timeout = timeout
        self.max_chars = max_chars
        self.packages = packages
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
                self._session = shared_sandbox(self.packages).session(seed=self._seed)
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
_shared: dict[tuple[int, frozenset[str]], Sandbox] = {}


def shared_sandbox(packages: Sequence[str] = ()) -> Sandbox:
    """The sandbox that all tools of this process share that name the same packages; a forked child gets its own.

    Args:
        packages: packages that programs may import beside the usual ones.

    Raises:
        SandboxUnavailable: no back end works on this machine, or a package can't be imported; the message says why.
    """
    key = os.getpid(), frozenset(packages)
    with _lock:
        for inherited in [old for old in _shared if old[0] != key[0]]:
            del _shared[inherited]
        if key not in _shared:
            _shared[key] = open_sandbox(packages=sorted(key[1]))
            atexit.register(close_shared_sandbox)
        return _shared[key]


def sandbox_counters() -> Counters | None:
    """What this process's shared sandboxes have done so far; ``None`` while there is none."""
    with _lock:
        counted = [sandbox.counters() for (pid, _), sandbox in _shared.items() if pid == os.getpid()]
    return functools.reduce(operator.add, counted) if counted else None


def close_shared_sandbox() -> None:
    """Close the process's sandboxes with every process in them; the next use opens a new one."""
    with _lock:
        sandboxes = [_shared.pop(key) for key in [*_shared] if key[0] == os.getpid()]
    for sandbox in sandboxes:
        sandbox.close()
