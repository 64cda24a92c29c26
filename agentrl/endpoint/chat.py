"""``POST /v1/chat/completions``."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.endpoint.wire import (
    Answer,
    BadRequestError,
    Call,
    Event,
    Item,
    Request,
    ToolSpec,
    Wire,
    fields,
    marked_parts,
    objects,
    read_limit,
    read_stop,
    tool_spec,
    unlike,
)

_ROLES = {"developer": "system", "function": "tool"}
_FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}


def _read(body: Mapping[str, Any]) -> Request:
    """Read a request."""
    items, images = list[Item](), False
    for message in objects(body.get("messages"), "messages"):
        role = _ROLES.get(str(message.get("role")), message.get("role"))
        if role not in ("system", "user", "assistant", "tool"):
            raise BadRequestError(f"messages has the role {str(role)[:40]!r}: use system, user, assistant or tool")
        texts, image = marked_parts(message.get("content"))
        images = images or image
        thinking = message.get("reasoning_content") or message.get("reasoning")
        items.append(
            Item(
                role=role,
                texts=texts,
                thinking=thinking if isinstance(thinking, str) else "",
                calls=tuple(map(_call, objects(message.get("tool_calls"), "tool_calls"))),
                call_id=str(message.get("tool_call_id") or message.get("name") or "") if role == "tool" else "",
            )
        )
    choice = body.get("tool_choice")
    named = fields(fields(choice).get("function")).get("name")
    ignored = unlike(body, {"n": 1, "logit_bias": {}, "temperature": 1, "top_p": 1, "logprobs": False})
    return Request(
        items=tuple(items),
        tools=() if choice == "none" else tuple(_tools(body)),
        model=str(body.get("model", "")),
        max_tokens=read_limit(body.get("max_completion_tokens") or body.get("max_tokens")),
        stop=read_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        must_call=str(named) if named else choice == "required",
        usage_wanted=bool(fields(body.get("stream_options")).get("include_usage")),
        ignored=(*ignored, *(["images"] if images else [])),
        body=body,
    )


def _whole(answer: Answer, request: Request) -> Mapping[str, Any]:
    """Write an answer as one body."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.thinking:
        message["reasoning_content"] = answer.thinking
    if answer.calls:
        message["tool_calls"] = [_written(call) for call in answer.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[answer.finish]}
    return {**_head(answer.id, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


class _Writer:
    def __init__(self, answer_id: str, request: Request) -> None:
        self._head = _head(answer_id, request, "chat.completion.chunk")
        self._usage_wanted = request.usage_wanted

    def begin(self) -> Iterator[Event]:
        yield self._chunk({"role": "assistant", "content": ""})

    def thinking(self, delta: str) -> Iterator[Event]:
        yield self._chunk({"reasoning_content": delta})

    def text(self, delta: str) -> Iterator[Event]:
        yield self._chunk({"content": delta})

    def end(self, answer: Answer) -> Iterator[Event]:
        for index, call in enumerate(answer.calls):
            yield self._chunk({"tool_calls": [{"index": index, **_written(call)}]})
        yield self._chunk({}, _FINISH[answer.finish])
        if self._usage_wanted:
            yield "", {**self._head, "choices": [], "usage": _usage(answer)}
        yield "", "[DONE]"

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return "", {**self._head, "choices": [choice]}


def _head(answer_id: str, request: Request, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": int(time.time()), "model": request.model}


def _usage(answer: Answer) -> dict[str, int]:
    read, wrote = answer.usage
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def _call(call: Mapping[str, Any]) -> Call:
    custom = fields(call.get("custom"))
    function = custom or fields(call.get("function"))
    arguments = {"input": custom.get("input")} if custom else function.get("arguments", "")
    return Call(id=str(call.get("id", "")), name=str(function.get("name", "")), arguments=arguments)


def _written(call: Call) -> dict[str, Any]:
    if (text := call.free_text()) is not None:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tools(body: Mapping[str, Any]) -> Iterator[ToolSpec]:
    for tool in objects(body.get("tools"), "tools"):
        function = tool.get("function") or tool.get("custom")
        if isinstance(function, dict):
            yield tool_spec(function, free="custom" in tool)


CHAT = Wire(read=_read, whole=_whole, writer=_Writer)
"""Chat completions, as OpenAI's clients speak them."""
