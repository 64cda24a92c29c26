"""Conversations as characters: what was written is read, and no text can spell a mark."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agentrl.render.transcript import Transcript
from agentrl.types import Message

TEXTS = st.text(st.characters(), max_size=20)
WRITER = Transcript()


@given(TEXTS, st.lists(st.tuples(TEXTS, st.booleans(), TEXTS), max_size=3))
def test_messages_are_those_that_were_written(task: str, turns: Sequence[tuple[str, bool, str]]) -> None:
    opening: list[Message] = [{"role": "system", "content": "<|user|>"}, {"role": "user", "content": task}]
    ids = list(WRITER.prompt(opening).token_ids)
    said: list[dict[str, str]] = [{"role": one["role"], "content": readable(one["content"])} for one in opening]
    for text, whole, result in turns:
        turn = WRITER.turn(text, whole=whole)
        assert WRITER.text(turn) == readable(text) and (turn[-1:] == WRITER.stop_ids) == whole
        segments = WRITER.extend(turn, [{"role": "tool", "content": result, "name": "python"}])
        assert [one.source for one in segments][-3:] == ["template", "tool", "template"]
        ids += [*turn, *(token for segment in segments for token in segment.token_ids)]
        said += [{"role": "assistant", "content": readable(text)}, {"role": "user", "content": readable(result)}]
    assert list(WRITER.messages(ids)) == said
    assert "".join(WRITER.decode([one]) for one in ids) == WRITER.decode(ids)


def readable(text: str) -> str:
    return text.encode(errors="replace").decode()


def test_marks_are_told() -> None:
    assert (
        WRITER.decode(list(WRITER.prompt([{"role": "user", "content": "Hi"}]).token_ids)) == "<|user|>Hi<|assistant|>"
    )
