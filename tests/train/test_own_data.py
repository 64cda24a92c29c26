"""A run on data of one's own: the keywords that the README shows, as tables of a TOML file."""

import json
import tomllib
from pathlib import Path

import pytest

from agentrl.runs.folder import read_config
from agentrl.runs.records import read_episodes

from .conftest import ARITHMETIC, Server

ENV = """
[env]
id = "agentrl/Math-v0"
[env.args]
columns = { prompt = "text", answer = "value" }
data = { train = "train.jsonl", test = "nowhere.jsonl" }
"""


def asked(episodes: Path, split: str) -> bool:
    """Whether all problems are of this split."""
    problems = [record.trajectory.messages[1]["content"] for record in read_episodes(episodes)]
    return bool(problems) and all(f", {split}?" in problem for problem in problems)


@pytest.mark.slow
def test_tables_reach_the_environment_in_training_and_evaluation(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    for split, size in (("train", 16), ("test", 5)):
        rows = [{"text": f"What is {i} and {i}, {split}?", "value": 2 * i, "remark": "our own"} for i in range(size)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.toml").write_text(
        ENV + ARITHMETIC.replace("steps = 90", "steps = 2").replace("steps = 4", "steps = 1")
    )
    settings = ["--set", "env.args.data.test=test.jsonl", "--set", "rollout.episode_tokens=300"]
    server.start(tmp_path, "train", "own.toml", "--name", "own", *settings).done()
    run = tmp_path / "runs" / "own"
    data = {"train": "train.jsonl", "test": "test.jsonl"}
    assert read_config(run).env.args == {"columns": {"prompt": "text", "answer": "value"}, "data": data}
    assert tomllib.loads((run / "config.toml").read_text())["env"]["args"]["data"] == data
    (episodes,) = (run / "episodes").iterdir()
    assert asked(episodes, "train")
    server.start(tmp_path, "eval", "runs/own", "--json", "--tasks", "4", "--out", "e").done()
    assert asked(tmp_path / "e", "test")
