"""The sandbox of sums answers as the local one does."""

from collections.abc import Generator, Sequence

import pytest

from agentrl.sandboxes import Limits, open_sandbox
from agentrl.toolenv.tools.function import ToolError
from agentrl.toolenv.tools.python import PythonTool, close_shared_sandbox

from .conftest import load

sum_sandbox = load("sum_sandbox")
CELLS = (
    "print(0)",
    "print(-7 * 12)",
    "print(-3+4*5 - 6)",
    "print(999999999999*999999999999*999999999999)",
    "print(12*34)\nprint(1)",
    "print(007)",
    "print(12 *  34)",
    "print(2**3)",
    "print(5--3)",
    "print(7/2)",
    "12*34",
    "print(12*34",
    "print(1, 2)",
    "print = str",
    "print(5*5)",
    "x",
)


@pytest.fixture
def opened() -> Generator[None]:
    yield
    close_shared_sandbox()


def test_only_sums_are_answered() -> None:
    assert [code for code in CELLS if sum_sandbox.printed(code) is not None] == [*CELLS[:4], "print(5*5)"]


@pytest.mark.parametrize("cells", [CELLS, CELLS[::-1], *((code, "1 +") for code in CELLS)])
def test_results_are_those_of_the_local_sandbox(opened: None, cells: Sequence[str]) -> None:
    def shown(sandbox: str) -> list[str]:
        tool, texts = PythonTool(sandbox=sandbox), []
        tool.open(1)
        for code in cells:
            try:
                texts.append(tool.call({"code": code}))
            except ToolError as error:
                texts.append(f"error: {error}")
        tool.close()
        return texts

    assert shown(sum_sandbox.BACKEND) == shown("local")


def test_it_is_a_sandbox(opened: None) -> None:
    with open_sandbox(sum_sandbox.BACKEND, limits=Limits()) as sandbox, sandbox.session() as session:
        assert sandbox.run("print(input())", stdin="3").stdout == "3\n"
        session.run("print(1*1)")
        session.run("open('/tmp/a', 'w').write('b')")
        assert session.read_file("/tmp/a") == b"b"
        assert [other.run("1 + 1").value for other in (session.fork(), session.replay())] == ["2", "2"]
        assert sandbox.health().ok
        assert sum(sandbox.counters().runs.values()) >= 4
