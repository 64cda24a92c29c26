"""What a sweep plans and what it refuses; test_sweep_work.py plays its runs, and test_sweep_runs.py does them."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.eval.pages import write_page
from agentrl.eval.sweep.plan import SweepPlan, SweepRequest, SweepRun, make_plan
from agentrl.eval.sweep.table import End, RunResult, SweepRow, curves, result_of, sections, table, write_summary
from agentrl.runs.files import lock_folder
from agentrl.runs.folder import RunFolder

QUICK = ("--preset", "quickstart")
PAIRS = (*QUICK, "--vary", "algo.advantage=otb,otb_loo,group_mean", "--vary", "algo.loss=ctpo,gspo,ppo_clip")
LOADING = "loading PyTorch …\n"
"""What the first command that needs it says in this process."""


pytestmark = pytest.mark.usefixtures("here")


def test_dry_run_lists_every_pair_of_every_seed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *PAIRS, "--set", "eval.tasks=50", "--tokens", "1234", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err in ("", LOADING) and not list(here.iterdir())
    lines = out.splitlines()
    assert len(lines) == 3 * (1 + 9)
    names = [line.split(" (new): agentrl train --preset quickstart ")[0] for line in lines]
    assert names[:3] == ["warm-start-seed0", "otb-ctpo-seed0", "otb-gspo-seed0"]
    assert names[-1] == "group_mean-ppo_clip-seed2" and len(set(names)) == len(names)
    assert "--set optim.max_sampled_tokens=1234" in lines[1] and "--set eval.tasks=50" in lines[1]
    assert "--set algo.advantage=otb_loo --set algo.loss=ppo_clip" in lines[6] and "--seed 0" in lines[6]


def planned(*vary: str, **changes: Any) -> SweepPlan:
    request: dict[str, Any] = {"preset": "quickstart", "config": None, "overrides": (), "seeds": "0", "tokens": 1000}
    return make_plan(SweepRequest(**(request | {"vary": vary, "out": Path("out")} | changes)))


def test_runs_differ_in_what_is_varied_and_in_nothing_else() -> None:
    vary = ("algo.loss=ctpo,gspo", "optim.lr=1e-4,2e-4")
    warm, *runs = planned(*vary, seeds="3", overrides=["eval.every=5"]).runs
    settings = [run.config.model_dump(exclude={"run": {"name"}, "algo": {"loss"}, "optim": {"lr"}}) for run in runs]
    assert all(run_settings == settings[0] for run_settings in settings)
    assert all(run.after == warm.name and not warm.after for run in runs)
    assert warm.config.sft.steps > 0 == warm.config.optim.steps and runs[0].config.sft.steps == 0
    assert runs[0].config.model.path == f"{warm.folder}/checkpoints/step-000000"
    assert {run.config.run.seed for run in (warm, *runs)} == {3}
    assert {run.config.eval.every for run in (warm, *runs)} == {5}


def test_without_a_warm_start_there_is_nothing_to_share() -> None:
    plan = planned("model.tiny.hidden=16,32", overrides=["sft.steps=0"], seeds="0,1")
    assert [run.name for run in plan.runs] == ["16-seed0", "32-seed0", "16-seed1", "32-seed1"]
    assert not any(run.after or run.config.model.path for run in plan.runs)


def test_lists_are_values_too_and_names_stay_apart() -> None:
    plan = planned("optim.betas=[0.9, 0.95],[0.9,0.99], [0.9 , 0.95]")
    assert [run.config.optim.betas for run in plan.runs[1:]] == [(0.9, 0.95), (0.9, 0.99), (0.9, 0.95)]
    names = [run.name for run in plan.runs]
    assert names[1:] == ["0-9-0-95-seed0", "0-9-0-99-seed0", "row3-0-9-0-95-seed0"]


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ((), "give a TOML file, or --preset quickstart"),
        (QUICK, "say what to compare, for example --vary algo.loss=ctpo,ppo_clip"),
        ((*QUICK, "--vary", "algo.loss=ctpo,gspoo"), "no loss is called 'gspoo'; did you mean 'gspo'?"),
        ((*QUICK, "--vary", "algo.loss=ctpo,"), "write section.key=value,value"),
        ((*QUICK, "--vary", "algo.loss"), "write section.key=value,value"),
        ((*QUICK, "--vary", "algo.loss=ctpo,ctpo"), "for the second time"),
        ((*PAIRS, "--vary", "algo.loss=dapo"), "for the second time"),
        ((*PAIRS, "--vary", "algo.loss+optim.lr=dapo+1"), "for the second time"),
        ((*QUICK, "--vary", "rollout.tasks+rollout.group_size=8,4+4"), "give each value as many parts"),
        ((*QUICK, "--vary", "optim.lr+run.seed=1+2,3+4"), "(use --seeds)"),
        ((*PAIRS, "--target", "0.9"), "wants evaluations on the way to it: add --set eval.every=10"),
        ((*PAIRS, "--set", "algo.loss_options.power=0.3"), "has no option 'power'"),
        ((*PAIRS, "--set", "optim.steps=3"), "the sweep sets optim.steps itself: leave it out (use --tokens)"),
        ((*PAIRS, "--set", "run.seed=3"), "(use --seeds)"),
        ((*QUICK, "--vary", "sft.lr=1e-3,2e-3"), "sft.lr can't be varied, since all runs of a seed share"),
        ((*PAIRS, "--seeds", "0,x"), "--seeds is '0,x'"),
        ((*PAIRS, "--seeds", "-1"), "setting 'run.seed' is -1"),
        ((*PAIRS, "--seeds", "1,1"), "for the second time"),
        ((*PAIRS, "--tokens", "0"), "--tokens is 0"),
        ((*PAIRS, "--jobs", "0"), "--jobs is 0"),
        ((*PAIRS, "--out", "taken/in"), "can't be written: Not a directory"),
        ((*PAIRS, "--out", "old", "--seeds", "0"), "(algo.loss is 'gspo' there and 'ctpo' here): choose another --out"),
    ],
)
def test_what_is_refused(here: Path, argv: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "taken").write_text("")
    plan = planned("algo.advantage=otb", "algo.loss=gspo", out=Path("old"))
    config = plan.runs[1].config
    named = config.run.model_copy(update={"name": "otb-ctpo-seed0"})
    tokens = config.optim.model_copy(update={"steps": 60000, "max_sampled_tokens": 60000})
    RunFolder.create(config.model_copy(update={"run": named, "optim": tokens}), numbered=False).close()
    before = sorted(here.rglob("*"))
    assert main(["sweep", *argv]) == 2
    out, err = capsys.readouterr()
    err = err.removeprefix(LOADING)
    assert out == "" and err.startswith("agentrl: ") and err.count("\n") == 1, err
    assert wanted in err
    assert sorted(here.rglob("*")) == before


def test_two_sweeps_do_not_work_in_one_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_folder(here / "out"):
        assert main(["sweep", *PAIRS, "--out", "out"]) == 2
    wanted = f"in use by process {os.getpid()}: wait for it, or choose another --out\n"
    assert capsys.readouterr().err.endswith(wanted)
    assert [path.name for path in (here / "out").iterdir()] == [".lock"]


def test_seeds_are_pooled_by_their_tasks() -> None:
    # Newcombe (1998), table I, method 3: 81 of 263 has the interval 0.2553 to 0.3662; this is 182 of 263.
    results = (replace(result((5, 82 / 100)), tasks=100), replace(result((5, 100 / 163)), tasks=163), None)
    pooled = SweepRow(values=("a",), results=results).pooled
    assert pooled.tasks == 263 and pooled.success == pytest.approx(182 / 263)
    assert (pooled.low, pooled.high) == pytest.approx((1 - 0.3662, 1 - 0.2553), abs=1e-4)
    assert SweepRow(values=("a",), results=(None,)).pooled is None


def write_rows(run: SweepRun, metrics: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics", metrics), ("evals", evals)):
        (run.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_run_is_done_that_has_sampled_its_tokens_and_was_evaluated_after_its_last_step() -> None:
    run = planned("algo.loss=ctpo", tokens=1200).runs[1]
    steps = [{"step": n, "sampled_tokens": 600, "seconds_generate": 50.0, "seconds_update": 10.0} for n in (1, 2)]
    evals = [{"step": n, "success": 0.25 * n, "tasks": 8} for n in (0, 2)]
    write_rows(run, steps, evals)
    assert result_of(run) == replace(result((0, 0.0), (1200, 0.5)), sampled_tokens=1200, minutes=2.0)
    write_rows(run, steps, evals[:1])
    assert result_of(run) is None
    write_rows(run, steps[:1], [{**evals[1], "step": 1}])
    assert result_of(run) is None, "it was stopped in the middle, right after an evaluation"


def test_settings_that_are_varied_together_keep_their_product() -> None:
    plan = planned("rollout.tasks+rollout.group_size=16+4,8+8", "optim.lr=1e+0,2e+0", seeds="0")
    runs = [run for run in plan.runs if run.values]
    assert [(run.config.rollout.tasks, run.config.rollout.group_size, run.config.optim.lr) for run in runs] == [
        *((16, 4, 1.0), (16, 4, 2.0), (8, 8, 1.0), (8, 8, 2.0))
    ]
    assert plan.keys == ("rollout.tasks+rollout.group_size", "optim.lr") and runs[0].values == ("16+4", "1e+0")


def result(*curve: tuple[float, float]) -> RunResult:
    return RunResult(success=curve[-1][1], tasks=8, sampled_tokens=1000, minutes=1.0, curve=curve)


def test_tokens_to_a_target_lie_on_a_line_between_evaluations() -> None:
    run = result((0, 0.2), (400, 0.6), (800, 0.4), (1000, 1.0))
    reached = [run.tokens_to(target) for target in (0.1, 0.2, 0.4, 0.6, 0.7, 1.0)]
    assert reached == pytest.approx([0.0, 0.0, 200.0, 400.0, 900.0, 1000.0])
    assert result((0, 0.2), (1000, 0.9)).tokens_to(0.95) is None and result((5, 1.0)).tokens_to(0.5) == 5


def test_settings_are_compared_by_tokens_seed_by_seed() -> None:
    # The second needs half of what the first does, whatever the seed makes of both.
    baseline = SweepRow(values=("a",), results=tuple(result((0, 0.0), (tokens, 0.5)) for tokens in (200, 400, 900)))
    half = SweepRow(values=("b",), results=tuple(result((0, 0.0), (tokens, 0.5)) for tokens in (100, 200, 450)))
    reached = half.reached(0.5, baseline)
    assert reached is not None and reached.ratio == pytest.approx((0.5, 0.5, 0.5)) and reached.seeds == 3
    assert (reached.tokens, reached.low, reached.high) == (250, 100, 450)
    late = SweepRow(values=("c",), results=(None, result((0, 0.0), (1000, 0.4)), result((0, 0.0), (450, 0.5))))
    reached = late.reached(0.5, baseline)
    assert reached is not None and (reached.seeds, reached.tokens) == (1, (1000 + 450) / 2)
    assert reached.ratio == pytest.approx((1450 / 1300, 450 / 900, 1000 / 400)), "the extremes draw one seed twice"
    assert SweepRow(values=("d",), results=(None,)).reached(0.5, baseline) is None
    solved = SweepRow(values=("e",), results=(result((0, 1.0)),))
    assert (reached := solved.reached(0.5, solved)) is not None and reached.ratio is None


def test_all_runs_are_in_one_chart_and_one_page(here: Path) -> None:
    plan = planned("algo.loss=ctpo,gspo", overrides=["sft.steps=0", "eval.every=1"], seeds="0,1", target=0.5)
    for number, run in enumerate(plan.runs[:3]):
        steps = [{"step": step, "sampled_tokens": 500} for step in (1, 2)]
        evals = [{"step": step, "split": "test", "success": 0.2 * step + 0.1 * number, "tasks": 8} for step in range(3)]
        write_rows(run, steps, [{**evals[1], "split": "train"}, *evals])
    ends = {run.name: End(exit_code=0) for run in plan.runs[:3]} | {plan.runs[3].name: End(exit_code=1, error="<b>")}
    (chart,) = curves(plan)
    titles = ["ctpo, seed 0: 40.0%", "ctpo, seed 1: 60.0%", "gspo, seed 0: 50.0%"]
    assert [line.titles[-1] for line in chart.lines] == [f"{words} after 1,000 tokens" for words in titles]
    write_page(here / "sweep.html", "sweep", sections(plan, ends), [chart])
    page = (here / "sweep.html").read_text()
    assert "script-src" in page and "style=" not in page, "the page's policy forbids styles in place"
    assert "&lt;b&gt;" in page and "1 of 2" in page and "Tokens to the target" in page
    text = table(plan, ends)
    assert "| ctpo | 1 of 2 | at least 875 (750 to 1,000) | 1.00 (1.00 to 1.00) |" in text
    write_summary(plan, ends)
    rows = json.loads((here / "out" / "sweep.json").read_text())["rows"]
    assert rows[0]["reached"]["seeds"] == 1 and rows[1]["reached"]["ratio"] == [1.0, 1.0, 1.0]
