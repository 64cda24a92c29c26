"""The sets of weights of part B."""

from pathlib import Path

import pytest

from .conftest import load

sets, gradients, rows = map(load, ("sets", "gradients", "rows"))


def test_sets_are_those_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [weight_set.name for weight_set in sets.sets()]
    assert len(set(names)) == len(names) == 14
    assert {name.partition("-")[0] for name in names[:5]} == {"20", "80", "50", "5", "mixed"}
    assert names[5] == "pretrained-seed3000"
    path = tmp_path / "B.jsonl"
    file = rows.RowFile(path, "abc")
    for unit in gradients.units("20-seed3000", sets.SIZES, sets.DRAWS):
        file.add(unit)
    assert sets.main(["--list", "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["20-seed3000", "done"] and lines[1].split() == ["80-seed3000", "to", "do"]
