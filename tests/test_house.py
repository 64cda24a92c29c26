"""The house rules beside ruff's, each a function from a source tree to the sentences that say where it breaks them.

Every rule runs on this repository and, to prove that it can fail, on a small tree that breaks it.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from .parsed import UNREAD, Module, files_under, load, ours, room_of

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE, MAX_FUNCTION, MIN_TEST_RATIO = 400, 60, 0.8

FLOORS = [
    {"errors", "processes", "sandboxes", "native"},
    {"segments", "named"},
    {"types"},
    {"render", "grading", "config", "batch", "models"},
    {"toolenv", "engines", "algos"},
    {"judge"},
    {"envs", "rollout"},
    {"endpoint"},
    {"runs"},
    {"eval"},
    {"train", "__init__"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# What a room may not import although it lies below: environments are reached by id, algorithms see tensors only.
BARRED = {room: {"envs"} for room in ("runs", "eval", "train")} | {"algos": {"batch", "render", "config"}}
ALONE = {"agentrl.sandboxes", "agentrl.sandboxes.inside"}
"""Packages that import nothing else of ours: the second is all that is sent into a container."""
TORCH_FREE = FLOORS[0] | {
    *("segments", "named", "types", "render", "grading", "config", "toolenv", "judge", "envs", "__init__"),
}
"""Rooms that import torch nowhere, not even inside a function."""
LIGHT = TORCH_FREE | {"cli", "__main__"}
"""Rooms that can be imported on the base install."""
EXTRAS = {"torch", "transformers", "tokenizers", "safetensors", "vllm", "docker", "rich", "triton"} | {
    *("math_verify", "datasets", "latex2sympy2_extended", "pyarrow", "pandas", "mcp", "reasoning_gym"),
    *("jinja2", "markupsafe", "peft", "accelerate", "openai", "websockets"),
}
"""Top-level modules that the base install lacks."""
# Written in two halves, so that this file does not break its own rule.
FOREIGN = ("/wo" + "rk/", "../sha" + "red")
FORKING = (
    *("agentrl.sandboxes.inside", "agentrl.processes.zygote", "agentrl.envs.reasoning_gym", "tests.fork_server"),
    *("scripts.gpu_check", "scripts.gpu.learning", "scripts.benchmarks.long_context"),
)
"""Modules of processes that have a single thread when they fork."""
OUTPUT = {"build", "dist", "runs"}
"""What git ignores at the top of the repository."""


def rule_floor(root: Path) -> Iterator[str]:
    """Every room has a floor, and imports only go down."""
    for module in ours(load(root)):
        if module.room not in FLOOR_OF:
            yield f"{module.path} is a new room: give it a floor in tests/test_house.py"
            continue
        floor = FLOOR_OF[module.room]
        for use in module.imports:
            if use.target.split(".")[0] != "agentrl":
                continue
            other = room_of(use.target)
            if left := [name for name in ALONE if is_in(module.name, name) and not is_in(use.target, name)]:
                yield f"{module.at(use.line)}: {left[0]} imports nothing else of ours, but this does"
            elif other == module.room:
                continue
            elif other not in FLOOR_OF:
                yield f"{module.at(use.line)} imports {use.target}, which has no floor: give it a floor"
            elif FLOOR_OF[other] >= floor:
                yield f"{module.at(use.line)} is on floor {floor} and imports {use.target} from {FLOOR_OF[other]}"
            elif other in BARRED.get(module.room, set()):
                yield f"{module.at(use.line)} is in {module.room}, which may not import {other}"


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def rule_cycles(root: Path) -> Iterator[str]:
    """No module needs itself to be imported; imports for type checkers count as well."""
    modules = load(root)
    graph = {
        module.name: {use.target for use in module.imports if use.when != "function" and use.target in modules}
        for module in ours(modules)
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "import cycle: " + " <- ".join(error.args[1])


def rule_torch_free(root: Path) -> Iterator[str]:
    """The lower floors never name torch, and importing what the base install offers loads no extra."""
    modules = load(root)
    for module in ours(modules):
        for use in module.imports:
            if module.room in TORCH_FREE and use.target.split(".")[0] == "torch":
                yield f"{module.at(use.line)} imports torch, but {module.room} works without it"
        if module.room in LIGHT:
            yield from (f"importing {module.name} loads an extra: {way}" for way in ways_to_extras(module, modules))


def ways_to_extras(start: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    stack, seen = [(start, start.name)], {start.name}
    while stack:
        module, way = stack.pop()
        for use in module.imports:
            step = f"{way} -> {use.target}"
            if use.when == "module" and use.target.split(".")[0] in EXTRAS:
                yield f"{step} ({module.at(use.line)})"
            elif use.when == "module" and use.target in modules and use.target not in seen:
                seen.add(use.target)
                stack.append((modules[use.target], step))


def rule_file_length(root: Path) -> Iterator[str]:
    """A file answers one question."""
    for module in load(root).values():
        if module.lines > MAX_FILE:
            yield f"{module.path} has {module.lines} lines; the house allows {MAX_FILE}: split it by question"


def rule_function_length(root: Path) -> Iterator[str]:
    """A function is one step."""
    for module in load(root).values():
        for name, start, last in module.functions:
            if (lines := last - start + 1) > MAX_FUNCTION:
                yield f"{module.at(start)}: {name} has {lines} lines; the house allows {MAX_FUNCTION}"


def rule_tests(root: Path) -> Iterator[str]:
    """There is nearly as much test code as code."""
    modules = load(root)
    code = sum(module.code for module in ours(modules))
    tests = sum(module.code for name, module in modules.items() if name.split(".")[0] == "tests")
    if tests < MIN_TEST_RATIO * code:
        yield f"{tests} test lines for {code} code lines: the house wants at least {MIN_TEST_RATIO} x as many"


def rule_files(root: Path) -> Iterator[str]:
    """What may be a stranger's folder is read and written through one module, which follows no links."""
    for module in ours(load(root)):
        if module.room in {"runs", "eval", "cli"} and module.name != "agentrl.runs.files":
            for line in module.opens:
                yield f"{module.at(line)} opens a file: agentrl/runs/files.py does that"


def rule_forks(root: Path) -> Iterator[str]:
    """Nothing forks but processes of a single thread: a child would wait for ever for another thread's lock."""
    for module in load(root).values():
        if not module.name.startswith(FORKING):
            for line in module.forks:
                yield f"{module.at(line)} forks: start a new process, or ask one of a single thread to fork"


def rule_own_paths(root: Path) -> Iterator[str]:
    """No file names a place that a clone does not have."""
    for path in files_under(root):
        where = path.relative_to(root)
        if where.parts[0] in UNREAD | OUTPUT:  # a linked work tree has a file called .git
            continue
        content = path.read_bytes()
        for foreign in FOREIGN:
            if foreign.encode() in content:
                yield f"{where} mentions {foreign}, which only one machine has"


Rule = Callable[[Path], Iterator[str]]
RULES: list[Rule] = [
    *(rule_floor, rule_cycles, rule_torch_free, rule_file_length, rule_function_length, rule_tests, rule_own_paths),
    rule_files,
    rule_forks,
]
LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION
BREAKS: list[tuple[Rule, dict[str, str], str]] = [
    (rule_floor, {"agentrl/attic.py": ""}, "give it a floor"),
    (rule_floor, {"agentrl/toolenv/base.py": "import agentrl.attic"}, "give it a floor"),
    (rule_floor, {"agentrl/toolenv/a.py": "import agentrl.train"}, "a.py:1 is on floor 4 and imports agentrl.train"),
    (rule_floor, {"agentrl/toolenv/a.py": "from agentrl import train", "agentrl/train.py": ""}, "train from 10"),
    (rule_floor, {"agentrl/toolenv/a.py": "from agentrl import make"}, "imports agentrl from 10"),
    (rule_floor, {"agentrl/toolenv/a.py": "import agentrl.engines"}, "imports agentrl.engines from 4"),
    (rule_floor, {"agentrl/toolenv/a.py": "def f():\n    from agentrl.cli import main"}, "a.py:2"),
    (rule_floor, {"agentrl/toolenv/a.py": "if TYPE_CHECKING:\n    import agentrl.cli"}, "a.py:2"),
    (rule_floor, {"agentrl/toolenv/a.py": "import_module('agentrl.cli')"}, "imports agentrl.cli"),
    (rule_floor, {"agentrl/envs/a.py": "from ..runs import records", "agentrl/runs/records.py": ""}, "runs.records"),
    (rule_floor, {"agentrl/runs/a.py": "import agentrl.envs.math"}, "may not import envs"),
    (rule_floor, {"agentrl/algos/a.py": "from agentrl.batch import Batch"}, "algos, which may not import batch"),
    (rule_floor, {"agentrl/sandboxes/base.py": "from agentrl.types import Task"}, "imports nothing else of ours"),
    (rule_floor, {"agentrl/sandboxes/inside/a.py": "import agentrl.sandboxes.base"}, "imports nothing else of ours"),
    (rule_cycles, {"agentrl/a.py": "import agentrl.b", "agentrl/b.py": "from agentrl import a"}, "import cycle"),
    (rule_cycles, {"agentrl/e/__init__.py": "from .m import x", "agentrl/e/m.py": "from . import y"}, "agentrl.e.m"),
    (rule_files, {"agentrl/cli/a.py": "def f(path):\n    path.read_text()"}, "a.py:2 opens a file"),
    (rule_forks, {"agentrl/a.py": "import os\nos.fork()"}, "a.py:2 forks"),
    (rule_forks, {"tests/a.py": "multiprocessing.get_context('fork')"}, "a.py:1 forks"),
    (rule_forks, {"scripts/a.py": "subprocess.Popen([], preexec_fn=f)"}, "a.py:1 forks"),
    (rule_torch_free, {"agentrl/toolenv/a.py": "def f():\n    import torch.nn"}, "a.py:2 imports torch"),
    (rule_torch_free, {"agentrl/config/settings.py": "if TYPE_CHECKING:\n    import torch"}, "config works without it"),
    (rule_torch_free, {"agentrl/envs/math.py": "from transformers import AutoTokenizer"}, "loads an extra"),
    (rule_torch_free, {"agentrl/cli.py": "import agentrl.eval", "agentrl/eval.py": "import torch"}, "eval -> torch"),
    (rule_file_length, {"scripts/long.py": "\n" * (MAX_FILE + 1)}, "has 401 lines"),
    (rule_function_length, {"tests/a.py": "class A:\n    async " + LONG.replace("\n", "\n    ")}, "a.py:2: f has 61"),
    (rule_tests, {"agentrl/a.py": "x = 1\n" * 10, "tests/test_a.py": "x = 1\n" * 7}, "7 test lines for 10 code lines"),
    (rule_tests, {"agentrl/a.py": "x = 1\n" * 2, "tests/test_a.py": '"""\nLong."""\n\n# note\nx = 1'}, "1 test lines"),
    (rule_own_paths, {"docs/guide.md": f"cd {FOREIGN[0]}main"}, "docs/guide.md mentions"),
    (rule_own_paths, {".ci/run": f"ls {FOREIGN[1]}"}, ".ci/run mentions"),
]
KEEPS: list[tuple[Rule, dict[str, str]]] = [
    (rule_floor, {"agentrl/train/step.py": "from agentrl import batch", "agentrl/batch.py": "import agentrl.types"}),
    (rule_cycles, {"agentrl/a.py": "def f():\n    import agentrl.b", "agentrl/b.py": "import agentrl.a"}),
    (rule_torch_free, {"agentrl/render.py": "def f():\n    import transformers", "agentrl/batch.py": "import torch"}),
    (rule_files, {"agentrl/runs/files.py": "open('a')", "agentrl/eval.py": "import os\nos.open(os.devnull, 1)"}),
    (rule_tests, {"agentrl/a.py": "x = 1\n" * 10, "tests/test_a.py": "x = 1\n" * 8}),
    (rule_forks, {"tests/fork_server.py": "os.fork()", "scripts/a.py": "multiprocessing.get_context('spawn')"}),
    (rule_own_paths, {"README.md": "a network/path and work/ of others", ".git": FOREIGN[0]}),
]


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_keeps(rule: Rule) -> None:
    broken = list(rule(ROOT))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(("rule", "files", "message"), BREAKS)
def test_rule_can_fail(tmp_path: Path, rule: Rule, files: dict[str, str], message: str) -> None:
    assert any(message in sentence for sentence in rule(plant(tmp_path, files)))


@pytest.mark.parametrize(("rule", "files"), KEEPS)
def test_rule_lets_good_code_pass(tmp_path: Path, rule: Rule, files: dict[str, str]) -> None:
    assert list(rule(plant(tmp_path, files))) == []


def test_every_rule_is_proven_to_fail() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


def test_links_are_followed_under_one_name(tmp_path: Path) -> None:
    plant(tmp_path, {"envs/math/env.py": "import torch", "agentrl/types.py": ""})
    (tmp_path / "agentrl" / "envs").symlink_to("../envs")
    assert set(load(tmp_path)) == {"agentrl.types", "agentrl.envs.math.env"}
    assert any("imports torch" in sentence for sentence in rule_torch_free(tmp_path))


def test_type_checker_reads_the_linked_folders_too() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    links = {path.relative_to(ROOT).as_posix() for path in (ROOT / "agentrl").iterdir() if path.is_symlink()}
    assert {"agentrl", *links} <= set(settings["include"]) and settings["typeCheckingMode"] == "strict"
