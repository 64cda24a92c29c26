"""Train a tiny model on the scores of a judge that errs, and compare them with exact grades on held-out problems.

No language model that judges well fits on two cores. A program stands in for it, behind the server that a judge speaks
to: it accepts one wrong answer in six, and rejects one right answer in eight. Each seed costs some four minutes of a
core.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean
from typing import Any, ClassVar

import gymnasium
from arms import PRESET, overrides
from rows import FOLDER, RowFile, commit_of, read_rows
from work import PLACE, tidy

import agentrl
from agentrl.config import load_config
from agentrl.envs.generated.arithmetic import Arithmetic
from agentrl.eval.pages import table as format_table
from agentrl.grading.numbers import last_boxed
from agentrl.judge import Judge
from agentrl.runs.progress import Display
from agentrl.toolenv.base import Episode
from agentrl.train.run import train

EXAMPLES = """examples:
  python experiments/judged.py             the three seeds, or what is left of them
  python experiments/judged.py --table     what came out
"""
ENV_ID = "judged:agentrl/JudgedArithmetic-v0"
SEEDS = range(3)
EVERY = 12
"""Steps between two evaluations."""
WARM: Mapping[str, Any] = {"sft.steps": 130, "sft.stop_at": 1.0, "sft.temperature": 1.0, "optim.steps": 0}
"""Of the warm start, over the preset: on the exact environment, since this judge rejects some gold answers."""
SETTINGS: Mapping[str, Any] = {
    "env.id": ENV_ID,
    "sft.steps": 0,
    "optim.steps": 36,
    "eval.every": 0,
    "save.every": EVERY,
    "save.keep": 9,
}
"""Of a run, over the preset quickstart."""
_QUOTED = re.compile(
    r"BEGIN TASK (\w+)\nCompute (\d+) ([*+]) (\d+)\.\nEND TASK .*BEGIN ANSWER \1\n(.*)\nEND ANSWER", re.S
)
_ACCEPTS, _REJECTS = 6, 8
"""Of so many wrong answers one is accepted, and of so many right ones one is rejected."""


class JudgedArithmetic(Arithmetic):
    """Level 1 of Arithmetic, graded by a judge; the part ``correct`` is exact and pays nothing."""

    reward_weights: ClassVar = {"correct": 0.0, "judged": 1.0}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        url = os.environ["AGENTRL_JUDGE"]
        self._judge = Judge("stand-in", "Is the answer right? 1: yes. 0: no.", (0, 1), base_url=url)

    async def reward(  # pyright: ignore[reportIncompatibleMethodOverride]  # a reward may be async
        self, episode: Episode
    ) -> Mapping[str, float]:
        """Return the judge's score, and the exact grade."""
        return {**super().reward(episode), "judged": await self._judge.grade(episode)}


gymnasium.register("agentrl/JudgedArithmetic-v0", entry_point=JudgedArithmetic)


class StandIn(BaseHTTPRequestHandler):
    """Answers as a server of chat completions would; what it thinks of an answer depends on the answer alone."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Judge the answer that is quoted in the request."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        _, left, operator, right, text = _QUOTED.findall(request["messages"][-1]["content"])[0]
        value = int(left) * int(right) if operator == "*" else int(left) + int(right)
        exact = last_boxed(text) == str(value)
        chance = int.from_bytes(hashlib.sha256(f"{left} {right} {text}".encode()).digest()[:4])
        score = int(exact != (chance % (_REJECTS if exact else _ACCEPTS) == 0))
        message = {"role": "assistant", "content": f"I have looked at it.\nScore: {score}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 300, "completion_tokens": 10, "total_tokens": 310}
        head = {"id": "judged", "object": "chat.completion", "created": 0, "model": "stand-in"}
        body = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line a request would hide the progress."""


def learn(seed: int, display: Display) -> list[dict[str, Any]]:
    """Train with a seed; return a row for each checkpoint, with both shares of the same held-out episodes."""
    folder = PLACE / f"judged-{seed}"
    tidy(folder)
    own = {"run.dir": str(folder), "run.seed": seed}
    weights = {"model.path": str(folder / "warm" / "checkpoints" / "step-000000")}
    for settings in ({**WARM, "run.name": "warm"}, {**SETTINGS, **weights, "run.name": "run"}):
        train(load_config(preset=PRESET, overrides=overrides({**settings, **own})), display)
    results = list[dict[str, Any]]()
    for checkpoint in sorted((folder / "run" / "checkpoints").iterdir()):
        out = folder / checkpoint.name
        command = [sys.executable, "-m", "agentrl", "eval", str(checkpoint), "--tasks", "400", "--out", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        parts = [record.trajectory.parts for record in agentrl.read_episodes(out)]
        shares = {name: fmean(part[name] for part in parts) for name in ("judged", "correct")}
        results.append({"step": int(checkpoint.name.removeprefix("step-")), "episodes": len(parts), **shares})
    tidy(folder)
    return results


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a line for each evaluation of a seed."""
    lines = [
        [row["unit"]["seed"], at["step"], f"{at['judged']:.1%}", f"{at['correct']:.1%}"]
        for row in rows
        for at in row["curve"]
    ]
    return format_table(["seed", "step", "accepted by the judge", "correct"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Do the seeds that have no row yet, or show what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="show the results, and do nothing")
    path = FOLDER / "judged.jsonl"
    if parser.parse_args(argv).table:
        print(table(read_rows(path)))
        return 0
    commit = commit_of()
    rows, display = RowFile(path, commit), Display()
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["AGENTRL_JUDGE"] = f"http://127.0.0.1:{server.server_port}/v1"
    for seed in SEEDS:
        unit = {"part": "judged", "seed": seed, "warm": dict(WARM), "settings": dict(SETTINGS)}
        if not rows.has(unit):
            rows.add(unit, curve=learn(seed, display))
    return 0


if __name__ == "__main__":
    sys.exit(main())
