"""An OpenEnv server's episodes: what is paid, what the agent reads, and whose fault it is."""

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.adapters.openenv import OpenEnv
from agentrl.errors import AgentRLError, ConfigError, EnvContractError, InfrastructureError
from agentrl.toolenv.checker import check_env
from agentrl.toolenv.registry import make, register
from agentrl.types import Stop, Task

from .hostile import assert_all_are_graded

pytest.importorskip("websockets", reason="needs the extra openenv")
from .scripted_openenv import (
    BREAKS,
    CHATTERS,
    CLOSES,
    HANGS,
    LEAVES,
    OVERPAYS,
    PAYS_NAN,
    RAISES,
    Scripted,
    secret,
    serving,
)


@pytest.fixture
def rules() -> Iterator[Scripted]:
    with serving() as rules:
        yield rules


@pytest.fixture
def env(rules: Scripted) -> Iterator[OpenEnv]:
    with closing(OpenEnv(url=rules.url)) as env:
        yield env


def act(**arguments: object) -> str:
    return f"```act\n{json.dumps(arguments)}\n```"


def begin(env: OpenEnv, index: int = 0) -> int:
    """Begin an episode, and return its secret number."""
    task = env.task_set[index]
    env.reset(seed=0, options={"task": task.id})
    return secret(task.data["seed"])  # pyright: ignore[reportArgumentType]


def test_the_server_ends_the_episode_and_its_pay_is_kept(rules: Scripted, env: OpenEnv) -> None:
    assert list(env.tools[0].parameters["properties"]) == ["number"]  # pyright: ignore[reportArgumentType]
    number = begin(env, 3)
    assert rules.resets[-1] == {"seed": 6} and env.episode.messages[-1]["content"] == rules.opening
    (message,), reward, *ends, _ = env.step(act(number=number + 1))
    assert (message["content"], reward, ends) == ("wrong", 0.0, [False, False])
    _, reward, terminated, _, _ = env.step(act(number=number) + "\n" + act(number=number))
    assert (reward, terminated, env.episode.stop) == (1.0, True, Stop.TERMINATED)
    assert env.episode.messages[-1]["content"] == "the episode is over"
    verdict = env.episode.state["verdict"]
    assert verdict == {"rewards": [None, 1], "done": True, "lost": "", "reason": ""}
    assert env.episode.parts == {"correct": 1.0, "graded": 1.0}


@pytest.mark.parametrize(
    ("low", "pay", "earned"),
    [
        *((-1.0, (None, 1), 1.0), (-1.0, (0, None), 0.5), (-1.0, (None, None), None), (0.0, (0.7, 0.3000001), 1.0)),
        *((0.0, (0.9, 0.9), None), (0.0, (float("nan"),), None), (0.0, (float("inf"),), None), (0.0, (-0.5,), None)),
    ],
)
def test_no_pay_is_not_a_pay_of_0(rules: Scripted, low: float, pay: tuple[float | None], earned: float | None) -> None:
    with closing(OpenEnv(url=rules.url, low=low, part="won")) as env:
        begin(env)
        env.episode.state["verdict"]["rewards"] += pay
        env.step("That is all.")
        assert env.episode.parts == {"won": earned or 0.0, "graded": float(earned is not None)}
        assert bool(env.episode.state["verdict"]["reason"]) == (earned is None)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("x", "Invalid message: number: should be an integer"),
        (RAISES, "division by zero"),
        (BREAKS, "the action has ended the episode: can't serialize ValueError"),
        (CLOSES, "the server has closed the session, and the episode is over"),
        (CHATTERS, "the action's answer is too long, and the episode is over"),
        (HANGS, "the action took longer than 0.2 s, and the episode is over"),
    ],
)
def test_what_an_action_causes_is_an_outcome(env: OpenEnv, number: object, words: str) -> None:
    begin(env)
    if number == HANGS:
        env.episode.state["session"]._seconds = 0.2
    (message,), _, terminated, _, _ = env.step(act(number=number))
    assert message["content"] == words and terminated == words.endswith(("over", "ValueError"))
    if not terminated:
        env.step("I give up.")
    assert env.episode.parts == {"correct": 0.0, "graded": 0.0}
    assert env.episode.state["verdict"]["lost"] == (words if terminated else "")


def test_an_agent_that_tries_all_that_raises_is_graded_every_time(env: OpenEnv) -> None:
    numbers = (RAISES, BREAKS, CLOSES, OVERPAYS, PAYS_NAN, 10**400, None, [], {"number": 1})
    assert_all_are_graded(env, [act(number=number) for number in numbers] + [act(other=1), act()])


REFUSALS: list[tuple[Any, str]] = [
    ("close", "has ended the session: received 1000"),
    ({"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}}, "reports EXECUTION_ERROR, no"),
    ({"type": "state", "data": {}}, "answers wrongly: "),
    ({"type": "observation", "data": {"observation": {}, "reward": "1", "done": False}}, "answers wrongly: .*reward"),
    ({"type": "observation", "data": {"observation": {}, "reward": 1}}, "answers wrongly: .*done"),
    ({"type": "observation", "data": {"observation": {}, "reward": 1, "done": 0, "more": 1}}, "answers wrongly: "),
    ({"type": "observation", "data": {"observation": {}, "reward": 1, "done": True}}, "ends the episode of seed 0"),
    ({"type": "observation", "data": {"observation": {"text": "Hi"}, "reward": 1, "done": False}}, "for the same seed"),
]


@pytest.mark.parametrize(("answer", "message"), REFUSALS)
def test_what_the_server_does_on_its_own_is_a_fault(rules: Scripted, env: OpenEnv, answer: Any, message: str) -> None:
    task = env.task_set[0]
    rules.on_reset = answer
    kind = EnvContractError if message == "for the same seed" else InfrastructureError
    with pytest.raises(kind, match=f"(?s){message}"):
        env.reset(options={"task": task.id})


def test_a_session_too_many_is_a_fault_with_its_remedy(rules: Scripted, env: OpenEnv) -> None:
    begin(env)
    rules.capacity = 1
    with (
        closing(OpenEnv(url=rules.url)) as other,
        pytest.raises(InfrastructureError, match=r"lower rollout\.concurrency"),
    ):
        begin(other)


def test_a_server_that_goes_away_is_a_fault() -> None:
    with serving() as rules, closing(OpenEnv(url=rules.url)) as env:
        begin(env)
        env.episode.state["session"]._socket.socket.shutdown(2)
        with pytest.raises(InfrastructureError, match="has ended the session"):
            env.step(act(number=1))
        begin(env)
        with pytest.raises(InfrastructureError, match="has ended the session: received 1012"):
            env.step(act(number=LEAVES))
        begin(env)
    with pytest.raises(InfrastructureError, match="/schema does not answer"):
        OpenEnv(url=rules.url, seconds=5.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "file:///etc"}, "name the OpenEnv server"),
        ({"low": 1.0}, "low must be less"),
        ({"part": "graded"}, "parts"),
    ],
)
def test_wrong_arguments_are_errors_at_once(rules: Scripted, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenEnv(**({"url": rules.url} | arguments))


@pytest.mark.parametrize("schema", [[], {}, {"action": {"type": "string"}}, {"action": {"type": "object"}}])
def test_a_schema_that_is_none_is_refused(rules: Scripted, schema: object) -> None:
    rules.schema = schema
    with pytest.raises(AgentRLError, match="does not answer with an action's schema"):
        OpenEnv(url=rules.url)


class Guess(OpenEnv):
    """With a gold player."""

    def gold(self, task: Task) -> list[str]:
        return [self.dialect.render("act", {"number": secret(task.data["seed"])})]  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_it_keeps_the_contract(rules: Scripted, clean_registry: None) -> None:
    register("test/Guess-v0", Guess, kwargs={"url": rules.url})
    report = check_env("test/Guess-v0", tasks=1)
    assert report.ok, str(report)
    with closing(make("agentrl/OpenEnv-v0", url=rules.url, split="test")) as env:
        assert env.task_set[0].data == {"seed": 1} and env.task_set[0].id == "test:0"


@pytest.mark.ci
def test_a_server_of_the_real_package_is_played(make_python: Callable[..., str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).parent / "theirs" / "openenv_server.py"
    server = subprocess.Popen([make_python("openenv", True), str(script), str(port)])
    try:
        while True:  # until the test's own time is up
            try:
                env = OpenEnv(url=f"http://127.0.0.1:{port}")
                break
            except InfrastructureError:
                assert server.poll() is None
                time.sleep(0.5)
        with closing(env):
            number = begin(env, 3)
            env.step(act(number=number + 1))
            assert env.step(act(number=number))[1] == 1.0
            assert env.episode.state["verdict"]["rewards"] == [None, 1.0]
            tried = (RAISES, BREAKS, CHATTERS, OVERPAYS, PAYS_NAN, "x", None)
            assert_all_are_graded(env, [act(number=number) for number in tried])
    finally:
        server.kill()
        server.wait()
