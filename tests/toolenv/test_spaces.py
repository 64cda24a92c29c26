"""Spaces for text: what belongs to them, and that samples do."""

import copy
from json import dumps, loads
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.toolenv.spaces import Messages, Unicode

HELLO = {"role": "user", "content": "hello"}


@given(st.text(max_size=50))
def test_every_text_that_can_be_encoded_is_in(text: str) -> None:
    assert Unicode().contains(text)
    assert Messages().contains(({"role": "assistant", "content": text},))


@pytest.mark.parametrize("other", ["\ud800", b"bytes", 3, None, ["text"], pytest.param("x" * 1_000_001, id="long")])
def test_what_is_no_text_is_out(other: object) -> None:
    assert not Unicode().contains(other)


@pytest.mark.parametrize(
    "other",
    [
        *([HELLO], (None,), ({"role": "robot", "content": ""},), ({"role": "user"},)),
        *(({"role": "user", "content": None},), ({"role": "user", "content": "\udfff"},)),
        *(({"role": "user", "content": "", "name": 3},), ({"role": "tool", "content": "", "name": "\ud800"},)),
        *(({"role": ["user"], "content": ""},), ({"content": "", "name": ""},), "user", ("user",)),
        *({"role": "user", "content": ""}, ((HELLO,),), (HELLO, [HELLO])),
        ({"role": "user", "content": "", "mood": "good"},),
    ],
)
def test_other_things_are_no_messages(other: object) -> None:
    assert other not in Messages()


@pytest.mark.parametrize("space", [Unicode(), Messages()])
def test_samples_are_in_and_follow_the_seed(space: Any) -> None:
    space.seed(3)
    samples = [space.sample() for _ in range(50)]
    assert all(space.contains(sample) for sample in samples)
    assert len({str(sample) for sample in samples}) > 10
    space.seed(3)
    assert [space.sample() for _ in range(50)] == samples


def test_messages_come_back_from_json() -> None:
    space = Messages(seed=2)
    samples = [space.sample() for _ in range(9)]
    back = space.from_jsonable(loads(dumps(space.to_jsonable(samples))))
    assert back == samples and all(space.contains(sample) for sample in back)


def test_spaces_of_a_kind_are_equal() -> None:
    for space in (Unicode(), Messages()):
        assert space == copy.deepcopy(space) and hash(space) == hash(copy.deepcopy(space))
        assert repr(space) == f"{type(space).__name__}()" and not space.is_np_flattenable
    assert Unicode() != Messages() and Unicode() != "space"
