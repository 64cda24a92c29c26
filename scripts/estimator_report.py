"""Which advantage estimator gives the steadiest gradient on the episodes that a run recorded?

For each task two groups of N rows are drawn that share no row, and every estimator makes a gradient of each. What the
two agree in is signal, and what they differ in is noise. No row is compared with itself, so neither is too large on
average, for any estimator. Standard errors are those of the tasks (jackknife).

Legend: K tasks, N rows (one episode each) of a group, S sampled tokens, D width of the projection, E estimators. The
tokens of an episode are in the order of its turns.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from recorded_gradients import (
    BINS,
    Estimators,
    Projection,
    Recorded,
    by_probability,
    drawn,
    gradients_of,
    groups_of,
    shares,
    without_each,
)
from torch import Tensor
from transformers.utils import logging as transformers_logging

from agentrl import algos
from agentrl.algos.rows import Rows
from agentrl.batch import as_batch
from agentrl.config import Config
from agentrl.errors import TrajectoryError, UsageError
from agentrl.eval.pages import table as markdown_table
from agentrl.models.load import load_model
from agentrl.runs.folder import checkpoints
from agentrl.runs.progress import Display
from agentrl.runs.records import step_files
from agentrl.runs.report.text import brief
from agentrl.runs.settings import read_config
from agentrl.train.diagnostics import effective_sample_size
from agentrl.train.score import score
from agentrl.types import Group

EXAMPLES = """examples:
  estimator_report.py runs/first                          the first recorded step whose weights were kept
  estimator_report.py runs/first --step 50                another one, with the nearest weights before it
  agentrl eval runs/first --tasks 32 --attempts 16 --out evals/many
  estimator_report.py runs/first --episodes evals/many --group-size 8
"""
ESTIMATORS: Estimators = {
    **{name: (name, {}) for name in algos.ADVANTAGES},
    "otb instantaneous": ("otb", {"energy_kind": "instantaneous"}),
    "otb carry": ("otb", {"tail": "carry"}),
}
"""Every estimator of the table, and two variants."""
Measures = Mapping[str, tuple[Tensor, Tensor]]
"""Value and standard error of each measure by its name, of every estimator [E]."""
REFERENCE = "otb_loo"
"""Unbiased, and less noisy than ``rloo`` where energies differ."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    arguments = _arguments(argv)
    display = Display()
    torch.set_num_threads(arguments.threads)
    try:
        config = read_config(arguments.run)
        file = arguments.episodes or _episodes_file(arguments.run, arguments.step)
        groups = _groups(file, arguments)
        weights = arguments.checkpoint or _checkpoint(arguments.run, groups)
        recorded = measure(groups, weights, config, arguments, display)
    except (UsageError, TrajectoryError) as error:
        print(f"estimator_report.py: {error}", file=sys.stderr)
        return 2
    print(f"{_about(recorded, file, weights, arguments)}\n\n{table(compare(recorded, arguments, display))}")
    print(f"\n{_proxy(recorded)}")
    return 0


def measure(
    groups: Sequence[Group], weights: Path, config: Config, arguments: argparse.Namespace, display: Display
) -> Recorded:
    """Score the rows of ``groups`` and differentiate the log-prob of each of their tokens."""
    transformers_logging.disable_progress_bar()  # its bar would break into ours
    model = load_model(weights)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    projection = Projection(parameters, arguments.width, arguments.seed)
    batch = as_batch(groups)
    logp, sum_sq, gradients = [], [], torch.empty(len(batch.sampled), projection.width)
    with display.phase("gradients", len(batch)) as bar:
        for row in range(len(batch)):
            stats = score(model, batch.split(len(batch.tokens), [row])[0], temperature=config.rollout.temperature)
            in_time = batch.index[int(batch.starts[row]) : int(batch.starts[row + 1])]
            for index, logp_of_token in zip(in_time, stats.logp, strict=True):
                gradients[index] = projection(torch.autograd.grad(logp_of_token, parameters, retain_graph=True))
            logp.append(stats.logp.detach())
            sum_sq.append(stats.sum_sq)
            bar.advance(f"{int(batch.starts[row + 1])} of {len(gradients)} tokens")
    return Recorded.of(batch, batch.in_time(torch.cat(logp)), batch.in_time(torch.cat(sum_sq)), gradients)


def compare(recorded: Recorded, arguments: argparse.Namespace, display: Display) -> Measures:
    """Draw groups, and compare their gradients."""
    generator = torch.Generator().manual_seed(arguments.seed)
    of_draws: list[Tensor] = []
    with display.phase("draws", arguments.draws) as bar:
        for number in range(arguments.draws):
            a_rows, b_rows, rest = drawn(recorded.batch.episode_group, arguments.group_size, generator)
            left = (torch.cat([b_rows, rest]), torch.cat([a_rows, rest]))
            pair, towards = (
                torch.stack([gradients_of(recorded, rows, estimators, arguments.aggregate) for rows in some])
                for some, estimators in (((a_rows, b_rows), ESTIMATORS), (left, {REFERENCE: ESTIMATORS[REFERENCE]}))
            )
            of_draws.append(products(pair, towards))
            bar.advance(f"{number + 1} of {arguments.draws}")
    return measures(torch.stack(of_draws).mean(0))


def products(pair: Tensor, towards: Tensor) -> Tensor:
    """Multiply gradients that are summed over all tasks, and over all but each in turn.

    Args:
        pair: the gradients of two groups, which share no row, by task [2, E, K, D].
        towards: the leave-one-out gradient of the rows that each was not drawn from, by task [2, 1, K, D].

    Returns:
        Inner products [5, E, 1 + K]: of a group's gradient with itself, with the other's, and with the leave-one-out
        one; of that one with itself; and of the groups' difference with itself, task by task, halved.
    """
    noise = without_each((pair[0] - pair[1]).square().sum(-1, keepdim=True) / 2)[..., 0]
    mine, reference = without_each(pair), without_each(towards)
    own = mine.square().sum(-1).mean(0)
    shared = reference.square().sum(-1).mean(0).expand_as(own)
    return torch.stack([own, (mine[0] * mine[1]).sum(-1), (mine * reference).sum(-1).mean(0), shared, noise])


def measures(products_mean: Tensor) -> Measures:
    """Compute value and standard error of each measure of an estimator; the batch's gradient is the mean over K tasks.

    ``variance`` E‖g − Eg‖² between groups; ``norm`` of a group's gradient; ``halves`` the cosine between the two
    groups' gradients, which is signal / (signal + variance); ``reference`` the cosine to the leave-one-out one.

    Args:
        products_mean: what ``products`` returns, averaged over draws [5, E, 1 + K].
    """
    own, other, reference, shared, noise = products_mean
    count = own.shape[-1] - 1
    tasks = torch.tensor([count] + [count - 1] * count)
    values = {"variance": noise / tasks / count, "norm": own.sqrt() / tasks, "halves": other / own}
    values["reference"] = reference / (own * shared).sqrt()
    return {name: (some[:, 0], _jackknife(some[:, 1:])) for name, some in values.items()}


def table(measured: Measures) -> str:
    """Tabulate the estimators in Markdown, the one whose gradients repeat best first."""
    columns = (zip(values.tolist(), errors.tolist(), strict=True) for values, errors in measured.values())
    ranked = sorted(zip(ESTIMATORS, *columns, strict=True), key=lambda row: -row[3][0])
    head = ["estimator", "variance", "norm", "cosine of two groups", "cosine to leave-one-out"]
    return markdown_table(
        head,
        [
            [name, *(f"{brief(value)} ± {brief(float(f'{error:.2g}'))}" for value, error in cells)]
            for name, *cells in ranked
        ],
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--step", type=int, help="the recorded step to read")
    parser.add_argument("--episodes", type=Path, help="a file of episodes, or an evaluation's folder, to read instead")
    parser.add_argument("--checkpoint", type=Path, help="the weights to differentiate at, instead of those that played")
    parser.add_argument("--group-size", type=_count, default=2, help="rows N of a group; a task needs 2·N (default 2)")
    parser.add_argument("--tasks", type=_count, default=10**9, help="most tasks to read (default: all)")
    parser.add_argument("--draws", type=_count, default=20, help="pairs of groups for each task (default 20)")
    parser.add_argument("--width", type=_count, default=4096, help="coordinates of a gradient (default 4096)")
    parser.add_argument(
        "--aggregate",
        choices=("seq_mean_token_sum", "seq_mean_token_mean"),
        default="seq_mean_token_sum",
        help="sum over a row's tokens, the policy gradient (default), or their mean",
    )
    parser.add_argument("--seed", type=int, default=0, help="of draws and projection (default 0)")
    parser.add_argument("--threads", type=_count, default=1, help="threads of PyTorch (default 1)")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _episodes_file(run: Path, step: int | None) -> Path:
    """Find the file of a step; by default of the first whose weights were kept, or else of the first."""
    steps = dict(step_files(run))
    if not steps:
        raise UsageError(f"the run {str(run)!r} has recorded no episodes yet: train at least one step")
    if step is None:
        kept_steps = {_step_of(path) + 1 for path in checkpoints(run)}
        step = min(kept_steps & steps.keys(), default=min(steps))
    if step not in steps:
        raise UsageError(f"the run {str(run)!r} has no episodes of step {step}; it has those of {sorted(steps)}")
    return steps[step]


def _groups(file: Path, arguments: argparse.Namespace) -> list[Group]:
    """Group the episodes by task; tasks with too few for two groups are skipped."""
    size = arguments.group_size
    groups = groups_of(file, 2 * size)[: arguments.tasks]
    if len(groups) < 2:
        raise UsageError(
            f"{str(file)!r} has {len(groups)} tasks with {2 * size} episodes, and at least 2 are needed: lower "
            f"--group-size, or play more with: agentrl eval {arguments.run} --attempts {2 * size} --out FOLDER"
        )
    return groups


def _checkpoint(run: Path, groups: Sequence[Group]) -> Path:
    """Find the weights that played the episodes, or the nearest before them."""
    turns = [part for group in groups for episode in group for part in episode.sampled]
    played = max(version for part in turns for version in part.versions)
    before = [path for path in checkpoints(run) if _step_of(path) <= played]
    if not before:
        raise UsageError(f"the run {str(run)!r} has kept no weights up to step {played}: name some with --checkpoint")
    return before[-1]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _jackknife(left_out: Tensor) -> Tensor:
    """Compute the standard error from the values without each task [E, K]."""
    count = left_out.shape[1]
    return ((left_out - left_out.mean(1, keepdim=True)).square().sum(1) * (count - 1) / count).sqrt()


def _about(recorded: Recorded, file: Path, weights: Path, arguments: argparse.Namespace) -> str:
    batch = recorded.batch
    returns = Rows.of(batch.episode_starts, batch.rewards).sum(batch.in_time(batch.rewards))
    tasks = int(batch.group.max()) + 1
    return (
        f"{len(batch.episode_group)} episodes of {tasks} tasks, {len(batch.sampled)} sampled tokens, mean return "
        f"{float(returns.mean()):.3f}, from `{file.name}` at the weights `{weights.name}` (ESS of the ratio to those "
        f"that played: {effective_sample_size(recorded.weights):.3f}). {arguments.draws} pairs of groups of "
        f"{arguments.group_size} per task, {arguments.aggregate}; ± is one standard error over tasks. The "
        f"leave-one-out gradient is that of `{REFERENCE}` on the task's other rows: a biased estimator may repeat "
        "well, so look at its cosine to that one too."
    )


def _proxy(recorded: Recorded) -> str:
    """Show how well the energy W stands for the squared norm of a gradient: as a sentence, and by π."""
    of = shares(recorded)
    head = ["π of the token", "tokens", "mean norm of its gradient", "root of its mean energy"]
    lines = [
        [f"{low:.1f} to {low + 1 / BINS:.1f}", f"{count:.0f}", brief(norm), brief(root)]
        for low, count, norm, root in by_probability(recorded)
    ]
    return (
        f"β, the mean return weighed by energy, is {of['beta_W']:.3g} by the energy W of an episode and "
        f"{of['beta_S']:.3g} by the squared norm of its gradient. Their correlation is {of['correlation']:.2f}.\n\n"
        f"{markdown_table(head, lines)}"
    )


if __name__ == "__main__":
    sys.exit(main())
