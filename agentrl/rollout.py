"""Episodes: one played token-exactly, and many side by side in groups.

The collector records exactly the tokens that were sampled. The next prompt is always the tokens so far plus new ones.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from agentrl.contract import ask
from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.env import ToolEnv
from agentrl.errors import FaultRateError, InfrastructureError
from agentrl.registry import make
from agentrl.render import Renderer
from agentrl.rng import derive_seed
from agentrl.types import CutTurn, CutTurns, Group, Segment, Stop, Trajectory

EngineFor = Callable[[ToolEnv, str], Engine]
"""Gives the engine that plays a task; the same one for all, but where a script is played."""


def always(engine: Engine) -> EngineFor:
    """The same engine for every task."""

    def engine_for(_env: ToolEnv, _task_id: str) -> Engine:
        return engine

    return engine_for


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """What to play."""

    task_id: str
    """The task."""
    seed: int
    """Seeds the environment; sampling derives the seed of each turn from it."""


@dataclass(slots=True, kw_only=True)
class Clock:
    """Seconds spent while collecting, summed over episodes that run side by side."""

    tools: float = 0.0
    """In environments: tools and grading."""
    engine: float = 0.0
    """Waiting for completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long an episode may be."""

    episode_tokens: int
    """Most tokens of an episode, prompt and tool output included."""
    cut_turns: CutTurns = "end"
    """What becomes of a turn that the limit of a turn, or of the episode, cut off."""

    def after_cut(self, spent: bool) -> CutTurns:
        """What becomes of a turn that was cut off; without room in the episode no agent can go on."""
        return "end" if spent and self.cut_turns == "continue" else self.cut_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection yielded."""

    groups: tuple[Group, ...]
    """The complete groups, in the order they were asked for."""
    faults: int
    """Episodes that an infrastructure fault ended, each counted every time."""
    lost: int
    """Groups left out because an episode failed twice."""
    seconds: float
    """Wall time of the whole collection."""
    clock: Clock
    """Where the episodes' time went, summed over all of them."""


async def play(
    env: ToolEnv, engine: Engine, renderer: Renderer, spec: EpisodeSpec, *, sampling: Sampling, player: "Player"
) -> Trajectory:
    """Play one episode.

    Args:
        env: plays in a thread of ``player``, so that other episodes go on meanwhile.
        engine: samples the turns.
        renderer: writes messages as tokens.
        spec: task and seed.
        sampling: ``max_tokens`` is the limit of a turn.
        player: threads, limits and clock.

    Raises:
        InfrastructureError: a sandbox or the engine failed.
    """
    first, _ = await player.in_thread(env.reset, seed=spec.seed % 2**32, options={"task": spec.task_id})
    segments = [renderer.prompt(first)]
    tokens = list(segments[0].token_ids)
    rewards: list[float] = []
    stop: Stop | None = None
    while stop is None:
        room = player.limits.episode_tokens - len(tokens)
        if room < 1:
            stop = Stop.TOKEN_LIMIT
            break
        turn = Sampling(
            temperature=sampling.temperature,
            max_tokens=min(room, sampling.max_tokens),
            stop_ids=renderer.stop_ids,
        )
        completion = await player.timed(engine.generate(tuple(tokens), turn, seed=derive_seed(spec.seed, len(rewards))))
        segments.append(_policy(completion))
        tokens += completion.token_ids
        spent = len(completion.token_ids) == room
        action = renderer.text(completion.token_ids)
        if completion.finish == "length":
            action = CutTurn(action, player.limits.after_cut(spent))
        messages, reward, terminated, truncated, _ = await player.in_thread(env.step, action)
        rewards.append(reward)
        if terminated or truncated:
            stop = Stop.TERMINATED if terminated else _why_truncated(action, spent)
            break
        new = renderer.extend(completion.token_ids, messages)
        if len(tokens) + sum(len(segment.token_ids) for segment in new) >= player.limits.episode_tokens:
            stop = Stop.TOKEN_LIMIT
            break
        segments += new
        tokens += [token for segment in new for token in segment.token_ids]
    trajectory = _trajectory(env, spec, segments, rewards, stop)
    assert list(trajectory.token_ids) == tokens, "an episode's record must be the very tokens that were played"
    return trajectory


def _why_truncated(action: str, spent: bool) -> Stop:
    if not isinstance(action, CutTurn) or action.then != "end":
        return Stop.TURN_LIMIT
    return Stop.TOKEN_LIMIT if spent else Stop.TURN_CUT


def _policy(completion: Completion) -> Segment:
    cut = completion.finish == "length"
    return Segment("policy", completion.token_ids, completion.logprobs, completion.version, cut)


def _trajectory(
    env: ToolEnv, spec: EpisodeSpec, segments: Sequence[Segment], rewards: Sequence[float], stop: Stop
) -> Trajectory:
    episode = env.episode
    return Trajectory(
        task_id=spec.task_id,
        seed=spec.seed,
        segments=tuple(segments),
        rewards=tuple(rewards),
        stop=stop,
        messages=episode.messages,
        parts=episode.parts or {},
        tool_runs=episode.tool_runs,
    )


@dataclass(slots=True, kw_only=True)
class Player:
    """The threads that environments run in, the limits of an episode, and the clock."""

    limits: Limits
    """How long an episode may be."""
    threads: ThreadPoolExecutor
    """Environments step here."""
    clock: Clock = field(default_factory=Clock)
    """Where time goes."""

    async def in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a blocking call of an environment while other episodes go on."""

        def timed() -> tuple[Any, float]:
            began = time.perf_counter()
            # What is no Exception, such as sys.exit() in a step of the environment's own, would end the whole process.
            result = ask(function.__qualname__, lambda: function(*args, **kwargs), passing=(Exception,))
            return result, time.perf_counter() - began

        call = self.threads.submit(timed)
        try:
            result, seconds = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            # The environment is closed next, so a call that had begun comes to its end first, whatever it gives.
            if not call.cancelled():
                await asyncio.gather(asyncio.wrap_future(call), return_exceptions=True)
            raise
        self.clock.tools += seconds
        return result

    async def timed(self, completion: Awaitable[Completion]) -> Completion:
        """Wait for a completion."""
        began = time.perf_counter()
        result = await completion
        self.clock.engine += time.perf_counter() - began
        return result


class Collector:
    """Plays groups of episodes, many at a time, each on an environment of its own.

    A fault of the infrastructure is no outcome: the episode is played again on a fresh environment, and when that fails
    too its group is left out.

    Args:
        env_id: the environment's id.
        env_args: the environment's own arguments.
        renderer: writes messages as tokens.
        limits: how long an episode may be.
        concurrency: episodes that run at the same time.
        max_fault_rate: share of lost groups above which collecting stops.
    """

    def __init__(
        self,
        env_id: str,
        env_args: dict[str, Any],
        renderer: Renderer,
        *,
        limits: Limits,
        concurrency: int = 64,
        max_fault_rate: float = 0.01,
    ) -> None:
        self._make = lambda: make(env_id, **env_args)
        self._renderer = renderer
        self._limits = limits
        self._concurrency = concurrency
        self._max_fault_rate = max_fault_rate
        self._threads = ThreadPoolExecutor(max_workers=min(concurrency, 32), thread_name_prefix="agentrl-env")
        self._idle: list[ToolEnv] = [self._make()]

    @property
    def env(self) -> ToolEnv:
        """An environment to ask about tasks; it is not being played."""
        if not self._idle:
            self._idle.append(self._make())
        return self._idle[0]

    async def collect(
        self,
        specs: Sequence[Sequence[EpisodeSpec]],
        engine_for: EngineFor,
        sampling: Sampling,
        *,
        on_episode: Callable[[Trajectory], None] = lambda _: None,
    ) -> Collected:
        """Play groups.

        Args:
            specs: one sequence per group, its members' task and seeds.
            engine_for: gives the engine of an episode.
            sampling: temperature; ``max_tokens`` limits a turn.
            on_episode: called with each finished episode.

        Raises:
            FaultRateError: more groups were lost than ``max_fault_rate`` allows.
        """
        began = time.perf_counter()
        player = Player(limits=self._limits, threads=self._threads)
        gate = asyncio.Semaphore(self._concurrency)
        faults: list[InfrastructureError] = []

        async def member(spec: EpisodeSpec) -> Trajectory | None:
            for _ in range(2):
                async with gate:
                    try:
                        trajectory = await self._episode(spec, engine_for, sampling, player)
                    except InfrastructureError as error:
                        faults.append(error)
                        continue
                on_episode(trajectory)
                return trajectory
            return None

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [[tasks.create_task(member(spec)) for spec in group] for group in specs]
        except ExceptionGroup as errors:
            # One bug in an environment breaks many episodes alike: the first says it all.
            raise errors.exceptions[0] from None
        played = [[task.result() for task in group] for group in running]
        groups = tuple(Group(tuple(t for t in group if t)) for group in played if all(group))
        lost = len(specs) - len(groups)
        if lost > self._max_fault_rate * len(specs):
            raise FaultRateError(
                f"{lost} of {len(specs)} groups were lost to infrastructure faults, more than max_fault_rate="
                f"{self._max_fault_rate:g} allows; the last fault: {faults[-1]}"
            ) from faults[-1]
        seconds = time.perf_counter() - began
        return Collected(groups=groups, faults=len(faults), lost=lost, seconds=seconds, clock=player.clock)

    async def _episode(
        self, spec: EpisodeSpec, engine_for: EngineFor, sampling: Sampling, player: Player
    ) -> Trajectory:
        env = self._idle.pop() if self._idle else self._make()
        try:
            engine = engine_for(env, spec.task_id)
            trajectory = await play(env, engine, self._renderer, spec, sampling=sampling, player=player)
        except BaseException:
            env.close()  # a broken sandbox goes with its environment
            raise
        env.close()
        self._idle.append(env)
        return trajectory

    def close(self) -> None:
        """Close every environment and thread."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for env in self._idle:
            env.close()
        self._idle = []
