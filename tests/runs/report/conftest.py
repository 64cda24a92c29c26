import json
import math
import random
import re
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from agentrl.runs.records import write_episodes
from agentrl.runs.report import write_view
from agentrl.types import Segment, Stop, ToolRun, Trajectory

from ..origins import ORIGIN
from .browser import CHROMIUM, Browser

Play = Callable[..., Trajectory]
Save = Callable[..., Path]
View = Callable[..., None]
CONFIG = '[run]\nname = "arith-otb"\nseed = 3\n\n[algo]\nadvantage = "otb"\nloss = "ctpo"\n'
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
        self.places: dict[str, int] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        cut = re.findall(r"<\|\w+\|>|\s?\w+|\s|\S", text)
        return tuple(self.places.setdefault(piece, len(self.places)) for piece in cut)

    def decode(self, token_ids: int | list[int], **_: object) -> str:
        assert isinstance(token_ids, list)
        pieces = [*self.places]
        return "".join(pieces[token] for token in token_ids)


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def play(words: Words) -> Play:
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
        fields = {"tool_runs": (ToolRun(name="python", ok=True, wall_s=0.0314),) * (turns - 1), "stop": Stop.TERMINATED}
        fields |= {"rewards": (0.0,) * (turns - 1) + (reward,), "parts": {"correct": reward}}
        return Trajectory(task_id=task, seed=seed, segments=tuple(segments), **(fields | options))

    return make


def numbers(n: int) -> dict[str, list[float]]:
    """What training made of so many tokens."""
    same = {"entropy": [0.5] * n, "log_ratio": [0.01] * n, "baseline": [0.5] * n}
    energy, ratios = [0.25 * t for t in range(1, n + 1)], [0.01 * t for t in range(1, n + 1)]
    return same | {"clipped": [t % 2 for t in range(n)], "realized_energy": energy, "cumulative_log_ratio": ratios}


@pytest.fixture
def save(words: Words) -> Save:
    """Write episodes of a step into a run folder, with made-up advantages around each return."""

    def write(run: Path, step: int, *episodes: Trajectory, suffix: str = ".jsonl.zst") -> Path:
        (run / "episodes").mkdir(parents=True, exist_ok=True)
        path = run / "episodes" / f"step-{step:06d}{suffix}"
        noise = random.Random(step)
        credit = [[episode.ret - noise.random() * 0.9 for _ in range(episode.n_sampled)] for episode in episodes]
        training = [numbers(episode.n_sampled) for episode in episodes]
        write_episodes(path, episodes, words, ORIGIN, credit, training)
        return path

    return write


def metrics_row(step: int, noise: random.Random) -> dict[str, float]:
    row = {"step": step, "sampled_tokens": 15000 + step, "grad_norm": 0.4 + 2 / step, "seconds_run": 21.5 * step}
    others = ("reward_mean", "loss", "clip_fraction", "entropy", "logp_diff_max")
    return row | {name: noise.random() for name in (*others, "seconds_generate", "seconds_score", "seconds_update")}


def eval_row(step: int) -> dict[str, object]:
    success = 0.135 + 0.6 / (1 + math.exp(-(step - 16) / 5))
    half = 1.96 * math.sqrt(success * (1 - success) / 200)
    row = {"step": step, "split": "test", "tasks": 200, "success": success, "truncated": 3}
    means = {"turns_mean": 1.4 + step / 60, "tool_calls_mean": 0.4 + step / 60, "tool_errors_mean": 0.1}
    return row | {"low": success - half, "high": success + half} | means


@pytest.fixture
def run(tmp_path: Path, play: Play, save: Save) -> Path:
    """A run of 40 steps as the trainer leaves it."""
    folder = tmp_path / "arith-otb"
    folder.mkdir()
    noise = random.Random(1)
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    write_rows(folder / "metrics.jsonl", (metrics_row(step, noise) for step in range(1, 41)))
    write_rows(folder / "evals.jsonl", map(eval_row, range(0, 41, 5)))
    answer = "442788679\n"
    save(folder, 1, play(SYSTEM, GUESS, reward=0.0, seed=1), play(SYSTEM, CALL, answer, ANSWER, reward=1.0, seed=2))
    save(folder, 20, play(SYSTEM, GUESS, reward=0.0, seed=3))
    typo, failed = CALL.replace("print(", "print"), (ToolRun(name="python", ok=False, wall_s=0.0021),)
    broken = play(SYSTEM, typo, "SyntaxError: invalid syntax", GUESS, reward=0.0, seed=5, tool_runs=failed)
    save(folder, 40, play(SYSTEM, CALL, answer, ANSWER, reward=1.0, seed=4), broken)
    return folder


def write_rows(path: Path, rows: Iterable[object]) -> None:
    """Write a line of JSON for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory, require: Callable[[bool, str], None]) -> Generator[Browser]:
    require(CHROMIUM is not None, "needs chromium")
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Generator[Browser]:
    chromium.complaints.clear()
    yield chromium
    assert chromium.complaints == []


@pytest.fixture
def view(tmp_path: Path, browser: Browser, save: Save) -> View:
    """Shows a page of these files, or of these episodes, at its episodes."""

    def show(*of: Any, **options: int) -> None:
        paths = of if isinstance(of[0], Path) else [save(tmp_path, 1, *of)]
        write_view(paths, tmp_path / "v.html")
        browser.show(tmp_path / "v.html", **options)

    return show
