"""``agentrl plan``: estimate what a run will need, before it begins."""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.cli.command import add_command, add_config_arguments, check_config, load_torch, missing_parts
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.train.memory import Needs

_PLAN = """examples:
  agentrl plan --preset quickstart
  agentrl plan my.toml --set optim.max_tokens=16384 --memory 80
  agentrl plan --preset qwen3-4b-tir --set model.path=path/to/Qwen3-4B-Base --memory 80 --json

Of the model only its config.json is read. Its times and activations are measured, on small random models of the same
widths, in some seconds; on another device than the run's there are no times. Memory is for episodes as long as the
settings allow, times are for those of the gold player where there is one. The exit code is 1 where the run does not
fit.
"""
_GIB = 1 << 30


def add_commands(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    plan = add_command(commands, "plan", _plan, "estimate the memory and time that a run needs", _PLAN)
    add_config_arguments(plan)
    plan.add_argument("--memory", type=float, metavar="GIB", help="memory that the run may use (default: all)")
    plan.add_argument("--json", action="store_true", help="write the plan as JSON, in bytes, tokens and seconds")


def _plan(arguments: argparse.Namespace) -> int:
    from agentrl.config import load_config

    check_config(arguments)
    if arguments.memory is not None and not 0 < arguments.memory < float("inf"):
        raise ConfigError(f"--memory is {arguments.memory:g}: give the GiB that the run may use, for example 80")
    config = load_config(preset=arguments.preset, path=arguments.config, overrides=arguments.overrides)
    return show_plan(config, memory=arguments.memory, as_json=arguments.json)


def show_plan(config: "Config", *, memory: float | None = None, as_json: bool = False, checks: bool = False) -> int:
    """Print what a run will need; return the exit code, 1 where it does not fit or a package is missing.

    Args:
        config: the run's settings.
        memory: GiB that it may use; by default all of its device.
        as_json: print JSON.
        checks: also check everything else that a run checks before it loads its model.

    Raises:
        UsageError: something that the config names is missing.
    """
    load_torch()
    import torch
    from transformers.utils import logging

    from agentrl.engines import check_cpu_heads
    from agentrl.runs.assemble import model_config, run_tokenizer, task_mix, with_dialect
    from agentrl.runs.checkpoint import model_at
    from agentrl.train.live import check_playing
    from agentrl.train.memory import needs, play_gold

    logging.set_verbosity_error()
    # Settings that no run can follow are refused. The engine is not made, since its package may not be installed here.
    check_playing(config)
    path = model_at(config.model.path, partial(print, file=sys.stderr))
    config = with_dialect(config.updated(model={"path": path}))
    tokenizer = run_tokenizer(config, mix := task_mix(config, "train"))
    if checks:
        _show_tasks(config, tokenizer)
    limit = None if memory is None else int(memory * _GIB)
    shape = model_config(config, tokenizer)
    if config.engine.name == "vllm" and config.model.device == "cpu" and not torch.cuda.is_available():
        check_cpu_heads(shape.get_text_config())
    needed = needs(config, shape, limit, play_gold(config, mix, tokenizer))
    if as_json:
        print(json.dumps({**asdict(needed), "total": needed.total, "fits": not needed.remedy}))
    else:
        _show(needed)
    lacking = missing_parts(config) if checks else []
    for sentence in lacking:
        print(f"missing   {sentence}")
    return int(bool(needed.remedy or lacking))


def _show_tasks(config: "Config", tokenizer: Any) -> None:
    from agentrl.runs.assemble import make_renderer
    from agentrl.train.live import check_run

    sources = check_run(config)
    for name, train in sources.train.sources.items():
        renderer = make_renderer(config, tokenizer, train)
        prompt = len(renderer.prompt(train.opening()).token_ids)
        splits = (train, sources.held_out.sources[name])
        counts = [f"{split.tasks.size or 'endless'} {split.split}" for split in splits]
        share = f", {sources.train.shares(100)[name]}% of a step" if name else ""
        print(f"tasks     {' and '.join(counts)} of {train.env_id}, in the dialect {train.dialect.name}{share}")
        rollout = config.rollout
        total = rollout.total_tokens or 4 * rollout.episode_tokens
        most = f"a row has at most {rollout.episode_tokens}, all rows of an episode {total}"
        print(f"prompt    {prompt} tokens, the first; {most}")


def _show(needed: "Needs") -> None:
    """Print a line for each part of the memory, for the step, and for the remedy where the run does not fit."""
    from agentrl.runs.report.text import duration

    for name, size in needed.memory.items():
        print(f"memory    {size / _GIB:8.2f} GiB  {name}")
    print(f"in all    {needed.total / _GIB:8.2f} GiB" + (f"  of {needed.limit / _GIB:.2f}" if needed.limit else ""))
    phases = ", ".join(f"{duration(seconds)} to {name}" for name, seconds in needed.seconds.items())
    expected = f"about {needed.expected} as gold plays, " if needed.expected < needed.tokens else ""
    times = phases or "and no times: they are measured on its device only"
    print(f"a step    {needed.tokens} tokens at most, {expected}{times}")
    if needed.remedy:
        print(f"too much  {needed.remedy}")
