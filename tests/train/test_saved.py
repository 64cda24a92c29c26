"""Updates from saved episodes: those of the run that played them, bit by bit, without engine and environment.

Runs that train adapters: they go on exactly, and every reader of checkpoints sees their model.
"""

import asyncio
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.cli import main
from agentrl.config import Config, load_config, with_overrides
from agentrl.engines.base import Sampling
from agentrl.errors import AgentRLError, RunFolderError, UsageError
from agentrl.eval.command import EvalRequest
from agentrl.eval.command import run as evaluate
from agentrl.models.load import load_model
from agentrl.models.lora import base_of
from agentrl.models.native import name_of
from agentrl.rollout.driver import StepDriver
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.policy import Policy
from agentrl.runs.checkpoint import export, load_state, load_unused, model_at
from agentrl.runs.folder import checkpoints, read_jsonl
from agentrl.runs.records import read_episodes, write_episodes
from agentrl.runs.settings import read_config, read_versions
from agentrl.runs.shards import shard_name
from agentrl.segments import Row, complete_rows
from agentrl.toolenv.base import ToolEnv
from agentrl.train.learner import Learner
from agentrl.train.run import resume, train, train_on
from agentrl.train.saved import SavedEpisodes
from agentrl.types import Segment

from ..forests import forest
from .conftest import Make, OnDisk, quiet, rows_of, same_weights

EVERY = ("optim.steps=3", "optim.schedule=linear", "save.every=1", "save.episodes_every=1", "eval.tasks=1")
Line = dict[str, Any]


class Twice(StepDriver):
    """Plays the environment after a turn that nobody continues: the next turn begins another row."""

    async def play(self, env: ToolEnv, policy: Policy, spec: EpisodeSpec) -> None:
        messages, _ = await policy.run(env.reset, seed=spec.seed % 2**32, options={"task": spec.task_id})
        await policy.turn(messages)
        await super().play(env, policy, spec)


TWICE = f"rollout.driver={__name__}:Twice"


@pytest.fixture
def played(on_disk: OnDisk) -> Path:
    """A run whose episodes are all saved."""
    return train(on_disk("run.name=played", *EVERY), quiet())


def files_of(run: Path) -> list[Path]:
    return sorted((run / "episodes").iterdir())


def again(run: Path, *overrides: str, files: list[Path] | None = None) -> Path:
    begun_with = f"model.path={checkpoints(run)[0]}"
    config = load_config(path="small.toml", overrides=[*EVERY, "run.name=again", begun_with, *overrides])
    return train_on(files or files_of(run), config, quiet())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("algo.kl_coef=0.1", "optim.epochs=2"), ("run.deterministic=true", TWICE)])
def test_updates_are_those_of_the_run_bit_by_bit(on_disk: OnDisk, settings: tuple[str, ...]) -> None:
    run = train(on_disk("run.name=played", *EVERY, *settings), quiet())
    gymnasium.registry.pop("test/Shout-v0")  # nothing is to be played
    other = again(run, *settings)
    whole, rows = rows_of(run), rows_of(other)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["grad_norm"] > 0 for row in rows)
    # Only what was measured while playing is missing.
    assert all(key.startswith("sandbox_") for row in whole for key in row.keys() - rows[0].keys())
    assert {row["rows_mean"] for row in rows} == {2 if TWICE in settings else 1}
    assert rows == [{key: value for key, value in row.items() if key in rows[0]} for row in whole]
    assert same_weights(run, other) and not (other / "evals.jsonl").exists()
    assert (other / "report.html").exists() and read_config(other).sft.steps == 0
    assert read_versions(run)["update"] == read_versions(other)["update"] == name_of(torch.device("cpu"), torch.float32)
    for mine, theirs in zip(files_of(run), files_of(other), strict=True):
        assert list(read_episodes(mine)) == list(read_episodes(theirs)), "with the same advantages"
    # Stopped after its first step, it goes on with the same files.
    for path in checkpoints(other)[2:]:
        shutil.rmtree(path)
    resume(other, quiet())
    assert rows_of(other) == rows and same_weights(run, other)
    assert load_state(checkpoints(other)[-1])["episodes"] == [str(file.resolve()) for file in files_of(run)]


def test_rollouts_alone_can_be_learned_from(on_disk: OnDisk) -> None:
    config = on_disk()
    settings = ("eval.split=train", "eval.attempts=3", "eval.tasks=5")
    request = EvalRequest(path="model", config=Path("small.toml"), out=Path("rollouts"), overrides=settings)
    evaluate(request, quiet())
    gymnasium.registry.pop("test/Shout-v0")
    run = train_on([Path("rollouts/episodes.jsonl.zst")], config, quiet())
    (row,) = rows_of(run)
    assert row["episodes"] == 15 and row["grad_norm"] > 0 and row["logp_diff_max"] < 1e-4
    assert [path.name for path in checkpoints(run)] == ["step-000000", "step-000001"]


@pytest.mark.slow
def test_kept_and_saved_episodes_of_several_rows_are_those_that_were_played(on_disk: OnDisk) -> None:
    run = train(on_disk("run.name=lag", "rollout.overlap=lag", TWICE, *EVERY, "run.deterministic=true"), quiet())
    unused = load_unused(checkpoints(run)[1])
    assert len(unused) == 12 and all(len(episode.rows) == 2 for episode in unused)
    trained = [record.trajectory for record in read_episodes(run / "episodes" / "step-000002.jsonl.zst")]
    assert unused == trained, "with the log-probs that they were trained with"
    cut = shutil.copytree(run, run.with_name("cut"))
    for path in checkpoints(cut)[2:]:
        shutil.rmtree(path)
    resume(cut, quiet())
    assert rows_of(cut) == rows_of(run) and len(rows_of(run)) == 3 and same_weights(run, cut)
    assert all(row["turns_mean"] == 2 and row["grad_norm"] > 0 for row in rows_of(run))


def _first(row: Line) -> Line:
    return row["segments"][0]


def changed(source: Path, change: Callable[[Line], object], keep: int | None = None) -> Path:
    """A copy of a file with each episode changed, the first ``keep`` of them."""
    import zstandard

    lines = zstandard.ZstdDecompressor().decompressobj().decompress(source.read_bytes()).splitlines()
    rows: list[Line] = [json.loads(line) for line in lines[:keep]]
    for row in rows:
        change(row)
    Path("changed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path("changed.jsonl")


CHANGES: list[tuple[Callable[[Line], object], str]] = [
    (lambda row: _first(row)["token_ids"].__setitem__(0, 10**30), r"has the token 1000+, and the model of model.path"),
    (lambda row: _first(row)["token_ids"].__setitem__(0, -1), "has the token -1, and the model of model.path only 300"),
    (lambda row: _first(row)["pieces"].__setitem__(0, "?!"), "another tokenizer: token 1 is '\\?!' there"),
    (lambda row: row["origin"].update(temperature=0.5), "was played with rollout.temperature=0.5, and the config has"),
    (lambda row: row["origin"].update(turn_tokens=9), "was played with rollout.turn_tokens=9, and the config has 12"),
    (lambda row: row["origin"].update(env_id="x/Y-v0"), "was played with env.id='x/Y-v0', and the config has 'test/"),
    (lambda row: row["origin"].update(env_args={}), r"was played with env.args=\{\}, and the config has \{'tooled'"),
    (lambda row: row.update(env="b"), "was played with env.mix.b.id='test/Shout-v0', and the config has None"),
    (lambda row: row["origin"].update(split=str(row["seed"])), "has episodes of another split than before"),
    (lambda row: row.update(segments=row["segments"][:1], rewards=[]), "has no sampled token"),
    (lambda row: _first(row).update(token_ids=[], pieces=[]), "can't be trained on: .*prompt"),
    (lambda row: row["segments"][1]["logprobs"].__setitem__(0, math.nan), "line 1 of .* is no episode: .*finite"),
    (lambda row: row["rewards"].__setitem__(0, math.inf), "line 1 of .* is no episode: .*not finite"),
]


SETTINGS = [
    (["optim.steps=2"], "names 3 files, a step each, and optim.steps is 2: raise it, or name fewer"),
    (["rollout.episode_tokens=9", "optim.max_tokens=9"], "trained on: an episode of .* not fit into max_tokens=9"),
    (["model.path="], r"set model\.path to the one that sampled them"),
    (["algo.loss=ppo"], "no loss is called 'ppo'"),
]


@pytest.mark.slow
def test_episodes_and_settings_that_do_not_fit(played: Path) -> None:
    changes = [((), change, wanted) for change, wanted in CHANGES]
    for overrides, change, wanted in (*changes, *((overrides, None, wanted) for overrides, wanted in SETTINGS)):
        files = [changed(files_of(played)[0], change)] if change else None
        with pytest.raises(AgentRLError, match=wanted) as caught:
            again(played, *overrides, files=files)
        assert "\n" not in str(caught.value) and not Path("runs/again").exists()


def test_what_has_nothing_to_compare(played: Path) -> None:
    alone = changed(files_of(played)[0], lambda row: row, keep=1)
    with pytest.raises(UsageError, match=r"has one episode of each task, and algo\.advantage='otb' compares several"):
        again(played, "algo.advantage=otb", files=[alone])
    assert rows_of(again(played, "algo.advantage=none", files=[alone]))[0]["episodes"] == 1
    for name, settings in {"default": (), "pooled": ("algo.advantage=otb", "algo.advantage_options.pool=1")}.items():
        assert rows_of(again(played, *settings, f"run.name={name}", files=[alone]))[0]["groups_unpooled"] == 1
    # Another prompt is another group, though the task be the same.
    longer = lambda row: _first(row).update({name: 2 * _first(row)[name] for name in ("token_ids", "pieces")})
    twice = changed(files_of(played)[0], lambda row: row["seed"] % 2 and longer(row))
    config = load_config(path="small.toml")
    groups = asyncio.run(SavedEpisodes([twice], config).batch(1)).trained
    prompts = {(group.task_id, group.trajectories[0].segments[0]) for group in groups}
    assert sum(map(len, groups)) == 12 and len(groups) == len(prompts) > 3
    Path("none.jsonl").write_text("")
    for file, wanted in (("none.jsonl", "holds no episode"), ("gone.jsonl", "can't be read: No such file")):
        with pytest.raises(UsageError, match=wanted):
            again(played, files=[Path(file)])


def test_groups_share_their_opening_and_each_row_has_to_fit(
    small: Make, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    run, rng = small("optim.steps=1"), random.Random(3)
    openings = [Segment("prompt", (5, 6)), Segment("prompt", (5, 7))]
    played = [forest(rng, openings[number % 2], 1 + number % 3) for number in range(6)]
    origin = run.mix.origins(Sampling(temperature=1.0, max_tokens=12))[""]
    file = tmp_path / "e.jsonl"
    policy: Any = SimpleNamespace(model=model, tokenizer=tokenizer)

    def saved(*overrides: str) -> SavedEpisodes:
        write_episodes(file, played, tokenizer, origin)
        return SavedEpisodes([file], small(*overrides, "optim.steps=1").config)

    groups = asyncio.run(saved().batch(1)).trained
    assert [list(group) for group in groups] == [played[::2], played[1::2]]
    longest = max(len(row) for episode in played for row in complete_rows(episode.rows))
    assert longest > max(len(row.token_ids) for episode in played for row in episode.rows)
    limits = f"optim.max_tokens={longest}", f"rollout.episode_tokens={longest}"
    saved(*limits).check_fit(policy)
    shorter = [limit.replace(str(longest), str(longest - 1)) for limit in limits]
    with pytest.raises(UsageError, match=f"of {longest} tokens does not fit into max_tokens={longest - 1}"):
        saved(*shorter).check_fit(policy)
    strange = Row((Segment("tool", (300,)),), 0, 2)
    played[0] = replace(played[0], segments=(), rows=(*played[0].rows, strange))
    with pytest.raises(UsageError, match=r"has the token 300, and the model of model\.path only 300"):
        saved().check_fit(policy)


def test_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, wanted in (
        (["--resume", "runs/x", "--episodes", "e.jsonl"], "leave all options out but --set"),
        (["--preset", "quickstart", "--dry-run", "--episodes", "e.jsonl"], "plays nothing: leave one of them out"),
        (["--preset", "quickstart", "--episodes", "e.jsonl"], "set model.path to the one that sampled them"),
    ):
        assert main(["train", *words]) == 2
        assert wanted in capsys.readouterr().err
    assert not any(here.iterdir())


LORA = ("lora.rank=2", "lora.alpha=8", "optim.lr=1e-2", "algo.kl_coef=0.1")
ONE = shard_name(0, 1)
TINY = "model.tiny={hidden=32,heads=2,layers=2}"
OWN = ("model.path=''", TINY, "sft.steps=2", "sft.episodes=4")


@pytest.fixture
def config(on_disk: OnDisk) -> Config:
    return on_disk("optim.steps=3", "save.every=1", "eval.tasks=2", "run.deterministic=true", *LORA)


def tensors(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint that hold weights or moments."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


def check_goes_on(whole: Path, after: int, *overrides: str) -> None:
    """The run, cut back to the checkpoint of step ``after`` and moved, ends as it did."""
    other = shutil.copytree(whole, whole.with_name(f"cut-{after}"))
    for path in checkpoints(other)[after + 1 :]:
        shutil.rmtree(path)
    resume(other, quiet(), overrides)
    assert rows_of(other) == rows_of(whole) and len(rows_of(whole)) == 3
    assert [row["kl_reference"] > 1e-3 for row in rows_of(other)] == [False, True, True]
    assert rows_of(other, "evals.jsonl") == rows_of(whole, "evals.jsonl")
    for path, again in zip(checkpoints(whole), checkpoints(other), strict=True):
        assert tensors(path) == tensors(again), path.name
    shutil.rmtree(other)


def check_readers(run: Path) -> None:
    """The run's own last evaluation is that of its checkpoint, and of what is exported."""
    last = read_jsonl(run / "evals.jsonl")[-1]
    assert main(["export", str(run), "whole"]) == 0
    settings = ("eval.tasks=2",)
    for path, config in ((run, None), (checkpoints(run)[-1], None), (Path("whole"), Path("small.toml"))):
        request = EvalRequest(path=str(path), config=config, overrides=settings if config else ())
        (evaluation,) = evaluate(request, quiet())
        row = evaluation.overall.row()
        assert {name: last[name] for name in row} == row, path
    exported, own = AutoModelForCausalLM.from_pretrained("whole"), load_model(checkpoints(run)[-1])
    weights = dict(exported.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in own.named_parameters())
    assert AutoTokenizer.from_pretrained("whole").chat_template
    with pytest.raises(UsageError, match=r"'whole' can't be made .*: name another one"):
        export(str(run), Path("whole"), "float32", print)
    assert main(["export", str(run), "half", "--dtype", "bfloat16"]) == 0
    assert AutoModelForCausalLM.from_pretrained("half").dtype == torch.bfloat16


@pytest.mark.slow
def test_adapters_beside_a_model_of_ones_own(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "keep_reference", None)  # which would copy the model
    run = train(config, quiet())
    for path in checkpoints(run):
        held = {file.name for file in path.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "optimizer"} < held
        assert not {"config.json", "model.safetensors"} & held and base_of(path) == str(Path("model").resolve())
    check_goes_on(run, 0)
    check_goes_on(run, 2, "optim.gradient_checkpointing=true")
    check_readers(run)
    # Trained beside other weights they would be another policy: neither resumed nor evaluated.
    other = AutoModelForCausalLM.from_pretrained("model")
    other.model.norm.weight.data += 0.01
    other.save_pretrained("model")
    shutil.rmtree(checkpoints(run)[-1])
    for again in (lambda: resume(run, quiet()), lambda: evaluate(EvalRequest(path=str(run)), quiet())):
        with pytest.raises(UsageError, match="trained beside other weights than"):
            again()


@pytest.mark.slow
def test_adapters_after_a_warm_start_of_the_whole_model(config: Config) -> None:
    config = with_overrides(config, [*OWN, "model.dtype=bfloat16"])
    run = train(config, quiet())
    earliest, *later = checkpoints(run)
    assert "model.safetensors" in tensors(earliest), "the adapters' base: it is nowhere else"
    assert all(set(tensors(path)) == {"adapter_model.safetensors", f"optimizer/{ONE}"} for path in later)
    assert {base_of(path) for path in later} == {str(earliest.resolve())}
    check_goes_on(run, 0)
    check_goes_on(run, 1)
    # A new run can begin where this one ended; its own adapters belong to the merged model then.
    config = with_overrides(config, ["run.name=next", f"model.path={run}", "sft.steps=0", "optim.steps=1"])
    onward = train(config, quiet())
    merged, begun = (dict(load_model(path).named_parameters()) for path in (later[-1], checkpoints(onward)[0]))
    assert all(torch.equal(weight, begun[name]) for name, weight in merged.items())
    assert base_of(checkpoints(onward)[-1]) == str(checkpoints(onward)[0].resolve())
    # A bit of the base is a bit of all: no checkpoint is whole any more.
    data = (earliest / "model.safetensors").read_bytes()
    (earliest / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    message = r"step-000003 has the adapters of .*step-000000, which holds another model"
    with pytest.raises(RunFolderError, match=message):
        model_at(str(run), print)


def test_layers_that_are_not_there_are_refused_before_anything_is_written(config: Config) -> None:
    with pytest.raises(UsageError, match=r"lora.targets names no linear layer 'q_prj'; did you mean 'q_proj'"):
        train(with_overrides(config, [*OWN, 'lora.targets=["q_prj"]']), quiet())
    assert not Path("runs").exists()
