"""``native``: the chat template describes the tools, and calls have the form that the model was taught.

A template's form is found by letting it write a sample call; an environment holds the concrete form.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigError
from agentrl.toolenv.dialects.base import THINK_TAG, THINKING, Block, Dialect
from agentrl.toolenv.dialects.hermes import Hermes
from agentrl.toolenv.dialects.pairs import NativeDsml, NativeGlm, NativeHy, NativeMinimax, NativeQwen3Coder
from agentrl.toolenv.dialects.reading import MAX_NAME, UnreadableCall, malformed, read_call, read_json_at, write_json
from agentrl.toolenv.tools.function import tool
from agentrl.types import ToolCall

NATIVE = "native"
_TAGS = re.compile(THINK_TAG)
_HARMONY_TAGS = re.compile(rf"{THINK_TAG}|<\|(?:channel|constrain|message)\|>")
_LLAMA_BEGINS = r'<\|python_tag\|>|^[ \t]*(?=\{\s*"(?:(?:name|parameters)"\s*:|type"\s*:\s*"function"))'
_LLAMA_NEXT = re.compile(r"\s*;?\s*")


class NativeHermes(Hermes):
    """As ``hermes``, the tools described by the chat template: Qwen2.5, Qwen3, Hermes."""

    name, native = "native-hermes", True


class NativeMistral(Dialect):
    """``[TOOL_CALLS]`` and a JSON list of calls: Mistral.

    Where a list can't be read, all text after it belongs to it.
    """

    name, native = "native-mistral", True
    marks = (*Dialect.marks, "[TOOL_CALLS]")
    opening = re.compile(rf"{THINKING}|\[TOOL_CALLS\]")

    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """Read the block."""
        try:
            value, end = read_json_at(text, opening.end())
        except UnreadableCall as error:
            return Block(end=len(text), calls=(malformed(f"[TOOL_CALLS] takes a JSON list of calls: {error}"),))
        if not isinstance(value, list) or not value:
            return Block(end=end, calls=(malformed("[TOOL_CALLS] takes a JSON list of at least one call"),))
        items: list[object] = value
        return Block(end=end, calls=tuple(read_call(item, extra=frozenset({"id"})) for item in items))

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        return f"[TOOL_CALLS] {write_json([{'name': name, 'arguments': dict(arguments)}], _TAGS)}"


class NativeLlama(Dialect):
    """A bare JSON object with name and parameters: Llama 3.

    A call begins with ``<|python_tag|>``, or at the beginning of a line with an object whose first key is a call's;
    any other object there is text. Further calls follow at once, with or without a semicolon between them. Where a call
    can't be read, all text after it belongs to it.
    """

    name, native = "native-llama", True
    opening = re.compile(f"{THINKING}|{_LLAMA_BEGINS}", re.MULTILINE)

    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """Read the block."""
        calls: list[ToolCall] = []
        end = opening.end()
        while not calls or text.startswith("{", end):
            try:
                value, end = read_json_at(text, end)
            except UnreadableCall as error:
                return Block(end=len(text), calls=(*calls, malformed(str(error))))
            calls.append(read_call(value, "parameters", frozenset({"type"})))
            # A separator belongs to the block only where another call follows it.
            after = _LLAMA_NEXT.match(text, end)
            end = after.end() if after and text.startswith("{", after.end()) else end
        return Block(end=end, calls=tuple(calls))

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        return write_json({"name": name, "parameters": dict(arguments)}, _TAGS)


class NativeHarmony(Dialect):
    """A message on the channel ``commentary`` to the tool as recipient, with a JSON object as body: gpt-oss.

    The recipient stands before the channel, as the chat template writes it, or after it. A turn holds one call.
    """

    name, native = "native-harmony", True
    marks = ("<|channel|>", "<|constrain|>", "<|message|>")
    opening = re.compile(
        rf"{THINKING}|(?:<\|channel\|>\w+)? to=(?:functions\.)?(?P<name>[^\s<]{{1,{MAX_NAME}}})"
        r"(?:<\|channel\|>\w+)?(?: \w+| ?<\|constrain\|>\w+)?<\|message\|>"
    )

    def read_block(self, text: str, opening: re.Match[str]) -> Block:
        """Read the block."""
        try:
            value, end = read_json_at(text, opening.end())
        except UnreadableCall as error:
            return Block(end=len(text), calls=(malformed(str(error), opening["name"]),))
        return Block(end=end, calls=(read_call({"name": opening["name"], "arguments": value}),))

    def write_call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Write the call."""
        return f" to=functions.{name}<|channel|>commentary json<|message|>{write_json(dict(arguments), _HARMONY_TAGS)}"


FORMS: Mapping[str, type[Dialect]] = {
    form.name: form
    for form in (
        NativeHermes,
        NativeMistral,
        NativeQwen3Coder,
        NativeGlm,
        NativeLlama,
        NativeHarmony,
        NativeHy,
        NativeMinimax,
        NativeDsml,
    )
}
"""The known forms, in the order in which ``native_form`` tries them."""


def native_form(tokenizer: Any) -> str:
    """Find the form in which the tokenizer's chat template writes calls.

    Raises:
        ConfigError: the template does not describe tools or writes calls in a form that is not known.
    """
    written = _sample(tokenizer)
    # The form that reads the sample call back is the template's own.
    for name, form in FORMS.items():
        if form([_sample_tool]).parse(written) == (ToolCall(name="sample_tool", arguments=_SAMPLE, id="call_0"),):
            return name
    raise ConfigError(
        "dialect 'native' can't be used with this chat template, which does not describe tools or writes calls in a "
        "form that is not known: use dialect 'hermes', 'fence' or 'xml' instead"
    )


@tool(name="sample_tool")
def _sample_tool(text: str, count: int) -> str:
    """Stand for any tool."""
    return text * count


_SAMPLE: Mapping[str, object] = {"text": "two words", "count": 3}
_QUESTION = "Zq-question-qZ"


def _sample(tokenizer: Any) -> str:
    """Let the template write an assistant's turn that calls the sample tool; empty where it can't."""
    function = {"name": "sample_tool", "arguments": dict(_SAMPLE)}
    call = {"type": "function", "id": "abcdefghi", "function": function}  # Mistral's ids have 9 characters
    turns: Sequence[Mapping[str, object]] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = list(NativeHermes([_sample_tool]).template_tools)
    try:
        asked = str(tokenizer.apply_chat_template(turns[:1], tools=tools, tokenize=False, add_generation_prompt=True))
        whole = str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False))
    except Exception:  # a template raises whatever its author chose; one that raises here has no known form
        return ""
    # A template that ignores ``tools`` would never tell the model about them.
    if _sample_tool.description not in asked:
        return ""
    # Some templates begin a past turn differently from the generation prompt.
    return whole.removeprefix(asked) if whole.startswith(asked) else whole.partition(_QUESTION)[2]
