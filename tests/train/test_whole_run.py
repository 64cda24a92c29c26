"""A whole run: what is in its folder fits together, it goes on where it ended, and any architecture will do.

The processes of a run with several ranks: it is a run on one, whatever becomes of them.
"""

import json
import os
import signal
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from agentrl.config import parse_config
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.models.load import load_model
from agentrl.models.lora import base_of
from agentrl.runs.folder import checkpoints, read_jsonl
from agentrl.runs.records import read_episodes
from agentrl.runs.settings import read_config
from agentrl.sandboxes.base import Status
from agentrl.train.ranks import check_ranks, is_follower, ranks

from ..forked import Command, Server, is_alive
from .conftest import ARITHMETIC, SHAPED, TOY, Train, rows_of, same_weights, setting, weights_of
from .test_sharded import apart


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
        credit = [abs(advantage) for record in records for advantage in record.advantages or ()]
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
    complete, short = tmp_path / "runs" / "whole", tmp_path / "runs" / "short"
    before = (short / "config.toml").read_text()

    def resumed(*settings: str) -> Command:
        return server.start(tmp_path, "train", "--resume", "runs/short", *setting(*settings))

    refused = resumed("env.args.level=2")
    assert refused.wait() == 2 and "env.args.level can't change in a resumed run, only run.th" in refused.err
    assert "it has ended: raise optim.steps or optim.max_sampled_tokens" in resumed().done().err
    assert (short / "config.toml").read_text() == before
    assert "it has ended" not in resumed("optim.steps=4", "save.every=1", "rollout.concurrency=1").done().err
    assert (read_config(short).optim.steps, read_config(short).save.every) == (4, 1)
    assert 'dialect = "fence' in (short / "config.toml").read_text()
    assert rows_of(complete) == rows_of(short)
    assert [row["step"] for row in read_jsonl(short / "evals.jsonl")] == [0, 2, 4]
    assert [path.name for path in checkpoints(short)] == [f"step-{step:06d}" for step in (0, 2, 3, 4)]
    assert same_weights(complete, short)
    clock = [row["seconds_run"] for row in read_jsonl(short / "metrics.jsonl")]
    assert clock == sorted(clock), "the clock goes on where it stood"
    assert clock[2] > read_jsonl(short / "evals.jsonl")[1]["seconds_run"]
    train("next", "model.path=runs/short", "optim.steps=0", "eval.tasks=1").done()
    assert read_config(tmp_path / "runs" / "next").model.path == "runs/short/checkpoints/step-000004"
    assert same_weights(short, tmp_path / "runs" / "next")


@pytest.mark.parametrize("stop_at", [0.9, 1e-300, 1.0])
def test_warm_start_that_ends_too_early_is_told(server: Server, tmp_path: Path, stop_at: float) -> None:
    (tmp_path / "warm.toml").write_text(ARITHMETIC)
    settings = [
        f"sft.stop_at={stop_at}",
        "sft.steps=2",
        "sft.tasks=4",
        "eval.tasks=1",
        "rollout.turn_tokens=32",
        "optim.steps=0",
    ]
    errors = server.start(tmp_path, "train", "warm.toml", *setting(*settings)).done().err
    assert ("not the 90% of sft.stop_at" in errors) is ("warning" in errors) is (stop_at == 0.9)


SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2},
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {**EXPERTS, "num_experts": 4, "head_dim": 8},
    "Llama": {},
    "Mistral": {"sliding_window": 40},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 40, "attn_logit_softcapping": 5.0},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 40},
    "Glm": {"head_dim": 8},
    "Glm4": {"head_dim": 8},
    "Glm4Moe": {**EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "DeepseekV2": {**EXPERTS, **LATENT, "topk_method": "greedy"},
    "DeepseekV3": {**EXPERTS, **LATENT},
    "SmolLM3": {},
    "Granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "Phi3": {},
    "Olmo2": {},
    "Cohere": {"logit_scale": 0.25},
}

OTHERS = [name for name in ARCHITECTURES if name not in ("Gemma2", "DeepseekV3")]
PLAIN = f"""{SHAPED}
class Plain(Shaped):
    def __init__(self, **options):
        super().__init__(**options)
        self.tools = ()

gymnasium.register("test/Plain-v0", entry_point=Plain)
"""
"""Without a tool, which a random model does not call."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Gemma2", "DeepseekV3", *(pytest.param(name, marks=pytest.mark.ci) for name in OTHERS)]
)
def test_the_whole_loop(server: Server, tokenizer: Any, tmp_path: Path, name: str) -> None:
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {**SIZES, "vocab_size": len(tokenizer), **special, **ARCHITECTURES[name]}
    config: PreTrainedConfig = getattr(transformers, f"{name}Config")(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "plain.py").write_text(PLAIN)
    text = ARITHMETIC.replace("steps = 90", "steps = 0").replace("steps = 4", "steps = 3")
    (tmp_path / "run.toml").write_text(text.replace("[model]", '[model]\npath = "model"'))
    rollout = ("rollout.group_size=2", "rollout.concurrency=4", "rollout.turn_tokens=8")
    settings = ("env.id=plain:test/Plain-v0", *rollout, "eval.tasks=1", "eval.every=3", "save.every=0")
    server.start(tmp_path, "train", "run.toml", "--name", "it", *setting(*settings)).done()
    run = tmp_path / "runs" / "it"
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["logp_diff_max"] for row in rows) < 1e-4, "sampling and scoring must mean the same model"
    assert all(row["grad_norm"] > 0 for row in rows)
    assert [row["step"] for row in read_jsonl(run / "evals.jsonl")] == [0, 3]
    assert json.loads((checkpoints(run)[-1] / "config.json").read_text())["model_type"] == config.model_type
    assert {weights.dtype for weights in weights_of(run).values()} <= {torch.float32, torch.int64}


def test_settings_that_ranks_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"set model\.device='cuda', not 'cuda:1'"):
        check_ranks(parse_config({"run": {"ranks": 2}, "model": {"device": "cuda:1"}}))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert is_follower()
    with pytest.raises(ConfigError, match=r"4 processes were started together, .*: set run.ranks=4"):
        check_ranks(parse_config({}))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "has ended: it said nothing"),
        ("kill -9 $$", "was killed by SIGKILL"),
    ],
)
def test_rank_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, message: str) -> None:
    (rank := tmp_path / "rank").write_text(f"#!/bin/sh\n{script}\n")
    rank.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(rank))
    words = f"rank 1 {message}; the run goes on from its last checkpoint"
    with pytest.raises(InfrastructureError, match=words), ranks(parse_config({"run": {"ranks": 2}})):
        pass


def test_a_join_that_goes_on_does_not_hide_why_a_rank_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = threading.Event()

    def join(address: str, *_: int) -> None:
        folder = Path(address.removeprefix("file://")).parent
        for number in count():
            with suppress(OSError):
                (folder / str(number)).touch()
            if ended.is_set():
                return

    monkeypatch.setattr("agentrl.train.ranks._join", join)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        test_rank_that_cannot_start(monkeypatch, tmp_path, "exit 1", "has ended: it said nothing")
    finally:
        ended.set()


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Train:
    """Start ``agentrl train`` with a toy environment: ``start("name", "run.ranks=2")``."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "run.toml").write_text(ARITHMETIC)
    settings = ("env.id='toy:test/Toy-v0'", "sft.steps=2", "sft.tasks=8", "algo.kl_coef=0.1")
    settings += ("rollout.concurrency=6", "rollout.turn_tokens=8", "eval.tasks=1")

    def begin(name: str, *overrides: str) -> Command:
        return server.start(tmp_path, "train", "run.toml", "--name", name, *setting(*settings, *overrides))

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), pytest.param(("lora.rank=2", "lora.alpha=8"), marks=pytest.mark.ci)])
def test_whole_run_on_two_ranks_is_that_on_one(
    start: Train, server: Server, tmp_path: Path, model: Any, tokenizer: Any, adapters: Any
) -> None:
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    adapters += ("model.path=model", "model.tiny={}")
    start("one", "optim.steps=3", *adapters).done()
    command = start("two", "optim.steps=2", "run.ranks=2", *adapters).done()
    assert command.out == "runs/two\n" and command.err.count("step 0 (") == 1
    server.start(tmp_path, "train", "--resume", "runs/two", *setting("optim.steps=3", "run.ranks=1")).done()
    single, double = (rows_of(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(single) == len(double) == 3 and all(row["grad_norm"] > 0 for row in single)
    for mine, wanted in zip(double, single, strict=True):
        # What rows share is computed once in a pack, and two ranks have other packs.
        assert mine.pop("update_flops") > 0 < wanted.pop("update_flops")
        assert mine == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    weights = [load_model(checkpoints(tmp_path / "runs" / name)[-1]).state_dict() for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys() and apart(weights[1], weights[0]) < 1e-3
    if "lora.rank=2" in adapters:
        last = checkpoints(tmp_path / "runs" / "two")[1]
        base = AutoModelForCausalLM.from_pretrained(base_of(last) or "")
        peft = PeftModel.from_pretrained(base, last).merge_and_unload().state_dict()
        assert apart(peft, load_model(last).state_dict()) < 1e-6


@pytest.mark.slow
def test_two_ranks_play_ahead_as_one_does(start: Train, tmp_path: Path) -> None:
    short = ("optim.steps=3", "eval.every=0", "save.every=0")
    start("one", *short, "rollout.overlap=lag").done()
    start("two", *short, "rollout.overlap=lag", "run.ranks=2").done()
    start("flying", *short, "rollout.overlap=inflight", "run.ranks=2").done()
    single, double, flying = (rows_of(tmp_path / "runs" / name) for name in ("one", "two", "flying"))
    assert [[row["staleness_max"] for row in rows] for rows in (single, double)] == [[0, 1, 1]] * 2
    assert [row["reward_mean"] for row in double] == [row["reward_mean"] for row in single]
    assert [row["grad_norm"] for row in double] == pytest.approx([row["grad_norm"] for row in single], rel=1e-3)
    assert len(flying) == 3 and max(row["staleness_max"] for row in flying) <= 1


@pytest.mark.slow
def test_rank_that_is_killed_ends_the_run_which_goes_on_later(start: Train, server: Server, tmp_path: Path) -> None:
    command = start("it", "optim.steps=100000", "run.ranks=3", "eval.every=0")
    metrics = tmp_path / "runs" / "it" / "metrics.jsonl"
    command.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    ranks = command.descendants()
    assert len(ranks) == 2
    os.kill(max(ranks), signal.SIGKILL)
    assert command.wait() == 1 and not any(map(is_alive, ranks))
    assert "rank 2 was killed by SIGKILL; the run goes on from its last checkpoint" in command.err.splitlines()[-1]
    server.start(tmp_path, "train", "--resume", "runs/it", *setting("optim.steps=2", "run.ranks=1")).done()
