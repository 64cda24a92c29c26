"""What both sides of ``end_to_end.py`` share: the workload, the reward, and how the two take turns.

Imports the standard library only: the side that measures TRL runs in a virtual environment without agentrl.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What both sides train on."""

    name: str
    """What the tables call it."""
    model: str
    """Folder of the model and its tokenizer."""
    tasks: int
    """Groups per rollout batch, each of another prompt."""
    group_size: int
    """Episodes per group."""
    shortest: int
    """Tokens that are sampled before a stop token ends the episode."""
    longest: int
    """Most sampled tokens of an episode."""
    stop_ids: tuple[int, ...]
    """The tokens that end an episode; where there is none, each episode has ``longest`` tokens."""
    updates: int
    """Optimizer updates per rollout batch, each on an equal share of its episodes."""
    lr: float
    """Learning rate."""
    threads: int
    """Threads of PyTorch."""

    @property
    def episodes(self) -> int:
        """Episodes per rollout batch."""
        return self.tasks * self.group_size

    @property
    def prompts(self) -> list[str]:
        """The user's messages."""
        return [f"Write what comes to mind about the number {number}." for number in range(1000, 1000 + 8 * self.tasks)]

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of ``to_json``."""
        data = json.loads(text)
        return cls(**{**data, "stop_ids": tuple(data["stop_ids"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rollout batch, generated and trained on."""

    seconds: float
    """Wall time of everything: generate, score, update."""
    cpu_seconds: float
    """Processor time of everything, over all threads: what neighbours on the machine change least."""
    lengths: list[int]
    """Sampled tokens of each episode, no pads."""
    prompt_tokens: int
    """Tokens of the first episode's prompt."""
    phases: dict[str, float]
    """Seconds of the parts, as far as this side can tell them apart."""

    @property
    def rate(self) -> float:
        """Sampled-and-trained tokens per second."""
        return sum(self.lengths) / self.seconds

    @property
    def cpu_rate(self) -> float:
        """Sampled-and-trained tokens per second of processor time."""
        return sum(self.lengths) / self.cpu_seconds


class Stopwatch:
    """Measures a step: wall time and processor time since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self._cpu = time.process_time()

    def step(self, lengths: list[int], prompt_tokens: int, phases: dict[str, float]) -> Step:
        """The step that ends now."""
        return Step(
            seconds=time.perf_counter() - self.began,
            cpu_seconds=time.process_time() - self._cpu,
            lengths=lengths,
            prompt_tokens=prompt_tokens,
            phases=phases,
        )


class Turns:
    """A side's end of the conversation: it waits for its turn on stdin and reports each step on stdout.

    Whatever else the process prints goes to stderr from now on.
    """

    def __init__(self) -> None:
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self) -> None:
        """Everything is loaded."""
        print("ready", file=self._reports, flush=True)

    def mine(self) -> bool:
        """Wait; whether to do one more step rather than stop."""
        return sys.stdin.readline() == "step\n"

    def report(self, step: Step) -> None:
        """The step is done."""
        print(json.dumps(asdict(step)), file=self._reports, flush=True)


def reward_of(text: str) -> float:
    """A number in [0, 1) that depends on nothing but the text, so that no two episodes of a group are alike."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest(), "big") / 2**32


def workload_from(arguments: Sequence[str] | None, description: str) -> Workload:
    """The workload that ``end_to_end.py`` gives to a side as its only argument."""
    parser = argparse.ArgumentParser(description=f"{description} Started by end_to_end.py.")
    parser.add_argument("workload", help="the workload as one line of JSON")
    return Workload.from_json(parser.parse_args(arguments).workload)
