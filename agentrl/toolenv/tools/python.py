"""The ``python`` tool: one sandbox session per episode, which keeps its state between calls."""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from agentrl.errors import ConfigError, InfrastructureError
from agentrl.named import resolve
from agentrl.processes.per_process import PerProcess
from agentrl.sandboxes import BACKENDS, Counters, Result, Sandbox, SandboxError, Session, open_sandbox
from agentrl.sandboxes.remote.address import PREFIX, servers_of
from agentrl.toolenv.tools.function import ToolContext, ToolError, check_limits, cut_middle


class PythonTool:
    """Runs the model's Python and answers as a REPL would.

    The session is opened at the first call of an episode, so an episode without calls pays nothing.

    Args:
        timeout: seconds of CPU time per call.
        max_chars: characters of output that the model reads; a longer output is cut in the middle.
        packages: packages that the code may import beside the sandbox's usual ones.
        sandbox: the back end, ``"local"``, ``"docker"``, ``"remote:URL,URL"`` or ``"module:name"``; empty for that of
            the run.

    Raises:
        UnknownNameError: there is no such back end.
        ConfigError: a limit is too small, or the back end can't be imported.
    """

    name = "python"
    description = "Run Python code and read what it prints. Variables are kept between calls."

    def __init__(
        self, *, timeout: float = 5.0, max_chars: int = 1000, packages: Sequence[str] = (), sandbox: str = ""
    ) -> None:
        check_limits("the Python tool", timeout, max_chars)
        self.timeout = timeout
        self.max_chars = max_chars
        self.packages = packages
        self.sandbox = checked_backend(sandbox)
        self._seed = 0
        self._session: Session | None = None

    @property
    def parameters(self) -> Mapping[str, object]:
        """The JSON schema of the arguments."""
        code = {"type": "string", "description": "The value of its last line is shown, as in a REPL."}
        return {"type": "object", "properties": {"code": code}, "required": ["code"], "additionalProperties": False}

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        """Run ``arguments["code"]``; ``ctx`` is not used.

        Raises:
            ToolError: the code is missing, raised, ran too long or was stopped; the text says which.
            InfrastructureError: the sandbox failed.
        """
        code = arguments.get("code")
        if not isinstance(code, str) or set(arguments) != {"code"}:
            raise ToolError("python takes one argument, code, a string")
        try:
            if is_first_call := self._session is None:
                self._session = shared_sandbox(self.packages, self.sandbox).session(seed=self._seed)
            # The first call has no state to roll back to, so it needs no snapshot: a fresh session does as well.
            result = self._session.run(code, timeout=self.timeout, transaction=not is_first_call)
            # The variables are lost: the next call begins anew, in a session without the old files either.
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


_backend = "auto"


def use_backend(name: str) -> None:
    """Set the back end of this process's programs, where a tool or grader names none itself.

    Raises:
        UnknownNameError: there is no such back end.
        ConfigError: it can't be imported.
    """
    # One for the process, as its sandboxes are: environments that know nothing of back ends use it too.
    global _backend
    _backend = checked_backend(name)


def checked_backend(name: str) -> str:
    """Return the name of a back end, or the empty one, which stands for the process's.

    Raises:
        UnknownNameError: there is no such back end.
        ConfigError: it can't be imported, or names no servers.
    """
    if name.startswith(PREFIX):
        try:
            servers_of(name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    elif name:
        resolve("sandbox", dict.fromkeys(BACKENDS), name)
    return name


def _open(backend: str, packages: frozenset[str]) -> Sandbox:
    try:
        return open_sandbox(backend, packages=sorted(packages))
    except TypeError as error:
        raise ConfigError(f"sandbox {backend!r} can't be opened: {error}") from error


# Opening a sandbox is slow: all tools share one, and each episode has a session in it.
_sandboxes: PerProcess[Sandbox, str, frozenset[str]] = PerProcess(_open, close=lambda sandbox: sandbox.close())
close_shared_sandbox = _sandboxes.close
"""Close the process's sandboxes with every process in them; the next use opens a new one."""


def shared_sandbox(packages: Sequence[str] = (), backend: str = "") -> Sandbox:
    """Return the process's sandbox for these packages, which all tools with these packages share.

    A forked child has a sandbox of its own.

    Args:
        packages: packages that programs may import beside the usual ones.
        backend: the back end; empty for the process's, which ``env.sandbox`` chooses.

    Raises:
        SandboxUnavailable: no back end works on this machine, or a package can't be imported; the message says why.
        ConfigError: the back end is a function that returns no sandbox.
    """
    return _sandboxes.get(backend or _backend, frozenset(packages))


def open_sandboxes(tools: Iterable[object]) -> None:
    """Open the sandboxes that these tools will use, so that a machine without one is reported before anything else.

    Raises:
        SandboxUnavailable: no back end works on this machine, or a package can't be imported; the message says why.
        ConfigError: the back end is a function that returns no sandbox.
    """
    for tool in tools:
        if isinstance(tool, PythonTool):
            shared_sandbox(tool.packages, tool.sandbox)


def backend_of(tools: Iterable[object]) -> str:
    """Name the back end that runs the Python of these tools and its version; empty where none of them runs any.

    It opens the sandbox, which their first call would do else.

    Raises:
        ConfigError: the back end is a function that returns no sandbox.
    """
    tool = next((tool for tool in tools if isinstance(tool, PythonTool)), None)
    if tool is None:
        return ""
    try:
        sandbox = shared_sandbox(tool.packages, tool.sandbox)
    except SandboxError:  # the first call says why
        return "none"
    name = tool.sandbox or _backend
    # Where servers are changes nothing of what programs do.
    own = name if ":" in name and not name.startswith(PREFIX) else ""
    return " ".join(filter(None, [own, sandbox.backend, sandbox.version]))


def sandbox_counters() -> Counters | None:
    """Return the summed counters of this process's shared sandboxes; ``None`` while there is none."""
    counted = [sandbox.counters() for sandbox in _sandboxes.existing()]
    return functools.reduce(operator.add, counted) if counted else None
