"""``agentrl eval | serve``: evaluate a run, a checkpoint, a model or a server."""

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from agentrl.cli.command import add_command, add_set_argument, check_envs, loading_torch
from agentrl.errors import ConfigError

_EVAL = """examples:
  agentrl eval runs/quickstart
  agentrl eval runs/quickstart --greedy --tasks 500 --out evals/greedy
  agentrl eval runs/quickstart/checkpoints/step-000000 --attempts 8
  agentrl eval path/to/model --preset quickstart --set rollout.turn_tokens=512
  agentrl eval path/to/model --env 'aime24=agentrl/Math-v0?data.test=aime24.jsonl&attempts=32'
  agentrl eval --engine openai --model NAME --base-url http://localhost:8000/v1 --env agentrl/Arithmetic-v0
"""
_SERVE = """examples:
  agentrl serve runs/agent --tasks 50
  agentrl serve runs/agent --set 'rollout.driver.options={port=9000}'

Agents that run elsewhere get sessions and tasks, as docs/your_agent.md says; each task is an episode of an evaluation.
The key is AGENTRL_SERVE_KEY, or a new one, which is printed.
"""
_ENGINE = ("base_url", "model", "tokenizer", "key_env")
"""Options of the engine ``openai`` that are command-line options here."""


def add_commands(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    _add_arguments(add_command(commands, "eval", _eval, "evaluate a run, a checkpoint, a model or a server", _EVAL))
    _add_arguments(add_command(commands, "serve", _serve, "evaluate with agents that run elsewhere", _SERVE))


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", metavar="TARGET", nargs="?", default="", help="a run, a checkpoint in one, or a model")
    command.add_argument("--config", type=Path, help="settings for a model that is in no run folder")
    command.add_argument("--preset", help="preset for a model that is in no run folder")
    command.add_argument(
        "--env",
        dest="envs",
        action="append",
        default=[],
        metavar="[NAME=]ID[?KEY=VALUE&…]",
        help="play this environment, with these arguments, split, tasks, attempts (repeatable; default: the run's own)",
    )
    command.add_argument("--split", help="split of the tasks (default: the run's eval.split)")
    command.add_argument("--tasks", type=int, help="number of tasks (default: the run's eval.tasks)")
    command.add_argument("--attempts", type=int, help="episodes per task, for avg@n, pass@k and maj@n")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="take the most probable token")
    how.add_argument("--temperature", type=float, help="sample at this temperature")
    command.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    command.add_argument("--out", type=Path, help="a folder for the episodes and the summary")
    command.add_argument("--force", action="store_true", help="evaluate in another dialect than that of training")
    command.add_argument("--json", action="store_true", help="write the result as JSON")
    command.add_argument("--engine", help="engine: transformers, vllm, or openai for a server")
    command.add_argument("--base-url", help="URL of the server (default: OPENAI_BASE_URL)")
    command.add_argument("--model", help="the model's name on the server")
    command.add_argument("--tokenizer", help="tokenizer of the server's model (folder or hub name): send token ids")
    command.add_argument("--key-env", help="environment variable with the server's key (default: OPENAI_API_KEY)")
    add_set_argument(command)


def _eval(arguments: argparse.Namespace) -> int:
    from agentrl.engines import missing_package
    from agentrl.eval.request import EvalRequest, read_settings
    from agentrl.eval.sets import make_sets

    names = ("path", "config", "preset", "seed", "out", "force")
    chosen: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    request = EvalRequest(**chosen, envs=tuple(arguments.envs), overrides=_overrides(arguments))
    config, _ = read_settings(request)
    for settings in make_sets(config, request.envs).values():
        check_envs(settings)
    if lacking := missing_package("engine", config.engine.name):
        raise ConfigError(lacking)
    from agentrl.runs.progress import Display, visible

    display = Display()
    with loading_torch(display):
        from agentrl.eval import command as evaluation
        from agentrl.eval.results import as_text

    results = evaluation.run(request, display)
    if arguments.json:
        rows = {result.name: result.overall.row() for result in results}
        print(json.dumps(rows.get("", rows)))
    else:
        print(visible(as_text(results)))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    if not os.environ.get("AGENTRL_SERVE_KEY"):
        os.environ["AGENTRL_SERVE_KEY"] = secrets.token_hex(16)
        print(f"agents ask for sessions with the key {os.environ['AGENTRL_SERVE_KEY']}", file=sys.stderr)
    arguments.overrides.append("rollout.driver.name='serve'")
    return _eval(arguments)


def _overrides(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return ``--set`` with the options that are settings; one that was not given leaves the run's own."""
    chosen = {
        "engine.name": arguments.engine,
        **{f"engine.options.{name}": getattr(arguments, name) for name in _ENGINE},
        **{f"eval.{name}": getattr(arguments, name) for name in ("split", "tasks", "attempts")},
        "eval.temperature": 0.0 if arguments.greedy else arguments.temperature,
    }
    # --set takes TOML, in which numbers and texts are written as in JSON.
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in chosen.items() if value is not None}
    return *arguments.overrides, *map("=".join, texts.items())
