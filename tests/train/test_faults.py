"""Faults in the loop: no hang, no reward for one, each counted, and above the set rate the run stops with the cause.

A run that goes on: every step after is the step of a run that never stopped, to the version of its weights. And where
its folder is damaged, or its disk full: nothing is lost in silence.

Killed sandboxes are in ``tests/test_soak.py``, signals in ``test_interrupt.py``, killed ranks in ``test_sharded.py``, a
killed vLLM in ``tests/engines/test_vllm.py``.
"""

import errno
import hashlib
import io
import itertools
import math
import os
import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch

from agentrl import algos
from agentrl.config import Config, with_overrides
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import (
    AgentRLError,
    EnvContractError,
    FaultRateError,
    InfrastructureError,
    InvariantError,
)
from agentrl.runs.folder import checkpoints, read_jsonl
from agentrl.runs.progress import Display
from agentrl.runs.records import read_episodes
from agentrl.runs.shards import Shards
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.function import tool
from agentrl.train import groups, update
from agentrl.train.run import resume, train
from agentrl.train.step import Trainer
from agentrl.types import Task

from .conftest import Make, OnDisk, quiet, rows_of, same_weights, step, trainer_of

grade: Callable[[], object]
hung = threading.Event()


@tool(timeout=0.05)
def hang() -> str:
    """Never answer, as far as the run can see."""
    hung.wait()
    return "too late"


class Faulty(ToolEnv):
    """Calls its tool in every first turn, if it has it, and is graded by ``grade``."""

    def __init__(self, *, tooled: bool, **options: Any) -> None:
        super().__init__(**options)
        self.tools = (hang,) if tooled else ()

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=f"{split}:{n}", prompt=f"Say {n}.") for n in range(6)])

    def step(self, action: str) -> Any:
        call = self.tools and self.episode.turns == 0
        return super().step(self.dialect.render("hang", {}) if call else action)

    def reward(self, episode: Episode) -> dict[str, float]:
        grade()
        return {"correct": sum(map(ord, episode.final)) % 5 / 4}

    def gold(self, task: Task) -> list[str]:
        return [task.id]


@pytest.fixture
def faulty(on_disk: OnDisk) -> Generator[OnDisk]:
    """Makes configs of a small run."""
    gymnasium.register("test/Faulty-v0", entry_point=Faulty)
    grade_by(lambda: None)
    hung.clear()
    yield lambda *overrides: on_disk(
        *("env.id=test/Faulty-v0", "optim.steps=2", "save.every=0", "eval.tasks=1", "rollout.tasks=2"),
        *("rollout.max_fault_rate=0.5", *overrides),
    )
    hung.set()


def grade_by(function: Callable[[], object]) -> None:
    global grade
    grade = function


def raising(error: Exception, places: Sequence[int]) -> Callable[[], object]:
    """Raises at these calls, counting from 0."""
    calls = itertools.count()

    def call() -> None:
        if next(calls) in places:
            raise error

    return call


def test_a_tool_that_hangs_holds_up_nobody(faulty: OnDisk) -> None:
    run = train(faulty("optim.steps=1", "env.args.tooled=true"), quiet())
    (row,) = read_jsonl(run / "metrics.jsonl")
    assert row["tool_errors"] == row["tool_calls"] == 8 and row["faults"] == 0
    for record in read_episodes(run / "episodes" / "step-000001.jsonl.zst"):
        assert "stopped: hang ran longer than 0.05 s" in record.trajectory.messages[3]["content"]


@pytest.mark.parametrize("part", ["engine", "grader"])
def test_what_fails_for_a_moment_is_counted_and_changes_nothing(faulty: OnDisk, monkeypatch: Any, part: str) -> None:
    undisturbed, whole = train(faulty("run.name=whole"), quiet()), TransformersEngine._step  # pyright: ignore
    if part == "engine":
        # While the engine is compared with the trainer, and in the first step's episodes.
        fail = raising(RuntimeError("out of memory"), (20, 70))
        monkeypatch.setattr(TransformersEngine, "_step", lambda engine: (fail(), whole(engine)))
    else:
        grade_by(raising(InfrastructureError("the grader is down"), range(3, 6)))
    run = train(faulty("run.name=disturbed"), quiet())
    rows, wanted = rows_of(run), rows_of(undisturbed)
    faults = [row.pop("faults") for row in rows]
    assert faults == [3, 0] if part == "grader" else sum(faults) > 0
    assert all(row.pop("faults") == row["groups_lost"] == 0 for row in wanted)
    assert rows == wanted and same_weights(run, undisturbed), "what is played again is the same"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (KeyError("answer"), EnvContractError, r"Faulty.reward raised KeyError\('answer'\) on task .*: correct it"),
        (InfrastructureError("the grader is down"), FaultRateError, r"2 of 2 groups .* fault: the grader is down"),
    ],
)
def test_a_grader_that_crashes_stops_the_run(faulty: OnDisk, error: Exception, kind: Any, cause: str) -> None:
    # One episode is evaluated before the first step, which plays eight.
    undisturbed = train(faulty("run.name=whole", "rollout.concurrency=1"), quiet())
    grade_by(raising(error, range(9, 10**6)))
    with pytest.raises(kind, match=rf"{cause}.*; stopped, step-000001 is saved; go on with: .* --resume runs/stopped$"):
        train(faulty("run.name=stopped", "rollout.concurrency=1"), quiet())
    grade_by(lambda: None)
    run = resume(Path("runs/stopped"), quiet())
    assert rows_of(run) == rows_of(undisturbed) and same_weights(run, undisturbed)


# What is deterministic and plays ahead goes back to where all that was played ahead is by the weights of before.
@pytest.mark.parametrize(("step", "settings"), [(1, ()), (0, ("rollout.overlap=lag", "run.deterministic=true"))])
def test_an_engine_that_fails_between_two_steps_loses_none(faulty: OnDisk, step: int, settings: Sequence[str]) -> None:
    config = faulty("run.name=whole", *settings)
    undisturbed, whole, probes = train(config, quiet()), groups.check_weights_in_use, itertools.count()

    async def failing(*arguments: Any) -> None:
        if next(probes) > 0:  # after the first step, twice
            raise InfrastructureError("it is gone")
        await whole(*arguments)

    message = rf"^it is gone; stopped, step-00000{step} is saved; go on with: .*stopped$"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InfrastructureError, match=message):
        patch.setattr(groups, "check_weights_in_use", failing)
        train(with_overrides(config, ["run.name=stopped"]), quiet())
    saved = Shards(checkpoints(Path("runs/stopped"))[-1] / "optimizer").names
    assert bool(saved) == (step > 0), "before an update there is nothing to save"
    run = resume(Path("runs/stopped"), quiet())
    assert rows_of(run) == rows_of(undisturbed) and same_weights(run, undisturbed)


@pytest.fixture
def diverging(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], None]:
    """Makes the loss of the updates' packs at these places NaN, counting from 0."""
    whole = algos.loss

    def begin(places: range) -> None:
        packs = itertools.count()

        def loss(*args: Any, **options: Any) -> Any:
            out = whole(*args, **options)
            return out._replace(loss=out.loss * math.nan) if next(packs) in places else out

        # Only the updates see it: a loss is tried before a run begins.
        monkeypatch.setattr(update, "algos", SimpleNamespace(**{**vars(algos), "loss": loss}))

    return begin


def test_an_update_without_a_finite_gradient_is_left_out(small: Make, diverging: Callable[[range], None]) -> None:
    def ended(places: range) -> tuple[dict[str, Any], dict[str, torch.Tensor], int, Trainer]:
        diverging(places)
        run = small("optim.max_tokens=100000")
        trainer, updates = trainer_of(run)
        return step(trainer).metrics, run.weights(), len(updates), trainer

    (metrics, weights, steps, _), (plain, whole, *_) = ended(range(1, 2)), ended(range(0))
    assert (metrics["updates_skipped"], plain["updates_skipped"], steps) == (1, 0, 1)
    assert metrics["grad_norm"] > 0 and all(map(math.isfinite, metrics.values())), "they are of the update that was"
    assert not all(torch.equal(weight, whole[name]) for name, weight in weights.items())
    (_, second, _, trainer), third = ended(range(0, 2)), small().weights()
    assert all(torch.equal(weight, third[name]) for name, weight in second.items()), "nothing moved"
    assert trainer.skipped == 1 and step(trainer, 2).metrics["updates_skipped"] == 0 == trainer.skipped, "in a row"


def test_three_steps_without_a_finite_gradient_stop_the_run_with_their_episodes(faulty: OnDisk, diverging: Any) -> None:
    diverging(range(10**6))
    run = train(faulty("optim.steps=2", "save.episodes_every=100"), quiet())
    with pytest.raises(InvariantError, match=r"no gradient of the last 3 steps was finite.*step-000003\.jsonl\.zst$"):
        resume(run, quiet(), ["optim.steps=9"])
    rows = rows_of(run)
    assert [row["updates_skipped"] for row in rows] == [2, 2, 2] and all("grad_norm" not in row for row in rows)
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert len(list(read_episodes(run / "episodes" / "step-000003.jsonl.zst"))) == 8
    earliest, last = (path / "model.safetensors" for path in (checkpoints(run)[0], checkpoints(run)[-1]))
    assert earliest.read_bytes() == last.read_bytes()


Damage = Callable[[Path], object]


def overwrite(file: str, old: str, new: str) -> Damage:
    return lambda run: (run / file).write_text((run / file).read_text().replace(old, new))


def add_unused(run: Path) -> None:
    """Put into the newest checkpoint episodes that can't be read, with their checksum, and a row that would be cut."""
    last, name, data = checkpoints(run)[-1], "unused.jsonl.zst", b"no episodes"
    (last / name).write_bytes(data)
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 4}\n')
    with (last / "SHA256SUMS").open("a") as sums:
        sums.write(f"{hashlib.sha256(data).hexdigest()}  {name}\n")


DAMAGES: list[tuple[Damage, str]] = [
    (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is damaged or gone"),
    (overwrite("metrics.jsonl", '"step": 2', '"step": 3'), "metrics.jsonl is damaged or gone"),
    (overwrite("evals.jsonl", "{", "<"), "evals.jsonl is damaged or gone"),
    (lambda run: (run / "config.toml").write_text(""), "config.toml was cut off"),
    (overwrite("config.toml", "turn_tokens = 12", "turn_tokens = 13"), "trained with rollout.turn_tokens=12"),
    (lambda run: shutil.rmtree(run / "checkpoints"), "metrics.jsonl has rows, and the run no checkpoint"),
    (lambda run: [shutil.rmtree(path / "optimizer") for path in checkpoints(run)], "no checkpoint of .* is intact"),
    (add_unused, "unused.jsonl.zst is no episode"),
    (overwrite("checkpoints/step-000000/config.json", "{", "{ "), "config.json .* is the reference of algo.kl_coef"),
    (lambda run: shutil.rmtree(run / "checkpoints" / "step-000000"), "can't be read .* is the reference of algo.kl_co"),
]


@pytest.fixture
def config(on_disk: OnDisk) -> Config:
    return on_disk(
        *("optim.steps=3", "save.every=1", "save.episodes_every=1", "eval.tasks=1", "algo.kl_coef=0.5"),
        *("rollout.concurrency=1", "optim.schedule=linear", "optim.warmup=6", "optim.max_sampled_tokens=400"),
    )


def contents(run: Path) -> dict[Path, bytes]:
    names = (path for path in run.rglob("*") if path.is_file() and path.name not in ("report.html", ".lock"))
    return {path: path.read_bytes() for path in names}


@pytest.mark.slow
def test_steps_after_a_resumption_are_those_of_a_run_that_never_stopped(config: Config) -> None:
    output = io.StringIO()
    display = Display(output)
    whole = train(config, display)
    other = shutil.copytree(whole, whole.with_name("other"))
    _, _, second, third = checkpoints(other)
    shutil.rmtree(third / "optimizer")
    weights = (second / "model.safetensors").read_bytes()
    (second / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    (other / "checkpoints" / "step-000099").symlink_to("nowhere")
    shutil.rmtree(other / "episodes")
    (other / "checkpoints" / ".step-000001.tmp" / "left by a kill").mkdir(parents=True)
    resume(other, display)
    assert not list(other.rglob(".*.tmp"))
    assert "the folder episodes of runs/other is gone" in output.getvalue()
    assert "step-000003 lacks the file optimizer/00001-of-00001" in output.getvalue()
    assert "step-000002 holds another model.safetensors than it was saved with: step-000001 is" in output.getvalue()
    assert [path.name for path in checkpoints(other)] == [path.name for path in checkpoints(whole)]
    assert len(list((other / "checkpoints").glob("damaged-step-0000*"))) == 3, "what was passed over is kept"
    assert rows_of(whole) == rows_of(other) and len(rows_of(whole)) == 3
    distances = [row["kl_reference"] for row in rows_of(whole)]
    assert distances[0] == 0 < distances[1] < distances[2], "the reference stays what training began with"
    for at in (2, 3):
        path = Path("episodes") / f"step-{at:06d}.jsonl.zst"
        played, again = ([record.trajectory.segments for record in read_episodes(run / path)] for run in (whole, other))
        assert played == again
        assert {part.version for segments in again for part in segments if part.trained} == {at - 1}
    assert same_weights(whole, other)
    for number, (damage, words) in enumerate(DAMAGES):
        run = shutil.copytree(whole, whole.with_name(f"damaged-{number}"))
        damage(run)
        before = contents(run)
        with pytest.raises(AgentRLError, match=words):
            resume(run, display)
        assert contents(run) == before, "nothing is cut before all is known to be readable"


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_ends_the_run_and_nothing_is_lost(config: Config, code: int) -> None:
    config = with_overrides(config, ["rollout.concurrency=12", "run.deterministic=true"])
    whole = train(with_overrides(config, ["run.dir=elsewhere"]), quiet())
    run, failing = Path("runs/run"), pytest.MonkeyPatch()

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    class Filling(Display):
        def say(self, text: str, style: str = "") -> None:
            # From the first evaluation on.
            if text.startswith("step 0 ("):
                failing.setattr(os, "fsync", fail)

    words = rf"refuses a write \(.*{os.strerror(code)}.*; stopped, step-000000 is saved; go on with: agentrl train"
    with pytest.raises(InfrastructureError, match=words):
        train(config, Filling(io.StringIO()))
    assert not rows_of(run) and not list(run.rglob(".*.tmp")), "none is cut off"
    failing.undo()
    resume(run, quiet())
    assert rows_of(run) == rows_of(whole) and same_weights(run, whole)
    assert [path.name for path in checkpoints(run)] == [path.name for path in checkpoints(whole)]
    assert [*(run / "episodes").iterdir()] and not list(run.rglob(".*.tmp"))
