import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import RunFolderError
from agentrl.runs.report import write_report, write_view
from agentrl.types import ToolRun

from .blocks import blocks
from .conftest import Play, Save, write_rows

HOSTILE = "</span><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\x00\x1b[2J\u200b"
PLACES = "{{ name }} {% if %} {# script #}"
VOID = {"meta", "br", "img", "input"}


class Page(HTMLParser):
    """Reads a page, and checks on the way that every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.ids = {str(attrs["id"]) for _, attrs in self.tags if "id" in attrs}
        self.text = "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def read(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_report_of_a_whole_run(run: Path) -> None:
    page, charts = read(run), blocks(run / "report.html")["charts"]
    assert {"curve", "training", "text-0", "numbers-3", "config"} <= page.ids
    assert [chart["id"] for chart in charts["curve"]] == ["curve"]
    shown = ["clip_fraction", "grad_norm", "entropy", "logp_diff_max", "seconds"]
    assert [chart["id"] for chart in charts["training"]] == shown
    assert "notes" not in page.ids and "text-4" not in page.ids, "those of the first and the last step"
    for text in ("15.8%", "10.8% to 20.9%", "73.0%", "200 problems", "14 min 20 s", "Sampled tokens", 'loss = "ctpo"'):
        assert text in page.text


def test_report_lies_in_the_run_s_folder_and_replaces_an_older_one(run: Path) -> None:
    before = {path.name for path in run.iterdir()}
    (run / "report.html").write_text("old", encoding="utf-8")
    path = write_report(run)
    assert path == run / "report.html" and path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert {path.name for path in run.iterdir()} == before | {"report.html"}
    content = path.read_bytes()
    assert write_report(run).read_bytes() == content


def test_symptoms_are_sentences_with_their_steps(run: Path) -> None:
    credit = [0.2, 0.2, *[0.0] * 9, *[0.2] * 7, *[0.0] * 6]
    rows = ({"step": step, "advantage_abs": size, "reward_mean": 0.25} for step, size in enumerate(credit, start=1))
    write_rows(run / "metrics.jsonl", rows)
    page, sentence = read(run), "the last 5 steps taught nothing, at a mean reward of 0.25: all members"
    assert "symptoms" in page.ids
    assert f"From step 7 to 16: {sentence}" in page.text and f"From step 23: {sentence}" in page.text
    write_view([run, shutil.copytree(run, run.parent / "other")], out := run.parent / "v.html")
    text = out.read_text(encoding="utf-8")
    assert all(f"From step 7 to 16 of {name}: {sentence}" in text for name in (run.name, "other"))


def test_page_needs_nothing_else(run: Path) -> None:
    page = read(run)
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "action", "style"} & set(attrs)
        assert not [name for name in attrs if name.startswith("on")]
    text = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import", text)
    (policy,) = (attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'") and "unsafe" not in str(policy)


@pytest.fixture
def hostile(run: Path, play: Play, save: Save) -> Path:
    """A run in which everything that comes from outside attacks the page."""
    options = {"tool_runs": (ToolRun(name=HOSTILE, ok=True, wall_s=0.1),), "parts": {HOSTILE[:60]: 1.0}}
    save(run, 50, play(HOSTILE, HOSTILE, HOSTILE, HOSTILE, reward=1.0, task=HOSTILE, **options))
    row = {"step": 50, "split": HOSTILE, "tasks": 5, "success": 0.5, "low": 0.1, "high": 0.9}
    with (run / "evals.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    (run / "config.toml").write_text(f"name = '{HOSTILE}'\nx = '{PLACES}'\n", encoding="utf-8")
    return run.rename(run.with_name("<script>alert(3)<\u2215script>"))


def test_hostile_text_is_text_and_nothing_of_it_invisible(hostile: Path) -> None:
    page = read(hostile)
    assert sum(tag == "script" and attrs.get("type") != "text/plain" for tag, attrs in page.tags) == 1
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert "</span><script>alert(1)</script><img src=x onerror=alert(2)>" in page.text, "of the configuration"
    assert "<script>alert(3)" in page.text and f"x = '{PLACES}'" in page.text
    text = (hostile / "report.html").read_text(encoding="utf-8")
    assert {char for char in text if not char.isprintable()} <= {"\n", "\t"}
    for sign in ("U+202E", "U+200B", "U+0000", "U+001B"):
        assert f'<i class="sign">{sign}</i>' in text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 1\n", encoding="utf-8")
    page = read(tmp_path)
    assert "config" in page.ids and not {"curve", "training", "evals", "text-0"} & page.ids
    assert "no evaluation on held-out problems yet" in page.text


@pytest.mark.parametrize("missing", ["config.toml", "metrics.jsonl", "evals.jsonl", "episodes"])
def test_each_input_may_be_missing(run: Path, missing: str) -> None:
    (run / missing).rename(run.parent / "away")
    gone = {"config.toml": "config", "metrics.jsonl": "training", "evals.jsonl": "evals", "episodes": "text-0"}
    ids = read(run).ids
    assert gone[missing] not in ids and set(gone.values()) - {gone[missing]} <= ids


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "x"}', '{"step": NaN}', "[" * 100_000, '{"step": true}'])
def test_lines_that_are_no_rows_are_left_out_and_named(run: Path, line: str) -> None:
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    # A run that is killed while it writes a line leaves the beginning of it.
    (run / "metrics.jsonl").write_text(f"{line}\n{text[:-30]}", encoding="utf-8")
    page = read(run)
    assert "Line 1 of metrics.jsonl" in page.text and "metrics.jsonl ends in an unfinished line" in page.text
    assert re.search(r"Training steps\s*39", page.text)


def test_one_evaluation_has_no_before_and_after(run: Path) -> None:
    line = (run / "evals.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (run / "evals.jsonl").write_text(line + "\n", encoding="utf-8")
    text = read(run).text
    assert "Measured" in text and "Before" not in text


def test_only_the_first_split_is_compared(run: Path) -> None:
    other = {"step": 99, "split": "harder", "tasks": 5, "success": 0.013}
    with (run / "evals.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(other) + "\n")
    page = read(run)
    assert "harder" in page.text and page.text.count("1.3%") == 1


@pytest.mark.parametrize(
    ("clock", "shown"), [([10, 20, 30], "30.0 s"), ([10, 20, 5, 9], "29.0 s"), ([10, 20, 5, 3], "28.0 s")]
)
def test_wall_time_goes_on_where_a_run_was_resumed(tmp_path: Path, clock: list[float], shown: str) -> None:
    write_rows(tmp_path / "metrics.jsonl", ({"step": step, "seconds_run": at} for step, at in enumerate(clock)))
    assert re.search(rf"Wall time\s*{re.escape(shown)}", read(tmp_path).text)


def test_a_step_trained_twice_counts_once(tmp_path: Path) -> None:
    rows = ({"step": step, "sampled_tokens": tokens} for step, tokens in ((1, 100), (2, 900), (2, 50)))
    write_rows(tmp_path / "metrics.jsonl", rows)
    assert re.search(r"Training steps\s*2\s*Sampled tokens\s*150", read(tmp_path).text)


def test_other_files_beside_the_episodes_are_left_alone(run: Path) -> None:
    for name in (".step-000099.jsonl.zst.tmp", "notes.txt", "step-.jsonl", "step-99999999999999999999.jsonl"):
        (run / "episodes" / name).write_text("x", encoding="utf-8")
    assert "notes" not in read(run).ids


KEYS = ("reward_mean", "sampled_tokens", "grad_norm", "entropy", "seconds_generate", "seconds_run")
VALUES = st.none() | st.floats() | st.integers() | st.booleans() | st.text(max_size=3) | st.just([{}])


def lines(keys: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    steps = st.integers(0, 50) | st.floats()
    rows = st.dictionaries(st.sampled_from(keys), VALUES).flatmap(lambda row: steps.map(lambda at: row | {"step": at}))
    return st.lists(rows.map(json.dumps) | st.text(max_size=5), max_size=6)


@settings(max_examples=60)
@given(lines(KEYS), lines(("split", "tasks", "success", "low", "high", "seconds_run", "truncated")))
def test_no_damage_is_an_error(tmp_path_factory: pytest.TempPathFactory, metrics: list[str], evals: list[str]) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_text("\n".join(metrics), encoding="utf-8")
    (folder / "evals.jsonl").write_text("\n".join(evals), encoding="utf-8")
    drawn = [attrs for tag, attrs in read(folder).tags if tag in ("path", "line", "circle")]
    assert not re.search(r"\b(nan|inf)\b", f"{drawn} {blocks(folder / 'report.html')['charts']}")


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no run: it has none of config"):
        write_report(tmp_path)
    with pytest.raises(RunFolderError, match="is no folder"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_can_t_be_written(run: Path) -> None:
    (run / "report.html").mkdir()
    with pytest.raises(RunFolderError, match="no report can be written"):
        write_report(run)
