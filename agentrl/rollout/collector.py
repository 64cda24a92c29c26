"""Play episodes token-exactly: one episode, or many groups of them concurrently.

The collector records exactly the tokens that were sampled. Each prompt is the tokens so far plus new ones: no text is
tokenized again.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import FaultRateError, InfrastructureError, RefusedError
from agentrl.render.transcript import Writer
from agentrl.rollout.collected import Clock, Collected
from agentrl.rollout.gate import Gate, wait_for_enough
from agentrl.rollout.metrics import sandbox_metrics
from agentrl.rollout.plan import EpisodeSpec, PlayRequest
from agentrl.toolenv.author import ask
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.registry import make
from agentrl.toolenv.tools.python import sandbox_counters
from agentrl.types import CutTurn, CutTurns, Group, Segment, Stop, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode's length."""

    episode_tokens: int
    """Most tokens of an episode, prompt and tool output included."""
    cut_turns: CutTurns = "end"
    """How to treat a turn that the limit of a turn, or of the episode, cut off."""

    def after_cut(self, spent: bool) -> CutTurns:
        """Return how to treat a cut turn; an episode whose tokens are ``spent`` can't continue."""
        return "end" if spent and self.cut_turns == "continue" else self.cut_turns


async def play_episode(
    env: ToolEnv, engine: Engine, renderer: Writer, spec: EpisodeSpec, *, sampling: Sampling, player: "Player"
) -> Trajectory:
    """Play one episode.

    Args:
        env: steps in a thread of ``player``, so that other episodes run meanwhile.
        engine: samples the turns.
        renderer: writes messages as tokens.
        spec: task and seed.
        sampling: temperature; ``max_tokens`` is the limit of a turn.
        player: threads, limits and clock.

    Raises:
        InfrastructureError: a sandbox or the engine failed.
    """
    opening, _ = await player.in_thread(env.reset, seed=spec.seed % 2**32, options={"task": spec.task_id})
    segments = [renderer.prompt(opening)]
    tokens = list(segments[0].token_ids)
    rewards, usages = list[float](), list[tuple[int, int]]()
    stop: Stop | None = None
    while stop is None:
        # Only the opening can be too long: later messages are checked before they are appended.
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
        player.gate.observe(engine.cache)
        segments.append(_policy(completion))
        usages += [completion.usage] if completion.usage else []
        tokens += completion.token_ids
        # A cut turn that has filled the room reached the episode's limit, otherwise that of the turn.
        spent = len(completion.token_ids) == room
        action = renderer.text(completion.token_ids)
        if completion.finish == "length":
            action = CutTurn(action, player.limits.after_cut(spent))
        messages, reward, terminated, truncated, _ = await player.in_thread(env.step, action)
        rewards.append(reward)
        if terminated or truncated:
            stop = Stop.TERMINATED if terminated else _why_truncated(action, spent)
            break
        # An answer after which no token could be sampled is dropped: an episode ends with a sampled turn.
        new = renderer.extend(completion.token_ids, messages)
        if len(tokens) + sum(len(segment.token_ids) for segment in new) >= player.limits.episode_tokens:
            stop = Stop.TOKEN_LIMIT
            break
        segments += new
        tokens += [token for segment in new for token in segment.token_ids]
    trajectory = _trajectory(env, spec, segments, rewards, stop, usages)
    assert list(trajectory.token_ids) == tokens, "an episode's record must be the very tokens that were played"
    return trajectory


def _why_truncated(action: str, spent: bool) -> Stop:
    # Gymnasium's flag does not name the limit. Unless a cut turn ended the episode, it was the number of turns.
    if not isinstance(action, CutTurn) or action.then != "end":
        return Stop.TURN_LIMIT
    return Stop.TOKEN_LIMIT if spent else Stop.TURN_CUT


def _policy(completion: Completion) -> Segment:
    cut = completion.finish == "length"
    return Segment("policy", completion.token_ids, completion.logprobs, completion.version, cut, completion.swaps)


def _trajectory(
    env: ToolEnv,
    spec: EpisodeSpec,
    segments: Sequence[Segment],
    rewards: Sequence[float],
    stop: Stop,
    usages: Sequence[tuple[int, int]],
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
        env=spec.env,
        attempt=spec.attempt,
        tags=episode.task.tags,
        answer=episode.answer,
        expected=episode.task.answer,
        usage=(sum(read for read, _ in usages), sum(wrote for _, wrote in usages)) if usages else None,
    )


@dataclass(slots=True, kw_only=True)
class Player:
    """The threads that environments run in, the limits of an episode, and the clock."""

    limits: EpisodeLimits
    """Limits of each episode."""
    threads: ThreadPoolExecutor
    """Threads in which environments step."""
    gate: Gate
    """Bounds the episodes at a time."""
    clock: Clock = field(default_factory=Clock)
    """Time spent so far."""

    async def in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a blocking call of an environment while other episodes run."""

        def timed() -> tuple[Any, float]:
            began = time.perf_counter()
            # A BaseException, such as from sys.exit() in the environment's own code, would end the process.
            result = ask(function.__qualname__, lambda: function(*args, **kwargs), passing=(Exception,))
            return result, time.perf_counter() - began

        call = self.threads.submit(timed)
        done = asyncio.wrap_future(call)
        try:
            result, seconds = await asyncio.shield(done)
        except asyncio.CancelledError:
            # The caller closes the environment next. That must not happen while a thread is still inside of it, even
            # if the caller is cancelled again.
            call.cancel()
            while not done.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([done])
            _ = done.cancelled() or done.exception()  # read, or asyncio would print it
            raise
        self.clock.tools += seconds
        return result

    async def timed(self, completion: Awaitable[Completion]) -> Completion:
        """Wait for a completion, and count the time."""
        began = time.perf_counter()
        result = await completion
        self.clock.engine += time.perf_counter() - began
        return result


class Fleet(ABC):
    """An :class:`Engine` that consists of actors, which play complete groups where they sample."""

    @abstractmethod
    async def probe(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Sequence[Completion]:
        """Sample the same continuation with each actor, at least one."""

    @abstractmethod
    async def play(self, collector: "Collector", request: PlayRequest) -> Collected:
        """Play at least one group with copies of ``collector``."""


class Collector:
    """Plays groups of episodes, many at a time, each on an instance of its environment.

    An infrastructure fault is no outcome of an episode: the episode is retried once on another environment, and if that
    fails too its group is skipped. A request that a server refuses is not retried, and counts as no fault.

    Args:
        envs: each environment's id and own arguments, by the name in an episode's spec.
        renderer: writes messages as tokens.
        limits: how long an episode may be.
        concurrency: most episodes at a time, of all collections together.
        max_fault_rate: share of lost groups above which the collection fails.
    """

    def __init__(
        self,
        envs: Mapping[str, tuple[str, Mapping[str, Any]]],
        renderer: Writer,
        *,
        limits: EpisodeLimits,
        concurrency: int = 64,
        max_fault_rate: float = 0.01,
    ) -> None:
        self._envs = envs
        self._renderer = renderer
        self._renderers: dict[str, Writer] = {}
        self._limits = limits
        self._concurrency = concurrency
        self._max_fault_rate = max_fault_rate
        self._threads: ThreadPoolExecutor | None = None
        self._idle: dict[str, list[ToolEnv]] = {name: [] for name in envs}
        self._gate = Gate(concurrency, limits.episode_tokens)
        self._leaving = set[asyncio.Task[Group | None]]()
        """Groups that were cancelled and have not ended yet."""

    def __getstate__(self) -> dict[str, object]:
        # Threads and environments can't be pickled: another process makes its own.
        gate = Gate(self._concurrency, self._limits.episode_tokens)
        idle = dict[str, list[ToolEnv]]((name, []) for name in self._envs)
        return {**self.__dict__, "_threads": None, "_idle": idle, "_gate": gate, "_leaving": set[Any]()}

    async def collect(
        self,
        specs: Sequence[Sequence[EpisodeSpec]],
        engine: Engine,
        sampling: Sampling,
        *,
        on_episode: Callable[[Trajectory], None] = lambda _: None,
        played: Mapping[int, Trajectory] | None = None,
        enough: int | None = None,
    ) -> Collected:
        """Play groups, here or in the fleet that is their engine, and return the complete ones in order.

        Args:
            specs: one sequence per group, its members' task and seeds.
            engine: samples the turns of the episodes that have no script.
            sampling: temperature; ``max_tokens`` limits a turn.
            on_episode: called with each finished episode.
            played: episodes that were played before, by their seed; they are used as they are.
            enough: once so many groups are complete, the others are cancelled; by default all are played.

        Raises:
            FaultRateError: more groups were lost than ``max_fault_rate`` allows, or no engine answers any more.
        """
        played = played or {}
        ready = [group for group in specs if all(spec.seed in played for spec in group)]
        # A resumed run does not begin groups that it had cancelled.
        specs = ready if enough is not None and len(ready) >= enough else specs
        request = PlayRequest(specs=specs, sampling=sampling, on_episode=on_episode, played=played, enough=enough)
        if specs and isinstance(engine, Fleet):
            collected = await engine.play(self, request)
        else:
            collected = await self.play(request, engine)
        if collected.lost > self._max_fault_rate * len(specs):
            raise FaultRateError(
                f"{collected.lost} of {len(specs)} groups were lost to infrastructure faults, more than "
                f"max_fault_rate={self._max_fault_rate:g} allows; the last fault: {collected.last_fault}"
            ) from collected.last_fault
        return collected

    async def play(self, request: PlayRequest, engine: Engine) -> Collected:
        """Play groups here, however many are lost."""
        began, before = time.perf_counter(), sandbox_counters()
        if self._threads is None:
            # A thread for each episode, since a waiting tool holds its thread. Sandboxes limit running programs.
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="agentrl-env")
        player = Player(limits=self._limits, threads=self._threads, gate=self._gate)
        faults, refused = list[InfrastructureError](), dict[EpisodeSpec, RefusedError]()
        self._gate.observe(engine.cache)

        async def member(spec: EpisodeSpec) -> Trajectory | None:
            trajectory, attempts = request.played.get(spec.seed), 0
            while trajectory is None and attempts < 2:
                attempts += 1
                async with self._gate:
                    try:
                        trajectory = await self._episode(spec, engine, request.sampling, player)
                    except FaultRateError:
                        raise
                    except RefusedError as error:
                        refused[spec] = error
                        break
                    except InfrastructureError as error:
                        faults.append(error)
            if trajectory is not None:
                request.on_episode(trajectory)
            return trajectory

        async def complete(group: Sequence[EpisodeSpec]) -> Group | None:
            async with asyncio.TaskGroup() as members:
                tasks = [members.create_task(member(spec)) for spec in group]
            episodes = [episode for task in tasks if (episode := task.result())]
            return Group(tuple(episodes)) if len(episodes) == len(group) else None

        playing = [asyncio.create_task(complete(group)) for group in request.specs]
        ended, cancelled = await wait_for_enough(
            request.enough, playing, self._leaving, lambda group: group is not None
        )
        groups = tuple(group for group in ended if group)
        return Collected(
            groups=groups,
            faults=len(faults),
            last_fault=faults[-1] if faults else None,
            lost=len(ended) - len(groups) - sum(any(spec in refused for spec in group) for group in request.specs),
            refused=refused,
            cancelled=cancelled,
            seconds=time.perf_counter() - began,
            clock=player.clock,
            sandbox=sandbox_metrics(before, sandbox_counters()),
        )

    async def _episode(self, spec: EpisodeSpec, engine: Engine, sampling: Sampling, player: Player) -> Trajectory:
        # Making an environment may load data sets, so one that has ended an episode without a fault is used again.
        env_id, env_args = self._envs[spec.env]
        env = self._idle[spec.env].pop() if self._idle[spec.env] else make(env_id, **env_args)
        try:
            engine = engine if spec.script is None else ScriptedEngine(spec.script)
            # A template may describe the tools, and each environment has its own.
            if spec.env not in self._renderers:
                dialect = env.dialect
                self._renderers[spec.env] = self._renderer.describing(dialect.template_tools, dialect.marks)
            renderer = self._renderers[spec.env]
            trajectory = await play_episode(env, engine, renderer, spec, sampling=sampling, player=player)
        except BaseException:
            # A broken sandbox goes with its environment, and an error of closing it must not hide the fault.
            with suppress(Exception):
                env.close()
            raise
        # An idle environment is closed too: it must not hold a sandbox that others wait for.
        env.close()
        self._idle[spec.env].append(env)
        return trajectory

    def close(self) -> None:
        """Close every environment and thread."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
