"""Engines sample tokens: one for each name that ``engine.name`` can have, and ``scripted`` for tests and oracles."""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.engines.base import Engine
from agentrl.errors import ConfigError
from agentrl.named import check_name, make_named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENGINES: Mapping[str, str] = {
    "transformers": "agentrl.engines.transformers:TransformersEngine",
    "vllm": "agentrl.engines.vllm:VllmEngine",
    "openai": "agentrl.engines.openai:OpenAIEngine",
}
"""Module and class of each engine by its name; a module is imported only for a run that chooses its engine."""


_PACKAGES = ("vllm", "openai", "ray")
"""Engines and fleets whose package has their name, and is installed by an extra of that name."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of the heads that vLLM has a kernel for on a CPU."""


def missing_package(what: str, name: str) -> str:
    """Return what to do about an engine's or a fleet's package that is not installed; empty where it is."""
    if name not in _PACKAGES or importlib.util.find_spec(name) is not None:
        return ""
    return f"{what} {name!r} needs {name}: pip install 'agentrl[{name}]'"


def check_cpu_heads(shape: Any) -> None:
    """Refuse heads that vLLM has no kernel for on a CPU: its process would end with the first request.

    Args:
        shape: the configuration of a model.

    Raises:
        ConfigError: the model has such heads.
    """
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    if width not in CPU_HEADS:
        raise ConfigError(
            f"on a CPU vLLM computes heads of {', '.join(map(str, CPU_HEADS))}, not of {width}: choose another model, "
            "or model.tiny.heads of the tiny one"
        )


def make_engine(name: str, model: "PreTrainedModel | None", options: Mapping[str, Any]) -> Engine:
    """Make the engine that a config chooses.

    Args:
        name: a name of ``ENGINES``, or ``module:name``.
        model: a copy of the policy, which the engine owns; None for ``openai``, whose model is elsewhere.
        options: the engine's own keyword arguments.

    Raises:
        UnknownNameError: there is no such engine.
        ConfigError: it can't be imported or made, or breaks the contract of ``Engine``.
    """
    engine = make_named("engine", ENGINES, name, options, model)
    lacking = [part for part in vars(Engine) if not part.startswith("_") and not hasattr(engine, part)]
    if lacking:
        raise ConfigError(f"engine {name!r} made a {type(engine).__name__} without {lacking[0]!r}: Engine in "
                          "agentrl/engines/base.py is the contract")  # fmt: skip
    return engine


def check_trains(name: str) -> None:
    """Refuse an engine that no run can train with, before anything is loaded.

    Raises:
        UnknownNameError: there is no such engine.
        ConfigError: its module is not here, or it only evaluates.
    """
    check_name("engine", ENGINES, name)
    if name == "openai":
        raise ConfigError("engine 'openai' only evaluates: set engine.name to 'transformers' or 'vllm'")
