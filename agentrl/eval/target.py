"""What is evaluated: a run, a checkpoint, a model, or a server."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import Config, load_config, parse_config, with_overrides
from agentrl.engines import make_engine
from agentrl.engines.base import Engine
from agentrl.errors import RunFolderError, UsageError, nearest
from agentrl.models.lora import fingerprint
from agentrl.render.renderer import load_tokenizer
from agentrl.render.transcript import Transcript, Writer
from agentrl.rollout.mix import TaskMix
from agentrl.runs.assemble import assemble, make_renderer, replace_dialects
from agentrl.runs.checkpoint import model_at
from agentrl.runs.folder import checkpoints, read_config, read_dialect
from agentrl.runs.records import Pieces
from agentrl.toolenv.dialects.native import FORMS, NATIVE, NativeHermes

SERVER = "openai"
"""The engine whose model is elsewhere."""
_ENDLESS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Arguments of ``agentrl eval``."""

    path: str = ""
    """A run folder, a checkpoint in one, or a model's folder or name; empty for a server."""
    config: Path | None = None
    """Settings for a model that is in no run folder."""
    preset: str | None = None
    """Preset for a model that is in no run folder."""
    overrides: tuple[str, ...] = ()
    """Settings to override, ``section.key=value`` each."""
    envs: tuple[str, ...] = ()
    """Sets of tasks, as :func:`agentrl.eval.sets.make_sets` reads them; those of the settings without any."""
    engine: str | None = None
    """Engine in place of that of the settings."""
    engine_options: Mapping[str, str] = field(default_factory=dict[str, str])
    """Its options, beside those of the settings."""
    seed: int = 0
    """Seed of sampling."""
    out: Path | None = None
    """Folder to write the episodes to."""
    force: bool = False
    """Evaluate a run in another dialect than it was trained in."""


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
    overrides = (*request.overrides, *([f"engine.name={request.engine}"] if request.engine else ()))
    config, path = _settings(request, overrides)
    if request.engine_options:
        engine = {"name": config.engine.name, "options": {**config.engine.options, **request.engine_options}}
        config = parse_config({**config.model_dump(mode="json"), "engine": engine})
    if (config.engine.name == SERVER) == bool(path):
        raise UsageError(
            "say what to evaluate: either a run, a checkpoint or a model, or with --engine openai --model NAME a server"
        )
    return config, model_at(path, say) if path else ""


def _settings(request: EvalRequest, overrides: Sequence[str]) -> tuple[Config, str]:
    path, run_path = Path(request.path), _run_of(request.path)
    if run_path is not None:
        if request.config or request.preset:
            raise UsageError(f"{request.path!r} has its own settings: use --set instead of --config and --preset")
        config = with_overrides(read_config(run_path), overrides)
        if run_path != path and path.resolve() not in (saved := checkpoints(run_path)):
            names = [one.name for one in saved]
            raise RunFolderError(f"there is no checkpoint {str(path)!r}; {nearest(path.resolve().name, names)}")
        return config, str(path)
    if request.path and not (request.config or request.preset or request.envs):
        if not (_may_be_on_hub(request.path) or (path / "config.json").is_file()):
            read_config(path)  # it is a mistyped run: this raises, and names the nearest one
        raise UsageError(
            f"{request.path!r} is in no run folder: say with --config or --preset how to evaluate it, or with --env on "
            "what"
        )
    return load_config(preset=request.preset, path=request.config, overrides=overrides), request.path


def _may_be_on_hub(name: str) -> bool:
    looks_local = "/" not in name or name.startswith((".", "/", "runs/"))
    return not looks_local and not Path(name).exists()


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
        return Agent(
            engine=parts.engine, renderer=parts.renderer, pieces=parts.tokenizer, weights=fingerprint(parts.model)
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


def _run_of(path: str) -> Path | None:
    """Give the run folder that ``path`` is, or that it names a checkpoint in; None where there is none."""
    whole = Path(path).resolve()
    folder = whole.parent.parent if whole.parent.name == "checkpoints" else Path(path)
    return folder if path and (folder / "config.toml").is_file() else None


def check_dialect(request: EvalRequest, label: str) -> None:
    """Refuse another dialect than a run was trained in; of other environments its name alone counts, not their tools.

    Raises:
        UsageError: it is another one, and ``force`` is not set.
    """
    run_path = _run_of(request.path)
    trained = "" if run_path is None else read_dialect(run_path)
    if request.force or not trained:
        return
    names = [{part.split()[0] for part in text.split(", ")} for text in (label, trained)]
    if not (names[0] <= names[1] if request.envs else label == trained):
        raise UsageError(
            f"the run {str(run_path)!r} was trained in dialect {trained!r} and would be evaluated in {label!r}, which "
            "is another game: evaluate it with the dialect, tools and instructions of its training, or add --force"
        )
