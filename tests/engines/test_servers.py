"""Servers that answer in other ways than they were asked to, refuse, fail or are gone: each costs what it must."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import ConfigError, FaultRateError, InfrastructureError, RefusedError
from agentrl.eval.request import EvalRequest, read_settings
from agentrl.render.transcript import Transcript
from agentrl.runs.records import read_episodes

from .asking import outcomes
from .servers import Fake, Reply, ask, spoken

pytestmark = pytest.mark.usefixtures("needs_sandbox")

PROMPT = Transcript().prompt([{"role": "user", "content": "2+2?"}]).token_ids
ANSWER = spoken(r"\boxed{4}")
FILTERED: Reply = (400, {"error": {"message": "The prompt was filtered", "code": "content_filter"}})


def called(name: str, arguments: str, text: str | None = None) -> Reply:
    """Answer with a call that the server has read."""
    function = {"name": name, "arguments": arguments}
    return spoken(text, "tool_calls", tool_calls=[{"id": "x", "type": "function", "function": function}])


Evaluate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evaluate(fake: Fake, here: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Evaluates with the server; returns the exit status, and what was printed and said."""

    def run(*words: str, more: str = "", tasks: int = 6) -> tuple[int, str, str]:
        options = f"--engine openai --base-url {fake.url} --model m --out o --tasks {tasks}".split()
        status = main(["eval", *options, "--env", f"agentrl/Arithmetic-v0?level=1{more}", *words])
        return status, *capsys.readouterr()

    return run


def four(fake: Fake) -> list[Any]:
    """What comes of four requests at once."""
    with closing(make_engine("openai", None, {"base_url": fake.url, "model": "m", "retries": 3})) as engine:
        return outcomes(*(engine.generate(PROMPT, Sampling(max_tokens=8), seed=seed) for seed in range(4)))


def test_content_in_parts_is_the_text_of_the_parts(fake: Fake) -> None:
    parts = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Fo"}, {"type": "text", "text": "ur"}]
    fake.follow(spoken(parts), spoken(None, refusal="I won't."), spoken([{"type": "audio"}]))
    texts = [Transcript().text(ask(fake, PROMPT).token_ids) for _ in range(2)]
    assert texts == ["Four", "I won't."]
    with pytest.raises(InfrastructureError, match="no answer that can be read"):
        ask(fake, PROMPT)


def test_call_that_the_server_cuts_out_of_a_text_is_no_wrong_answer(fake: Fake, evaluate: Evaluate) -> None:
    fake.answer = lambda _path, _fields: called("python", '{"code": "print(4)"}')
    status, _, errors = evaluate()
    assert status == 2 and "a call of 'python' out of the text" in errors and "dialect=native" in errors


def test_native_calls_of_a_server_are_played(fake: Fake, evaluate: Evaluate) -> None:
    def answer(_path: str, fields: dict[str, Any]) -> Reply:
        assert [tool["function"]["name"] for tool in fields["tools"]] == ["python"]
        before = [message for message in fields["messages"] if message["role"] == "assistant"]
        results = [message for message in fields["messages"] if message["role"] == "tool"]
        if not before:
            return called("python", '{"code": "print(\'</tool_call>\')"}', "Let me see.")
        if len(before) == 1:
            assert before[0]["content"] == "Let me see."
            assert before[0]["tool_calls"][0]["function"]["arguments"] == '{"code": "print(\'</tool_call>\')"}'
            assert [message["content"] for message in results] == ["</tool_call>"]
            assert results[0]["tool_call_id"] == before[0]["tool_calls"][0]["id"]
            return called("python", '{"code"')
        assert "tool_calls" not in before[1] and fields["messages"][-1]["role"] == "user", "templates fail on bad JSON"
        return spoken(r"\boxed{1}")

    fake.answer = answer
    assert evaluate(more="&dialect=native", tasks=2)[0] == 0
    episodes = [record.trajectory for record in read_episodes("o")]
    assert [[run.ok for run in episode.tool_runs] for episode in episodes] == [[True, False]] * 2
    assert [episode.tool_runs[0].arguments for episode in episodes] == [{"code": "print('</tool_call>')"}] * 2


def test_one_request_s_refusal_costs_one_episode_by_name(fake: Fake, evaluate: Evaluate) -> None:
    prompts = list[str]()

    def answer(_path: str, fields: dict[str, Any]) -> Reply:
        prompts.append(fields["messages"][-1]["content"])
        return FILTERED if prompts[-1] == prompts[0] else ANSWER

    fake.answer = answer
    status, table, errors = evaluate("--set", "rollout.concurrency=1", "--json")
    assert status == 0 and [json.loads(table)["Arithmetic-v0"][name] for name in ("tasks", "lost")] == [5, 1]
    ((refused,),) = (row["refused"] for row in json.loads(Path("o/summary.json").read_text())["sets"])
    assert f"skipped: {refused}" in errors and "attempt 0: the server refuses the request: " in refused
    assert "filtered" in refused and len(prompts) == 7, "six tasks and one greeting"


@pytest.mark.parametrize("reply", [FILTERED, spoken(None, "content_filter")])
def test_where_every_request_is_refused_there_is_no_result(fake: Fake, evaluate: Evaluate, reply: Reply) -> None:
    fake.answer = lambda _path, fields: ANSWER if fields["messages"][0]["content"] == "Hello" else reply
    status, _, errors = evaluate()
    assert status == 1 and "no task was played to its end; task " in errors and "filter" in errors


def test_requests_that_are_refused_in_a_row_end_an_evaluation(fake: Fake, evaluate: Evaluate) -> None:
    fake.answer = lambda _path, fields: ANSWER if fields["messages"][0]["content"] == "Hello" else FILTERED
    assert evaluate(tasks=60)[0] == 2
    assert len(fake.asked) <= 60 + 8


@pytest.mark.parametrize(
    ("unknown", "dropped"),
    [
        (("max_completion_tokens",), {"max_tokens", "seed"}),
        (("seed",), {"max_completion_tokens"}),
        (("max_completion_tokens", "seed"), {"max_tokens"}),
    ],
)
def test_fields_that_a_server_does_not_know_are_dropped_after_asking_once(
    fake: Fake, evaluate: Evaluate, unknown: tuple[str, ...], dropped: set[str]
) -> None:
    fake.answer = lambda _path, fields: (422, {"detail": "extra"}) if set(unknown) & set(fields) else ANSWER
    status, _, errors = evaluate("--set", "rollout.concurrency=1")
    assert status == 0 and set(fake.asked[-1][1]) & {"max_tokens", "max_completion_tokens", "seed"} == dropped
    refused = [fields for _, fields, _ in fake.asked if set(unknown) & set(fields)]
    assert 2 <= len(refused) <= 4 and len(fake.asked) == 6 + len(refused) + 1
    assert all(errors.count(f"does not know the field {name!r}") == 1 for name in unknown)
    assert json.loads(Path("o/summary.json").read_text())["notes"]


def test_limit_that_a_server_ignores_gets_its_older_name(fake: Fake) -> None:
    long = {"usage": {"prompt_tokens": 1, "completion_tokens": 99}}
    fake.answer = lambda _path, fields: (200, dict(ANSWER[1]) | ({} if "max_tokens" in fields else long))  # pyright: ignore
    assert ask(fake, PROMPT).usage == (11, 3) and len(fake.asked) == 2


@pytest.mark.parametrize("answer", [0, 502])
def test_server_that_is_gone_gets_few_requests(
    fake: Fake, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    fake.answer = lambda _path, _fields: (answer, b"")
    fake.hangs_up = not answer
    monkeypatch.setattr("agentrl.engines.openai._LONGEST_PAUSE_S", 0.01)
    few = ["--set", "rollout.concurrency=8", "--set", "engine.options.retries=3"]
    status, _, errors = evaluate(*few, tasks=60)
    assert status == 1 and "4 requests in a row failed" in errors
    assert len(fake.asked) <= 8 + 3, "each episode at a time its own, and then one for all"


def test_options_of_a_server_stand_beside_its_words() -> None:
    """Those of the preset's own engine don't hold for a server."""
    words = ("engine.options.retries=3", 'engine.name="openai"', 'engine.options.model="m"')
    request = EvalRequest(preset="qwen3-4b-tir", overrides=words)
    assert read_settings(request)[0].engine.options == {"model": "m", "retries": 3}


def test_prompt_that_a_server_fails_at_is_a_fault_of_its_own(fake: Fake) -> None:
    fake.answer = lambda _path, fields: ANSWER if fields["messages"][0]["content"] == "Hello" else (500, {})
    with pytest.raises(InfrastructureError, match="the server failed") as caught:
        ask(fake, PROMPT)
    assert not isinstance(caught.value, FaultRateError) and len(fake.asked) == 3 + 2


def test_server_that_comes_back_goes_on_with_all(fake: Fake) -> None:
    fails = iter([True] * 5)
    fake.answer = lambda _path, _fields: (503, {}) if next(fails, False) else ANSWER
    assert [type(done) for done in four(fake)] == [Completion] * 4
    assert len(fake.asked) == 4 + 2 + 4, "four fail, one of two greetings, and all are sent again"


def test_refused_key_ends_all_at_once(fake: Fake) -> None:
    fake.answer = lambda _path, _fields: (401, {"error": {"message": "expired"}})
    errors = four(fake)
    assert [type(error) for error in errors] == [ConfigError] * 4 and len(fake.asked) == 5
    assert not any(isinstance(error, RefusedError) for error in errors)
