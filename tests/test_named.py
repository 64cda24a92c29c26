"""What a setting names: a row of a table, or something of the user's own, with a sentence for each fault."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, UsageError
from agentrl.named import check_name, make_named, resolve

TABLE = {"ours": len, "lazy": "collections:Counter", "extra": "own_extra:Thing"}
OWN = """
import os
LIMIT = 3
def loss(*parts, scale=1): return parts, scale
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_module.py").write_text(OWN)
    (tmp_path / "own_extra.py").write_text("import no_such_package")
    (tmp_path / "own_ending.py").write_text("raise SystemExit(3)")


def test_names_of_a_table_and_of_a_module() -> None:
    assert resolve("loss", TABLE, "ours") is len
    assert resolve("loss", TABLE, "lazy") is __import__("collections").Counter
    assert make_named("loss", TABLE, "own_module:loss", {"scale": 2}, "a", "b") == (("a", "b"), 2)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("our", "no loss is called 'our'; did you mean 'ours'?"),
        ("extra", "loss 'extra' needs no_such_package: pip install 'agentrl[extra]'"),
        ("own_modul:loss", "loss 'own_modul:loss' needs own_modul: install it, or put its folder into PYTHONPATH"),
        ("own_module.part:loss", "loss 'own_module.part:loss' needs own_module.part: install it"),
        ("own_module:", "loss 'own_module:' names nothing of your own: write module:name"),
        ("../own:loss", "names nothing of your own"),
        ("own_module:los", "loss 'own_module:los' is not in own_module; did you mean 'loss'?"),
        ("own_module:LIMIT", "is of type int, which can't be called: name a function or a class"),
        ("own_ending:loss", "loss 'own_ending:loss' can't be imported: SystemExit(3)"),
    ],
)
def test_each_fault_is_a_sentence(name: str, wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve("loss", TABLE, name)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_a_check_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_name("loss", TABLE, "own_ending:loss")


def test_options_that_are_not_taken() -> None:
    options: dict[str, Any] = {"scael": 2}
    with pytest.raises(ConfigError, match=r"'own_module:loss' can't be made with loss\.options: .*'scael'"):
        make_named("loss", TABLE, "own_module:loss", options)
