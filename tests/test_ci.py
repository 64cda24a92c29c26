"""Which stages of CI run: those that a change calls for, each of the others in turn, and all where nobody knows."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, load_script

ci = load_script("stages", ".ci")
TABLE = ci.stages()
ALWAYS = [name for name, stage in TABLE.items() if stage.get("always")]


def test_each_stage_has_a_function_and_says_when_it_runs() -> None:
    functions = re.findall(r"^stage_(\w+)\(\)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert sorted(functions) == sorted(TABLE)
    for stage in TABLE.values():
        assert stage["minutes"] > 0 and (stage.get("always") or (stage["every"] <= 5 and "calls" in stage))
        assert all((ROOT / file).exists() for file in stage.get("files", ()))


def test_a_pattern_fits_a_file_that_is_here() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for name, stage in TABLE.items():
        for pattern in stage.get("calls", ()) if files else ():
            reasons = [ci.chosen({name: stage | {"calls": [pattern]}}, [file], 1) for file in files]
            assert any("has changed" in reason for each in reasons for reason in each.values()), (name, pattern)


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("sandboxes/remote/client.py", {"remote", "docker"}),
        ("agentrl/engines/vllm.py", {"vllm", "model"}),
        ("agentrl/render/renderer.py", {"templates"}),
        ("envs/adapters/harbor/box.py", {"adapters"}),
        ("README.md", set[str]()),
    ],
)
def test_a_change_calls_for_its_stages(file: str, wanted: set[str]) -> None:
    reasons = ci.chosen(TABLE, [file], 10**9 + 7)
    assert {name for name, reason in reasons.items() if reason == f"{file} has changed"} == wanted
    assert set(ALWAYS) <= set(reasons)


def test_each_stage_has_its_turn_in_five_pushes() -> None:
    for start in range(60, 70):
        seen = {name for pushes in range(start, start + 5) for name in ci.chosen(TABLE, [], pushes)}
        assert seen == set(TABLE)
    assert max(len(ci.chosen(TABLE, [], pushes)) for pushes in range(5)) < len(TABLE) - 5, "not all at once"


def test_all_run_where_nobody_knows_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert ci.changed_since("0" * 40) is None and ci.changed_since("") is None
    assert set(ci.chosen(TABLE, None, 3)) == set(TABLE)
    shutil.copy(ROOT / ".ci" / "stages.toml", tmp_path)
    monkeypatch.setattr(ci, "HERE", tmp_path)
    for text in (
        None,
        "commit = 1 2",
        "pushes = 3",
        'commit = "a"\npushes = "many"',
        f'commit = "{"0" * 40}"\npushes = 3',
    ):
        if text is not None:
            (tmp_path / "passed.toml").write_text(text)
        ci.main([])
        assert capsys.readouterr().out.split() == list(TABLE)


def test_what_a_push_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    here = tmp_path / ".ci"
    here.mkdir()
    for name in ("stages.toml", "passed.toml"):
        (here / name).write_text((ROOT / ".ci" / name).read_text())
    monkeypatch.setattr(ci, "HERE", here)

    def commit(file: str) -> str:
        (tmp_path / file).write_text(file)
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        for words in (("init", "-q"), ("add", "-A"), (*author, "commit", "-qm", file), ("rev-parse", "HEAD")):
            done = subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    before = commit("one")
    ci.main(["--passed", before[:9]])
    assert ci.passed()[0] == before
    pushes = ci.passed()[1]
    after = commit("constraints.txt")
    assert ci.changed_since(before) == [".ci/passed.toml", "constraints.txt"] and ci.changed_since(after) == []
    ci.main([])
    printed = capsys.readouterr()
    assert "newer" in printed.out.split() and "constraints.txt has changed" in printed.err
    with pytest.raises(SystemExit, match="there is no stage 'nothing'"):
        ci.main(["nothing"])
    with pytest.raises(SystemExit, match="there is no commit"):
        ci.main(["--passed", "nothing"])
    assert ci.passed() == (before, pushes)


def test_no_test_file_is_left_out_by_all_stages() -> None:
    # The stage `tests` runs all but the files of others; docker, ray and vllm are marks that others run.
    left_out = {file for stage in TABLE.values() for file in stage.get("files", ())}
    script = (ROOT / ".ci" / "run").read_text()
    for file in left_out:
        assert re.search(rf"tests [^\n]*\b{re.escape(file)}\b", script), f"{file} is run by no stage"
    assert "tests ray " in script and "pytest -m vllm" in script
