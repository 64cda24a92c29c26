"""Environments that break the contract of ``reset`` and ``step``, each in one way."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from agentrl.errors import EnvContractError
from agentrl.toolenv.base import Episode
from agentrl.types import Message, Task

from .good import Good, Memory


class LacksAFile(Good, codes="ARL-E000"):
    def __init__(self, **_: Any) -> None:
        raise FileNotFoundError("problems.jsonl")


class GoldRaises(Good, codes="ARL-E000"):
    def gold(self, task: Task) -> Sequence[str]:
        raise KeyError("solution")


class FirstIsList(Good, codes="ARL-E001"):
    def reset(self, **options: Any) -> Any:
        observation, info = super().reset(**options)
        return list(observation), info


class FirstEndsWithSystem(Good, codes="ARL-E001"):
    def reset(self, **options: Any) -> Any:
        _, info = super().reset(**options)
        assert self._episode is not None
        self._episode = replace(self._episode, messages=self._episode.messages[::-1])
        return self._episode.messages, info


class FirstDrawn(Good, codes="ARL-E002", shows=r"'Hint 7\..*' and 'Hint 8\."):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.instructions = f"Hint {seed}."
        return super().reset(seed=seed, options=options)


class FirstOfEachInstance(Good, codes="ARL-E002", shows=r"'Instance (\d+)\..*' and 'Instance (?!\1)"):
    instances: ClassVar[Any] = itertools.count()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.instructions = f"Instance {next(self.instances)}."


class GoldWrong(Good, codes="ARL-E003"):
    def gold(self, task: Task) -> Sequence[str]:
        return [r"\boxed{42}"]


class GoldTooLong(Good, codes="ARL-E003"):
    def gold(self, task: Task) -> Sequence[str]:
        return [rf"\boxed{{{task.answer}}}", "Thank you."]


class GoldStumbles(Good, codes="ARL-E022", shows=r"'python' failed with 'there is no chance here' on task 'train:0'"):
    """States the right answer after a call that fails."""

    def gold(self, task: Task) -> Sequence[str]:
        return [self.dialect.render("python", {"code": "random"}), rf"\boxed{{{task.answer}}}"]


class ErrorsEnd(Good, codes="ARL-E004"):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        failed = any(not run.ok for run in self.episode.tool_runs)
        return messages, reward, terminated or failed, truncated, info


class AsciiOnly(Good, codes="ARL-E005"):
    def step(self, action: str) -> Any:
        action.encode("ascii")
        return super().step(action)


class BothFlags(Good, codes="ARL-E006"):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward, terminated, truncated or terminated, info


class LimitTerminates(Good, codes="ARL-E006"):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward, terminated or truncated, False, info


class RemembersEpisodes(Good, codes="ARL-E007", shows=r"Turn (\d+)\.' and '.*Turn (?!\1\.)"):
    heard = 0

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        self.heard += 1
        return ({"role": "user", "content": f"Turn {self.heard}."},)


class SharedMemory(Memory):
    def __deepcopy__(self, memo: object) -> "SharedMemory":
        return self


class Shares(Good, codes="ARL-E008", shows=r"'x = 41 \| print\(x \+ 1\)' and 'print\(x \+ 1\) \| "):
    tools = (SharedMemory(),)


class SaysSurrogates(Good, codes="ARL-E010"):
    def respond(self, episode: Episode) -> Any:
        return ({"role": "user", "content": "\ud800"},)


class NeverEnds(Good, codes="ARL-E011"):
    def step(self, action: str) -> Any:
        messages, reward, _, _, info = super().step(action)
        self._episode = replace(self.episode, parts=None, stop=None)
        return messages, reward, False, False, info


class TurnsUnlimited(Good, codes="ARL-E011"):
    def step(self, action: str) -> Any:
        limit, self.max_turns = self.max_turns, 100
        result = super().step(action)
        self.max_turns = limit
        return result


class PaysNan(Good, codes="ARL-E012"):
    def turn_reward(self, episode: Episode) -> float:
        return math.nan


class PaysArrays(Good, codes="ARL-E012"):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, np.float32(reward), terminated, truncated, info


class EditsTheAgent(Good, codes="ARL-E016"):
    """Takes the white space off what the agent wrote."""

    def step(self, action: str) -> Any:
        return super().step(f"{action} ")


class EditsItsAnswers(Good, codes="ARL-E016"):
    """Marks the question as old in the very message that the agent was given."""

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        question = next(message for message in episode.messages if message["role"] == "user")
        question["content"] = question["content"].removesuffix(" (old)") + " (old)"
        return ()


class StepsAnywhere(Good, codes="ARL-E017"):
    """Takes turns after the end as if nothing had happened."""

    def step(self, action: str) -> Any:
        try:
            return super().step(action)
        except EnvContractError:
            return (), 0.0, True, False, {}


class RaisesSomethingElse(Good, codes="ARL-E017"):
    def step(self, action: str) -> Any:
        try:
            return super().step(action)
        except EnvContractError as error:
            raise AttributeError("episode") from error
