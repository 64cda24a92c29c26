"""Answers in three protocols, whole and as streams: what clients read, and that what comes back is our turn again."""

import asyncio
import copy
import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.endpoint import speech
from agentrl.endpoint.chat import CHAT
from agentrl.endpoint.messages import MESSAGES
from agentrl.endpoint.responses import RESPONSES
from agentrl.endpoint.session import Options, Session
from agentrl.endpoint.turns import OwnTurn, OwnTurns
from agentrl.endpoint.wire import Answer, Call, Item, Wire
from agentrl.engines.base import Completion, Sampling
from agentrl.render.renderer import Renderer

from ..rollout.test_policy import Told, check
from .client import PATHS, Answered, Body, ask, read, read_stream, result
from .conftest import Serve, recorded, scripted
from .recorded import Reply

WIRES: dict[str, Wire] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
WAYS = pytest.mark.parametrize(("protocol", "stream"), [*product(PATHS, (False, True))])
STOPS = {"chat": "stop", "responses": "completed", "messages": "end_turn"}
CALLED = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}
CUT = {"chat": "length", "responses": "completed", "messages": "max_tokens"}


def call(arguments: str, name: str = "python") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


TWO = call('{"code": "é"}') + call('{"code": "", "n": [1.0, 10000000000000000000001]}')
TURNS: dict[str, tuple[str, str, list[tuple[str, object]]]] = {
    "Hello.\n\n{x} `y` <z>": ("", "Hello.\n\n{x} `y` <z>", []),
    "<think>\nHm.\n</think>\n\nHello.": ("\nHm.\n", "\n\nHello.", []),
    "<think>Hm.": ("Hm.", "", []),
    "": ("", "", []),
    "\n \n": ("", "", []),
    call("{}"): ("", "", [("python", {})]),
    f"<think>Hm.</think>Look:\n{TWO}\nDone.": (
        "Hm.",
        "Look:\n\nDone.",
        [("python", {"code": "é"}), ("python", {"code": "", "n": [1.0, 10000000000000000000001]})],
    ),
    call('{"code": 1', "shell"): ("", "", [("shell", '{"code": 1')]),
    call("[1]"): ("", "", [("python", "[1]")]),
    call('{"code": "\\ud800"}'): ("", "", [("python", {"code": "\ufffd"})]),
    call("{}", "none_such"): ("", "", [("none_such", {})]),
    "<tool_call>junk": ("", "", [("invalid", "<tool_call>junk")]),
}


def pairs(answer: Answered, calls: list[tuple[str, object]]) -> Any:
    """Return the arguments of each call with those that are expected."""
    return zip([arguments for _, _, arguments in answer.calls], calls, strict=True)


@WAYS
@pytest.mark.parametrize("turn", TURNS)
async def test_an_answer_is_read_and_comes_back(serve: Serve, protocol: str, stream: bool, turn: str) -> None:
    thinking, text, calls = TURNS[turn]
    bad = [f"{name} {arguments}" for name, arguments in calls if isinstance(arguments, str)]
    async with serve([turn, "Bye."]) as at:
        body = ask(protocol, "?", stream=stream, stream_options={"include_usage": True})
        answer = await at.client.say(protocol, body)
        if bad and (protocol, stream) == ("messages", False):
            text, calls = "\n".join(bad), []
        assert (answer.thinking, answer.text) == (thinking, text)
        names = [name for _, name, _ in answer.calls]
        read_as = [text if isinstance(value, str) else json.loads(text) for text, (_, value) in pairs(answer, calls)]
        assert [*zip(names, read_as, strict=True)] == calls
        assert answer.finish == (CALLED if calls else STOPS)[protocol]
        spent = [value for key, value in answer.usage.items() if key in ("completion_tokens", "output_tokens")]
        assert spent == [len(at.engine.asked[0][1])]
        ids = [call_id for call_id, _, _ in answer.calls]
        assert len({*ids, answer.id}) == len(ids) + 1
        # The results in another order, as some clients send them.
        results = [result(protocol, call_id, f"result {call_id}") for call_id in reversed(ids)]
        history = [{"role": "user", "content": "?"}, *answer.items, *results, {"role": "user", "content": "Go on."}]
        await at.client.say(protocol, ask(protocol, history, stream=stream))
        assert +at.policy.forks == ({} if thinking or text or calls else {"dropped": 1})
        assert not at.session.counts["edited"]
        check(at.policy, at.engine.asked)


@WAYS
async def test_stop_texts_end_an_answer(serve: Serve, renderer: Renderer, protocol: str, stream: bool) -> None:
    field = {"chat": "stop", "messages": "stop_sequences", "responses": "stop"}[protocol]
    turns = ["Answer: 4Observation: 5\nand more", "No stop."]
    async with serve(turns) as at:
        body = {**ask(protocol, "?", stream=stream), field: ["zzz", "Observation:"]}
        answer = await at.client.say(protocol, body)
        if protocol == "responses":
            assert answer.text == turns[0], "the protocol has no such field"
            return
        assert answer.text == "Answer: 4"
        assert answer.finish == {"chat": "stop", "messages": "stop_sequence"}[protocol]
        # What was sampled is recorded, up to the token that completed the stop text.
        (_, token_ids), sampled = recorded(at.policy)[0], tuple(renderer.turn(turns[0]))
        assert sampled[: len(token_ids)] == token_ids and renderer.text(token_ids) == "Answer: 4Observation:"
        history = [*body["messages"], *answer.items, {"role": "user", "content": "Go on."}]
        second = await at.client.say(protocol, {**body, "messages": history})
        assert (second.text, second.finish) == ("No stop.", STOPS[protocol]) and not +at.policy.forks


CHOICES = {
    "chat": ("required", {"type": "function", "function": {"name": "shell"}}),
    "responses": ("required", {"type": "function", "name": "shell"}),
    "messages": ({"type": "any"}, {"type": "tool", "name": "shell"}),
}
RESTS = {
    "hermes": '{"name": "shell", "arguments": {"code": "ls"}}\n</tool_call>',
    "xml": "ls</shell>",
    "fence": "ls\n```",
}


@WAYS
@pytest.mark.parametrize("dialect", RESTS)
async def test_a_call_that_must_be_is_begun(serve: Serve, protocol: str, stream: bool, dialect: str) -> None:
    tools = ("shell",) if dialect != "hermes" else ("python", "shell")
    async with serve([RESTS[dialect]], dialect) as at:
        choice = CHOICES[protocol][dialect != "hermes"]
        answer = await at.client.say(protocol, ask(protocol, "?", tools, stream=stream, tool_choice=choice))
        assert [(name, json.loads(arguments)) for _, name, arguments in answer.calls] == [("shell", {"code": "ls"})]
        assert not answer.text
        # The opening is context, without loss: the turn is what was sampled.
        ((prompt, turn),) = recorded(at.policy)
        assert (prompt, turn) == at.engine.asked[0] and at.policy.text(turn) == RESTS[dialect]


@WAYS
async def test_a_limit_of_tokens_cuts(serve: Serve, protocol: str, stream: bool) -> None:
    field = {"chat": "max_completion_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}[protocol]
    turns = ["Hello, my dear friend.", call('{"code": "and so on and on"}')]
    async with serve(turns) as at:
        body = {**ask(protocol, "?", stream=stream), field: 6}
        answer = await at.client.say(protocol, body)
        assert answer.finish == CUT[protocol] and turns[0].startswith(answer.text) and answer.text
        second = await at.client.say(protocol, {**body, field: 12})
        assert second.finish == CUT[protocol] and bool(second.calls) != (protocol == "messages" and not stream)
        assert [len(turn) for _, turn in recorded(at.policy)] == [6, 12]
        for limit in (0, -1, 2.5, "9"):
            answer = await at.client.post(protocol, {**body, field: limit})
            assert answer.status_code == 400 or (limit == 0 and protocol == "chat" and answer.status_code == 500)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_continues_the_one_that_it_names(serve: Serve, stream: bool) -> None:
    async with serve([call("{}"), "4", "Five.", "6"]) as at:
        answer = await at.client.say("responses", ask("responses", "?", instructions="Be brief.", stream=stream))
        new = [result("responses", answer.calls[0][0], "4")]
        fields: Body = {"previous_response_id": answer.id, "stream": stream}
        second = await at.client.say("responses", ask("responses", new, instructions="Be brief.", **fields))
        fields = {"previous_response_id": second.id}
        third = await at.client.say("responses", ask("responses", "And?", instructions="Be brief.", **fields))
        assert (second.text, third.text) == ("4", "Five.") and not +at.policy.forks and len(at.policy.rows()) == 1
        # The instructions are those of each request.
        await at.client.say("responses", ask("responses", "And?", instructions="Be long.", **fields))
        assert len(at.policy.rows()) == 2
        lost = await at.client.post("responses", ask("responses", "?", previous_response_id="resp_x"))
        assert lost.status_code == 400 and "previous_response_id" in lost.json()["error"]["message"]
        check(at.policy, at.engine.asked)


@WAYS
async def test_what_the_policy_can_not_do_is_counted_or_refused(serve: Serve, protocol: str, stream: bool) -> None:
    fields = {"chat": {"n": 3, "logit_bias": {"1": 2}}, "responses": {"background": True}, "messages": {"top_k": 3}}
    body = {**ask(protocol, "?", temperature=0.3, stream=stream), **fields[protocol]}
    for strict in (False, True):
        async with serve(["Hi."], options=Options(strict=strict)) as at:
            answer = await at.client.post(protocol, body)
            assert answer.status_code == (400 if strict else 200) and len(at.policy.rewards) == (not strict)
            if strict:
                assert "temperature" in answer.json()["error"]["message"]
            else:
                ignored = {name.removeprefix("ignored ") for name in at.session.counts if "ignored" in name}
                assert ignored == {"temperature", *fields[protocol]}
            assert (await at.client.post(protocol, ask(protocol, "?", temperature=1, n=1))).status_code in (200, 500)


@pytest.mark.parametrize("stream", [False, True])
async def test_free_texts_and_namespaces_are_the_client_s(serve: Serve, stream: bool) -> None:
    grammar = {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "G"}}
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
    space = {"type": "namespace", "name": "agents", "tools": [spawn]}
    turn = call('{"input": "*** a\\nb"}', "patch") + call('{"to": 1}', "agents__spawn") + call('{"wrong": 1}', "patch")
    async with serve([turn, "Bye."]) as at:
        body = ask("responses", "?", stream=stream)
        body["tools"] += [grammar, space, {"type": "web_search"}]
        answer = await at.client.say("responses", body)
        assert "The input has this grammar:" in at.policy.text(at.engine.asked[0][0])
        assert [item["type"] for item in answer.items] == ["custom_tool_call", "function_call", "custom_tool_call"]
        assert [call[2] for call in answer.calls] == ["*** a\nb", '{"to": 1}', '{"wrong": 1}']
        assert (answer.items[1]["namespace"], answer.items[1]["name"]) == ("agents", "spawn")
        outputs = [
            {"type": "custom_tool_call_output", "call_id": answer.calls[0][0], "output": "Done."},
            result("responses", answer.calls[1][0], "Spawned."),
            {"type": "custom_tool_call_output", "call_id": answer.calls[2][0], "output": [{"type": "input_image"}]},
        ]
        body["input"] += [*answer.items, *outputs]
        await at.client.say("responses", body)
        counts = at.session.counts
        assert not +at.policy.forks and not counts["edited"]
        assert counts["ignored images"] == 1 and counts["ignored tool web_search"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_free_texts_in_chat_are_the_client_s(serve: Serve, stream: bool) -> None:
    custom = {"name": "patch", "format": {"type": "grammar", "definition": "G"}}
    async with serve([call('{"input": "*** a\\nb"}', "patch"), "Bye."]) as at:
        body = ask("chat", "?", (), stream=stream)
        body["tools"] = [{"type": "custom", "custom": custom}]
        answer = await at.client.say("chat", body)
        assert answer.items[0]["tool_calls"][0]["custom"] == {"name": "patch", "input": "*** a\nb"}
        body["messages"] += [*answer.items, result("chat", answer.calls[0][0], "Done.")]
        await at.client.say("chat", body)
        assert not +at.policy.forks and not at.session.counts["edited"]


async def test_stop_texts_and_stored_histories_are_bounded(serve: Serve) -> None:
    async with serve(["Hi.", "Hi.", "Hi."]) as at:
        for stop in (["x"] * 17, "x" * 1001):
            refused = await at.client.post("chat", ask("chat", "?", stop=stop))
            assert refused.status_code == 400 and "stop" in refused.json()["error"]["message"]
        stored = at.session._responses
        history = [{"role": "user", "content": "?" * 1000}]
        for _ in range(2):
            await at.client.say("responses", ask("responses", history))
        older, newer = stored.values()
        assert older[0].texts == ("?" * 1000,) and older[0] is newer[0]


class Trickle(Told):
    """Samples token by token."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        watch, tokens = sampling.watch, list[int]()
        for token in self.turns[0]:
            tokens.append(token)
            await asyncio.sleep(0)
            if watch is not None and watch(token):
                break
        self.turns[0] = tuple(tokens)
        return await super().generate(prompt_ids, Sampling(max_tokens=10**5, stop_ids=sampling.stop_ids), seed=seed)


TEXTS = ["Hello. ", "\n", "\n\n", " ", "é中🙂", "{", "}", '{"name": "x"', "```", "```python\n", "x < y", "<", "STOP"]
MARKS = ["<think>", "</think>\n", "<tool_call>", "</tool_call>\n", "<python>1</python>\n"]
PARTS = st.sampled_from([*TEXTS, *MARKS, call('{"code": "1"}'), call("{bad")])


@given(
    thought=st.sampled_from(["", "<think>Hm.\n{\n</think>"]),
    turn=st.lists(PARTS, max_size=12).map("".join),
    protocol=st.sampled_from(sorted(PATHS)),
    dialect=st.sampled_from(["hermes", "fence", "xml", "native-llama"]),
    stop=st.sampled_from([(), ("STOP",), ("x", "STOP")]),
)
def test_a_stream_says_what_the_whole_would(
    renderer: Renderer, thought: str, turn: str, protocol: str, dialect: str, stop: tuple[str, ...]
) -> None:
    wire, answers = WIRES[protocol], list[Answer]()
    engine, policy = scripted(renderer, [thought + turn] * 2)
    vars(policy)["_engine"] = Trickle(engine.turns)
    session = Session(policy, dialect, "x")
    replies = Reply(), Reply()

    async def play() -> None:
        for stream, reply in zip((False, True), replies, strict=True):
            body = ask(protocol, "?", stream=stream, stop=[*stop], stop_sequences=[*stop])
            answers.append(await session.answer(wire, wire.read(body), {}, reply))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speech, "_LOOK_S", 0)
        asyncio.run(play())
    sent = [(name, data if isinstance(data, str) else json.dumps(data)) for name, data in replies[1].sent]
    lines = [f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n" for name, data in sent]
    streamed = read_stream(protocol, "".join(lines))
    # What a client has read is what is looked for when it comes back.
    assert (streamed.thinking, streamed.text) == (answers[1].thinking, answers[1].text)
    whole = read(protocol, replies[0].body_sent)
    # Thoughts behind a text can't be streamed, and a stray mark makes thoughts of a text that was sent already.
    if "think>" not in turn and protocol != "messages":
        assert streamed.value == whole.value


@pytest.fixture(scope="session")
def thinker(tokenizer: Any) -> Renderer:
    """A renderer whose template begins each turn with thinking."""
    opening = copy.deepcopy(tokenizer)
    opening.chat_template = tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    return Renderer(opening)


@WAYS
async def test_thinking_that_the_template_opens_is_thinking(
    serve: Serve, thinker: Renderer, protocol: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "_LOOK_S", 0)
    turns = ["Hm.\nWell.\n</think>\n\nHello.\n", "Hm.\nWell.", RESTS["hermes"]]
    async with serve(turns, renderer=thinker) as at:
        assert at.policy.opens_thinking
        at.policy._engine = engine = Trickle(at.engine.turns)
        answer = await at.client.say(protocol, ask(protocol, "?", stream=stream))
        assert (answer.thinking, answer.text) == ("Hm.\nWell.\n", "\n\nHello.\n")
        history = [{"role": "user", "content": "?"}, *answer.items, {"role": "user", "content": "Go on."}]
        second = await at.client.say(protocol, ask(protocol, history, stream=stream))
        assert (second.thinking, second.text) == ("Hm.\nWell.", "") and not +at.policy.forks
        must = ask(protocol, "Call.", ("shell",), stream=stream, tool_choice=CHOICES[protocol][1])
        assert [name for _, name, _ in (await at.client.say(protocol, must)).calls] == ["shell"]
        check(at.policy, engine.asked)


def own(text: str = "", thinking: str = "", arguments: str | None = None, **more: Any) -> OwnTurn:
    calls = () if arguments is None else (Call(id="c0", name="python", arguments=arguments, **more),)
    return OwnTurn(position=1, raw=f"{thinking}{text}{arguments}", thinking=thinking, text=text, calls=calls)


def back(*texts: str, thinking: str = "", arguments: object = None, name: str = "python") -> Item:
    calls = () if arguments is None else (Call(id="c0", name=name, arguments=arguments),)
    return Item(role="assistant", texts=texts, thinking=thinking, calls=calls)


BAD = '{"code": 1'
SAME = [
    # Texts are joined, those before them may be another answer's, which was cut off, and thoughts may be absent.
    (own("ab"), back("a", "b"), 0),
    (own("b"), back("cut", "b"), 1),
    (own("b", "Hm."), back("b"), 0),
    (own("b", "Hm."), back("b", thinking="Hm."), 0),
    # Arguments are values.
    (own(arguments='{"a": 1.0, "b": 1e4}'), back(arguments={"b": 10000, "a": 1}), 0),
    (own(arguments='{"n": 10000000000000000000001}'), back(arguments='{"n":1e22}'), 0),
    (own(arguments='{"a": 1, "a": 2}'), back(arguments='{"a":2}'), 0),
    (own(arguments=""), back(arguments={}), 0),
    (own(arguments='{"a": "\ufffd"}'), back(arguments='{"a": "\\ud800"}'), 0),
    # What clients make of bad ones.
    (own(arguments=BAD), back(arguments={"__unparsedToolInput": {"raw": BAD, "len": len(BAD)}}), 0),
    (own(arguments=BAD), back(arguments={"tool": "python", "error": "x"}, name="invalid"), 0),
    (own(arguments="[1]"), back(arguments={"value": [1]}), 0),
    (own(arguments='{"input": "x"}', free=True), back(arguments={"input": "x"}), 0),
    # No others.
    (own("ab"), back("a b"), None),
    (own("b", "Hm."), back("b", thinking="Oh."), None),
    (own(""), back(), None),
    (own(arguments='{"a": 1}'), back(arguments={"a": True}), None),
    (own(arguments='{"a": 1}'), back(arguments={"a": 2}), None),
    (own(arguments=BAD), back(arguments={"__unparsedToolInput": {"raw": "x"}}), None),
    (own("b", arguments="{}"), back("c", arguments={}), None),
]


@pytest.mark.parametrize(("turn", "item", "skipped"), SAME)
def test_a_turn_is_found_by_its_values(turn: OwnTurn, item: Item, skipped: int | None) -> None:
    turns = OwnTurns()
    turns.add(turn)
    assert turns.find(item, 1) == ((None, 0) if skipped is None else (turn, skipped))


def test_of_equal_turns_the_newest_is_meant_and_that_which_stood_there_more() -> None:
    turns, equal = OwnTurns(), [own("b", thinking) for thinking in ("x", "y", "z")]
    for turn, position in zip(equal, (1, 1, 3), strict=True):
        turns.add(replace(turn, position=position))
    found_at = [turns.find(back("b"), position)[0] for position in (1, 3, 9)]
    assert [turn and turn.thinking for turn in found_at] == ["y", "z", "z"]
