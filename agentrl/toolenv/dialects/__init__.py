"""How a model writes a tool call.

One object reads, writes and describes calls, for training, warm start, evaluation and replay alike: with different
readers, an agent would be trained on one task and evaluated on another.

======== ==============================================================================================
fence    a Markdown block whose language is the tool's name
hermes   ``{"name": …, "arguments": {…}}`` between ``<tool_call>`` and ``</tool_call>``
xml      ``<name>…</name>``
native   the chat template describes the tools, and calls have the form that it writes: one of
         ``native-hermes``, ``native-mistral``, ``native-llama``, ``native-qwen3-coder``, ``native-glm``,
         ``native-harmony``, ``native-hy``, ``native-minimax``, ``native-dsml``
======== ==============================================================================================
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any, cast

from agentrl.errors import ConfigError, UnknownNameError
from agentrl.toolenv.dialects.base import THINKING, Block, Dialect
from agentrl.toolenv.dialects.bodies import describe
from agentrl.toolenv.dialects.fence import Fence
from agentrl.toolenv.dialects.hermes import Hermes
from agentrl.toolenv.dialects.native import FORMS, NATIVE, native_form
from agentrl.toolenv.dialects.reading import UnreadableCall, malformed, read_object, write_json
from agentrl.toolenv.dialects.xml import Xml
from agentrl.toolenv.tools.function import NAME, Tool

__all__ = [
    "DIALECTS",
    "NATIVE",
    "THINKING",
    "Block",
    "Dialect",
    "Fence",
    "Hermes",
    "UnreadableCall",
    "Xml",
    "describe",
    "get_dialect",
    "malformed",
    "read_object",
    "register_dialect",
    "resolve_dialect",
    "write_json",
]

DIALECTS: dict[str, type[Dialect]] = {"fence": Fence, "hermes": Hermes, "xml": Xml, **FORMS}


def register_dialect(name: str, dialect: type[Dialect]) -> None:
    """Register a dialect of your own for ``make(…, dialect=name)`` and ``env.args.dialect``.

    A run records the name and a hash of what the agent reads, not of the code: increase ``dialect.form`` when calls are
    read or written differently. A package registers its dialects in the module that its entry point of the group
    ``agentrl.envs`` names, so that ``agentrl train`` finds them. Registering the same class again, as a notebook does,
    replaces it.

    Args:
        name: of letters, digits, ``_`` and ``-``; becomes ``dialect.name``.
        dialect: a subclass of :class:`Dialect`, whose docstring shows a whole one.

    Raises:
        ConfigError: the name is taken or none, or the class is no dialect, lacks a method, or has no ``opening``
            with the group ``think``.
    """
    kind = cast(object, dialect)
    if not isinstance(kind, type) or not issubclass(kind, Dialect):
        raise ConfigError(
            f"dialect {name!r} can't be {kind!r}: register a subclass of agentrl.toolenv.dialects.Dialect"
        )
    if not NAME.fullmatch(name):
        raise ConfigError(f"a dialect can't be called {name!r}: use letters, digits, _ and -, a letter first")
    taken = DIALECTS.get(name)
    # Compared by name, not identity: running a notebook's cell again makes a new class of the same name.
    if name == NATIVE or (taken and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__)):
        raise ConfigError(f"the dialect {name!r} is there already: choose another name")
    # The name is set on the class below, so a second name would rename the first registration.
    if kind.name not in ("", name) and DIALECTS.get(kind.name) is kind:
        raise ConfigError(f"{kind.__qualname__} is registered as {kind.name!r}: subclass it for another name")
    if inspect.isabstract(kind):
        raise ConfigError(f"dialect {name!r} lacks {', '.join(sorted(kind.__abstractmethods__))}: write them")
    # Asked of an instance, since some dialects build their opening from the tools in __init__.
    opening: object = getattr(kind(), "opening", None)
    if not isinstance(opening, re.Pattern) or "think" not in opening.groupindex:
        raise ConfigError(
            f"dialect {name!r} has no opening: set re.compile(THINKING + '|…'), or thinking would be read"
        )
    kind.name = name
    DIALECTS[name] = kind


def get_dialect(name: str, tools: Sequence[Tool] = ()) -> Dialect:
    """Make the dialect called ``name``, for calls of ``tools``.

    Raises:
        UnknownNameError: there is none of that name.
        ConfigError: the name is ``native``, which depends on a tokenizer.
    """
    if name == NATIVE:
        raise ConfigError(
            f"dialect 'native' means another form for every chat template: name the form, {', '.join(FORMS)}, or let "
            "agentrl.toolenv.dialects.resolve_dialect find it"
        )
    if name not in DIALECTS:
        raise UnknownNameError("dialect", name, [*DIALECTS, NATIVE])
    return DIALECTS[name](tools)


def resolve_dialect(name: str, tokenizer: Any) -> str:
    """Replace ``native`` by the name of the chat template's form; return any other name as it is.

    Args:
        name: as the user wrote it.
        tokenizer: has a chat template.

    Raises:
        ConfigError: the chat template's form of calls is not known; the message names what to use instead.
    """
    return native_form(tokenizer) if name == NATIVE else name
