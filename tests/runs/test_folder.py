"""Run folders: never overwritten, never shared, and readable whatever instant a run was killed at."""

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError, RunFolderError
from agentrl.runs.checkpoint import model_at
from agentrl.runs.files import replace
from agentrl.runs.folder import RunFolder, changed, checkpoints, read_jsonl
from agentrl.runs.settings import read_config, read_versions


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(overrides=[f"run.dir={tmp_path / 'runs'}", "run.name=it", 'env.args.word="a \\"b\\""'])


@pytest.fixture
def folder(config: Config) -> Generator[RunFolder]:
    with RunFolder.create(config, numbered=False) as made:
        yield made


def test_new_folder_holds_config_versions_and_dialect(config: Config, tmp_path: Path) -> None:
    with RunFolder.create(config, numbered=False, made_by={"dialect": 'fence "1"', "decode_step": ""}) as folder:
        assert folder.path == tmp_path / "runs" / "it" and read_versions(folder.path)["dialect"] == 'fence "1"'
    text = (folder.path / "config.toml").read_text()
    assert "[versions]" in text and f'"{sys.version.split()[0]}"' in text and read_config(folder.path) == config
    assert not [path.name for path in folder.path.iterdir() if path.name.endswith(".tmp")]
    with RunFolder.create(config, numbered=True) as folder:
        assert not {"dialect", "decode_step"} & read_versions(folder.path).keys()


def test_config_of_a_mix_names_no_environment_beside_it(tmp_path: Path) -> None:
    config = load_config(overrides=[f"run.dir={tmp_path}", "env.mix={a={id='agentrl/Math-v0'}}"])
    with RunFolder.create(config, numbered=True) as folder:
        assert "Arithmetic" not in (folder.path / "config.toml").read_text()
        assert read_config(folder.path) == config


def test_taken_name_is_an_error_or_gets_a_number(config: Config, tmp_path: Path) -> None:
    RunFolder.create(config, numbered=False).close()
    before = (tmp_path / "runs" / "it" / "config.toml").read_bytes()
    with pytest.raises(RunFolderError, match=r"choose another --name, resume with --resume .*/it, or delete it"):
        RunFolder.create(config, numbered=False)
    for number in (2, 3):
        with RunFolder.create(config, numbered=True) as folder:
            assert folder.path.name == f"it-{number}"
    assert (tmp_path / "runs" / "it" / "config.toml").read_bytes() == before
    # Who was killed while it made the folder has left this.
    (tmp_path / "runs" / "it" / "config.toml").rename(tmp_path / "runs" / "it" / f".config.toml.{'0' * 16}.tmp")
    with pytest.raises(RunFolderError, match="exists already"):
        RunFolder.create(config, numbered=False)
    (tmp_path / "runs" / "it" / "episodes").rmdir()
    RunFolder.create(config, numbered=False).close()


@pytest.mark.parametrize(
    ("begun", "error", "left"), [(False, ConfigError, False), (False, OSError, True), (True, ConfigError, True)]
)
def test_a_refused_run_leaves_no_folder(config: Config, begun: bool, error: type[Exception], left: bool) -> None:
    with pytest.raises(error), RunFolder.create(config, numbered=False) as folder:
        if begun:
            folder.checkpoint(0).mkdir(parents=True)
        raise error("no")
    assert folder.path.exists() is left
    if left:
        with pytest.raises(ConfigError), RunFolder.resume(folder.path)[0]:
            raise ConfigError("no")
        assert folder.path.exists()


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize(
    ("parent", "name", "why"),
    [("file", "it", "Not a directory"), ("file/in", "it", "Not a directory"), (".", "a" * 300, "File name too long")],
)
def test_a_folder_that_can_not_be_made(tmp_path: Path, parent: str, name: str, why: str, numbered: bool) -> None:
    (tmp_path / "file").write_text("")
    config = load_config(overrides=[f"run.dir={tmp_path / parent}", f"run.name={name}"])
    with pytest.raises(RunFolderError, match=f"can't be made: {why}"):
        RunFolder.create(config, numbered=numbered)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


HOLD = """
import sys
from pathlib import Path
from agentrl.runs.folder import RunFolder
folder, _ = RunFolder.resume(Path(sys.argv[1]))
folder.append("metrics.jsonl", {"step": 1})
print("held", flush=True)
sys.stdin.read()
"""


def test_folder_in_use_names_the_process(config: Config) -> None:
    RunFolder.create(config, numbered=False).close()
    path = Path(config.run.dir) / "it"
    command = [sys.executable, "-c", HOLD, str(path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "held\n"
    with pytest.raises(RunFolderError, match=f"is in use by process {holder.pid}: "):
        RunFolder.resume(path)
    assert read_jsonl(path / "metrics.jsonl") == [{"step": 1}]
    holder.kill()  # a lock dies with its process, however it dies
    holder.communicate()
    folder, again = RunFolder.resume(path)
    with folder:
        assert again == config
        with pytest.raises(RunFolderError, match=f"is in use by process {os.getpid()}"):
            RunFolder.resume(path)


def test_partial_last_line_is_dropped(folder: RunFolder) -> None:
    assert read_jsonl(folder.path / "metrics.jsonl") == []
    for step in range(4):
        folder.append("metrics.jsonl", {"step": step, "loss": 0.1 * step})
    rows = read_jsonl(folder.path / "metrics.jsonl")
    with (folder.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    assert read_jsonl(folder.path / "metrics.jsonl") == rows
    rows_kept = folder.rows_until(2, {})
    assert rows_kept["evals.jsonl"] == b"" and not (folder.path / "evals.jsonl").exists()
    replace(folder.path / "metrics.jsonl", rows_kept["metrics.jsonl"])
    folder.append("metrics.jsonl", {"step": 3})
    assert read_jsonl(folder.path / "metrics.jsonl") == [*rows[:3], {"step": 3}]
    with pytest.raises(RunFolderError, match=r"metrics.jsonl has rows, and the run no checkpoint"):
        folder.rows_until(-1, {})


def test_a_write_that_fails_half_way_leaves_nothing(folder: RunFolder) -> None:
    path = folder.path / "metrics.jsonl"
    folder.append(path.name, {"step": 1})
    data, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(data) + 5, hard))
    try:
        for write in (lambda: folder.append(path.name, {"step": 2}), lambda: replace(path, b"x" * 99)):
            with pytest.raises(OSError, match="File too large"):
                write()
            assert path.read_bytes() == data and not list(folder.path.glob(".*.tmp"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder.append(path.name, {"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"step": "1"}', b"\0\0", b"\xff", b"[" * 100_000])
def test_damaged_line_is_named_unless_it_is_cut_anyway(folder: RunFolder, line: bytes) -> None:
    path = folder.path / "metrics.jsonl"
    folder.append("metrics.jsonl", {"step": 1})
    sealed, data = folder.seal(), path.read_bytes()
    path.write_bytes(data + line + b"\n")
    assert folder.rows_until(1, sealed)["metrics.jsonl"] == data, "what came after the checkpoint is written again"
    with pytest.raises(RunFolderError, match=r"line 2 of .*metrics.jsonl is no JSON object with a step: put a"):
        read_jsonl(path)
    for other in (data.replace(b"1", b"2"), data[:-1], b""):
        path.write_bytes(other)
        with pytest.raises(RunFolderError, match=r"metrics.jsonl is damaged or gone: .* step-000001 was saved"):
            folder.rows_until(1, sealed)


def test_config_that_was_cut_off_anywhere_is_no_config(config: Config) -> None:
    RunFolder.create(config, numbered=False, made_by={"dialect": "fence 1"}).close()
    file = Path(config.run.dir) / "it" / "config.toml"
    data = file.read_bytes()
    for size in range(0, len(data) - 1, 7):
        file.write_bytes(data[:size])
        with pytest.raises((ConfigError, RunFolderError)):
            read_config(file.parent)


def test_no_run_names_the_nearest(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match="there are none yet"):
        RunFolder.resume(Path("runs/it"))
    RunFolder.create(config, numbered=False).close()
    for wrong in ("runs/ti", "it", "runs/it/episodes", "/runs/it"):
        with pytest.raises(RunFolderError, match=r"(did you mean 'runs/it'|choose one of runs/it)"):
            RunFolder.resume(Path(wrong))
    assert not (tmp_path / "it").exists()


def test_a_run_names_its_last_checkpoint_as_a_model(folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="has no checkpoint yet"):
        model_at(str(folder.path), print)
    for step in (3, 20):
        folder.checkpoint(step).mkdir(parents=True)
        state = f'{{"step": {step}, "updates": 0}}'
        (folder.checkpoint(step) / "trainer.json").write_text(state)
        sums = f"{hashlib.sha256(state.encode()).hexdigest()}  trainer.json\n"
        (folder.checkpoint(step) / "SHA256SUMS").write_text(sums)
    assert model_at(str(folder.path), print) == str(folder.checkpoint(20))
    for other in ("", "Qwen/Qwen3-0.6B", str(tmp_path), str(folder.checkpoint(3))):
        assert model_at(other, print) == other


def test_what_may_change_while_a_run_goes_on(config: Config, tmp_path: Path) -> None:
    may = ["optim.steps=7", "optim.max_sampled_tokens=9", "eval.tasks=3", "eval.split=train", "save.every=1"]
    new = changed(config, [*may, "rollout.concurrency=2", "run.threads=1", "model.device=meta"], Path("runs/it"))
    assert (new.optim.steps, new.eval.split, new.rollout.concurrency) == (7, "train", 2)
    assert changed(config, ["lora.rank=0", "algo.loss=ctpo"], Path("it")) == config, "as it was is no change"
    refused = ["run.seed=3", "model.path=x", "env.id=a/B-v0", "algo.advantage=rloo", "env.args.level=7"]
    for setting in (*refused, "rollout.truncated.turn=answer", "rollout.overlap=lag"):
        with pytest.raises(ConfigError, match=rf"{setting.partition('=')[0]} can't change .* model.path=runs/it"):
            changed(config, [setting], Path("runs/it"))
    with pytest.raises(ConfigError, match=r"did you mean 'optim\.steps'"):
        changed(config, ["optim.stepz=3"], Path("runs/it"))
    (tmp_path / "checkpoints" / "step-000019").mkdir(parents=True)
    assert changed(config, ["optim.steps=19"], tmp_path).optim.steps == 19
    with pytest.raises(ConfigError, match=r"optim.steps=5 is too few: the run has done 19 already"):
        changed(config, ["optim.steps=5"], tmp_path)


def test_checkpoints_are_in_order_of_their_steps(folder: RunFolder) -> None:
    assert checkpoints(folder.path) == []
    for step in (20, 3, 1000001, 999999):
        folder.checkpoint(step).mkdir(parents=True)
    (folder.path / "checkpoints" / ".step-000030.tmp").mkdir()
    (folder.path / "checkpoints" / "notes").mkdir()
    (folder.path / "checkpoints" / "step-000099").write_text("a stray file")
    assert checkpoints(folder.path) == [folder.checkpoint(step) for step in (3, 20, 999999, 1000001)]
    assert folder.episodes(7).name == "step-000007.jsonl.zst"
