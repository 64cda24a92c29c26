"""A small game with a tool, and its episodes as files; a token is a character."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import agentrl
from agentrl.runs.records import write_episodes
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tools.function import ToolContext
from agentrl.toolenv.versions import code_versions
from agentrl.types import CutTurn, Message, Origin, Segment, Stop, Task, Trajectory

from ..runs.origins import Signs

ID = "test/Sums-v0"


def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


class Sums(ToolEnv):
    """Sums of two numbers; what a test changes, it changes on the class."""

    instructions = "Add."
    adds: ClassVar[Callable[[int, int], str]] = add
    right: ClassVar[Callable[[str, str], bool]] = str.__eq__

    def __init__(self, *, notes: str = "", **options: Any) -> None:
        super().__init__(**{"dialect": "hermes", "max_turns": 3, **options})

        @agentrl.tool
        def add(a: int, b: int, ctx: ToolContext) -> str:
            """Add two numbers."""
            return type(self).adds(a, b)

        self.tools = (add,)

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=f"{split}:{a}", prompt=f"{a} + 7?", answer=str(a + 7)) for a in range(8)]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": type(self).right(episode.final.strip(), episode.task.answer)}


def boxed(text: str, answer: str) -> bool:
    """Grade the last box alone, as text."""
    return text.rpartition(r"\boxed{")[2].rstrip("}.") == answer


def call(a: int, b: int = 7) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def play(task: int, *turns: str, seed: int = 0, **options: Any) -> Trajectory:
    """Play an episode of the game."""
    return episode(Sums(**options), f"train:{task}", *turns, seed=seed)


def episode(env: ToolEnv, task_id: str, *turns: str, seed: int = 0) -> Trajectory:
    """Play an episode as the collector does; it runs out of tokens where the turns don't end it."""
    observation, _ = env.reset(seed=seed % 2**32, options={"task": task_id})
    segments, rewards, stop = [Segment("prompt", ids(observation))], list[float](), Stop.TOKEN_LIMIT
    for turn in turns:
        cut = isinstance(turn, CutTurn)
        segments.append(Segment("policy", tuple(map(ord, turn)), (-0.5,) * len(turn), 0, cut))
        observation, reward, terminated, truncated, _ = env.step(turn)
        rewards.append(reward)
        if terminated or truncated:
            limit = Stop.TURN_CUT if cut and not observation else Stop.TURN_LIMIT
            stop = Stop.TERMINATED if terminated else limit
            break
        segments.append(Segment("tool", ids(observation)))
    if rewards and env.episode.stop is None:
        rewards[-1] += env.truncate(stop)
    if stop is Stop.TOKEN_LIMIT:
        segments.pop()  # as where the answer had no room
    played = env.episode
    env.close()
    return Trajectory(
        task_id=task_id,
        seed=seed,
        segments=tuple(segments),
        rewards=tuple(rewards),
        stop=stop,
        messages=played.messages,
        parts=played.parts or {},
        tool_runs=played.tool_runs,
    )


def ids(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(ord(sign) for message in messages for sign in message["content"])


def origin(**changes: Any) -> Origin:
    plain: dict[str, Any] = {"env_id": ID, "env_args": {}, "split": "train", "best_return": 1.0, "dialect": "hermes"}
    versions = code_versions(Sums)
    return Origin(**({**plain, "temperature": 1.0, "turn_tokens": 99, "versions": versions} | changes))


def save(path: Path, *episodes: Trajectory, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_episodes(path, episodes, Signs(), origin(**changes))
    return path
