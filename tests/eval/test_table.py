"""Evaluation's numbers against enumeration, published intervals and hand-made groups."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.eval.intervals import interval, wilson
from agentrl.eval.table import by_tag, majority, pass_at_k, summarise
from agentrl.types import Group, Segment, Stop, ToolRun, Trajectory

from ..forests import cut


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_win(drawn: tuple[int, int, int]) -> None:
    attempts, wins, k = drawn
    outcomes = [True] * wins + [False] * (attempts - wins)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, wins, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def episode(task: str, ret: float, *, calls: tuple[bool, ...] = (), stop: Stop = Stop.TERMINATED) -> Trajectory:
    turn = Segment("policy", (2,), (-0.5,), 0)
    segments = [Segment("prompt", (1,)), *([turn, Segment("tool", (3,))] * len(calls)), turn]
    return Trajectory(
        task_id=task,
        seed=0,
        segments=tuple(segments),
        rewards=(*(0.0 for _ in calls), ret),
        stop=stop,
        tool_runs=tuple(ToolRun(name="python", ok=ok, wall_s=0.1) for ok in calls),
    )


def test_table_of_hand_made_groups() -> None:
    groups = [
        Group((episode("a", 1.0, calls=(True, False)), episode("a", 0.0), episode("a", 0.5), episode("a", 1.0))),
        Group((episode("b", 0.0, stop=Stop.TOKEN_LIMIT), *[episode("b", 0.0)] * 3)),
    ]
    table = summarise(groups, best_return=1.0, lost=3)
    assert (table.tasks, table.attempts, table.lost, table.truncated) == (2, 4, 3, 1)
    assert table.success == 0.25 and table.reward_mean == 2.5 / 8
    assert table.pass_at == pytest.approx({1: 0.25, 2: 0.5 * (1 - 1 / 6), 4: 0.5})
    assert (table.turns_mean, table.tool_calls_mean, table.tool_errors_mean) == (10 / 8, 2 / 8, 1 / 8)
    assert (table.low, table.high) == interval([0.5, 0.0], 4)
    assert table.pass_interval[4] == wilson(0.5, 2) and table.tokens_mean == 10 / 8
    assert table.majority is table.majority_interval is None
    assert str(table) == (
        f"success 25.0% (95% CI {table.low:.1%} to {table.high:.1%}) on 2 tasks, pass@2 41.7%, pass@4 50.0%, "
        "1.25 turns, 0.25 tool calls, 0.12 tool errors, 1 truncated, 0 cut turns"
    )
    in_rows = [Group(tuple(map(cut, group))) for group in groups]
    assert any(len(played.rows) > 1 for group in in_rows for played in group)
    assert summarise(in_rows, best_return=1.0, lost=3) == table, "an episode counts once, however many rows it has"
    assert json.loads(json.dumps(table.row()))["pass_at"] == {"1": 0.25, "2": pytest.approx(5 / 12), "4": 0.5}


@pytest.mark.parametrize(("ret", "best", "wins"), [(0.3, 0.1 + 0.2, 1), (0.1 + 0.2, 0.3, 1), (0.299, 0.3, 0)])
def test_success_is_the_best_return_within_rounding(ret: float, best: float, wins: int) -> None:
    table = summarise([Group((episode("a", ret),))], best_return=best)
    assert table.success == wins and table.pass_at == {1: wins}


def test_odd_numbers_of_attempts_get_their_own_pass_rate() -> None:
    table = summarise([Group(tuple(episode("a", ret) for ret in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))], best_return=1.0)
    assert table.pass_at == pytest.approx({1: 1 / 6, 2: 1 / 3, 4: 2 / 3, 6: 1.0})


def answered(task: str, *votes: tuple[str | None, float], tags: tuple[str, ...] = ()) -> Group:
    return Group(tuple(dataclasses.replace(episode(task, ret), answer=answer, tags=tags) for answer, ret in votes))


@pytest.mark.parametrize(
    ("votes", "wanted"),
    [
        ([("5", 1.0), ("5", 1.0), ("6", 0.0)], 1.0),
        ([("6", 0.0), ("5", 1.0), ("6", 0.0)], 0.0),
        ([("6", 0.0), ("5", 1.0)], 0.5),
        ([("", 0.0), ("", 0.0), ("5", 1.0)], 1.0),
        ([("", 0.0), (None, 0.0)], 0.0),
        ([(None, 1.0), (None, 0.0)], None),
        ([("5", 1.0), ("5", 0.0)], 0.5),
    ],
)
def test_most_frequent_answer_decides(votes: list[tuple[str | None, float]], wanted: float | None) -> None:
    assert majority(answered("a", *votes), best_return=1.0) == wanted


def test_majority_is_a_share_of_all_tasks_and_tags_have_tables_of_their_own() -> None:
    right, wrong = ("5", 1.0), ("6", 0.0)
    groups = [
        answered("a", right, right, wrong, tags=("level:1", "easy")),
        answered("b", wrong, wrong, right, tags=("level:2",)),
        answered("c", (None, 0.0), (None, 0.0), (None, 0.0), tags=("level:2",)),
    ]
    table = summarise(groups, best_return=1.0)
    assert table.majority == 1 / 3 and table.majority_interval == wilson(1 / 3, 3) and "maj@3 33.3%" in str(table)
    tags = by_tag(groups, best_return=1.0)
    summaries = {tag: (result.tasks, result.success) for tag, result in tags.items()}
    assert summaries == {"easy": (1, 2 / 3), "level:1": (1, 2 / 3), "level:2": (2, 1 / 6)}


def test_tokens_are_counted_by_the_server_where_there_is_one() -> None:
    played = dataclasses.replace(episode("a", 1.0), usage=(100, 7))
    assert summarise([Group((played,))], best_return=1.0).tokens_mean == 7
