"""The fence dialect: what is a call and what is not."""

import pytest

from agentrl.toolenv.dialects import Fence

from .conftest import TABLES, python

FENCE = Fence([python])


@pytest.mark.parametrize(("text", "codes"), TABLES["fence"])
def test_which_blocks_are_calls(text: str, codes: list[object]) -> None:
    assert [(call.arguments, call.error) for call in FENCE.parse(text)] == [({"code": code}, "") for code in codes]


def test_instructions_show_a_call() -> None:
    assert FENCE.instructions() == "To use python, write\n```python\ncode\n```"


def test_blanks_behind_a_fence_take_linear_time() -> None:
    assert FENCE.parse(f"```python{' ' * 1_000_000}x") == FENCE.parse("```python " * 100_000) == ()
