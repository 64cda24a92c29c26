"""A prompt that the rows of a group share is computed once, and nobody's scores or gradients change by that."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agentrl.attention import How, PackedRows
from agentrl.batch import Batch, whole
from agentrl.policy import score
from agentrl.types import Group, Segment, Stop, Trajectory

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = tuple(range(40, 52))


def member(task: str, prompt: Sequence[int], answer: Sequence[int], told: Sequence[int] = ()) -> Trajectory:
    """An episode of one turn; ``told`` stands between the prompt and the turn."""
    segments = [Segment("prompt", tuple(prompt))]
    segments += [Segment("tool", tuple(told))] if told else []
    segments += [Segment("policy", tuple(answer), (-1.0,) * len(answer), 0)] if answer else []
    rewards = (0.0,) if answer else ()
    return Trajectory(task_id=task, seed=0, segments=tuple(segments), rewards=rewards, stop=Stop.TERMINATED)


def groups_of_three() -> Batch:
    """Twelve prompt tokens thrice, two of them thrice, and turns of 1 to 40 tokens."""
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


def assert_alike(model: Any, batch: Batch, computed: int) -> None:
    """The pack scores as its rows do by themselves, with the same gradients, and computes that many tokens."""
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


def test_each_prompt_is_computed_once_per_pack(model: Any) -> None:
    batch = groups_of_three()
    assert_alike(model, batch, len(batch.tokens) - 2 * len(PROMPT) - 2 * 2)


def test_shuffled_rows_share_with_whichever_of_their_group_comes_first(model: Any) -> None:
    (pack,) = groups_of_three().split(1000, [4, 2, 0, 5])
    assert_alike(model, pack, len(pack.tokens) - len(PROMPT) - 2)


def test_groups_with_equal_prompts_share_nothing_with_each_other(model: Any) -> None:
    batch = whole([Group((member(task, PROMPT, (60, 61)),)) for task in "ab"])
    assert_alike(model, batch, len(batch.tokens))


def test_rows_that_were_told_other_things_before_they_spoke_share_nothing(model: Any) -> None:
    told = [(80, 81), (80, 82), (80, 81)]
    batch = whole([Group(tuple(member("a", PROMPT, (60, 61), told=words) for words in told))])
    assert_alike(model, batch, len(batch.tokens) - len(PROMPT) - 2)


def test_a_row_that_never_spoke_shares_nothing(model: Any) -> None:
    batch = whole([Group((member("a", PROMPT, (60, 61)), member("a", PROMPT, (62,)), member("a", PROMPT, ())))])
    assert_alike(model, batch, len(batch.tokens) - len(PROMPT))


def test_attention_over_shared_tokens_is_attention_over_copies_of_them() -> None:
    row_starts, source = torch.tensor([0, 4, 10]), torch.tensor([0, 1, 2, 3, 0, 1, 2, 4, 5, 6])
    heads = [torch.randn(7, count, 8, generator=torch.Generator().manual_seed(count)) for count in (4, 2, 3)]
    heads[2] = heads[2][:, :2]
    shared = PackedRows(row_starts, source).attend(0, *heads, How(scale=0.3))
    copies = PackedRows(row_starts).attend(0, *(tensor[source] for tensor in heads), How(scale=0.3))
    torch.testing.assert_close(shared[source], copies)
