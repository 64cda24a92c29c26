"""Every command and example of the README, and the commands of the page on training, run on a run made small."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from .forked import Server

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"
TRAINING = (DOCS / "training.md").read_text(encoding="utf-8")
# No step of reinforcement learning: a model this small and untaught would be refused for never calling the tool.
SMALL = ["model.tiny.hidden=32", "model.tiny.layers=2", "sft.steps=2", "sft.tasks=8", "optim.steps=0", "eval.tasks=4"]


FIRST = re.search(r"^## Register an environment\n.*?(?=^## )", README, flags=re.DOTALL | re.MULTILINE)
assert FIRST is not None


def blocks(language: str, text: str = README.replace(FIRST[0], "")) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    text = "".join([*blocks("bash"), *blocks("bash", TRAINING)])
    assert "optim.steps=60" in text
    lines = text.replace("optim.steps=60", "optim.steps=0").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_first_forty_lines_say_what_it_is_and_how_to_begin() -> None:
    top = "\n".join(README.splitlines()[:40])
    assert "./scripts/quickstart.sh" in top and "./scripts/test.sh" in top
    assert "```python" in top and "env.close()\n```" in top
    assert len(README.splitlines()) < 120


def test_the_table_names_every_algorithm() -> None:
    from agentrl.algos import ADVANTAGES, LOSSES

    row = next(line for line in TRAINING.splitlines() if line.startswith("| `otb`"))
    assert re.findall(r"`(\w+)`", row) == [*ADVANTAGES, *LOSSES]


@pytest.mark.parametrize("page", ["AGENTS.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_every_path_that_a_page_names_is_there(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    # Ids of environments, such as agentrl/Math-v0, look like paths.
    paths = re.findall(r"`((?:agentrl|envs|sandboxes|tests|scripts|docs|experiments)/[\w./-]*)(?<!-v0)`", text)
    assert paths or page.startswith("docs/")
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_map_names_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "agentrl").glob("*/__init__.py")}
    named = set(re.findall(r"`(?:agentrl/)?(\w+)/`", (ROOT / "AGENTS.md").read_text("utf-8")))
    assert rooms <= named, rooms - named


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"))
def test_examples_run(server: Server, code: str, tmp_path: Path) -> None:
    done = server.run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last in ("[] 1.0", "42")


@pytest.mark.slow
def test_commands_run_in_their_order(server: Server, tmp_path: Path) -> None:
    for program, *words in commands():
        if program.startswith("./scripts/"):
            assert os.access(ROOT / program, os.X_OK)
            done = subprocess.run([ROOT / program, "--help"], cwd=tmp_path, capture_output=True, text=True)
        else:
            assert program == "agentrl"
            words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, "")
            is_begun = words[0] == "train" and "--resume" not in words
            small = [word for setting in SMALL for word in ("--set", setting)] if is_begun else []
            done = server.run("-m", program, *words, *small, cwd=tmp_path)
            if target:
                (tmp_path / target).write_text(done.stdout, encoding="utf-8")
        assert done.returncode == 0, f"{program} {words}: {done.stderr}"
    assert len(commands()) >= 20
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert {"summary.json", "episodes.jsonl.zst"} <= {path.name for path in (tmp_path / "evals" / "first").iterdir()}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with agentrl installed from this repository, and nothing else of its own.

    PyTorch alone is larger than everything else together. So whatever agentrl needs is found where these tests run: a
    .pth file adds that folder to the path, behind the fresh environment's own. For the same reason pip is told not to
    look for requirements, and comes from that folder too.
    """
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = (venv / "lib").glob("python3.*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([venv / "bin" / "python", *PIP_INSTALL, "-e", ROOT], check=True, env=environment(venv / "bin"))
    return venv / "bin"


PIP_INSTALL = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
# The program of an environment whose folder of packages is the first argument.
PROGRAM = "import site, sys; site.addsitedir(sys.argv.pop(1)); from agentrl_start import main; sys.exit(main())"


def environment(folder: Path) -> dict[str, str]:
    """The variables of a shell in which the environment with that bin folder is active."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return variables | {"PATH": f"{folder}{os.pathsep}{variables['PATH']}", "VIRTUAL_ENV": str(folder.parent)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_first_environment_from_new_to_trained(fresh: Path, server: Server, tmp_path: Path) -> None:
    assert FIRST is not None
    (script,) = blocks("bash", FIRST[0])
    assert script.count("pip install ") == 1
    script = script.replace("pip install", f"python {' '.join(PIP_INSTALL)}")
    before, train, after = script.partition("agentrl train ")
    done = subprocess.run(
        ["bash", "-ec", before], cwd=tmp_path, env=environment(fresh), stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "distribution  my-env 0.1.0" in done.stdout and "no findings" in done.stdout
    assert "left after 0 turns" in done.stdout, "play met the end of its input"
    made, (site,) = tmp_path / "my_env", fresh.parent.glob("lib/python3.*/site-packages")
    for line in (train + after).splitlines():  # what needs PyTorch
        program, *words = shlex.split(line, comments=True)
        done = server.run("-c", PROGRAM, site, *words, cwd=made, env=environment(fresh))
        assert program == "agentrl" and done.returncode == 0, done.stderr
    evals = [json.loads(line) for line in (made / "runs" / "first" / "evals.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evals] == [0, 8]
    assert evals[-1]["tool_calls_mean"] > 0.5, "the tool is called"
    assert (made / "runs" / "first" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("AGENTRL_CI") != "1", reason="takes five minutes: set AGENTRL_CI=1 to run it")
@pytest.mark.timeout(1500)
def test_quickstart_teaches_the_tool(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "agentrl"), "train", "--preset", "quickstart", "--name", "quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    evals = [json.loads(line) for line in (tmp_path / "runs" / "quick" / "evals.jsonl").read_text().splitlines()]
    assert evals[0]["tasks"] == evals[-1]["tasks"] == 200
    assert evals[0]["success"] <= 0.9, "the warm start left nothing to learn"
    # Of 200 tasks an agent that solves 97% fails more than 14 in one of a thousand.
    assert evals[-1]["success"] >= 0.93, "reinforcement learning did not teach the tool"
    assert evals[-1]["tool_calls_mean"] >= 0.95, "the tool was not used"
