"""The phases of a run: warm start, evaluation, training steps, evaluation; and its rows, episodes and checkpoints."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.config import Config
from agentrl.errors import InvariantError
from agentrl.models.lora import base_of
from agentrl.runs.assemble import Policy, adapt, adapters_base, load_policy
from agentrl.runs.checkpoint import load_optimizer, load_state, load_unused, prune, reference_at, save_checkpoint
from agentrl.runs.folder import RunFolder, read_jsonl
from agentrl.runs.loggers import Loggers
from agentrl.runs.progress import Display
from agentrl.runs.records import write_episodes
from agentrl.runs.settings import kept_settings, settings_of
from agentrl.runs.symptoms import Watch, watched
from agentrl.train.groups import RolloutSource
from agentrl.train.live import Live
from agentrl.train.sharded import make_learner
from agentrl.train.step import StepResult, Trainer

_SKIPPED_STEPS = 3
"""Steps in a row without a finite gradient after which a run stops."""
_NOISY = 3.0
"""How many times noisier a group mean is to be than OTB where the progress says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts that a run is made of."""

    policy: Policy
    """The model that is trained, and its tokenizer."""
    rollouts: RolloutSource
    """The source of the groups of each step."""
    live: Live | None = None
    """The environments; None where all episodes were played before."""
    made_by: dict[str, str]
    """Names of the code whose bits the run's follow from: ``update`` computes attention in updates and scores,
    ``decode_step`` the steps of the embedded engine."""


class Run:
    """A run from its first phase to its last.

    Args:
        config: the run's settings.
        display: shows progress.
        folder: gets rows, episodes and checkpoints.
        parts: the model and the source of groups; their environments are closed by ``stack``.
        stack: closes what the run holds.
    """

    def __init__(self, config: Config, display: Display, folder: RunFolder, parts: RunParts, stack: ExitStack) -> None:
        self._config, self._display, self._folder = config, display, folder
        self._policy, self._live = parts.policy, parts.live
        if parts.live:
            stack.callback(parts.live.close)
        self._loggers = Loggers(config.log.to, folder.path, settings_of(config), display.say)
        stack.callback(self._loggers.close)
        self._rollouts = parts.rollouts
        self._watch = Watch()
        self._trainer: Trainer
        self._adapts = config.lora.rank > 0
        self._base = adapters_base(config, folder.checkpoint(0))
        self.done = 0
        """The last step whose weights the trainer has had."""
        self._updates_done: int | None = None
        """Updates after which the weights were those of ``done``; None before there is a trainer."""
        self._began = time.perf_counter()

    async def begin(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Do the run from its warm start to its end.

        Args:
            prepare: prepares the folder of a run that was stopped before its first checkpoint.
        """
        self._write(prepare)
        # Adapters need their base. Where no other folder holds it, as after a warm start, the first checkpoint does.
        own_base = self._adapts and self._base == str(self._folder.checkpoint(0).resolve())
        if own_base or not self._adapts:
            self._make_trainer()
            if self._live and self._config.sft.steps:
                await self._live.warm_start(self._trainer.learner, self._display, self._elapsed)
            self._finished(0)
        if own_base:
            self._write(self.save)
            self._trainer.learner.close()
            if self._config.run.ranks > 1:  # the ranks have dropped the weights
                self._policy = load_policy(self._config, self._policy.tokenizer, self._folder.checkpoint(0))
        if self._adapts:
            adapt(self._config, self._policy.model, base=self._base, saved=None)
            self._make_trainer()
            self._finished(0)
        if self._config.algo.kl_coef and not self._adapts:
            self._trainer.learner.keep_reference()
        with self._display.doing("giving the engine its weights"):
            await self._trainer.sync(self.done)
        self._write(self.save)
        await self._evaluate_if_due()
        await self._train()

    async def resume(self, last: Path, prepare: Callable[[], None]) -> None:
        """Continue the run from its checkpoint ``last`` to its end.

        Args:
            last: the checkpoint.
            prepare: prepares the folder, once everything has been read.
        """
        state, unused = load_state(last), load_unused(last)
        # The checkpoint of step 0 may hold the base of adapters only: then they, and the optimizer, begin fresh.
        saved = last if base_of(last) else None
        if self._adapts:
            adapt(self._config, self._policy.model, base=self._base, saved=saved)
        self._make_trainer()
        if saved is not None or not self._adapts:
            load_optimizer(last, self._trainer.learner.load)
        if self._config.algo.kl_coef and not self._adapts:
            policy = load_policy(self._config, self._policy.tokenizer, reference_at(self._folder))
            self._trainer.learner.keep_reference(policy.model)
        self._write(prepare)
        # The clock continues where the last row was written.
        steps, evals = (read_jsonl(self._folder.path / file) for file in ("metrics.jsonl", "evals.jsonl"))
        self._began -= max((row.get("seconds_run", 0.0) for row in steps + evals), default=0.0)
        self._watch = watched(steps)
        self._trainer.restore(state)
        self._finished(state["step"])
        self._trainer.rollouts.restore(state, unused)
        # The engine was made from the same weights, but its completions are to carry this step's version.
        await self._trainer.sync(self.done)
        if self._ended(self.done) and self._live:
            self._display.say("it has ended: raise optim.steps or optim.max_sampled_tokens to train it longer")
        # The run may have been stopped between its checkpoint and its evaluation.
        await self._evaluate_if_due()
        await self._train()

    def _make_trainer(self) -> None:
        self._trainer = Trainer(self._config, make_learner(self._config, self._policy.model), self._rollouts)

    async def _train(self) -> None:
        with self._display.phase("training", self._last) as bar:
            for _ in range(self.done):
                bar.advance()
            while not self._ended(self.done):
                number = self.done + 1
                with self._display.doing(lambda number=number: f"step {number}: {self._trainer.phase}"):
                    result = await self._trainer.step(number, partial(self._learned, number))
                if self._live is None:
                    apart = result.metrics["logp_diff_max"]
                    self._display.say(f"step {number}: the model and its episodes are at most {apart:.0e} nats apart")
                self._finished(number)
                bar.advance(_note(result.metrics))
                # Saved before it is evaluated, which takes long: a stop meanwhile loses no training.
                if self._due(self._config.save.every):
                    self._write(self.save)
                await self._evaluate_if_due()

    async def _learned(self, number: int, result: StepResult) -> None:
        # The row comes first: a checkpoint seals the records, which must hold all steps up to its own.
        self._record(number, result)
        # A run that is stopped from here on loses nothing. But a deterministic run that plays ahead must first play all
        # of the next groups with the weights before these: else it would not end in the bytes of an undisturbed run.
        if not (self._config.run.deterministic and self._config.rollout.overlap.mode == "lag"):
            self._finished(number)

    def _finished(self, step: int) -> None:
        """Note that the weights are those of ``step``, until the next update begins."""
        self.done, self._updates_done = step, self._trainer.updates

    @property
    def _last(self) -> int:
        """The last step, unless the budget of tokens is spent before."""
        return int(min(self._config.optim.steps, self._rollouts.steps))

    def _ended(self, step: int) -> bool:
        """Return True if training ends with ``step``, the last one that the trainer has done."""
        optim = self._config.optim
        spent = 0 < optim.max_sampled_tokens <= self._trainer.sampled_tokens
        return step >= self._last or spent

    def _due(self, every: int) -> bool:
        return self._ended(self.done) or (every > 0 and self.done % every == 0)

    async def _evaluate_if_due(self) -> None:
        if self._live is None or (self.done > 0 and not self._due(self._config.eval.every)):
            return
        # A resumed run may have evaluated this step before it was stopped.
        rows = read_jsonl(self._folder.path / "evals.jsonl")
        evaluated = {row.get("env", "") for row in rows if row["step"] == self.done}
        if missing := [name for name in self._live.names if name not in evaluated]:
            await self._evaluate(self._live, missing)

    def _write(self, write: Callable[[], object]) -> None:
        """Do ``write``; a failed write ends the run with an error that names the disk."""
        with self._folder.writing():
            write()

    def _record(self, number: int, result: StepResult) -> None:
        for onset in self._watch.add(result.metrics):
            self._display.say(f"warning: step {number}: {onset.sentence}")
        clock = {"seconds_run": time.perf_counter() - self._began}
        # Left out where there is none, so that the rows of good runs hold numbers alone.
        lasting = {"symptoms": self._watch.lasting} if self._watch.lasting else {}
        row = {**result.metrics, **lasting, **clock}
        self._write(partial(self._folder.append, "metrics.jsonl", row))
        self._loggers.log(row, number)
        stuck = self._trainer.skipped >= _SKIPPED_STEPS
        if number == 1 or self._ended(number) or stuck or number % self._config.save.episodes_every == 0:
            path, tokenizer = self._folder.episodes(number), self._policy.tokenizer
            columns = self._trainer.rollouts.origins, result.advantages, result.record.by_episode()
            self._write(partial(write_episodes, path, result.trajectories, tokenizer, *columns))
        if stuck:
            raise InvariantError(
                f"no gradient of the last {_SKIPPED_STEPS} steps was finite, and none was followed: the weights are as "
                f"before; look for the cause in the episodes of {self._folder.episodes(number)}"
            )

    async def _evaluate(self, live: Live, names: Sequence[str]) -> None:
        async for name, result in live.evaluate(self.done, names, self._display):
            row = {"step": self.done, "split": self._config.eval.split}
            row |= {"seconds_run": time.perf_counter() - self._began} | ({"env": name} if name else {}) | result.row()
            self._write(partial(self._folder.append, "evals.jsonl", row))
            self._loggers.log(result.row(), self.done, f"env/{name}/eval_" if name else "eval_")
            self._display.say(f"step {self.done} ({self._elapsed()}){name and f', {name}'}: {result}")

    def save(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one or the next update has begun."""
        if self._updates_done is None or self._updates_done != self._trainer.updates:
            return
        with self._display.doing(f"saving the checkpoint of step {self.done}"):
            self._save()

    def _save(self) -> None:
        learner, rollouts = self._trainer.learner, self._rollouts
        state: dict[str, object] = {
            "step": self.done,
            **self._trainer.state(),
            "settings": kept_settings(self._config),
            "records": self._folder.seal(),
            **rollouts.state(),
        }
        save_checkpoint(
            self._folder.checkpoint(self.done),
            self._policy.model,
            self._policy.tokenizer,
            weights=learner.write,
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
    noise = metrics.get("noise_mean", 1.0)
    return (
        f"reward {metrics['reward_mean']:.2f}, cut turns {metrics['cut_turns']:.0f}, tokens clipped "
        f"{metrics.get('clip_fraction', 0.0):.1%}, engine and trainer {metrics['logp_diff_max']:.0e} apart"
        f"{f', a group mean {noise:.0f} times as noisy as OTB' if noise > _NOISY else ''}"
    )
