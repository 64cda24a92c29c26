"""A mix of environments: which task comes at which place, against a walk place by place."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import TaskSource

Mix = Callable[..., TaskMix]


@pytest.fixture(scope="module")
def mix(numbers: str) -> Mix:
    sizes = {"five": 5, "seven": 7, "three": 3}
    sources = {name: TaskSource(numbers, {"count": size}, "train", name) for name, size in sizes.items()}

    def make(*weights: float, block: int = 4) -> TaskMix:
        some = dict(zip(sources, weights, strict=False))
        return TaskMix({name: sources[name] for name in some}, some, block=block)

    return make


weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3)


@given(weights, st.integers(0, 300), st.integers(1, 9), st.integers(0, 3))
def test_order_is_that_of_a_walk(mix: Mix, weights: list[float], start: int, block: int, seed: int) -> None:
    mixed = mix(*weights, block=block)
    picked = [(name, task.id) for name, task in mixed.pick(40, start=start, seed=seed)]
    # Place by place from the start: an environment's own tasks come in its own order, and none is left out.
    seen = Counter[str]()
    walked: list[tuple[str, str]] = []
    for index in range(start + 40):
        ((name, _),) = mixed.pick(1, start=index, seed=seed)
        (task,) = mixed.sources[name].pick(1, start=seen[name], seed=seed)
        seen[name] += 1
        walked.append((name, task.id))
        if (index + 1) % block == 0:
            for env, weight in zip(mixed.sources, weights, strict=True):
                assert abs(seen[env] - (index + 1) * weight / sum(weights)) < len(weights)
    assert picked == walked[start:]


def test_seeds_differ_and_first_places_are_no_exception(mix: Mix) -> None:
    mixed = mix(1.0, 3.0, block=4)
    orders = [[name for name, _ in mixed.pick(64, seed=seed)] for seed in (0, 1)]
    assert orders[0] != orders[1] and all(order.count("five") == 16 for order in orders)
    # Whoever uses the first place of each block alone meets an environment whose share is a fourth in a fourth of them.
    names = Counter(mixed.pick(1, start=at, seed=0)[0][0] for at in range(0, 1600, 4))
    assert 70 < names["five"] < 130


def test_shares_are_exact(mix: Mix) -> None:
    assert mix(0.1, 0.2, 0.7).shares(10**6) == {"five": 10**5, "seven": 2 * 10**5, "three": 7 * 10**5}
    assert mix(1.0, 1.0, 1.0).shares(2) == {"five": 0, "seven": 1, "three": 1}
