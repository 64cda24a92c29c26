"""Harbor's task folders in real containers: gold is rewarded, laziness and hostile solutions are not."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

import agentrl
from agentrl.endpoint.driver import AgentDriver
from agentrl.envs.adapters.harbor.env import SAMPLE, Harbor
from agentrl.envs.adapters.harbor.host import Host, close_host, shared_host
from agentrl.render.renderer import Renderer
from agentrl.sandboxes import SandboxUnavailable
from agentrl.sandboxes.agents import AgentRun
from agentrl.sandboxes.docker.engine import OWNER_LABEL, DockerEngine, connect
from agentrl.sandboxes.docker.image import IMAGE, build_image
from agentrl.toolenv.tasks import split_of
from agentrl.types import Stop, Trajectory

from ...endpoint.played import play_script
from ...endpoint.test_driver import ASK

pytestmark = pytest.mark.docker
HOSTILE = tomllib.loads(Path(__file__).with_name("hostile.toml").read_text(encoding="utf-8"))
FEW = ("replaced_bash", "link_to_the_key", "kill_everything", "own_folder_is_a_file")
SLOW = [name if name in FEW else pytest.param(name, marks=pytest.mark.ci) for name in HOSTILE]
TASKS = sorted(path.name for path in SAMPLE.iterdir())
TEST = """#!/bin/bash
python3 - <<'END'
import json, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:8000/", timeout=5)
except OSError:
    pass
END
if [ "$(cat /app/count.txt)" = "$(cat /tests/expected.txt)" ]; then reward=1; else reward=0; fi
echo "{\\"reward\\": $reward}" >/logs/verifier/reward.json
"""
OFFLINE = """#!/bin/bash
apt-get update && apt-get install -y curl
curl -LsSf https://example.org/install.sh | sh
source $HOME/.local/bin/env
if uvx -p 3.13 -w pytest==8.4.1 pytest --ctrf /logs/verifier/ctrf.json /tests/test_count.py -rA; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi
"""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One process at a time plays tasks: tests count the engine's containers and images, and remove images."""
    with (Path(tempfile.gettempdir()) / f"agentrl-harbor-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def containers(engine: DockerEngine) -> list[str]:
    """The containers of tasks, of every process."""
    listed: list[Any] = engine._client.containers(all=True, filters={"label": OWNER_LABEL})
    return [entry["Id"] for entry in listed if entry["Image"].startswith("agentrl-task:")]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """The process's host, on an engine with our image."""
    try:
        with connect() as engine:
            try:
                engine.image(IMAGE)
            except SandboxUnavailable:
                build_image()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield shared_host()
    close_host()


def planted(folder: Path, test: str = TEST, toml: str = "", dockerfile: str = "") -> Path:
    """A folder with the sample's first task, whose tests and settings are these."""
    task = folder / "tasks" / "count-words"
    subprocess.run(["cp", "-r", str(SAMPLE / "count-words"), task.parent.mkdir() or str(task)], check=True)
    (task / "tests/test.sh").write_text(test)
    (task / "tests/expected.txt").write_text("17\n")
    (task / "tests/test_count.py").write_text(
        "def test_count():\n    assert open('/app/count.txt').read() == '17\\n'\n"
    )
    (task / "task.toml").write_text(toml)
    if dockerfile:
        (task / "environment/Dockerfile").write_text(dockerfile)
    return task.parent


def make(data: Path | None = None, **options: Any) -> Harbor:
    source = {} if data is None else {"data": {"test": str(data)}, "split": "test"}
    return cast(Harbor, agentrl.make("agentrl/Harbor-v0", **{"ahead": 0, **source, **options}).unwrapped)


def play(env: Harbor, *commands: str, task: str = "count-words") -> float:
    """Play commands and stop; what the agent read is in the episode."""
    env.reset(options={"task": task})
    for command in commands:
        env.step(env.dialect.render("shell", {"command": command}))
    return env.step("It is done.")[1]


def outputs(env: Harbor) -> list[str]:
    return [message["content"] for message in env.episode.messages if message["role"] == "tool"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [TASKS[0], "serve-page", *(pytest.param(n, marks=pytest.mark.ci) for n in TASKS[1:])])
def test_gold_is_rewarded_and_empty_hands_are_not(host: Host, name: str) -> None:
    for split in ("train", "test"):
        env = make(split=split)
        for task in env.task_set:
            if task.id == name:
                env.reset(options={"task": name})
                rewards = [env.step(turn)[1] for turn in env.gold_turns(task)]
                assert rewards[-1] == 1.0, (env.episode.state["note"], outputs(env))
                assert play(env, task=name) == 0.0
                assert env.episode.parts == {"reward": 0.0, "ungraded": 0.0, "timeout": 0.0, "shared": 0.0}
        env.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_no_hostile_solution_is_rewarded(host: Host, tmp_path: Path, name: str) -> None:
    env = make(planted(tmp_path), command_timeout=20.0)
    assert play(env, HOSTILE[name], "echo done") == 0.0, env.episode.state["note"]
    assert env.episode.parts is not None and env.episode.parts["shared"] == 0.0
    env.close()
    assert not containers(host.engine), "no container outlives its episode"


@pytest.mark.slow
def test_the_shell_keeps_its_state_and_survives_what_the_agent_does(host: Host) -> None:
    env = make(command_timeout=5.0)
    env.reset(options={"task": "count-words"})
    for command in (
        "cd /tmp; x=5",
        "echo $x $PWD; false",
        "sleep 100",
        "true",
        "cat",
        "exit 3",
        "cat /app/poem.txt",
    ):
        env.step(env.dialect.render("shell", {"command": command}))
    env.step(env.dialect.render("write_file", {"path": "/app/a b/it's", "content": "$x\n`y`"}))
    env.step(env.dialect.render("read_file", {"path": "/app/a b/it's"}))
    shown = outputs(env)
    assert shown[0] == "[no output]" and shown[1] == "5 /tmp\n[exit code 1]"
    assert shown[2] == "[stopped after 5 s: the next command gets a new shell]"
    assert shown[4] == "[no output]" and "the shell has ended" in shown[5] and "late" in shown[6]
    assert shown[8].strip() == "$x\n`y`"
    env.step(env.dialect.render("shell", {"command": "kill -9 -1"}))
    # The container stops with that command, or right after it.
    while "started again" not in outputs(env)[-1]:
        env.step(env.dialect.render("shell", {"command": "cat /app/*/*"}))
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "reason", "part"),
    [
        ("#!/bin/bash\nsleep 100\n", "took more than 2 s", "timeout"),
        ("#!/bin/bash\nexit 1\n", "there is no reward file", "ungraded"),
        ("#!/bin/bash\nmkdir /logs/verifier/reward.txt\n", "no regular file", "ungraded"),
        ("#!/bin/bash\necho 1000000 >/logs/verifier/reward.txt\n", "no number from 0 to 1", "ungraded"),
        ("#!/bin/bash\necho 1 >/logs/verifier/reward.txt; kill -9 -1\n", "", "reward"),
    ],
)
def test_a_verifier_without_a_readable_reward_is_a_zero_with_its_reason(
    host: Host, tmp_path: Path, test: str, reason: str, part: str
) -> None:
    env = make(planted(tmp_path, test, "[verifier]\ntimeout_sec = 2"))
    assert play(env) == float(part == "reward")
    assert reason in env.episode.state["note"] and (env.episode.parts or {})[part] == 1.0
    env.close()


@pytest.mark.slow
def test_tests_that_download_pytest_are_graded_offline(host: Host, tmp_path: Path) -> None:
    env = make(planted(tmp_path, OFFLINE), offline_verifier=True)
    assert play(env, "echo 17 >/app/count.txt") == 1.0, env.episode.state["note"]
    assert play(env, "echo 'import os; os._exit(0)' >/app/pytest.py") == 0.0
    assert not (env.episode.parts or {})["ungraded"]
    env.close()


@pytest.mark.slow
def test_a_base_image_is_mapped_and_only_so_many_images_are_held(host: Host, tmp_path: Path) -> None:
    data = planted(tmp_path, dockerfile="FROM published/base:2\nWORKDIR /app\nCOPY app/ /app/\nENV LAYER=1\n")
    env = make(data, image_map={"published/base:2": IMAGE}, images=1)
    assert play(env, "echo 17 >/app/count.txt") == 1.0
    assert len(host.engine.images("agentrl.task")) == 1
    env.close()
    env = make(data)
    with pytest.raises(agentrl.InfrastructureError, match=r"building .* failed"):
        env.reset(options={"task": "count-words"})
    env.close()


@pytest.mark.slow
def test_in_place_grading_is_shown_and_uses_the_agents_own_system(host: Host, tmp_path: Path) -> None:
    env = make(planted(tmp_path), graded="shared")
    cheat = "printf '#!/bin/sh\\necho 17\\n' >/bin/cat.new; chmod +x /bin/cat.new; mv /bin/cat.new /bin/cat"
    assert play(env, cheat) == 1.0, "this is why it is not the default"
    assert (env.episode.parts or {})["shared"] == 1.0 and "the agent's own container" in env.episode.state["note"]
    env.close()


@pytest.mark.slow
def test_containers_are_started_ahead_and_those_of_a_killed_process_are_reaped(host: Host) -> None:
    program = (
        "import os, signal, agentrl\n"
        "env = agentrl.make('agentrl/Harbor-v0', ahead=0)\n"
        "env.reset(seed=0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], env=os.environ, check=False)
    assert killed.returncode == -9
    # Other tests' sandboxes reap as well, and may be faster.
    host.engine.remove_leftovers()
    assert not containers(host.engine)
    env = make(ahead=1)
    assert [play(env, "echo 17 >/app/count.txt") for _ in range(2)] == [1.0, 1.0]
    env.close()
    close_host()
    with connect() as engine:
        assert not containers(engine), "those started ahead are removed with the process's host"


SHELL_AGENT = """
import subprocess
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "shell", "parameters": SCHEMA}}
messages = [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]
while True:
    messages.append(ask(messages, tools=[TOOL]))
    if not messages[-1].get("tool_calls"):
        break
    for call in messages[-1]["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
print("Bye from", os.getcwd(), os.environ["GREETING"])
"""


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def played_by(
    driver: AgentDriver, renderer: Renderer, task: str, *turns: str, env: str = "agentrl/Harbor-v0"
) -> Trajectory:
    # None is started ahead: other tests count containers.
    args = {"split": split_of(task, 5), "ahead": 0}
    return play_script(driver, renderer, (env, args), task, [renderer.turn(text) for text in turns])


@pytest.mark.slow
def test_an_agent_plays_in_the_container_and_reaches_the_endpoint_alone(
    host: Host, renderer: Renderer, tmp_path: Path, clean_registry: None
) -> None:
    runs = list[AgentRun]()

    class Watched(Harbor):
        def reward(self, episode: agentrl.Episode) -> Mapping[str, float]:
            runs.append(episode.state["agent"])
            return super().reward(episode)

    agentrl.register("test/WatchedHarbor-v0", Watched)
    (tmp_path / "agent.py").write_text(ASK + SHELL_AGENT)
    options: dict[str, Any] = {"files": [str(tmp_path / "agent.py")], "env": {"GREETING": "me"}, "in_container": True}
    driver = AgentDriver(["{python}", "/tmp/agent/agent.py"], seconds=100, **options)
    # What the agent has left running answers the tests, also at the port of sandboxes on this machine.
    turns = call("shell", command="python3 -m http.server 8000 -d site >/dev/null 2>&1 & sleep 1"), "It is served."
    episode = played_by(driver, renderer, "serve-page", *turns, env="test/WatchedHarbor-v0")
    assert (episode.stop, episode.ret) == (Stop.TERMINATED, 1.0)
    assert (runs[-1].code, runs[-1].output.strip()) == (0, "Bye from /app me"), runs[-1]
    (tmp_path / "agent.py").write_text(ASK + "ask([]); print('wait', flush=True); import time; time.sleep(100)")
    driver = AgentDriver(["{python}", "/tmp/agent/agent.py"], seconds=5, **options)
    episode = played_by(driver, renderer, "count-words", "Hm.", env="test/WatchedHarbor-v0")
    assert (episode.stop, episode.ret, runs[-1].output) == (Stop.TIME_LIMIT, 0.0, "wait\n")
    driver = AgentDriver(["sh", "-c", "python3 /tmp/agent/agent.py & sleep 4; no-such-program"], seconds=100, **options)
    episode = played_by(driver, renderer, "count-words", "Hm.", env="test/WatchedHarbor-v0")
    assert (episode.stop, runs[-1].code) == (Stop.CRASHED, 127) and "no-such-program" in runs[-1].output


@pytest.mark.ci
def test_codex_plays_a_task_in_its_container(
    host: Host, renderer: Renderer, require: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[3]
    require((root / "build" / "agents").is_dir(), "npm install --prefix build/agents @openai/codex")
    monkeypatch.chdir(root)
    settings = tomllib.loads((root / "docs/agents/codex.toml").read_text(encoding="utf-8"))
    driver = AgentDriver(**settings["rollout"]["driver"]["options"], in_container=True)
    turns = call("exec_command", cmd="wc -w <poem.txt >count.txt"), "It is done."
    episode = played_by(driver, renderer, "count-words", *turns)
    assert (episode.stop, episode.ret, len(episode.rows)) == (Stop.TERMINATED, 1.0, 1)
