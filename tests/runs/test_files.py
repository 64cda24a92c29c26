"""A stranger's folder: nothing outside it is written or read, nothing hangs, and no file uses up the memory."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config import Config
from agentrl.errors import RunFolderError, TrajectoryError
from agentrl.runs.files import NewFile, delete_unfinished, lock_folder, open_to_append, read, replace
from agentrl.runs.folder import RunFolder, read_jsonl
from agentrl.runs.records import read_begun, read_episodes
from agentrl.runs.report import write_report, write_view
from agentrl.runs.settings import read_config, write_config

Lay = Callable[[Path], None]
SECRET = "nobody else's\n"


def link_to_file(path: Path) -> None:
    (outside := path.parent.parent / "outside").write_text(SECRET)
    path.symlink_to(outside)


HOSTILE: dict[str, Lay] = {
    "a link": link_to_file,
    "a link to nothing": lambda path: path.symlink_to("/nowhere/at/all"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
}
"""What may lie where a run has a file."""
hostile = pytest.mark.parametrize("lay", HOSTILE.values(), ids=HOSTILE.keys())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder."""
    (path := tmp_path / "run").mkdir()
    write_config(path, Config(), {})
    return path


@hostile
def test_only_regular_files_are_read_and_appended_to(run: Path, tmp_path: Path, lay: Lay) -> None:
    lay(path := run / "metrics.jsonl")
    for use in (read, open_to_append):
        with pytest.raises(OSError):
            use(path)
    with pytest.raises(RunFolderError, match=r"metrics.jsonl can't be read: "):
        read_jsonl(path)
    assert not (tmp_path / "outside").exists() or (tmp_path / "outside").read_text() == SECRET


@pytest.mark.parametrize("name", ["view.html", ".view.html.tmp"])
def test_a_new_file_takes_the_place_of_a_link_and_leaves_its_target(run: Path, tmp_path: Path, name: str) -> None:
    link_to_file(run / name)
    replace(page := run / "view.html", b"page")
    assert page.read_bytes() == b"page" and not page.is_symlink()
    assert (tmp_path / "outside").read_text() == SECRET


def test_a_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        replace(tmp_path / "folder", b"")
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]


def test_what_a_kill_leaves_is_deleted_when_the_run_goes_on(run: Path) -> None:
    (run / "episodes").mkdir()
    for path in (run / "config.toml", run / "episodes" / "step-000001.jsonl.zst"):
        NewFile(path).stream.close()
    (run / ".mine.tmp").touch()
    assert len([*run.rglob(".*.tmp")]) == 3
    RunFolder.resume(run)[0].close()
    assert {path.name for path in run.rglob(".*")} == {".mine.tmp", ".lock"}
    NewFile(run / "report.html").stream.close()
    lock_folder(run, "evaluation's folder", "--out").close()
    assert {path.name for path in run.rglob(".*")} == {".mine.tmp", ".lock"}
    delete_unfinished(run / "no such folder")


def test_no_more_is_read_than_is_needed(tmp_path: Path) -> None:
    replace(tmp_path / "rows", b"x" * 100)
    assert len(read(tmp_path / "rows", 100)) == 100
    with pytest.raises(OSError, match="it has more than 0 MiB"):
        read(tmp_path / "rows", 99)


@hostile
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "evals.jsonl"])
def test_a_report_says_what_it_could_not_read(run: Path, name: str, lay: Lay) -> None:
    (run / name).unlink(missing_ok=True)
    (run / "episodes").mkdir()
    lay(run / name)
    page = write_report(run).read_text()
    assert f"{name} can" in page and "be read: " in page and SECRET.strip() not in page


@hostile
def test_a_config_or_a_lock_that_is_no_file_is_named(run: Path, lay: Lay) -> None:
    lay(run / ".lock")
    with pytest.raises(RunFolderError, match="can't be written"):
        lock_folder(run)
    (run / "config.toml").unlink()
    lay(run / "config.toml") if lay is not link_to_file else (run / "config.toml").symlink_to(run.parent / "outside")
    with pytest.raises(RunFolderError, match=r"config.toml can't be read: |there is no run"):
        read_config(run)


@hostile
def test_episodes_are_read_from_files_alone(run: Path, tmp_path: Path, lay: Lay) -> None:
    (folder := run / "episodes").mkdir()
    lay(path := folder / "step-000001.jsonl")
    if path.exists():
        with pytest.raises(TrajectoryError, match="can't be read: "):
            next(read_episodes(path)) if not path.is_dir() else read_begun(path)
    assert write_view([run], run / "view.html") == 0
    assert "be read" in (page := (run / "view.html").read_text()) and SECRET.strip() not in page


@pytest.mark.parametrize("name", ["episodes", "checkpoints"])
def test_a_run_does_not_go_on_in_another_folder(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=f"{name} is a link: put the folder itself in its place"):
        RunFolder.resume(run)
