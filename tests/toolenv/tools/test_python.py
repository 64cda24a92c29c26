"""The python tool: what the model reads back, and what lives how long."""

from collections.abc import Generator

import pytest

from agentrl.errors import InfrastructureError
from agentrl.toolenv.tools import python as python_tool
from agentrl.toolenv.tools.function import ToolError
from agentrl.toolenv.tools.python import PythonTool, backend_of, close_shared_sandbox, sandbox_counters, shared_sandbox


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


def test_two_tools_share_a_sandbox_and_no_state(python: PythonTool) -> None:
    other = PythonTool()
    other.open(0)
    run(python, "y = 1")
    with pytest.raises(ToolError, match="NameError"):
        run(other, "y")
    other.close()
    assert run(python, "y") == "1"


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
