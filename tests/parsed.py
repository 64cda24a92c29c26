"""Python files of a tree, parsed: what they import, define, open and fork."""

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}
UNREAD = {"__pycache__", ".git", ".venv", ".hypothesis", ".pytest_cache", ".ruff_cache"}
"""What git ignores wherever it lies, and git's own folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import use, resolved to the module that it loads."""

    target: str
    line: int
    when: Literal["module", "typing", "function"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A Python file of the tree."""

    name: str
    path: Path
    lines: int
    code: int
    """Lines that hold code."""
    functions: tuple[tuple[str, int, int], ...]
    """Name, first and last line of each."""
    imports: tuple[Import, ...]
    """Of our own modules alone."""
    opens: tuple[int, ...]
    """Lines where it opens a file by itself."""
    forks: tuple[int, ...]
    """Lines where it forks, or runs Python between fork and exec."""

    @property
    def room(self) -> str:
        """The module's or folder's name right under ``agentrl``."""
        return room_of(self.name)

    def at(self, line: int) -> str:
        """Name the place for a message."""
        return f"{self.path}:{line}"


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def files_under(folder: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in UNREAD and not name.endswith(".egg-info"))
        yield from (Path(top) / name for name in sorted(names))


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def load(root: Path) -> dict[str, Module]:
    """Parse every Python file; envs and sandboxes are reached through their links in ``agentrl``."""
    folders = [root / name for name in ("agentrl", "experiments", "scripts", "tests")]
    paths = {module_name(p, root): p for folder in folders for p in files_under(folder) if p.suffix == ".py"}
    modules: dict[str, Module] = {}
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        nodes = list(ast.walk(tree))
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        modules[name] = Module(
            name=name,
            path=path.relative_to(root),
            lines=len(text.splitlines()),
            code=code_lines(text, nodes),
            functions=tuple(functions(nodes)),
            imports=tuple(find_imports(tree, package, set(paths))) if name.startswith("agentrl") else (),
            opens=tuple(node.lineno for node in nodes if opens_a_file(node)),
            forks=tuple(node.lineno for node in nodes if isinstance(node, ast.Call) and forks(node)),
        )
    return modules


def find_imports(node: ast.AST, package: str, modules: set[str], when: str = "module") -> Iterator[Import]:
    """Walk down, noting whether an import runs with the module, inside a function, or for type checkers only."""
    for child in ast.iter_child_nodes(node):
        inner = when
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = "function"
        elif when == "module" and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inner = "typing"
        for target in targets(child, package, modules):
            yield Import(target=target, line=child.lineno, when=inner)  # pyright: ignore
        yield from find_imports(child, package, modules, inner)


def targets(node: ast.AST, package: str, modules: set[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            base = ".".join([*above, *([module] if module else [])])
            for alias in names:
                inside = f"{base}.{alias.name}"
                yield inside if inside in modules else base
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"), args=[module, *_]):
            if isinstance(module, ast.Constant):
                yield str(module.value)


def ours(modules: Mapping[str, Module]) -> Iterator[Module]:
    return (module for name, module in modules.items() if name.split(".")[0] == "agentrl")


def functions(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int, int]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno or node.lineno


def opens_a_file(node: ast.AST) -> bool:
    match node:
        case ast.Call(args=[ast.Attribute(attr="devnull"), *_]):
            return False
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in OPENING
    return False


def forks(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="os"), attr="fork" | "forkpty"):
            return True
        case ast.Attribute(attr="get_context" | "set_start_method"):
            return not any(isinstance(arg, ast.Constant) and arg.value in {"spawn", "forkserver"} for arg in call.args)
    return any(option.arg == "preexec_fn" for option in call.keywords)


def code_lines(text: str, nodes: Iterable[ast.AST]) -> int:
    """Lines that hold code: no blank lines, no comments, no docstrings."""
    numbered = enumerate(map(str.strip, text.splitlines()), start=1)
    lines = {number for number, line in numbered if line and not line.startswith("#")}
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)
