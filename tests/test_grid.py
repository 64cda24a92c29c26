"""What a grid plans and what it refuses; tests/training/test_grid.py does the runs."""

import fcntl
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.runfolder import RunFolder

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
QUICK = ("--preset", "quickstart")
PAIRS = (*QUICK, "--vary", "algo.advantage=otb,otb_loo,group_mean", "--vary", "algo.loss=ctpo,gspo,ppo_clip")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)
    return tmp_path


@pytest.fixture
def grid(here: Path) -> ModuleType:
    """The script, as a module."""
    return importlib.import_module("grid")


@pytest.fixture
def grid_plan(here: Path) -> ModuleType:
    return importlib.import_module("grid_plan")


@pytest.fixture
def grid_table(here: Path) -> ModuleType:
    return importlib.import_module("grid_table")


def test_dry_run_lists_every_pair_of_every_seed(
    grid: ModuleType, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grid.main([*PAIRS, "--set", "eval.tasks=50", "--tokens", "1234", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and not list(here.iterdir())
    lines = out.splitlines()
    assert len(lines) == 3 * (1 + 9)
    names = [line.split(" (new): agentrl train --preset quickstart ")[0] for line in lines]
    assert names[:3] == ["warm-start-seed0", "otb-ctpo-seed0", "otb-gspo-seed0"]
    assert names[-1] == "group_mean-ppo_clip-seed2" and len(set(names)) == len(names)
    assert "--set optim.max_sampled_tokens=1234" in lines[1] and "--set eval.tasks=50" in lines[1]
    assert "--set algo.advantage=otb_loo --set algo.loss=ppo_clip" in lines[6] and "--seed 0" in lines[6]


def planned(grid_plan: ModuleType, *vary: str, **changes: Any) -> Any:
    request: dict[str, Any] = {"preset": "quickstart", "config": None, "overrides": (), "seeds": "0", "tokens": 1000}
    return grid_plan.make_plan(grid_plan.Request(**(request | {"vary": vary, "out": Path("out")} | changes)))


def test_runs_differ_in_what_is_varied_and_in_nothing_else(grid_plan: ModuleType) -> None:
    vary = ("algo.loss=ctpo,gspo", "optim.lr=1e-4,2e-4")
    warm, *runs = planned(grid_plan, *vary, seeds="3", overrides=["eval.every=5"]).runs
    assert [(run.config.algo.loss, run.config.optim.lr) for run in runs] == [
        (loss, lr) for loss in ("ctpo", "gspo") for lr in (1e-4, 2e-4)
    ]
    settings = [run.config.model_dump(exclude={"run": {"name"}, "algo": {"loss"}, "optim": {"lr"}}) for run in runs]
    assert all(one == settings[0] for one in settings)
    assert all(run.after == warm.name and not warm.after for run in runs)
    assert warm.config.sft.steps > 0 == warm.config.optim.steps and runs[0].config.sft.steps == 0
    assert runs[0].config.model.path == f"{warm.folder}/checkpoints/step-000000"
    assert {run.config.run.seed for run in (warm, *runs)} == {3}
    assert {run.config.eval.every for run in (warm, *runs)} == {5}


def test_without_a_warm_start_there_is_nothing_to_share(grid_plan: ModuleType) -> None:
    plan = planned(grid_plan, "model.hidden=16,32", overrides=["sft.steps=0"], seeds="0,1")
    assert [run.name for run in plan.runs] == ["16-seed0", "32-seed0", "16-seed1", "32-seed1"]
    assert not any(run.after or run.config.model.path for run in plan.runs)


def test_lists_are_values_too_and_names_stay_apart(grid_plan: ModuleType) -> None:
    plan = planned(grid_plan, "optim.betas=[0.9, 0.95],[0.9,0.99], [0.9 , 0.95]")
    assert [run.config.optim.betas for run in plan.runs[1:]] == [(0.9, 0.95), (0.9, 0.99), (0.9, 0.95)]
    names = [run.name for run in plan.runs]
    assert names[1:] == ["0-9-0-95-seed0", "0-9-0-99-seed0", "row3-0-9-0-95-seed0"]


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ((), "give a TOML file, or --preset quickstart"),
        (QUICK, "say what to compare, for example --vary algo.loss=ctpo,ppo_clip"),
        (("--preset", "quikstart", "--vary", "algo.loss=ctpo"), "did you mean 'quickstart'?"),
        ((*QUICK, "--vary", "algo.loss=ctop,gspo"), "no loss is called 'ctop'; did you mean 'ctpo'?"),
        ((*QUICK, "--vary", "algo.loss=ctpo,gspoo"), "no loss is called 'gspoo'; did you mean 'gspo'?"),
        ((*QUICK, "--vary", "algo.losss=ctpo"), "unknown setting 'algo.losss'; did you mean 'loss'?"),
        ((*QUICK, "--vary", "algo.loss=ctpo,"), "write section.key=value,value"),
        ((*QUICK, "--vary", "algo.loss"), "write section.key=value,value"),
        ((*QUICK, "--vary", "algo.loss=ctpo,ctpo"), "for the second time"),
        ((*PAIRS, "--vary", "algo.loss=dapo"), "for the second time"),
        ((*PAIRS, "--set", "optim.lr=x"), "setting 'optim.lr' is 'x'"),
        ((*PAIRS, "--set", "algo.loss_options.power=0.3"), "has no option 'power'"),
        ((*PAIRS, "--set", "env.id=agentrl/Arithmetik-v0"), "did you mean 'agentrl/Arithmetic-v0'?"),
        ((*PAIRS, "--set", "optim.steps=3"), "the grid sets optim.steps itself: leave it out (use --tokens)"),
        ((*PAIRS, "--set", "run.seed=3"), "(use --seeds)"),
        ((*QUICK, "--vary", "run.seed=3,4"), "(use --seeds)"),
        ((*QUICK, "--vary", "sft.lr=1e-3,2e-3"), "sft.lr can't be varied, since all runs of a seed share"),
        ((*PAIRS, "--seeds", "0,x"), "--seeds is '0,x'"),
        ((*PAIRS, "--seeds", "-1"), "setting 'run.seed' is -1"),
        ((*PAIRS, "--seeds", "1,1"), "for the second time"),
        ((*PAIRS, "--tokens", "0"), "--tokens is 0"),
        ((*PAIRS, "--jobs", "0"), "--jobs is 0"),
        ((*PAIRS, "--out", "taken/in"), "can't be written: Not a directory"),
        ((*PAIRS, "--out", "other"), "is no file of a grid: choose another --out"),
        ((*PAIRS, "--out", "old", "--seeds", "0"), "(algo.loss is 'gspo' there and 'ctpo' here): choose another --out"),
    ],
)
def test_what_is_refused(
    grid: ModuleType, here: Path, argv: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "taken").write_text("")
    (here / "other").mkdir()
    (here / "other" / "grid.json").write_text('{"runs": 3}')
    plan = planned(importlib.import_module("grid_plan"), "algo.advantage=otb", "algo.loss=gspo", out=Path("old"))
    config = plan.runs[1].config
    named = config.run.model_copy(update={"name": "otb-ctpo-seed0"})
    tokens = config.optim.model_copy(update={"steps": 60000, "max_sampled_tokens": 60000})
    RunFolder.create(config.model_copy(update={"run": named, "optim": tokens}), numbered=False).close()
    before = sorted(here.rglob("*"))
    assert grid.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("grid: ") and err.count("\n") == 1, err
    assert wanted in err
    assert sorted(here.rglob("*")) == before


def test_two_grids_do_not_work_in_one_folder(grid: ModuleType, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "out").mkdir()
    with (here / "out" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert grid.main([*PAIRS, "--out", "out"]) == 2
    assert "another grid is at work in" in capsys.readouterr().err
    assert [path.name for path in (here / "out").iterdir()] == [".lock"]


def test_words_that_are_no_option(grid: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        grid.main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "examples:\n  grid.py --preset quickstart" in shown
    assert max(map(len, shown.splitlines())) <= 120
    with pytest.raises(SystemExit) as ended:
        grid.main(["--sedes", "1"])
    assert ended.value.code == 2


def test_seeds_are_pooled_by_their_tasks(grid_table: ModuleType) -> None:
    # Newcombe (1998), table I, method 3: 81 of 263 has the interval 0.2553 to 0.3662; this is 182 of 263.
    results = [
        grid_table.Result(success=share, tasks=tasks, sampled_tokens=5, minutes=1.0)
        for share, tasks in ((82 / 100, 100), (100 / 163, 163))
    ]
    pooled = grid_table.Row(values=("a",), results=(*results, None)).pooled
    assert pooled.tasks == 263 and pooled.success == pytest.approx(182 / 263)
    assert (pooled.low, pooled.high) == pytest.approx((1 - 0.3662, 1 - 0.2553), abs=1e-4)
    assert grid_table.Row(values=("a",), results=(None,)).pooled is None


@pytest.mark.parametrize("cut", ["evals.jsonl", "exit code"])
def test_run_is_done_with_exit_code_0_and_an_evaluation_after_its_last_step(
    grid_plan: ModuleType, grid_table: ModuleType, cut: str
) -> None:
    run = planned(grid_plan, "algo.loss=ctpo").runs[1]
    run.folder.mkdir(parents=True)
    steps = [{"step": n, "sampled_tokens": 600, "seconds_generate": 50.0, "seconds_update": 10.0} for n in (1, 2)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    evals = [{"step": n, "success": 0.25 * n, "tasks": 8} for n in (0, 2)]
    (run.folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evals))
    well = {run.name: grid_table.End(exit_code=0)}
    assert grid_table.result_of(run, well) == grid_table.Result(success=0.5, tasks=8, sampled_tokens=1200, minutes=2.0)
    if cut == "evals.jsonl":
        (run.folder / "evals.jsonl").write_text(json.dumps(evals[0]) + "\n")
        assert grid_table.result_of(run, well) is None
    else:
        assert grid_table.result_of(run, {}) is None
        assert grid_table.result_of(run, {run.name: grid_table.End(exit_code=1, error="no")}) is None
