"""What the three protocols of model servers have in common: a request as it was read, and an answer to be written."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from agentrl.errors import UsageError
from agentrl.toolenv.tools.function import ToolContext, ToolError
from agentrl.types import Role

Event = tuple[str, Mapping[str, Any] | str]
"""The name and the data of a server-sent event; the name is empty in the protocol that has none."""
IMAGE = "[image]"
"""Stands where a client has sent something that the policy can't read."""
Finish = Literal["stop", "length", "calls"]
"""Why an answer ended: by itself or at a stop text, at a limit of tokens, or to have its calls run."""
_STOPS, _STOP_CHARS = 16, 1000
"""Most stop texts of a request, and most characters of them: after each token the turn's end is searched for them."""


class BadRequestError(UsageError):
    """A request that the endpoint can't answer; the client reads the error's sentence."""


class ClientGoneError(UsageError):
    """The client has hung up before it had its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as clients know it."""

    id: str
    """Unique over the run; a result names the call that it answers."""
    name: str
    """The tool."""
    arguments: object
    """The arguments: the text as it was sampled or came back, or the value where the protocol carries values."""
    free: bool = False
    """True if the client takes the argument ``input`` alone, as a text."""
    namespace: str = ""
    """The group that the client has put the tool in."""

    def free_text(self) -> str | None:
        """Return the text for a client that takes the argument ``input`` alone; None if it takes all of them."""
        if not self.free:
            return None
        arguments = str(self.arguments)
        try:
            value = json.loads(arguments)
        except ValueError:
            return arguments
        return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One message of a history."""

    role: Role
    """Who speaks; a developer's message is the system's."""
    texts: tuple[str, ...] = ()
    """The parts of its text, blank ones left out."""
    thinking: str = ""
    """The assistant's thinking, as far as the client has sent it back."""
    calls: tuple[Call, ...] = ()
    """The assistant's calls."""
    call_id: str = ""
    """The call that a tool's message answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool that the client runs."""

    name: str
    """The name that the policy writes."""
    description: str = ""
    """What it is for."""
    parameters: Mapping[str, object] = field(default_factory=dict[str, object])
    """The JSON schema of its arguments."""
    free: bool = False
    """True if the client takes one text, in a grammar of its own, in place of arguments."""
    namespace: str = ""
    """The group that the client has put it in."""
    own_name: str = ""
    """Its name within that group."""

    def call(self, arguments: Mapping[str, object], ctx: ToolContext) -> str:
        """Refuse: the client runs its tools itself."""
        raise ToolError(f"{self.name} is run by the agent that has announced it")

    def open(self, seed: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for an answer."""

    items: tuple[Item, ...]
    """The history, from its first message on."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that the answer may call."""
    model: str = ""
    """The model's name, as the client wrote it; every name is served."""
    max_tokens: int | None = None
    """Most tokens of the answer; None for the run's limit."""
    stop: tuple[str, ...] = ()
    """Texts at which the answer ends; they are not part of it."""
    stream: bool = False
    """Send the answer while it is sampled."""
    must_call: bool | str = False
    """True if the answer has to call a tool, or the name of that tool."""
    previous: str = ""
    """Id of the answer that the history continues; then ``items`` are only what is new."""
    instructed: bool = False
    """True if the first item is the request's own instructions, which stand before all history."""
    usage_wanted: bool = False
    """Send the number of tokens at the end of a stream too."""
    ignored: tuple[str, ...] = ()
    """What was asked for and is not done, such as ``temperature``."""
    body: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """The request as it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of the policy, complete."""

    id: str
    """Unique over the run."""
    thinking: str
    """What the policy thought, without its tags."""
    text: str
    """What it says, calls left out."""
    calls: tuple[Call, ...]
    """Its calls, with arguments as text."""
    finish: Finish
    """Why it ended."""
    stopped_by: str | None
    """The stop text that ended it."""
    usage: tuple[int, int]
    """Tokens of the prompt and of the answer."""


class Writer(Protocol):
    """Writes one answer as a stream of events, in the order thinking, text, calls."""

    def begin(self) -> Iterator[Event]:
        """Write what comes before the first token."""
        ...

    def thinking(self, delta: str) -> Iterator[Event]:
        """Write more thinking; an empty text shows that the policy still speaks."""
        ...

    def text(self, delta: str) -> Iterator[Event]:
        """Write more text; an empty one likewise."""
        ...

    def end(self, answer: Answer) -> Iterator[Event]:
        """Write the calls and the end."""
        ...


def openai_error(status: int, message: str, *, too_long: bool = False) -> Mapping[str, Any]:
    """Write an error as both of OpenAI's protocols do."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = "context_length_exceeded" if too_long else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A protocol."""

    read: Callable[[Mapping[str, Any]], Request]
    """Reads a request; raises a ``BadRequestError`` where the body is none of this protocol."""
    whole: Callable[[Answer, Request], Mapping[str, Any]]
    """Writes an answer as one body."""
    writer: Callable[[str, Request], Writer]
    """Returns what writes the answer of an id as a stream."""
    fit: Callable[[Answer, Request], Answer] = lambda answer, _: answer
    """Returns the answer as the protocol can carry it; OpenAI's can send every call."""
    error: Callable[..., Mapping[str, Any]] = openai_error
    """Writes an error, as :func:`openai_error` does; ``too_long`` where the history leaves no room for an answer."""


def objects(value: object, name: str) -> list[dict[str, Any]]:
    """Check that a field is a list of objects; absent and null are an empty one.

    Raises:
        BadRequestError: it is something else.
    """
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in cast(list[object], items)):
        raise BadRequestError(f"{name} must be a list of objects")
    return cast(list[dict[str, Any]], items)


def fields(value: object) -> dict[str, Any]:
    """Return the fields of an object; anything else has none."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def text_parts(content: object) -> tuple[tuple[str, ...], bool]:
    """Read the parts of a content that are text, blank ones left out.

    Args:
        content: a text, a list of parts, or nothing.

    Returns:
        The texts, and True if there was anything else, such as an image.
    """
    parts = cast(list[object], content if isinstance(content, list) else [content])
    texts, other = list[str](), False
    for part in parts:
        text: object = part
        if isinstance(part, dict):
            named = cast(dict[str, object], part)
            text = next((named[key] for key in ("text", "refusal") if isinstance(named.get(key), str)), None)
            other = other or text is None
        if isinstance(text, str) and text and not text.isspace():
            texts.append(writable(text))
    return tuple(texts), other


def marked_parts(content: object) -> tuple[tuple[str, ...], bool]:
    """Read the parts of a content as :func:`text_parts` does, with ``IMAGE`` for those that are no text."""
    texts, image = text_parts(content)
    return (*texts, IMAGE) if image else texts, image


def read_stop(value: object) -> tuple[str, ...]:
    """Read a field of stop texts.

    Raises:
        BadRequestError: it holds something else, or more than the search after each token allows.
    """
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in cast(list[object], texts)):
        raise BadRequestError("stop must be a text or a list of texts")
    stops = tuple(text for text in cast(list[str], texts) if text)
    if len(stops) > _STOPS or sum(map(len, stops)) > _STOP_CHARS:
        raise BadRequestError(f"stop may hold {_STOPS} texts of {_STOP_CHARS} characters in all")
    return stops


def read_limit(value: object) -> int | None:
    """Read a limit of tokens.

    Raises:
        BadRequestError: it is no positive whole number.
    """
    if value is not None and (type(value) is not int or value < 1):
        raise BadRequestError("the limit of tokens must be a whole number of at least 1")
    return value


def unlike(body: Mapping[str, Any], defaults: Mapping[str, object]) -> tuple[str, ...]:
    """Name the fields of ``body`` that ask for something else than ``defaults``."""
    return tuple(name for name, default in defaults.items() if body.get(name, default) not in (default, None))


def writable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 can't encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def tool_spec(function: Mapping[str, Any], *, free: bool = False, namespace: str = "") -> ToolSpec:
    """Read a tool that is described by name, description and parameters.

    Args:
        function: the description.
        free: the client takes one text in a grammar of its own; to the policy it is an argument ``input``.
        namespace: the group that the client has put it in.
    """
    name = str(function.get("name", ""))
    parameters = function.get("parameters", function.get("input_schema"))
    description = str(function.get("description") or "")
    if free:
        form = fields(function.get("format")).get("definition")
        description = "\n".join(filter(None, (description, form and f"The input has this grammar:\n{form}")))
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return ToolSpec(
        name=f"{namespace}__{name}" if namespace else name,
        description=description,
        parameters=parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}},
        free=free,
        namespace=namespace,
        own_name=name,
    )
