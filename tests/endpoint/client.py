"""A client of the three protocols, in raw HTTP: it writes requests, and reads answers whole or from their deltas."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
ENDS = {"chat": "finish_reason", "messages": "stop_reason", "responses": "status"}
Body = dict[str, Any]


@dataclass
class Answered:
    """An answer as a client reads it."""

    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Id, name and arguments."""
    finish: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict[str, Any])
    items: list[Body] = field(default_factory=list[Body])
    """What the client puts into its history."""
    id: str = ""

    @property
    def value(self) -> tuple[object, ...]:
        """What two readings of one answer have in common."""
        return self.thinking, self.text, [call[1:] for call in self.calls], self.finish


def ask(protocol: str, history: str | Iterable[Body], tools: Iterable[str] = ("python",), **fields: Any) -> Body:
    """Write a request; each tool takes a ``code``."""
    items = [{"role": "user", "content": history}] if isinstance(history, str) else [*history]
    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    described = [{"name": name, "description": "Runs.", "parameters": schema} for name in tools]
    body: Body = {"model": "any", "input" if protocol == "responses" else "messages": items}
    body["tools"] = {
        "chat": [{"type": "function", "function": tool} for tool in described],
        "responses": [{"type": "function", **tool} for tool in described],
        "messages": [{"name": tool["name"], "input_schema": schema} for tool in described],
    }[protocol]
    return {**body, **({"max_tokens": 1000} if protocol == "messages" else {}), **fields}


def result(protocol: str, call_id: str, text: str) -> Body:
    """Write a tool's result."""
    if protocol == "chat":
        return {"role": "tool", "tool_call_id": call_id, "content": text}
    if protocol == "responses":
        return {"type": "function_call_output", "call_id": call_id, "output": text}
    block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
    return {"role": "user", "content": [block]}


def read(protocol: str, body: Body) -> Answered:
    """Read a whole answer."""
    answer = Answered(usage=body["usage"], id=body["id"])
    if protocol == "chat":
        message = body["choices"][0]["message"]
        answer.thinking, answer.text = message.get("reasoning_content", ""), message["content"] or ""
        answer.calls = [_in_chat(call) for call in message.get("tool_calls", [])]
        answer.finish, answer.items = body["choices"][0]["finish_reason"], [message]
    elif protocol == "messages":
        for block in body["content"]:
            answer.thinking += block.get("thinking", "")
            answer.text += block.get("text", "")
            if block["type"] == "tool_use":
                answer.calls.append((block["id"], block["name"], json.dumps(block["input"])))
        answer.finish, answer.items = body["stop_reason"], [{"role": "assistant", "content": body["content"]}]
    else:
        for item in body["output"]:
            answer.thinking += "".join(part["text"] for part in item.get("summary", []))
            answer.text += "".join(part["text"] for part in item.get("content", []))
            if item["type"].endswith("_call"):
                answer.calls.append((item["call_id"], item["name"], item.get("arguments", item.get("input"))))
        answer.finish, answer.items = body["status"], body["output"]
    return answer


def _in_chat(call: Body) -> tuple[str, str, str]:
    kind = call["type"]
    return call["id"], call[kind]["name"], call[kind]["arguments" if kind == "function" else "input"]


def events(text: str) -> list[Body]:
    """Read a stream; each event's name is its type."""
    parts = [dict(line.split(": ", 1) for line in part.split("\n")) for part in text.split("\n\n") if part]
    read = [(part.get("event"), json.loads(part["data"])) for part in parts if part["data"] != "[DONE]"]
    assert all(name is None or name == data["type"] for name, data in read)
    return [data for _, data in read]


def read_stream(protocol: str, text: str) -> Answered:
    """Read a stream by its deltas alone, and check that what frames them fits."""
    if protocol == "chat":
        return _read_chunks(events(text), text)
    return _read_blocks(events(text)) if protocol == "messages" else _read_items(events(text))


def _read_chunks(chunks: list[Body], text: str) -> Answered:
    assert text.endswith("data: [DONE]\n\n")
    answer, calls = Answered(id=chunks[0]["id"]), list[Body]()
    for chunk in chunks:
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            assert not answer.finish
            delta = choice["delta"]
            answer.thinking += delta.get("reasoning_content", "")
            answer.text += delta.get("content", "")
            for call in delta.get("tool_calls", []):
                assert call["index"] == len(answer.calls)
                answer.calls.append(_in_chat(call))
                calls.append({name: value for name, value in call.items() if name != "index"})
            answer.finish = choice["finish_reason"] or ""
    message = {"role": "assistant", "content": answer.text, "reasoning_content": answer.thinking}
    answer.items = [{**message, "tool_calls": calls} if calls else message]
    return answer


def _read_blocks(stream: list[Body]) -> Answered:
    blocks, answer = list[Body](), Answered(id=stream[0]["message"]["id"])
    for event in stream:
        kind, delta = event["type"], event.get("delta", {})
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"]})
        elif kind == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            for key in ("text", "thinking", "signature", "partial_json"):
                blocks[-1][key] = blocks[-1].get(key, "") + delta.get(key, "")
        elif kind == "message_delta":
            answer.finish, answer.usage = delta["stop_reason"], event["usage"]
    answer.thinking = "".join(block["thinking"] for block in blocks)
    answer.text = "".join(block["text"] for block in blocks)
    called = [block for block in blocks if block["type"] == "tool_use"]
    answer.calls = [(block["id"], block["name"], block["partial_json"]) for block in called]
    fields = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("id", "name")}
    content = [{"type": block["type"], **{key: block[key] for key in fields[block["type"]]}} for block in blocks]
    for block, raw in zip([block for block in content if block["type"] == "tool_use"], called, strict=True):
        # As Claude Code keeps what it can't read.
        block["input"] = _parsed(raw["partial_json"])
    answer.items = [{"role": "assistant", "content": content}]
    return answer


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"__unparsedToolInput": {"raw": text, "len": len(text)}}


def _read_items(stream: list[Body]) -> Answered:
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    added, done, deltas = list[str](), list[Body](), dict[str, str]()
    for event in stream:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(added)
            added.append(event["item"]["id"])
        elif kind == "response.output_item.done":
            assert added[event["output_index"]] == event["item"]["id"]
            done.append(event["item"])
        elif kind.endswith(".delta"):
            assert added[event["output_index"]] == event["item_id"]
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    whole = stream[-1]["response"]
    assert whole["output"] == done and [item["id"] for item in done] == added
    answer = read("responses", whole)
    parts = {item["id"]: read("responses", {**whole, "output": [item]}) for item in done}
    for item_id, part in parts.items():
        assert deltas[item_id] == (part.calls[0][2] if part.calls else part.thinking or part.text)
    return answer


def read_text(protocol: str, body: Body, text: str) -> Answered:
    """Read an answer in the way that its request asks for."""
    return read_stream(protocol, text) if body.get("stream") else read(protocol, json.loads(text))


class Client:
    """A client with a session's URL and key."""

    def __init__(self, url: str, ticket: Any) -> None:
        self.http = httpx2.AsyncClient(base_url=f"{url}/s/{ticket.name}/v1/", timeout=60)
        self.http.headers["authorization"] = f"Bearer {ticket.key}"

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def post(self, protocol: str, body: Body, **headers: str) -> httpx2.Response:
        return await self.http.post(PATHS[protocol], json=body, headers=headers)

    async def say(self, protocol: str, body: Body, **headers: str) -> Answered:
        """Ask, and read the answer in the way the body asks for it."""
        answer = await self.post(protocol, body, **headers)
        assert answer.status_code == 200, answer.text
        return read_text(protocol, body, answer.text)
