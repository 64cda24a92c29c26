"""Loggers: rows of metrics go to JSONL files always, and from here to the trackers that a run asks for as well."""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, first_line
from agentrl.named import check_name, installed, resolve

Row = Mapping[str, float]
Log = Callable[[Row, int], object]
"""Logs the numbers of a row by their names, and its step; ``close``, where it has one, is called at the run's end."""


class Loggers:
    """All loggers of a run. One that fails is reported and dropped: the JSONL files have every row.

    Args:
        options: keyword arguments by the logger's name. Those of ``tensorboard`` are for ``SummaryWriter``, those of
            ``wandb`` and ``trackio`` for their ``init``, and those of ``module:name`` for a function of the user's.
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
        self._loggers: dict[str, Log] = {}
        for name, function in find_loggers(options).items():
            try:
                self._loggers[name] = _begun(function, run, settings, options[name])
            except Exception as error:  # a tracker may fail in any way, such as without its key or its server
                raise ConfigError(f"logger {name!r} can't be made with log.to.{name}: {first_line(error)}") from error

    def log(self, row: Mapping[str, object], step: int, prefix: str = "") -> None:
        """Log the numbers in ``row``, their names preceded by ``prefix``."""
        numbers = {prefix + name: value for name, value in row.items() if isinstance(value, int | float)}
        for name, log in [*self._loggers.items()]:
            # A tracker's server or a user's function may fail in any way; hours of training must not end with it.
            try:
                log(numbers, step)
            except Exception as error:
                self._say(f"warning: the logger {name!r} failed and is dropped: {error!r}")
                del self._loggers[name]

    def close(self) -> None:
        """Close all loggers, which write their buffered rows."""
        for name, log in self._loggers.items():
            try:
                if hasattr(log, "close"):
                    log.close()  # pyright: ignore[reportFunctionMemberAccess]
            except Exception as error:
                self._say(f"warning: the logger {name!r} could not be closed: {error!r}")
        self._loggers.clear()


def check_loggers(names: Iterable[str]) -> None:
    """Check that the module of each logger is installed, without importing it.

    Raises:
        UnknownNameError: there is no such logger.
        ConfigError: its package is not installed.
    """
    for name in names:
        check_name("logger", _TRACKERS, name)
        if name in _TRACKERS and not installed(name):
            raise ConfigError(f"logger {name!r} needs {name}: pip install {name}")


def find_loggers(names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Import the function of each logger, before a run folder is made.

    Raises:
        UnknownNameError: there is no such logger.
        ConfigError: its package is not installed, or it can't be imported or called.
    """
    check_loggers(names)
    return {name: resolve("logger", _TRACKERS, name) for name in names}


def _begun(function: Callable[..., Any], run: Path, settings: Mapping[str, object], options: Mapping[str, Any]) -> Log:
    # A function that wants no folder has nothing to begin: it is called with each row.
    if "folder" not in inspect.signature(function).parameters:
        return partial(function, **options)
    log = function(folder=run, config=settings, **options)
    if not callable(log):
        raise TypeError(f"it must return a function of a row's numbers and its step, and not {log!r}")
    return log


@dataclass(frozen=True, slots=True)
class _Tracker:
    """A tracker that has begun."""

    log: Log
    close: Callable[[], object]

    def __call__(self, numbers: Row, step: int) -> None:
        self.log(numbers, step)


def _tensorboard(folder: Path, config: Mapping[str, object], **options: Any) -> Log:
    module: Any = importlib.import_module("torch.utils.tensorboard.writer")
    writer = module.SummaryWriter(**{"log_dir": str(folder / "tensorboard"), **options})
    return _Tracker(lambda row, step: [writer.add_scalar(name, row[name], step) for name in row], writer.close)


def _wandb(folder: Path, config: Mapping[str, object], **options: Any) -> Log:
    # A resumed run continues the tracker's run of the same id.
    same_run = {"dir": str(folder), "id": hashlib.sha256(bytes(folder.resolve())).hexdigest()[:16]}
    return _trackio(folder, config, tracker="wandb", **{**same_run, **options})


def _trackio(folder: Path, config: Mapping[str, object], tracker: str = "trackio", **options: Any) -> Log:
    """Start trackio, which has the interface of wandb but finds the run to resume by its name."""
    module: Any = importlib.import_module(tracker)
    about = {"project": "agentrl", "name": folder.name, "config": dict(config), "resume": "allow"}
    module.init(**{**about, **options})
    return _Tracker(lambda row, step: module.log(dict(row), step=step), module.finish)


_TRACKERS: Mapping[str, Callable[..., Log]] = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
"""What begins each tracker, by its name: called once with the run's folder, its settings and the tracker's options."""
