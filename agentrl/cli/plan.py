"""``agentrl plan``: estimate what a run will need, before it begins."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agentrl.cli.command import add_command, add_config_arguments, check_config, loading_torch, missing_parts
from agentrl.errors import ConfigError, HubError

if TYPE_CHECKING:
    from agentrl.config import Config
    from agentrl.train.forecast import Card
    from agentrl.train.memory import Needs

_PLAN = """examples:
  agentrl plan --preset quickstart
  agentrl plan my.toml --set optim.max_tokens=16384 --memory 80
  agentrl plan --preset qwen3-4b-one-gpu --card h200 --length 3000 --json

Of the model only its config.json is read; the shapes of Qwen3 need no network. Activations are measured in some
seconds, on small random models of the same widths. Memory is for episodes as long as the settings allow. Times are for
a GPU alone, an estimate from its data sheet, for episodes as long as the settings allow, or of --length. The exit code
is 1 where the run does not fit.
"""
_GIB = 1 << 30


def add_commands(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    plan = add_command(commands, "plan", _plan, "estimate the memory and time that a run needs", _PLAN)
    add_config_arguments(plan)
    plan.add_argument("--memory", type=float, metavar="GIB", help="memory that the run may use (default: all)")
    plan.add_argument("--card", default="", help="a GPU to plan for: a100, h100 or h200 (default: the run's, or h100)")
    plan.add_argument("--length", type=int, metavar="TOKENS", help="tokens of an episode, to reckon the times with")
    plan.add_argument("--json", action="store_true", help="write the plan as JSON, in bytes, tokens and seconds")


def _plan(arguments: argparse.Namespace) -> int:
    from agentrl.config import load_config

    check_config(arguments)
    if arguments.memory is not None and not 0 < arguments.memory < float("inf"):
        raise ConfigError(f"--memory is {arguments.memory:g}: give the GiB that the run may use, for example 80")
    config = load_config(preset=arguments.preset, path=arguments.config, overrides=arguments.overrides)
    if arguments.length is not None and not 1 < arguments.length <= config.rollout.episode_tokens:
        most = config.rollout.episode_tokens
        raise ConfigError(f"--length is {arguments.length}: give 2 to {most} tokens, rollout.episode_tokens")
    return show_plan(
        config, memory=arguments.memory, card=arguments.card, length=arguments.length, as_json=arguments.json
    )


def show_plan(
    config: "Config",
    *,
    memory: float | None = None,
    card: str = "",
    length: int | None = None,
    as_json: bool = False,
    checks: bool = False,
) -> int:
    """Print what a run will need; return the exit code, 1 where it does not fit or a package is missing.

    Args:
        config: the run's settings.
        memory: GiB that it may use; by default all of its device.
        card: name of the GPU to plan for; by default the run's.
        length: tokens of an episode for the times; by default as many as may be.
        as_json: print JSON.
        checks: also check everything else that a run checks before it loads its model.

    Raises:
        UsageError: something that the config names is missing.
    """
    from agentrl.runs.progress import Display

    display = Display()
    with loading_torch(display):
        from transformers.utils import logging

        from agentrl.runs.checkpoint import model_at
        from agentrl.runs.report.text import duration
        from agentrl.train.forecast import basis, card_of, forecast, run_seconds
        from agentrl.train.live import check_playing

    logging.set_verbosity_error()
    # Settings that no run can follow are refused. The engine is not made, since its package may not be installed here.
    check_playing(config)
    path, gpu = model_at(config.model.path, display.say), card_of(config, card)
    config = config.updated(model={"path": path, "device": "cuda" if card else config.model.device})
    length, unchecked = length or config.rollout.episode_tokens, list[str]()
    shape = _read(config, unchecked, checks=checks)
    with display.doing("measuring activations"):
        needed = _estimate(config, shape, gpu, None if memory is None else int(memory * _GIB))
    seconds = forecast(config, shape, gpu, length) if gpu else {}
    total, rests_on = (run_seconds(config, seconds), basis(config, gpu, length)) if gpu else (None, "")
    lacking = missing_parts(config) if checks else []
    if as_json:
        row = {**asdict(needed), "seconds": seconds, "total": needed.total, "fits": not needed.remedy}
        print(json.dumps({**row, "run_seconds": total, "basis": rests_on, "unchecked": unchecked}))
        return int(bool(needed.remedy))
    for sentence in unchecked:
        print(f"unchecked {sentence}")
    _show(needed, config, length, seconds)
    if total is not None:
        print(f"the run   {duration(total)} for {config.optim.steps} steps and the evaluations")
        print(f"estimate  {rests_on}")
    if needed.remedy:
        print(f"too much  {needed.remedy}")
    for sentence in lacking:
        print(f"missing   {sentence}")
    return int(bool(needed.remedy or lacking))


def _read(config: "Config", unchecked: list[str], *, checks: bool) -> Any:
    """Return the model's configuration.

    What only the hub has, and no plan needs, becomes a sentence in ``unchecked`` where the hub can't be reached.
    """
    from agentrl.models.shapes import published_shape
    from agentrl.runs.assemble import model_config, run_tokenizer, task_mix, with_dialect

    shape, tokenizer = published_shape(config.model.path), None
    if shape and not checks:
        return shape
    try:
        config = with_dialect(config)
        tokenizer = run_tokenizer(config, task_mix(config, "train"))
    except HubError as error:
        if shape is None:
            raise
        unchecked.append(f"the tokenizer, its chat template, the prompt: {error}")
    try:
        if checks:
            _show_tasks(config, tokenizer)
    except HubError as error:
        unchecked.append(f"the tasks: {error}")
    return shape or model_config(config, tokenizer)


def _estimate(config: "Config", shape: Any, gpu: "Card | None", limit: int | None) -> "Needs":
    """Return what a run needs; ``limit`` is the memory that it may use, by default the GPU's."""
    import torch

    from agentrl.engines import check_cpu_heads
    from agentrl.train.memory import needs

    if config.engine.name == "vllm" and config.model.device == "cpu" and not torch.cuda.is_available():
        check_cpu_heads(shape.get_text_config())
    return needs(config, shape, limit or (gpu.memory if gpu else None))


def _show_tasks(config: "Config", tokenizer: Any) -> None:
    from agentrl.runs.assemble import make_renderer
    from agentrl.train.live import check_run

    sources = check_run(config)
    for name, train in sources.train.sources.items():
        splits = (train, sources.held_out.sources[name])
        counts = [f"{split.tasks.size or 'endless'} {split.split}" for split in splits]
        share = f", {sources.train.shares(100)[name]}% of a step" if name else ""
        print(f"tasks     {' and '.join(counts)} of {train.env_id}, in the dialect {train.dialect.name}{share}")
        if tokenizer is None:
            continue
        prompt = len(make_renderer(config, tokenizer, train).prompt(train.opening()).token_ids)
        rollout = config.rollout
        total = rollout.total_tokens or 4 * rollout.episode_tokens
        most = f"a row has at most {rollout.episode_tokens}, all rows of an episode {total}"
        print(f"prompt    {prompt} tokens, the first; {most}")


def _show(needed: "Needs", config: "Config", length: int, seconds: Mapping[str, float]) -> None:
    """Print a line for each part of the memory, and for the step."""
    from agentrl.runs.report.text import duration

    for name, size in needed.memory.items():
        print(f"memory    {size / _GIB:8.2f} GiB  {name}")
    print(f"in all    {needed.total / _GIB:8.2f} GiB" + (f"  of {needed.limit / _GIB:.2f}" if needed.limit else ""))
    expected = config.rollout.tasks * config.rollout.group_size * length
    at_length = f"about {expected} at that length, " if expected < needed.tokens else ""
    phases = ", ".join(f"{duration(took)} to {name}" for name, took in seconds.items())
    times = phases or "and no times: they are estimated for a GPU only, such as with --card"
    print(f"a step    {needed.tokens} tokens at most, {at_length}{times}")
