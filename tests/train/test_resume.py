"""A run that goes on: every step after is the step of a run that never stopped, to the version of its weights.

And where its folder is damaged, or its disk full: nothing is lost in silence.
"""

import asyncio
import errno
import hashlib
import io
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrl.config import Config, with_overrides
from agentrl.errors import AgentRLError, InfrastructureError, Terminated
from agentrl.runs.folder import checkpoints
from agentrl.runs.progress import Display
from agentrl.runs.records import read_episodes
from agentrl.train.run import resume, train

from .conftest import OnDisk, quiet, rows_of, same_weights

Damage = Callable[[Path], object]


def overwrite(file: str, old: str, new: str) -> Damage:
    return lambda run: (run / file).write_text((run / file).read_text().replace(old, new))


def add_unused(run: Path) -> None:
    """Give the newest checkpoint episodes that can't be read, with their checksum, and a row that would be cut."""
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
    (lambda run: [shutil.rmtree(one / "optimizer") for one in checkpoints(run)], "no checkpoint of .* is whole"),
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
    (other / "checkpoints" / ".step-000001.tmp" / "left by a kill").mkdir(parents=True)
    resume(other, display)
    assert not list(other.rglob(".*.tmp"))
    assert "the folder episodes of runs/other is gone" in told.getvalue()
    assert "step-000003 lacks the file optimizer/00001-of-00001" in told.getvalue()
    assert "step-000002 holds another model.safetensors than it was saved with: step-000001 is" in told.getvalue()
    assert [path.name for path in checkpoints(other)] == [path.name for path in checkpoints(whole)]
    assert len(list((other / "checkpoints").glob("damaged-step-0000*"))) == 3, "what was passed over is kept"
    assert rows_of(whole) == rows_of(other) and len(rows_of(whole)) == 3
    told = [row["kl_reference"] for row in rows_of(whole)]
    assert told[0] == 0 < told[1] < told[2], "the reference stays what training began with"
    for step in (2, 3):
        path = Path("episodes") / f"step-{step:06d}.jsonl.zst"
        one, again = ([record.trajectory.segments for record in read_episodes(run / path)] for run in (whole, other))
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


WAITS = "is full: the run waits for room"
FULL: list[tuple[int, int, float]] = [
    # Room for no row; for some rows, but for no checkpoint. Freed after another attempt: it is said only once.
    (0, errno.ENOSPC, 1.5),
    (60_000, errno.ENOSPC, 0.1),
    (0, errno.ENOSPC, signal.SIGINT),
    (60_000, errno.ENOSPC, signal.SIGTERM),
    (0, errno.EDQUOT, 0.1),
    (0, errno.EIO, 0.1),
]


@pytest.mark.slow
def test_a_full_disk_pauses_the_run_and_nothing_is_lost(config: Config, small_disk: bool) -> None:
    config = with_overrides(config, ["rollout.concurrency=12", "run.deterministic=true"])
    whole = train(with_overrides(config, ["run.dir=elsewhere"]), quiet())
    for left, code, then in FULL:
        check_full_disk(config, whole, small_disk and code == errno.ENOSPC, left, code, then)
        shutil.rmtree("runs/run")


def check_full_disk(config: Config, whole: Path, real: bool, left: int, code: int, then: float) -> None:
    """Train on a disk that is full once, and stop with a signal or free it so many seconds later."""
    run, filler, failing = Path("runs/run"), Path("runs/filler"), pytest.MonkeyPatch()
    stop, told = then if isinstance(then, signal.Signals) else None, list[str]()

    def free() -> None:
        failing.undo()
        filler.unlink(missing_ok=True)

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    class Filling(Display):
        def say(self, text: str, style: str = "") -> None:
            told.append(text)
            if text.startswith("step 0 ("):
                if real:
                    filler.write_bytes(bytes(shutil.disk_usage("runs").free - left))
                else:
                    failing.setattr(os, "fsync", fail)
            elif WAITS in text:
                assert len(rows_of(run)) == (real and left > 0) and not list(run.rglob(".*.tmp")), "none is cut off"
                if stop:
                    signal.raise_signal(stop)
                else:  # the loop goes on meanwhile
                    asyncio.get_running_loop().call_later(then, free)

    kind = {None: InfrastructureError, signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}[stop]
    words = f"{'' if stop else f'{os.strerror(code)}.*; '}stopped, step-000000 is saved; go on"
    ends = pytest.raises(kind, match=rf"{words} with: agentrl train --resume runs/run$")
    with ends if stop or code == errno.EIO else nullcontext():
        train(config, Filling(io.StringIO()))
    free()
    assert len([text for text in told if WAITS in text]) == (code != errno.EIO)
    if stop or code == errno.EIO:
        resume(run, quiet())
    assert rows_of(run) == rows_of(whole) and same_weights(run, whole)
    assert [path.name for path in checkpoints(run)] == [path.name for path in checkpoints(whole)]
    assert [*(run / "episodes").iterdir()] and not list(run.rglob(".*.tmp"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[bool]:
    """Whether the folder of runs could be put on a disk of 8 MB."""
    (disk := tmp_path / "runs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", disk]
    mounted = not subprocess.run(mount, capture_output=True).returncode
    yield mounted
    if mounted:
        subprocess.run(["umount", "-l", disk], check=True)
