"""``agentrl view``: it prints where the page is, and refuses in one sentence what it can't show."""

import html
import re
import shlex
from pathlib import Path

import pytest

from agentrl.runs.records import write_episodes
from agentrl.runs.report import write_report
from agentrl.types import Segment, Stop, Trajectory

from ..runs.origins import ORIGIN, Signs
from .conftest import Command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of one episode in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine" / "episodes").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.toml").write_text("")
    episode = Trajectory(task_id="t", seed=0, segments=(Segment("prompt", (1,)),), rewards=(), stop=Stop.TURN_LIMIT)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "notes.txt").write_text("x")
    for file in ("runs/mine/episodes/step-000001.jsonl.zst", "evaluation/episodes.jsonl.zst"):
        write_episodes(tmp_path / file, [episode], Signs(), ORIGIN)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        (["runs/mine"], "runs/mine/view.html"),
        (["runs/mine/episodes/step-000001.jsonl.zst"], "view.html"),
        (["runs/mine", "runs/mine", "--all"], "view.html"),
        (["runs/mine", "--out", "it.html"], "it.html"),
        (["evaluation"], "evaluation/view.html"),
    ],
)
def test_the_page_s_path_is_printed(here: Path, command: Command, arguments: list[str], page: str) -> None:
    assert command("view", *arguments).out == f"{(here / page).resolve()}\n" and (here / page).is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["runs/mine", "--out", "runs"], 2, "give one that ends in .html"),
        (["evaluation/notes.txt"], 1, "can't be read to its end"),
        (["runs"], 2, "is no run"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_can_t_be_shown_is_named(command: Command, arguments: list[str], code: int, message: str) -> None:
    out, err = command("view", *arguments, code=code)
    assert out == "" and message in err and err.count("\n") == 1 and not Path("view.html").exists()


@pytest.mark.parametrize("folder", ["runs/mine", "runs/it's mine"])
def test_command_in_a_report_works_where_the_report_was_made(here: Path, command: Command, folder: str) -> None:
    Path("runs/mine").rename(folder)
    write_report(Path(folder))
    page = html.unescape(Path(folder, "report.html").read_text(encoding="utf-8"))
    (hint,) = re.findall(r"All of them: agentrl (view .*)</p>|All of them: agentrl (view [^\n]+)\n", page)[:1]
    command(*shlex.split(next(filter(None, hint)).strip()))
    assert str(here) not in page, "a page is passed on: it names no folder above"
