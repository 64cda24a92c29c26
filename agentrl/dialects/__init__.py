"""How a model writes a tool call.

One object reads, writes and describes calls, for training, warm start, evaluation and replay alike: a reader that
differs between two of them trains an agent for another game.

======== ==============================================================================================
fence    a Markdown block whose language is the tool's name
hermes   ``{"name": …, "arguments": {…}}`` between ``<tool_call>`` and ``</tool_call>``
xml      ``<name>…</name>``
native   the chat template describes the tools, and calls have the form that it writes: one of
         ``native-hermes``, ``native-mistral``, ``native-llama``, ``native-qwen3-coder``, ``native-glm``,
         ``native-harmony``
======== ==============================================================================================
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.dialects.base import Dialect
from agentrl.dialects.fence import Fence
from agentrl.dialects.hermes import Hermes
from agentrl.dialects.native import FORMS, NATIVE, native_form
from agentrl.dialects.xml import Xml
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.tools import Tool

__all__ = ["DIALECTS", "NATIVE", "Dialect", "Fence", "Hermes", "Xml", "get_dialect", "resolve_dialect"]

DIALECTS: Mapping[str, type[Dialect]] = {"fence": Fence, "hermes": Hermes, "xml": Xml, **FORMS}


def get_dialect(name: str, tools: Sequence[Tool] = ()) -> Dialect:
    """The dialect called ``name``, for calls of ``tools``.

    Raises:
        UnknownNameError: there is none of that name.
        ConfigError: the name is ``native``, which depends on a tokenizer.
    """
    if name == NATIVE:
        raise ConfigError(
            f"dialect 'native' means another form for every chat template: name the form, {', '.join(FORMS)}, or let "
            "agentrl.dialects.resolve_dialect find it"
        )
    if name not in DIALECTS:
        raise UnknownNameError("dialect", name, [*DIALECTS, NATIVE])
    return DIALECTS[name](tools)


def resolve_dialect(name: str, tokenizer: Any) -> str:
    """The name that an environment takes: ``name`` itself, but for ``native`` that of the chat template's form.

    Args:
        name: as the user wrote it.
        tokenizer: has a chat template.

    Raises:
        ConfigError: the chat template's form of calls is not known; the message names what to use instead.
    """
    return native_form(tokenizer) if name == NATIVE else name
