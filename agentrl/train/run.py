"""A whole run: warm start, evaluation, training steps, evaluation, report."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.config import Config, with_overrides
from agentrl.errors import ConfigError, EnvContractError, InfrastructureError, InvariantError, RunFolderError
from agentrl.models.lora import base_of
from agentrl.runs.assemble import adapt, adapters_base, with_dialect
from agentrl.runs.checkpoint import (
    load_optimizer,
    load_reference,
    load_state,
    load_unused,
    model_at,
    newest,
    prune,
    save_checkpoint,
)
from agentrl.runs.files import replace
from agentrl.runs.folder import RunFolder, changed, checkpoints, read_jsonl
from agentrl.runs.loggers import Loggers
from agentrl.runs.progress import Display
from agentrl.runs.records import write_episodes
from agentrl.runs.report import write_report
from agentrl.runs.settings import kept_settings, read_versions, settings_of, write_config
from agentrl.train.interrupts import Interrupts
from agentrl.train.live import Live, check_run
from agentrl.train.means import Means, live, saved
from agentrl.train.ranks import ranks
from agentrl.train.step import StepResult, Trainer, make_learner, schedule_note

_Work = Callable[["_Run"], Coroutine[object, object, None]]
_SILENT_STEPS = 5
"""Steps in a row without a learning signal after which a run warns."""
_SKIPPED_STEPS = 3
"""Steps in a row without a finite gradient after which a run stops."""
_NO_SIGNAL = 1e-6
"""Mean |advantage| that is rounding only: a baseline computed from equal rewards may miss them by as little."""


def train(config: Config, display: Display, *, numbered: bool = False, sft_only: bool = False) -> Path:
    """Do a whole run in a new run folder.

    Args:
        config: the run's settings.
        display: shows progress.
        numbered: if the run's name is taken, use the next free ``name-2``, ``name-3`` …
        sft_only: stop after the warm start.

    Returns:
        The run folder.

    Raises:
        UsageError: something the config names is not there; nothing was written.
    """
    # A run's path is replaced with that of its last checkpoint, which may be another one later: the settings written
    # below then say which weights this run began with.
    config = with_overrides(config, [f"model.path={json.dumps(model_at(config.model.path, display.say))}"])
    config = with_dialect(config)
    sources = check_run(config)
    if sft_only and config.sft.steps == 0:
        raise ConfigError("sft.steps is 0, so there is no warm start: set it, for example sft.steps=200")
    means = live(config, sources)
    # The folder comes last, so that whatever fails above leaves none behind.
    made_by = {"dialect": sources.train.label, **means.made_by}
    with RunFolder.create(config, numbered=numbered, made_by=made_by) as folder:
        display.say(f"run folder: {folder.path}")
        return _finish(config, display, folder, means, lambda run: run.go(sft_only=sft_only))


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
    begun_with = model_at(config.model.path, display.say)
    # No gold player plays: the settings that are written say so.
    config = with_dialect(with_overrides(config, [f"model.path={json.dumps(begun_with)}", "sft.steps=0"]))
    means = saved(files, config)
    label = ", ".join(origin.dialect for origin in means.rollouts.origins.values())
    with RunFolder.create(config, numbered=numbered, made_by={"dialect": label, **means.made_by}) as folder:
        display.say(f"run folder: {folder.path}")
        return _finish(config, display, folder, means, lambda run: run.go())


def resume(path: Path, display: Display, overrides: Sequence[str] = ()) -> Path:
    """Resume a run from its last whole checkpoint.

    Nothing in its folder is changed before everything that is needed has been read.

    Args:
        path: the run's folder.
        display: shows progress.
        overrides: ``section.key=value`` each, of settings that may change in a resumed run; its folder records them.

    Raises:
        RunFolderError: there is no run at ``path``, it is in use, or what it needs to go on is damaged or gone.
        ConfigError: a setting can't be changed any more, or not so.
    """
    folder, before = RunFolder.resume(path)
    with folder:
        config = changed(before, overrides, path)
        last, broken = newest(path, display.say)
        state: dict[str, Any] = load_state(last) if last else {"step": -1}
        # config.toml is a text file that people edit; the checkpoint holds the settings that the weights came from.
        then: dict[str, Any] = state.get("settings", {})
        if other := [name for name, value in kept_settings(before).items() if value != then.get(name, value)]:
            raise RunFolderError(
                f"{path / 'config.toml'} is damaged, or was changed in what a run keeps: it was trained with "
                f"{other[0]}={then[other[0]]!r}; correct that, or put a copy of the file back"
            )
        kept = folder.kept(state["step"], state.get("records", {}))
        begun_with = last and Path(base_of(last) or last)
        files = [Path(file) for file in state.get("episodes", ())]
        means = saved(files, config, begun_with) if files else live(config, check_run(config), begun_with)
        versions = read_versions(path)
        told = f"going on with {path} after step {state['step']}"
        display.say(told if last else f"beginning {path} again: no checkpoint yet")
        if config.optim != before.optim and config.optim.schedule != "constant" and last:
            display.say(schedule_note(config, state))
        if not (path / "episodes").is_dir():
            display.say(f"the folder episodes of {path} is gone, and with it what was played: put a copy of it back")

        def begin() -> None:
            (path / "episodes").mkdir(exist_ok=True)
            # Under their names new checkpoints of the same steps will be saved.
            for place in [one for one in broken if one.exists() or one.is_symlink()]:
                place.rename(place.with_name(f"damaged-{place.name}-{time.time_ns()}"))
            prune(path, config.save.keep)
            made_by = versions | means.made_by
            if config != before or made_by != versions:
                write_config(path, config, made_by)
            for file, data in kept.items():
                replace(path / file, data)

        return _finish(config, display, folder, means, lambda run: run.go(last, begin))


def _finish(config: Config, display: Display, folder: RunFolder, means: Means, work: _Work) -> Path:
    if means.decode_step.startswith("PyTorch, since"):
        display.say(f"tokens are sampled by {means.decode_step}")
    with Interrupts() as interrupts, ranks(config), ExitStack() as stack:
        run = _Run(config, display, folder, means, stack)
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


class _Run:
    """State of a run between its phases."""

    def __init__(self, config: Config, display: Display, folder: RunFolder, means: Means, stack: ExitStack) -> None:
        self._config, self._display, self._folder = config, display, folder
        self._policy, self._live = means.policy, means.live
        if means.live:
            stack.callback(means.live.close)
        self._loggers = Loggers(config.log.to, folder.path, settings_of(config), display.say)
        stack.callback(self._loggers.close)
        self._rollouts = means.rollouts
        self._trainer: Trainer
        self._base = adapters_base(config, folder.checkpoint(0))
        self._written = partial(folder.written, say=display.say)
        self.done = 0
        self._whole_at: int | None = None
        self._began = time.perf_counter()

    async def go(
        self, last: Path | None = None, begin: Callable[[], None] = lambda: None, *, sft_only: bool = False
    ) -> None:
        """Run from the warm start, or from the checkpoint ``last``, to the end.

        ``begin`` prepares the folder of a resumed run, once everything has been read.
        """
        lora, saved = self._config.lora.rank > 0, last if last and base_of(last) else None
        state, unused = (load_state(last), load_unused(last)) if last else ({}, [])
        if last is not None:
            self._learn(saved)
            if saved is not None or not lora:
                load_optimizer(last, self._trainer.learner.load)
            if self._config.algo.kl_coef and not lora:
                self._trainer.learner.keep_reference(load_reference(self._folder, self._config.model.device))
        await self._written(begin)
        # The clock of a resumed run goes on where its last row was written.
        rows = [row for file in ("metrics.jsonl", "evals.jsonl") for row in read_jsonl(self._folder.path / file)]
        self._began -= max((row.get("seconds_run", 0.0) for row in rows), default=0.0)
        if last is not None:
            self._trainer.updates = int(state["updates"])
            # A checkpoint that was written before there was a budget of tokens is of a run without one.
            self._trainer.sampled_tokens = int(state.get("sampled_tokens", 0))
            self._trainer.skipped = int(state.get("skipped", 0))
            # The engine was made from the same weights, but its completions are to carry this step's version.
            self._finished(int(state["step"]))
            self._trainer.rollouts.restore(state, unused)
            await self._trainer.sync(self.done)
            if self._ended(self.done) and self._live and not sft_only:
                self._display.say("it has ended: raise optim.steps or optim.max_sampled_tokens to train it longer")
        else:
            if self._live and self._config.sft.steps:
                await self._live.warm_start(self._display, self._elapsed)
            # Adapters need their base: where it is nowhere else yet, the first checkpoint holds it, whole.
            if lora and self._base == str(self._folder.checkpoint(0).resolve()):
                self._learn(whole=True)
                self._finished(0)
                await self._written(self.save)
                self._trainer.learner.close()
            self._learn()
            self._finished(0)
            if self._config.algo.kl_coef and not lora:
                self._trainer.learner.keep_reference()
            await self._trainer.sync(self.done)
            await self._written(self.save)
        # On resumption too: the run may have been stopped between its checkpoint and its evaluation.
        await self._evaluate_if_due()
        if not sft_only:
            await self._train()

    def _learn(self, saved: Path | None = None, *, whole: bool = False) -> None:
        """Begin to train adapters where the run has any, those of ``saved`` or fresh ones, or the whole model."""
        if self._config.lora.rank and not whole:
            adapt(self._config, self._policy.model, base=self._base, saved=saved)
        self._trainer = Trainer(self._config, make_learner(self._config, self._policy.model), self._rollouts)

    async def _train(self) -> None:
        steps, silent = self._config.optim.steps, 0
        with self._display.phase("training", steps) as bar:
            for _ in range(self.done):
                bar.advance()
            while not self._ended(self.done):
                number = self.done + 1
                result = await self._trainer.step(number, partial(self._learned, number))
                if self._live is None:
                    apart = result.metrics["logp_diff_max"]
                    self._display.say(f"step {number}: the model and its episodes are at most {apart:.0e} nats apart")
                self._finished(number)
                bar.expect(self._likely_steps())
                bar.advance(_note(result.metrics))
                silent = silent + 1 if result.metrics["advantage_abs"] < _NO_SIGNAL else 0
                if silent == _SILENT_STEPS:
                    self._display.say(
                        f"warning: the last {silent} steps taught nothing: all members of each group had the same "
                        f"reward or were masked, on average {result.metrics['reward_mean']:.2f}; try a longer warm "
                        "start, easier or harder tasks, or a larger rollout.group_size"
                    )
                # Saved before it is evaluated, which takes long: a stop meanwhile loses no training.
                if self._due(self._config.save.every):
                    await self._written(self.save)
                await self._evaluate_if_due()

    async def _learned(self, number: int, result: StepResult) -> None:
        # The row first: a checkpoint seals the records, and must find there all steps up to its own.
        await self._record(number, result)
        # Whoever stops the run from here on loses nothing. But the bytes of a run that plays ahead are those of an
        # undisturbed one only from where all of the next groups were played, by the weights before these.
        if not (self._config.run.deterministic and self._config.rollout.overlap == "lag"):
            self._finished(number)

    def _finished(self, step: int) -> None:
        """Note that the weights are those of ``step``, until the next update begins."""
        self.done, self._whole_at = step, self._trainer.updates

    def _ended(self, step: int) -> bool:
        """Return True if training ends with ``step``, the last one that the trainer has done."""
        optim = self._config.optim
        spent = 0 < optim.max_sampled_tokens <= self._trainer.sampled_tokens
        return step >= min(optim.steps, self._trainer.rollouts.steps) or spent

    def _likely_steps(self) -> int:
        """Estimate the steps of the whole training, if each goes on to sample as many tokens as so far."""
        optim = self._config.optim
        last = int(min(optim.steps, self._trainer.rollouts.steps))
        if self._ended(self.done):
            return self.done
        if optim.max_sampled_tokens == 0:
            return last
        return min(last, math.ceil(self.done * optim.max_sampled_tokens / self._trainer.sampled_tokens))

    def _due(self, every: int) -> bool:
        return self._ended(self.done) or (every > 0 and self.done % every == 0)

    async def _evaluate_if_due(self) -> None:
        if self._live is None or (self.done > 0 and not self._due(self._config.eval.every)):
            return
        # A resumed run may have evaluated this step before it was stopped.
        rows = read_jsonl(self._folder.path / "evals.jsonl")
        there = {row.get("env", "") for row in rows if row["step"] == self.done}
        if missing := [name for name in self._live.names if name not in there]:
            await self._evaluate(self._live, missing)

    async def _record(self, number: int, result: StepResult) -> None:
        row = {**result.metrics, "seconds_run": time.perf_counter() - self._began}
        await self._written(partial(self._folder.append, "metrics.jsonl", row))
        self._loggers.log(row, number)
        stuck = self._trainer.skipped >= _SKIPPED_STEPS
        if number == 1 or self._ended(number) or stuck or number % self._config.save.episodes_every == 0:
            path, tokenizer = self._folder.episodes(number), self._policy.tokenizer
            told = self._trainer.rollouts.origins, result.advantages, result.record.by_episode()
            await self._written(partial(write_episodes, path, result.trajectories, tokenizer, *told))
        if stuck:
            raise InvariantError(
                f"no gradient of the last {_SKIPPED_STEPS} steps was finite, and none was followed: the weights are as "
                f"before; look for the cause in the episodes of {self._folder.episodes(number)}"
            )

    async def _evaluate(self, live: Live, names: Sequence[str]) -> None:
        config = self._config
        if config.optim.average:
            with self._trainer.learner.averaged():
                await self._trainer.sync(-1 - self.done)  # a version names one set of weights
        async for name, result in live.evaluate(self.done, names, self._display):
            row = {"step": self.done, "split": config.eval.split, "seconds_run": time.perf_counter() - self._began}
            row |= ({"env": name} if name else {}) | result.row()
            await self._written(partial(self._folder.append, "evals.jsonl", row))
            self._loggers.log(result.row(), self.done, f"env/{name}/eval_" if name else "eval_")
            self._display.say(f"step {self.done} ({self._elapsed()}){name and f', {name}'}: {result}")
        if config.optim.average:
            await self._trainer.sync(self.done)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one or the next update has begun."""
        if self._whole_at is None or self._whole_at != self._trainer.updates:
            return
        learner, rollouts = self._trainer.learner, self._rollouts
        state: dict[str, object] = {
            "step": self.done,
            "updates": self._trainer.updates,
            "sampled_tokens": self._trainer.sampled_tokens,
            "skipped": self._trainer.skipped,
            "settings": kept_settings(self._config),
            "records": self._folder.seal(),
            **rollouts.state(),
        }
        # The checkpoint's model is the one that evaluation measures.
        with learner.averaged():
            save_checkpoint(
                self._folder.checkpoint(self.done),
                self._policy.model,
                self._policy.tokenizer,
                weights=learner.state_dict(),
                optimizer=learner.save,
                state=state,
                unused=rollouts.unused(),
                origins=rollouts.origins,
            )
            prune(self._folder.path, self._config.save.keep)

    def _elapsed(self) -> str:
        seconds = int(time.perf_counter() - self._began)
        return f"{seconds // 60}:{seconds % 60:02d} min"


def _note(metrics: Mapping[str, float]) -> str:
    return (
        f"reward {metrics['reward_mean']:.2f}, cut turns {metrics['cut_turns']:.0f}, tokens clipped "
        f"{metrics.get('clip_fraction', 0.0):.1%}, engine and trainer {metrics['logp_diff_max']:.0e} apart"
    )
