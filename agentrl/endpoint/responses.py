"""``POST /v1/responses``."""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
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
    marked_parts,
    objects,
    read_limit,
    text_parts,
    tool_spec,
    unlike,
)

_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_CALLS = ("function_call", "custom_tool_call")


def _read(body: Mapping[str, Any]) -> Request:
    """Read a request; ``input`` holds the complete history."""
    entries = body.get("input")
    items = list[Item]()
    if body.get("instructions"):
        items.append(Item(role="system", texts=text_parts(body["instructions"])[0]))
    if isinstance(entries, str):
        items.append(Item(role="user", texts=text_parts(entries)[0]))
        entries = None
    images = False
    for entry in objects(entries, "input"):
        item, image = _item(entry)
        images = images or image
        if item is None:
            continue
        # A turn comes as several entries: its thinking, its texts and its calls.
        if item.role == "assistant" and items and items[-1].role == "assistant":
            item = _joined(items.pop(), item)
        items.append(item)
    tools, hosted = _tools(objects(body.get("tools"), "tools"))
    choice = body.get("tool_choice")
    ignored = unlike(body, {"temperature": 1, "top_p": 1, "truncation": "disabled", "background": False})
    return Request(
        items=tuple(items),
        tools=() if choice == "none" else tuple(tools),
        model=str(body.get("model", "")),
        max_tokens=read_limit(body.get("max_output_tokens")),
        previous=str(body.get("previous_response_id") or "").removeprefix("resp_"),
        instructed=bool(body.get("instructions")),
        stream=bool(body.get("stream")),
        must_call=str(choice.get("name", "")) or True if isinstance(choice, dict) else choice == "required",
        ignored=(*ignored, *hosted, *(["images"] if images else [])),
        body=body,
    )


def _whole(answer: Answer, request: Request) -> Mapping[str, Any]:
    """Write an answer as one body."""
    return _object(answer.id, request, [item for item, _ in _output(answer)], answer.usage)


class _Writer:
    """Opens the item of the thinking, and that of the text, with its first delta."""

    def __init__(self, answer_id: str, request: Request) -> None:
        self._id, self._request = answer_id, request
        self._numbers, self._open = count(), list[str]()

    def begin(self) -> Iterator[Event]:
        started = _object(self._id, self._request, [], None)
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def thinking(self, delta: str) -> Iterator[Event]:
        where = {"item_id": f"rs_{self._id}", "output_index": 0, "summary_index": 0}
        if "thinking" not in self._open:
            self._open.append("thinking")
            yield self._event("response.output_item.added", output_index=0, item=_reasoning(self._id, ""))
            part = {"type": "summary_text", "text": ""}
            yield self._event("response.reasoning_summary_part.added", **where, part=part)
        yield self._event("response.reasoning_summary_text.delta", **where, delta=delta)

    def text(self, delta: str) -> Iterator[Event]:
        if "text" not in self._open:
            self._open.append("text")
            index = len(self._open) - 1
            item = {**_message(self._id, ""), "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=index, item=item)
            yield self._event("response.content_part.added", **self._in_text(), part=_text(""))
        yield self._event("response.output_text.delta", **self._in_text(), delta=delta, logprobs=[])

    def end(self, answer: Answer) -> Iterator[Event]:
        output = _output(answer)
        for index, (item, text) in enumerate(output):
            if item["type"] == "reasoning":
                where = {"item_id": item["id"], "output_index": index, "summary_index": 0}
                yield self._event("response.reasoning_summary_text.done", **where, text=text)
                yield self._event("response.reasoning_summary_part.done", **where, part=item["summary"][0])
            elif item["type"] == "message":
                if "text" not in self._open:
                    yield from self.text("")
                yield self._event("response.output_text.done", **self._in_text(), text=text, logprobs=[])
                yield self._event("response.content_part.done", **self._in_text(), part=item["content"][0])
            else:
                field = "input" if item["type"] == "custom_tool_call" else "arguments"
                kind = "custom_tool_call_input" if field == "input" else "function_call_arguments"
                where = {"item_id": item["id"], "output_index": index}
                started = {**item, "status": "in_progress", field: ""}
                yield self._event("response.output_item.added", output_index=index, item=started)
                yield self._event(f"response.{kind}.delta", **where, delta=text)
                yield self._event(f"response.{kind}.done", **where, **{field: text})
            yield self._event("response.output_item.done", output_index=index, item=item)
        # Codex ends on a response that is incomplete, so an answer that a limit has cut off is completed too.
        done = _object(self._id, self._request, [item for item, _ in output], answer.usage)
        yield self._event("response.completed", response=done)

    def _in_text(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._id}", "output_index": self._open.index("text"), "content_index": 0}

    def _event(self, kind: str, **data: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **data}


def _output(answer: Answer) -> list[tuple[dict[str, Any], str]]:
    """Return the answer's entries, each with its text."""
    entries = [(_reasoning(answer.id, answer.thinking), answer.thinking)] if answer.thinking else []
    # An answer without an entry would be no answer to most clients.
    if answer.text or not answer.calls:
        entries.append((_message(answer.id, answer.text), answer.text))
    return [*entries, *(_call(call, f"{answer.id}_{index}") for index, call in enumerate(answer.calls))]


def _reasoning(answer_id: str, thinking: str) -> dict[str, Any]:
    # OpenCode keeps only thoughts with encrypted content, and any text will do.
    summary = [{"type": "summary_text", "text": thinking}] if thinking else []
    return {"type": "reasoning", "id": f"rs_{answer_id}", "summary": summary, "encrypted_content": answer_id}


def _message(answer_id: str, text: str) -> dict[str, Any]:
    content = [_text(text)]
    return {
        "type": "message",
        "id": f"msg_{answer_id}",
        "status": "completed",
        "role": "assistant",
        "content": content,
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: Call, item_id: str) -> tuple[dict[str, Any], str]:
    arguments = str(call.arguments)
    common = {"status": "completed", "call_id": call.id, "name": call.name}
    if (text := call.free_text()) is not None:
        return {"type": "custom_tool_call", "id": f"ctc_{item_id}", **common, "input": text}, text
    namespace = {"namespace": call.namespace} if call.namespace else {}
    return {"type": "function_call", "id": f"fc_{item_id}", **common, "arguments": arguments, **namespace}, arguments


def _object(
    answer_id: str, request: Request, output: Sequence[Mapping[str, Any]], usage: tuple[int, int] | None
) -> dict[str, Any]:
    body = request.body
    made: dict[str, Any] = {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed" if usage else "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": request.model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "store": False,
        "temperature": 1.0,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_p": 1.0,
        "metadata": body.get("metadata") or {},
        "usage": None,
    }
    if usage:
        read, wrote = usage
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        made["usage"] = {"input_tokens": read, "output_tokens": wrote, "total_tokens": read + wrote, **details}
    return made


def _item(entry: Mapping[str, Any]) -> tuple[Item | None, bool]:
    """Read an entry of the history; return it, and True if the policy can't read a part of it."""
    kind = entry.get("type", "message")
    if kind == "message":
        role = "system" if entry.get("role") == "developer" else entry.get("role")
        if role not in ("system", "user", "assistant"):
            raise BadRequestError(f"input has the role {str(role)[:40]!r}: use system, developer, user or assistant")
        texts, image = marked_parts(entry.get("content"))
        return Item(role=role, texts=texts), image
    if kind == "reasoning":
        texts = [part.get("text") for part in objects(entry.get("summary"), "summary")]
        return Item(role="assistant", thinking="".join(text for text in texts if isinstance(text, str))), False
    if kind in _CALLS:
        arguments = {"input": entry.get("input")} if kind == "custom_tool_call" else entry.get("arguments", "")
        name, namespace = str(entry.get("name", "")), str(entry.get("namespace") or "")
        call = Call(id=str(entry.get("call_id", "")), name=name, arguments=arguments, namespace=namespace)
        return Item(role="assistant", calls=(call,)), False
    if kind in _OUTPUTS:
        texts, image = marked_parts(entry.get("output"))
        return Item(role="tool", texts=texts, call_id=str(entry.get("call_id", ""))), image
    if kind == "compaction":
        return Item(role="user", texts=text_parts(entry.get("encrypted_content"))[0]), False
    return None, True


def _joined(turn: Item, then: Item) -> Item:
    thinking = turn.thinking + then.thinking
    return Item(role="assistant", texts=turn.texts + then.texts, thinking=thinking, calls=turn.calls + then.calls)


def _tools(described: Sequence[Mapping[str, Any]], namespace: str = "") -> tuple[list[ToolSpec], list[str]]:
    """Return the tools that the client runs, and the kinds of those that a server would run."""
    tools, hosted = list[ToolSpec](), list[str]()
    for tool in described:
        kind = str(tool.get("type", "function"))
        if kind == "namespace":
            inner, unknown = _tools(objects(tool.get("tools"), "tools"), str(tool.get("name", "")))
            tools, hosted = tools + inner, hosted + unknown
        elif kind in ("function", "custom"):
            tools.append(tool_spec(tool, free=kind == "custom", namespace=namespace))
        else:
            hosted.append(f"tool {kind}"[:40])
    return tools, hosted


RESPONSES = Wire(read=_read, whole=_whole, writer=_Writer)
"""Responses, as OpenAI's newer clients and Codex speak them."""
