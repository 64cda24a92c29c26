"""Train a tiny model whose chat template drops earlier thinking, with histories as that template writes them.

Each task takes two tool calls. Before each the gold player thinks, and the template drops the first thought when the
second step is asked for. A run costs some four minutes of a core.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from arms import PRESET, overrides

import agentrl
from agentrl.config import load_config
from agentrl.envs.generated.arithmetic import Arithmetic, problem_of
from agentrl.models.tiny import make_model, make_tokenizer
from agentrl.rollout.plan import TaskSource
from agentrl.runs.progress import Display
from agentrl.train.run import train
from agentrl.types import Task

EXAMPLES = """examples:
  python experiments/thinking.py runs/thinking
"""
ENV_ID = "thinking:agentrl/ThinkingArithmetic-v0"
LEVEL = 4
_SIZES = {"hidden": 128, "layers": 2, "heads": 8}
_TEMPLATE = r"""
{%- set asked = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set asked.last = loop.index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set text = message.content %}
{%- if message.role == 'assistant' and loop.index < asked.last %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


class ThinkingArithmetic(Arithmetic):
    """Arithmetic whose gold player says first what it is going to calculate."""

    def gold(self, task: Task) -> Sequence[str]:
        """Return the turns of Arithmetic's gold player, each behind a thought."""
        thoughts = [*problem_of(task).sums, "done"]
        return [f"<think>{text}</think>\n{turn}" for text, turn in zip(thoughts, super().gold(task), strict=True)]


agentrl.register("agentrl/ThinkingArithmetic-v0", ThinkingArithmetic)


def write_model(folder: Path) -> None:
    """Write a tiny model with random weights, whose template drops thoughts before the user's last message."""
    tokenizer = make_tokenizer(TaskSource(ENV_ID, {"level": LEVEL}, "train").texts(500))
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    make_model(tokenizer, seed=0, **_SIZES).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the model, and train it."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the run and the model")
    folder: Path = parser.parse_args(argv).folder
    write_model(folder / "model")
    settings = {
        "run.dir": str(folder),
        "run.name": "run",
        "env.id": ENV_ID,
        "env.args.level": LEVEL,
        "model.path": str(folder / "model"),
        "rollout.driver.options.history": "template",
        "rollout.tasks": 16,
        "rollout.turn_tokens": 48,
        "rollout.episode_tokens": 256,
        "sft.stop_at": 0.8,
        "eval.tasks": 100,
    }
    train(load_config(preset=PRESET, overrides=overrides(settings)), Display())
    return 0


if __name__ == "__main__":
    sys.exit(main())
