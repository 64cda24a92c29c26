"""Checks on what an environment's own code returns or raises: each fault becomes a sentence that names its source."""

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast, get_args

from agentrl.errors import AgentRLError, ConfigError, EnvContractError, InfrastructureError, nearest
from agentrl.sandboxes import SandboxError
from agentrl.toolenv.tasks import TaskList, TaskSet
from agentrl.toolenv.tools.function import FunctionTool, Tool, cut_middle, shown
from agentrl.types import Message, Role, Task

_T = TypeVar("_T")
_TOOL_PARTS = ("name", "description", "parameters", "call", "open", "close")


def ask(
    source: str,
    function: Callable[[], _T],
    task: Task | None = None,
    *,
    passing: tuple[type[BaseException], ...] = (AgentRLError,),
) -> _T:
    """Call the environment's own code, and turn what it raises into an error that names the source.

    Args:
        source: the class and its method, such as ``"Trivia.reward"``.
        function: makes the call.
        task: the task that is played, if there is one.
        passing: exceptions that are raised as they are.

    Raises:
        EnvContractError: the call raised something else, or returned a coroutine.
        InfrastructureError: a sandbox failed.
    """
    try:
        result = function()
    except passing:
        raise
    except SandboxError as error:
        raise InfrastructureError(f"sandbox failed: {error}") from error
    except BaseException as error:  # whatever the environment's author did not think of, sys.exit() included
        if is_ctrl_c(error):
            raise
        where = "" if task is None else f" on task {task.id!r}"
        raise EnvContractError(f"{source} raised {shown(error, repr)}{where}: correct it there") from error
    if inspect.iscoroutine(result):
        result.close()  # else Python warns that it was never awaited
        raise EnvContractError(f"{source} is async, and nobody awaits it: write def; only tools may be async")
    return result


def check_arguments(kind: type, options: Mapping[str, object]) -> None:
    """Check that a class takes the arguments that an instance is to be made with.

    Raises:
        ConfigError: the class does not take one of them.
    """
    parameters = inspect.signature(kind.__init__).parameters
    if "render_mode" in options and "render_mode" not in parameters:
        raise ConfigError(f"{kind.__name__} draws nothing: leave render_mode out, and read env.episode.messages")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # it may hand anything on to its base
    for name in options:
        if name not in parameters:
            # split is set by whoever plays.
            known_names = parameters.keys() - {"self", "split"}
            raise ConfigError(f"{kind.__name__}: it has no argument {name!r}; {nearest(name, known_names)}")


def writable(text: str) -> str:
    """Replace lone surrogates, which a model can spell in JSON but UTF-8 can't encode."""
    # str.encode, not text.encode: a subclass of str may override it.
    return str.encode(text, "utf-8", errors="replace").decode("utf-8")


def is_ctrl_c(error: BaseException) -> bool:
    """Return True if ``error`` is a user's Ctrl-C.

    Python raises that in the main thread only; in another thread, somebody's code has raised it.
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def gave(source: str, result: object, remedy: str) -> EnvContractError:
    """Make the error which says that ``source`` returned a wrong result, and how to correct it."""
    return EnvContractError(f"{source} gave {cut_middle(shown(result, repr), 100)} ({type(result).__name__}): {remedy}")


def as_task_set(source: str, result: object) -> TaskSet:
    """Return ``result`` as a task set; a list of tasks becomes one.

    Raises:
        EnvContractError: it is neither, it is empty, or two tasks share an id.
    """
    if isinstance(result, TaskSet):
        return result
    tasks = _items(source, result, Task, "return a list of Task, or a TaskSet")
    try:
        return TaskList(tasks)
    except EnvContractError as error:
        raise EnvContractError(f"{source}: {error}") from error


def as_answer(source: str, result: object) -> str | None:
    """Return ``result`` as the text of an answer, or None.

    Raises:
        EnvContractError: it is something else.
    """
    if result is None or isinstance(result, str):
        return result
    raise gave(source, result, "return the answer as text, or None where answers can't be compared")


def as_parts(source: str, result: object, weights: Mapping[str, float]) -> Mapping[str, float]:
    """Return the parts of a reward as floats.

    Raises:
        EnvContractError: they are no mapping from names to numbers, or a part has no weight.
    """
    if not isinstance(result, Mapping):
        raise gave(source, result, 'return named parts, such as {"correct": 1.0}')
    parts = cast(Mapping[str, float], result)
    # ``float()`` may run the author's code, and raises on what is no number.
    numbers = ask(source, lambda: {name: float(value) for name, value in parts.items()})
    for name in numbers:
        if not isinstance(cast(object, name), str):
            raise gave(source, name, "name each part by a text")
        if name not in weights:
            raise EnvContractError(f"{source}: the part {name!r} has no weight in reward_weights")
    return numbers


def as_messages(source: str, result: object) -> tuple[Message, ...]:
    """Return ``result`` as a tuple of messages.

    Raises:
        EnvContractError: it is no sequence of mappings, or one lacks a known role or a text.
    """
    remedy = "return a tuple of Messages, or () to say nothing"
    messages: tuple[object, ...] = _items(source, result, Mapping, remedy)
    for message in cast(tuple[Mapping[str, object], ...], messages):
        if message.get("role") not in get_args(Role) or not isinstance(message.get("content"), str):
            raise gave(source, message, f"{remedy}, each with a known role and a text as content")
    return cast(tuple[Message, ...], messages)


def as_turns(source: str, result: object) -> tuple[str, ...]:
    """Return ``result`` as a tuple of texts, a player's turns.

    Raises:
        EnvContractError: it is no sequence of texts.
    """
    return _items(source, result, str, "return a list of texts, one per turn")


def own_tools(source: str, listed: object, env: object) -> tuple[Tool, ...]:
    """Copy a class's tools for one instance, so that instances share no state, and bind methods to it.

    Raises:
        EnvContractError: they are no list, or can't be copied.
    """
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise gave(source, listed, "list tools, as in tools = (search,)")
    try:
        # One deepcopy for all tools: what two of them share stays shared between the copies.
        own = copy.deepcopy(tuple(cast(Sequence[Tool], listed)))
    except Exception as error:  # copying runs the tool's own code
        reason = shown(error, repr)
        raise EnvContractError(
            f"{source} can't be copied for each instance ({reason}): make them in __init__, after super().__init__()"
        ) from error
    return tuple(tool.__get__(env, type(env)) if isinstance(tool, FunctionTool) else tool for tool in own)


def is_tool(candidate: object) -> bool:
    """Return True if ``candidate`` has all parts of a tool."""
    return all(hasattr(candidate, part) for part in _TOOL_PARTS)


def validate_tools(source: str, tools: Sequence[Tool]) -> None:
    """Check that every item is a tool and that names are unique.

    Raises:
        EnvContractError: one is no tool, or two share a name.
    """
    seen: set[str] = set()
    for tool in tools:
        if not is_tool(tool):
            raise gave(source, tool, "list tools; a function becomes one by @tool above it")
        if tool.name in seen:
            raise EnvContractError(f"{source} has two tools called {tool.name!r}: rename one")
        seen.add(tool.name)


def _items(source: str, result: object, kind: type[_T], remedy: str) -> tuple[_T, ...]:
    # A str is a sequence too: it is what an author returns who forgot the brackets.
    if isinstance(result, str) or not isinstance(result, Sequence):
        raise gave(source, result, remedy)
    items = tuple(cast(Sequence[object], result))
    for item in items:
        if not isinstance(item, kind):
            raise gave(source, item, remedy)
    return cast(tuple[_T, ...], items)
