"""Metrics on their way to trackers: published ones where they are installed, and functions of one's own."""

import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from agentrl.errors import ConfigError, UsageError
from agentrl.runs.loggers import Loggers, find_loggers

NUMBERS = {"step": 1, "reward_mean": 0.5}
ROW = {**NUMBERS, "split": "test"}


def started(tmp_path: Path, **options: dict[str, Any]) -> tuple[Loggers, list[str]]:
    lines: list[str] = []
    return Loggers(options, tmp_path, {"optim.lr": 0.1}, lines.append), lines


def test_tensorboard_reads_what_was_logged_before_and_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (1, 2):
        loggers, lines = started(tmp_path, tensorboard={})
        loggers.log(ROW, step)
        loggers.log({"success": step / 4}, step, "eval_")
        loggers.close()
        assert not lines
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval_success", "reward_mean", "step"], "texts are no numbers"
    assert [(event.step, event.value) for event in events.Scalars("eval_success")] == [(1, 0.25), (2, 0.5)]


@pytest.mark.slow
def test_wandb_keeps_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    loggers, lines = started(tmp_path, wandb={"mode": "offline", "settings": {"silent": True}})
    loggers.log(ROW, 1)
    loggers.close()
    assert not lines
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # W&B's own process writes the file, and on a busy machine it may do so only after the run's end.
    while b"reward_mean" not in file.read_bytes():
        time.sleep(0.05)


def test_a_tracker_is_told_of_the_run_and_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", tracker := Mock())
    loggers, _ = started(tmp_path, trackio={"project": "tools"})
    loggers.log(ROW, 1)
    loggers.close()
    about = {"project": "tools", "name": tmp_path.name, "config": {"optim.lr": 0.1}, "resume": "allow"}
    assert tracker.mock_calls == [call.init(**about), call.log(NUMBERS, step=1), call.finish()]


def test_a_function_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, fail = Mock(), Mock(side_effect=ConnectionError("no server"))
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(keep=keep, fail=fail))
    loggers, lines = started(tmp_path, **{"mine:fail": {}, "mine:keep": {"tag": "a"}})
    loggers.log(ROW, 1)
    loggers.log(ROW, 2)
    loggers.close()
    assert keep.mock_calls == [call(NUMBERS, 1, tag="a"), call(NUMBERS, 2, tag="a")]
    assert lines == ["warning: the logger 'mine:fail' failed and is dropped: ConnectionError('no server')"]


def test_a_function_begins_with_its_folder_and_settings_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Mock()
    begun = list[tuple[Any, ...]]()

    def begin(folder: Path, config: Any, *, tag: str = "none") -> Mock | None:
        begun.append((folder, config, tag))
        return log if tag == "a" else None

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(begin=begin))
    loggers, lines = started(tmp_path, **{"mine:begin": {"tag": "a"}})
    loggers.log(ROW, 1)
    loggers.close()
    assert begun == [(tmp_path, {"optim.lr": 0.1}, "a")] and not lines
    assert log.mock_calls == [call(NUMBERS, 1), call.close()]
    for options, why in (({}, "must return a function"), ({"tga": 1}, "unexpected keyword argument 'tga'")):
        with pytest.raises(ConfigError, match=f"logger 'mine:begin' can't be made with log.to.mine:begin: .*{why}"):
            started(tmp_path, **{"mine:begin": options})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "no logger is called 'tensorbord'; did you mean 'tensorboard'?"),
        ("no_such_module:log", "needs no_such_module: install it, or put its folder into PYTHONPATH"),
        ("math:sqr", "logger 'math:sqr' is not in math; did you mean 'sqrt'?"),
        (":log", "logger ':log' names nothing of your own: write module:name"),
        ("math:pi", "logger 'math:pi' is of type float, which can't be called: name a function or a class"),
    ],
)
def test_what_is_no_logger_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        find_loggers([name])


def test_a_tracker_that_can_not_be_started_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*, project: str, name: str, config: object, resume: str) -> None:
        raise LookupError("no key\nlog in")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    for options, why in (({}, "LookupError no key$"), ({"projet": "x"}, ".*'projet'")):
        with pytest.raises(ConfigError, match=rf"logger 'trackio' can't be made with log.to.trackio: {why}"):
            started(tmp_path, trackio=options)
