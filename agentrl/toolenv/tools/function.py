"""Tools: :func:`tool` makes a typed function a JSON schema with validated arguments."""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, overload

import pydantic_core

from agentrl.errors import ConfigError, EnvContractError, InfrastructureError
from agentrl.sandboxes import SandboxError
from agentrl.toolenv.tools.context import ToolContext, ToolError
from agentrl.toolenv.tools.schema import Signature, read_signature
from agentrl.toolenv.tools.timed import Overrun, ToolThread, call_async

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""A name that every dialect can write, of a tool or of a dialect."""
MIN_CHARS = 60
"""The smallest limit of output: the note about the skipped characters needs most of it."""


class BadArgumentsError(ToolError):
    """The arguments of a call do not fit the tool's schema."""


class Tool(Protocol):
    """The interface of whatever an agent can call."""

    @property
    def name(self) -> str:
        """The name that the model calls."""
        ...

    @property
    def description(self) -> str:
        """One or two sentences for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, object]:
        """The JSON schema of the arguments."""
        ...

    def call(self, arguments: Mapping[str, object], ctx: ToolContext) -> str:
        """Run the tool.

        Args:
            arguments: as the model wrote them, not validated.
            ctx: the episode that it is called in.

        Raises:
            ToolError: bad arguments or a failure inside the tool, in words for the model.
            InfrastructureError: the tool's sandbox or server failed.
        """
        ...

    def open(self, seed: int) -> None:
        """Begin an episode: forget everything of the one before."""
        ...

    def close(self) -> None:
        """Release whatever the episode holds."""
        ...


class FunctionTool:
    """A tool made from a typed function by :func:`tool`; calling it calls the function.

    It keeps no state, so environments may share one. Defined in a class it is a method: ``self.lookup`` is the tool of
    that instance.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *,
        name: str | None = None,
        timeout: float | None = 10.0,
        max_chars: int = 2000,
    ) -> None:
        if not inspect.isroutine(function):
            raise EnvContractError(f"a tool is made from a function, and {function!r} is none")
        self.name = function.__name__ if name is None else name
        if not NAME.fullmatch(self.name):
            raise EnvContractError(
                f"a tool can't be called {self.name!r}: give it a name of letters, digits, _ and -, as in @tool(name=…)"
            )
        check_limits(f"tool {self.name!r}", timeout, max_chars)
        self.timeout = timeout
        self.max_chars = max_chars
        self._function = function
        self._owner: object = None
        _signature_of(function)  # a wrong signature is an error now, where it was written

    @property
    def module(self) -> str:
        """The name of the module that has the function."""
        return self._function.__module__

    @property
    def description(self) -> str:
        """The docstring's first paragraph."""
        return self._signature.description

    @property
    def parameters(self) -> Mapping[str, object]:
        """The JSON schema of the arguments."""
        return self._signature.schema

    @property
    def is_method(self) -> bool:
        """True if it is a method that is not bound to an instance yet."""
        return self._signature.is_method and self._owner is None

    @property
    def _signature(self) -> Signature:
        return _signature_of(self._function)

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        """Validate ``arguments`` and run the function.

        When a function overruns its time limit, the model gets an answer, but a Python thread can't be killed: the
        function runs on in the background and may still write to ``ctx.state``. An async function is cancelled.

        Args:
            arguments: as the model wrote them.
            ctx: the episode; only a function with a ``ToolContext`` parameter needs it.

        Raises:
            ToolError: the arguments do not fit the schema, the function raised, took too long, or returned something
                that is no text and can't be written as JSON.
            InfrastructureError: a sandbox or server that the function uses failed.
            EnvContractError: the function needs the episode or the instance, and there is none.
        """
        signature = self._signature
        if self.is_method:
            raise EnvContractError(f"tool {self.name!r} is a method: list it as self.{self.name} in __init__")
        if signature.hidden is not None and ctx is None:
            raise EnvContractError(f"tool {self.name!r} needs the episode: call it with a ToolContext")
        try:
            values = signature.values(arguments)
        except ValueError as error:
            raise BadArgumentsError(f"bad arguments for {self.name}: {error}") from error
        if signature.hidden is not None:
            values[signature.hidden] = ctx
        run = functools.partial(self, **values)
        if inspect.iscoroutinefunction(self._function):
            call = call_async(run, self.timeout)
        else:
            # In the episode's own thread, where earlier calls may have opened what this one uses.
            call = (ToolThread() if ctx is None else ctx.thread).call(run, self.timeout)
        error = call.exception()
        if error is None:
            return cut_middle(self._text(call.result()), self.max_chars)
        if isinstance(error, InfrastructureError):
            raise error
        raise self._failure(error) from error

    def open(self, seed: int) -> None:
        """Do nothing: a function keeps no state."""

    def close(self) -> None:
        """Do nothing: a function holds nothing."""

    # Any: the function's own result, which ``await`` takes where it is async.
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function itself, without checking arguments or result."""
        return self._function(*args, **kwargs) if self._owner is None else self._function(self._owner, *args, **kwargs)

    def __get__(self, instance: object, owner: type) -> "FunctionTool":
        if instance is None or not self.is_method:
            return self
        # A copy: the tool in the class stays unbound for the other instances.
        bound = copy.copy(self)
        bound._owner = instance
        return bound

    def _failure(self, error: BaseException) -> Exception:
        """Return the exception to raise for ``error``: a sandbox's fault, or anything else in words for the model."""
        if isinstance(error, Overrun):
            return ToolError(f"stopped: {self.name} ran longer than {self.timeout:g} s")
        if isinstance(error, SandboxError):
            return InfrastructureError(f"sandbox failed: {error}")
        text = shown(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {shown(error)}"
        return ToolError(cut_middle(text, self.max_chars))

    def _text(self, value: object) -> str:
        if isinstance(value, str):
            return value
        try:
            return pydantic_core.to_json(value).decode()
        except ValueError as error:
            raise ToolError(f"{self.name} gave a {type(value).__name__}, which can't be written as JSON") from error


# Cached by function: every instance copies its tools, and building the pydantic model is slow.
@functools.lru_cache(maxsize=1024)
def _signature_of(function: Callable[..., object]) -> Signature:
    return read_signature(function, hidden=ToolContext)


@overload
def tool(function: Callable[..., object], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, timeout: float | None = 10.0, max_chars: int = 2000
) -> Callable[[Callable[..., object]], FunctionTool]: ...
def tool(
    function: Callable[..., object] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float | None = 10.0,
    max_chars: int = 2000,
) -> FunctionTool | Callable[[Callable[..., object]], FunctionTool]:
    """Make a function a tool that the model can call: write ``@tool`` or ``@tool(timeout=60)`` above it.

    The model reads the function's name, the first paragraph of its docstring, and the parameters with their type hints
    and ``Args:`` descriptions. The function's result goes back to the model: a text as it is, anything else as JSON. If
    the function raises :class:`ToolError` or any other exception, the model reads the message and can try again.

    Example:
        >>> @tool
        ... def convert(amount: float, currency: str = "EUR") -> str:
        ...     "Convert US dollars to another currency."
        ...     if currency not in RATES:
        ...         raise ToolError(f"no rate for {currency}: use {', '.join(RATES)}")
        ...     return f"{amount * RATES[currency]:.2f} {currency}"
        >>> RATES = {"EUR": 0.9, "JPY": 150.0}
        >>> convert.call({"amount": "20"})  # a model's text becomes the number that the type hint asks for
        '18.00 EUR'

    A parameter with the type hint :class:`ToolContext` is hidden from the model. It receives the task, a seeded random
    generator, and ``state``, a dict in which tools keep things until the episode ends.

    Functions may be sync or async. All sync functions of an episode run in one thread, so a tool can use what another
    one has opened, such as a database connection. After a call has overrun, later ones run in a new thread. All async
    functions and MCP sessions of a process share one event loop: an async function that blocks delays them all.

    Args:
        function: the function.
        name: the name that the model calls; the function's own by default.
        timeout: seconds per call; None for no limit. At the limit the model reads that the call was stopped. An async
            function is cancelled; a sync one runs on in the background, since a Python thread can't be killed.
        max_chars: characters of the answer; a longer one is cut in the middle.

    Raises:
        EnvContractError: a parameter has no type hint or one that JSON can't express, is positional-only, or is
            ``*args``/``**kwargs``; or the name is not made of letters, digits, _ and -.
        ConfigError: a limit is too small.
    """
    make = functools.partial(FunctionTool, name=name, timeout=timeout, max_chars=max_chars)
    return make if function is None else make(function)


def check_limits(tool_: str, timeout: float | None, max_chars: int) -> None:
    """Check the limits of a tool's calls.

    Raises:
        ConfigError: one is too small.
    """
    if (timeout is not None and not timeout > 0) or max_chars < MIN_CHARS:
        raise ConfigError(
            f"{tool_} has timeout={timeout} and max_chars={max_chars}: use more than 0 seconds and at least "
            f"{MIN_CHARS} characters"
        )


def cut_middle(text: str, limit: int) -> str:
    """Cut the middle out of ``text`` so that at most ``limit`` characters remain; ``limit`` is at least 60."""
    if len(text) <= limit:
        return text
    keep = max(limit - 40, 2)  # the note has 27 characters and a number
    note = f"\n… {len(text) - keep} characters left out …\n"
    return text[: keep - keep // 2] + note + text[len(text) - keep // 2 :]


def shown(value: object, write: Callable[[object], str] = str) -> str:
    """Write ``value`` by ``str`` or ``repr``; somebody else's class may raise there, so a fallback replaces it."""
    try:
        return write(value)
    except Exception:
        return f"(a {type(value).__name__} that can't be shown)"
