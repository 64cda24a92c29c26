"""``agentrl eval``: play every set of tasks, write each episode to disk as it ends, and report the results."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.config import Config
from agentrl.engines.base import Sampling
from agentrl.errors import UsageError
from agentrl.eval.request import EvalRequest, check_dialect, read_settings
from agentrl.eval.results import SetResult, write_summary
from agentrl.eval.sets import make_sets
from agentrl.eval.table import plan_episodes, play_tasks
from agentrl.eval.target import Agent, for_messages, make_agent, tokenizer_of
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import EpisodeSpec, TaskSource
from agentrl.runs.assemble import make_collector, with_dialect
from agentrl.runs.checkpoint import model_at
from agentrl.runs.files import lock_folder
from agentrl.runs.progress import Bar, Display
from agentrl.runs.records import EPISODES, EpisodeWriter, Record, read_begun
from agentrl.runs.settings import settings_of, versions_of
from agentrl.types import Origin, Trajectory, won

_DECIDES = ("model.template_args", "model.dtype", "rollout.truncated.turn", "rollout.episode_tokens")
"""Settings that an episode depends on beside its origin; a resumed evaluation may change tasks and attempts."""
_PACKAGES = ("agentrl", "torch", "transformers", "vllm", "openai")


def run(request: EvalRequest, display: Display) -> list[SetResult]:
    """Evaluate what ``request`` names; episodes that its folder already holds are not played again.

    Args:
        request: names what to evaluate, and how.
        display: shows progress.

    Raises:
        UsageError: there is no run, checkpoint or model; a checkpoint is damaged; the folder can't be written or is of
            another evaluation; or the run was trained in another dialect.
        TrajectoryError: the folder's file holds anything but episodes.
        FaultRateError: too many tasks were lost to infrastructure faults.
        KeyboardInterrupt: a person pressed Ctrl-C; the message says what is saved.
    """
    base, path = read_settings(request)
    model = model_at(path, display.say) if path else ""
    # Loading a model takes long, so everything that can be refused without it is checked before.
    with ExitStack() as stack:
        lines, records = _begun(request.out, stack)
        tokenizer = model or tokenizer_of(base)
        sets = {
            name: with_dialect(for_messages(config), tokenizer)
            for name, config in make_sets(base, request.envs).items()
        }
        sources = {name: _source(config) for name, config in sets.items()}
        # Each set is played by itself: the mix only serves to make the renderer and to name the dialects.
        mix = TaskMix(sources, dict.fromkeys(sources, 1.0), block=1)
        check_dialect(request, mix.label)
        origins = {name: source.origin(_sampling(sets[name])) for name, source in sources.items()}
        config = next(iter(sets.values()))
        values = settings_of(config)
        # The folder's episodes count towards this evaluation only if the same weights and settings would play them.
        played_with = {name: values[name] for name in _DECIDES} | {"seed": request.seed}
        _check_same(request, records, origins, played_with)
        with display.doing("loading the model"):
            agent = make_agent(config, mix, model)  # only a loaded model tells its weights
        stack.enter_context(closing(agent.engine))
        played_with["weights"] = agent.weights
        _check_same(request, records, origins, {"weights": agent.weights})
        add: Callable[[Trajectory], None] = lambda _: None
        if request.out is not None:
            writer = EpisodeWriter(request.out / EPISODES, agent.pieces, lines, origins, played_with)
            add = stack.enter_context(closing(writer)).add
        done = [record.trajectory for record in records]
        sets_to_play = _Sets(
            seed=request.seed, configs=sets, sources=sources, agent=agent, done=done, display=display, add=add
        )
        try:
            results = asyncio.run(sets_to_play.play())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_left(request.out)) from None
        finally:
            for note in agent.notes:
                display.say(note)
        if request.out is not None:
            about: dict[str, object] = {"target": request.path or agent.weights, "weights": agent.weights}
            about |= {"engine": config.engine.name, "seed": request.seed, "settings": played_with}
            about |= {"notes": list(agent.notes), "versions": versions_of(_PACKAGES)}
            write_summary(request.out, results, about)
        return results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sets:
    """Plays the sets one after the other."""

    seed: int
    configs: Mapping[str, Config]
    sources: Mapping[str, TaskSource]
    agent: Agent
    done: Sequence[Trajectory]
    display: Display
    add: Callable[[Trajectory], None]

    async def play(self) -> list[SetResult]:
        """Play all sets; each has a progress bar from the beginning."""
        specs = {
            name: plan_episodes(source, self.configs[name].eval, self.seed) for name, source in self.sources.items()
        }
        for name, groups in specs.items():
            settings = self.configs[name].eval
            if len(groups) < settings.tasks:
                split = f"{settings.split!r}{name and f' of {name}'}"
                self.display.say(f"the split {split} has {len(groups)} tasks, not {settings.tasks}")
        with ExitStack() as stack:
            bars = {
                name: stack.enter_context(self.display.phase(name or "evaluating", sum(map(len, groups))))
                for name, groups in specs.items()
            }
            return [await self._play_set(name, specs[name], bar) for name, bar in bars.items()]

    async def _play_set(self, name: str, specs: Sequence[Sequence[EpisodeSpec]], bar: Bar) -> SetResult:
        config, source = self.configs[name], self.sources[name]
        wanted = {(spec.task_id, spec.seed) for group in specs for spec in group}
        done = [episode for episode in self.done if episode.env == name and (episode.task_id, episode.seed) in wanted]
        wins = [won(episode, source.best_return) for episode in done]
        unsaved = list[Trajectory]()
        for _ in done:
            bar.advance()

        def ended(episode: Trajectory) -> None:
            unsaved.append(episode)
            # Nothing is written while no episode had room for a turn: the same command may come with a higher limit.
            while episode.sampled and unsaved:
                self.add(unsaved.pop(0))
            wins.append(won(episode, source.best_return))
            bar.advance(f"success {sum(wins) / len(wins):.1%} so far")

        sampling = _sampling(config)
        with closing(
            make_collector(config, self.agent.renderer, split=config.eval.split, say=self.display.say)
        ) as collector:
            played = await play_tasks(collector, self.agent.engine, specs, sampling, done=done, on_episode=ended)
        for episode in unsaved:
            self.add(episode)
        for refused in played.refused:
            self.display.say(f"skipped: {refused}")
        if played.silent:
            self.display.say(
                f"warning: {played.silent} episodes{name and f' of {name}'} count as failed, since their prompts left "
                f"no room for a turn in rollout.episode_tokens={config.rollout.episode_tokens}"
            )
        return SetResult(name=name, origin=source.origin(sampling), played=played)


def _source(config: Config) -> TaskSource:
    ((name, env),) = config.env.played.items()
    return TaskSource(env.id, env.args, config.eval.split, name)


def _sampling(config: Config) -> Sampling:
    return Sampling(temperature=config.eval.temperature, max_tokens=config.rollout.turn_tokens)


def _begun(out: Path | None, stack: ExitStack) -> tuple[bytes, list[Record]]:
    """Lock the folder; return the lines and the records that an evaluation which was stopped has left in it."""
    if out is None:
        return b"", []
    if ".jsonl" in out.name or out.is_file():
        raise UsageError(f"--out {str(out)!r} names a file: name a folder, new or of an evaluation that was stopped")
    stack.enter_context(lock_folder(out, "evaluation's folder", "--out"))
    return read_begun(out / EPISODES)


def _left(out: Path | None) -> str:
    if out is None:
        return "stopped, and no episode is saved: with --out FOLDER they are, and the same command resumes"
    saved = len(read_begun(out / EPISODES)[1])
    return f"stopped, {saved} episodes are saved in {out}; resume with the same command"


def _check_same(
    request: EvalRequest, records: Sequence[Record], origins: Mapping[str, Origin], played_with: Mapping[str, object]
) -> None:
    for record in records:
        env = record.trajectory.env
        if env not in origins and "" not in origins:
            continue  # of a set that is not evaluated this time
        held = {"set": env, **asdict(record.origin), **record.evaluation}
        wanted = {**asdict(origins[env]), **played_with} if env in origins else {"set": ""}
        for name, value in wanted.items():
            if held.get(name) != value:
                raise UsageError(
                    f"--out {str(request.out)!r} holds episodes of another evaluation, with {name} {held.get(name)!r} "
                    f"and not {value!r}: name another folder"
                )
