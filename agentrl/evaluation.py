"""``agentrl eval``: find out what to evaluate and with which settings, and do it."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.assemble import assemble, dialect_label, make_collector, with_dialect
from agentrl.checkpoint import model_at
from agentrl.config import Config, load_config, with_overrides
from agentrl.display import Display
from agentrl.engines.base import Sampling
from agentrl.errors import RunFolderError, UsageError, nearest
from agentrl.evaluate import Evaluation, evaluate, plan
from agentrl.records import EpisodeWriter, read_begun
from agentrl.runfolder import checkpoints, read_config, read_dialect
from agentrl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DECIDES = (
    *("env.id", "env.args", "model.template_args", "model.dtype", "rollout.turn_tokens", "rollout.cut_turns"),
    *("rollout.episode_tokens", "eval.split", "eval.temperature"),
)
"""The settings that decide what an episode becomes; of tasks and attempts more can be played later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to evaluate."""

    path: str
    """A run folder, a checkpoint in one, or a model's folder or name."""
    config: Path | None = None
    """Settings for a model that is in no run folder."""
    preset: str | None = None
    """Preset for a model that is in no run folder."""
    overrides: tuple[str, ...] = ()
    """``section.key=value`` each."""
    seed: int = 0
    """Of sampling."""
    out: Path | None = None
    """Where episodes are written."""
    force: bool = False
    """Evaluate a run in another dialect than it was trained in."""


def run(request: Request, display: Display) -> Evaluation:
    """Evaluate what ``request`` names; episodes that its file holds already are not played again.

    Raises:
        UsageError: it is not there, the episodes can't be written, the file is of another evaluation, or the run was
            trained in another dialect.
        TrajectoryError: the file holds something else than episodes.
        KeyboardInterrupt: somebody pressed Ctrl-C; the message says what is saved.
    """
    config, model = resolve(request, display.say)
    _check_writable(request.out)
    kept, records = (b"", []) if request.out is None else read_begun(request.out)
    config = with_dialect(config, model)
    label = dialect_label(config)
    if not request.force:
        _check_dialect(request, label)
    parts = assemble(config, model)
    played_with = _played_with(config, parts.model, request.seed)
    for record in records:
        _check_same(request, {"dialect": record.dialect, **record.evaluation}, {"dialect": label, **played_with})
    with ExitStack() as stack:
        collector = stack.enter_context(closing(make_collector(config, parts.renderer, split=config.eval.split)))
        add: Callable[[Trajectory], None] = lambda _: None
        if request.out is not None:
            about = {"dialect": label, "evaluation": played_with}
            add = stack.enter_context(closing(EpisodeWriter(request.out, parts.tokenizer, kept, about))).add
        specs = plan(collector.env, config.eval, request.seed)
        if len(specs) < config.eval.tasks:
            display.say(f"the split {config.eval.split!r} has {len(specs)} tasks, not {config.eval.tasks}")
        wanted = {(spec.task_id, spec.seed) for group in specs for spec in group}
        done = [one.trajectory for one in records if (one.trajectory.task_id, one.trajectory.seed) in wanted]
        sampling = Sampling(temperature=config.eval.temperature, max_tokens=config.rollout.turn_tokens)
        try:
            with display.phase("evaluating", len(wanted)) as bar:
                for _ in done:
                    bar.advance()

                def ended(episode: Trajectory) -> None:
                    add(episode)
                    bar.advance("episodes")

                return asyncio.run(evaluate(collector, parts.engine, specs, sampling, done=done, on_episode=ended))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_left(request.out)) from None


def _left(out: Path | None) -> str:
    if out is None:
        return "stopped, and no episode is kept: with --out FILE they are, and the same command goes on"
    return f"stopped, {len(read_begun(out)[1])} episodes are saved in {out}; go on with the same command"


def resolve(request: Request, say: Callable[[str], None]) -> tuple[Config, str]:
    """The settings, and where the model is; ``say`` is told of checkpoints that are passed over.

    Raises:
        UsageError: there is no run, checkpoint or model, the checkpoint is damaged, or a run has no whole one.
    """
    path = Path(request.path)
    checkpoint, run_path = _places(path)
    if (run_path / "config.toml").is_file():
        if request.config or request.preset:
            raise UsageError(f"{request.path!r} has its own settings: use --set instead of --config and --preset")
        config = with_overrides(read_config(run_path), request.overrides)
        if checkpoint and checkpoint not in (saved := checkpoints(run_path)):
            names = [one.name for one in saved]
            raise RunFolderError(f"there is no checkpoint {str(path)!r}; {nearest(checkpoint.name, names)}")
        return config, model_at(str(path if checkpoint else run_path), say)
    if request.config is None and request.preset is None:
        is_model = (path / "config.json").is_file()
        if not is_model and (path.exists() or "/" not in request.path or request.path.startswith((".", "/", "runs/"))):
            read_config(path)  # names the nearest run
        raise UsageError(f"{request.path!r} is in no run folder: say with --config or --preset how to evaluate it")
    config = load_config(preset=request.preset, path=request.config, overrides=request.overrides)
    return config, model_at(request.path, say)


def _played_with(config: Config, model: "PreTrainedModel", seed: int) -> dict[str, object]:
    """All that decides what is played, as plain data: with the same the same episodes come."""
    values = config.model_dump(mode="json")
    settings = {name: values[name.partition(".")[0]][name.partition(".")[2]] for name in _DECIDES}
    weights = hashlib.sha256()
    for parameter in model.parameters():
        # An update changes all numbers of most tensors: the first ones will do.
        weights.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return {**settings, "seed": seed, "weights": weights.hexdigest()[:16]}


def _check_same(request: Request, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UsageError(
                f"--out {str(request.out)!r} holds episodes of another evaluation, with {name} {found.get(name)!r} and "
                f"not {value!r}: name another file"
            )


def _places(path: Path) -> tuple[Path | None, Path]:
    """The checkpoint that ``path`` names, if it looks like one, and where the folder of its run would be."""
    whole = path.resolve()
    return (whole, whole.parent.parent) if whole.parent.name == "checkpoints" else (None, path)


def _check_dialect(request: Request, label: str) -> None:
    run_path = _places(Path(request.path))[1]
    trained = read_dialect(run_path) if (run_path / "config.toml").is_file() else ""
    if trained and trained != label:
        raise UsageError(
            f"the run {str(run_path)!r} was trained in dialect {trained!r} and would be evaluated in {label!r}, which "
            "is another game: evaluate it with the dialect, tools and instructions of its training, or add --force"
        )


def _check_writable(out: Path | None) -> None:
    if out is None:
        return
    if not out.name.endswith((".jsonl", ".jsonl.zst")):
        raise UsageError(f"--out {str(out)!r} must end in .jsonl or .jsonl.zst")
    if not os.access(out if out.exists() else out.parent, os.W_OK) or out.is_dir():
        raise UsageError(f"--out {str(out)!r} can't be written: name a file in a folder that is yours to write")
