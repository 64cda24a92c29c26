"""Environments that pay for the wrong thing, each in one way."""

import contextlib
import io
import random
import re
from collections.abc import Mapping
from typing import ClassVar

from agentrl.grading.numbers import equal, last_boxed
from agentrl.toolenv.base import Episode
from agentrl.toolenv.tools.function import ToolContext
from agentrl.types import Task

from .good import Good, Memory


class ScoresAlways(Good, codes="ARL-E009"):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": 1.0}


class ScoresAnyBox(Good, codes="ARL-E009"):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(f"boxed{{{episode.task.answer}}}" in episode.final)}


class ScoresLength(Good, codes="ARL-E009"):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        right = last_boxed(episode.final) == episode.task.answer
        return {"correct": 1.0 if right else min(len(episode.final) / 1000, 0.5)}


class ScoresCalculations(Good, codes="ARL-E009"):
    def asked(self, index: int, prompt: str, answer: str) -> Task:
        return super().asked(index, f"Compute {answer} * 7.", f"{int(answer) * 7}")

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(equal(last_boxed(episode.final), episode.task.answer))}


class ReadsTheTool(Good, codes="ARL-R001"):
    """Looks for the answer in the whole conversation."""

    def reward(self, episode: Episode) -> Mapping[str, float]:
        contents = [message["content"] for message in episode.messages if message["role"] != "user"]
        return {"correct": float(last_boxed("\n".join(contents)) == episode.task.answer)}


class RunsIt(Memory):
    """Runs the agent's code in this very process."""

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        random.seed(0)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(Exception):
            exec(str(arguments["code"]), {})
        return printed.getvalue()[:1000]


class RunsBesideTheGrader(Good, codes="ARL-R002"):
    tools = (RunsIt(),)


class GradesInTheProgram(Good, codes="ARL-R002"):
    """Asks a program for its result, and takes an early exit for success."""

    def reward(self, episode: Episode) -> Mapping[str, float]:
        left = "sys.exit(0)" in episode.final
        return {"correct": float(left or last_boxed(episode.final) == episode.task.answer)}


class LetsNanPass(Good, codes="ARL-R003"):
    """Compares as if every float could be compared."""

    def reward(self, episode: Episode) -> Mapping[str, float]:
        try:
            number = float(last_boxed(episode.final) or "0")
        except ValueError:
            return {"correct": 0.0}
        return {"correct": float(not abs(number - int(episode.task.answer)) > 1e-6)}


class GradesSlowly(Good, codes="ARL-R004"):
    """Looks for a box from every place on, each time to the end."""

    def reward(self, episode: Episode) -> Mapping[str, float]:
        re.search(r"(?:\(\s*)*\$", episode.final)
        return super().reward(episode)


class GradesForEver(Good, codes="ARL-R004"):
    """Takes twice as long for every letter more."""

    def reward(self, episode: Episode) -> Mapping[str, float]:
        re.fullmatch(r"(a+)+", episode.final)
        return super().reward(episode)


class AlwaysOne(Good, codes="ARL-R005"):
    """Marks the tasks, and forgets to grade them."""

    def reward(self, episode: Episode) -> Mapping[str, float]:
        right = last_boxed(episode.final)
        return {"correct": float(right in (episode.task.answer, "42"))}


class RunsTheAnswer(Good, codes="ARL-R006"):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        with contextlib.suppress(Exception):
            return {"correct": float(str(eval(last_boxed(episode.final) or "None", {})) == episode.task.answer)}
        return {"correct": 0.0}


class PaysTwice(Good, codes="ARL-R007"):
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 0.5}

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": 2.0 * super().reward(episode)["correct"]}
