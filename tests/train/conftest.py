"""An environment without a sandbox, and the parts of a small run."""

import asyncio
import copy
import io
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import safetensors.torch
import torch
from torch import Tensor

from agentrl.config import Config, load_config
from agentrl.engines.base import Engine
from agentrl.engines.transformers import TransformersEngine
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import TaskSource
from agentrl.runs.assemble import Parts, make_collector, task_mix, task_source
from agentrl.runs.folder import checkpoints, read_jsonl
from agentrl.runs.progress import Display
from agentrl.segments import complete_rows
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.function import tool
from agentrl.train.overlap import make_source
from agentrl.train.sharded import make_learner
from agentrl.train.step import StepResult, Trainer
from agentrl.types import Segment, Stop, Task, Trajectory

from ..forked import Command, Server

WORDS = ("ab", "cd", "ef", "gh", "ij", "kl")
SMALL = """
[run]
threads = 1
[env]
id = "test/Shout-v0"
args = { tooled = false }
[rollout]
tasks = 3
group_size = 4
turn_tokens = 12
# Its model never stops by itself, and is to have something to learn from.
truncated = { turn = "answer" }
episode_tokens = 160
concurrency = 12
[optim]
steps = 2
minibatches = 2
max_tokens = 400
lr = 1e-3
max_grad_norm = 1e9
[eval]
tasks = 4
every = 0
"""
ARITHMETIC = """
[run]
threads = 1
[model]
tiny = { hidden = 32, layers = 2, heads = 2 }
[sft]
steps = 90
tasks = 16
episodes = 8
lr = 8e-3
[rollout]
tasks = 2
group_size = 3
turn_tokens = 24
truncated = { turn = "answer" }
episode_tokens = 128
concurrency = 6
[optim]
steps = 4
max_tokens = 512
lr = 1e-3
[eval]
tasks = 3
every = 2
[save]
every = 2
episodes_every = 1
"""


TOY = """
import gymnasium
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.types import Task

class Toy(ToolEnv):
    instructions = "Say it."

    def tasks(self, split):
        return TaskList([Task(id=f"{split}:{n}", prompt=f"Say {n}.", answer=str(n)) for n in range(12)])

    def reward(self, episode):
        return {"correct": float(sum(map(ord, episode.final)) % 2)}

    def gold(self, task):
        return ["a"]

gymnasium.register("test/Toy-v0", entry_point=Toy)
"""
"""Any text wins or loses by chance, so that runs which are not the same look different."""


@tool
def python(code: str) -> str:
    """Write it in capitals."""
    return code.upper()


class Shout(ToolEnv):
    """Words to be written in capitals, by a tool called ``python``.

    Args:
        split: which words.
        tooled: whether there is the tool.
        player: the gold player: a good one, one whose answer is wrong, or none.
    """

    instructions = "Shout."

    def __init__(self, *, split: str = "train", tooled: bool = True, player: str = "good", max_turns: int = 3) -> None:
        super().__init__(split=split, max_turns=max_turns)
        self.tools = (python,) if tooled else ()
        self.tooled, self.player = tooled, player

    def tasks(self, split: str) -> TaskList:
        words = WORDS if split == "train" else WORDS[::-1]
        return TaskList([Task(id=f"{split}:{word}", prompt=f"Say {word}.", answer=word.upper()) for word in words])

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """With the tool 1 for the capitals; without it something that every text gets more or less of."""
        if self.tooled:
            return {"correct": float(episode.final == episode.task.answer)}
        return {"correct": sum(map(ord, episode.final)) % 5 / 4}

    def gold(self, task: Task) -> Sequence[str]:
        if self.player == "none":
            return super().gold(task)
        best = str(task.answer) if self.tooled else "h"  # the remainder of 104 by 5 is 4
        calls = [self.dialect.render("python", {"code": best.lower()})] if self.tooled else []
        return [*calls, best if self.player == "good" else "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The parts of a run on ``Shout``."""

    config: Config
    parts: Parts
    players: Collector
    source: TaskSource

    def trainer(self) -> Trainer:
        learner = make_learner(self.config, self.parts.model)
        learner.keep_reference()
        return Trainer(self.config, learner, make_source(self.config, self.mix, self.players, self.parts.engine))

    def weights(self) -> dict[str, Tensor]:
        return {name: weights.detach().clone() for name, weights in self.parts.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        named = self.parts.model.named_parameters()
        return {name: weights.grad.clone() for name, weights in named if weights.grad is not None}

    def on(self, engine: Engine) -> "Small":
        """The same run with another engine."""
        return replace(self, parts=replace(self.parts, engine=engine))

    @property
    def mix(self) -> TaskMix:
        return task_mix(self.config, self.source.split)


Make = Callable[..., Small]
OnDisk = Callable[..., Config]


def rewards_in_time(episode: Trajectory) -> list[float]:
    """Each turn's reward on its last sampled token."""
    turns = zip(episode.sampled, episode.rewards, strict=True)
    return [reward for part, paid in turns for reward in [*[0.0] * (len(part.token_ids) - 1), paid]]


def turn(tokens: Sequence[int], logp: float = -1.0) -> Segment:
    """What version 0 has sampled."""
    return Segment("policy", tuple(tokens), (logp,) * len(tokens), 0)


def trajectory(*segments: Segment, **changed: Any) -> Trajectory:
    """An episode without a reward."""
    rewards = (0.0,) * sum(segment.trained for segment in segments)
    plain = {"task_id": "t", "seed": 0, "segments": segments, "rewards": rewards, "stop": Stop.TERMINATED}
    return Trajectory(**{**plain, **changed})


def trainer_of(run: Small) -> tuple[Trainer, list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """A trainer, and for each of its updates the weights before it and the gradient."""
    trainer = run.trainer()
    updates: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    trainer.learner.optimizer.register_step_pre_hook(lambda *_: updates.append((run.weights(), run.gradients())))
    return trainer, updates


def step(trainer: Trainer, number: int = 1) -> StepResult:
    return asyncio.run(trainer.step(number))


def log_probs_of(model: Any, episode: Trajectory, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of all tokens wherever one was sampled [n, V], and which it was [n], turns in time, from transformers'
    own attention on each row alone."""
    turns: list[tuple[int, Tensor, tuple[int, ...]]] = []
    for row, ids in zip(episode.rows, complete_rows(episode.rows), strict=True):
        logits, begin = model(torch.tensor(ids)[None]).logits[0].float(), row.fork
        for segment in row.segments:
            end = begin + len(segment.token_ids)
            if segment.trained:
                turns.append((segment.turn or 0, logits[begin - 1 : end - 1], ids[begin:end]))
            begin = end
    _, logits, tokens = zip(*sorted(turns, key=lambda turn: turn[0]), strict=True)
    return torch.log_softmax(torch.cat(logits) / temperature, dim=-1), torch.tensor([*itertools.chain(*tokens)])


def logp_of(model: Any, episode: Trajectory, temperature: float = 1.0) -> Tensor:
    """Log-probs of an episode's sampled tokens [n]."""
    logp, tokens = log_probs_of(model, episode, temperature)
    return logp.gather(1, tokens[:, None])[:, 0]


@torch.no_grad()
def energy_of(model: Any, episode: Trajectory, temperature: float = 1.0) -> Tensor:
    """‖onehot(y) − π‖² of an episode's sampled tokens [n]."""
    logp, tokens = log_probs_of(model, episode, temperature)
    return (torch.nn.functional.one_hot(tokens, logp.shape[1]) - logp.exp()).square().sum(1)


def steps_of(run: Small, count: int) -> list[StepResult]:
    """The first steps, all in one event loop."""
    trainer = run.trainer()

    async def go() -> list[StepResult]:
        await trainer.sync(0)
        return [await trainer.step(number) for number in range(1, count + 1)]

    return asyncio.run(go())


def quiet() -> Display:
    return Display(io.StringIO())


@pytest.fixture
def shout(clean_registry: None) -> str:
    """The id of the environment, registered as long as the test runs."""
    gymnasium.register("test/Shout-v0", entry_point=Shout)
    return "test/Shout-v0"


@pytest.fixture
def small(shout: str, one_thread: None, model: Any, tokenizer: Any, tmp_path: Path) -> Generator[Make]:
    """Make the parts of a small run: ``small("optim.lr=1e-2")``."""
    made: list[Small] = []

    def make(*overrides: str, split: str = "train") -> Small:
        path = tmp_path / "small.toml"
        path.write_text(SMALL)
        config = load_config(path=path, overrides=overrides)
        renderer = Renderer(tokenizer)
        engine = TransformersEngine(copy.deepcopy(model), slots=config.rollout.concurrency, max_length=256)
        parts = Parts(model=copy.deepcopy(model), tokenizer=tokenizer, renderer=renderer, engine=engine)
        players = make_collector(config, renderer, split=split, training=True)
        made.append(Small(config=config, parts=parts, players=players, source=task_source(config, split)))
        return made[-1]

    yield make
    for run in made:
        run.players.close()


def is_time(name: str) -> bool:
    """Whether a metric is another one each time."""
    return name.startswith("seconds") or name.endswith("per_second")


def rows_of(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows without the times."""
    rows = read_jsonl(run / file)
    return [{key: value for key, value in row.items() if not is_time(key)} for row in rows]


def setting(*overrides: str) -> list[str]:
    """The words of a command line for so many settings."""
    return [word for override in overrides for word in ("--set", override)]


def same_weights(path: Path, other: Path) -> bool:
    """Whether two runs ended with the same weights, bit by bit."""
    before, after = weights_of(path), weights_of(other)
    return all(torch.equal(before[name], after[name]) for name in before)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    files = checkpoints(run)[-1].glob("model*.safetensors")
    return {name: weight for file in files for name, weight in safetensors.torch.load_file(file).items()}


@pytest.fixture(scope="session")
def warm(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to call the tool, more or less: other runs begin with it."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "warm.toml").write_text(ARITHMETIC)
    settings = setting("eval.tasks=1", "optim.max_tokens=1024", "optim.steps=0")
    server.start(folder, "train", "warm.toml", "--name", "warm", *settings).done()
    return folder / "runs" / "warm" / "checkpoints" / "step-000000"


SHAPED = """
import gymnasium
from agentrl.envs.generated.arithmetic import Arithmetic

class Shaped(Arithmetic):
    def reward(self, episode):
        return {"correct": sum(map(ord, episode.final)) % 5 / 4}

gymnasium.register("test/Shaped-v0", entry_point=Shaped)
"""
"""The problems of Arithmetic with a reward that any text gets some of, so that a bad player learns too."""

AUDITED = """
import os, re, sys
from pathlib import Path

plan = Path("plan.txt")
lines = plan.read_text().splitlines() if plan.exists() else []

def audited(event, arguments, process=os.getpid()):
    number, _, pattern = lines[0].partition(" ") if lines else ("", "", "$.")
    if os.getpid() == process and re.search(pattern, f"{event} {' '.join(map(str, arguments))}"):
        del lines[0]
        plan.write_text("\\n".join(lines))
        reach(int(number))

sys.addaudithook(audited)
"""
"""Reads lines of ``plan.txt``, each a number and a pattern, and calls ``reach(number)``, which the rest of the module
defines, at the next of Python's events that its pattern matches.
"""
JITTERY = f"""{SHAPED}
import os, time

class Jittery(Shaped):
    def respond(self, episode):
        time.sleep(os.urandom(1)[0] / 255 * 0.05)
        return ()

gymnasium.register("test/Jittery-v0", entry_point=Jittery)
"""
"""The clock alone differs between two runs: no seed governs how long a tool's answer takes, at most 50 ms."""

Train = Callable[..., Command]


@pytest.fixture
def train(server: Server, warm: Path, tmp_path: Path) -> Train:
    """Start ``agentrl train`` from the warm model in ``tmp_path``: ``train("name", "optim.steps=3")``."""
    text = ARITHMETIC.replace("[model]", f'[env]\nid = "shaped:test/Shaped-v0"\n[model]\npath = "{warm}"')
    text = text.replace("steps = 90", "steps = 0")

    def start(name: str, *overrides: str) -> Command:
        (tmp_path / "shaped.py").write_text(SHAPED)
        (tmp_path / "run.toml").write_text(text)
        return server.start(tmp_path, "train", "run.toml", "--name", name, *setting(*overrides))

    return start


@pytest.fixture
def on_disk(shout: str, one_thread: None, model: Any, tokenizer: Any, here: Path) -> OnDisk:
    """Makes configs of a small run, in a working folder that has its model."""
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("small.toml").write_text(SMALL)
    return lambda *overrides: load_config(path="small.toml", overrides=["model.path=model", *overrides])
