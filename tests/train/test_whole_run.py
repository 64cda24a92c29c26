"""A whole run: what is in its folder fits together, and it goes on where it ended or was cut off."""

import json
import os
import signal
from pathlib import Path
from typing import get_args

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.runs.folder import checkpoints, read_config, read_jsonl
from agentrl.runs.records import read_episodes
from agentrl.sandboxes.base import Status

from ..forked import Server
from .conftest import ARITHMETIC, SHAPED, Train, rows_of, same_weights, setting


@pytest.mark.slow
def test_run_folder_fits_together(train: Train, server: Server, tmp_path: Path) -> None:
    command = train("one").done()
    run = tmp_path / "runs" / "one"
    assert command.out == "runs/one\n"
    assert "Traceback" not in command.err and "shards" not in command.err
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["step"] for row in read_jsonl(run / "evals.jsonl")] == [0, 2, 4]
    assert [path.name for path in checkpoints(run)] == ["step-000000", "step-000002", "step-000004"]
    assert (run / "report.html").stat().st_size > 1000
    assert all(row["reward_mean"] > 0 and row["grad_norm"] > 0 for row in rows), "it must learn, or nothing is tested"
    programs = [sum(row[f"sandbox_{status}"] for status in get_args(Status)) for row in rows]
    assert sum(programs) > 0 and all(ran <= row["tool_calls"] for ran, row in zip(programs, rows, strict=True))
    for row in rows:
        records = list(read_episodes(run / "episodes" / f"step-{row['step']:06d}.jsonl.zst"))
        assert len(records) == row["episodes"] == 6
        assert sum(record.trajectory.n_sampled for record in records) == row["sampled_tokens"]
        assert sum(len(record.trajectory.token_ids) for record in records) == row["tokens"]
        assert sum(record.trajectory.ret for record in records) == pytest.approx(6 * row["reward_mean"])
        credit = [abs(one) for record in records for one in record.advantages or ()]
        assert len(credit) == row["sampled_tokens"]
        assert sum(credit) / len(credit) == pytest.approx(row["advantage_abs"], abs=1e-6)
        assert {part.version for record in records for part in record.trajectory.sampled} == {row["step"] - 1}
        assert row["logp_diff_max"] < 1e-4
    model = AutoModelForCausalLM.from_pretrained(checkpoints(run)[-1])
    tokenizer = AutoTokenizer.from_pretrained(checkpoints(run)[-1])
    assert model.config.vocab_size == len(tokenizer) and tokenizer.chat_template

    words = ("--json", "--tasks", "4", "--attempts", "2")
    result = json.loads(server.start(tmp_path, "eval", "runs/one", *words, "--out", "e").done().out)
    assert (result["tasks"], result["attempts"], set(result["pass_at"])) == (4, 2, {"1", "2"})
    assert len(list(read_episodes(tmp_path / "e"))) == 8
    assert json.loads(server.start(tmp_path, "eval", str(checkpoints(run)[-1]), *words).done().out) == result


@pytest.mark.slow
def test_a_run_that_ended_can_be_trained_longer(train: Train, server: Server, tmp_path: Path) -> None:
    settings = ("eval.every=0", "optim.warmup=3", "run.deterministic=true")
    train("whole", *settings).done()
    train("short", *settings, "optim.steps=2").done()
    one, other = tmp_path / "runs" / "whole", tmp_path / "runs" / "short"
    before = (other / "config.toml").read_text()
    refused = server.start(tmp_path, "train", "--resume", "runs/short", "--set", "env.args.level=2")
    assert (
        refused.wait() == 2 and "env.args.level can't change in a run that goes on, only run.threads, " in refused.err
    )
    idle = server.start(tmp_path, "train", "--resume", "runs/short")
    assert idle.wait() == 0 and "it has ended: raise optim.steps or optim.max_sampled_tokens" in idle.err
    assert (other / "config.toml").read_text() == before
    longer = setting("optim.steps=4", "save.every=1", "rollout.concurrency=1")
    resumed = server.start(tmp_path, "train", "--resume", "runs/short", *longer)
    assert resumed.wait() == 0 and "it has ended" not in resumed.err, resumed.err
    assert (read_config(other).optim.steps, read_config(other).save.every) == (4, 1)
    assert 'dialect = "fence' in (other / "config.toml").read_text()
    assert rows_of(one) == rows_of(other)
    assert [row["step"] for row in read_jsonl(other / "evals.jsonl")] == [0, 2, 4]
    assert [path.name for path in checkpoints(other)] == [f"step-{step:06d}" for step in (0, 2, 3, 4)]
    assert same_weights(one, other)
    clock = [row["seconds_run"] for row in read_jsonl(other / "metrics.jsonl")]
    assert clock == sorted(clock), "the clock goes on where it stood"
    assert clock[2] > read_jsonl(other / "evals.jsonl")[1]["seconds_run"]


@pytest.mark.slow
def test_a_schedule_that_is_stretched_says_where_it_goes_on(train: Train, server: Server, tmp_path: Path) -> None:
    train("it", "optim.steps=1", "optim.schedule=linear", "eval.every=0", "eval.tasks=1").done()
    resumed = server.start(tmp_path, "train", "--resume", "runs/it", "--set", "optim.steps=2").done()
    # Half of the updates are done, so that half of the rate is left.
    assert "optim.schedule is linear: the learning rate goes on at 0.0005, to fall to 0 at the new end" in resumed.err
    train("next", "model.path=runs/it", "optim.steps=0", "eval.tasks=1").done()
    assert read_config(tmp_path / "runs" / "next").model.path == "runs/it/checkpoints/step-000002"
    assert same_weights(tmp_path / "runs" / "it", tmp_path / "runs" / "next")


def test_evaluation_that_was_cut_off_is_made_up_for(train: Train, server: Server, tmp_path: Path) -> None:
    command = train("cut", "optim.steps=0", "eval.tasks=3000")
    run = tmp_path / "runs" / "cut"
    command.until(lambda: bool(checkpoints(run)))
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("tasks = 3000", "tasks = 2"))
    server.start(tmp_path, "train", "--resume", "runs/cut").done()
    assert [(row["step"], row["tasks"]) for row in read_jsonl(run / "evals.jsonl")] == [(0, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "advantage"), [("0.00", "otb"), ("0.30", "ogb")])
def test_steps_that_teach_nothing_are_told_once(train: Train, tmp_path: Path, reward: str, advantage: str) -> None:
    same = SHAPED.replace("Shaped", "Same").replace("sum(map(ord, episode.final)) % 5 / 4", reward)
    (tmp_path / "same.py").write_text(same)
    settings = ["env.id='same:test/Same-v0'", "env.args.max_turns=1", "optim.steps=7", "save.every=0", "eval.every=0"]
    command = train("silent", *settings, f"algo.advantage={advantage}").done()
    # Not 0 for ogb, whose baseline has 1e-8 in its denominator.
    assert all((row["advantage_abs"] == 0) is (advantage == "otb") for row in rows_of(tmp_path / "runs" / "silent"))
    told = [line for line in command.err.splitlines() if line.startswith("warning")]
    assert len(told) == 1 and "last 5 steps taught nothing" in told[0] and f"on average {reward}" in told[0]


@pytest.mark.parametrize("stop_at", [0.9, 1e-300, 1.0])
def test_warm_start_that_ends_too_early_is_told(server: Server, tmp_path: Path, stop_at: float) -> None:
    (tmp_path / "warm.toml").write_text(ARITHMETIC)
    settings = [f"sft.stop_at={stop_at}", "sft.steps=2", "sft.tasks=4", "eval.tasks=1", "rollout.turn_tokens=32"]
    command = server.start(tmp_path, "sft", "warm.toml", *setting(*settings)).done()
    assert ("not the 90% of sft.stop_at" in command.err) is (stop_at == 0.9)
    assert ("warning" in command.err) is (stop_at == 0.9)
