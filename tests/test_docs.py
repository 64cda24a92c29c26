"""Every example of the pages in docs/, run as written; the README has a test of its own."""

import ast
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.config import load_config, parse_config
from agentrl.eval.sets import make_sets
from agentrl.toolenv.checker import check_env
from agentrl.train.live import check_run

from .forked import Server

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^):#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_the_loop_is_short_and_of_public_names() -> None:
    _, loop = blocks("loop.md")
    assert len(loop.splitlines()) <= 40
    tree = ast.parse(loop)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    used = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not [name for name in (*imported, *used) if name.startswith("_")]
    table = "\n".join(re.findall(r"^\| `.*$", (DOCS / "loop.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert not [name for name in imported if name not in table], "the table says what each of them is"


def test_the_environment_keeps_its_contract(clean_registry: None) -> None:
    names: dict[str, Any] = {"__name__": "shop"}
    (text,) = blocks("environment.md")
    exec(compile(text, "environment.md", "exec"), names)
    agentrl.register("me/Shop-v0", names["Shop"])
    report = check_env("me/Shop-v0", arguments={"size": 3}, tasks=1)
    assert report.ok and len(report.skipped) == 1 and "entry point" in report.skipped[0], str(report)


def test_the_mix_is_a_config() -> None:
    page = (DOCS / "mix_and_episodes.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    config = parse_config(tomllib.loads(text))
    check_run(config)
    assert [*config.env.played] == ["arithmetic", "countdown"]


def test_the_sets_that_papers_report_are_sets() -> None:
    texts = re.findall(r"--env '(\w+=[^']+)' \\", (DOCS / "evaluation.md").read_text(encoding="utf-8"))
    sets = make_sets(load_config(preset="quickstart"), texts)
    sizes = {name: (config.eval.tasks, config.eval.attempts) for name, config in sets.items()}
    assert sizes == {"aime24": (30, 32), "aime25": (30, 32), "amc23": (40, 32), "math500": (500, 4)}
    for name, config in sets.items():
        args = config.env.played[name].args
        assert set(args) == {"data", "data_split"} and set(args["data"]) == set(args["data_split"]) == {"test"}


@pytest.mark.slow
def test_the_loop_learns(server: Server, tmp_path: Path) -> None:
    script = "\n".join(blocks("loop.md"))
    done = server.run("-c", script, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rewards = [float(value) for value in re.findall(r"^step \d+: mean reward ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(rewards) == 20
    assert rewards[0] < 0.15 and max(rewards[-3:]) > 0.35, rewards
