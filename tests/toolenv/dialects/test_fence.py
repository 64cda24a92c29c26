"""The fence dialect: what is a call and what is not."""

import pytest

from agentrl.toolenv.dialects import Fence
from agentrl.toolenv.tools.function import tool

from .conftest import python


@tool
def sql(query: str) -> str:
    """Ask."""
    return query


FENCE = Fence([python])


def codes(text: str) -> list[object]:
    return [call.arguments["code"] for call in FENCE.parse(text) if not call.error]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nprint(1)\n```", ["print(1)"]),
        ("Let me see.\n```python  \nx = 1\n\nprint(x)\n```  \nDone.", ["x = 1\n\nprint(x)"]),
        *(("```python\na\n```\nand\n```python\nb\n```", ["a", "b"]), ("```python\n```", [""])),
        *(("```python\n\n```", [""]), ("```python\nprint('``` is a fence')\n```", ["print('``` is a fence')"])),
        *(("```text\n```python\nx\n```", []), ("```json\n{}\n```\n```python\ny\n```", ["y"]), ("```\nplain\n```", [])),
        *(("inline ```python code ```", []), ("```python code ```", ["code"])),
        ("Let me see.\n```python print('a  b')```  \nDone.\n```python\ny\n```", ["print('a  b')", "y"]),
        *(("```python ```", [""]), ("```python a ``` and ```python b ```", []), ("```python print('`')```", [])),
        *(("```ruby puts 1 ```\n```python\ny\n```", ["y"]), ("```text\n```python x ```\n```", [])),
        *(("```python\n```python x ```\n```", ["```python x ```"]), ("  ```python\nindented\n```", [])),
        *(("```Python\nx\n```", []), ("The answer is \\boxed{5}.", []), ("", [])),
    ],
)
def test_which_blocks_are_calls(text: str, found: list[object]) -> None:
    assert codes(text) == found
    assert all(not call.error for call in FENCE.parse(text))


@pytest.mark.parametrize("text", ["```python\nprint(1)", "```python\nprint(1)\n``", "```python", "```python\nx```"])
def test_an_open_block_is_a_malformed_call(text: str) -> None:
    (call,) = FENCE.parse(text)
    assert call.name == "python"
    assert "not closed" in call.error


def test_other_tools_can_be_named() -> None:
    (call,) = Fence([sql]).parse("```sql\nselect 1\n```\n```python\nx\n```")
    assert (call.name, dict(call.arguments)) == ("sql", {"query": "select 1"})


def test_long_texts_take_linear_time() -> None:
    assert len(FENCE.parse("```python\n" * 200_000)) == 1
    assert len(FENCE.parse("```python\nx\n```\n" * 20_000)) == 20_000
    assert FENCE.parse("`" * 1_000_000) == ()
    assert FENCE.parse(f"```python{' ' * 1_000_000}x") == FENCE.parse("```python " * 100_000) == ()


def test_instructions_name_every_tool() -> None:
    assert FENCE.instructions() == "To use python, write\n```python\ncode\n```"
    assert Fence().instructions() == ""
    assert Fence([sql]).instructions() == "To use sql, write\n```sql\nquery\n```\nAsk."
