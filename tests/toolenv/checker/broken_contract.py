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

from .good import Broken, Good, Memory


class LacksAFile(Good):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        raise FileNotFoundError("problems.jsonl")


class GoldRaises(Good):
    def gold(self, task: Task) -> Sequence[str]:
        raise KeyError("solution")


class FirstIsList(Good):
    def reset(self, **options: Any) -> Any:
        first, info = super().reset(**options)
        return list(first), info


class FirstEndsWithSystem(Good):
    def reset(self, **options: Any) -> Any:
        _, info = super().reset(**options)
        assert self._episode is not None
        self._episode = replace(self._episode, messages=self._episode.messages[::-1])
        return self._episode.messages, info


class FirstDrawn(Good):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.instructions = f"Hint {seed}."
        return super().reset(seed=seed, options=options)


class FirstOfEachInstance(Good):
    instances: ClassVar[Any] = itertools.count()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.instructions = f"Instance {next(self.instances)}."


class GoldWrong(Good):
    def gold(self, task: Task) -> Sequence[str]:
        return [r"\boxed{42}"]


class GoldTooLong(Good):
    def gold(self, task: Task) -> Sequence[str]:
        return [rf"\boxed{{{task.answer}}}", "Thank you."]


class GoldStumbles(Good):
    """States the right answer after a call that fails."""

    def gold(self, task: Task) -> Sequence[str]:
        return [self.dialect.render("python", {"code": "random"}), rf"\boxed{{{task.answer}}}"]


class GoldCallsNobody(Good):
    def gold(self, task: Task) -> Sequence[str]:
        return ["```python\n1", rf"\boxed{{{task.answer}}}"]


class ErrorsEnd(Good):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        failed = any(not run.ok for run in self.episode.tool_runs)
        return messages, reward, terminated or failed, truncated, info


class AsciiOnly(Good):
    def step(self, action: str) -> Any:
        action.encode("ascii")
        return super().step(action)


class BothFlags(Good):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward, terminated, truncated or terminated, info


class LimitTerminates(Good):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward, terminated or truncated, False, info


class RemembersEpisodes(Good):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.heard = 0

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        self.heard += 1
        return ({"role": "user", "content": f"Turn {self.heard}."},)


class SharedMemory(Memory):
    everyone: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.said = self.everyone


class Shares(Good):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tools = (SharedMemory(),)


class SaysSurrogates(Good):
    def respond(self, episode: Episode) -> Any:
        return ({"role": "user", "content": "\ud800"},)


class NeverEnds(Good):
    def step(self, action: str) -> Any:
        messages, reward, _, _, info = super().step(action)
        self._episode = replace(self.episode, parts=None)
        return messages, reward, False, False, info


class TurnsUnlimited(Good):
    def step(self, action: str) -> Any:
        limit, self.max_turns = self.max_turns, 100
        result = super().step(action)
        self.max_turns = limit
        return result


class PaysNan(Good):
    def turn_reward(self, episode: Episode) -> float:
        return math.nan


class PaysArrays(Good):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, np.float32(reward), terminated, truncated, info


class ForgetsTheBeginning(Good):
    """Makes room in the context by leaving out what was said first."""

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        object.__setattr__(episode, "messages", episode.messages[-2:])
        return ()


class EditsTheAgent(Good):
    """Takes the white space off what the agent wrote."""

    def step(self, action: str) -> Any:
        return super().step(f"{action} ")


class EditsItsAnswers(Good):
    """Marks the question as old in the very message that the agent was given."""

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        question = next(message for message in episode.messages if message["role"] == "user")
        question["content"] = question["content"].removesuffix(" (old)") + " (old)"
        return ()


class StepsAnywhere(Good):
    """Takes turns after the end as if nothing had happened."""

    def step(self, action: str) -> Any:
        try:
            return super().step(action)
        except EnvContractError:
            return (), 0.0, True, False, {}


class RaisesSomethingElse(Good):
    def step(self, action: str) -> Any:
        try:
            return super().step(action)
        except EnvContractError as error:
            raise AttributeError("episode") from error


BROKEN: list[Broken] = [
    *((LacksAFile, {"ARL-E000"}), (GoldRaises, {"ARL-E000"}), (FirstIsList, {"ARL-E001"})),
    *((FirstEndsWithSystem, {"ARL-E001"}), (FirstDrawn, {"ARL-E002"}), (FirstOfEachInstance, {"ARL-E002"})),
    *((GoldWrong, {"ARL-E003"}), (GoldTooLong, {"ARL-E003"}), (GoldStumbles, {"ARL-E022"})),
    *((GoldCallsNobody, {"ARL-E022"}), (ErrorsEnd, {"ARL-E004"}), (AsciiOnly, {"ARL-E005"})),
    *((BothFlags, {"ARL-E006"}), (LimitTerminates, {"ARL-E006"}), (NeverEnds, {"ARL-E011"})),
    *((RemembersEpisodes, {"ARL-E007"}), (Shares, {"ARL-E008"}), (SaysSurrogates, {"ARL-E010"})),
    *((TurnsUnlimited, {"ARL-E011"}), (PaysNan, {"ARL-E012"}), (PaysArrays, {"ARL-E012"})),
    *((ForgetsTheBeginning, {"ARL-E016"}), (EditsTheAgent, {"ARL-E016"}), (EditsItsAnswers, {"ARL-E016"})),
    *((StepsAnywhere, {"ARL-E017"}), (RaisesSomethingElse, {"ARL-E017"})),
]
