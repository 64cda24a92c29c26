"""From a config to the parts of a run: model, tokenizer, renderer, engine, collectors."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from agentrl.config import Config, ModelSettings, with_overrides
from agentrl.dialects import NATIVE, Dialect, resolve_dialect
from agentrl.engines.transformers import TransformersEngine
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.policy import cast_copy, load_model
from agentrl.registry import make
from agentrl.render import Renderer, load_tokenizer
from agentrl.rng import derive_seed
from agentrl.rollout import Collector, Limits
from agentrl.tiny import make_model, make_tokenizer
from agentrl.types import Task

_TOKENIZER_TASKS = 500
_NO_TOKENIZER = "give model.path a folder that holds a model, or its name on the Hugging Face hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of."""

    model: PreTrainedModel
    """The policy that is trained."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer."""
    renderer: Renderer
    """Writes messages for that tokenizer."""
    engine: TransformersEngine
    """Samples from a copy of the model."""


def assemble(config: Config, path: str | Path | None = None) -> Parts:
    """Make model, tokenizer, renderer and engine.

    Args:
        config: the run's settings.
        path: where the model is loaded from instead of ``config.model.path``.

    Raises:
        UsageError: the model or its tokenizer can't be loaded.
        RenderError: the tokenizer's chat template can't be extended.
        ConfigError: there is no such device, or the chat template has no such variable.
    """
    # Its bars and notes would break into ours.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    source = path or config.model.path
    tokenizer: Any = load_tokenizer(source, _NO_TOKENIZER) if source else make_tokenizer(_texts(config))
    renderer = Renderer(tokenizer, config.model.template_args, _dialect(config).template_tools)
    device = _device(config.model.device)
    if source:
        model = load_model(source, device=device)
    else:
        tiny = _checked(config.model)
        seed = derive_seed(config.run.seed, "weights")
        model: Any = make_model(tokenizer, hidden=tiny.hidden, layers=tiny.layers, heads=tiny.heads, seed=seed)
        model = model.to(device)
    longest = config.rollout.episode_tokens + config.rollout.turn_tokens
    sampled = cast_copy(model, getattr(torch, config.model.dtype))
    engine = TransformersEngine(sampled, slots=config.rollout.concurrency, max_length=longest)
    return Parts(model=model, tokenizer=tokenizer, renderer=renderer, engine=engine)


def with_dialect(config: Config, path: str | Path | None = None) -> Config:
    """The same config with the dialect ``native`` replaced by the form that the model's chat template writes.

    Args:
        config: the run's settings.
        path: where the tokenizer is loaded from instead of ``config.model.path``.

    Raises:
        UsageError: the tokenizer can't be loaded.
        ConfigError: the form is not known, or the model is the tiny one, which was never taught any.
    """
    if config.env.args.get("dialect") != NATIVE:
        return config
    source = path or config.model.path
    if not source:
        raise ConfigError(
            "env.args.dialect='native' needs a model that was taught to call tools: set model.path, or use dialect "
            "'fence', 'hermes' or 'xml'"
        )
    return with_overrides(
        config, [f"env.args.dialect={resolve_dialect(NATIVE, load_tokenizer(source, _NO_TOKENIZER))}"]
    )


def dialect_label(config: Config) -> str:
    """Name and hash of the dialect that the config's environment is played in.

    Raises:
        UsageError: there is no such environment, or it does not take one of its arguments.
    """
    return _dialect(config).label


def _dialect(config: Config) -> Dialect:
    env = make(config.env.id, **config.env.args)
    env.close()
    return env.dialect


def make_collector(config: Config, renderer: Renderer, *, split: str) -> Collector:
    """A collector of episodes of one split.

    Raises:
        UnknownNameError: there is no such environment or split.
        ConfigError: the environment does not take one of ``env.args``.
    """
    rollout = config.rollout
    return Collector(
        config.env.id,
        {**config.env.args, "split": split},
        renderer,
        limits=Limits(episode_tokens=rollout.episode_tokens, cut_turns=rollout.cut_turns),
        concurrency=rollout.concurrency,
        max_fault_rate=rollout.max_fault_rate,
    )


def pick_tasks(env: ToolEnv, count: int, *, first: int = 0, seed: int | None = None) -> Sequence[Task]:
    """Tasks ``first`` to ``first + count`` of the environment's split; a finite one begins again where it ends.

    Args:
        env: the environment.
        count: how many.
        first: where to begin, counted through all passes; a negative one is in the passes before the first.
        seed: shuffles a finite split, each pass anew and every task once a pass; None keeps the split's own order.
    """
    size, places = env.task_set.size, range(first, first + count)
    if size is None:
        return [env.task_set[place] for place in places]
    orders = {number: _order(size, seed, number) for number in {place // size for place in places}}
    return [env.task_set[orders[place // size][place % size]] for place in places]


def _order(size: int, seed: int | None, number: int) -> Sequence[int]:
    """In which order pass ``number`` through ``size`` tasks meets them."""
    if seed is None:
        return range(size)
    generator = torch.Generator().manual_seed(derive_seed(seed, "pass", number))
    return torch.randperm(size, generator=generator).tolist()


def _texts(config: Config) -> Iterator[str]:
    env = make(config.env.id, **config.env.args)
    env.reset(seed=0)
    opening = [message["content"] for message in env.episode.messages]
    for task in itertools.islice(env.task_set, _TOKENIZER_TASKS):
        gold = gold_turns(env, task, "the tiny model's vocabulary comes", "set model.path")
        yield "\n".join(["system\nuser\nassistant\ntool", *opening, task.prompt, *gold])


def gold_turns(env: ToolEnv, task: Task, what: str, remedy: str) -> Sequence[str]:
    """The turns of the environment's perfect player.

    Args:
        env: the environment.
        task: one of its tasks.
        what: what needs them, such as ``"the warm start learns"``.
        remedy: how to do without.

    Raises:
        ConfigError: there is no such player.
        EnvContractError: what it gives is no list of texts.
    """
    try:
        return env.gold_turns(task)
    except NotImplementedError as error:
        raise ConfigError(f"{what} from gold episodes, and {error}: {remedy}, or give it a gold method") from error


def _checked(tiny: ModelSettings) -> ModelSettings:
    if tiny.hidden % (2 * tiny.heads) or (tiny.heads > 1 and tiny.heads % 2):
        raise ConfigError(
            f"a tiny model can't have model.heads={tiny.heads} in model.hidden={tiny.hidden}: use 1 head or an even "
            "number of them, and a width that is a multiple of twice that"
        )
    return tiny


def _device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"there is no device {name!r} here: {str(error).splitlines()[0]}") from error
    return name
