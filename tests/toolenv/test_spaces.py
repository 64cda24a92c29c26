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


@pytest.mark.parametrize("other", ["\ud800", b"bytes", 3, None, ["text"], "toolong"])
def test_what_is_no_text_is_out(other: object) -> None:
    assert not Unicode(max_length=6).contains(other)


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


@pytest.mark.parametrize("space", [Unicode(), Unicode(max_length=3), Messages(), Messages(max_length=5)])
def test_samples_are_in_and_follow_the_seed(space: Any) -> None:
    space.seed(3)
    samples = [space.sample() for _ in range(50)]
    assert all(space.contains(sample) for sample in samples)
    assert len({str(sample) for sample in samples}) > 10
    space.seed(3)
    assert [space.sample() for _ in range(50)] == samples


json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=7), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["role", "content", "name", "tool_call_id", "mood"])
values = st.sampled_from(["system", "user", "assistant", "tool", "robot", "", "\udc80", None, 3, (), b"tool"])


def is_message(thing: Any) -> bool:
    """What a message is, said once more and more slowly."""
    if type(thing) is not dict or "role" not in thing or "content" not in thing:
        return False
    texts = {key: value for key, value in thing.items() if isinstance(value, str)}
    try:
        "".join(texts.values()).encode()
    except UnicodeEncodeError:
        return False
    keys_ = {"role", "content", "name", "tool_call_id"}
    return texts == thing and set(thing) <= keys_ and thing["role"] in {"system", "user", "assistant", "tool"}


@given(json | st.lists(st.dictionaries(keys, values), max_size=3).map(tuple))
def test_a_space_contains_messages_and_nothing_else(thing: Any) -> None:
    assert Messages().contains(thing) == (type(thing) is tuple and all(map(is_message, thing)))


def test_messages_come_back_from_json() -> None:
    space = Messages(seed=2)
    samples = [space.sample() for _ in range(9)]
    back = space.from_jsonable(loads(dumps(space.to_jsonable(samples))))
    assert back == samples and all(space.contains(sample) for sample in back)


@pytest.mark.parametrize("kind", [Unicode, Messages])
def test_spaces_are_equal_by_length(kind: Any) -> None:
    assert kind(5) == kind(5) == copy.deepcopy(kind(5)) and hash(kind(5)) == hash(kind(5))
    others = [kind(6), "space", Messages(5) if kind is Unicode else Unicode(5)]
    assert kind(5) not in others
    assert repr(kind(5)) == f"{kind.__name__}(max_length=5)" and not kind(5).is_np_flattenable
