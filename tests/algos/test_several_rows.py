"""Episodes of which a driver drops the first turn, by enumeration: what is exact, and the bias of other ways."""

import re
from pathlib import Path

import pytest
import torch

from . import several_rows
from .several_rows import COLUMNS, WAYS, definition, exact, gradient, mean_gradient

PAGE = Path(__file__).parents[2] / "docs" / "rows.md"
HERE = next(iter(WAYS))


def test_the_episodes_are_all_that_can_occur() -> None:
    played = several_rows.Played.all()
    assert float(played.chance.sum()) == pytest.approx(1.0, abs=1e-12)
    assert len(played.batch) > len(played.batch.episode_group) and len({*played.context.tolist()}) == 6


@pytest.mark.parametrize("advantage", ["none", "rloo", "otb_loo"])
def test_over_all_rows_in_time_the_estimate_is_the_gradient(advantage: str) -> None:
    torch.testing.assert_close(mean_gradient(HERE, advantage), gradient(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("column", ["otb", "ctpo", "ctpo without clipping"])
def test_the_others_are_their_definitions_token_by_token(column: str) -> None:
    """``otb`` has the bias of a baseline that includes the episode's own return, and no other one."""
    torch.testing.assert_close(mean_gradient(HERE, column), definition(column), atol=1e-9, rtol=0)


@pytest.mark.slow
def test_the_page_holds_what_the_enumeration_gives() -> None:
    text, number = PAGE.read_text(encoding="utf-8"), r"-?\d+\.\d+"
    wanted = several_rows.table()
    begin = text.index(wanted.splitlines()[0])
    shown = text[begin : text.index("\n\n", begin)]
    assert re.sub(number, "#", shown) == re.sub(number, "#", wanted), "print it with tests/algos/several_rows.py"
    ours, theirs = (list(map(float, re.findall(number, part))) for part in (shown, wanted))
    assert ours == pytest.approx(theirs, abs=0.0011)
    assert all(exact(way, column).bias > 0.03 for way in list(WAYS)[1:] for column in list(COLUMNS)[-2:])
