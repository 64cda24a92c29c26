"""Every example of the pages in docs/, run as written; the README has a test of its own."""

import ast
import asyncio
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.algos import check_options
from agentrl.cli import _parser, main
from agentrl.config import load_config, parse_config
from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import ConfigError
from agentrl.eval.sets import make_sets
from agentrl.models.shapes import published_shape
from agentrl.render.renderer import Renderer
from agentrl.rollout.plan import EpisodeSpec
from agentrl.runs.assemble import make_collector
from agentrl.runs.folder import read_jsonl
from agentrl.runs.progress import Display
from agentrl.sandboxes import Limits, SandboxUnavailable
from agentrl.toolenv.checker import check_env
from agentrl.toolenv.registry import make
from agentrl.toolenv.tools.mcp import close_sessions
from agentrl.toolenv.tools.python import shared_sandbox, use_backend
from agentrl.train.costs import Costs
from agentrl.train.forecast import CARDS, forecast, run_seconds
from agentrl.train.live import check_run
from agentrl.train.run import train
from agentrl.train.step import check_training_config

from .engines.conftest import fake
from .engines.servers import Fake, spoken
from .forked import Server
from .train.conftest import TOY

__all__ = ["fake"]
SERVER = "http://localhost:8000/v1"
"""Where the pages' judges are."""
DOCS = Path(__file__).parents[1] / "docs"
OTHERS = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "sandboxes/README.md", "agentrl/algos/README.md")
PAGES = [*(DOCS.parent / name for name in OTHERS), *sorted(DOCS.glob("*.md"))]


def blocks(page: str, language: str = "python") -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@contextmanager
def importable(page: str, folder: Path, url: str = "") -> Iterator[Path]:
    """Write the Python files of a page into a folder, and have it on the path; they ask the server at ``url``."""
    for block in blocks(page):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None, block
        assert not url or SERVER in block
        (folder / name[1]).write_text(block.replace(SERVER, url or SERVER), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^):#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cells_of_tables_are_short(page: Path) -> None:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert not [cell for line in lines for cell in line.split(" | ") if len(cell.split()) >= 30]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_a_page_names_are_there(page: Path) -> None:
    sections = {name: type(section).model_fields for name, section in load_config(preset="quickstart")}
    # loop.md names modules in the same way, without their agentrl.
    text = "" if page.name == "loop.md" else page.read_text(encoding="utf-8")
    settings = re.findall(r"`(?:--set '?)?(\w+)\.(?!py\b)(\w+)\b(?!\()", text)
    assert not [f"{name}.{key}" for name, key in settings if name in sections and key not in sections[name]]


def test_names_of_the_concepts_are_in_their_files() -> None:
    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w.]+)`\s+(?:in\s+|\()`(agentrl/[\w/]+\.py)`", text)
    assert len(names) >= 8
    for name, path in names:
        source = (DOCS.parent / path).read_text(encoding="utf-8")
        assert re.search(rf"(?:class|def) {name.rpartition('.')[2]}\b", source), f"{name} in {path}"


def test_the_index_links_every_page() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]


def test_the_loop_is_short_and_of_public_names() -> None:
    _, loop = blocks("loop.md")
    assert len(loop.splitlines()) <= 40
    tree = ast.parse(loop)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    used = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not [name for name in (*imported, *used) if name.startswith("_")]
    table = "\n".join(re.findall(r"^\| `.*$", (DOCS / "loop.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert not [name for name in imported if name not in table], "the table says what each of them is"


@pytest.fixture
def page_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Iterator[Path]:
    """A folder with the files of the page on environments, which is the working folder and on the path."""
    (data,) = (block for block in blocks("environments.md", "bash") if "<<" in block)
    subprocess.run(["bash", "-ec", data], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    with importable("environments.md", tmp_path):
        yield tmp_path
        close_sessions()


def offered() -> list[str]:
    """The environments of that page, by id."""
    registrations = re.findall(r'^agentrl\.register\("(.*)", "(.*):.*"\)$', "\n".join(blocks("environments.md")), re.M)
    return [f"{module}:{env_id}" for env_id, module in registrations]


SLOW = ("functions", "library")
"""Modules that play in a sandbox and with a server."""


@pytest.mark.parametrize(
    "env_id", [pytest.param(i, marks=[pytest.mark.slow] if i.startswith(SLOW) else []) for i in offered()]
)
def test_an_environment_of_the_page_keeps_its_contract(
    env_id: str, page_files: Path, require: Callable[[bool, str], None]
) -> None:
    if env_id.startswith("functions"):
        try:
            shared_sandbox()
        except SandboxUnavailable as error:
            require(False, str(error))
    report = check_env(env_id, tasks=1 if env_id.startswith(SLOW) else 2)
    assert report.ok, str(report)
    assert len(offered()) == len(blocks("environments.md")) - 1, "all blocks but the MCP server's"


@pytest.mark.slow
def test_the_commands_of_that_page_run(page_files: Path) -> None:
    script = "\n".join(blocks("environments.md", "bash"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=page_files, env=os.environ | {"PATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "return 1: correct 1" in done.stdout and "return 1.1: correct 1" in done.stdout, "both episodes were won"
    assert done.stdout.count("no findings") == script.count(" check-env ")


@pytest.fixture
def judging(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> Iterator[Fake]:
    """A server that judges and plays a customer, and the files of the page on judges, which ask it."""

    def answer(_path: str, fields: dict[str, Any]) -> tuple[int, object]:
        text = fields["messages"][-1]["content"]
        return spoken(("Score: 5" if "sorry" in text else "Score: 1") if "BEGIN ANSWER" in text else "I drink milk.")

    fake.answer = answer
    monkeypatch.chdir(tmp_path)
    with importable("judges.md", tmp_path, fake.url):
        yield fake


@pytest.mark.slow
def test_the_judge_and_the_customer_of_the_page(judging: Fake) -> None:
    for env_id in ("letters:me/Letters-v0", "tea:me/TeaShop-v0"):
        report = check_env(env_id, tasks=1)
        assert report.ok, str(report)
    letters, shop = make("letters:me/Letters-v0"), make("tea:me/TeaShop-v0", split="test")
    letters.reset(seed=0)
    assert letters.step("We are sorry.")[1] == 1.0 and len(letters.episode.exchanges.new) == 1
    shop.reset(seed=0)
    question, sale = shop.gold_turns(shop.task_set[0])
    assert shop.step(question)[0][-1] == {"role": "user", "content": "I drink milk."}
    assert shop.step(sale)[1:4] == (1.0, True, False)
    (exchange,) = shop.episode.exchanges.new
    assert "malty" in exchange.messages[0]["content"] and exchange.messages[1]["content"] == "What would you like?"
    judging.answer = lambda _path, _fields: (401, {})
    shop.reset(seed=0)
    with pytest.raises(ConfigError, match="the judge's server refuses the request"):
        shop.step(question)


@pytest.mark.slow
def test_a_run_of_what_is_your_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
    clean_registry: None,
    require: Callable[[bool, str], None],
) -> None:
    (tmp_path / "mine.py").write_text("\n".join(blocks("training.md")), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (settings,) = (block for block in blocks("training.md", "toml") if "mine:" in block)
    (tmp_path / "my.toml").write_text(settings, encoding="utf-8")
    (tmp_path / "toy.py").write_text(TOY, encoding="utf-8")
    few = ("env.id=toy:test/Toy-v0", "eval.tasks=2", "rollout.tasks=2", "rollout.turn_tokens=8", "optim.steps=2")
    config = load_config(path="my.toml", overrides=[*few, "rollout.truncated.turn=answer", "optim.lr=1e-3"])
    try:
        run = train(config, Display(io.StringIO()))
        import mine  # pyright: ignore[reportMissingImports]

        rows = read_jsonl(run / "metrics.jsonl")
        assert [row["loss/penalty"] > 0 for row in rows] == [True, True], "a step's second update is off-policy"
        text = (run / "rewards.csv").read_text()
        assert text == "step,reward,mine:proximal\n" + "".join(f"{row['step']},{row['reward_mean']}\n" for row in rows)
        assert mine.Counting.sampled > sum(row["sampled_tokens"] for row in rows), "evaluations sample too"
        check_options("loss", "mine:plain", {})
        try:
            assert shared_sandbox().limits.memory_bytes == Limits().memory_bytes // 2
        except SandboxUnavailable as error:
            require(False, str(error))
    finally:
        use_backend("auto")
        for module in ("mine", "toy"):
            sys.modules.pop(module, None)


def test_the_mix_is_a_config() -> None:
    page = (DOCS / "mix_and_episodes.md").read_text(encoding="utf-8")
    text = page.partition("```toml\n")[2].partition("```")[0]
    config = parse_config(tomllib.loads(text))
    check_run(config)
    assert [*config.env.played] == ["arithmetic", "countdown"]


def test_the_driver_of_the_page_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    text, *_ = blocks("drivers.md")
    (tmp_path / "window.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    summary, window = (tomllib.loads(block) for block in blocks("drivers.md", "toml"))
    make_collector(parse_config(summary), Renderer(tokenizer), split="train").close()
    args: dict[str, Any] = {"level": 5, "max_turns": 6}
    config = parse_config({**window, "env": {"args": args}})
    renderer, env = Renderer(tokenizer), make(config.env.id, split="train", **args)
    task = env.task_set[0]
    script = tuple(tuple(renderer.turn(turn)) for turn in env.gold_turns(task))
    with closing(make_collector(config, renderer, split="train")) as collector:
        spec = EpisodeSpec(task_id=task.id, seed=1, script=script)
        collected = asyncio.run(collector.collect([[spec]], ScriptedEngine(()), Sampling(max_tokens=200)))
    ((episode,),) = collected.groups
    # Four turns of which two are shown: the fourth is asked for without the first.
    assert episode.ret == 1.0 and len(episode.rows) == 2 and episode.forks == {"anew": 1}


def test_the_sets_that_papers_report_are_sets() -> None:
    texts = re.findall(r"--env '(\w+=[^']+)' \\", (DOCS / "evaluation.md").read_text(encoding="utf-8"))
    sets = make_sets(load_config(preset="quickstart", overrides=["env.sandbox=docker"]), texts)
    sizes = {name: (config.eval.tasks, config.eval.attempts) for name, config in sets.items()}
    assert sizes == {"aime24": (30, 32), "aime25": (30, 32), "amc23": (40, 32), "math500": (500, 4)}
    for name, config in sets.items():
        assert config.env.sandbox == "docker", "a setting for all environments"
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


LADDER = "qwen3_4b.md"
SCRIPT = "".join(blocks(LADDER, "bash")).replace("\\\n", "")
TYPED = [shlex.split(line) for line in SCRIPT.splitlines() if line.strip()]
SHOWN = {block.partition("\n")[0].removeprefix("$ "): block for block in blocks(LADDER, "console")}
"""The blocks of commands with their output, by command; … stands for lines that are left out."""
DRY = [" ".join(words) for words in TYPED if words[:2] == ["agentrl", "plan"] or "--dry-run" in words]
RUNS = [" ".join(words) for words in TYPED if words[:2] == ["agentrl", "train"] and words[-1] == "qwen"]
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("line", DRY)
def test_the_ladder_prints_what_its_page_shows(line: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``AGENTRL_WRITE=1 pytest -n 0 -k ladder`` writes what is printed into the page."""
    command = next((command for command in SHOWN if command.removeprefix("HF_HUB_OFFLINE=1 ") == line), "")
    shown = SHOWN.get(command, "\n…\n").splitlines()[1:]
    if "…" in shown:  # no activations are shown, which take the time
        monkeypatch.setattr("agentrl.train.memory.measure", lambda *_: Costs(layer=1.0, rest=1.0, recomputes=True))
    assert main(shlex.split(line)[1:]) in (0, 1), "packages may be missing here"
    printed = [text for text in capsys.readouterr().out.splitlines() if not text.startswith("missing")]
    unchecked = [text for text in printed if text.startswith("unchecked")]
    assert len(unchecked) == (2 if "--dry-run" in line else 0), "the hub can't be reached: a plan needs none of it"
    if "…" in shown:
        labels = {text[:10].ljust(10) for text in shown}
        printed = ["…", *(text for text in printed if text[:10] in labels), *["…"][: len(shown) - 1]]
    if os.environ.get("AGENTRL_WRITE") and command:
        page = (DOCS / LADDER).read_text("utf-8")
        (DOCS / LADDER).write_text(page.replace(SHOWN[command], "\n".join([f"$ {command}", *printed, ""])), "utf-8")
        shown = printed
    assert [NUMBER.sub("#", text) for text in printed] == [NUMBER.sub("#", text) for text in shown]
    # Activations are measured, so they may differ a little from machine to machine.
    numbers = ([float(number) for number in NUMBER.findall("\n".join(lines))] for lines in (printed, shown))
    assert next(numbers) == pytest.approx(next(numbers), rel=0.1)


def test_what_else_the_ladder_types() -> None:
    assert [run.replace(" --name qwen", " --dry-run") for run in RUNS] == [line for line in DRY if "--dry-run" in line]
    extras = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for words in TYPED:
        match words:
            case ["agentrl", *argv]:
                arguments = _parser().parse_args(argv)
                if preset := getattr(arguments, "preset", None):
                    check_training_config(load_config(preset=preset, overrides=arguments.overrides))
                if getattr(arguments, "envs", None):
                    make_sets(load_config(), arguments.envs)
            case ["pip", "install", "-e", extra]:
                assert set(re.findall(r"\w+", extra)) <= set(extras)
            case ["hf", "download", name]:
                assert {name} == {load_config(preset=shlex.split(run)[3]).model.path for run in RUNS}
            case ["ray", "start", *options]:
                if find_spec("ray"):
                    import_module("ray.scripts.scripts").start.make_context("start", list(options))
            case _:
                assert words[0] in ("export", "python3", "source", "tail", "vllm") or words == ["ray", "status"], words


def test_the_hours_of_the_ladder_are_those_of_its_plans() -> None:
    page, shape = (DOCS / LADDER).read_text("utf-8"), published_shape("Qwen/Qwen3-4B-Base")
    rows = re.findall(r"^\| \[.*`(\S+)`.*\| (\d+) . (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) == len(RUNS) and shape is not None
    for preset, *numbers in rows:
        config = load_config(preset=preset)
        seconds = (run_seconds(config, forecast(config, shape, CARDS["h100"], tokens)) for tokens in (3000, 9024))
        hours = [round(each / 3600) for each in seconds]
        rollout = config.rollout
        assert [*map(int, numbers)] == [rollout.tasks, rollout.group_size, config.optim.steps, *hours], preset
