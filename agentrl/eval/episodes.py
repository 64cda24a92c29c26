"""Recorded episodes: load them, and make the environments that can replay or grade them.

An episodes file may come from anyone, and it names an environment and its arguments. Making an environment imports the
module that its id names, and may read the files that its arguments name: see ``remake``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from agentrl.config import Config
from agentrl.errors import UsageError
from agentrl.runs.records import Record, episode_files, read_episodes
from agentrl.runs.settings import read_config
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.registry import make
from agentrl.types import Origin

_HARMLESS = ("dialect",)
"""Arguments of every environment that are texts and name neither file nor data set."""


def load(path: Path) -> list[Record]:
    """Read the episodes at ``path``: a file, a folder of files, or a run's folder, whose last episodes are taken.

    Raises:
        UsageError: there are none.
        TrajectoryError: a file holds something else.
    """
    if not path.exists():
        raise UsageError(f"there is no file {str(path)!r}")
    records = [record for file in episode_files(path) for record in read_episodes(file)]
    if not records:
        raise UsageError(f"there are no episodes in {str(path)!r}: name a file, a folder of such, or a run's folder")
    return records


def config_of(path: Path) -> Config | None:
    """Read the config of the run whose folder ``path`` is or lies in; None where it belongs to none."""
    absolute = path.resolve()
    folders = (folder for folder in (absolute, *absolute.parents[:2]) if (folder / "config.toml").is_file())
    run = next(folders, None)
    return None if run is None else read_config(run)


def named(records: Sequence[Record], tasks: Sequence[str]) -> list[Record]:
    """Select the episodes of some tasks, or all where no task is named.

    Raises:
        UsageError: there is no episode of a task.
    """
    present = {record.trajectory.task_id for record in records}
    for task in tasks:
        if task not in present:
            others = f"{len(present)} others, as {min(present)!r}"
            raise UsageError(f"there is no episode of the task {task!r}, but of {others}")
    return [record for record in records if not tasks or record.trajectory.task_id in tasks]


def remake(origin: Origin, *, trusted: bool) -> ToolEnv:
    """Make the environment that an episode names.

    Args:
        origin: of the episode.
        trusted: allow an id that names a module, which is imported, and arguments that hold a text, which may name a
            file or a data set. Numbers and the dialect are always allowed.

    Raises:
        UsageError: there is no such environment, or it is not to be made without a person's consent.
    """
    texts = [name for name, value in origin.env_args.items() if name not in _HARMLESS and _holds_text(value)]
    if not trusted and (":" in origin.env_id or texts):
        why = f"its argument {texts[0]!r} may name a file or a data set" if texts else "its id names a module to import"
        raise UsageError(f"the episodes ask for {env_call(origin)}, and {why}: if you would make it, add --trust")
    return make(origin.env_id, **{**origin.env_args, "split": origin.split})


def env_call(origin: Origin) -> str:
    """Return an episode's environment as the arguments of the call that would make it."""
    arguments = {**origin.env_args, "split": origin.split}
    return origin.env_id + "".join(f", {name}={value!r}" for name, value in arguments.items())


def _holds_text(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_text(part) for pair in cast(Mapping[object, object], value).items() for part in pair)
    if isinstance(value, list | tuple):
        return any(map(_holds_text, cast(Sequence[object], value)))
    return isinstance(value, str)
