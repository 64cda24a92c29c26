"""``POST /v1/messages``."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from agentrl.endpoint.turns import value_of
from agentrl.endpoint.wire import (
    IMAGE,
    Answer,
    BadRequestError,
    Call,
    Event,
    Item,
    Request,
    Wire,
    fields,
    marked_parts,
    objects,
    read_limit,
    read_stop,
    text_parts,
    tool_spec,
    unlike,
)

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def _read(body: Mapping[str, Any]) -> Request:
    """Read a request; a system message may stand anywhere."""
    system, image = text_parts(body.get("system"))
    items = [Item(role="system", texts=system)] if system else []
    for message in objects(body.get("messages"), "messages"):
        role = message.get("role")
        if role not in ("system", "user", "assistant"):
            raise BadRequestError(f"messages has the role {str(role)[:40]!r}: use user, assistant or system")
        content = message.get("content")
        blocks = objects([{"type": "text", "text": content}] if isinstance(content, str) else content, "content")
        read = [_assistant(blocks)] if role == "assistant" else list(_others(role, blocks))
        items += read
        image = image or any(IMAGE in item.texts for item in read)
    described = objects(body.get("tools"), "tools")
    # What a server would run itself has a type with a date, and no schema.
    own = [tool for tool in described if "input_schema" in tool or tool.get("type") in (None, "custom")]
    hosted = [f"tool {tool.get('type')}"[:40] for tool in described if tool not in own]
    choice = fields(body.get("tool_choice"))
    must = {"any": True, "tool": str(choice.get("name", ""))}.get(str(choice.get("type")), False)
    ignored = unlike(body, {"temperature": 1, "top_p": 1, "top_k": None})
    return Request(
        items=tuple(items),
        tools=() if choice.get("type") == "none" else tuple(map(tool_spec, own)),
        model=str(body.get("model", "")),
        max_tokens=read_limit(body.get("max_tokens")),
        stop=read_stop(body.get("stop_sequences")),
        stream=bool(body.get("stream")),
        must_call=must,
        ignored=(*ignored, *hosted, *(["images"] if image else [])),
        body=body,
    )


def _fit(answer: Answer, request: Request) -> Answer:
    """Write calls whose arguments are no object into the text, where arguments are sent as values."""
    bad = [call for call in answer.calls if _value(call) is None]
    if request.stream or not bad:
        return answer
    text = "\n".join(filter(None, [answer.text, *(f"{call.name} {call.arguments}" for call in bad)]))
    calls = tuple(call for call in answer.calls if call not in bad)
    return replace(
        answer, text=text, calls=calls, finish="stop" if answer.finish == "calls" and not calls else answer.finish
    )


def _whole(answer: Answer, request: Request) -> Mapping[str, Any]:
    """Write an answer as one body."""
    blocks = [_thinking(answer.thinking, answer.id)] if answer.thinking else []
    blocks += [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    blocks += [{**_call(call), "input": _value(call)} for call in answer.calls]
    return {**_head(answer.id, request), "content": blocks, **_stop(answer), "usage": _usage(answer)}


def _error(status: int, message: str, *, too_long: bool = False) -> Mapping[str, Any]:
    """Write an error."""
    # Claude Code compacts its history where it reads these words.
    text = f"prompt is too long: {message}" if too_long else message
    return {"type": "error", "error": {"type": _KINDS.get(status, "api_error"), "message": text}}


class _Writer:
    """Opens the block of the thinking, and that of the text, with its first delta."""

    def __init__(self, answer_id: str, request: Request) -> None:
        self._answer_id, self._request = answer_id, request
        self._index, self._kind = -1, ""

    def begin(self) -> Iterator[Event]:
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"usage": {"input_tokens": 0, "output_tokens": 0}}
        message = {**_head(self._answer_id, self._request), **empty, **usage}
        yield "message_start", {"type": "message_start", "message": message}

    def thinking(self, delta: str) -> Iterator[Event]:
        yield from self._open("thinking", _thinking(""))
        yield self._delta({"type": "thinking_delta", "thinking": delta})

    def text(self, delta: str) -> Iterator[Event]:
        yield from self._open("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": delta})

    def end(self, answer: Answer) -> Iterator[Event]:
        if not answer.calls and self._kind != "text":
            yield from self.text("")
        for call in answer.calls:
            yield from self._open(call.id, {**_call(call), "input": {}})
            # As sampled, even if they are no JSON: clients tell the agent so.
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._close()
        usage = {"usage": _usage(answer)}
        yield "message_delta", {"type": "message_delta", "delta": _stop(answer), **usage}
        yield "message_stop", {"type": "message_stop"}

    def _open(self, kind: str, block: Mapping[str, Any]) -> Iterator[Event]:
        if kind == self._kind:
            return
        yield from self._close()
        self._index, self._kind = self._index + 1, kind
        data = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield "content_block_start", data

    def _close(self) -> Iterator[Event]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._answer_id})
        if self._kind:
            yield "content_block_stop", {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}


def _head(answer_id: str, request: Request) -> dict[str, Any]:
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": request.model}


def _thinking(text: str, signature: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _call(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _stop(answer: Answer) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}[answer.finish]
    reason = "stop_sequence" if answer.stopped_by is not None and answer.finish == "stop" else reason
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by}


def _usage(answer: Answer) -> dict[str, int]:
    read, wrote = answer.usage
    return {
        "input_tokens": read,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": wrote,
    }


def _value(call: Call) -> dict[str, object] | None:
    """Read arguments; those that are no object are none."""
    value = value_of(call.arguments)
    return cast(dict[str, object], json.loads(str(call.arguments) or "{}")) if isinstance(value, dict) else None


def _assistant(blocks: list[dict[str, Any]]) -> Item:
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    return Item(
        role="assistant",
        texts=text_parts([block for block in blocks if block.get("type") == "text"])[0],
        thinking="".join(str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"),
        calls=tuple(
            Call(id=str(call.get("id", "")), name=str(call.get("name", "")), arguments=call.get("input"))
            for call in calls
        ),
    )


def _others(role: Any, blocks: list[dict[str, Any]]) -> Iterator[Item]:
    """Yield the messages of one that holds texts and results, in their order."""
    waiting = list[dict[str, Any]]()
    for block in [*blocks, {"type": "end"}]:
        if block.get("type") not in ("tool_result", "end"):
            waiting.append(block)
            continue
        texts, _ = marked_parts(waiting)
        if texts:
            yield Item(role=role, texts=texts)
        waiting = []
        if block.get("type") == "tool_result":
            texts, _ = marked_parts(block.get("content"))
            yield Item(role="tool", texts=texts, call_id=str(block.get("tool_use_id", "")))


MESSAGES = Wire(read=_read, whole=_whole, writer=_Writer, fit=_fit, error=_error)
"""Messages, as Anthropic's clients and Claude Code speak them."""
