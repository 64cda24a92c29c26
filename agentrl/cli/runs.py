"""``agentrl train | sft | eval | config | report``: runs are set up, made, gone on with, evaluated and shown."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from agentrl.cli.command import add_command
from agentrl.errors import ConfigError

_TRAIN = """examples:
  agentrl train --preset quickstart
  agentrl train my.toml --name second-try --set optim.lr=1e-4 --set algo.advantage=group_mean
  agentrl train --resume runs/second-try
"""
_SFT = """examples:
  agentrl sft --preset quickstart --name warm
  agentrl sft my.toml --set sft.steps=200
"""
_EVAL = """examples:
  agentrl eval runs/quickstart
  agentrl eval runs/quickstart --greedy --tasks 500 --out episodes.jsonl
  agentrl eval runs/quickstart/checkpoints/step-000000 --attempts 8
  agentrl eval path/to/model --preset quickstart --set rollout.turn_tokens=512
"""
_CONFIG = """examples:
  agentrl config
  agentrl config rollout
  agentrl config quickstart > my.toml
"""
_REPORT = """examples:
  agentrl report runs/quickstart
"""


def add_commands(commands: Any) -> None:
    """Add the commands of this family to argparse's subparsers."""
    train = add_command(commands, "train", _train, "train an agent; makes a run folder", _TRAIN)
    _config_arguments(train)
    train.add_argument("--resume", metavar="RUN", type=Path, help="go on with a run folder from its last checkpoint")
    sft = add_command(commands, "sft", _sft, "the warm start alone: learn oracle episodes", _SFT)
    _config_arguments(sft)
    _eval_arguments(add_command(commands, "eval", _eval, "evaluate a run, a checkpoint or a model", _EVAL))
    config = add_command(commands, "config", _config, "print every setting with its meaning, as a TOML file", _CONFIG)
    config.add_argument("what", metavar="SECTION|PRESET", nargs="?", help="these alone, or with a preset's values")
    report = add_command(commands, "report", _report, "write a run's report.html anew", _REPORT)
    report.add_argument("path", metavar="RUN", type=Path, help="a run folder")


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", nargs="?", type=Path, help="a TOML file of settings")
    command.add_argument("--preset", help="begin with a preset; 'agentrl list' names them")
    command.add_argument("--name", help="name of the run; one that is taken is an error")
    command.add_argument("--seed", type=int, help="seeds weights, tasks and sampling")
    _set_argument(command)


def _set_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting"
    )


def _eval_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", help="a run folder, a checkpoint in one, or a model's folder or name")
    command.add_argument("--config", type=Path, help="settings for a model that is in no run folder")
    command.add_argument("--preset", help="preset for a model that is in no run folder")
    command.add_argument("--split", help="which tasks (default: the run's eval.split)")
    command.add_argument("--tasks", type=int, help="how many tasks (default: the run's eval.tasks)")
    command.add_argument("--attempts", type=int, help="episodes per task, for pass@k")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="take the most probable token")
    how.add_argument("--temperature", type=float, help="sample at this temperature")
    command.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    command.add_argument("--out", type=Path, help="write the episodes here: .jsonl or .jsonl.zst")
    command.add_argument("--force", action="store_true", help="evaluate in another dialect than the run's own")
    command.add_argument("--json", action="store_true", help="write the result as JSON")
    _set_argument(command)


def _load_torch() -> None:
    """Say why nothing is said for a while: PyTorch takes some seconds to import, and more on a busy machine."""
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is not None:
        print("loading PyTorch …", file=sys.stderr, flush=True)


def _train(arguments: argparse.Namespace) -> int:
    if arguments.resume is None:
        return _new_run(arguments, sft_only=False)
    if arguments.config or arguments.preset or arguments.name or arguments.seed is not None:
        raise ConfigError("--resume goes on with the run's own settings: leave all options out but --set")
    _load_torch()
    from agentrl import pipeline
    from agentrl.display import Display

    print(pipeline.resume(arguments.resume, Display(), arguments.overrides))
    return 0


def _sft(arguments: argparse.Namespace) -> int:
    return _new_run(arguments, sft_only=True)


def _new_run(arguments: argparse.Namespace, *, sft_only: bool) -> int:
    from agentrl.config import load_config

    if arguments.config is None and arguments.preset is None:
        raise ConfigError("say what to do: give a TOML file, or --preset quickstart")
    overrides = list(arguments.overrides)
    if arguments.name is not None:
        overrides.append(f"run.name={json.dumps(arguments.name)}")
    if arguments.seed is not None:
        overrides.append(f"run.seed={arguments.seed}")
    config = load_config(preset=arguments.preset, path=arguments.config, overrides=overrides)
    _load_torch()
    from agentrl import pipeline
    from agentrl.display import Display

    print(pipeline.train(config, Display(), numbered=arguments.name is None, sft_only=sft_only))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    _load_torch()
    from agentrl import evaluation
    from agentrl.display import Display

    request = evaluation.Request(
        path=arguments.path,
        config=arguments.config,
        preset=arguments.preset,
        overrides=tuple(_eval_overrides(arguments)),
        seed=arguments.seed,
        out=arguments.out,
        force=arguments.force,
    )
    display = Display()
    result = evaluation.run(request, display)
    if arguments.json:
        print(json.dumps(result.row()))
    else:
        display.evaluation(str(arguments.path), result)
    return 0


def _eval_overrides(arguments: argparse.Namespace) -> list[str]:
    chosen = {
        "split": None if arguments.split is None else json.dumps(arguments.split),
        "tasks": arguments.tasks,
        "attempts": arguments.attempts,
        "temperature": 0.0 if arguments.greedy else arguments.temperature,
    }
    return [*arguments.overrides, *(f"eval.{key}={value}" for key, value in chosen.items() if value is not None)]


def _config(arguments: argparse.Namespace) -> int:
    from agentrl.settings import explained

    print(explained(arguments.what), end="")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from agentrl.runfolder import read_config
    from agentrl.viewer import write_report

    if not arguments.path.is_dir():
        read_config(arguments.path)  # names the nearest run
    print(write_report(arguments.path).resolve())
    return 0
