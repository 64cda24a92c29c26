"""``agentrl train | config | export``: configure, start and resume runs, and export their models."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.cli.command import add_command, add_config_arguments, check_config, check_parts, loading_torch
from agentrl.errors import ConfigError

_TRAIN = """examples:
  agentrl train --preset quickstart
  agentrl train my.toml --name second-try --set optim.lr=1e-4 --set algo.advantage=group_mean
  agentrl train --resume runs/second-try
  agentrl train --preset quickstart --name warm --set optim.steps=0    # the warm start alone
  agentrl train --preset qwen3-4b-tir --dry-run
  agentrl train --preset quickstart --set model.path=runs/quickstart --episodes rollouts.jsonl
"""
_CONFIG = """examples:
  agentrl config
  agentrl config rollout
  agentrl config quickstart > my.toml
"""
_EXPORT = """examples:
  agentrl export runs/quickstart model
  agentrl export runs/mine/checkpoints/step-000100 model --dtype bfloat16
"""


def add_commands(commands: Any) -> None:
    """Add the commands of this family to argparse's subparsers."""
    train = add_command(commands, "train", _train, "train an agent; makes a run folder", _TRAIN)
    add_config_arguments(train)
    train.add_argument("--name", help="name of the run; a name that is taken is an error")
    train.add_argument("--seed", type=int, help="seeds weights, tasks and sampling")
    train.add_argument("--resume", metavar="RUN", type=Path, help="resume a run from its last checkpoint")
    text = "train on saved episodes, one file a step, and play none"
    train.add_argument("--episodes", metavar="FILE", type=Path, nargs="+", help=text)
    train.add_argument("--dry-run", action="store_true", help="check all but the weights, and print what the run needs")
    config = add_command(commands, "config", _config, "print every setting with its meaning, as a TOML file", _CONFIG)
    config.add_argument(
        "what", metavar="SECTION|PRESET", nargs="?", help="print one section, or all with a preset's values"
    )
    export = add_command(commands, "export", _export, "write a run's model, adapters merged, as one folder", _EXPORT)
    export.add_argument("path", help="a run folder, a checkpoint in one, or a folder of adapters")
    export.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume is None:
        return _new_run(arguments)
    others = (arguments.config, arguments.preset, arguments.name, arguments.dry_run, arguments.episodes)
    if any(others) or arguments.seed is not None:
        raise ConfigError("--resume uses the run's own settings: leave all options out but --set")
    from agentrl.runs.folder import changed
    from agentrl.runs.settings import read_config

    check_parts(changed(read_config(arguments.resume), arguments.overrides, arguments.resume))
    return _work(lambda run, display: run.resume(arguments.resume, display, arguments.overrides))


def _new_run(arguments: argparse.Namespace) -> int:
    from agentrl.config import load_config
    from agentrl.runs.folder import check_free

    check_config(arguments)
    overrides = list(arguments.overrides)
    if arguments.name is not None:
        overrides.append(f"run.name={json.dumps(arguments.name)}")
    if arguments.seed is not None:
        overrides.append(f"run.seed={arguments.seed}")
    config = load_config(preset=arguments.preset, path=arguments.config, overrides=overrides)
    if arguments.dry_run and arguments.episodes:
        raise ConfigError("--dry-run is for runs that play, and one of --episodes plays nothing: leave one of them out")
    if arguments.dry_run:
        from agentrl.cli.plan import show_plan

        return show_plan(config, checks=True)
    check_parts(config, plays=not arguments.episodes)
    numbered = arguments.name is None
    if not numbered:
        check_free(Path(config.run.dir) / config.run.name)
    if arguments.episodes:
        return _work(lambda run, display: run.train_on(arguments.episodes, config, display, numbered=numbered))
    return _work(lambda run, display: run.train(config, display, numbered=numbered))


def _work(play: Callable[[Any, Any], object]) -> int:
    """Train with ``play``, which gets the module of runs and a display, and print the run folder.

    In a process that torchrun started as another rank, follow rank 0 instead.
    """
    # The settings were checked before, so that a mistake is reported without waiting for PyTorch.
    from agentrl.runs.progress import Display

    display = Display()
    with loading_torch(display):
        from agentrl.train import ranks, run

    if ranks.is_follower():
        ranks.follow()
    else:
        print(play(run, display))
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from agentrl.cli.settings import explained

    print(explained(arguments.what), end="")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from agentrl.runs.folder import check_begun

    check_begun(Path(arguments.path))
    from agentrl.runs.progress import Display

    display = Display()
    with loading_torch(display):
        from agentrl.runs.checkpoint import export

    with display.doing("exporting the model"):
        export(arguments.path, arguments.out, arguments.dtype, display.say)
    print(arguments.out)
    return 0
