"""Which of Qwen3's sizes fit on how many cards of 80 GB, and with which settings, as ``agentrl plan`` counts.

The settings are those of the preset qwen3-4b-tir. A quarter of a model's widths gives the activations, times four. Of
several cards all are ranks, and the first has the engine too; where that does not fit, some are a fleet's actors.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from measures import command_line, say
from transformers import Qwen3Config

from agentrl.config import Config, load_config
from agentrl.eval.pages import table
from agentrl.models.shapes import published_shape
from agentrl.train.costs import Costs, measure
from agentrl.train.memory import Counts, Fit, changed

EXAMPLES = """examples:
  model_sizes.py                     the table of docs/scale.md, in a minute
  model_sizes.py --memory 140        on cards of 141 GB
"""
SIZES = ("4B", "8B", "14B", "32B")
_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
CARDS = (1, 2, 4, 8)


def shape_of(size: str, parts: int = 1) -> Qwen3Config:
    """Return the configuration of a size, all of its widths divided by ``parts``."""
    shape = published_shape(f"Qwen/Qwen3-{size}")
    assert shape is not None
    for name in _WIDTHS:
        setattr(shape, name, getattr(shape, name) // parts)
    return shape


def costs_of(config: Config, size: str) -> Costs:
    """Measure the activations of a size on a model of a quarter of its widths."""
    costs = measure(config, shape_of(size, 4), "cpu")
    return replace(costs, layer=4 * costs.layer, rest=4 * costs.rest)


def placements(config: Config, cards: int) -> Iterator[tuple[str, Config]]:
    """Yield the ways to use cards: all as ranks, or some as actors of a fleet."""
    yield "", config.updated(run={"ranks": cards})
    for ranks in (cards // 2, 3 * cards // 4, cards - 1) if cards > 1 else ():
        fleet = {"name": "ray", "options": {"actors": cards - ranks, "gpus": 1}}
        yield f"{cards - ranks} actor{'s' * (cards - ranks > 1)}, ", config.updated(run={"ranks": ranks}, fleet=fleet)


def cell(config: Config, fit: Fit, engine: bool, cards: int) -> str:
    """Return what is trained on so many cards, and with which settings; ``engine`` is whether a card can hold one."""
    for what, lora in {"all weights": 0, "LoRA": 32}.items():
        for where, placed in placements(config.updated(lora={"rank": lora}), cards):
            chosen, fits = fit.settings(placed, ranks=())
            if fits and (engine or not where):
                settings = ", ".join(f"{name.split('.')[-1]} {value}" for name, value in chosen.items())
                total = sum(fit.parts(changed(placed, chosen)).values()) >> 30
                ranks = f"{placed.run.ranks} rank{'s' * (placed.run.ranks > 1)}"
                return f"{what}: {where}{ranks}{settings and ', ' + settings} ({total} GiB)"
    return "does not fit"


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--memory", type=float, default=78.0, help="GiB of a card (default: 78)")
    args = parser.parse_args()
    limit, rows = int(args.memory * 2**30), list[tuple[str, ...]]()
    torch.set_num_threads(1)
    config = load_config(preset="qwen3-4b-tir")
    for size in SIZES:
        say(size)
        model = Counts(shape_of(size), config)
        fit = Fit(model, costs_of(config, size), 0, limit)
        rows.append((size, *(cell(config, fit, model.share(config, limit) < 0.95, cards) for cards in CARDS)))
    print(table(("Qwen3", *(f"{cards} card{'s' * (cards > 1)}" for cards in CARDS)), rows))


if __name__ == "__main__":
    main()
