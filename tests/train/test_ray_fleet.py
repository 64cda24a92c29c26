"""A fleet on Ray plays what one process plays, token by token, whatever of it dies."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
import torch

from agentrl.config import Config, load_config, with_overrides
from agentrl.engines.base import Engine, Sampling
from agentrl.errors import ConfigError, FaultRateError, InfrastructureError, UsageError
from agentrl.rollout.collected import Collected
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import EpisodeSpec
from agentrl.runs.assemble import Parts, assemble, make_collector, task_mix
from agentrl.types import flatten

from ..forked import Command, Server
from .conftest import ARITHMETIC, SHAPED, Train, is_time, rows_of, same_weights, setting
from .test_killed import timeless

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

TOLD = """
import os
import time
from pathlib import Path

import gymnasium
from agentrl.errors import InfrastructureError
from shaped import Shaped

class Told(Shaped):
    '''Says on which node it plays and what it has ended, and does what it is ordered to by files in a folder.'''

    def __init__(self, *, folder, **options):
        super().__init__(**options)
        self.orders, self.seen = Path(folder) / "orders", Path(folder) / "seen"

    def reset(self, **options):
        if (self.orders / "fault").exists():
            raise InfrastructureError("it is down")
        return super().reset(**options)

    def step(self, action):
        (self.seen / f"node {os.environ.get('RAY_RAYLET_PID')}").touch()
        while (self.orders / "wait").exists():
            time.sleep(0.02)
        return super().step(action)

    def reward(self, episode):
        (self.seen / f"task {episode.task.id}").touch()
        if (self.orders / "die").exists():
            (self.orders / "die").unlink()
            os._exit(1)
        return super().reward(episode)

gymnasium.register("test/Told-v0", entry_point=Told)
"""


@dataclass
class World:
    """A cluster and a fleet on it."""

    cluster: Any
    fleet: Any
    config: Config
    mix: TaskMix
    parts: Parts
    folder: Path
    runner: asyncio.Runner

    def collect(
        self, engine: Engine, specs: Sequence[Sequence[EpisodeSpec]] = (), enough: int | None = None
    ) -> Coroutine[Any, Any, Collected]:
        """Six groups of four episodes."""
        collector = make_collector(self.config, self.parts.renderer, split="train")
        tasks = enumerate(self.mix.pick(6, seed=0))
        plan = [[EpisodeSpec(task_id=task.id, seed=10 * n + m) for m in range(4)] for n, (_, task) in tasks]
        return collector.collect(specs or plan, engine, Sampling(max_tokens=24), enough=enough)

    def weights(self, factor: float) -> list[tuple[str, torch.Tensor]]:
        """Weights that sample other tokens for each factor."""
        return [(name, weights * factor) for name, weights in self.parts.model.named_parameters()]

    async def local(self, version: int, factor: float) -> Collected:
        """The same groups, played by this process, with weights that the fleet is given too."""
        await self.fleet.load_weights(self.weights(factor), version)
        await self.parts.engine.load_weights(self.weights(factor), version)
        return await self.collect(self.parts.engine)

    async def rejoined(self) -> None:
        """Wait until all actors can play."""
        await until(lambda: all(slot.ready for slot in self.fleet._slots))

    def order(self, name: str) -> Path:
        """Have environments do something."""
        (path := self.folder / "orders" / name).touch()
        return path

    def forget(self) -> None:
        """Begin anew with what was seen."""
        for path in (self.folder / "seen").iterdir():
            path.unlink()

    def seen(self, kind: str) -> set[str]:
        """On which nodes episodes were played, or of which tasks they have ended."""
        return {path.name.partition(" ")[2] for path in (self.folder / "seen").glob(f"{kind} *")}

    async def held(self) -> tuple[Path, asyncio.Task[Collected]]:
        """Begin to play; both actors wait in a tool until the file is gone."""
        self.forget()
        waiting, playing = self.order("wait"), asyncio.create_task(self.collect(self.fleet))
        await until(lambda: len(self.seen("node")) == 2)
        return waiting, playing


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, but not for ever."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.05)


def actors() -> list[psutil.Process]:
    """Those on the nodes of this process's cluster."""
    # As text, since asking for the name of one that ends at this moment raises.
    return [process for process in psutil.Process().children(recursive=True) if "name='ray::Actor" in str(process)]


def sandboxes() -> dict[psutil.Process, list[psutil.Process]]:
    """The processes of each actor's sandboxes."""
    return {actor: actor.children(recursive=True) for actor in actors()}


def all_gone(before: dict[psutil.Process, list[psutil.Process]]) -> bool:
    """Whether actors, one of which had a sandbox, end with all of their processes."""
    processes = [*before, *(process for others in before.values() for process in others)]
    return len(processes) > len(before) and not psutil.wait_procs(processes, timeout=60)[1]


def untimed(collected: Collected) -> Any:
    sandbox = {name: count for name, count in collected.sandbox.items() if not is_time(name)}
    return [timeless(episode) for episode in flatten(collected.groups)], collected.faults, collected.lost, sandbox


@pytest.fixture(scope="module")
def cluster() -> Generator[Any]:
    """Three nodes: one for Ray itself, and two with room for an actor each."""
    from .three_nodes import three_nodes

    with three_nodes() as cluster:
        yield cluster
        ray.shutdown()


@pytest.fixture(scope="module")
def world(cluster: Any, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    """Two actors, and what one process needs to play the same."""
    folder = tmp_path_factory.mktemp("fleet")
    for name, text in {"shaped": SHAPED, "told": TOLD}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "run.toml").write_text(ARITHMETIC.replace("steps = 90", "steps = 0"))
    settings = [f"model.path={warm}", *messages_of(folder), "rollout.concurrency=4", *on(cluster)]
    settings.append("fleet.options.collective=true")  # the run of the last test has its weights from the store
    config = load_config(path=folder / "run.toml", overrides=settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)  # from here the actors import too
        mix = task_mix(config, "train")
        parts = assemble(config, mix)
        fleet = assemble(config, mix, fleet=True).engine
        with closing(fleet), asyncio.Runner() as runner:
            yield World(cluster, fleet, config, mix, parts, folder, runner)
    for env_id in ("test/Told-v0", "test/Shaped-v0"):
        gymnasium.registry.pop(env_id)


def messages_of(folder: Path) -> list[str]:
    """Settings of an environment that is ordered about in a folder."""
    for name in ("orders", "seen"):
        (folder / name).mkdir()
    return ["env.id=told:test/Told-v0", f"env.args.folder={folder}"]


def on(cluster: Any, actors: int = 2) -> list[str]:
    """Settings of a fleet."""
    options = f"{{actors = {actors}, address = '{cluster.address}', resources = {{player = 1}}}}"
    return ["fleet.name=ray", f"fleet.options={options}"]


def test_actors_play_what_one_process_plays(world: World) -> None:
    assert (world.fleet.exact, world.fleet.rounding) == (world.parts.engine.exact, world.parts.engine.rounding)
    locally, on_ray = world.runner.run(world.local(3, 1.0)), world.runner.run(world.collect(world.fleet))
    assert untimed(on_ray) == untimed(locally)
    assert world.runner.run(world.fleet._broadcast(world.fleet._slots, dict(world.weights(1.0)))), "not by the store"
    assert on_ray.sandbox["sandbox_ok"] > 5, "tools must run, or nothing is shown"
    assert len(world.seen("node") - {"None"}) == 2, "each plays some"


def test_an_actor_that_dies_loses_nothing_and_comes_back_with_the_newest_weights(world: World) -> None:
    async def die() -> None:
        here = await world.local(4, 1.1)
        await world.collect(world.fleet)  # each actor has a sandbox now, whatever test was before
        world.order("die")
        before = sandboxes()
        collected = await world.collect(world.fleet)
        assert untimed(collected)[0] == untimed(here)[0] and not collected.lost
        assert collected.faults in (4, 8), "its groups' episodes are counted"
        [dead] = before.keys() - actors()
        assert all_gone({dead: before[dead]}), "its sandbox's processes end with it"
        # It is not back yet, so it is not among those that are given these.
        assert [slot.ready for slot in world.fleet._slots].count(False) == 1
        here = await world.local(5, 1.2)
        await world.rejoined()
        world.forget()
        assert untimed(await world.collect(world.fleet)) == untimed(here)
        assert len(world.seen("node")) == 2, "it plays again"

    world.runner.run(die())


def test_a_node_that_dies_loses_nothing_and_its_actor_waits_for_another(world: World) -> None:
    async def die() -> None:
        here = await world.local(6, 1.1)
        waiting, playing = await world.held()
        before = sandboxes()
        world.cluster.remove_node(world.cluster.list_all_nodes()[-1], allow_graceful=False)
        # It outlives its node by a moment, in which it must not end its episodes.
        await until(lambda: bool(psutil.wait_procs(before, timeout=0)[0]))
        waiting.unlink()
        assert untimed(await playing)[0] == untimed(here)[0]
        assert [slot.ready for slot in world.fleet._slots].count(False) == 1, "there is no room for it"
        [dead] = before.keys() - actors()
        assert all_gone({dead: before[dead]}), "its sandbox's processes end with it"
        world.cluster.add_node(num_cpus=1, resources={"player": 1}, object_store_memory=100 << 20)
        await world.rejoined()
        assert untimed(await world.collect(world.fleet)) == untimed(here)

    world.runner.run(die())


def test_episodes_that_nobody_waits_for_any_more_are_not_played(world: World) -> None:
    async def cancel() -> None:
        waiting, playing = await world.held()
        playing.cancel()
        await asyncio.wait({playing})
        # An actor that answers has heard of what was cancelled before.
        for _ in range(2):
            await asyncio.gather(*(slot.handle.greet.remote() for slot in world.fleet._slots))
        waiting.unlink()
        # Those of before would come first.
        _, last = world.mix.pick(7, seed=0)[-1]
        await world.collect(world.fleet, [[EpisodeSpec(task_id=last.id, seed=n) for n in range(4)]] * 2)
        assert world.seen("task") == {last.id}

    world.runner.run(cancel())


def test_spare_groups_are_cancelled_once_enough_are_complete(world: World) -> None:
    locally = world.runner.run(world.local(9, 1.0))
    on_ray = world.runner.run(world.collect(world.fleet, enough=2))
    # Each of the two actors plays one group at a time.
    assert 2 <= len(on_ray.groups) <= 4 and on_ray.lost == 0
    assert on_ray.cancelled == 6 - len(on_ray.groups)
    played = {episode.seed: timeless(episode) for episode in flatten(locally.groups)}
    assert all(timeless(episode) == played[episode.seed] for episode in flatten(on_ray.groups))


def test_what_an_actor_raises_comes_as_itself(world: World, clean_registry: None) -> None:
    def raised(kind: type[Exception], wanted: str, work: Coroutine[Any, Any, Any]) -> None:
        with pytest.raises(kind, match=wanted):
            world.runner.run(work)

    # What only this process knows is as good as what is missing on another node.
    gymnasium.register("test/Here-v0", entry_point="nowhere:Here")
    here = with_overrides(world.config, ["env.id=test/Here-v0", "env.args={}"])
    collector = make_collector(here, world.parts.renderer, split="train")
    specs = [[EpisodeSpec(task_id="nothing", seed=0)]]
    where = rf"^on {socket.gethostname()}, where an actor of the fleet plays: "
    play = partial(collector.collect, specs, world.fleet, Sampling(max_tokens=24))
    raised(UsageError, where + "no environment is called 'test/Here-v0'; ", play())
    raised(UsageError, where + "no task is called 'nothing'", world.collect(world.fleet, specs))
    raised(ConfigError, "the seed -1 is not in ", world.fleet.generate((1,), Sampling(), seed=-1))
    unknown = world.fleet.load_weights([("nothing", torch.zeros(1))], 7)
    raised(InfrastructureError, r"^the engine's model has no parameter 'nothing' \[1\]$", unknown)
    down = world.order("fault")
    raised(FaultRateError, "^6 of 6 groups were lost .* the last fault: it is down$", world.collect(world.fleet))
    down.unlink()


def test_weights_in_flight_and_an_actor_that_is_killed(world: World) -> None:
    async def fly() -> Collected:
        await world.fleet.load_weights(world.weights(1.0), 7)
        waiting, playing = await world.held()
        await world.fleet.load_weights(world.weights(1.1), 8)
        min(actors(), key=lambda actor: actor.pid).kill()
        waiting.unlink()
        return await playing

    collected = world.runner.run(fly())
    assert [len(group) for group in collected.groups] == [4] * 6 and collected.faults >= 4
    episodes = flatten(collected.groups)
    versions = [{version for turn in episode.sampled for version in turn.token_versions} for episode in episodes]
    assert set().union(*versions) == {7, 8} and {7, 8} in versions, "some have turns of both"
    assert {8} in versions, "what is played again is of the newest"


def test_what_a_cluster_can_not_give(world: World) -> None:
    def refused(*overrides: str) -> str:
        config = with_overrides(world.config, overrides)
        with pytest.raises(ConfigError) as caught:
            assemble(config, world.mix, fleet=True)
        return str(caught.value)

    message = refused("fleet.options.actors=3")
    assert "fleet.options.actors=3 of {CPU: 1, player: 1} each do not fit the 3 nodes of the Ray cluster" in message
    assert "which have room for 2: set it from 1 to that" in message
    assert "room for 0" in refused("fleet.options.gpus=1")
    assert "can't be made with fleet.options" in refused("fleet.options.actor=3")
    assert ray.is_initialized(), "another user of the connection keeps it"


def test_a_run_that_is_killed_and_stopped_and_alone(world: World, train: Train, server: Server, tmp_path: Path) -> None:
    settings = ["run.deterministic=true", "rollout.concurrency=3", "save.every=1", "rollout.overlap=lag"]
    settings += ["optim.steps=6", *messages_of(tmp_path)]
    (tmp_path / "told.py").write_text(TOLD)
    waiting = tmp_path / "orders" / "wait"
    local = train("local", *settings)
    world.fleet.close()
    ray.shutdown()
    run, command = tmp_path / "runs" / "ray", train("ray", *settings, *on(world.cluster))

    def stopped_at(step: int, command: Command, stop: Callable[[], object]) -> tuple[int, str]:
        command.until(lambda: (run / "checkpoints" / f"step-{step:06d}").exists())
        waiting.touch()
        before = sandboxes()
        stop()
        code = command.wait()
        waiting.unlink()
        assert len(before) == 2 and all_gone(before), "actors end with the run"
        return code, command.err

    def resumed(*overrides: str) -> Command:
        return server.start(tmp_path, "train", "--resume", str(run), *setting(*overrides))

    stopped_at(2, command, lambda: os.kill(command.pid, signal.SIGKILL))
    command = resumed()
    code, message = stopped_at(3, command, lambda: os.kill(command.pid, signal.SIGINT))
    assert code == 130 and f"go on with: agentrl train --resume {run}" in message
    command = resumed()
    cluster = world.cluster
    code, message = stopped_at(4, command, lambda: cluster.remove_node(cluster.head_node, allow_graceful=False))
    assert code == 1 and ("GCS may have been killed" in message or "node that it is on has died" in message)
    resumed("fleet.name=local").done()
    local.done()
    wanted = tmp_path / "runs" / "local"
    assert rows_of(run) == rows_of(wanted) and rows_of(run, "evals.jsonl") == rows_of(wanted, "evals.jsonl")
    assert same_weights(run, wanted)


def test_a_cluster_that_is_not_there(world: World) -> None:
    ray.shutdown()
    with pytest.raises(ConfigError, match=r"^no Ray cluster can be reached at .*'127.0.0.1:1': start one [^\n]*$"):
        assemble(with_overrides(world.config, ["fleet.options.address='127.0.0.1:1'"]), world.mix, fleet=True)
