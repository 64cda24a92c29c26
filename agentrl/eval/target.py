"""The agent that is evaluated: a run, a checkpoint, a model, or a server."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config import Config
from agentrl.engines import make_engine
from agentrl.engines.base import Engine
from agentrl.eval.request import SERVER
from agentrl.models.lora import fingerprint
from agentrl.render.loading import load_tokenizer
from agentrl.render.transcript import Transcript, Writer
from agentrl.rollout.mix import TaskMix
from agentrl.runs.assemble import assemble, make_renderer, replace_dialects
from agentrl.runs.records import Pieces
from agentrl.toolenv.dialects.native import FORMS, NATIVE, NativeHermes

_ENDLESS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An engine that plays episodes, with all that goes with it."""

    engine: Engine
    """Samples its turns."""
    renderer: Writer
    """Writes conversations as tokens for it."""
    pieces: Pieces
    """Decodes a token."""
    weights: str
    """Names its weights: equal texts are equal weights."""
    notes: Sequence[str] = ()
    """Requests that a server turns out not to follow, a sentence each; the list grows while episodes are played."""


def tokenizer_of(config: Config) -> str:
    """Return the tokenizer of a server's model; empty where the server takes messages."""
    return str(config.engine.options.get("tokenizer", ""))


def for_messages(config: Config) -> Config:
    """Return settings that fit a server which takes messages; those of other engines stay as they are.

    The tokens of an episode can't be counted there, so they have no limit. The server parses tool calls, so they have
    one form whatever the model's.
    """
    if config.engine.name != SERVER or tokenizer_of(config):
        return config
    return replace_dialects(config.updated(rollout={"episode_tokens": _ENDLESS}), (NATIVE, *FORMS), NativeHermes.name)


def make_agent(config: Config, mix: TaskMix, path: str) -> Agent:
    """Load the model, or connect to the server.

    Raises:
        UsageError: the model or its tokenizer can't be loaded, or the engine can't be made.
        RenderError: the tokenizer's chat template can't be extended.
    """
    if config.engine.name != SERVER:
        parts = assemble(config, mix, path)
        step = getattr(parts.engine, "step", "")
        return Agent(
            engine=parts.engine,
            renderer=parts.renderer,
            pieces=parts.tokenizer,
            weights=fingerprint(parts.model),
            notes=[f"tokens are sampled by {step}"] if step.startswith("PyTorch, since") else [],
        )
    options = config.engine.options
    engine: Any = make_engine(SERVER, None, options)
    base = options.get("base_url") or os.environ.get("OPENAI_BASE_URL", "OpenAI")
    weights = f"{options['model']} at {base}"
    if not (name := tokenizer_of(config)):
        transcript = Transcript()
        return Agent(engine=engine, renderer=transcript, pieces=transcript, weights=weights, notes=engine.notes)
    tokenizer = load_tokenizer(name)
    renderer = make_renderer(config, tokenizer, mix)
    return Agent(engine=engine, renderer=renderer, pieces=tokenizer, weights=weights, notes=engine.notes)
