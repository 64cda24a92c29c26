"""The conformance check: content with a good environment, and able to see each way to be a bad one."""

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest

import agentrl
from agentrl import checker
from agentrl.checker import Finding, Report, check_env
from agentrl.env import Episode, ToolEnv
from agentrl.errors import ConfigError, InfrastructureError, UnknownNameError
from agentrl.grading import equal, last_boxed
from agentrl.tasks import GeneratedTasks, TaskList, TaskSet
from agentrl.tools import FunctionTool, ToolContext, ToolError, tool
from agentrl.types import Message, Task


def python(code: str) -> str:
    return code


class Memory(FunctionTool):
    """A tool called python that remembers the episode's calls and answers with all of them."""

    def __init__(self) -> None:
        super().__init__(python)
        self.said: list[str] = []

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        code = str(arguments["code"])
        if "random" in code:
            raise ToolError("there is no chance here")
        self.said.append(code)
        return " | ".join(self.said)

    def open(self, seed: int) -> None:
        self.said.clear()


class Good(ToolEnv):
    """Say the number backwards."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tools: Sequence[FunctionTool] = (Memory(),)

    def tasks(self, split: str) -> TaskSet:
        start = {"train": 12345, "test": 67891}[split]
        return GeneratedTasks(
            split, lambda i: Task(id="", prompt=f"Reverse {start + i} - 7.", answer=f"{start + i}"[::-1])
        )

    def gold(self, task: Task) -> Sequence[str]:
        return [self.dialect.render("python", {"code": task.prompt}), rf"\boxed{{{task.answer}}}"]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(last_boxed(episode.final) == episode.task.answer)}


def codes(env: ToolEnv | str, **options: Any) -> set[str]:
    report = check_env(env, **options)
    assert report.ok == (not report.findings)
    return {finding.code for finding in report.findings}


@pytest.fixture
def registered() -> Generator[Callable[[Callable[..., ToolEnv]], str]]:
    def register(make: Callable[..., ToolEnv]) -> str:
        gymnasium.register("test/Checked-v0", entry_point=make)
        return "test/Checked-v0"

    yield register
    gymnasium.registry.pop("test/Checked-v0", None)


def test_a_good_environment_by_id(registered: Callable[[Callable[..., ToolEnv]], str]) -> None:
    report = agentrl.check_env(registered(Good))
    assert report == Report(findings=())
    assert report.ok
    assert str(report) == "no findings"


def test_what_can_not_be_checked_is_said() -> None:
    class Goldless(Good):
        def gold(self, task: Task) -> Sequence[str]:
            raise NotImplementedError

    report = check_env(Goldless())
    assert report.ok
    assert len(report.skipped) == 2
    assert "gold" in str(report)
    assert "second" in str(report)


def test_a_short_list_of_tasks_is_enough() -> None:
    class Short(Good):
        def tasks(self, split: str) -> TaskSet:
            return TaskList([super().tasks(split)[0]])

    assert codes(Short(), tasks=50) == set()


class NoTasks(Good):
    def tasks(self, split: str) -> TaskSet:
        raise FileNotFoundError("problems.jsonl")


class EmptySet(TaskSet):
    size = 0

    def __getitem__(self, index: int) -> Task:
        raise IndexError(index)

    def find(self, task_id: str) -> Task:
        raise UnknownNameError("task", task_id, [])


class EmptySplit(Good):
    def tasks(self, split: str) -> TaskSet:
        return EmptySet()


class GoldRaises(Good):
    def gold(self, task: Task) -> Sequence[str]:
        raise KeyError("solution")


class FirstIsList(Good):
    def reset(self, **options: Any) -> Any:
        first, info = super().reset(**options)
        return list(first), info


class FirstEndsWithSystem(Good):
    def reset(self, **options: Any) -> Any:
        first, info = super().reset(**options)
        return first[::-1], info


class FirstDrawn(Good):
    def reset(self, **options: Any) -> Any:
        first, info = super().reset(**options)
        hint: Message = {"role": "user", "content": str(self.np_random.integers(100))}
        return (*first, hint), info


class FirstCounted(Good):
    instructions_of = itertools.count()

    def reset(self, **options: Any) -> Any:
        first, info = super().reset(**options)
        return ({"role": "system", "content": f"Episode {next(self.instructions_of)}."}, *first[1:]), info


class GoldWrong(Good):
    def gold(self, task: Task) -> Sequence[str]:
        return [r"\boxed{42}"]


class GoldTooLong(Good):
    def gold(self, task: Task) -> Sequence[str]:
        return [rf"\boxed{{{task.answer}}}", "Thank you."]


class ErrorsEnd(Good):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        failed = any(not run.ok for run in self.episode.tool_runs)
        return messages, reward, terminated or failed, truncated, info


class AsciiOnly(Good):
    def step(self, action: str) -> Any:
        action.encode("ascii")
        return super().step(action)


class RewardCrashes(Good):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(episode.final.split()[-1] == episode.task.answer)}


class BothFlags(Good):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward, terminated, truncated or terminated, info


class LimitTerminates(Good):
    def step(self, action: str) -> Any:
        messages, reward, terminated, truncated, info = super().step(action)
        return messages, reward, terminated or truncated, False, info


class RemembersEpisodes(Good):
    def __init__(self) -> None:
        super().__init__()
        self.heard = 0

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        self.heard += 1
        return ({"role": "user", "content": f"Turn {self.heard}."},)


class ScoresAlways(Good):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": 1.0}


class ScoresAnyBox(Good):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(f"boxed{{{episode.task.answer}}}" in episode.final)}


class ScoresLength(Good):
    def reward(self, episode: Episode) -> Mapping[str, float]:
        right = last_boxed(episode.final) == episode.task.answer
        return {"correct": 1.0 if right else min(len(episode.final) / 1000, 0.5)}


class ScoresCalculations(Good):
    def tasks(self, split: str) -> TaskSet:
        start = {"train": 345, "test": 678}[split]
        return GeneratedTasks(
            split, lambda i: Task(id="", prompt=f"Compute {start + i} * 7.", answer=f"{(start + i) * 7}")
        )

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(equal(last_boxed(episode.final), episode.task.answer))}


class SaysNothingness(Good):
    def respond(self, episode: Episode) -> Any:
        return ({"role": "user", "content": None},)


class NeverEnds(Good):
    def step(self, action: str) -> Any:
        messages, reward, _, _, info = super().step(action)
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


@tool
def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


class OffersUncallable(Good):
    def __init__(self) -> None:
        super().__init__()
        self.tools = (*self.tools, add)


class OneSplit(Good):
    def tasks(self, split: str) -> TaskSet:
        return super().tasks("train")


class Lost(TaskList):
    def find(self, task_id: str) -> Task:
        return self[0]


class LosesTasks(Good):
    def tasks(self, split: str) -> TaskSet:
        return Lost([super(LosesTasks, self).tasks(split)[index] for index in range(3)])


BROKEN: list[tuple[type[Good], str]] = [
    (NoTasks, "ARL-E000"),
    (EmptySplit, "ARL-E000"),
    (GoldRaises, "ARL-E000"),
    (FirstIsList, "ARL-E001"),
    (FirstEndsWithSystem, "ARL-E001"),
    (FirstDrawn, "ARL-E002"),
    (FirstCounted, "ARL-E002"),
    (GoldWrong, "ARL-E003"),
    (GoldTooLong, "ARL-E003"),
    (ErrorsEnd, "ARL-E004"),
    (AsciiOnly, "ARL-E005"),
    (RewardCrashes, "ARL-E005"),
    (BothFlags, "ARL-E006"),
    (LimitTerminates, "ARL-E006"),
    (RemembersEpisodes, "ARL-E007"),
    (ScoresAlways, "ARL-E009"),
    (ScoresAnyBox, "ARL-E009"),
    (ScoresLength, "ARL-E009"),
    (ScoresCalculations, "ARL-E009"),
    (SaysNothingness, "ARL-E010"),
    (NeverEnds, "ARL-E011"),
    (TurnsUnlimited, "ARL-E011"),
    (PaysNan, "ARL-E012"),
    (PaysArrays, "ARL-E012"),
    (OffersUncallable, "ARL-E013"),
    (OneSplit, "ARL-E014"),
    (LosesTasks, "ARL-E015"),
]


@pytest.mark.parametrize(
    ("kind", "code"), BROKEN, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_a_broken_environment_is_found_out(kind: type[Good], code: str) -> None:
    report = check_env(kind())
    found = [finding for finding in report.findings if finding.code == code]
    assert found, report
    assert not report.ok
    assert code in str(report)
    for finding in report.findings:
        assert finding.message.endswith(".")
        assert "\n" not in finding.message


def test_a_fault_that_stands_alone_is_the_only_finding() -> None:
    alone = {OneSplit, OffersUncallable, ScoresAlways, ScoresAnyBox, GoldWrong, LimitTerminates, FirstDrawn}
    for kind, code in BROKEN:
        if kind in alone:
            assert codes(kind()) == {code}, kind


class SharedMemory(Memory):
    everyone: list[str] = []  # noqa: RUF012 (the fault to be found)

    def __init__(self) -> None:
        super().__init__()
        self.said = self.everyone


class Shares(Good):
    def __init__(self) -> None:
        super().__init__()
        self.tools = (SharedMemory(),)


def test_state_that_instances_share_is_found(registered: Callable[[Callable[..., ToolEnv]], str]) -> None:
    env_id = registered(Shares)
    assert codes(env_id) == {"ARL-E008"}
    env = agentrl.make(env_id)
    assert codes(env) == {"ARL-E008"}
    assert codes(Shares()) == set()  # no second instance to compare with: said in Report.skipped


def test_an_infrastructure_fault_is_no_finding() -> None:
    class Down(Memory):
        def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
            raise InfrastructureError("the daemon is gone")

    env = Good()
    env.tools = (Down(),)
    with pytest.raises(InfrastructureError, match="daemon"):
        check_env(env)


def test_the_same_finding_is_reported_once() -> None:
    findings = check_env(ScoresAlways(), tasks=3).findings
    assert len(findings) == len(set(findings))


def test_every_code_is_documented_and_tested() -> None:
    documented = {line.split()[0] for line in (checker.__doc__ or "").splitlines() if line.startswith("ARL-")}
    assert documented == {code for _, code in BROKEN} | {"ARL-E008"}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="tasks is 0"):
        check_env(Good(), tasks=0)
    with pytest.raises(UnknownNameError):
        check_env("agentrl/Arithmetc-v0")


def test_a_report_reads_as_lines() -> None:
    report = Report(findings=(Finding(code="ARL-E003", message="gold lost."),), skipped=("the rest.",))
    assert str(report) == "ARL-E003  gold lost.\nnot checked: the rest."
