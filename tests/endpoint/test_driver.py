"""Programs in a sandbox play episodes: they reach the endpoint and nothing else, and end the episode by ending."""

import asyncio
import json
import os
import socket
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentrl.cli import main
from agentrl.endpoint.driver import AgentDriver
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import ConfigError, FaultRateError, InfrastructureError
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collected
from agentrl.rollout.driver import Driver, StepDriver
from agentrl.rollout.plan import EpisodeSpec
from agentrl.runs.records import write_episodes
from agentrl.sandboxes.agents import AgentRun
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.dialects.bodies import Form
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.function import FunctionTool, ToolContext
from agentrl.types import Stop, Task, Trajectory

from ..rollout.conftest import only
from ..runs.origins import ORIGIN
from .conftest import Failing
from .played import collect

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "2+2"}}\n</tool_call>'
ASK = """
import json, os, sys, urllib.request
URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
def ask(messages, url=URL, key=KEY, **fields):
    body = json.dumps({"messages": messages, **fields}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
LOOP = """
tools = [json.load(open("task/tool.json"))]
messages = [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]
while True:
    messages.append(ask(messages, tools=tools))
    calls = messages[-1].get("tool_calls")
    if not calls:
        break
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
open("out.txt", "w").write(messages[-1]["content"])
"""


def python(code: str) -> str:
    """Add two and two."""
    return "4"


class Sums(ToolEnv):
    """Rewards a program that writes 4 into a file; played by steps, it rewards the answer."""

    runs: list[AgentRun] = []  # noqa: RUF012

    def __init__(self, *, tools: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.tools = (FunctionTool(python),) if tools else ()

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id="sum", prompt="2+2?", answer="4")])

    def open_episode(self, context: ToolContext) -> None:
        context.state["files"] = {"task/tool.json": json.dumps(Form.of(FunctionTool(python)).schema)}

    def reward(self, episode: Episode) -> Mapping[str, float]:
        run = episode.state.get("agent")
        if run is None:
            return {"correct": float(episode.final == "4")}
        self.runs.append(run)
        return {"correct": float(run.files.get("out.txt") == b"4")}


@pytest.fixture
def sums() -> Generator[str]:
    gymnasium.register("test/AgentSums-v0", entry_point=Sums)
    Sums.runs.clear()
    yield "test/AgentSums-v0"
    del gymnasium.registry["test/AgentSums-v0"]


def play(renderer: Renderer, env: str, driver: Driver, engine: Any, members: int = 1, **args: Any) -> Collected:
    specs = [[EpisodeSpec(task_id="sum", seed=seed) for seed in range(1, members + 1)]]
    return collect((env, {"dialect": "hermes", **args}), renderer, specs, engine, driver=driver)


def agent(tmp_path: Path, program: str, **options: Any) -> AgentDriver:
    (tmp_path / "agent.py").write_text(ASK + program)
    return AgentDriver(["{python}", "agent.py"], files=[str(tmp_path / "agent.py")], **options)


def played(collected: Collected) -> tuple[Trajectory, AgentRun]:
    return only(collected), Sums.runs[-1]


def test_a_program_plays_the_episode_that_steps_would_play(renderer: Renderer, sums: str, tmp_path: Path) -> None:
    turns = [renderer.turn(text) for text in (CALL, CALL, "4")]
    trajectory, run = played(play(renderer, sums, agent(tmp_path, LOOP), ScriptedEngine(turns)))
    steps = only(play(renderer, sums, StepDriver(), ScriptedEngine(turns), tools=True))
    assert trajectory.segments == steps.segments
    assert trajectory.rewards == steps.rewards == (0.0, 0.0, 1.0) and trajectory.stop is Stop.TERMINATED
    assert (run.status, run.code) == ("exit", 0), run.output
    assert set(run.files) == {"agent.py", "task/tool.json", "out.txt"}


ENDS = {
    "print('bye'); sys.exit(3)": (Stop.CRASHED, "exit", 3),
    "os.kill(os.getpid(), 9)": (Stop.CRASHED, "killed", 9),
    "while True: pass": (Stop.TIME_LIMIT, "timeout", 0),
    "a = [bytes(1 << 20) + b'x' for _ in range(900)]": (Stop.CRASHED, "memory", 0),
}


@pytest.mark.parametrize("program", ENDS)
def test_how_a_program_ends_is_how_its_episode_ends(
    renderer: Renderer, sums: str, tmp_path: Path, program: str
) -> None:
    seconds = 3 if "while" in program else 100
    driver = agent(tmp_path, f"ask([])\n{program}", seconds=seconds, memory_mb=500)
    collected = play(renderer, sums, driver, ScriptedEngine([renderer.turn("x")]))
    trajectory, run = played(collected)
    assert (trajectory.stop, run.status, run.code) == ENDS[program], run.output
    assert collected.faults == 0 and trajectory.rewards == (0.0,)


HOLES = """
import ctypes, glob, socket, subprocess
def reached(function):
    try:
        return function() is not False
    except Exception:
        return False
def connects(family, *address):
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(2)
        made.connect(*address)
def connects_udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.connect(("8.8.8.8", 53))
def refuses(url, key):
    try:
        ask([], url=url, key=key)
        return False
    except urllib.error.HTTPError as error:
        return error.code == 401
def writes(path):
    open(path, "w").close()
own = ask([{"role": "user", "content": "x"}])
name = URL.split("/s/")[1].split("/")[0]
open("reached.json", "w").write(json.dumps({
    "other host": reached(lambda: connects(socket.AF_INET, ("1.1.1.1", 80))),
    "host's port": reached(lambda: connects(socket.AF_INET, ("127.0.0.1", int(os.environ["PORT"])))),
    "host's port by IPv6": reached(lambda: connects(socket.AF_INET6, ("::1", int(os.environ["PORT"])))),
    "datagrams": reached(connects_udp),
    "names": reached(lambda: socket.gethostbyname("localhost.localdomain")),
    "abstract socket": reached(lambda: connects(socket.AF_UNIX, chr(0) + os.environ["ABSTRACT"])),
    "socket of the host": reached(lambda: connects(socket.AF_UNIX, os.environ["SOCKET"])),
    "raw packets": reached(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "netlink": reached(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "another's key": not refuses(URL, os.environ["OTHER_KEY"]),
    "another's session": not refuses(URL.replace(name, os.environ["OTHER_NAME"]), KEY),
    "no key": not refuses(URL, "x"),
    "file of the host": reached(lambda: open(os.environ["SECRET"])),
    "descriptors": any(reached(lambda: os.listdir(f"/proc/{pid}/fd") or False) for pid in (1, 2)),
    "memory": any(reached(lambda: open(f"/proc/{pid}/mem")) for pid in (1, 2)),
    "environment": any(reached(lambda: open(f"/proc/{pid}/environ")) for pid in (1, 2)),
    "writing": any(reached(lambda: writes(f"{folder}/x")) for folder in ("", "/run", "/usr", "/opt", "/opt/site")),
    "mounting": reached(lambda: subprocess.run(["mount", "-t", "tmpfs", "x", "/usr"], check=True)),
    "new namespaces": ctypes.CDLL(None).unshare(0x10000000) == 0,
    "tracing": ctypes.CDLL(None).ptrace(16, 2, 0, 0) == 0,
    "other processes": len([pid for pid in os.listdir("/proc") if pid.isdigit()]) > 4,
}))
"""


def test_a_program_reaches_the_endpoint_and_nothing_else(renderer: Renderer, sums: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    abstract = f"agentrl-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        named.bind(str(tmp_path / "socket"))
        unnamed.bind(f"\0{abstract}")
        named.listen()
        unnamed.listen()
        env = {"PORT": str(port.getsockname()[1]), "ABSTRACT": abstract, "SECRET": str(secret)}
        env |= {"SOCKET": str(tmp_path / "socket"), "OTHER_KEY": "{other_key}", "OTHER_NAME": "{other_name}"}
        driver = agent(tmp_path, HOLES, env=env, seconds=100)
        _, run = played(play(renderer, sums, driver, ScriptedEngine([renderer.turn("x")])))
    reached = json.loads(run.files["reached.json"])
    assert run.code == 0 and len(reached) > 20
    assert not [name for name, is_reached in reached.items() if is_reached]


TRICKS = {
    "ends its neighbours": """
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) not in (1, os.getpid()): os.kill(int(pid), 9)
""",
    "leaves processes": "[os.fork() or time.sleep(1000) for _ in range(1)]",
    "forks without end": """
try:
    while True: os.fork()
except OSError: pass
""",
    "writes files of holes": "[os.truncate(os.open(str(n), os.O_CREAT | os.O_RDWR), 200 << 20) for n in range(300)]",
    "leaves pipes and links": "os.mkfifo('pipe'); os.symlink('/etc/ld.so.cache', 'link'); os.symlink('/', 'root')",
    "moves its folder": "os.rename('/tmp/agent', '/tmp/x'); os.symlink('/usr', '/tmp/agent')",
    "puts a pipe for its output": "p = '/dev/shm/agentrl.log'; os.path.exists(p) and os.remove(p); os.mkfifo(p)",
    "digs": "[(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]",
    "shuts its files": "open('x', 'w'); os.chmod('x', 0); os.mkdir('y'); os.chmod('y', 0)",
    "has odd names": "open(b'\\xff\\n', 'w'); open('x' * 250, 'w'); os.makedirs('/'.join(['y' * 200] * 18))",
    "prints much": "[print('x' * 10**6) for _ in range(10)]",
    "fills its disk": """
try:
    open('/tmp/full', 'wb').write(bytes(250 << 20)); open('/tmp/more', 'wb').write(bytes(250 << 20))
except OSError: pass
""",
    "ends its group": "os.killpg(os.getpgid(0), 15)",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_no_program_makes_a_fault(renderer: Renderer, sums: str, tmp_path: Path, trick: str) -> None:
    driver = agent(tmp_path, f"import time\nask([])\nopen('out.txt', 'w').write('4')\n{TRICKS[trick]}", seconds=60)
    collected = play(renderer, sums, driver, ScriptedEngine([renderer.turn("x")]))
    _, run = played(collected)
    assert collected.faults == 0 and run.status in ("exit", "killed", "memory") and run.code in (0, 15), run
    assert sum(map(len, run.files.values())) <= 256 << 20 and len(run.output) < 1 << 20
    assert ("out.txt" in run.files) == (trick != "moves its folder")


class Together(ScriptedEngine):
    """Answers nobody before all have asked."""

    asked = 0

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        self.asked += 1
        while self.turns and self.asked < 12:
            await asyncio.sleep(0.01)
        return await super().generate(prompt_ids, sampling, seed=seed)


@pytest.mark.parametrize("error", [InfrastructureError("gone"), ConfigError("too long"), RuntimeError("a defect")])
def test_an_episode_whose_engine_fails_is_played_again(
    renderer: Renderer, sums: str, tmp_path: Path, error: Exception
) -> None:
    engine = Failing([error], renderer.turn("4"))
    collected = play(renderer, sums, agent(tmp_path, LOOP), engine)
    assert collected.faults == 1 and only(collected).rewards == (1.0,)


def test_an_error_of_the_engine_keeps_its_kind(renderer: Renderer, sums: str, tmp_path: Path) -> None:
    engine = Failing([FaultRateError("nobody answers any more")])
    with pytest.raises(FaultRateError, match="nobody"):
        play(renderer, sums, agent(tmp_path, LOOP), engine)


@pytest.mark.slow
def test_agents_live_side_by_side(renderer: Renderer, sums: str, tmp_path: Path) -> None:
    engine = Together([renderer.turn("4")] * 12)
    collected = play(renderer, sums, agent(tmp_path, LOOP), engine, members=12)
    assert engine.asked == 12 and collected.faults == 0


def test_a_long_prompt_reaches_the_program(renderer: Renderer, sums: str, tmp_path: Path) -> None:
    program = "ask([]); open('n', 'w').write(str(len(os.environ['P'])))"
    driver = agent(tmp_path, program, env={"P": "\u4e2d" * 30_000})
    _, run = played(play(renderer, sums, driver, ScriptedEngine([renderer.turn("x")])))
    assert run.files["n"] == b"30000", run.output


def test_a_program_is_started_again_and_the_first_difference_is_named(
    renderer: Renderer, tokenizer: Any, sums: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [renderer.turn(text) for text in (CALL, CALL, "4")]
    trajectory = only(play(renderer, sums, agent(tmp_path, LOOP), ScriptedEngine(turns)))
    origin = replace(ORIGIN, env_id=sums, env_args={"dialect": "hermes"}, split="train")
    write_episodes(tmp_path / "e.jsonl", [trajectory], tokenizer, origin)
    tokenizer.save_pretrained(tmp_path / "model")
    options = f'{{command = ["{{python}}", "agent.py"], files = ["{tmp_path}/agent.py"]}}'
    (tmp_path / "agent.toml").write_text(
        f'[env]\nid = "{sums}"\nargs = {{dialect = "hermes"}}\n[model]\npath = "{tmp_path}/model"\n'
        f'[rollout]\nepisode_tokens = 4000\n[rollout.driver]\nname = "agent"\noptions = {options}\n'
    )

    def replayed(program: str, *more: str) -> tuple[int, Any]:
        (tmp_path / "agent.py").write_text(ASK + program)
        code = main(["replay", f"{tmp_path}/e.jsonl", "--agent", f"{tmp_path}/agent.toml", "--json", *more])
        printed = capsys.readouterr()
        return code, json.loads(printed.out)[0] if printed.out else printed.err

    code, result = replayed(LOOP)
    assert (code, result["change"]) == (0, None) and result["now"] == result["recorded"]
    code, result = replayed(LOOP.replace('"content": "4"', '"content": "5"'))
    assert code == 1 and (result["change"]["turn"], result["change"]["what"]) == (1, "tool")
    assert result["change"]["recorded"].split("4")[0] == result["change"]["now"].split("5")[0]
    code, result = replayed(LOOP + "\nsys.exit(1)")
    assert code == 1 and [result["change"][name] for name in ("what", "recorded", "now")] == [
        "end", "terminated", "crashed",
    ]  # fmt: skip
    code, result = replayed(LOOP + "\nask(messages)")
    assert code == 1 and result["change"]["what"] == "fault" and "no more turns" in result["change"]["now"]
    assert "leave out --tools" in replayed(LOOP, "--regrade")[1]
    (tmp_path / "agent.toml").write_text(f'[env]\nid = "{sums}"\n')
    assert "starts no program" in replayed(LOOP)[1]
