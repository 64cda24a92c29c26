"""Harbor's task folders without an engine: what the reader takes, and each thing that it refuses by name."""

import os
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

import agentrl
from agentrl.envs.adapters.harbor.env import SAMPLE
from agentrl.envs.adapters.harbor.folder import TaskFault, dockerfile, packed, read_task, sent
from agentrl.errors import ConfigError
from agentrl.toolenv.tools.context import ToolContext

OLD = """
version = "1.0"
[metadata]
author_name = "someone"
difficulty = "hard"
[agent]
timeout_sec = 900.0
[verifier]
timeout_sec = 30
[environment]
build_timeout_sec = 10
cpus = 2
memory = "4G"
storage = "10G"
allow_internet = false
"""
NEW = """
schema_version = "1.4"
artifacts = ["/app/out", { source = "/srv/data/", destination = "d" }]
[task]
name = "org/name"
authors = [{ name = "a", email = "b" }]
[agent]
user = 1000
[verifier]
environment_mode = "separate"
env = { KEY = "${KEY}", MODE = "${MODE:-fast}" }
[environment]
memory_mb = 512
network_mode = "public"
healthcheck = { command = "true", retries = 2 }
[solution]
env = { A = "${A:-}" }
"""
REFUSED = {
    "version = ": "is no TOML",
    "nonsense = 1": "nonsense",
    "[agent]\nspeed = 1": "agent.speed",
    "[agent]\ntimeout_sec = nan": "agent.timeout_sec",
    "[agent]\ntimeout_sec = -1": "agent.timeout_sec",
    '[agent]\ntimeout_sec = "9"': "agent.timeout_sec",
    "[verifier]\nenv = { A = 1 }": "verifier.env.A",
    '[verifier]\nenv = { A = "${HOME}" }': "the variable HOME",
    '[environment]\nenv = { A = "${PATH}" }': "the variable PATH",
    '[environment]\nmemory = "2G"\nmemory_mb = 1024': "they differ",
    '[environment]\nmemory = "plenty"': "no size such as",
    '[environment]\nworkdir = "app"': "no absolute path",
    '[environment]\nworkdir = "/app/../etc"': "no absolute path",
    'artifacts = ["/"]': "no absolute path",
    'artifacts = ["/app/../etc"]': "no absolute path",
    'artifacts = ["//etc"]': "no absolute path",
    'artifacts = [{ source = "/a", service = "db" }]': "artifacts of a service",
    'artifacts = [{ source = "/a", exclude = ["b"] }]': "artifacts with exceptions",
    "[[steps]]\nname = 'a'": "several steps",
    'multi_step_reward_strategy = "mean"': "several steps",
    '[environment]\nmcp_servers = [{ name = "a" }]': "MCP servers",
    '[environment]\nskills_dir = "skills"': "skills",
    '[environment]\nos = "windows"': "another system than Linux",
    "[environment]\ngpus = 1": "a GPU",
    '[environment]\nallowed_hosts = ["a.org"]': "allowed hosts",
    '[agent]\nnetwork_mode = "allowlist"': "allowed hosts",
    '[environment]\nnetwork_mode = "host"': "environment.network_mode",
    "[verifier.environment]\ncpus = 1": "an image of its own",
    '[[verifier.collect]]\ncommand = "a"': "collect files",
}
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "compose": (lambda folder: (folder / "environment/docker-compose.yaml").touch(), "several containers"),
    "steps": (lambda folder: (folder / "steps").mkdir(), "several steps"),
    "verifier": (lambda folder: (folder / "tests/Dockerfile").touch(), "an image of its own"),
    "trajectory": (lambda folder: (folder / "trajectory.json").touch(), "an earlier conversation"),
    "no test": (lambda folder: (folder / "tests/test.sh").unlink(), "test.sh is missing"),
    "no Dockerfile": (lambda folder: (folder / "environment/Dockerfile").unlink(), "Dockerfile is missing"),
    "no instruction": (lambda folder: (folder / "instruction.md").unlink(), "instruction.md is missing"),
    "long": (lambda folder: (folder / "instruction.md").write_text("a" * (1 << 21)), "no regular file"),
    "bytes": (lambda folder: (folder / "instruction.md").write_bytes(b"\xff"), "can't be read"),
    "link": (lambda folder: swap(folder / "instruction.md", "/etc/passwd"), "no regular file"),
    "pipe": (lambda folder: (folder / "task.toml").unlink() or os.mkfifo(folder / "task.toml"), "no regular file"),
    "linked tests": (lambda folder: swap(folder / "tests", "/etc"), "tests is a link"),
}


def swap(path: Path, target: str) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(target)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task folder."""
    for name in ("environment", "tests", "solution"):
        (tmp_path / "task" / name).mkdir(parents=True)
    texts = {"instruction.md": "Do it.", "environment/Dockerfile": "FROM base:1\n", "tests/test.sh": "true\n"}
    for name, text in {"task.toml": OLD, "solution/solve.sh": "echo it's done\n", **texts}.items():
        (tmp_path / "task" / name).write_text(text)
    return tmp_path / "task"


def test_keys_of_the_first_and_of_the_last_version_are_read(folder: Path) -> None:
    old = read_task(folder, {})
    assert (old.memory_mb, old.public, old.artifacts, old.instruction) == (4096, False, (), "Do it.")
    (folder / "task.toml").write_text(NEW)
    new = read_task(folder, {"KEY": "k"})
    assert (new.memory_mb, new.public, new.artifacts) == (512, True, ("/app/out", "/srv/data"))
    assert (new.verifier_env, new.solution_env) == ({"KEY": "k", "MODE": "fast"}, {"A": ""})


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_played_is_refused_by_name(folder: Path, text: str) -> None:
    (folder / "task.toml").write_text(text)
    with pytest.raises(TaskFault, match=REFUSED[text]):
        read_task(folder, {})


@pytest.mark.parametrize("name", FILES)
def test_a_folder_that_is_not_played_is_refused_by_name(folder: Path, name: str) -> None:
    change, message = FILES[name]
    change(folder)
    with pytest.raises(TaskFault, match=message):
        read_task(folder, {})


def test_a_base_image_is_replaced_by_name(folder: Path) -> None:
    text = "FROM --platform=linux/amd64 a/b:1 AS build\nFROM c\nRUN echo FROM c\nCOPY --from=build /x /x\n"
    (folder / "environment/Dockerfile").write_text(text)
    mapped = dockerfile(read_task(folder, {}), {"a/b:1": "local", "c": "other"})
    assert mapped == text.replace("a/b:1", "local").replace("FROM c\nRUN", "FROM other\nRUN")


def test_a_folder_is_packed_by_content_and_its_links_are_not_followed(folder: Path) -> None:
    (folder / "tests/link").symlink_to("/etc/passwd")
    before = packed(folder / "tests", "tests/")
    os.utime(folder / "tests/test.sh", (1, 1))
    assert packed(folder / "tests", "tests/") == before
    with tarfile.open(fileobj=BytesIO(before)) as tar:
        shown = [(member.name, member.issym(), member.mode, member.uid) for member in tar]
    assert shown == [("tests/link", True, 0o755, 0), ("tests/test.sh", False, 0o755, 0)]
    os.mkfifo(folder / "tests/pipe")
    with pytest.raises(TaskFault, match="neither file, folder nor link"):
        packed(folder / "tests")


def test_what_a_dockerignore_names_is_not_sent(folder: Path) -> None:
    pytest.importorskip("docker")
    context = folder / "environment"
    for name in ("data/kept.txt", "data/big.bin", "notes.md", "Dockerfile"):
        (context / name).parent.mkdir(exist_ok=True)
        (context / name).write_text("x")
    whole = packed(context)
    assert packed(context, only=sent(context)) == whole
    (context / ".dockerignore").write_text("# large\n**/*.bin\n\n*\n!data\n**/big.*\n")
    with tarfile.open(fileobj=BytesIO(packed(context, only=sent(context)))) as tar:
        assert tar.getnames() == [".dockerignore", "Dockerfile", "data", "data/kept.txt"]


def test_bad_tasks_are_refused_or_skipped_with_a_warning(folder: Path) -> None:
    data = {"test": str(folder.parent)}
    bad = folder.with_name("windows")
    bad.mkdir()
    (bad / "task.toml").write_text('[environment]\nos = "windows"')
    with pytest.raises(ConfigError, match=r"bad tasks \(1\): windows: it needs another system"):
        _ = agentrl.make("agentrl/Harbor-v0", data=data, split="test").task_set
    with pytest.warns(UserWarning, match=r"bad tasks left out \(1\)"):
        env = agentrl.make("agentrl/Harbor-v0", data=data, split="test", skip_bad_tasks=True)
        assert [task.id for task in env.task_set] == ["task"]
    assert env.task_set[0].tags == ("difficulty:hard",)
    with pytest.raises(ConfigError, match=r"no task of .* is in the split 'train'"):
        env.tasks("train")


def test_a_task_whose_result_is_the_system_is_graded_in_place_or_not_at_all(folder: Path) -> None:
    (folder / "task.toml").write_text('artifacts = ["/etc/app.conf"]')
    data = {"test": str(folder.parent)}
    with pytest.raises(ConfigError, match="graded='shared' plays it"):
        _ = agentrl.make("agentrl/Harbor-v0", data=data, split="test").task_set
    assert agentrl.make("agentrl/Harbor-v0", data=data, split="test", graded="shared").task_set.size == 1


@pytest.mark.parametrize(
    "options",
    [
        *({"graded": "mine"}, {"images": 0}, {"ahead": -1}, {"command_timeout": 0}, {"parts": {"shared": 1.0}}),
        *({"data": "nowhere"}, {"image_map": {"a": 1}}, {"variables": "A=1"}),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        _ = agentrl.make("agentrl/Harbor-v0", **options).task_set


def test_the_sample_has_both_splits_and_gold_turns_that_read_back() -> None:
    envs = [agentrl.make("agentrl/Harbor-v0", split=split) for split in ("train", "test")]
    assert sum(env.task_set.size or 0 for env in envs) == len(list(SAMPLE.iterdir())) == 12
    for env in envs:
        for task in env.task_set:
            turns = env.gold_turns(task)
            calls = [call for turn in turns for call in env.dialect.parse(turn)]
            assert [call.name for call in calls] == ["write_file", "shell"]
            assert calls[0].arguments["content"] == (SAMPLE / task.id / "solution/solve.sh").read_text()


def test_commands_are_quoted_and_end_the_episode_at_the_tasks_own_limit(folder: Path) -> None:
    commands: list[tuple[str, float]] = []

    class Box:
        def run(self, command: str, timeout: float) -> str:
            commands.append((command, timeout))
            return "ok"

    env = agentrl.make("agentrl/Harbor-v0", data={"test": str(folder.parent)}, split="test")
    context = ToolContext(task=env.task_set[0], seed=0, state={"box": Box(), "seconds": 899.5})
    env.tools[1].call({"path": "it's; rm -rf /"}, context)
    assert commands[0] == ("cat -- 'it'\"'\"'s; rm -rf /'", pytest.approx(0.5)) and not context.ended
    context.state["seconds"] = 900.0
    env.tools[2].call({"path": "a b", "content": "$x"}, context)
    assert commands[1][0] == "mkdir -p -- \"$(dirname -- 'a b')\" && printf %s '$x' >'a b'" and context.ended
