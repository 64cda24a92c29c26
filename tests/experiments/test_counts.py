"""The toy repository on which Codex is trained."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentrl.config import load_config

from .conftest import load

ROOT = Path(__file__).parents[2]


def test_codex_is_started_as_its_recipe_says() -> None:
    paths = ROOT / "docs/agents/codex.toml", ROOT / "experiments/codex.toml"
    recipe, settings = (tomllib.loads(path.read_text("utf-8")) for path in paths)
    assert settings["rollout"]["driver"] == recipe["rollout"]["driver"]
    assert load_config(path=paths[1]).rollout.driver.name == "agent"


def test_the_number_of_lines_is_rewarded(clean_registry: None) -> None:
    counts: Any = load("counts")
    env = counts.Counts(dialect="hermes")
    task = env.tasks("test")[0]
    lines = [line for line in counts.words_of(task) if task.id in line]
    assert len(lines) > 3 and not {other.id for other in env.tasks("train")} & {other.id for other in env.tasks("test")}
    assert f"grep -c {task.id} words.txt > count.txt" in env.gold(task)[0]
    for text, reward in ((f"{len(lines)}\n", 1.0), (str(len(lines) + 1), 0.0), ("", 0.0)):
        agent = SimpleNamespace(files={"count.txt": text.encode()})
        assert env.reward(SimpleNamespace(task=task, state={"agent": agent})) == {"correct": reward}
