"""What rows share up to where they fork is computed once, and nobody's scores or gradients change by that."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agentrl.batch import Batch, whole
from agentrl.models import attention
from agentrl.train.learner import Learner
from agentrl.train.score import score
from agentrl.types import Group, Segment, Trajectory

from .conftest import trajectory, turn
from .test_learner import HOW
from .test_score import full_stats

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = tuple(range(40, 52))


def member(task: str, prompt: Sequence[int], answer: Sequence[int], told: Sequence[int] = ()) -> Trajectory:
    """An episode of one turn; ``told`` stands between the prompt and the turn."""
    segments = [Segment("prompt", tuple(prompt)), *([Segment("tool", tuple(told))] if told else [])]
    return trajectory(*segments, *([turn(answer)] if answer else []), task_id=task)


def groups_of_three() -> Batch:
    """Twelve prompt tokens thrice and turns of 1, 7 and 40 that begin alike; two thrice, and turns that do not."""
    long = [member("a", PROMPT, range(60, 60 + length)) for length in (1, 40, 7)]
    short = [member("b", (5, 6), range(70 + length, 70 + 2 * length)) for length in (30, 2, 3)]
    return whole([Group(tuple(long)), Group(tuple(short))])


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward pass computes."""
    counts: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *parts: counts.append(parts[1][0].numel()))
    yield counts
    handle.remove()


def assert_alike(model: Any, batch: Batch, shared: int) -> None:
    """The pack scores as its rows do by themselves, with the same gradients, and computes so many tokens less."""
    rows = [part.tolist() for part in batch.tokens.split(batch.row_starts.diff().tolist())]
    computed = len({tuple(row[: place + 1]) for row in rows for place in range(len(row))})
    assert computed == len(batch.tokens) - shared
    together, alone = copy.deepcopy(model), copy.deepcopy(model)
    weight = torch.linspace(-1, 1, len(batch.sampled))
    with counted(together) as counts:
        logp = score(together, batch, temperature=1.2).logp
    assert counts == [computed]
    rows = torch.cat([score(alone, batch.split(100, [row])[0], temperature=1.2).logp for row in range(len(batch))])
    torch.testing.assert_close(logp, rows, rtol=1e-4, atol=1e-4)
    (logp * weight).sum().backward()
    (rows * weight).sum().backward()
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def forks() -> Batch:
    """Forks in the prompt, in a tool's answer and in a turn; one row is a whole other one's beginning."""
    told = [(80, 81), (80, 82), (80, 81), (80, 81)]
    said = [(60, 61, 62), (60, 61, 62), (60, 61), (60, 63, 64)]
    return whole([Group(tuple(member("a", PROMPT, *turn) for turn in zip(said, told, strict=True)))])


def two_groups(prompt: Sequence[int], other: Sequence[int]) -> Batch:
    return whole([Group((member(task, one, (60, last)),)) for task, one, last in (("a", prompt, 61), ("b", other, 62))])


def with_a_silent_row() -> Batch:
    return whole([Group((member("a", PROMPT, (60, 61)), member("a", PROMPT, (62,)), member("a", PROMPT, ())))])


@pytest.mark.parametrize(
    ("batch", "order", "shared"),
    [
        pytest.param(groups_of_three(), range(6), 2 * len(PROMPT) + 1 + 7 + 2 * 2, id="each prompt once per pack"),
        pytest.param(groups_of_three(), [4, 2, 0, 5], len(PROMPT) + 1 + 2, id="with whichever of a group comes first"),
        pytest.param(two_groups(PROMPT, PROMPT), (0, 1), len(PROMPT) + 1, id="groups with equal prompts"),
        pytest.param(two_groups(PROMPT, (*PROMPT[:3], 99, *PROMPT[4:])), (0, 1), 3, id="nothing after another token"),
        pytest.param(forks(), range(4), 3 * len(PROMPT) + 3 + 2 + 2 + 1, id="what was told and said until they fork"),
        pytest.param(with_a_silent_row(), (0, 1, 2), 2 * len(PROMPT), id="a row that never spoke, the last"),
        pytest.param(with_a_silent_row(), (2, 1, 0), 2 * len(PROMPT), id="a row that never spoke, the first"),
    ],
)
def test_rows_share_what_they_begin_with(model: Any, batch: Batch, order: Sequence[int], shared: int) -> None:
    (pack,) = batch.split(1000, order)
    assert_alike(model, pack, shared)


@pytest.mark.parametrize("window", [None, 5])
def test_long_rows_share_in_any_order(model: Any, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Each row attends by itself, four queries at a time, over what others have computed."""
    monkeypatch.setattr(attention, "_LONG", 14)
    monkeypatch.setattr(attention, "_QUERIES", 4)
    own = copy.deepcopy(model)
    for layer in own.model.layers:
        layer.self_attn.sliding_window = window
    turns = [(60, 61, 62), (60, 61, 70, 71, 72, 73), (60, 61, 70, 75), (66,), ()]
    batch = whole([Group(tuple(member("a", PROMPT, turn) for turn in turns))])
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 3, 1)):
        (pack,) = batch.split(1000, order)
        assert_alike(own, pack, 4 * len(PROMPT) + 2 * 2 + 1)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 5e-6), (torch.float64, 1e-6)])
def test_an_update_of_several_packs_has_the_gradients_of_rows_one_by_one(
    model: Any, reference: Any, dtype: torch.dtype, rounding: float
) -> None:
    """Against transformers' own attention and whole logits, a row at a time: nothing shared, nothing packed.

    Its norms are computed in float32 whatever the weights are.
    """
    said = tuple(range(60, 100))
    late = [member("late", PROMPT, (*said[:forks], 100, 101 + forks)) for forks in (36, 38, 38, 40)]
    early = [member("early", PROMPT[:9], (120 + place, *said[:20])) for place in range(4)]
    batch = whole([Group(tuple(late)), Group(tuple(early))])
    weight = torch.linspace(-1, 2, len(batch.sampled), dtype=dtype)
    ours, theirs = copy.deepcopy(model).to(dtype), copy.deepcopy(reference).to(dtype)
    learner = Learner(ours, **{**HOW, "max_tokens": 150, "dtype": str(dtype).removeprefix("torch.")})
    seen: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.extend(one.grad.clone() for one in learner.trained))
    packs = learner.packs(batch, range(len(batch)))
    with counted(ours) as counts:
        learner.update(packs, lambda place, stats: (stats.logp * weight[packs[place].index]).sum(), 0.0)
    assert len(counts) == len(packs) > 1 and sum(counts) < 0.75 * len(batch.tokens)
    logp, _, _ = full_stats(theirs, batch, 0.7)
    (logp * weight).sum().backward()
    for mine, wanted in zip(seen, theirs.parameters(), strict=True):
        assert (mine - wanted.grad).abs().max() < rounding * wanted.grad.abs().max()
