"""Counter-based randomness: the published hash, and nothing that depends on company or process."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engines.rng import derive_seed, uniforms

WORD = 2**64
seeds = st.integers(0, 2**63 - 1)
counters = st.integers(0, 2**40)


def reference(seed: int, counter: int) -> float:
    """SplitMix64 in plain integers: the generator's state after ``counter + 1`` steps, mixed."""
    state = (seed + (counter + 1) * 0x9E3779B97F4A7C15) % WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % WORD
    return ((state ^ (state >> 31)) >> 11) / 2**53


def draw(pairs: list[tuple[int, int]]) -> torch.Tensor:
    return uniforms(torch.tensor([seed for seed, _ in pairs]), torch.tensor([counter for _, counter in pairs]))


def test_the_first_number_of_seed_0_is_the_published_one() -> None:
    assert float(draw([(0, 0)])) == (0xE220A8397B1DCDAF >> 11) / 2**53


@given(st.lists(st.tuples(seeds, counters), min_size=1, max_size=8))
def test_it_is_splitmix64(pairs: list[tuple[int, int]]) -> None:
    drawn = draw(pairs)
    assert drawn.dtype == torch.float64 and drawn.tolist() == [reference(*pair) for pair in pairs]


@given(st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4))
def test_a_derived_seed_fits_a_signed_word(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63
    assert derive_seed(*parts) == derive_seed(*parts)


def test_parts_are_told_apart() -> None:
    ways = [(1, 2), (2, 1), (12,), ("1", 2), ("1, 2",), (1,), (), ("",), ("a", "b"), ("ab",), ("a,b",)]
    assert len({derive_seed(*parts) for parts in ways}) == len(ways)


def test_a_derived_seed_is_the_same_in_every_process() -> None:
    # Recorded once: a change would give every old run other tasks and other noise.
    assert derive_seed(7, "episode", 3) == 5639533001794021099
