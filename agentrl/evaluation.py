"""``agentrl eval``: find out what to evaluate and with which settings, and do it."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from agentrl.assemble import assemble, dialect_label, make_collector, with_dialect
from agentrl.config import Config, load_config, with_overrides
from agentrl.display import Display
from agentrl.errors import RunFolderError, UsageError, nearest
from agentrl.evaluate import Evaluation, evaluate
from agentrl.records import write_episodes
from agentrl.runfolder import checkpoints, read_config, read_dialect


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
    """Evaluate what ``request`` names.

    Raises:
        UsageError: it is not there, the episodes can't be written, or the run was trained in another dialect.
    """
    config, model = resolve(request)
    _check_writable(request.out)
    config = with_dialect(config, model)
    label = dialect_label(config)
    if not request.force:
        _check_dialect(request, label)
    parts = assemble(config, model)
    collector = make_collector(config, parts.renderer, split=config.eval.split)
    try:
        with display.phase("evaluating", config.eval.tasks * config.eval.attempts) as bar:
            result, episodes = asyncio.run(
                evaluate(
                    collector,
                    parts.engine,
                    config.eval,
                    seed=request.seed,
                    turn_tokens=config.rollout.turn_tokens,
                    on_episode=lambda _: bar.advance("episodes"),
                )
            )
    finally:
        collector.close()
    if request.out is not None:
        write_episodes(request.out, episodes, parts.tokenizer, dialect=label)
    return result


def resolve(request: Request) -> tuple[Config, str]:
    """The settings, and where the model is.

    Raises:
        UsageError: there is no run, checkpoint or model, or a run has no checkpoint yet.
    """
    path = Path(request.path)
    checkpoint, run_path = _places(path)
    if (run_path / "config.toml").is_file():
        if request.config or request.preset:
            raise UsageError(f"{request.path!r} has its own settings: use --set instead of --config and --preset")
        config = with_overrides(read_config(run_path), request.overrides)
        saved = checkpoints(run_path)
        if not saved:
            raise RunFolderError(f"the run {str(run_path)!r} has no checkpoint yet")
        if checkpoint and checkpoint not in saved:
            names = [one.name for one in saved]
            raise RunFolderError(f"there is no checkpoint {str(path)!r}; {nearest(checkpoint.name, names)}")
        return config, str(path if checkpoint else saved[-1])
    if request.config is None and request.preset is None:
        is_model = (path / "config.json").is_file()
        if not is_model and (path.exists() or "/" not in request.path or request.path.startswith((".", "/", "runs/"))):
            read_config(path)  # names the nearest run
        raise UsageError(f"{request.path!r} is in no run folder: say with --config or --preset how to evaluate it")
    return load_config(preset=request.preset, path=request.config, overrides=request.overrides), request.path


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
    try:
        existed = out.exists()
        with out.open("ab"):
            pass
        if not existed:
            out.unlink()
    except OSError as error:
        raise UsageError(f"--out {str(out)!r} can't be written: {error.strerror}") from error
