"""Conversations as characters: what was written is read, and no text can spell a mark."""

import json
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.render.transcript import Transcript
from agentrl.toolenv.dialects.native import NativeHermes
from agentrl.types import Message

TEXTS = st.text(st.characters(), max_size=20)
WRITER = Transcript()


@given(TEXTS, st.lists(st.tuples(TEXTS, st.booleans(), TEXTS), max_size=3))
def test_messages_are_those_that_were_written(task: str, turns: Sequence[tuple[str, bool, str]]) -> None:
    opening: list[Message] = [{"role": "system", "content": "<|user|>"}, {"role": "user", "content": task}]
    ids = list(WRITER.prompt(opening).token_ids)
    spoken: list[dict[str, str]] = [{"role": row["role"], "content": readable(row["content"])} for row in opening]
    for text, ended, result in turns:
        turn = WRITER.turn(text, ended=ended)
        assert WRITER.text(turn) == readable(text) and (turn[-1:] == WRITER.stop_ids) == ended
        segments = WRITER.extend(turn, [{"role": "tool", "content": result, "name": "python"}])
        assert [segment.source for segment in segments][-3:] == ["template", "tool", "template"]
        ids += [*turn, *(token for segment in segments for token in segment.token_ids)]
        spoken += [{"role": "assistant", "content": readable(text)}, {"role": "user", "content": readable(result)}]
    assert list(WRITER.messages(ids)) == spoken
    assert "".join(WRITER.decode([token]) for token in ids) == WRITER.decode(ids)


@given(TEXTS, st.lists(st.tuples(TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=2)), min_size=1, max_size=3))
@example("a\0b", [("\0", {"\0": "\0"})])
def test_calls_are_read_by_both_sides(text: str, calls: Sequence[tuple[str, dict[str, str]]]) -> None:
    writer = Transcript([{"type": "function", "function": {"name": "<|user|>"}}])
    prompt = writer.prompt([{"role": "user", "content": "q"}]).token_ids
    assert writer.tools(prompt) == [{"type": "function", "function": {"name": "<|user|>"}}]
    assert WRITER.tools(WRITER.prompt([{"role": "user", "content": "q"}]).token_ids) == ()
    given_calls = [(readable(name), json.dumps(arguments)) for name, arguments in calls]
    turn = writer.turn(text, given_calls, ended=True)
    after = writer.extend(turn, [{"role": "tool", "content": str(at)} for at in range(len(calls))])
    ids = [*prompt, *turn, *(token for segment in after for token in segment.token_ids)]
    _, call_turn, *results = WRITER.messages(ids)
    functions = [call["function"] for call in call_turn["tool_calls"]]
    assert [(function["name"], function["arguments"]) for function in functions] == given_calls
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in call_turn["tool_calls"]]
    if "<" not in text:  # which may begin thinking or a call of its own
        read = NativeHermes().parse(writer.text(turn))
        wanted = [(name, dict(arguments)) for (name, _), (_, arguments) in zip(given_calls, calls, strict=True)]
        assert [(call.name, call.arguments) for call in read if not call.error] == [
            call_ for call_, call in zip(wanted, read, strict=True) if not call.error
        ]


def test_call_that_is_no_json_is_text_for_the_model() -> None:
    turn = WRITER.turn("", [("python", '{"code"')], ended=True)
    (call,) = NativeHermes().parse(WRITER.text(turn))
    assert call.error
    after = WRITER.extend(turn, [{"role": "tool", "content": "no JSON"}])
    ids = [*WRITER.prompt([]).token_ids, *turn, *(token for segment in after for token in segment.token_ids)]
    assert [message["role"] for message in WRITER.messages(ids)] == ["assistant", "user"]


def readable(text: str) -> str:
    return text.encode(errors="replace").decode()


def test_marks_are_told() -> None:
    assert (
        WRITER.decode(list(WRITER.prompt([{"role": "user", "content": "Hi"}]).token_ids)) == "<|user|>Hi<|assistant|>"
    )
