"""What is evaluated: a run, a checkpoint, a model, or a server."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config import Config, with_overrides
from agentrl.engines import make_engine
from agentrl.engines.base import Engine
from agentrl.eval.request import SERVER, EvalRequest, read_settings
from agentrl.models.lora import fingerprint
from agentrl.render.renderer import load_tokenizer
from agentrl.render.transcript import Transcript, Writer
from agentrl.rollout.mix import TaskMix
from agentrl.runs.assemble import assemble, make_renderer, replace_dialects
from agentrl.runs.checkpoint import model_at
from agentrl.runs.records import Pieces
from agentrl.toolenv.dialects.native import FORMS, NATIVE, NativeHermes

_ENDLESS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What plays the episodes."""

    engine: Engine
    """Samples its turns."""
    renderer: Writer
    """Writes conversations as tokens for it."""
    pieces: Pieces
    """Gives the text of a token."""
    weights: str
    """Says which weights it has: equal texts are equal weights."""
    notes: Sequence[str] = ()
    """What a server turns out to do in another way than it was asked to; it grows while episodes are played."""


def resolve(request: EvalRequest, say: Callable[[str], None]) -> tuple[Config, str]:
    """Resolve settings and model path, which is empty for a server; ``say`` is told of checkpoints passed over.

    Raises:
        UsageError: there is no run, checkpoint or model, the checkpoint is damaged, or a run has no whole one.
    """
    config, path = read_settings(request)
    return config, model_at(path, say) if path else ""


def tokenizer_of(config: Config) -> str:
    """Give the tokenizer of a server's model; empty where it is talked to in messages."""
    return str(config.engine.options.get("tokenizer", ""))


def for_messages(config: Config) -> Config:
    """Fit settings to a server that is talked to in messages; others stay as they are.

    Nobody can count an episode's tokens there, and calls that the server reads have one form, whatever the model's.
    """
    if config.engine.name != SERVER or tokenizer_of(config):
        return config
    endless = with_overrides(config, [f"rollout.episode_tokens={_ENDLESS}"])
    return replace_dialects(endless, (NATIVE, *FORMS), NativeHermes.name)


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
