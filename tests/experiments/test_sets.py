"""The sets of weights of part B."""

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.eval.sets import make_sets
from agentrl.rollout.plan import TaskSource

from .conftest import load

sets, gradients, rows = map(load, ("sets", "gradients", "rows"))


def test_sets_are_those_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [weight_set.name for weight_set in sets.sets()]
    assert len(set(names)) == len(names) == 13
    assert {name.partition("-")[0] for name in names[:5]} == {"20", "80", "50", "5", "mixed"}
    path = tmp_path / "B.jsonl"
    file = rows.RowFile(path, "abc")
    for unit in gradients.units("20-seed3000", sets.SIZES, sets.DRAWS):
        file.add(unit)
    assert sets.main(["--list", "--out", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["20-seed3000", "done"] and lines[1].split() == ["80-seed3000", "to", "do"]


def test_a_set_is_played_from_its_own_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def train(config: object, display: object) -> Path:
        asked["train"] = config
        return tmp_path / "warm"

    monkeypatch.setattr(sets, "train", train)
    monkeypatch.setattr(sets, "evaluate", lambda request, display: asked.update(eval=request))
    monkeypatch.setattr(gradients, "groups_of", lambda folder, least: [])
    monkeypatch.setattr(sets, "as_batch", len)
    settings = sets.Set(aim=80, seed=3001, mixed=True)
    assert sets.play(settings, tmp_path, None) == (tmp_path / "warm" / "checkpoints" / "step-000000", 0)
    config, request = asked["train"], asked["eval"]
    assert (config.sft.steps, config.run.seed, config.run.threads) == (sets.UPDATES[80], 3001, 1)
    played = make_sets(load_config(preset="quickstart", overrides=request.overrides), request.envs)
    assert {settings.eval.attempts for settings in played.values()} == {64}
    tasks = [
        TaskSource(env.id, env.args, settings.eval.split, name).pick(1)[0].id
        for settings in played.values()
        for name, env in settings.env.played.items()
    ]
    assert tasks == [f"train-{level}:0" for level in range(1, 6)]
