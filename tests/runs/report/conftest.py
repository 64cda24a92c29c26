import json
import math
import random
import re
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from agentrl.runs.records import write_episodes
from agentrl.types import Segment, Stop, ToolRun, Trajectory

from ..origins import ORIGIN
from .browser import CHROMIUM, Browser

CONFIG = """[run]
name = "arith-otb"
seed = 3

[model]
name = "Qwen/Qwen3-0.6B"

[algo]
advantage = "otb"
loss = "ctpo"
"""
SYSTEM = (
    "<|im_start|>system\nAnswer in \\boxed{}. To run Python, write a fenced block:\n```python\nprint(1 + 1)\n```\n"
    "<|im_end|>\n<|im_start|>user\nWhat is 48271 * 9173 - 1204?<|im_end|>\n<|im_start|>assistant\n"
)
CALL = "I need the exact product, so I will compute it.\n```python\nprint(48271 * 9173 - 1204)\n```"
ANSWER = "The tool says 442788679, so the answer is \\boxed{442788679}."
GUESS = "48271 times 9173 is roughly 48000 * 9000 = 432000000.\nThe answer is \\boxed{432000000}."


class Words:
    """A tokenizer of words, spaces and signs; ids are places in the list of what it has seen."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def encode(self, text: str) -> tuple[int, ...]:
        cut = re.findall(r"<\|\w+\|>|\s?\w+|\s|\S", text)
        for piece in cut:
            if piece not in self.pieces:
                self.pieces.append(piece)
        return tuple(self.pieces.index(piece) for piece in cut)

    def decode(self, token_ids: int | list[int], **_: object) -> str:
        assert isinstance(token_ids, list)
        return "".join(self.pieces[token] for token in token_ids)


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def play(words: Words) -> Callable[..., Trajectory]:
    """Make an episode: ``play("prompt", "said", "tool's answer", "said", reward=1.0)``; turns and answers alternate."""

    def make(*texts: str, reward: float, task: str = "train-2/17", seed: int = 0, **options: object) -> Trajectory:
        noise = random.Random(seed)
        segments = [Segment("prompt", words.encode(texts[0]))]
        for at, text in enumerate(texts[1:]):
            ids = words.encode(text)
            if at % 2:
                segments.append(Segment("template", words.encode("<|im_end|>\n<|im_start|>tool\n")))
                segments.append(Segment("tool", ids))
                segments.append(Segment("template", words.encode("<|im_end|>\n<|im_start|>assistant\n")))
            else:
                segments.append(Segment("policy", ids, tuple(-noise.expovariate(3.0) for _ in ids), 39))
        turns = sum(segment.trained for segment in segments)
        given = {
            "stop": Stop.TERMINATED,
            "parts": {"correct": reward},
            "tool_runs": (ToolRun(name="python", ok=True, wall_s=0.0314),) * (turns - 1),
        }
        rewards = (0.0,) * (turns - 1) + (reward,)
        return Trajectory(task_id=task, seed=seed, segments=tuple(segments), rewards=rewards, **(given | options))

    return make


@pytest.fixture
def save(words: Words) -> Callable[..., Path]:
    """Write episodes of a step into a run folder, with made-up advantages around each return."""

    def write(run: Path, step: int, *episodes: Trajectory, suffix: str = ".jsonl.zst") -> Path:
        (run / "episodes").mkdir(parents=True, exist_ok=True)
        path = run / "episodes" / f"step-{step:06d}{suffix}"
        noise = random.Random(step)
        credit = [[one.ret - noise.random() * 0.9 for _ in range(one.n_sampled)] for one in episodes]
        training = [
            {
                "entropy": [0.5] * one.n_sampled,
                "log_ratio": [0.01] * one.n_sampled,
                "cumulative_log_ratio": [0.01 * t for t in range(1, one.n_sampled + 1)],
                "clipped": [t % 2 for t in range(one.n_sampled)],
                "realized_energy": [0.25 * t for t in range(1, one.n_sampled + 1)],
                "baseline": [0.5] * one.n_sampled,
            }
            for one in episodes
        ]
        write_episodes(path, episodes, words, ORIGIN, credit, training)
        return path

    return write


def metrics_row(step: int, noise: random.Random) -> dict[str, float]:
    reward = 0.62 / (1 + math.exp(-(step - 16) / 5)) + 0.12 + noise.gauss(0, 0.035)
    return {
        "step": step,
        "reward_mean": reward,
        "sampled_tokens": 15000 + noise.randrange(6000),
        "loss": noise.gauss(0, 0.01),
        "grad_norm": 0.4 + abs(noise.gauss(0, 0.12)) + 2 / step,
        "clip_fraction": 0.012 + abs(noise.gauss(0, 0.004)),
        "entropy": 0.85 * math.exp(-step / 30) + noise.gauss(0, 0.01),
        "logp_diff_max": abs(noise.gauss(3e-6, 1e-6)),
        "seconds_generate": 11 + noise.random() * 4,
        "seconds_score": 2.1 + noise.random() * 0.2,
        "seconds_update": 5.0 + noise.random() * 0.4,
        "seconds_run": 21.5 * step,
    }


def eval_row(step: int) -> dict[str, object]:
    success = 0.135 + 0.6 / (1 + math.exp(-(step - 16) / 5))
    half = 1.96 * math.sqrt(success * (1 - success) / 200)
    row = {"step": step, "split": "test", "tasks": 200, "success": success}
    return row | {
        "low": success - half,
        "high": success + half,
        "turns_mean": 1.4 + step / 60,
        "tool_calls_mean": 0.4 + step / 60,
        "tool_errors_mean": 0.1,
        "truncated": 3,
    }


@pytest.fixture
def run(tmp_path: Path, play: Callable[..., Trajectory], save: Callable[..., Path]) -> Path:
    """A run of 40 steps as the trainer leaves it."""
    folder = tmp_path / "arith-otb"
    folder.mkdir()
    noise = random.Random(1)
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    rows = [metrics_row(step, noise) for step in range(1, 41)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tests = [eval_row(step) for step in range(0, 41, 5)]
    (folder / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tests), encoding="utf-8")
    answer = "442788679\n"
    save(folder, 1, play(SYSTEM, GUESS, reward=0.0, seed=1), play(SYSTEM, CALL, answer, ANSWER, reward=1.0, seed=2))
    save(folder, 20, play(SYSTEM, GUESS, reward=0.0, seed=3))
    broken = play(
        SYSTEM, CALL.replace("print(", "print"), "SyntaxError: invalid syntax", GUESS, reward=0.0, seed=5,
        tool_runs=(ToolRun(name="python", ok=False, wall_s=0.0021),),
    )  # fmt: skip
    save(folder, 40, play(SYSTEM, CALL, answer, ANSWER, reward=1.0, seed=4), broken)
    return folder


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser | None]:
    if CHROMIUM is None:
        yield None
        return
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser | None, require: Callable[[bool, str], None]) -> Generator[Browser]:
    require(chromium is not None, "needs chromium")
    assert chromium is not None
    chromium.complaints.clear()
    yield chromium
    assert chromium.complaints == []
