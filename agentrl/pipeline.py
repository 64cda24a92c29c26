"""A whole run: warm start, evaluation, training steps, evaluation, report."""

import asyncio
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agentrl.assemble import Parts, assemble, dialect_label, gold_turns, make_collector, with_dialect
from agentrl.checkpoint import load_optimizer, load_state, model_at, newest, save_checkpoint
from agentrl.config import Config, with_overrides
from agentrl.display import Display
from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError, RunFolderError, Terminated
from agentrl.evaluate import evaluate, plan
from agentrl.records import write_episodes
from agentrl.registry import make
from agentrl.runfolder import (
    RunFolder,
    changed,
    checkpoints,
    kept_settings,
    read_dialect,
    read_jsonl,
    replace,
    write_config,
)
from agentrl.sft import SftStep, oracle_episodes, warm_start
from agentrl.trainer import StepResult, Trainer, check_training_config, learning_rate
from agentrl.viewer import write_report

_Work = Callable[["_Run"], Coroutine[object, object, None]]
_SILENT_STEPS = 5
"""After how many steps in a row without a signal a run says so."""
_NO_SIGNAL = 1e-6
"""Mean |advantage| that rounding explains: a baseline of equal rewards differs from them by as little."""


def train(config: Config, display: Display, *, numbered: bool = False, sft_only: bool = False) -> Path:
    """Do a whole run in a new folder.

    Args:
        config: the run's settings.
        display: shows progress.
        numbered: where the run's name is taken, take the next free ``name-2``, ``name-3`` …
        sft_only: stop after the warm start.

    Returns:
        The run folder.

    Raises:
        UsageError: something the config names is not there; nothing was written.
    """
    # The checkpoint, and not the run, whose last one may be another one later.
    config = with_overrides(config, [f"model.path={json.dumps(model_at(config.model.path, display.say))}"])
    config = with_dialect(config)
    check_run(config)
    if sft_only and config.sft.steps == 0:
        raise ConfigError("sft.steps is 0, so there is no warm start: set it, for example sft.steps=200")
    parts = assemble(config)
    with RunFolder.create(config, numbered=numbered, dialect=dialect_label(config)) as folder:
        display.say(f"run folder: {folder.path}")
        return _finish(config, display, folder, parts, lambda run: run.go(sft_only=sft_only))


def resume(path: Path, display: Display, overrides: Sequence[str] = ()) -> Path:
    """Go on with a run from its last whole checkpoint.

    Nothing in its folder is changed before all that is needed has been read.

    Args:
        path: the run's folder.
        display: shows progress.
        overrides: ``section.key=value`` each, of what may change while a run goes on; its folder records them.

    Raises:
        RunFolderError: there is no run at ``path``, it is in use, or what it needs to go on is damaged or gone.
        ConfigError: a setting can't be changed any more, or not so.
    """
    folder, before = RunFolder.resume(path)
    with folder:
        config = changed(before, overrides, path)
        if config != before:
            check_run(config)
        last, broken = newest(path, display.say)
        state: dict[str, Any] = load_state(last) if last else {"step": -1}
        then: dict[str, Any] = state.get("settings", {})
        if other := [name for name, value in kept_settings(before).items() if value != then.get(name, value)]:
            raise RunFolderError(
                f"{path / 'config.toml'} is damaged, or was changed in what a run keeps: it was trained with "
                f"{other[0]}={then[other[0]]!r}; correct that, or put a copy of the file back"
            )
        kept = folder.kept(state["step"], state.get("records", {}))
        parts = assemble(config, last)
        told = f"going on with {path} after step {state['step']}"
        display.say(told if last else f"beginning {path} again: no checkpoint yet")
        if config.optim != before.optim and config.optim.schedule == "linear" and last:
            display.say(_new_schedule(config, state))
        if not (path / "episodes").is_dir():
            display.say(f"the folder episodes of {path} is gone, and with it what was played: put a copy of it back")

        def begin() -> None:
            with folder.writing():
                (path / "episodes").mkdir(exist_ok=True)
                for place in broken:
                    place.rename(place.with_name(f"damaged-{place.name}-{time.time_ns()}"))
                if config != before:
                    write_config(path, config, read_dialect(path))
                for file, data in kept.items():
                    replace(path / file, data)

        return _finish(config, display, folder, parts, lambda run: run.go(last, begin))


def _new_schedule(config: Config, state: Mapping[str, Any]) -> str:
    """What the new end of a run makes of a learning rate that falls to 0 there."""
    budget = config.optim.max_sampled_tokens
    spent = state.get("sampled_tokens", 0) / budget if budget else 0.0
    rate = learning_rate(config.optim, state["updates"] + 1, spent)
    return f"optim.schedule is linear: the learning rate goes on at {rate:.2g}, to fall to 0 at the new end"


def check_run(config: Config) -> None:
    """Refuse what a run can't do, before a model is loaded or anything is written.

    Raises:
        UsageError: an option of the algorithm, the environment or one of its splits is not there; or sampling would
            bias every ratio; or the warm start has no gold player to learn from.
    """
    check_training_config(config)
    for split in ("train", config.eval.split):
        env = make(config.env.id, **{**config.env.args, "split": split})
        env.close()
        if split == "train" and config.sft.steps:
            gold_turns(env, env.task_set[0], "the warm start learns", "set sft.steps=0")


def _finish(config: Config, display: Display, folder: RunFolder, parts: Parts, work: _Work) -> Path:
    with _Interrupts() as interrupts, ExitStack() as stack:
        run: _Run | None = None
        try:
            run = _Run(config, display, folder, parts, stack)
            asyncio.run(interrupts.run(partial(work, run)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            interrupts.hold()
            if run is not None:
                run.save()
            saved = checkpoints(folder.path)
            left = f"stopped, {saved[-1].name} is saved" if saved else "stopped before there was a checkpoint"
            raise interrupts.kind(f"{left}; go on with: agentrl train --resume {folder.path}") from None
        finally:
            try:
                display.say(f"report: {write_report(folder.path).resolve()}")
            except RunFolderError as error:  # it must not hide how the run ended
                display.say(str(error))
    return folder.path


class _Interrupts:
    """Ctrl-C or SIGTERM during a run: the first cancels the work, further ones wait for what is left to do.

    From the beginning it raises nothing by itself, so that no line is broken off. Python can set signals in its main
    thread only; elsewhere nobody presses Ctrl-C.
    """

    def __enter__(self) -> "_Interrupts":
        self._here = threading.current_thread() is threading.main_thread()
        self.kind: type[KeyboardInterrupt] = KeyboardInterrupt
        self._pressed = False
        self._cancel: Callable[[], object] = lambda: None
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if self._here:
            for number in self._before:
                signal.signal(number, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if self._here:
            for number, before in self._before.items():
                signal.signal(number, before)

    def hold(self) -> None:
        """Let another one wait: what is left to do is short, and half of it is of no use."""
        if self._here:
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)

    async def run(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Do ``work`` until the first Ctrl-C: asyncio's own way breaks off at the second."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel() -> None:
            task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # wakes the loop from its wait

        self._cancel = cancel
        if self._pressed:
            raise asyncio.CancelledError
        await work()

    def _press(self, number: int, _: object) -> None:
        self._pressed = True
        self.kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.hold()
        self._cancel()


class _Run:
    """The state of a run between its phases."""

    def __init__(self, config: Config, display: Display, folder: RunFolder, parts: Parts, stack: ExitStack) -> None:
        self._config, self._display, self._folder, self._parts = config, display, folder, parts
        self._players = make_collector(config, parts.renderer, split="train")
        stack.callback(self._players.close)
        self._judges = make_collector(config, parts.renderer, split=config.eval.split)
        stack.callback(self._judges.close)
        self._trainer = Trainer(config, parts, self._players)
        self.done = 0
        self._whole_at: int | None = None
        self._began = time.perf_counter()

    async def go(
        self, last: Path | None = None, begin: Callable[[], None] = lambda: None, *, sft_only: bool = False
    ) -> None:
        """Everything from the warm start, or from the checkpoint ``last``, to the end.

        Once all is read, ``begin`` makes the folder ready for going on.
        """
        if last is not None:
            load_optimizer(last, self._trainer.optimizer)
        begin()
        rows = [row for file in ("metrics.jsonl", "evals.jsonl") for row in read_jsonl(self._folder.path / file)]
        self._began -= max((row.get("seconds_run", 0.0) for row in rows), default=0.0)
        if last is not None:
            state = load_state(last)
            self._trainer.updates = int(state["updates"])
            # A checkpoint that was written before there was a budget of tokens is of a run without one.
            self._trainer.sampled_tokens = int(state.get("sampled_tokens", 0))
            self._finished(int(state["step"]))
            self._sync()
            if self._ended(self.done) and not sft_only:
                self._display.say("it has ended: raise optim.steps or optim.max_sampled_tokens to train it longer")
        else:
            await self._warm_start()
            self._finished(0)
            self.save()
        # Also where the run was stopped between its checkpoint and its evaluation.
        await self._evaluate_if_due()
        if not sft_only:
            await self._train()

    async def _warm_start(self) -> None:
        sft = self._config.sft
        if sft.steps == 0:
            return
        with self._display.phase("oracle episodes", sft.tasks) as bar:
            groups = await oracle_episodes(
                self._config, self._parts, self._players, lambda _: bar.advance("the gold player plays")
            )
        with self._display.phase("warm start", sft.steps) as bar:
            likelihood = 0.0

            def told(step: SftStep) -> None:
                nonlocal likelihood
                likelihood = step.likelihood
                _stop_if_cancelled()
                bar.advance(f"loss {step.loss:.4f}, oracle episode's likelihood {step.likelihood:.0%}")

            steps = warm_start(self._config, self._parts, groups, told)
        self._sync()
        self._display.say(f"warm start: {steps} updates on {len(groups)} oracle episodes, {self._elapsed()}")
        if likelihood < sft.stop_at < 1:
            self._display.say(
                f"warning: the warm start ended with an oracle episode's likelihood of {likelihood:.1%}, not the "
                f"{sft.stop_at:.0%} of sft.stop_at: where training then meets no reward, raise sft.steps or sft.lr"
            )

    async def _train(self) -> None:
        steps, silent = self._config.optim.steps, 0
        with self._display.phase("training", steps) as bar:
            for _ in range(self.done):
                bar.advance()
            while not self._ended(self.done):
                number = self.done + 1
                result = await self._trainer.step(number)
                self._record(number, result)
                self._finished(number)
                bar.expect(self._likely_steps())
                bar.advance(_note(result.metrics))
                silent = silent + 1 if result.metrics["advantage_abs"] < _NO_SIGNAL else 0
                if silent == _SILENT_STEPS:
                    self._display.say(
                        f"warning: the last {silent} steps taught nothing: all members of each group had the same "
                        f"reward, on average {result.metrics['reward_mean']:.2f}; try a longer warm start, easier or "
                        "harder tasks, or a larger rollout.group_size"
                    )
                if self._due(self._config.save.every):
                    self.save()
                await self._evaluate_if_due()

    def _finished(self, step: int) -> None:
        """From here until the next update begins, the weights are those of ``step``."""
        self.done, self._whole_at = step, self._trainer.updates

    def _ended(self, step: int) -> bool:
        """Whether step ``step``, the last that the trainer did, is the last of training."""
        optim = self._config.optim
        return step >= optim.steps or 0 < optim.max_sampled_tokens <= self._trainer.sampled_tokens

    def _likely_steps(self) -> int:
        """How many steps training will have had, if steps go on to sample as many tokens as they did."""
        optim = self._config.optim
        if self._ended(self.done):
            return self.done
        if optim.max_sampled_tokens == 0:
            return optim.steps
        return min(optim.steps, math.ceil(self.done * optim.max_sampled_tokens / self._trainer.sampled_tokens))

    def _due(self, every: int) -> bool:
        return self._ended(self.done) or (every > 0 and self.done % every == 0)

    async def _evaluate_if_due(self) -> None:
        if self.done > 0 and not self._due(self._config.eval.every):
            return
        if self.done not in {row["step"] for row in read_jsonl(self._folder.path / "evals.jsonl")}:
            await self._evaluate()

    def _record(self, number: int, result: StepResult) -> None:
        self._folder.append("metrics.jsonl", {**result.metrics, "seconds_run": time.perf_counter() - self._began})
        if number == 1 or self._ended(number) or number % self._config.save.episodes_every == 0:
            label = self._players.env.dialect.label
            path, episodes = self._folder.episodes(number), result.trajectories
            with self._folder.writing():
                write_episodes(path, episodes, self._parts.tokenizer, result.advantages, dialect=label)

    async def _evaluate(self) -> None:
        config = self._config
        specs = plan(self._judges.env, config.eval, config.run.seed)
        with self._display.phase(f"evaluating after step {self.done}", len(specs) * config.eval.attempts) as bar:
            result = await evaluate(
                self._judges,
                self._parts.engine,
                specs,
                Sampling(temperature=config.eval.temperature, max_tokens=config.rollout.turn_tokens),
                on_episode=lambda _: bar.advance("held-out tasks"),
            )
        row = {"step": self.done, "split": config.eval.split, "seconds_run": time.perf_counter() - self._began}
        self._folder.append("evals.jsonl", row | result.row())
        self._display.evaluation(f"step {self.done} ({self._elapsed()})", result)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one or the next update has begun."""
        if self._whole_at != self._trainer.updates:
            return
        path, optimizer = self._folder.checkpoint(self.done), self._trainer.optimizer
        state: dict[str, object] = {
            "step": self.done,
            "updates": self._trainer.updates,
            "sampled_tokens": self._trainer.sampled_tokens,
            "settings": kept_settings(self._config),
            "records": self._folder.seal(),
        }
        with self._folder.writing(SafetensorError, RuntimeError):  # what a full disk becomes in these libraries
            save_checkpoint(path, self._parts.model, self._parts.tokenizer, optimizer=optimizer, state=state)

    def _sync(self) -> None:
        self._parts.engine.load_weights(self._parts.model.named_parameters(), self.done)

    def _elapsed(self) -> str:
        seconds = int(time.perf_counter() - self._began)
        return f"{seconds // 60}:{seconds % 60:02d} min"


def _stop_if_cancelled() -> None:
    """Ctrl-C cancels the task, which notices only where it awaits something."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _note(metrics: Mapping[str, float]) -> str:
    return (
        f"reward {metrics['reward_mean']:.2f}, cut turns {metrics['cut_turns']:.0f}, tokens clipped "
        f"{metrics.get('clip_fraction', 0.0):.1%}, engine and trainer {metrics['logp_diff_max']:.0e} apart"
    )
