"""Loggers: rows of metrics go to JSONL files always, and from here to the trackers that a run asks for as well."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, first_line, nearest

Row = Mapping[str, float]
_Logger = tuple[Callable[[Row, int], object], Callable[[], object]]
"""A function that logs the metrics of a step, and one that closes the logger."""
_Start = Callable[[Mapping[str, Any], Path, Mapping[str, object]], _Logger]
"""Starts a logger with its options, for the run in a folder with these settings."""


class Loggers:
    """All loggers of a run. One that fails is reported and dropped: the JSONL files have every row.

    Args:
        options: keyword arguments by the logger's name. Those of ``tensorboard`` are for ``SummaryWriter``, those of
            ``wandb`` and ``trackio`` for their ``init``, and those of ``module:function`` for a function of the user's.
            It is called with each row, a mapping from names to numbers, and its step.
        run: the run's folder.
        settings: the run's settings by dotted name, for trackers that show them.
        say: prints a line.

    Raises:
        ConfigError: a name is unknown, its package is not installed, or it can't be made with its options.
    """

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]],
        run: Path,
        settings: Mapping[str, object],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._loggers: dict[str, _Logger] = {}
        for name, start in find_loggers(options).items():
            try:
                self._loggers[name] = start(options[name], run, settings)
            except Exception as error:  # a tracker may fail in any way, such as without its key or its server
                raise ConfigError(f"logger {name!r} can't be made with log.to.{name}: {first_line(error)}") from error

    def log(self, row: Mapping[str, object], step: int, prefix: str = "") -> None:
        """Log the numbers in ``row``, their names preceded by ``prefix``."""
        numbers = {prefix + name: value for name, value in row.items() if isinstance(value, int | float)}
        for name, (log, _) in [*self._loggers.items()]:
            # A tracker's server or a user's function may fail in any way; hours of training must not end with it.
            try:
                log(numbers, step)
            except Exception as error:
                self._say(f"warning: the logger {name!r} failed and is dropped: {error!r}")
                del self._loggers[name]

    def close(self) -> None:
        """Close all loggers, which write their buffered rows."""
        for name, (_, close) in self._loggers.items():
            try:
                close()
            except Exception as error:
                self._say(f"warning: the logger {name!r} could not be closed: {error!r}")
        self._loggers.clear()


def check_loggers(names: Iterable[str]) -> None:
    """Check that the module of each logger is installed, without importing it.

    Raises:
        ConfigError: a name is unknown, or its package is not installed.
    """
    for name in names:
        module, colon, _ = name.partition(":")
        if not colon and name not in _TRACKERS:
            raise ConfigError(f"there is no logger {name!r}; {nearest(name, _TRACKERS)}")
        top = module.partition(".")[0]
        if not top or (top not in sys.modules and importlib.util.find_spec(top) is None):
            # Python looks in the current folder for `python -m agentrl`, not for an installed command.
            remedy = "install it, or put its folder into PYTHONPATH" if colon else f"pip install {name}"
            raise ConfigError(f"log.to names {name!r}, and there is no module {top!r} here: {remedy}")


def find_loggers(names: Iterable[str]) -> dict[str, _Start]:
    """Import the module of each logger, before a run folder is made.

    Raises:
        ConfigError: a name is unknown, or its package is not installed.
    """
    check_loggers(names)
    starts: dict[str, _Start] = {}
    for name in names:
        module, colon, function = name.partition(":")
        module, start = (module, _hook) if colon else _TRACKERS[name]
        try:
            imported = importlib.import_module(module)
            starts[name] = partial(start, getattr(imported, function) if colon else imported)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"log.to names {name!r}, which can't be imported: {error}") from error
    return starts


def _hook(function: Any, options: Mapping[str, Any], run: Path, settings: Mapping[str, object]) -> _Logger:
    return partial(function, **options), lambda: None


def _tensorboard(module: Any, options: Mapping[str, Any], run: Path, settings: Mapping[str, object]) -> _Logger:
    writer = module.SummaryWriter(**{"log_dir": str(run / "tensorboard"), **options})
    return lambda row, step: [writer.add_scalar(name, row[name], step) for name in row], writer.close


def _wandb(module: Any, options: Mapping[str, Any], run: Path, settings: Mapping[str, object]) -> _Logger:
    # A resumed run continues the tracker's run of the same id.
    same_run = {"dir": str(run), "id": hashlib.sha256(bytes(run.resolve())).hexdigest()[:16]}
    return _trackio(module, {**same_run, **options}, run, settings)


def _trackio(module: Any, options: Mapping[str, Any], run: Path, settings: Mapping[str, object]) -> _Logger:
    """Start trackio, which has the interface of wandb but finds the run to resume by its name."""
    about = {"project": "agentrl", "name": run.name, "config": dict(settings), "resume": "allow"}
    module.init(**{**about, **options})
    return lambda row, step: module.log(dict(row), step=step), module.finish


_TRACKERS = {
    "tensorboard": ("torch.utils.tensorboard.writer", _tensorboard),
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", _trackio),
}
"""Module and start of each tracker, by its name."""
