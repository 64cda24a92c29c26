"""What an answer must be beside right: worked out, no restatement of its problem, and of the form that is asked for."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.grading.latex import same_answer

ROWS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("forms.toml").read_text())["row"]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_form(row: dict[str, Any]) -> None:
    problem, expected = row["problem"], row["expected"]
    for answer in [expected, *row["right"]]:
        assert same_answer(answer, expected, problem=problem), answer
    for answer in row["wrong"]:
        assert same_answer(answer, expected), answer
        assert not same_answer(answer, expected, problem=problem), answer
