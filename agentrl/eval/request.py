"""The arguments of ``agentrl eval`` and the settings that they select, read before PyTorch is loaded."""

from dataclasses import dataclass
from pathlib import Path

from agentrl.config import Config, load_config, with_overrides
from agentrl.errors import RunFolderError, UsageError, nearest
from agentrl.runs.folder import checkpoints
from agentrl.runs.settings import read_config, read_versions

SERVER = "openai"
"""The engine whose model is elsewhere."""


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
    seed: int = 0
    """Seed of sampling."""
    out: Path | None = None
    """Folder to write the episodes to."""
    force: bool = False
    """Evaluate a run in another dialect than it was trained in."""


def read_settings(request: EvalRequest) -> tuple[Config, str]:
    """Read the settings that a request selects, and the path of its model, which is empty for a server.

    Raises:
        UsageError: there is no such run or checkpoint, or a model comes without settings.
    """
    config, path = _settings(request)
    if (config.engine.name == SERVER) == bool(path):
        raise UsageError(
            "say what to evaluate: either a run, a checkpoint or a model, or with --engine openai --model NAME a server"
        )
    return config, path


def _settings(request: EvalRequest) -> tuple[Config, str]:
    path, run_path = Path(request.path), run_of(request.path)
    if run_path is not None:
        if request.config or request.preset:
            raise UsageError(f"{request.path!r} has its own settings: use --set instead of --config and --preset")
        config = with_overrides(read_config(run_path), request.overrides)
        if run_path != path and path.resolve() not in (saved := checkpoints(run_path)):
            names = [checkpoint.name for checkpoint in saved]
            raise RunFolderError(f"there is no checkpoint {str(path)!r}; {nearest(path.resolve().name, names)}")
        return config, str(path)
    if request.path and not (request.config or request.preset or request.envs):
        if not (_may_be_on_hub(request.path) or (path / "config.json").is_file()):
            read_config(path)  # it is a mistyped run: this raises, and names the nearest one
        raise UsageError(
            f"{request.path!r} is in no run folder: say with --config or --preset how to evaluate it, or with --env on "
            "what"
        )
    return load_config(preset=request.preset, path=request.config, overrides=request.overrides), request.path


def _may_be_on_hub(name: str) -> bool:
    looks_local = "/" not in name or name.startswith((".", "/", "runs/"))
    return not looks_local and not Path(name).exists()


def run_of(path: str) -> Path | None:
    """Return the run folder that ``path`` is or holds as a checkpoint; None where it is in no run folder."""
    absolute = Path(path).resolve()
    folder = absolute.parent.parent if absolute.parent.name == "checkpoints" else Path(path)
    return folder if path and (folder / "config.toml").is_file() else None


def check_dialect(request: EvalRequest, label: str) -> None:
    """Check that a run is evaluated in the dialect of its training.

    Where other environments are evaluated, only the dialects' names are compared: their tools differ anyway.

    Args:
        request: the arguments of ``agentrl eval``.
        label: the dialects to evaluate in, by name, each with a hash of its texts and tools.

    Raises:
        UsageError: the dialects differ, and ``force`` is not set.
    """
    run_path = run_of(request.path)
    trained = "" if run_path is None else read_versions(run_path).get("dialect", "")
    if request.force or not trained:
        return
    names = [{part.split()[0] for part in text.split(", ")} for text in (label, trained)]
    if not (names[0] <= names[1] if request.envs else label == trained):
        raise UsageError(
            f"the run {str(run_path)!r} was trained in dialect {trained!r} and would be evaluated in {label!r}, which "
            "is another game: evaluate it with the dialect, tools and instructions of its training, or add --force"
        )
