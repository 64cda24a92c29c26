"""The sets of weights of part B."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.batch import as_batch
from agentrl.runs.progress import Display
from agentrl.types import Group, Segment

from ..train.conftest import trajectory, turn
from .conftest import load

sets, gradients, rows = map(load, ("sets", "gradients", "rows"))


def test_sets_are_those_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [weight_set.name for weight_set in sets.sets()]
    assert len(set(names)) == len(names) == 16
    assert {name.partition("-")[0] for name in names[:5]} == {"20", "80", "50", "5", "mixed"}
    assert names[5:8] == ["quiet-seed3000", "long-seed3000", "pretrained-seed3000"]
    path = tmp_path / "B.jsonl"
    file = rows.RowFile(path, "abc")
    for unit in gradients.units("20-seed3000", sets.SIZES, sets.DRAWS):
        file.add(unit)
    assert sets.main(["--list", "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["20-seed3000", "done"] and lines[1].split() == ["80-seed3000", "to", "do"]


def test_rows_of_two_recordings_are_joined() -> None:
    def recording(rewards: list[list[float]], energy: list[list[float]], value: float) -> Any:
        groups = [
            Group(tuple(trajectory(Segment("prompt", (1,)), turn((2, 3)), rewards=(ret,)) for ret in of))
            for of in rewards
        ]
        batch = as_batch(groups)
        weights = torch.tensor([w for of in energy for w in of]).repeat_interleave(2)
        same = torch.full((len(weights),), value)
        own = {"energy": weights, "weights": same, "gradients": same[:, None], "probability": same}
        return sets.Recorded(batch=batch, **own), groups

    won = [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    easy, of_easy = recording(won, [[1.0, 2.0, 1.0, 9.0], [1.0, 9.0, 8.0, 3.0]], 5.0)
    # Successes have the energies 2, 4, 2 and 6, of which 2 is the lower median: one failure stays.
    chosen = sets.quiet(easy)
    assert chosen.tolist() == [True, True, True, False, True, False, False, True]
    hard, of_hard = recording([[0.0, 1.0, 0.0]], [[7.0, 7.0, 7.0]], 6.0)
    both = sets.joined([(easy, of_easy, chosen), (hard, of_hard, torch.ones(3).bool())], 3)
    assert both.batch.group.tolist() == [0, 0, 0, 1, 1, 1], "the second task has two rows left"
    assert both.energy.tolist() == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, *[7.0] * 6]
    assert both.gradients[:, 0].tolist() == both.probability.tolist() == [5.0] * 6 + [6.0] * 6
    assert sets.Rows.of(both.batch.starts, both.batch.rewards).sum(both.batch.rewards).tolist() == [1, 1, 0, 0, 1, 0]


@pytest.mark.slow
def test_a_small_set_is_measured_from_its_warm_start_on(tmp_path: Path) -> None:
    small = sets.Set(kind="20", seed=3000, tasks=8, attempts=8, sizes=(4,))
    file = rows.RowFile(tmp_path / "B.jsonl", "abc")
    sets.measure(small, file, tmp_path, Display(), "cpu")
    assert sets.done(small, file)
    (row,) = (row for row in file.rows if row["unit"].get("rewards") == "0/1")
    assert 0.02 < row["p"] < 0.8 and row["beta_S"] < row["p"], "failures carry the energy"
    noise = {arm: row["arms"][arm]["noise"][0] for arm in ("otb_pooled", "otb_loo", "rloo")}
    assert noise["otb_pooled"] < min(noise["otb_loo"], noise["rloo"]), "of three unbiased ones"
