"""Rows laid end to end: the worked example by hand, and random groups against a slow reference."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.batch import Batch, as_batch, collate
from agentrl.errors import TrajectoryError
from agentrl.segments import Row
from agentrl.types import Group, Segment, Stop, Trajectory, flatten


def policy(*tokens: int) -> Segment:
    return Segment("policy", tokens, tuple(-0.5 - token / 64 for token in tokens), 0)


def episode(*segments: Segment, rewards: tuple[float, ...], task: str = "t") -> Trajectory:
    return Trajectory(task_id=task, seed=0, segments=segments, rewards=rewards, stop=Stop.TERMINATED)


def worked_example() -> list[Group]:
    prompt = Segment("prompt", (10, 11, 12))
    leading = episode(prompt, policy(20, 21), Segment("tool", (30,)), policy(23), rewards=(0.25, 1.0))
    second = episode(Segment("prompt", (13, 14)), policy(24), rewards=(-1.0,))
    return [Group((leading,)), Group((second,))]


def test_the_worked_example() -> None:
    """``p p p s s t s`` and ``p p s``."""
    (batch,) = collate(worked_example(), max_tokens=100)
    expected: dict[str, list[Any]] = {
        "tokens": [10, 11, 12, 20, 21, 30, 23, 13, 14, 24],
        "positions": [0, 1, 2, 3, 4, 5, 6, 0, 1, 2],
        "row_starts": [0, 7, 10],
        "sampled": [3, 4, 6, 9],
        "starts": [0, 3, 4],
        "group": [0, 1],
        "rewards": [0.0, 0.25, 1.0, -1.0],
        "index": [0, 1, 2, 3],
    }
    assert {name: getattr(batch, name).tolist() for name in expected} == expected
    assert batch.sampler_logp.tolist() == [-0.5 - token / 64 for token in (20, 21, 23, 24)]
    assert len(batch) == 2 and {batch.tokens.dtype, batch.sampled.dtype} == {torch.int64}
    assert {batch.rewards.dtype, batch.sampler_logp.dtype} == {torch.float32}


@st.composite
def episodes(draw: st.DrawFn, task: str, prompt: Segment) -> Trajectory:
    """A prompt and up to four turns, some without a token, with tool answers between them."""
    segments, rewards = [prompt], []
    tokens = st.lists(st.integers(0, 99), max_size=4)
    for _ in range(draw(st.integers(0, 4))):
        turn = policy(*draw(tokens))
        segments += [turn, Segment("tool", tuple(draw(tokens))), Segment("template", tuple(draw(tokens)))]
        some_sampled = any(segment.token_ids for segment in segments if segment.trained)
        rewards.append(draw(st.sampled_from([0.0, 1.0, -0.5])) if some_sampled else 0.0)
    return episode(*segments, rewards=tuple(rewards), task=task)


@st.composite
def ragged_groups(draw: st.DrawFn) -> list[Group]:
    groups: list[Group] = []
    for number in range(draw(st.integers(1, 4))):
        prompt = Segment("prompt", tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))))
        members = draw(st.lists(episodes(f"t{number}", prompt), min_size=1, max_size=3))
        groups.append(Group(tuple(members)))
    return groups


def slowly(groups: list[Group]) -> list[dict[str, Any]]:
    """For each episode its tokens, and for each sampled token its place, reward and log-prob."""
    rows: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        for trajectory in group:
            row: dict[str, Any] = {"group": number, "tokens": [], "sampled": [], "rewards": [], "logp": []}
            turn = 0
            for segment in trajectory.segments:
                for index, token in enumerate(segment.token_ids):
                    if segment.logprobs is not None:
                        row["sampled"].append(len(row["tokens"]))
                        row["rewards"].append(0.0)
                        row["logp"].append(segment.logprobs[index])
                    row["tokens"].append(token)
                if segment.trained:
                    if trajectory.rewards[turn]:
                        row["rewards"][-1] += trajectory.rewards[turn]
                    turn += 1
            rows.append(row)
    return rows


def read_back(batch: Batch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(len(batch)):
        begin, end = batch.row_starts[i : i + 2].tolist()
        start, stop = batch.starts[i : i + 2].tolist()
        assert batch.positions[begin:end].tolist() == list(range(end - begin))
        row = {"group": batch.group[i], "tokens": batch.tokens[begin:end], "sampled": batch.sampled[start:stop] - begin}
        row |= {"rewards": batch.rewards[start:stop], "logp": batch.sampler_logp[start:stop]}
        rows.append({name: values.tolist() for name, values in row.items()})
    return rows


@given(ragged_groups(), st.integers(0, 60))
def test_packs_hold_every_row_as_a_slow_reference_has_it(groups: list[Group], spare: int) -> None:
    longest = max(len(trajectory.token_ids) for trajectory in flatten(groups))
    packs = collate(groups, max_tokens=longest + spare)
    assert [row for pack in packs for row in read_back(pack)] == slowly(groups)
    assert all(0 < len(pack.tokens) <= longest + spare for pack in packs)
    for before, after in itertools.pairwise(packs):
        assert len(before.tokens) + int(after.row_starts[1]) > longest + spare, "no pack is cut before it is full"


@given(ragged_groups(), st.data())
def test_picked_rows_know_where_they_came_from(groups: list[Group], data: st.DataObject) -> None:
    batch = as_batch(groups)
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True))
    packs = batch.split(int(batch.row_starts[-1]), rows)
    reference = slowly(groups)
    assert [row for pack in packs for row in read_back(pack)] == [reference[row] for row in rows]
    for pack in packs:
        assert torch.equal(batch.tokens[batch.sampled][pack.index], pack.tokens[pack.sampled])
        assert torch.equal(batch.sampler_logp[pack.index], pack.sampler_logp)
        again = pack.split(int(batch.row_starts[-1]), range(len(pack))[::-1])
        assert [row for part in again for row in read_back(part)] == read_back(pack)[::-1]


@given(ragged_groups(), st.integers(0, 60), st.randoms())
def test_balanced_packs_hold_every_row_once(groups: list[Group], spare: int, shuffle: Any) -> None:
    batch = as_batch(groups)
    lengths, most = batch.row_starts.diff().tolist(), int(batch.row_starts.diff().max()) + spare
    rows = torch.nonzero(batch.episode_starts.diff())[:, 0].tolist()
    assume(rows)
    shuffle.shuffle(rows)
    reference, packs = slowly(groups), batch.balanced(most, rows)
    assert sorted(str(row) for pack in packs for row in read_back(pack)) == sorted(str(reference[row]) for row in rows)
    for pack in packs:
        assert 0 < len(pack.tokens) <= most
        assert torch.equal(batch.tokens[batch.sampled][pack.index], pack.tokens[pack.sampled])
    whole_groups = [number for number in set(batch.group[rows].tolist())
                    if sum(lengths[row] for row in rows if batch.group[row] == number) <= most]  # fmt: skip
    assert all(sum(number in pack.group.tolist() for pack in packs) == 1 for number in whole_groups)
    (together,) = batch.balanced(sum(lengths), rows)
    assert read_back(together) == [reference[row] for row in rows], "one pack keeps the order"


def test_an_episode_that_an_update_has_twice_counts_twice() -> None:
    batch = as_batch(worked_example())
    (pack,) = batch.balanced(100, [1, 0, 1])
    assert pack.episode_starts.tolist() == [0, 1, 4, 5] and pack.episode_group.tolist() == [1, 0, 1]
    assert pack.in_time(pack.tokens[pack.sampled]).tolist() == [24, 20, 21, 23, 24]


def test_a_row_that_owns_no_sampled_token_is_in_no_balanced_pack() -> None:
    rows = (Row((Segment("prompt", (1, 2)), policy(3))), Row((Segment("prompt", (4,) * 50),)))
    twofold = Trajectory(task_id="t", seed=0, rows=rows, rewards=(1.0,), stop=Stop.TOKEN_LIMIT)
    (pack,) = as_batch([Group((twofold,))]).balanced(3, [0])
    assert pack.tokens.tolist() == [1, 2, 3]


def test_balanced_packs_cost_alike() -> None:
    """Squares 81, 49, 49, 36, 36: the two dearest apart, and each later one where less is."""
    groups = [
        Group((episode(Segment("prompt", (1,) * (length - 1)), policy(5), rewards=(1.0,), task=str(length + i)),))
        for i, length in enumerate((6, 7, 9, 7, 6))
    ]
    batch = as_batch(groups)
    packs = [pack.row_starts.diff().tolist() for pack in batch.balanced(22, range(5))]
    assert packs == [[6, 9], [7, 7, 6]], "117 against 134"
    assert [len(pack) for pack in batch.balanced(9, range(5))] == [1] * 5
    with pytest.raises(TrajectoryError, match="an episode of 9 tokens does not fit"):
        batch.balanced(8, range(5))


def test_a_row_without_a_sampled_token_has_no_sampled_place() -> None:
    nothing = as_batch([Group((episode(Segment("prompt", (1, 2)), rewards=()),))])
    assert nothing.sampled.dtype == torch.int64 and nothing.rewards.shape == (0,) and nothing.starts.tolist() == [0, 0]


def test_a_turn_without_tokens_is_paid_on_the_token_before_it() -> None:
    paid = episode(Segment("prompt", (1,)), policy(2, 3), policy(), policy(4), rewards=(0.5, 0.25, 1.0))
    assert as_batch([Group((paid,))]).rewards.tolist() == [0.0, 0.75, 1.0]
    early = episode(Segment("prompt", (1,)), policy(), policy(4), rewards=(0.25, 1.0))
    with pytest.raises(TrajectoryError, match="a reward before its first sampled token"):
        as_batch([Group((early,))])


def test_a_sampled_token_needs_one_before_it() -> None:
    """Else the row before it in the pack would predict it."""
    fine = episode(Segment("prompt", (1,)), policy(2), rewards=(1.0,))
    headless = episode(Segment("prompt", ()), policy(2), rewards=(1.0,))
    with pytest.raises(TrajectoryError, match="empty prompt"):
        as_batch([Group((fine,)), Group((headless,))])


def test_a_row_that_is_too_long_is_refused() -> None:
    assert len(collate(worked_example(), max_tokens=7)) == 2
    with pytest.raises(TrajectoryError, match=r"an episode of 7 tokens does not fit into max_tokens=6"):
        collate(worked_example(), max_tokens=6)


def test_there_must_be_a_group() -> None:
    for make in (as_batch, lambda groups: collate(groups, max_tokens=10)):
        with pytest.raises(TrajectoryError, match="no group"):
            make([])


def test_a_batch_moves_as_a_whole() -> None:
    moved = as_batch(worked_example()).to("meta")
    assert {getattr(moved, field.name).device.type for field in dataclasses.fields(moved)} == {"meta"}
