"""Recordings of real agents, played against a session: what they sent, with our own answers in place of the recorded.

A recording has a line for each request and for each scripted answer. Vendors' texts are replaced by marks such as
``[[len=9541 sha=1799]]``, equal ones by equal marks. In a body, ``{"$same": n}`` stands for the value in request n.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from agentrl.endpoint.chat import CHAT
from agentrl.endpoint.messages import MESSAGES
from agentrl.endpoint.responses import RESPONSES
from agentrl.endpoint.session import Session
from agentrl.endpoint.turns import value_of
from agentrl.endpoint.wire import Answer, Call, ClientGoneError, Event, Wire
from agentrl.engines.scripted import ScriptedEngine
from agentrl.render.renderer import Renderer
from agentrl.rollout.policy import Policy

WIRES: Mapping[str, Wire] = {"completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}
FOLDER = Path(__file__).with_name("recordings")


@dataclass
class Reply:
    """A client that hangs up after so many events."""

    cut: int | None = None
    body_sent: Any = None

    def __post_init__(self) -> None:
        self.sent: list[Event] = []

    async def body(self, body: Mapping[str, Any]) -> None:
        self.body_sent = body

    async def events(self, events: Iterable[Event], *, last: bool = False) -> None:
        for event in events:
            if self.cut is not None and len(self.sent) >= self.cut:
                raise ClientGoneError("cut")
            self.sent.append(event)


def load(name: str) -> list[dict[str, Any]]:
    data = zstandard.ZstdDecompressor().decompress((FOLDER / f"{name}.jsonl.zst").read_bytes(), 2**26)
    rows, bodies = [json.loads(line) for line in data.decode().splitlines()], dict[int, Any]()
    for row in rows:
        body = row.get("body")
        if row["kind"] == "request" and isinstance(body, dict):
            for key, value in body.items():
                if isinstance(value, dict) and "$same" in value:
                    old = bodies[value["$same"]][key]
                    body[key] = old[: value["$take"]] + value["$then"] if "$take" in value else old
            bodies[row["n"]] = body
    return rows


def spell(blocks: Iterable[Mapping[str, Any]]) -> str:
    """Write a scripted answer as a policy of dialect ``hermes`` would have sampled it."""
    parts = list[str]()
    for block in blocks:
        if block["type"] == "thinking":
            parts.append(f"<think>{block['text']}</think>")
        elif block["type"] == "text":
            parts.append(block["text"])
        elif block["type"] in ("call", "custom"):
            arguments = block["args"] if block["type"] == "call" else json.dumps({"input": block["args"]})
            name = f"{block['namespace']}__{block['name']}" if block.get("namespace") else block["name"]
            parts.append(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')
    return "".join(parts)


async def play(name: str, session: Session, engine: ScriptedEngine, renderer: Renderer) -> AsyncIterator[Any]:
    """Play a recording; yield each request that was answered, with its answer."""
    rows = load(name)
    answers = {row["n"]: row for row in rows if row["kind"] == "sent"}
    ids, waiting, last = dict[str, str](), list[Call](), ""
    for row in rows:
        wire = WIRES.get(row.get("path", "").rsplit("/", 1)[-1]) if row.get("method") in ("POST", "WS") else None
        turn = answers.get(row.get("n", -1), {}).get("turn", {})
        if wire is None or row["kind"] != "request" or turn.get("status") or turn.get("hang"):
            continue
        blocks = turn.get("blocks", [])
        # Which recorded id stands for which call of ours: those that are new belong to the calls sent so far.
        for theirs, called, arguments in _call_ids(row["body"]):
            alike = [call for call in waiting if called in (call.name, "invalid")]
            same = [call for call in alike if value_of(call.arguments) == value_of(arguments)]
            if theirs not in ids and (same or alike):
                waiting.remove(call := (same or alike)[0])
                ids[theirs] = call.id
        text = json.dumps(row["body"])
        for theirs, ours in ids.items():
            text = text.replace(theirs, ours)
        body = json.loads(text)
        if "previous_response_id" in body:
            body["previous_response_id"] = f"resp_{last}"
        headers = dict(row["headers"]) if row["headers"] else {}
        headers = {key.lower(): value for key, value in headers.items()}
        engine.turns.append(tuple(renderer.turn(spell(blocks))))
        try:
            answer: Answer = await session.answer(wire, wire.read(body), headers, Reply(cut=turn.get("cut")))
        except ClientGoneError:
            yield row, None
            continue
        last = answer.id
        waiting += answer.calls
        yield row, answer


def _call_ids(body: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return id, name and arguments of each call in a history."""
    ids = list[tuple[str, str, Any]]()
    items = body.get("messages") or body.get("input") or []
    for item in items if isinstance(items, list) else []:
        for call in item.get("tool_calls") or []:
            ids.append((call["id"], call["function"]["name"], call["function"]["arguments"]))
        content = item.get("content")
        for block in content if isinstance(content, list) else []:
            ids += [(block["id"], block["name"], block["input"])] if block.get("type") == "tool_use" else []
        if item.get("type") in ("function_call", "custom_tool_call"):
            ids.append((item["call_id"], item["name"], item.get("arguments", item.get("input"))))
    return ids


def session_of(policy: Policy) -> Session:
    return Session(policy, "hermes", "call_5x")
