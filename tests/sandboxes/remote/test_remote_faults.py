"""What dies, falls silent, is full or lies: never the program's fault, and nothing hangs."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_here

from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import ConfigError
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collected, Collector
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.sandboxes import ForkRefused, SandboxClosed, SandboxError, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.base import Limits
from agentrl.sandboxes.remote import client as remote_client
from agentrl.sandboxes.remote import line
from agentrl.sandboxes.remote.client import RemoteSandbox
from agentrl.sandboxes.remote.wire import Hello, Order, Terms
from agentrl.toolenv.tools.python import PythonTool, backend_of, close_shared_sandbox, shared_sandbox, use_backend

from ..conformance import outside
from .conftest import KEY, ROOT, Client, Serve, Served

SLEEP = "import subprocess\nsubprocess.Popen(['sleep', '{marker}'])"
CALL, ANSWER = "```python\nimport time\ntime.sleep(0.2)\n6 * 7\n```", r"\boxed{1}"


def collect(tokenizer: Any, name: str, episodes: int) -> Collected:
    """Play episodes of three calls each, eight at a time."""
    env = ("agentrl/Arithmetic-v0", {"sandbox": name})
    limits = EpisodeLimits(episode_tokens=4000)
    collector = Collector({"": env}, Renderer(tokenizer), limits=limits, concurrency=8, max_fault_rate=0.0)
    script = tuple(tuple(collector._renderer.turn(turn)) for turn in (CALL, CALL, CALL, ANSWER))
    specs = [[EpisodeSpec(task_id=f"train-1:{seed}", seed=seed, script=script)] for seed in range(episodes)]
    try:
        return asyncio.run(collector.collect(specs, ScriptedEngine(()), Sampling(max_tokens=100)))
    finally:
        collector.close()


@pytest.mark.slow
def test_a_server_is_killed_among_episodes_and_comes_back(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setenv("AGENTRL_SANDBOX_KEY", KEY)
    dying, living = serve(), serve()
    name = f"{dying.name},{living.name.removeprefix('remote:')}"
    remote = shared_sandbox((), name)
    assert isinstance(remote, RemoteSandbox)
    monkeypatch.setattr(line, "_RETRY_S", 1.0)

    def kill() -> None:
        while sum(remote.counters().runs.values()) < 12:
            time.sleep(0.01)
        dying.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    collected = collect(tokenizer, name, 24)
    killer.join()
    # Each lost episode was a fault and was played again, and none was blamed on the agent.
    assert (len(collected.groups), collected.lost) == (24, 0) and 1 <= collected.faults <= 8, collected.last_fault
    assert f"the sandbox server ws://127.0.0.1:{dying.port} has failed" in str(collected.last_fault)
    runs = [run for group in collected.groups for episode in group for run in episode.tool_runs]
    assert len(runs) == 72 and all(run.ok for run in runs)
    assert remote.health().ok and remote.counters().faults == collected.faults

    serve(port=dying.port)
    time.sleep(1.0)
    with remote.session() as session, remote.session() as other:
        assert [used.run("1").value for used in (session, other)] == ["1", "1"]
        urls = {used.line.server.url for used in (session, other) if used.line is not None}
    assert len(urls) == 2, "the server that came back is used again"
    close_shared_sandbox()


HOST = """
import sys, time
from agentrl.sandboxes import open_sandbox
session = open_sandbox(sys.argv[1]).session()
print(session.run(sys.argv[2]).status, flush=True)
session.run("import time; time.sleep(600)", timeout=600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_dies_or_falls_silent_leaves_nothing(
    serve: Serve, client: Client, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    server, marker = serve("--limit", "1", "--silence", "4"), outside._marker()
    env = os.environ | {"PYTHONPATH": str(ROOT), "AGENTRL_SANDBOX_KEY": KEY}
    argv = [sys.executable, "-c", HOST, server.name, SLEEP.format(marker=marker)]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ok\n"
        assert len(outside._survivors(marker)) == 2
        with monkeypatch.context() as patch, pytest.raises(SandboxError, match=r"full for 0\.2 s: start them with"):
            patch.setattr(remote_client, "_WAIT_S", 0.2)
            client(server).run("1")
        process.send_signal(number)
        # Its room, the only one, is free again, and its program has ended.
        assert client(server).run("6 * 7").value == "42"
        assert outside._survivors(marker) in ([], [str(process.pid)])
        process.kill()


@pytest.mark.slow
def test_a_server_that_falls_silent_is_a_fault_and_is_left_out(
    serve: Serve, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_PING_S", 2.0)
    silent, other = serve(), serve()
    remote = client(silent, other)
    session = remote.session()
    assert session.run("x = 1").status == "ok" and session.line is not None
    stopped = silent if str(silent.port) in session.line.server.url else other
    stopped.process.send_signal(signal.SIGSTOP)
    with pytest.raises(SandboxError, match=f"{stopped.port} has failed: .*ping timeout"):
        session.run("x")
    with pytest.raises(SandboxClosed):
        session.run("x")
    assert [remote.run("6 * 7").value for _ in range(3)] == ["42"] * 3
    assert f"{stopped.port} left out" in remote.health().detail and remote.health().ok
    assert remote.counters().faults == 1


@pytest.mark.slow
def test_one_session_tries_whether_a_server_is_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "OPEN_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as dead, ThreadPoolExecutor(1) as pool:
        name = f"remote:http://127.0.0.1:{dead.getsockname()[1]},{served.name.removeprefix('remote:')}"
        with (
            RemoteSandbox(name, key=KEY) as remote,
            dead.accept()[0],
            remote.session() as held,
            remote.session() as more,
        ):
            # Whoever looks for the server with the fewest sessions looks at the dead one.
            assert held.run("1").value == more.run("1").value == "1"
            remote._servers[0].until = 0.0
            trying = pool.submit(remote.run, "1")
            with dead.accept()[0]:
                assert remote.run("2").value == "2"
                dead.setblocking(False)
                with pytest.raises(BlockingIOError):
                    dead.accept()
                assert trying.result().value == "1"


@pytest.mark.slow
def test_ctrl_c_ends_the_server_with_all_sandboxes(serve: Serve, client: Client) -> None:
    server, marker = serve(), outside._marker()
    remote = client(server)
    session = remote.session()
    assert session.run(SLEEP.format(marker=marker)).status == "ok"
    timer = threading.Timer(0.5, server.process.send_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(SandboxError, match=r"has failed: .*1001"):
        session.run("import time; time.sleep(60)", timeout=60)
    assert server.process.wait() == 0
    outside._must_vanish(marker)
    with pytest.raises(SandboxError, match=r"no sandbox server answers: ws://.*refused"):
        remote.run("1")
    assert not remote.health().ok
    timer.join()


TERMS = Terms(limits=Limits(), packages=(), version="of this test")
LIES = [
    ("", "has failed: received 1000"),
    ("no JSON", "it answers wrongly"),
    ("{}", "answers wrongly"),
    ('{"result": {"status": "fine"}}', "it answers wrongly"),
    ('{"result": {"status": "ok", "stdout": 5}}', "it answers wrongly"),
    ('{"result": {"status": "ok", "wall_s": NaN}}', "it answers wrongly"),
    ('{"result": {"status": "ok"}, "more": 1}', "it answers wrongly"),
    ('{"data": "eA=="}', "answers wrongly"),
    (b"x" * ((64 << 20) + 1), "has failed: sent 1009"),
    ('{"error": "SandboxError", "message": "all zygotes are dead"}', "could not do it: all zygotes are dead"),
]


@pytest.mark.parametrize(("answer", "fault"), LIES)
def test_what_a_server_answers_is_parsed_and_nothing_is_sent_twice(answer: str | bytes, fault: str) -> None:
    orders = list[Order]()

    def lie(connection: ServerConnection) -> None:
        connection.send(Hello(terms=TERMS).model_dump_json())
        with suppress(ConnectionClosed):
            orders.append(Order.model_validate_json(connection.recv()))
            if answer:
                connection.send(answer)
                connection.recv()

    with serve_here(lie, "127.0.0.1", 0, subprotocols=["agentrl-sandbox-1"], compression=None) as server:  # pyright: ignore
        threading.Thread(target=server.serve_forever).start()
        port = server.socket.getsockname()[1]
        with RemoteSandbox(f"remote:http://127.0.0.1:{port}", key=KEY) as remote, remote.session() as session:
            with pytest.raises(SandboxError, match=fault):
                session.run("1")
            assert [order.code for order in orders] == [b"1"] and remote.counters().faults == 1
            assert not remote.health().ok, "it is left out for a while"
        server.shutdown()


ASKED = [
    ("/?backend=docker", "", 1008),
    ("/?ticket=no", "", 1008),
    ("/?seed=no", "", 1008),
    ("/", '{"kind": "run", "code": "MQ==", "network": true}', "ValueError"),
    ("/", '{"kind": "mount"}', "ValueError"),
    ("/", '{"kind": "run", "code": "MQ==", "timeout": -1}', "ValueError"),
    ("/", '{"kind": "read", "path": "/etc/shadow", "max_bytes": 9}', "OSError"),
    ("/", '{"kind": "read", "path": "/etc/shadow", "max_bytes": -9}', "ValueError"),
]


def test_a_client_chooses_nothing_but_programs(served: Served, client: Client) -> None:
    for path, order, wanted in ASKED:
        headers, url = {"Authorization": f"Bearer {KEY}"}, f"ws://127.0.0.1:{served.port}{path}"
        with connect(url, additional_headers=headers, subprotocols=["agentrl-sandbox-1"]) as connection:  # pyright: ignore
            if isinstance(wanted, int):
                with pytest.raises(ConnectionClosed) as closed:
                    connection.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == wanted
            else:
                connection.recv()
                connection.send(order)
                assert json.loads(connection.recv())["error"] == wanted
    assert client(served).run("6 * 7").value == "42", "the server serves on"


def test_a_full_server_makes_wait_and_the_wait_is_queueing(served: Served, client: Client) -> None:
    remote = client(served)
    sessions = [remote.session() for _ in range(3)]
    assert [session.run("x = 1").status for session in sessions] == ["ok"] * 3
    with pytest.raises(SandboxError, match="no room"):
        sessions[0].replay()
    with pytest.raises(ForkRefused, match="no room"):
        sessions[0].fork()
    threading.Timer(0.5, sessions[1].close).start()
    assert remote.run("1").queue_s > 0.2
    fork = None
    while fork is None:  # the server sees the end of that run a moment later
        with suppress(ForkRefused):
            fork = sessions[0].fork()
    with fork:
        assert (fork.run("x").value, sessions[0].run("x").value) == ("1", "1")
    assert remote.counters().faults == 1, "a refused fork is no fault"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"key": "a key of some other server"}, "refuses the key: set AGENTRL_SANDBOX_KEY"),
        ({"limits": Limits(cpu_s=1)}, "other limits: start them with --limits"),
        ({"packages": ["pandas"]}, "lack packages: start them with --packages pandas"),
    ],
)
def test_what_the_servers_do_not_have_is_refused_at_the_beginning(
    served: Served, options: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(SandboxUnavailable, match=wanted):
        RemoteSandbox(served.name, **{"key": KEY, **options})


def test_servers_that_differ_are_refused(served: Served, serve: Serve, client: Client) -> None:
    with pytest.raises(SandboxUnavailable, match="differ from those of another server"):
        client(served, serve("--limits", "cpu_s=1"))


@pytest.mark.parametrize(
    ("name", "key", "wanted"),
    [
        ("remote:ftp://a", KEY, "write remote:http://HOST:PORT"),
        ("remote:", KEY, "write remote:http://HOST:PORT"),
        (f"remote:http://user:{KEY}@a", KEY, "stored with the run, so put the key into AGENTRL_SANDBOX_KEY"),
        ("remote:http://127.0.0.1:9", "", "set the variable AGENTRL_SANDBOX_KEY"),
        ("remote:http://127.0.0.1:9", "short", "at least 16 ASCII characters: make one with"),
        ("remote:http://127.0.0.1:9", KEY, r"no sandbox server answers: .*refused; start one with `agentrl sandbox"),
    ],
)
def test_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, name: str, key: str, wanted: str) -> None:
    monkeypatch.setenv("AGENTRL_SANDBOX_KEY", key)
    with pytest.raises((SandboxUnavailable, ValueError), match=wanted):
        open_sandbox(name)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)
    monkeypatch.delitem(sys.modules, "websockets.exceptions")
    with pytest.raises(SandboxUnavailable, match=r"need websockets: pip install 'agentrl\[remote\]'"):
        RemoteSandbox("remote:http://127.0.0.1:9", key=KEY)


def test_the_key_is_read_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: Served) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv("AGENTRL_SANDBOX_KEY_FILE", str(tmp_path / "key"))
    use_backend(served.name)
    # What is recorded of a run says what its programs ran in, and not where.
    assert re.fullmatch(r"remote local python [\d.]+ [0-9a-f]{12}", backend_of([PythonTool()]))
    assert shared_sandbox().run("6 * 7").value == "42"
    close_shared_sandbox()
    use_backend("auto")
    with pytest.raises(ConfigError, match="write remote:http"):
        use_backend("remote:nowhere")
