"""The metrics of a training step: its episodes, the distances between three policies, and its speed.

docs/metrics.md names them all. No decision reads them.
"""

import re
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any
from urllib.parse import quote

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.algos.regularizers import k3
from agentrl.batch import Batch
from agentrl.rollout.metrics import episode_means
from agentrl.train.credit import Scored
from agentrl.train.diagnostics import baseline_noise
from agentrl.train.groups import StepGroups
from agentrl.train.score import new_tokens
from agentrl.types import Trajectory, flatten

PEAKS = {
    **{"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12},
    **{"GH200": 989e12, "B200": 2250e12, "L4": 121e12, "L40S": 362e12, "A10": 125e12, "RTX 4090": 165e12},
}
"""Dense bfloat16 FLOP/s by words in a GPU's name, the longer ones first; from NVIDIA's data sheets, which often print
twice as much, with sparsity."""


def summary(number: int, played: StepGroups, scored: Scored) -> dict[str, float]:
    """Compute step ``number``'s metrics of its episodes and their credit."""
    # Dynamic sampling skips groups that were played like the others: rewards and lengths are means over all groups,
    # and numbers about learning over the trained ones.
    collected = played.collected
    episodes = flatten(collected.groups)
    means = episode_means(episodes)
    runs = [run for trajectory in episodes for run in trajectory.tool_runs]
    clock = collected.clock
    old, sampler, reference = scored.old_logp, scored.sampler_logp, scored.reference_logp
    return {
        "step": number,
        "episodes": len(episodes),
        "reward_mean": means["reward_mean"],
        "penalty_mean": means["penalty_mean"],
        **_reward_parts(episodes),
        "turns_mean": means["turns_mean"],
        "rows_mean": means["rows_mean"],
        **_lengths([len(trajectory.token_ids) for trajectory in episodes]),
        "sampled_tokens": played.sampled_tokens,
        "tokens": len(scored.batch.tokens),
        "tool_calls": len(runs),
        "tool_errors": sum(not run.ok for run in runs),
        **_exchanges(episodes),
        "truncated": sum(trajectory.stop.truncated for trajectory in episodes),
        "cut_turns": sum(trajectory.cut_turns for trajectory in episodes),
        "faults": collected.faults,
        "groups_lost": collected.lost,
        "groups_silent": played.silent,
        "groups_left_out": len(collected.groups) - len(played.trained),
        "tokens_masked": int((~scored.in_loss).sum()),
        "entropy": float(scored.entropy.mean()),
        "energy": float(scored.energy.mean()),
        "advantage_abs": float(scored.advantages.abs().mean()),
        **baseline_noise(scored.rewards, scored.energy, scored.starts, scored.environment),
        "logp_diff_max": scored.disagreement,
        "staleness_mean": float(scored.age.double().mean()),
        "staleness_max": int(scored.age.max()),
        # k3 is unbiased under the policy that sampled: so each estimate begins at the sampler, or nearly there.
        "kl_sampler": float(k3(sampler, old).mean()),
        **({} if reference is None else {"kl_reference": float(k3(old, reference).mean())}),
        "seconds_tools_summed": clock.tools,
        "seconds_engine_summed": clock.engine,
    }


def _reward_parts(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the mean of each named part of the rewards; an episode without the part, such as a cut one, counts 0."""
    names = sorted({name for episode in episodes for name in episode.parts})
    # An environment may use any name. Quoted names stay distinct, and break no line, path or tag of a tracker.
    return {
        f"reward/{quote(name, safe=' ', errors='surrogatepass')}": sum(
            episode.parts.get(name, 0.0) for episode in episodes
        )
        / len(episodes)
        for name in names
    }


def _exchanges(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Count the questions to judges and simulated users, and their tokens; nothing where there are none."""
    exchanges = [exchange for episode in episodes for exchange in episode.exchanges]
    tokens = sum(sum(exchange.usage or ()) for exchange in exchanges)
    return {"exchanges": len(exchanges), "exchange_tokens": tokens} if exchanges else {}


def _lengths(tokens: list[int]) -> dict[str, float]:
    """Compute mean and percentiles of the episodes' tokens, by the nearest rank."""
    ranked = sorted(tokens)
    ranks = {percent: ceil(percent * len(ranked) / 100) for percent in (50, 99)}
    mean = {"episode_tokens_mean": sum(ranked) / len(ranked)}
    return mean | {f"episode_tokens_p{percent}": ranked[rank - 1] for percent, rank in ranks.items()}


def pass_flops(model: PreTrainedModel, pack: Batch) -> float:
    """Count the operations of the products in a forward and a backward pass over a pack.

    A weight costs 2 a token to apply, 2 for the gradient of its input, and 2 for its own if it is trained: 6·N·T where
    all are. The head only meets sampled tokens, tokens that rows share are computed once, and attention is causal.
    Activations that checkpointing computes a second time do not count.

    Returns:
        The count; 0 for a mixture of experts, whose tokens do not meet all weights.

    Source: arXiv 2204.02311, appendix B.
    """
    text: Any = model.config.get_text_config()
    if getattr(text, "num_experts_per_tok", None):
        return 0.0
    rows = new_tokens(pack)
    tokens = sum(length - shared for shared, length in rows)
    head: Any = model.get_output_embeddings()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    flops = 0.0
    for weight in model.parameters():
        if weight.ndim > 1 and (weight is head.weight or id(weight) not in looked_up):
            met = len(pack.sampled) if weight is head.weight else tokens
            flops += (6 if weight.requires_grad else 4) * weight.numel() * met
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    for kind in kinds:
        window = text.sliding_window if kind == "sliding_attention" else None
        pairs = sum(_pairs(length, window) - _pairs(shared, window) for shared, length in rows)
        # Query with key, and the result with value, each once forwards and twice backwards.
        flops += 12 * heads * size * pairs
    return flops


def _pairs(length: int, window: int | None) -> int:
    """Count the pairs of a token and one that it attends to, itself included."""
    inside = min(length, window or length)
    return inside * (inside + 1) // 2 + (length - inside) * inside


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Look up a device's dense peak in FLOP/s; None on a CPU, an unknown GPU, or for another dtype than bfloat16."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    matching = (words for words in sorted(PEAKS, key=len, reverse=True) if re.search(rf"\b{words}\b", name))
    return PEAKS.get(next(matching, ""))


def rates(row: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """Compute tokens and operations per second from a step's other metrics.

    Args:
        row: the other metrics.
        peak: FLOP/s that the device can do; None where nobody knows.

    Returns:
        The rates; ``mfu`` is the share of the peak that the updates reached (arXiv 2204.02311).
    """
    per_second = {"sampled_tokens_per_second": row["sampled_tokens"] / row["seconds_generate"]}
    if "trained_tokens" in row:
        per_second["trained_tokens_per_second"] = row["trained_tokens"] / row["seconds_update"]
    if "update_flops" in row:
        per_second["flops_per_second"] = row["update_flops"] / row["seconds_update"]
        per_second |= {"mfu": per_second["flops_per_second"] / peak} if peak else {}
    return per_second
