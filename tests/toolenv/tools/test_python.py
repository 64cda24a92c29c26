"""The python tool: what the model reads back, and what lives how long."""

import sys
from collections.abc import Generator, Sequence
from types import SimpleNamespace

import pytest

from agentrl.errors import ConfigError, InfrastructureError, UsageError
from agentrl.sandboxes import Limits, Sandbox, SandboxUnavailable, open_sandbox
from agentrl.toolenv.registry import make
from agentrl.toolenv.tools import python as python_tool
from agentrl.toolenv.tools.function import ToolError
from agentrl.toolenv.tools.python import (
    PythonTool,
    backend_of,
    close_shared_sandbox,
    sandbox_counters,
    shared_sandbox,
    use_backend,
)


@pytest.fixture
def python() -> Generator[PythonTool]:
    tool = PythonTool(timeout=2.0, max_chars=300)
    tool.open(0)
    yield tool
    tool.close()


def run(tool: PythonTool, code: str) -> str:
    return tool.call({"code": code})


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        *(("print(482 * 73)", "35186"), ("482 * 73", "35186"), ("print('a')\n'b'", "a\n'b'"), ("x = 1", "(no output)")),
        *(("", "(no output)"), ("print('é漢🙂')", "é漢🙂"), ("a = [1, 2]\na", "[1, 2]"), ("None", "(no output)")),
        *(("for i in range(3): i", "(no output)"), ("def f():\n    return 3\nf() + 1", "4")),
        ("print('no newline', end='')\n7", "no newline\n7"),
    ],
)
def test_what_a_repl_would_show(python: PythonTool, code: str, shown: str) -> None:
    assert run(python, code) == shown


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("print('before')\n1 / 0", "before\n"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("raise ValueError('x' * 5000)", "characters left out"),
        ("print('\ud800')", ""),
    ],
)
def test_what_goes_wrong_is_told(python: PythonTool, code: str, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        run(python, code)
    assert message in str(caught.value) and len(str(caught.value)) <= 300
    assert run(python, "1 + 1") == "2"


def test_code_that_never_ends_is_stopped(python: PythonTool) -> None:
    python.timeout = 0.3
    with pytest.raises(ToolError, match=r"longer than 0\.3 s"):
        run(python, "while True: pass")


@pytest.mark.parametrize("arguments", [{}, {"code": 3}, {"code": "1", "more": 2}, {"source": "1"}])
def test_wrong_arguments_are_told(python: PythonTool, arguments: dict[str, object]) -> None:
    with pytest.raises(ToolError, match="one argument, code"):
        python.call(arguments)


def test_state_lives_as_long_as_the_episode(python: PythonTool) -> None:
    run(python, "x = 41")
    assert run(python, "x + 1") == "42"
    python.open(0)
    with pytest.raises(ToolError, match="NameError"):
        run(python, "x")


def test_chance_follows_the_seed(python: PythonTool) -> None:
    drawn: list[str] = []
    for seed in (1, 1, 2, 2**40 + 1):
        python.open(seed)
        drawn.append(run(python, "import random; random.random()"))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_closed_sandbox_is_an_infrastructure_fault(python: PythonTool) -> None:
    run(python, "1")
    close_shared_sandbox()
    with pytest.raises(InfrastructureError, match="sandbox failed"):
        run(python, "1")
    assert run(python, "1") == "1"  # the next call gets a new session of a new sandbox


def test_nothing_is_opened_before_the_first_call() -> None:
    close_shared_sandbox()
    tool = PythonTool()
    tool.open(0)
    tool.close()
    assert not python_tool._sandboxes.existing()
    assert [shared_sandbox(), shared_sandbox()] == 2 * python_tool._sandboxes.existing()


def test_the_back_end_behind_the_tools_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_of([object()]) == ""
    assert backend_of([object(), PythonTool()]) == shared_sandbox().backend
    monkeypatch.setattr(shared_sandbox(), "version", "runsc, image 0123456789ab")
    assert backend_of([PythonTool()]).endswith(" runsc, image 0123456789ab")
    assert backend_of([PythonTool(packages=["no_such_package"])]) == "none"


def test_each_set_of_packages_has_a_sandbox_of_its_own(python: PythonTool) -> None:
    close_shared_sandbox()
    assert shared_sandbox(["sortedcontainers", "iniconfig"]) is shared_sandbox(("iniconfig", "sortedcontainers"))
    assert shared_sandbox() is not shared_sandbox(["iniconfig", "sortedcontainers"])
    tool = PythonTool(packages=["sortedcontainers", "iniconfig"])
    tool.open(0)
    assert run(tool, "import sortedcontainers\nsortedcontainers.SortedList([2, 1])") == "SortedList([1, 2])"
    with pytest.raises(ToolError, match="ModuleNotFoundError"):
        run(python, "import sortedcontainers")
    tool.close()
    counters = sandbox_counters()
    assert counters is not None and sum(counters.latency) == 3
    assert counters.runs == {"ok": 2, "error": 1}  # one of them looked whether the packages are there
    close_shared_sandbox()
    assert sandbox_counters() is None


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Generator[list[Sandbox]]:
    """The sandboxes that the user's own back end has opened; one of its functions opens none."""
    close_shared_sandbox()
    opened: list[Sandbox] = []

    def small(limits: Limits, *, ready: int | None, packages: Sequence[str]) -> Sandbox:
        opened.append(open_sandbox("local", limits=limits, ready=ready, packages=packages))
        return opened[-1]

    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(small=small, nothing=lambda limits, **options: None))
    yield opened
    use_backend("auto")
    close_shared_sandbox()


def test_a_back_end_of_ones_own_runs_what_names_it(mine: list[Sandbox]) -> None:
    tool = PythonTool(sandbox="mine:small")
    assert not mine, "nothing is opened before the first call"
    assert run(tool, "6 * 7") == "42" and [shared_sandbox((), "mine:small")] == mine
    assert backend_of([tool]) == f"mine:small {mine[0].backend}"
    assert shared_sandbox() not in mine
    use_backend("mine:small")
    assert shared_sandbox() in mine and backend_of([PythonTool()]).startswith("mine:small ")
    with pytest.raises(SandboxUnavailable, match="programs can't import no_such_package"):
        shared_sandbox(["no_such_package"])
    tool.close()


@pytest.mark.parametrize("env_id", ["Code-v0", "Countdown-v0"])
def test_an_environment_plays_and_grades_in_the_sandbox_that_it_names(env_id: str, mine: list[Sandbox]) -> None:
    env = make(f"agentrl/{env_id}", sandbox="mine:small")
    env.reset(seed=0)
    for turn in env.gold_turns(env.episode.task):
        env.step(turn)
    assert env.episode.parts and env.episode.parts["correct"] == 1
    env.close()
    assert python_tool._sandboxes.existing() == mine and len(mine) == 1, "no other one was opened"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("dokcer", "no sandbox is called 'dokcer'; did you mean 'docker'?"),
        ("nowhere:small", "sandbox 'nowhere:small' needs nowhere: install it"),
        ("mine:smal", "sandbox 'mine:smal' is not in mine; did you mean 'small'?"),
    ],
)
def test_what_is_no_back_end_is_refused_before_anything_runs(mine: list[Sandbox], name: str, wanted: str) -> None:
    for attempt in (lambda: PythonTool(sandbox=name), lambda: use_backend(name)):
        with pytest.raises(UsageError, match=wanted.replace("?", r"\?")):
            attempt()


def test_a_back_end_returns_a_sandbox(mine: list[Sandbox]) -> None:
    with pytest.raises(ConfigError, match="sandbox 'mine:nothing' can't be opened: mine:nothing must return a Sandbox"):
        backend_of([PythonTool(sandbox="mine:nothing")])
