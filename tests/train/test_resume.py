"""A run that goes on: every step after is the step of a run that never stopped, to the version of its weights.

And where its folder is damaged, or its disk full: nothing is lost in silence.
"""

import io
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import Config
from agentrl.errors import AgentRLError, InfrastructureError
from agentrl.runs.folder import checkpoints
from agentrl.runs.progress import Display
from agentrl.runs.records import read_episodes
from agentrl.train.run import resume, train

from .conftest import rows_of, same_weights

Damage = Callable[[Path], object]


def overwrite(file: str, old: str, new: str) -> Damage:
    return lambda run: (run / file).write_text((run / file).read_text().replace(old, new))


DAMAGES: list[tuple[Damage, str]] = [
    (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is damaged or gone"),
    (overwrite("metrics.jsonl", '"step": 2', '"step": 3'), "metrics.jsonl is damaged or gone"),
    (overwrite("evals.jsonl", "{", "<"), "evals.jsonl is damaged or gone"),
    (lambda run: (run / "config.toml").write_text(""), "config.toml was cut off"),
    (overwrite("config.toml", "turn_tokens = 12", "turn_tokens = 13"), "trained with rollout.turn_tokens=12"),
    (lambda run: shutil.rmtree(run / "checkpoints"), "metrics.jsonl has rows, and the run no checkpoint"),
    (lambda run: [shutil.rmtree(one / "optimizer") for one in checkpoints(run)], "no checkpoint of .* is whole"),
    (overwrite("checkpoints/step-000000/config.json", "{", "{ "), "config.json .* is the reference of algo.kl_coef"),
    (lambda run: shutil.rmtree(run / "checkpoints" / "step-000000"), "can't be read .* is the reference of algo.kl_co"),
]


@pytest.fixture
def config(on_disk: Callable[..., Config]) -> Config:
    return on_disk(
        *("optim.steps=3", "save.every=1", "save.episodes_every=1", "eval.tasks=1", "algo.kl_coef=0.5"),
        *("rollout.concurrency=1", "optim.schedule=linear", "optim.warmup=6", "optim.max_sampled_tokens=400"),
    )


def no_room(_: int) -> None:
    Path("/dev/full").write_text("x")


def contents(run: Path) -> dict[Path, bytes]:
    names = (path for path in run.rglob("*") if path.is_file() and path.name not in ("report.html", ".lock"))
    return {path: path.read_bytes() for path in names}


def test_steps_after_a_resumption_are_those_of_a_run_that_never_stopped(config: Config) -> None:
    told = io.StringIO()
    display = Display(told)
    whole = train(config, display)
    other = shutil.copytree(whole, whole.with_name("other"))
    _, _, second, third = checkpoints(other)
    shutil.rmtree(third / "optimizer")
    weights = (second / "model.safetensors").read_bytes()
    (second / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    (other / "checkpoints" / "step-000099").symlink_to("nowhere")
    shutil.rmtree(other / "episodes")
    resume(other, display)
    assert "the folder episodes of runs/other is gone" in told.getvalue()
    assert "step-000003 can't be read" in told.getvalue() and "optimizer/00001-of-00001" in told.getvalue()
    assert "step-000002 holds another model.safetensors than it was saved with: step-000001 is" in told.getvalue()
    assert [path.name for path in checkpoints(other)] == [path.name for path in checkpoints(whole)]
    assert len(list((other / "checkpoints").glob("damaged-step-0000*"))) == 3, "what was passed over is kept"
    assert rows_of(whole) == rows_of(other)
    assert len(rows_of(whole)) == 3
    told = [row["kl_reference"] for row in rows_of(whole)]
    assert told[0] == 0 < told[1] < told[2], "the reference stays what training began with"
    for step in (2, 3):
        one, again = (
            [record.trajectory.segments for record in read_episodes(run / "episodes" / f"step-{step:06d}.jsonl.zst")]
            for run in (whole, other)
        )
        assert one == again
        assert {part.version for segments in again for part in segments if part.trained} == {step - 1}
    assert same_weights(whole, other)
    for number, (damage, words) in enumerate(DAMAGES):
        run = shutil.copytree(whole, whole.with_name(f"damaged-{number}"))
        damage(run)
        before = contents(run)
        with pytest.raises(AgentRLError, match=words):
            resume(run, display)
        assert contents(run) == before, "nothing is cut before all is known to be readable"


@pytest.mark.parametrize("left", [0, 60_000])
def test_full_disk_is_named_and_the_run_goes_on_later(config: Config, tmp_path: Path, left: int) -> None:
    disk, full = tmp_path / "runs", pytest.MonkeyPatch()
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", disk], capture_output=True)

    class Filling(Display):
        def say(self, text: str, style: str = "") -> None:
            """Leave room for some rows, but for no checkpoint; where nothing can be mounted, for nothing."""
            if not text.startswith("step 0 ("):
                return
            if mount.returncode == 0:
                (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))
            else:
                full.setattr(os, "fsync", no_room)

    try:
        words = rf"the disk at {disk if mount.returncode == 0 else '/'}.*: step-000000 is saved; .* --resume runs/run$"
        with pytest.raises(InfrastructureError, match=words):
            train(config, Filling(io.StringIO()))
        assert mount.returncode or len(rows_of(disk / "run")) == (left > 0)
        full.undo()
        (disk / "filler").unlink(missing_ok=True)
        assert len(rows_of(resume(disk / "run", Display(io.StringIO())))) == 3
    finally:
        if mount.returncode == 0:
            subprocess.run(["umount", "-l", disk], check=True)
