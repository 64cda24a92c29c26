"""Segments, trajectories and groups: records that can't be wrong."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EnvContractError, TrajectoryError
from agentrl.types import Group, Segment, Stop, Task, Trajectory, flatten

PROMPT = Segment("prompt", (1, 2, 3))
TURN = Segment("policy", (4, 5), (-0.5, -1.0), 0)
RESULT = Segment("tool", (6,))


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {"segments": (PROMPT, TURN, RESULT, TURN), "rewards": (0.0, 1.0), **changes}
    return Trajectory(**{"task_id": "t:0", "seed": 0, "stop": Stop.TERMINATED, **fields})


def test_trained_means_sampled_by_the_policy() -> None:
    assert TURN.trained and not any(segment.trained for segment in (PROMPT, RESULT, Segment("template", ())))


def test_a_segment_holds_tuples_whatever_it_was_given() -> None:
    given_lists: Any = [4, 5], [-0.5, -1.0]
    assert Segment("policy", *given_lists, 3) == Segment("policy", (4, 5), (-0.5, -1.0), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prompt", (1,), (-1.0,)), "was not sampled"),
        (("tool", (1,), None, 0), "was not sampled"),
        (("tool", (1,), None, None, True), "never cut"),
        (("policy", (1,)), "needs the log-probs"),
        (("policy", (1,), (-1.0,)), "version"),
        (("policy", (1, 2), (-1.0,), 0), "2 sampled tokens came with 1"),
        *((("policy", (1,), (logp,), 0), "no log-prob") for logp in (0.1, math.nan, -math.inf)),
        *((("policy", (1, 2), (-1.0, -1.0), 0, False, ((at, 1),)), "can't be swapped at") for at in (0, 2)),
        (("policy", (1, 2, 3), (-1.0, -1.0, -1.0), 0, False, ((2, 1), (1, 2))), "can't be swapped at"),
        (("tool", (1, 2), None, None, False, ((1, 1),)), "was not sampled"),
        (("robot", (1,)), "unknown segment source 'robot'"),
    ],
)
def test_a_wrong_segment_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        Segment(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"segments": segments}, "does not begin with a prompt") for segments in ((), (TURN,))),
        ({"rewards": (1.0,)}, "2 policy segments came with 1 rewards"),
        ({"rewards": (0.0, math.nan)}, "not finite"),
        ({"rewards": (0.0, -1e300)}, r"beyond ±1e\+09: \(0.0, -1e\+300\); give rewards of about 1"),
    ],
)
def test_a_wrong_trajectory_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        trajectory(**changes)


@given(rewards=st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_the_return_is_the_exact_sum(rewards: list[float]) -> None:
    episode = trajectory(segments=(PROMPT, *[TURN] * len(rewards)), rewards=tuple(rewards))
    assert episode.ret == math.fsum(rewards)
    assert episode.n_sampled == 2 * len(rewards)


def test_a_group_holds_one_task_from_one_prompt() -> None:
    group = Group((trajectory(), trajectory(seed=1)))
    assert (group.task_id, len(group), [member.seed for member in group]) == ("t:0", 2, [0, 1])
    assert flatten([group, group]) == [*group, *group]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((), "at least one"),
        ((trajectory(), trajectory(task_id="t:1")), "one task, not 't:0' and 't:1'"),
        ((trajectory(), trajectory(segments=(Segment("prompt", (9,)), TURN, TURN))), "different prompts"),
    ],
)
def test_a_wrong_group_is_refused(members: tuple[Trajectory, ...], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        Group(members)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": 7}, "id, prompt and answer are .*7.*: make all three texts"),
        *((text, "make all three texts") for text in ({"prompt": None}, {"answer": 4})),
        ({"data": None}, "the data of task 'a' are None: make them a dict"),
        ({"tags": "level:3"}, "the tags of task 'a' are 'level:3'"),
        ({"tags": (3,)}, "the tags of task 'a' are"),
    ],
)
def test_a_wrong_task_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvContractError, match=message):
        Task(**{"id": "a", "prompt": "p", **changes})
