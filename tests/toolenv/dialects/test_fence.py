"""The fence dialect: what is a call and what is not."""

import pytest

from agentrl.toolenv.dialects import Fence
from agentrl.toolenv.tools.function import tool

from .conftest import TABLES, python


@tool
def sql(query: str) -> str:
    """Look it up."""
    return query


FENCE = Fence([python])


@pytest.mark.parametrize(("text", "codes"), TABLES["fence"])
def test_which_blocks_are_calls(text: str, codes: list[object]) -> None:
    assert [(call.arguments, call.error) for call in FENCE.parse(text)] == [({"code": code}, "") for code in codes]


def test_instructions_name_every_tool() -> None:
    assert FENCE.instructions() == "To use python, write\n```python\ncode\n```"
    assert Fence().instructions() == ""
    assert Fence([sql]).instructions() == "To use sql, write\n```sql\nquery\n```\nLook it up."


def test_blanks_behind_a_fence_take_linear_time() -> None:
    assert FENCE.parse(f"```python{' ' * 1_000_000}x") == FENCE.parse("```python " * 100_000) == ()
