"""Assemble the parts of a run from its config: model, tokenizer, renderer, engine, collectors."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from agentrl.config import Config
from agentrl.config.settings import EnvSettings, MixedEnv
from agentrl.engines import check_trains, make_engine
from agentrl.engines.base import Engine
from agentrl.engines.rng import derive_seed
from agentrl.errors import ConfigError, UsageError, first_line
from agentrl.models.load import cast_copy, load_model, load_skeleton, make_repeatable, quiet
from agentrl.models.lora import add_adapters, base_of, load_adapters, target_names
from agentrl.models.tiny import make_model, make_tokenizer, tiny_config
from agentrl.named import make_named
from agentrl.render.loading import load_tokenizer
from agentrl.render.renderer import Renderer
from agentrl.render.transcript import Writer
from agentrl.rollout.collector import Collector
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import TaskSource
from agentrl.rollout.player import EpisodeLimits
from agentrl.toolenv.dialects import NATIVE, resolve_dialect
from agentrl.toolenv.tools.python import use_backend

_TOKENIZER_TASKS = 500
_FLEETS = {"ray": "agentrl.rollout.ray_fleet:RayFleet"}
_DRIVERS = {
    "step": "agentrl.rollout.driver:StepDriver",
    "agent": "agentrl.endpoint.driver:AgentDriver",
    "serve": "agentrl.endpoint.driver:ServeDriver",
}
_Env = TypeVar("_Env", EnvSettings, MixedEnv)
_NO_TOKENIZER = "give model.path a folder that holds a model, or its name on the Hugging Face hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model that a run trains, and its tokenizer."""

    model: PreTrainedModel
    """The policy that is trained; of several ranks' a skeleton, whose weights they read themselves."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    whole: str = ""
    """Why rank 0 holds the complete model at the start, in words that follow the model's name; empty where it does
    not, or is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Policy):
    """Model, tokenizer, renderer and engine of a run."""

    renderer: Renderer
    """Writes messages as tokens of that tokenizer."""
    engine: Engine
    """Samples from a copy of the model."""


def assemble(
    config: Config, source: TaskSource | TaskMix, path: str | Path | None = None, *, fleet: bool = False
) -> Parts:
    """Make model, tokenizer, renderer and engine.

    Args:
        config: the run's settings.
        source: a split of its environments.
        path: loads the model from here instead of ``config.model.path``.
        fleet: make the fleet that ``config.fleet`` chooses and use it as the engine; otherwise the engine is here.

    Raises:
        UsageError: the model or its tokenizer can't be loaded.
        RenderError: the tokenizer's chat template can't be extended.
        ConfigError: there is no such device, the chat template has no such variable, the engine no such option, the
            model no such layer as ``lora.targets`` names, or no cluster has room for the fleet.
        UnknownNameError: there is no such engine.
        InfrastructureError: the fleet did not start.
    """
    check_trains(config.engine.name)
    quiet()
    tokenizer = run_tokenizer(config, source, path)
    renderer = make_renderer(config, tokenizer, source)
    policy = load_policy(config, tokenizer, path)
    longest = config.rollout.episode_tokens + config.rollout.turn_tokens
    # The engine samples from a copy: the trainer's weights are float32, and change before the engine loads them.
    sampled = cast_copy(policy.model, getattr(torch, config.model.dtype), config.model.device)
    options = {"slots": config.rollout.concurrency, "max_length": longest, **config.engine.options}
    if fleet and config.fleet.name != "local":
        engine = make_named("fleet", _FLEETS, config.fleet.name, config.fleet.options, config, sampled, options)
    else:
        engine = make_engine(config.engine.name, sampled, options)
    return Parts(model=policy.model, tokenizer=tokenizer, whole=policy.whole, renderer=renderer, engine=engine)


def make_renderer(config: Config, tokenizer: Any, source: TaskSource | TaskMix) -> Renderer:
    """Make the renderer of the first environment of ``source``.

    Args:
        config: the settings.
        tokenizer: has a chat template.
        source: a split of the environments.

    Raises:
        RenderError: the tokenizer's chat template can't be extended, or can't describe an environment's tools.
        ConfigError: the chat template has no such variable.
    """
    # A collector makes the renderers of the other environments. They are made here too, so that a template which
    # can't describe their tools is refused at once.
    args, dialects = config.model.template_args, source.dialects
    renderer, *_ = [Renderer(tokenizer, args, dialect.template_tools, dialect.marks) for dialect in dialects]
    return renderer


def load_policy(config: Config, tokenizer: Any = None, path: str | Path | None = None) -> Policy:
    """Load the model of a run, or make the tiny one.

    Args:
        config: the run's settings.
        tokenizer: the run's; without one, that of ``model.path`` is loaded.
        path: loads the model from here instead.

    Raises:
        UsageError: the model or its tokenizer can't be loaded.
        ConfigError: there is no such device, or the model has no such layer as ``lora.targets`` names.
    """
    quiet()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    make_repeatable(config.run.deterministic)
    weights = path or config.model.path
    tokenizer = tokenizer or load_tokenizer(weights, _NO_TOKENIZER)
    device = check_device(config.model.device)
    skeleton, whole = load_skeleton(weights) if weights and config.run.ranks > 1 else (None, "")
    if skeleton is not None:
        model = skeleton
    elif weights:
        model = load_model(weights, device=device)
    else:
        seed = derive_seed(config.run.seed, "weights")
        model: Any = make_model(tokenizer, seed=seed, **config.model.tiny)
        model = model.to(device)
    if config.lora.rank:
        target_names(model, config.lora.targets)  # refused here, and not after the warm start
    return Policy(model=model, tokenizer=tokenizer, whole=whole)


def run_tokenizer(config: Config, source: TaskSource | TaskMix, path: str | Path | None = None) -> Any:
    """Load the tokenizer of a run's model, or make that of the tiny model from the texts of the environments.

    Args:
        config: the run's settings.
        source: a split of its environments.
        path: loads it from here instead of ``config.model.path``.

    Raises:
        UsageError: it can't be loaded.
    """
    source_path = path or config.model.path
    return load_tokenizer(source_path, _NO_TOKENIZER) if source_path else make_tokenizer(source.texts(_TOKENIZER_TASKS))


def model_config(config: Config, tokenizer: Any) -> PreTrainedConfig:
    """Read the configuration of a run's model, which describes all of it but its weights.

    Args:
        config: the run's settings.
        tokenizer: the run's, which gives the tiny model its vocabulary.

    Raises:
        UsageError: there is none at ``config.model.path``.
        ConfigError: no tiny model has such a shape.
    """
    settings = config.model
    if not settings.path:
        return tiny_config(tokenizer, **settings.tiny)
    try:
        return AutoConfig.from_pretrained(settings.path)
    except Exception as error:  # as in load_model
        raise UsageError(f"no model's config can be read from {settings.path!r}: {first_line(error)}") from error


def adapt(config: Config, model: PreTrainedModel, *, base: str, saved: Path | None) -> None:
    """Add the adapters that ``[lora]`` configures to a run's model.

    Args:
        config: the run's settings.
        model: the adapters' base.
        base: its name, the result of :func:`adapters_base`.
        saved: a checkpoint that holds adapters; without one they are fresh.

    Raises:
        UsageError: the checkpoint's adapters are damaged, or belong to another model.
    """
    lora = config.lora
    if saved is not None:
        load_adapters(model, saved)
    else:
        seed = derive_seed(config.run.seed, "lora")
        add_adapters(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, base=base, seed=seed)


def adapters_base(config: Config, initial: Path) -> str:
    """Name the model that a run's adapters belong to: ``model.path``, or its first checkpoint.

    Args:
        config: the run's settings.
        initial: the run's checkpoint of step 0. It holds a complete model where there is none elsewhere: the run made
            it, trained it in a warm start, or began with the adapters of another run.
    """
    path = config.model.path
    if not path or config.sft.steps or base_of(path) is not None:
        return str(initial.resolve())
    return str(Path(path).resolve()) if Path(path).exists() else path


def with_dialect(config: Config, path: str | Path | None = None) -> Config:
    """Replace the dialect ``native`` in a config with the one that the model's chat template writes.

    Args:
        config: the run's settings.
        path: loads the tokenizer from here instead of ``config.model.path``.

    Raises:
        UsageError: the tokenizer can't be loaded.
        ConfigError: the template writes no known dialect, or the model is the tiny one, which knows none.
    """
    if all(env.args.get("dialect") != NATIVE for env in config.env.played.values()):
        return config
    source = path or config.model.path
    if not source:
        raise ConfigError(
            "env.args.dialect='native' needs a model that was taught to call tools: set model.path, or use dialect "
            "'fence', 'hermes' or 'xml'"
        )
    return replace_dialects(config, (NATIVE,), resolve_dialect(NATIVE, load_tokenizer(source, _NO_TOKENIZER)))


def replace_dialects(config: Config, old: Collection[str], new: str) -> Config:
    """Replace each environment's dialect that is one of ``old`` with ``new``."""

    def replaced(env: _Env) -> _Env:
        update = {"args": {**env.args, "dialect": new}} if env.args.get("dialect") in old else {}
        return env.model_copy(update=update)

    env, mix = config.env, {name: replaced(mixed) for name, mixed in config.env.mix.items()}
    return config.model_copy(update={"env": env.model_copy(update={"mix": mix}) if mix else replaced(env)})


def task_source(config: Config, split: str) -> TaskSource:
    """Make the task source of one split of the config's environment.

    Raises:
        UnknownNameError: there is no such environment or split.
        ConfigError: the environment does not take one of ``env.args``, or the config mixes several.
    """
    if config.env.mix:
        raise ConfigError("env.mix names several environments: task_mix gives the tasks of all")
    return TaskSource(config.env.id, config.env.args, split)


def task_mix(config: Config, split: str) -> TaskMix:
    """Make the task source of one split of each of the config's environments.

    Raises:
        UnknownNameError: there is no such environment, split or sandbox.
        ConfigError: an environment does not take one of its arguments, or its sandbox can't be imported.
    """
    use_backend(config.env.sandbox)
    envs, rollout = config.env.played, config.rollout
    return TaskMix(
        {name: TaskSource(env.id, env.args, split, name) for name, env in envs.items()},
        {name: env.weight for name, env in envs.items()},
        block=rollout.tasks,
    )


def make_collector(
    config: Config, renderer: Writer, *, split: str, training: bool = False, say: Callable[[str], None] = lambda _: None
) -> Collector:
    """Make a collector of episodes of one split of the config's environments; ``training`` penalizes their length.

    ``say`` prints the sentence of an infrastructure fault.
    """
    rollout = config.rollout
    limits = EpisodeLimits(
        episode_tokens=rollout.episode_tokens,
        total_tokens=rollout.total_tokens,
        cut_turns=rollout.truncated.turn,
        penalty=rollout.truncated.penalty if training else 0,
    )
    return Collector(
        {name: (env.id, {**env.args, "split": split}) for name, env in config.env.played.items()},
        renderer,
        limits=limits,
        driver=make_named("driver", _DRIVERS, rollout.driver.name, rollout.driver.options),
        concurrency=rollout.concurrency,
        max_fault_rate=rollout.max_fault_rate,
        say=say,
    )


def check_device(name: str) -> str:
    """Return the name of a PyTorch device.

    Raises:
        ConfigError: there is no such device here.
    """
    # Only a computation shows that a device works: a valid name may belong to a device that is not usable here.
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"there is no device {name!r} here: {first_line(error)}") from error
    return name
