"""How good is each estimator's gradient at weights that stay as they are? Part B of PLAN.md.

Every token's gradient is taken once, projected and kept. Then two groups of N rows that share no row are drawn of each
task, and the rows left over make a third, unbiased gradient. What is written are inner products of these, from which
noise, kept signal and cosines follow.

Legend: K tasks, S sampled tokens, n of one row, D width of the projection, E estimators.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import ROOT, RowFile, commit_of, digits
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from agentrl.algos.advantages import ogb
from agentrl.batch import Batch, as_batch
from agentrl.runs.progress import Display
from agentrl.runs.settings import read_config

sys.path.insert(0, str(ROOT / "scripts"))
import pool_weight
from estimator_report import ESTIMATORS
from recorded_gradients import (
    Projection,
    Recorded,
    by_probability,
    drawn,
    gradients_of,
    groups_of,
    scores,
    shares,
    without_each,
)

ARMS = {
    **ESTIMATORS,
    "otb own": ("otb", {"tail": "own"}),
    **{f"otb pool {pool:g}": ("otb", {"pool": pool, "tail": "carry"}) for pool in (0.5, 1.0, 4.0)},
    "ogb pool inf": ("ogb", {"pool": math.inf}),
    "mean pool inf": ("otb", {"pool": math.inf, "tail": "carry", "energy_kind": "uniform"}),
}
"""The estimators of the plan."""
AT_ONCE = 8
"""Tokens of a row that a backward pass takes."""


def token_gradients(model: Any, tokens: Tensor, sampled: Tensor, projection: Projection, temperature: float) -> Tensor:
    """Differentiate the log-prob of each sampled token of a row.

    A backward pass takes several tokens at once, and leaves for each of them its gradient δ by every layer's output.
    That by a layer's weight is the outer product δᵀx.

    Args:
        model: a causal language model with attention of its own, every parameter of which is trained.
        tokens: of the row [T].
        sampled: indices of its sampled tokens [n], none of them the first token.
        projection: of gradients.
        temperature: that they were sampled at.

    Returns:
        The projected gradients [n, D]. Log-prob and Σπ² are left to the caller's own pass.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    some = (_at_once(model, tokens, part, projection, numbers, temperature) for part in sampled.split(AT_ONCE))
    return torch.cat(list(some))


def _at_once(
    model: Any, tokens: Tensor, sampled: Tensor, projection: Projection, numbers: Mapping[int, int], temperature: float
) -> Tensor:
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    with ExitStack() as stack:
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                hook = module.register_forward_hook(lambda layer, inputs, out: seen.append((layer, inputs[0], out)))
                stack.callback(hook.remove)
        # What comes after the last of them is not read.
        hidden = model.base_model(tokens[None, : int(sampled[-1])], use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, sampled - 1])[0]
    logp = torch.log_softmax(logits.float() / temperature, -1).gather(1, tokens[sampled][:, None])[:, 0]
    each = torch.eye(len(sampled), device=logp.device)
    with warnings.catch_warnings():
        # Attention alone is differentiated token by token, which takes little of the time.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        deltas = torch.autograd.grad(logp, [out for _, _, out in seen], each, is_grads_batched=True)
    projected = logp.new_zeros(len(sampled), projection.width)
    for (module, inputs, _), delta in zip(seen, deltas, strict=True):
        of_module = [numbers[id(parameter)] for parameter in module.parameters(recurse=False)]
        _add(projected, projection, of_module, module, inputs[0].detach(), delta[:, 0])
    return projected


def _add(
    projected: Tensor, projection: Projection, numbers: Sequence[int], module: nn.Module, inputs: Tensor, delta: Tensor
) -> None:
    """Add the gradients by a module's parameters, from its inputs [T, …] and those by its output [n, T, …]."""
    weight, *bias = numbers
    if isinstance(module, nn.Linear):
        projection.add_outer(projected, delta, inputs, weight)
        for number in bias:
            projection.add(projected, delta.sum(1), number)
    elif isinstance(module, nn.Embedding):
        projection.add_outer(projected, nn.functional.one_hot(inputs, module.num_embeddings).to(delta), delta, weight)
    else:
        # A norm multiplies what it has normalised with its weight.
        plain = functional_call(module, {"weight": torch.ones_like(next(module.parameters()))}, (inputs,))
        projection.add(projected, (delta * plain).flatten(1, -2).sum(1), weight)


def record(model: Any, batch: Batch, temperature: float, width: int, display: Display) -> Recorded:
    """Take energy, weight and gradient of every sampled token of a batch; gradients stay on the model's device.

    A ``width`` of 0 leaves the gradients out, which take nearly all of the time.
    """
    device = model.device
    projection = Projection(list(model.parameters()), max(1, width), seed=0, device=device)
    logp, sum_sq, gradients = [], [], []
    with display.phase("gradients", len(batch)) as bar:
        for row in range(len(batch)):
            begin, end = batch.row_starts[row : row + 2].tolist()
            start, last = batch.starts[row : row + 2].tolist()
            tokens, sampled = batch.tokens[begin:end].to(device), (batch.sampled[start:last] - begin).to(device)
            with torch.no_grad():
                log_p = torch.log_softmax(model(tokens[None]).logits[0, sampled - 1].float() / temperature, -1)
            logp.append(log_p.gather(1, tokens[sampled][:, None])[:, 0].cpu())
            sum_sq.append(log_p.exp().square().sum(1).cpu())
            none = torch.zeros(len(sampled), 0)
            gradients.append(token_gradients(model, tokens, sampled, projection, temperature) if width else none)
            bar.advance(f"{last} of {len(batch.sampled)} tokens")
    return Recorded.of(batch, torch.cat(logp), torch.cat(sum_sq), torch.cat(gradients))


def of_plus_and_minus_one(recorded: Recorded) -> Recorded:
    """The same episodes with returns 2R − 1."""
    batch = recorded.batch
    rewards = 2 * batch.rewards
    rewards[batch.starts[1:][batch.starts.diff() > 0] - 1] -= 1
    return replace(recorded, batch=replace(batch, rewards=rewards))


def compare(recorded: Recorded, size: int, draws: int) -> dict[str, dict[str, list[float]]]:
    """Draw groups of ``size`` and average inner products of the gradients of a step of K groups, the sum over tasks.

    Returns:
        For each estimator ``noise`` ‖f − s‖²/2 of two draws, ``signal`` f·s, and ``along``. The last is the mean
        product with the unbiased gradient of the rows that were not drawn. Each is of all tasks, and of all but each
        task in turn [1 + K].
    """
    generator = torch.Generator().manual_seed(size)
    whole_rows = scores(recorded)
    drawn_pairs: list[Tensor] = []
    for _ in range(draws):
        a_rows, b_rows, rest = drawn(recorded.batch.group, size, generator)
        pair = [gradients_of(recorded, rows, ARMS, "seq_mean_token_sum") for rows in (a_rows, b_rows)]
        towards = [_unbiased(recorded, whole_rows, torch.cat([rows, rest])) for rows in (b_rows, a_rows)]
        f, s, by_f, by_s = map(without_each, (*pair, *towards))
        along = ((f * by_f).sum(-1) + (s * by_s).sum(-1)) / 2
        drawn_pairs.append(torch.stack([(f - s).square().sum(-1) / 2, (f * s).sum(-1), along]))
    mean = torch.stack(drawn_pairs).mean(0)
    names = ("noise", "signal", "along")
    return {
        arm: {name: [digits(value, 5) for value in mean[index, number].tolist()] for index, name in enumerate(names)}
        for number, arm in enumerate(ARMS)
    }


def _unbiased(recorded: Recorded, whole_rows: Tensor, rows: Tensor) -> Tensor:
    """Each task's gradient from some of its rows, whole, with the baseline of the other tasks' [K, D]."""
    rows = rows.sort().values
    batch = recorded.batch.split(len(recorded.batch.tokens), rows.tolist())[0]
    energy = recorded.energy[batch.index]
    credit = ogb(batch.rewards, energy, batch.starts, batch.group, pool=math.inf) * recorded.weights[batch.index]
    counts = batch.group.bincount()
    device = whole_rows.device
    sums = whole_rows.new_zeros(len(counts), whole_rows.shape[1], dtype=torch.float64)
    each = (credit[batch.starts[:-1], None].to(device) * whole_rows[rows.to(device)]).double()
    return sums.index_add(0, batch.group.to(device), each) / counts[:, None].to(device)


def units(name: str, sizes: Sequence[int], draws: int) -> list[dict[str, Any]]:
    """List the units of a set of weights; the last is of the pool's weight."""
    return [
        *(
            {"part": "B", "weights": name, "rewards": rewards, "group_size": size, "draws": draws}
            for rewards in ("0/1", "-1/1")
            for size in sizes
        ),
        {"part": "B", "weights": name, "pool": True},
    ]


def run(recorded: Recorded, name: str, sizes: Sequence[int], draws: int, rows: RowFile) -> None:
    """Write the rows of a set of weights that are not there yet."""
    *of_arms, of_pool = units(name, sizes, draws)
    if missing := [unit for unit in of_arms if not rows.has(unit)]:
        of = {"0/1": recorded, "-1/1": of_plus_and_minus_one(recorded)}
        about = {name: digits(value, 5) for name, value in shares(recorded).items()}
        norms = [[digits(value, 5) for value in line] for line in by_probability(recorded)]
        for unit in missing:
            arms = compare(of[unit["rewards"]], unit["group_size"], draws)
            rows.add(unit, **about, by_probability=norms, arms=arms)
    if not rows.has(of_pool):
        rows.add(of_pool, **pool_weight.measured(recorded))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one set of weights on its recorded episodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run folder, for its settings")
    parser.add_argument("weights", type=Path, help="the checkpoint to differentiate at")
    parser.add_argument("episodes", type=Path, help="what it played: a file, or an evaluation's folder")
    parser.add_argument("--name", required=True, help="of the set, in the rows")
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "rows" / "B.jsonl")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = RowFile(arguments.out, commit_of())
    batch = as_batch(groups_of(arguments.episodes, 2 * max(arguments.group_sizes)))
    model = AutoModelForCausalLM.from_pretrained(arguments.weights, dtype=torch.float32)
    temperature = read_config(arguments.run).rollout.temperature
    recorded = record(model.eval(), batch, temperature, arguments.width, Display())
    run(recorded, arguments.name, arguments.group_sizes, arguments.draws, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
