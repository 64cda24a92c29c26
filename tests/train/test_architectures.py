"""The whole loop on a tiny random model of each architecture: load, sample, score, train three steps, evaluate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from agentrl.runs.folder import checkpoints, read_jsonl

from ..forked import Server
from .conftest import ARITHMETIC, SHAPED, setting, weights_of

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

PLAIN = SHAPED.replace("Shaped", "Plain").replace(
    "    def reward",
    """    def __init__(self, **options):
        super().__init__(**options)
        self.tools = ()

    def reward""",
)
"""Without a tool, which a random model does not call."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("Gemma2", "DeepseekV3") else pytest.mark.ci) for name in ARCHITECTURES],
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
