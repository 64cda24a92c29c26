"""A whole run: warm start, evaluation, training steps, evaluation, report."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from agentrl.assemble import Parts, assemble, make_collector
from agentrl.checkpoint import load_optimizer, load_state, save_checkpoint
from agentrl.config import Config
from agentrl.display import Display
from agentrl.evaluate import evaluate
from agentrl.records import write_episodes
from agentrl.registry import make
from agentrl.runfolder import RunFolder, checkpoints
from agentrl.sft import SftStep, oracle_episodes, warm_start
from agentrl.trainer import StepResult, Trainer, check_training_config
from agentrl.viewer import write_report


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
    check_training_config(config)
    make(config.env.id, **config.env.args, split=config.eval.split).close()
    parts = assemble(config)
    with RunFolder.create(config, numbered=numbered) as folder:
        display.say(f"run folder: {folder.path}")
        return _finish(config, display, folder, parts, None, sft_only=sft_only)


def resume(path: Path, display: Display) -> Path:
    """Go on with a run from its last checkpoint.

    Raises:
        RunFolderError: there is no run at ``path``, or it is in use.
    """
    folder, config = RunFolder.resume(path)
    with folder:
        saved = checkpoints(path)
        last = saved[-1] if saved else None
        parts = assemble(config, last)
        step = load_state(last)["step"] if last else 0
        display.say(f"going on with {path} after step {step}" if last else f"beginning {path} again: no checkpoint yet")
        for file in ("metrics.jsonl", "evals.jsonl"):
            folder.truncate(file, after=step if last else -1)
        return _finish(config, display, folder, parts, last, sft_only=False)


def _finish(
    config: Config, display: Display, folder: RunFolder, parts: Parts, last: Path | None, *, sft_only: bool
) -> Path:
    with ExitStack() as stack:
        run = _Run(config, display, folder, parts, stack)
        try:
            asyncio.run(run.go(last, sft_only=sft_only))
        except (KeyboardInterrupt, asyncio.CancelledError):
            run.save()
            display.say(f"stopped after step {run.done}; go on with: agentrl train --resume {folder.path}")
            raise KeyboardInterrupt from None
        finally:
            write_report(folder.path)
    display.say(f"report: {(folder.path / 'report.html').resolve()}")
    return folder.path


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
        self._began = time.perf_counter()

    async def go(self, last: Path | None, *, sft_only: bool) -> None:
        """Everything from the warm start, or from the checkpoint ``last``, to the end."""
        if last is not None:
            self.done = int(load_state(last)["step"])
            load_optimizer(last, self._trainer.optimizer)
            self._sync()
        else:
            await self._warm_start()
            self.save()
            await self._evaluate()
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

            def told(step: SftStep) -> None:
                bar.advance(f"loss {step.loss:.4f}, oracle episode's likelihood {step.likelihood:.0%}")

            steps = warm_start(self._config, self._parts, groups, told)
        self._sync()
        self._display.say(f"warm start: {steps} updates on {len(groups)} oracle episodes, {self._elapsed()}")

    async def _train(self) -> None:
        steps = self._config.optim.steps
        with self._display.phase("training", steps) as bar:
            for _ in range(self.done):
                bar.advance()
            for number in range(self.done + 1, steps + 1):
                result = await self._trainer.step(number)
                self.done = number
                self._record(result)
                bar.advance(_note(result.metrics))
                await self._after_step(number, last=number == steps)

    async def _after_step(self, number: int, *, last: bool) -> None:
        config = self._config
        if last or (config.save.every and number % config.save.every == 0):
            self.save()
        if last or (config.eval.every and number % config.eval.every == 0):
            await self._evaluate()

    def _record(self, result: StepResult) -> None:
        number = self.done
        self._folder.append("metrics.jsonl", {**result.metrics, "seconds_run": time.perf_counter() - self._began})
        if number == 1 or number == self._config.optim.steps or number % self._config.save.episodes_every == 0:
            write_episodes(self._folder.episodes(number), result.trajectories, self._parts.tokenizer, result.advantages)

    async def _evaluate(self) -> None:
        config = self._config
        total = config.eval.tasks * config.eval.attempts
        with self._display.phase(f"evaluating after step {self.done}", total) as bar:
            result, _ = await evaluate(
                self._judges,
                self._parts.engine,
                config.eval,
                seed=config.run.seed,
                turn_tokens=config.rollout.turn_tokens,
                on_episode=lambda _: bar.advance("held-out tasks"),
            )
        row = {"step": self.done, "split": config.eval.split, "seconds_run": time.perf_counter() - self._began}
        self._folder.append("evals.jsonl", row | result.row())
        self._display.evaluation(f"step {self.done} ({self._elapsed()})", result)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one."""
        save_checkpoint(
            self._folder.checkpoint(self.done),
            self._parts.model,
            self._parts.tokenizer,
            optimizer=self._trainer.optimizer,
            state={"step": self.done},
        )

    def _sync(self) -> None:
        self._parts.engine.load_weights(self._parts.model.named_parameters(), self.done)

    def _elapsed(self) -> str:
        seconds = int(time.perf_counter() - self._began)
        return f"{seconds // 60}:{seconds % 60:02d} min"


def _note(metrics: Mapping[str, float]) -> str:
    return (
        f"reward {metrics['reward_mean']:.2f}, clipped {metrics.get('clip_fraction', 0.0):.1%}, "
        f"|Δ log-prob| {metrics['logp_diff_max']:.0e}"
    )
