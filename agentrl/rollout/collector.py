"""Play many groups of episodes concurrently."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import EnvContractError, FaultRateError, InfrastructureError, RefusedError
from agentrl.render.transcript import Writer
from agentrl.rollout.collected import Collected
from agentrl.rollout.driver import Driver, StepDriver
from agentrl.rollout.enough import wait_for_enough
from agentrl.rollout.metrics import sandbox_metrics
from agentrl.rollout.plan import EpisodeSpec, PlayRequest
from agentrl.rollout.player import EpisodeLimits, Player
from agentrl.rollout.policy import Policy
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.registry import make
from agentrl.toolenv.tools.python import sandbox_counters
from agentrl.types import Group, Trajectory

_FEW = 8
"""So many groups may be lost before a collection ends early, since an engine may have more to say about its end."""
_SAID = 3
"""Most faults whose sentences a collector prints."""


def _nothing(_: str) -> None:
    """Print nothing."""


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
        driver: plays each episode.
        concurrency: most episodes at a time, of all collections together.
        max_fault_rate: share of lost groups above which the collection fails.
        say: prints a line, such as the sentence of an infrastructure fault when it happens; a copy in another process
            prints none.
    """

    def __init__(
        self,
        envs: Mapping[str, tuple[str, Mapping[str, Any]]],
        renderer: Writer,
        *,
        limits: EpisodeLimits,
        driver: Driver | None = None,
        concurrency: int = 64,
        max_fault_rate: float = 0.01,
        say: Callable[[str], None] = _nothing,
    ) -> None:
        self._envs = envs
        self._renderer = renderer
        self._renderers: dict[str, Writer] = {}
        self._limits, self._driver = limits, driver or StepDriver()
        self._concurrency = concurrency
        self._max_fault_rate = max_fault_rate
        self._say, self._said = say, set[str]()
        self._threads: ThreadPoolExecutor | None = None
        self._idle: dict[str, list[ToolEnv]] = {name: [] for name in envs}
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        """One for each episode at a time, and the event loop that they belong to."""
        self._leaving = set[asyncio.Task[Group | None]]()
        """Groups that were cancelled and have not ended yet."""

    def __getstate__(self) -> dict[str, object]:
        # Threads and environments can't be pickled: another process makes its own.
        idle = dict[str, list[ToolEnv]]((name, []) for name in self._envs)
        return {
            **self.__dict__,
            "_threads": None,
            "_idle": idle,
            "_places": None,
            "_leaving": set[Any](),
            "_say": _nothing,
        }

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
        request = PlayRequest(
            specs=specs,
            sampling=sampling,
            on_episode=on_episode,
            played=played,
            enough=enough,
            most_lost=max(self._max_fault_rate * len(specs), _FEW),
        )
        if specs and isinstance(engine, Fleet):
            # Its actors do not know how many groups the others have lost.
            collected = await engine.play(self, replace(request, most_lost=math.inf))
        else:
            collected = await self.play(request, engine)
        if collected.last_fault:
            self._tell(collected.last_fault)
        self._check_lost(collected.lost, self._max_fault_rate * len(specs), request, collected.last_fault)
        return collected

    def _check_lost(self, lost: int, most: float, request: PlayRequest, fault: InfrastructureError | None) -> None:
        if lost > most:
            raise FaultRateError(
                f"{lost} of {len(request.specs)} groups were lost to infrastructure faults, more than "
                f"max_fault_rate={self._max_fault_rate:g} allows; the last fault: {fault}"
            ) from fault

    def _tell(self, fault: InfrastructureError) -> None:
        """Print a fault's sentence, the first few that differ: a machine that lacks something causes one many times."""
        if len(self._said) < _SAID and str(fault) not in self._said:
            self._said.add(str(fault))
            self._say(f"infrastructure fault: {fault}")

    async def play(self, request: PlayRequest, engine: Engine) -> Collected:
        """Play groups here, however many are lost."""
        began, before = time.perf_counter(), sandbox_counters()
        if self._threads is None:
            # A thread for each episode, since a waiting tool holds its thread. Sandboxes limit running programs.
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="agentrl-env")
        if self._places is None or self._places[0] is not asyncio.get_running_loop():
            self._places = asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency)
        _, places = self._places
        player, lost = Player(limits=self._limits, threads=self._threads), list[Sequence[EpisodeSpec]]()
        faults, refused = list[InfrastructureError](), dict[EpisodeSpec, RefusedError]()

        async def attempt(spec: EpisodeSpec) -> Trajectory | None:
            try:
                return None if spec in refused else await self._episode(spec, engine, request.sampling, player)
            except FaultRateError:
                raise
            except RefusedError as error:
                refused[spec] = error
            except InfrastructureError as error:
                faults.append(error)
                self._tell(error)

        async def member(spec: EpisodeSpec) -> Trajectory | None:
            trajectory = request.played.get(spec.seed)
            if trajectory is None:
                # Its retry comes before other episodes begin: where all fail, few are tried.
                async with places:
                    trajectory = await attempt(spec)
                    trajectory = await attempt(spec) if trajectory is None else trajectory
            if trajectory is not None:
                request.on_episode(trajectory)
            return trajectory

        async def complete(group: Sequence[EpisodeSpec]) -> Group | None:
            async with asyncio.TaskGroup() as members:
                tasks = [members.create_task(member(spec)) for spec in group]
            episodes = [episode for task in tasks if (episode := task.result())]
            if len(episodes) == len(group):
                return Group(tuple(episodes))
            # What is lost for sure is not waited for: a machine that can't play any episode would fail all of them.
            if not any(spec in refused for spec in group):
                lost.append(group)
                self._check_lost(len(lost), request.most_lost, request, faults[-1])
            return None

        playing = [asyncio.create_task(complete(group)) for group in request.specs]
        ended, cancelled = await wait_for_enough(request.enough, playing, self._leaving, bool)
        groups = tuple(group for group in ended if group)
        return Collected(
            groups=groups,
            faults=len(faults),
            last_fault=faults[-1] if faults else None,
            lost=len(lost),
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
            policy = Policy(engine, self._renderers[spec.env], spec, sampling, player)
            with policy.sub_agents(env):
                await self._driver.play(env, policy, spec)
            trajectory = _trajectory(env, policy, self._limits, sampling.max_tokens)
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


def _trajectory(env: ToolEnv, policy: Policy, limits: EpisodeLimits, turn_tokens: int) -> Trajectory:
    episode, spec, rows = env.episode, policy.spec, policy.rows()
    if episode.stop is None:
        raise EnvContractError("a driver returned before its episode ended: call env.truncate with the reason")
    return Trajectory(
        task_id=spec.task_id,
        seed=spec.seed,
        segments=rows[0].segments if len(rows) == 1 else (),
        rows=() if len(rows) == 1 else rows,
        rewards=tuple(policy.rewards),
        penalty=limits.penalty_of(rows, episode.stop, turn_tokens),
        stop=episode.stop,
        messages=episode.messages,
        parts=episode.parts or {},
        tool_runs=episode.tool_runs,
        env=spec.env,
        attempt=spec.attempt,
        tags=episode.task.tags,
        answer=episode.answer,
        expected=episode.task.answer,
        usage=(sum(read for read, _ in policy.usages), sum(wrote for _, wrote in policy.usages))
        if policy.usages
        else None,
        steps=() if policy.steps == [*range(len(policy.rewards))] else tuple(policy.steps),
        forks=dict(+policy.forks),
        exchanges=tuple(episode.exchanges.new),
    )
