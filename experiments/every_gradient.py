"""The page with every number of part B: cosine, kept signal, noise and episodes, by estimator, rewards and N."""

import math
from collections.abc import Sequence
from functools import partial
from statistics import mean

from show_gradients import cells
from verdict import Rows
from weight_sets import TINY, WeightSet, about, by_size, episodes, sets_by_aim, sets_of

from agentrl.eval.pages import table
from agentrl.runs.report.text import brief

_HEAD = """# Gradients at fixed weights: every number

[The results](../results.md) explain the sets of weights and say what follows. `python experiments/figures.py` makes
this page from the rows of part B. Rewards are 0 and 1, or -1 and 1. A step has one group of N episodes of each task.

- **Cosine** is that of a step's gradient f to the true one g: E[f·g] / √(E[f²]·g²).
- **Kept** is the share of g that the expected gradient has along it: E[f]·g / g².
- **Noise** is the variance of f over g².
- **Episodes** are how many it takes until the signal that is kept is as large as the noise. Brackets hold the ratio to
  `otb_pooled` on the same draws and its standard error, first over tasks, then over sets of weights, in percent. An
  interval of 95% is about twice as wide to each side. Where one task has nearly all successes, little is left without
  it, and the error over tasks is above 999.

Numbers of several sets are means, of noise and episodes geometric ones. g is the mean of unbiased gradients of the rows
that were not drawn. Where nothing is kept, as by the mean of one episode, there are no episodes.
"""
_PREDICTED = """## Noise: predicted and measured

Each is relative to the least of the four, at N = 32. β by ‖S‖² is measured; β by W is what each step's metrics have.
"""


def page(rows: Rows) -> str:
    """Write the page; empty where no set is done."""
    sets = sets_of(rows)
    if not sets:
        return ""
    parts = [_HEAD, _PREDICTED, _noise(sets)]
    for aim, some in sets_by_aim(sets).items():
        for rewards, words in (("0/1", "0 and 1"), ("-1/1", "-1 and 1")):
            parts += [
                f"\n## {about(aim, some)}; rewards {words}\n",
                _measures(some, rewards),
                "",
                by_size(some, rewards, "episodes", partial(episodes, some, rewards=rewards)),
            ]
    return "\n".join(parts) + "\n"


def _noise(sets: Sequence[WeightSet]) -> str:
    by_energy = {(name, arm): predicted for name, arm, predicted, _ in cells(sets, "beta_W")}
    lines = [
        [name, arm, f"{measured:.3g}", f"{predicted:.3g}", f"{by_energy[name, arm]:.3g}"]
        for name, arm, predicted, measured in cells(sets)
    ]
    return table(["weights", "baseline", "measured", "predicted, β by ‖S‖²", "predicted, β by W"], lines)


def _measures(some: Sequence[WeightSet], rewards: str) -> str:
    """Tabulate cosine, kept signal and noise."""

    def cell(arm: str, size: int) -> str:
        of = [weight_set.measures(arm, size, rewards) for weight_set in some]
        cosine, share = (mean(each[number] for each in of) for number in (0, 1))
        noise = math.exp(mean(math.log(max(each[2], TINY)) for each in of))
        return f"{cosine:.3f}, {100 * share:.0f}%, {brief(noise)}"

    return by_size(some, rewards, "cosine, kept, noise", cell)
