"""The environments of a run: they play its groups, its oracle episodes and its evaluations."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass

from agentrl.config import Config
from agentrl.engines import check_trains
from agentrl.engines.base import Sampling
from agentrl.eval.table import Evaluation, plan_episodes, play_tasks, summarise
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.taskplan import make_plan
from agentrl.runs.assemble import Parts, make_collector, task_mix
from agentrl.runs.loggers import find_loggers
from agentrl.runs.progress import Display
from agentrl.train.interrupts import stop_if_cancelled
from agentrl.train.learner import Learner
from agentrl.train.overlap import check_overlap, make_source
from agentrl.train.sft import SftStep, oracle_episodes, warm_start
from agentrl.train.step import check_training_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The two splits of a run's environments."""

    train: TaskMix
    """Tasks that the run learns from."""
    held_out: TaskMix
    """Tasks that the run is evaluated on."""


def check_playing(config: Config) -> None:
    """Refuse invalid settings of a run that plays its episodes.

    Raises:
        UsageError: an option of the algorithm or an engine does not exist, or settings contradict each other.
    """
    check_training_config(config)
    check_overlap(config)
    check_trains(config.engine.name)


def check_run(config: Config) -> Sources:
    """Refuse invalid settings before a model is loaded or anything is written; return the run's tasks.

    Raises:
        UsageError: an option of the algorithm or the plan, an environment or one of its splits does not exist, or the
            warm start has no gold player to learn from.
    """
    check_playing(config)
    find_loggers(config.log.to)
    sources = Sources(train=task_mix(config, "train"), held_out=task_mix(config, config.eval.split))
    make_plan(config, sources.train)
    if config.sft.steps:
        # An environment that has a gold player has one for its first task.
        for source in sources.train.sources.values():
            source.gold(source.tasks[0], "the warm start learns", "set sft.steps=0")
    return sources


class Live:
    """The environments of a run, and the engine that plays in them.

    Args:
        config: the run's settings.
        parts: model, tokenizer, renderer and engine.
        sources: the splits.
        say: prints a line.
    """

    def __init__(self, config: Config, parts: Parts, sources: Sources, say: Callable[[str], None]) -> None:
        self._config, self._parts, self._sources = config, parts, sources
        with ExitStack() as stack:
            stack.callback(parts.engine.close)
            self._players = stack.enter_context(
                closing(make_collector(config, parts.renderer, split="train", training=True, say=say))
            )
            judges = make_collector(config, parts.renderer, split=config.eval.split, say=say)
            self._judges = stack.enter_context(closing(judges))
            self.rollouts = make_source(config, sources.train, self._players, parts.engine)
            self.close = stack.pop_all().close

    @property
    def names(self) -> list[str]:
        """The environments' names."""
        return [*self._sources.held_out.sources]

    async def warm_start(self, learner: Learner, display: Display, elapsed: Callable[[], str]) -> None:
        """Play oracle episodes and train on them; ``elapsed`` returns the run's time so far."""
        config, sft = self._config, self._config.sft
        with display.phase("oracle episodes", sft.tasks) as bar:
            groups = await oracle_episodes(
                config,
                self._parts.renderer,
                self._players,
                self._sources.train,
                lambda _: bar.advance("the gold player plays"),
            )
        with display.phase("warm start", sft.steps) as bar:
            likelihood = 0.0

            def on_step(step: SftStep) -> None:
                nonlocal likelihood
                likelihood = step.likelihood
                stop_if_cancelled()
                bar.advance(f"loss {step.loss:.4f}, oracle episode's likelihood {step.likelihood:.0%}")

            steps = warm_start(config, learner, groups, on_step)
        display.say(f"warm start: {steps} updates on {len(groups)} oracle episodes, {elapsed()}")
        if likelihood < sft.stop_at < 1:
            display.say(
                f"warning: the warm start ended with an oracle episode's likelihood of {likelihood:.1%}, not the "
                f"{sft.stop_at:.0%} of sft.stop_at: where training then meets no reward, raise sft.steps or sft.lr"
            )

    async def evaluate(
        self, step: int, names: Iterable[str], display: Display
    ) -> AsyncGenerator[tuple[str, Evaluation]]:
        """Play the held-out tasks of each environment in ``names`` with the engine's weights, which are of ``step``."""
        config = self._config
        for name in names:
            source = self._sources.held_out.sources[name]
            specs = plan_episodes(source, config.eval, config.run.seed)
            title = f"evaluating{name and f' {name}'} after step {step}"
            with display.phase(title, len(specs) * config.eval.attempts) as bar:
                played = await play_tasks(
                    self._judges,
                    self._parts.engine,
                    specs,
                    Sampling(temperature=config.eval.temperature, max_tokens=config.rollout.turn_tokens),
                    on_episode=lambda _, bar=bar: bar.advance("held-out tasks"),
                )
            yield name, summarise(played.groups, best_return=source.best_return, lost=played.lost)
