"""The server: who may speak to it, what it refuses, and what becomes of clients that hang up, retry or hurry."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.endpoint import server
from agentrl.endpoint.chat import CHAT
from agentrl.endpoint.server import Endpoint
from agentrl.endpoint.session import Session
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import InfrastructureError
from agentrl.render.renderer import Renderer
from agentrl.rollout.player import EpisodeLimits

from ..rollout.test_policy import Told, check
from .client import PATHS, Body, Client, ask, read
from .conftest import Failing, Serve, recorded, scripted
from .recorded import Reply

PROTOCOLS = pytest.mark.parametrize("protocol", PATHS)
TEXTS = st.sampled_from(["", " ", "x", "user", "system", "text", "python", "\ud800", "<think>", "call_0", "{}", "\x00"])
LEAVES = st.one_of(TEXTS, st.none(), st.booleans(), st.integers(-2, 9), st.sampled_from([0.5, 1e999, 10**400]))
KEYS = """type role content text name id arguments input function custom output summary call_id tool_call_id tool_calls
tool_use_id format definition parameters properties input_schema tools namespace thinking items enum required anyOf
refusal encrypted_content \ud800"""
KINDS = """text tool_use tool_result thinking image message reasoning function_call custom_tool_call function custom
namespace function_call_output compaction object array tool any required auto none"""
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "function"])


def mixed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4)
    kinds = {"type": st.sampled_from(KINDS.split()), "role": ROLES}
    likely = st.fixed_dictionaries({}, optional={**kinds, "content": inner, "name": TEXTS})
    return st.one_of(st.lists(inner, max_size=3), objects, st.builds(dict.__or__, objects, likely))


VALUES = st.recursive(LEAVES, mixed, max_leaves=25)
CALL = {"id": "c0", "name": "python", "arguments": "{}"}
HISTORIES: dict[str, list[Body]] = {
    "chat": [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Go."}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [{"id": "c0", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c0", "content": "4"},
    ],
    "responses": [
        {"role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "custom_tool_call", "call_id": "c0", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c0", "output": "done"},
        {"type": "compaction", "encrypted_content": "x"},
    ],
    "messages": [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", **CALL}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c0", "content": [{"type": "image"}]}]},
        {"role": "system", "content": [{"type": "text", "text": "Hurry."}]},
    ],
}
FREE = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"definition": "x"}}
FIELDS: dict[str, Body] = {
    "chat": {"stop": ["x"], "stream_options": {"include_usage": True}, "tool_choice": "required", "n": 2},
    "responses": {"instructions": "Be brief.", "tool_choice": {"type": "function", "name": "python"}},
    "messages": {"stop_sequences": ["x"], "tool_choice": {"type": "any"}, "system": [{"type": "text", "text": "Hi."}]},
}


def full(protocol: str) -> Body:
    """Return a request that has nearly everything."""
    body = ask(protocol, HISTORIES[protocol], ("python", "shell"), stream=True, **FIELDS[protocol])
    body["tools"] += [FREE, {"type": "namespace", "name": "space", "tools": [FREE]}, {"type": "web_search"}]
    return json.loads(json.dumps(body))


def damage(body: Any, draw: Callable[..., Any]) -> None:
    """Replace, or take out, something somewhere in a body."""
    key = draw(st.sampled_from(sorted(body) if isinstance(body, dict) else range(len(body))))
    if isinstance(body[key], dict | list) and body[key] and draw(st.integers(0, 3)):
        damage(body[key], draw)
    elif isinstance(body, dict) and not draw(st.integers(0, 3)):
        del body[key]
    else:
        body[key] = draw(VALUES)


def message_of(body: Body) -> str:
    """Return an error's message, which stands where each protocol's clients look for it."""
    assert isinstance(body["error"]["type"], str)
    return body["error"]["message"]


@pytest.mark.slow
@PROTOCOLS
@settings(max_examples=10 * settings().max_examples)
@given(data=st.data())
def test_any_json_is_answered_or_refused(protocol: str, renderer: Renderer, fuzzed: Any, data: st.DataObject) -> None:
    runner, client, engine = fuzzed
    body = full(protocol)
    for _ in range(data.draw(st.integers(0, 3))):
        damage(body, data.draw)
    engine.turns.append(tuple(renderer.turn("Fine.")))
    path = "messages/count_tokens" if protocol == "messages" and data.draw(st.booleans()) else PATHS[protocol]
    answer = runner.run(client.http.post(path, content=json.dumps(body), headers={"x-stainless-retry-count": "0"}))
    assert answer.status_code in (200, 400), (body, answer.text)
    if answer.status_code == 400:
        message_of(answer.json())


@pytest.fixture(scope="module")
def fuzzed(renderer: Renderer) -> Any:
    """An event loop, a client and an engine."""
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_REQUESTS", 10**6)
        engine, policy = scripted(renderer, [])
        endpoint = Endpoint()
        runner.run(endpoint.start())
        ticket = endpoint.open(policy, "hermes", 5)
        client = Client(endpoint.url, ticket)
        yield runner, client, engine
        runner.run(client.http.aclose())
        assert ticket.session.fault is None
        runner.run(endpoint.close(ticket))
        runner.run(endpoint.stop())


async def test_nobody_is_served_without_the_session_s_own_key(serve: Serve) -> None:
    async with serve(["a", "b"]) as at:
        other = at.endpoint.open(at.policy, "hermes", 6)
        own, key = at.ticket.name, at.ticket.key
        keys = {"x": own, other.key: own, key: other.name, "": "", f"{key}x": "", "sk-é".encode("latin-1"): ""}
        for protocol in PATHS:
            for wrong, name in keys.items():
                path = f"{f'/s/{name}' if name else ''}/v1/{PATHS[protocol]}"
                answer = await at.client.http.post(
                    at.endpoint.url + path, content=b"{", headers={"authorization": wrong}
                )
                assert answer.status_code == 401, (wrong, name)
                kind = {"messages": "authentication_error"}.get(protocol, "invalid_request_error")
                assert (answer.json()["error"]["type"] == kind and "type" in answer.json()) or protocol != "messages"
        by_key = await at.client.http.post(f"{at.endpoint.url}/v1/{PATHS['chat']}", json=ask("chat", "?"))
        by_header = {"x-api-key": key, "authorization": ""}
        by_other_header = await at.client.post("messages", ask("messages", "??"), **by_header)
        assert by_key.status_code == by_other_header.status_code == 200 and len(at.engine.asked) == 2
        await at.endpoint.close(at.ticket)
        assert (await at.client.post("chat", ask("chat", "?"))).status_code == 401
        assert at.session.fault is None and not other.session.counts
        await at.endpoint.close(other)


async def test_paths_and_sizes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in (("_BODY_BYTES", 2000), ("_REQUESTS", 9)):
        monkeypatch.setattr(server, limit, value)
    async with serve(["Fine."]) as at:
        assert (await at.client.http.head(at.endpoint.url)).status_code == 200
        models = await at.client.http.get("models")
        assert models.json()["data"][0]["object"] == "model"
        tokens = (await at.client.http.post("messages/count_tokens", json=ask("messages", "Hello."))).json()
        usage = (await at.client.say("messages", ask("messages", "Hello."))).usage
        assert tokens == {"input_tokens": usage["input_tokens"]} and usage["output_tokens"] == len(
            at.engine.asked[0][1]
        )
        for method, path in (("GET", "responses"), ("POST", "embeddings"), ("POST", ""), ("DELETE", "models")):
            assert (await at.client.http.request(method, path)).status_code == 404
        for protocol, path in PATHS.items():
            large = await at.client.http.post(path, content=b" " * 3000)
            assert large.status_code == 413 and "2000 bytes" in message_of(large.json())
            broken = await at.client.http.post(path, content=b"{")
            assert broken.status_code == 400 and "JSON" in message_of(broken.json())
            assert (protocol == "messages") == (broken.json().get("type") == "error")
        await at.client.http.post("messages", content=b"[]")
        too_many = await at.client.post("chat", ask("chat", "?"))
        assert too_many.status_code == 400 and "too much" in message_of(too_many.json())
        assert len(at.engine.asked) == len(at.policy.rewards) == 1


@PROTOCOLS
@pytest.mark.parametrize("error", [InfrastructureError("gone"), RuntimeError("a defect")])
async def test_a_fault_is_the_session_s_and_an_error_of_the_server(serve: Serve, protocol: str, error: Any) -> None:
    async with serve([]) as at:
        at.policy._engine = Failing([error, error])
        for stream in (False, True):
            answer = await at.client.post(protocol, ask(protocol, "?", stream=stream))
            assert answer.status_code == 500 and message_of(answer.json()) == "the engine failed"
            assert at.session.fault is error and not at.policy.rewards


@PROTOCOLS
async def test_a_history_without_room_is_refused_in_the_client_s_words(serve: Serve, protocol: str) -> None:
    async with serve(["Fine."]) as at:
        at.policy._player.limits = EpisodeLimits(episode_tokens=1000)
        for length in (9000, 1100):
            answer = await at.client.post(protocol, ask(protocol, "x" * length, stream=True))
            error = answer.json()["error"]
            assert answer.status_code == 400 and at.session.fault is None
            assert error.get("code", "prompt is too long" in error["message"]) in (True, "context_length_exceeded")
        # It goes on where the client makes its history shorter.
        assert (await at.client.say(protocol, ask(protocol, "x"))).text == "Fine."
        assert len(at.policy.rows()) == 1 and at.policy.rewards == [0.0]


class Slow(Told):
    """Takes a moment for each token, until it is let go."""

    cancelled = 0
    free = False

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        began = asyncio.get_running_loop().time()
        try:
            while not self.free and asyncio.get_running_loop().time() < began + 60:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, sampling, seed=seed)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@PROTOCOLS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_sampling(serve: Serve, protocol: str, stream: bool) -> None:
    async with serve(["Fine."]) as at:
        at.policy._engine = slow = Slow(at.engine.turns)
        asking = asyncio.create_task(at.client.post(protocol, ask(protocol, "?", stream=stream)))
        await until(lambda: at.session._attempts)
        asking.cancel()
        await until(lambda: slow.cancelled and at.session.counts["never delivered"])
        assert not at.policy.rewards and not at.policy._rows[0].token_ids and at.session.fault is None
        slow.free = True
        answer = await at.client.say(protocol, ask(protocol, "?", stream=stream))
        assert answer.text == "Fine." and not +at.policy.forks
        # Whoever drops an answer that it has got, and goes on before it, leaves a row that is finished.
        slow.turns.append(slow.asked[0][1])
        nudge = [{"role": "user", "content": text} for text in ("?", "Go on.")]
        await at.client.say(protocol, ask(protocol, nudge, stream=stream))
        assert at.policy.forks == {"dropped": 1} and len(at.policy.rewards) == 2
        assert at.session.counts["never delivered"] == 1
        check(at.policy, slow.asked)


@PROTOCOLS
@pytest.mark.parametrize("header", [{}, {"x-stainless-retry-count": "1"}])
async def test_a_retry_ends_the_first_attempt(serve: Serve, protocol: str, header: dict[str, str]) -> None:
    async with serve(["Fine.", "Good."]) as at:
        at.policy._engine = slow = Slow(at.engine.turns)
        asking = asyncio.create_task(at.client.post(protocol, ask(protocol, "?")))
        await until(lambda: at.session._attempts)
        again = asyncio.create_task(at.client.say(protocol, ask(protocol, "?", stream=True), **header))
        await until(lambda: slow.cancelled)
        assert (await asking).status_code == 503
        slow.free = True
        assert (await again).text == "Fine." and not +at.policy.forks and len(at.policy.rows()) == 1
        # The same body once more, after its answer: a second sample.
        assert (await at.client.say(protocol, ask(protocol, "?"), **header)).text == "Good."
        assert at.policy.forks == {"again": 1} and at.session.counts["retried"] == 1
        check(at.policy, slow.asked)


@PROTOCOLS
async def test_of_retries_at_once_one_is_answered(serve: Serve, protocol: str) -> None:
    async with serve(["Fine."]) as at:
        at.policy._engine = slow = Slow(at.engine.turns)
        asking = [asyncio.create_task(at.client.post(protocol, ask(protocol, "?")))]
        await until(lambda: at.session._attempts)
        retried = {"x-stainless-retry-count": "1"}
        asking += [asyncio.create_task(at.client.post(protocol, ask(protocol, "?"), **retried)) for _ in range(3)]
        await until(lambda: at.session.counts["retried"] == 3 and len(at.session._attempts) == 1)
        slow.free = True
        assert sorted(answer.status_code for answer in await asyncio.gather(*asking)) == [200, 503, 503, 503]
        assert not +at.policy.forks and len(at.policy.rows()) == 1
        check(at.policy, slow.asked)


@PROTOCOLS
async def test_parallel_requests_are_rows_side_by_side(serve: Serve, protocol: str) -> None:
    async with serve(["a", "b", "c"]) as at:
        at.policy._engine = slow = Slow(at.engine.turns)
        same = ask(protocol, "?", stream=True)
        bodies = [same, same, ask(protocol, "Another.")]
        asking = [at.client.say(protocol, body, **{"x-stainless-retry-count": "0"}) for body in bodies]
        answers = asyncio.gather(*asking)
        await until(lambda: len(at.session._attempts) == 3)
        slow.free = True
        assert sorted(answer.text for answer in await answers) == ["a", "b", "c"]
        assert len(at.policy.rows()) == 3 and all(row.parent is None for row in at.policy.rows())
        assert sorted(recorded(at.policy)) == sorted(slow.asked)


@PROTOCOLS
async def test_titles_are_answered_and_not_recorded(serve: Serve, protocol: str) -> None:
    async with serve(["Sums", "4", "Dune"]) as at:
        texts = ["Generate a title for this conversation:\n", "2+2?"]
        title = ask(protocol, [{"role": "user", "content": text} for text in texts], tools=())
        assert (await at.client.say(protocol, title)).text == "Sums"
        assert not at.policy.rewards and not at.session.messages
        assert (await at.client.say(protocol, ask(protocol, "2+2?"))).text == "4"
        # A task about titles is a task.
        assert (await at.client.say(protocol, ask(protocol, "What is the book's title?", tools=()))).text == "Dune"
        assert len(at.policy.rewards) == 2 and at.session.counts["requests title"] == 1


@PROTOCOLS
async def test_turns_of_others_are_context(serve: Serve, protocol: str) -> None:
    async with serve(["Mine."]) as at:
        texts = {"assistant": "Never sampled.", "user": "Go on."}
        await at.client.say(protocol, ask(protocol, [{"role": role, "content": text} for role, text in texts.items()]))
        ((prompt, turn),) = recorded(at.policy)
        assert "Never sampled." in at.policy.text(prompt) and at.policy.text(turn) == "Mine."


async def test_an_answer_on_its_way_is_built_upon(renderer: Renderer) -> None:
    _, policy = scripted(renderer, ["a", "b"])
    session, asking = Session(policy, "hermes", "x"), list[asyncio.Task[Any]]()

    class Early(Reply):
        async def body(self, body: Any) -> None:
            history = [{"role": "user", "content": "?"}, *read("chat", body).items, {"role": "user", "content": "And?"}]
            request = CHAT.read(ask("chat", history))
            asking.append(asyncio.create_task(session.answer(CHAT, request, {}, Reply())))
            await asyncio.sleep(0.01)

    await session.answer(CHAT, CHAT.read(ask("chat", "?")), {}, Early())
    await asking[0]
    assert not +policy.forks and len(policy.rows()) == 1 and len(policy.rewards) == 2


@pytest.mark.slow
async def test_a_slow_client_holds_up_no_closing(serve: Serve) -> None:
    async with serve(["x" * 10**6]) as at:
        host, port = at.endpoint.url.removeprefix("http://").split(":")
        body = json.dumps(ask("chat", "?")).encode()
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {at.ticket.key}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-1])
        await until(lambda: at.ticket.running)
        await at.endpoint.close(at.ticket)
        writer.close()
        assert not at.policy.rewards
