"""Tools of real MCP servers, over pipes and over HTTP."""

import contextlib
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.errors import ConfigError, InfrastructureError, UsageError
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tools import timed
from agentrl.toolenv.tools.function import ToolError
from agentrl.toolenv.tools.mcp import McpTool, close_sessions, mcp_tools, sessions
from agentrl.types import Task

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = [sys.executable, SERVER, "stdio"]
PLAIN = [sys.executable, "-S", SERVER, "plain"]
SAYS = "import os, sys; sys.stderr.write(os.environ['TOKEN']); sys.exit(1)"
"""A program that tells a variable that it was given."""
Tools = dict[str, McpTool]


def offered(**options: Any) -> Tools:
    """The tools of a server by their names: of the plain one, where no other is given."""
    server = {} if "url" in options else {"command": PLAIN}
    return {tool.name: tool for tool in mcp_tools(**{**server, "timeout": 300.0, **options})}


def children(command: list[str] = PLAIN) -> list[psutil.Process]:
    """The servers that were started over pipes."""
    servers: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # children of other tests may end meanwhile
            servers += [child] if child.cmdline()[-len(command) :][1:] == command[1:] else []
    return servers


@pytest.fixture(scope="module", autouse=True)
def extra(require: Callable[[bool, str], None]) -> None:
    import importlib.util

    require(importlib.util.find_spec("mcp") is not None, "needs the package mcp")


def start_http() -> tuple[str, Callable[[], object]]:
    """Start a server over HTTP; gives its address, and what kills it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], **quiet)
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"http://127.0.0.1:{port}/mcp", lambda: (process.kill(), process.wait())
        time.sleep(0.05)
    raise AssertionError("the server did not start")


@pytest.fixture(scope="module")
def http() -> Generator[str]:
    url, kill = start_http()
    yield url
    kill()


@pytest.fixture(scope="module", params=["stdio", "http"])
def tools(request: pytest.FixtureRequest) -> Generator[Tools]:
    server = {"url": request.getfixturevalue("http"), "headers": {"X-Test": "1"}}
    tools = offered(**({"command": STDIO} if request.param == "stdio" else server), max_chars=100)
    yield tools
    tools["add"].close()
    assert not children(STDIO)


@pytest.mark.slow
def test_the_server_says_what_its_tools_are(tools: Tools) -> None:
    assert set(tools) == {"add", "note", "fail", "draw", "long", "wait", "die", "whoami"}
    add: Any = tools["add"]
    assert add.description == "Add two numbers."
    assert add.parameters["properties"]["a"]["type"] == "integer"
    assert add.parameters["required"] == ["a"]


def test_calls_are_answered(tools: Tools) -> None:
    assert tools["add"].call({"a": 2, "b": 3}) == "5"
    assert tools["draw"].call({}) == "a red dot\n(image of type image/png, not shown)"
    long = tools["long"].call({"size": 5000})
    assert len(long) <= 100 and "characters left out" in long


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fail", {"why": "no reason"}, "Error executing tool fail"),
        ("add", {"a": "two"}, "Error executing tool add"),
        ("add", {"a": float("nan")}, "Error executing tool add"),
        ("note", {"text": "\ud800"}, "the arguments of note can't be written as JSON"),
        ("note", {"text": object()}, "the arguments of note can't be written as JSON"),
    ],
)
def test_a_refusal_is_told(tools: Tools, name: str, arguments: Mapping[str, object], message: str) -> None:
    with pytest.raises(ToolError, match=message) as caught:
        tools[name].call(arguments)
    assert "https://errors.pydantic" not in str(caught.value)
    assert tools["add"].call({"a": 1}) == "2"


def test_a_call_that_overruns_is_stopped(http: str) -> None:
    tools = offered(url=http, timeout=0.5)
    with pytest.raises(ToolError, match=r"stopped: wait ran longer than 0\.5 s"):
        tools["wait"].call({"seconds": 3600})
    tools["wait"].timeout = 300.0
    assert tools["wait"].call({"seconds": 0}) == "waited"
    tools["wait"].close()


def test_a_dead_server_is_an_infrastructure_fault() -> None:
    tools = offered()
    with pytest.raises(InfrastructureError, match=r"MCP server .*mcp_server\.py plain' is gone: Connection closed"):
        tools["die"].call({})
    assert not children()
    assert tools["add"].call({"a": 1}) == "2"  # the next call gets another
    tools["add"].close()


@pytest.mark.slow
def test_a_server_that_was_killed_over_http_is_an_infrastructure_fault() -> None:
    url, kill = start_http()
    tools = offered(url=url, timeout=30.0)
    assert tools["add"].call({"a": 1}) == "2"
    kill()
    for _ in range(2):
        with pytest.raises(InfrastructureError, match=f"MCP server '{url}'"):
            tools["add"].call({"a": 1})
    tools["add"].close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, UsageError, "either a command"),
        ({"command": ["x"], "url": "http://x"}, UsageError, "either a command"),
        ({"command": "python server.py"}, UsageError, "as a list of words"),
        ({"command": ["no-such-program"]}, UsageError, "'no-such-program' can't be started"),
        ({"command": [sys.executable, "-c", "1 / 0"]}, InfrastructureError, "does not answer.*ZeroDivisionError"),
        ({"command": PLAIN, "timeout": 0}, ConfigError, "timeout=0"),
        ({"command": PLAIN, "max_chars": 3}, ConfigError, "max_chars=3"),
        ({"command": [sys.executable, "-c", SAYS], "env": {"TOKEN": "secret"}}, InfrastructureError, "words: secret"),
    ],
)
def test_what_is_no_server_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    before = set(sessions._sessions.get())
    with pytest.raises(error, match=f"(?s){message}"):
        mcp_tools(**options)
    assert sessions._sessions.get() == before


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UsageError, match=r"pip install 'agentrl\[mcp\]'"):
        mcp_tools(["another", "server"])


class Notes(ToolEnv):
    """Is played with a server that remembers."""

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="one", prompt="Take notes.")]


def noted(env: ToolEnv) -> str:
    return env.step("```note\nx\n```")[0][0]["content"]


def test_an_episode_has_a_server_of_its_own() -> None:
    class Apart(Notes):
        tools = mcp_tools(PLAIN, timeout=300.0)

    before = children()
    left, right = Apart(), Apart()
    for env in (left, right):
        env.reset(seed=0)
    assert children() == before, "the first call begins it"
    assert [noted(env) for env in (left, right, left)] == ["x", "x", "x | x"]
    served = children()
    assert len(served) == len(before) + 2
    left.reset(seed=0)
    assert len(children()) == len(before) + 1
    assert noted(left) == "x" and len(children()) == len(before) + 2 and children() != served
    for env in (left, right, right):
        env.close()
    assert children() == before


@pytest.fixture
def ended() -> Generator[None]:
    yield
    close_sessions()


@pytest.mark.usefixtures("ended")
def test_episodes_share_a_server_that_may_be_shared() -> None:
    before = children()

    class Shared(Notes):
        tools = mcp_tools(PLAIN, timeout=300.0, shared=True)

    left, right = Shared(), Shared()
    assert children() == before, "the first call begins it"
    contents: list[str] = []
    for env in (left, right, left):
        env.reset(seed=0)
        contents.append(noted(env))
        env.close()
    assert contents == ["x", "x | x", "x | x | x"]
    assert len(children()) == len(before) + 1, "it outlives episodes"
    alone = offered()["note"]
    assert alone.call({"text": "y"}) == "y", "what is not shared is another one"
    alone.close()
    copied = pickle.loads(pickle.dumps(left.tools[0]))
    assert copied._connection is left.tools[0]._connection  # type: ignore[attr-defined]
    close_sessions()
    assert not children()
    left.reset(seed=0)
    assert noted(left) == "x", "another one begins"


@pytest.mark.usefixtures("ended")
def test_a_shared_server_that_died_is_begun_anew_for_all() -> None:
    before, tools = children(), offered(shared=True)
    process_id = tools["whoami"].call({})
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(tools["wait"].call, {"seconds": 600}) for _ in range(3)]
        while not all(call.done() for call in waiting):  # one may call only after the server has died once
            with pytest.raises(InfrastructureError, match="is gone"):
                tools["die"].call({})
    assert all("is gone" in str(call.exception()) for call in waiting)
    assert process_id != tools["whoami"].call({}) and len(children()) == len(before) + 1


@pytest.mark.slow
@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("shared", [False, True])
def test_threads_get_their_own_answers(http: str, shared: bool) -> None:
    before, answers = children(), list[int]()

    def play(number: int) -> None:
        add = offered(shared=True)["add"] if shared else offered(url=http)["add"]
        for step in range(3):
            add.open(step)
            answers.append(int(add.call({"a": 10 * number, "b": step})))
            add.close()

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(play, range(8)))
    assert sorted(answers) == [10 * number + step for number in range(8) for step in range(3)]
    assert len(children()) == len(before) + shared


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_nothing_is_left_when_the_process_ends(shared: bool) -> None:
    code = f"""
from agentrl.toolenv.tools.mcp import mcp_tools
tools = {{tool.name: tool for tool in mcp_tools({PLAIN!r}, shared={shared})}}
print(tools["whoami"].call({{}}))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stderr, ran.returncode) == ("", 0)
    assert not psutil.pid_exists(int(ran.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_child_opens_a_session_of_its_own(http: str, shared: bool) -> None:
    code = f"""
import os
from agentrl.toolenv.tools.mcp import mcp_tools
add = {{tool.name: tool for tool in mcp_tools(url={http!r}, shared={shared}, timeout=300.0)}}["add"]
assert add.call({{"a": 1}}) == "2"
pid = os.fork()
if pid == 0:
    os._exit(add.call({{"a": 2}}) != "3")
assert os.waitpid(pid, 0)[1] == 0 and add.call({{"a": 3}}) == "4"
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("ended")
def test_a_loop_that_a_tool_blocks_is_given_up_with_its_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "_PATIENCE", 0.1)
    monkeypatch.setattr(timed, "_GRACE", 0.1)
    before, tools, release = children(), offered(shared=True), threading.Event()
    process_id = tools["whoami"].call({})

    async def block() -> None:
        release.wait()

    assert isinstance(timed.call_async(block, 0.05).exception(), timed.Overrun)
    assert tools["whoami"].call({}) != process_id, "another session begins on another loop"
    release.set()
    while len(children()) > len(before) + 1:  # the loop that is no longer blocked ends its session
        time.sleep(0.01)
    close_sessions()
    timed._loops.close()
    while any(thread.name == "agentrl-loop" for thread in threading.enumerate()):
        time.sleep(0.01)
