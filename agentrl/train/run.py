"""Start a run, resume it, and save it where it is stopped."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentrl.config import Config
from agentrl.errors import ConfigError, EnvContractError, InfrastructureError, RunFolderError
from agentrl.models.load import cast_copy
from agentrl.models.lora import base_of
from agentrl.models.native import name_of
from agentrl.models.slices import path_of
from agentrl.runs.assemble import assemble, load_policy, with_dialect
from agentrl.runs.checkpoint import load_state, model_at, newest, prune
from agentrl.runs.files import replace
from agentrl.runs.folder import RunFolder, changed, checkpoints
from agentrl.runs.loggers import find_loggers
from agentrl.runs.progress import Display
from agentrl.runs.report import write_report
from agentrl.runs.settings import kept_settings, read_versions, write_config
from agentrl.train.interrupts import Interrupts
from agentrl.train.live import Live, Sources, check_run
from agentrl.train.loop import Run, RunParts
from agentrl.train.ranks import ranks
from agentrl.train.saved import SavedEpisodes
from agentrl.train.step import check_training_config

_Work = Callable[[Run], Coroutine[object, object, None]]


def train(config: Config, display: Display, *, numbered: bool = False) -> Path:
    """Do a whole run in a new run folder.

    Args:
        config: the run's settings.
        display: shows progress.
        numbered: if the run's name is taken, use the next free ``name-2``, ``name-3`` …

    Returns:
        The run folder.

    Raises:
        UsageError: something the config names is not there; nothing was written.
    """
    config = settled(config, display)
    sources = check_run(config)
    parts = _assemble_live(config, sources, display)
    # The folder comes last, so that whatever fails above leaves none behind.
    made_by = {"dialect": sources.train.label, **parts.made_by}
    with RunFolder.create(config, numbered=numbered, made_by=made_by) as folder:
        display.say(f"run folder: {folder.path}")
        return _supervise(config, display, folder, parts, lambda run: run.begin())


def settled(config: Config, display: Display) -> Config:
    """Return the settings as a new run writes them: with the dialect of its model and the path of its first weights.

    Another run's path becomes that of its last checkpoint, which may be another one later.

    Raises:
        UsageError: the model is not there.
    """
    return with_dialect(config.updated(model={"path": model_at(config.model.path, display.say)}))


def train_on(files: Sequence[Path], config: Config, display: Display, *, numbered: bool = False) -> Path:
    """Do the updates of a run on saved episodes, each file a step, in a new run folder; nothing is played.

    Args:
        files: of episodes, as ``agentrl.runs.records`` writes them.
        config: the run's settings, as ``agentrl.train.saved.SavedEpisodes`` wants them.
        display: shows progress.
        numbered: as of :func:`train`.

    Returns:
        The run folder.

    Raises:
        UsageError: the episodes do not fit the settings or the model; nothing was written.
        TrajectoryError: a file holds anything but episodes; nothing was written.
    """
    if not config.model.path:
        raise ConfigError("saved episodes are of a model's own tokens: set model.path to the one that sampled them")
    # There is no warm start, since no gold player plays: the written settings must not name one.
    config = settled(config.updated(sft={"steps": 0}), display)
    parts = _assemble_saved(files, config)
    label = ", ".join(origin.dialect for origin in parts.rollouts.origins.values())
    with RunFolder.create(config, numbered=numbered, made_by={"dialect": label, **parts.made_by}) as folder:
        display.say(f"run folder: {folder.path}")
        return _supervise(config, display, folder, parts, lambda run: run.begin())


def resume(path: Path, display: Display, overrides: Sequence[str] = ()) -> Path:
    """Resume a run from its last complete checkpoint.

    Nothing in its folder is changed before everything that is needed has been read.

    Args:
        path: the run's folder.
        display: shows progress.
        overrides: ``section.key=value`` each, of settings that may change in a resumed run; its folder records them.

    Returns:
        The run folder.

    Raises:
        RunFolderError: there is no run at ``path``, it is in use, or something that the run needs is damaged or gone.
        ConfigError: a setting can't be changed any more, or not so.
    """
    folder, before = RunFolder.resume(path)
    with folder:
        config = changed(before, overrides, path)
        last, broken = newest(path, display.say)
        # A run that was stopped before its first checkpoint has written no row either, and begins again.
        state: dict[str, Any] = load_state(last) if last else {"step": -1, "records": {}}
        if last:
            _check_unchanged(before, state["settings"], path)
        records = folder.rows_until(state["step"], state["records"])
        begun_with = last and Path(base_of(last) or last)
        files = [Path(file) for file in state.get("episodes", ())]
        if files:
            parts = _assemble_saved(files, config, begun_with)
        else:
            parts = _assemble_live(config, check_run(config), display, begun_with)
        versions = read_versions(path)
        resumed = f"going on with {path} after step {state['step']}"
        display.say(resumed if last else f"beginning {path} again: no checkpoint yet")
        if not (path / "episodes").is_dir():
            display.say(f"the folder episodes of {path} is gone, and with it what was played: put a copy of it back")

        def prepare() -> None:
            (path / "episodes").mkdir(exist_ok=True)
            # Under their names new checkpoints of the same steps will be saved.
            for damaged in [checkpoint for checkpoint in broken if os.path.lexists(checkpoint)]:
                damaged.rename(damaged.with_name(f"damaged-{damaged.name}-{time.time_ns()}"))
            prune(path, config.save.keep)
            made_by = versions | parts.made_by
            if config != before or made_by != versions:
                write_config(path, config, made_by)
            for file, data in records.items():
                replace(path / file, data)

        def work(run: Run) -> Coroutine[object, object, None]:
            return run.resume(last, prepare) if last else run.begin(prepare)

        return _supervise(config, display, folder, parts, work)


def _assemble_live(config: Config, sources: Sources, display: Display, path: Path | None = None) -> RunParts:
    """Assemble a run that plays its episodes; the model is ``model.path``, or the checkpoint at ``path``."""
    with display.doing("loading the model"):
        parts = assemble(config, sources.train, path, fleet=True)
    live, step = Live(config, parts, sources, display.say), getattr(parts.engine, "step", "")
    made_by = ({"decode_step": step} if step else {}) | _attention_of(config)
    return RunParts(policy=parts, rollouts=live.rollouts, live=live, made_by=made_by)


def _assemble_saved(files: Sequence[Path], config: Config, path: Path | None = None) -> RunParts:
    """Assemble a run on saved episodes; the model is ``model.path``, or the checkpoint at ``path``.

    Raises:
        UsageError: the episodes do not fit the settings or the model.
        TrajectoryError: a file holds anything but episodes.
    """
    check_training_config(config)
    find_loggers(config.log.to)
    rollouts = SavedEpisodes(files, config)
    policy = load_policy(config, path=path)
    rollouts.check_fit(policy)
    if path_of(policy.model):  # ranks read its weights; a copy is checked, as that of an engine is
        cast_copy(policy.model, getattr(torch, config.model.dtype), config.model.device)
    return RunParts(policy=policy, rollouts=rollouts, made_by=_attention_of(config))


def _attention_of(config: Config) -> dict[str, str]:
    return {"update": name_of(torch.device(config.model.device), getattr(torch, config.model.dtype))}


def _check_unchanged(config: Config, trained_with: Mapping[str, Any], path: Path) -> None:
    """Compare the folder's settings with those of the checkpoint, since config.toml is a file that people edit.

    Raises:
        RunFolderError: a setting that can't change in a run has changed.
    """
    if other := [name for name, value in kept_settings(config).items() if value != trained_with.get(name, value)]:
        raise RunFolderError(
            f"{path / 'config.toml'} is damaged, or was changed in what a run keeps: it was trained with "
            f"{other[0]}={trained_with[other[0]]!r}; correct that, or put a copy of the file back"
        )


def _supervise(config: Config, display: Display, folder: RunFolder, parts: RunParts, work: _Work) -> Path:
    """Do the work of a run; if it is stopped or loses its infrastructure, save a checkpoint. Write its report."""
    if (step := parts.made_by.get("decode_step", "")).startswith("PyTorch, since"):
        display.say(f"tokens are sampled by {step}")
    if parts.policy.whole:
        display.say(f"rank 0 holds all weights as the run starts, since {config.model.path} {parts.policy.whole}")
    with Interrupts() as interrupts, ranks(config), ExitStack() as stack:
        run = Run(config, display, folder, parts, stack)
        try:
            asyncio.run(interrupts.run(partial(work, run)))
        # Inside the stack: the engine and the environments are closed only after the checkpoint.
        except (KeyboardInterrupt, asyncio.CancelledError, InfrastructureError, EnvContractError) as error:
            interrupts.hold()
            try:
                with folder.writing():
                    run.save()
            except (InfrastructureError, RunFolderError) as fault:  # it must not hide how the run ended
                display.say(str(fault))
            saved = checkpoints(folder.path)
            left = f"stopped, {saved[-1].name} is saved" if saved else "stopped before there was a checkpoint"
            left += f"; go on with: agentrl train --resume {folder.path}"
            if isinstance(error, InfrastructureError | EnvContractError):
                raise type(error)(f"{error}; {left}") from error
            raise interrupts.kind(left) from None
        finally:
            try:
                if not folder.was_refused(sys.exception()):
                    display.say(f"report: {write_report(folder.path).resolve()}")
            except RunFolderError as error:  # it must not hide how the run ended
                display.say(str(error))
    return folder.path
