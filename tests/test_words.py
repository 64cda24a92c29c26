"""Names say what they hold, and docstrings begin with the field's verbs."""

import ast
from collections.abc import Iterator
from pathlib import Path

from .test_house import ROOT, files_under, plant

EMPTY = {"place", "one", "told", "found", "given", "there", "said", "known", "kept", "first"}
"""Names that make a reader ask: what was found, which one, the place of what?"""
VERBS = {"Give", "Gives", "Tell", "Tells", "Say", "Says", "Ask", "Asks"}
"""Words that stand for Return, Compute, Check, Log, Load or Raise."""


def faults(tree: ast.AST) -> Iterator[str]:
    """Yield the line and the word of each name and docstring to be written again."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchAs(name=str(name)) if name in EMPTY:
                yield f"{node.lineno}: {name}"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name in EMPTY:
                    yield f"{node.lineno}: {name}"
                if (words := (ast.get_docstring(node) or "").split(maxsplit=1)) and words[0] in VERBS:
                    yield f"{node.lineno}: {words[0]} …"
            case _:
                pass


def all_faults(root: Path, *folders: str) -> list[str]:
    paths = [path for folder in folders for path in files_under(root / folder) if path.suffix == ".py"]
    return [
        f"{path.relative_to(root)}:{fault}" for path in paths for fault in faults(ast.parse(path.read_text("utf-8")))
    ]


def test_names_and_docstrings_say_what_they_mean() -> None:
    assert not all_faults(ROOT, "agentrl", "scripts", "experiments", "tests")


def test_each_kind_is_found(tmp_path: Path) -> None:
    text = '''
def given(one, *, told=1):
    """Give it."""
    for place, other in found: pass
    match one:
        case [said, *_]: return (first := 1)
'''
    plant(tmp_path, {"agentrl/a.py": text, "tests/a.py": 'async def f():\n    "Tell it."'})
    words = sorted(fault.split()[1] for fault in all_faults(tmp_path, "agentrl", "tests"))
    assert words == ["Give", "Tell", "first", "given", "one", "place", "said", "told"]
