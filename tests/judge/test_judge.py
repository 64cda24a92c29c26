"""Judges: a score is read strictly, a failed judge is a fault, and the episode keeps what was asked."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agentrl
from agentrl.cli import main
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import AgentRLError, ConfigError, FaultRateError, InfrastructureError, RefusedError
from agentrl.judge import Chat, Judge
from agentrl.render.transcript import Transcript
from agentrl.rollout.collected import Collected
from agentrl.rollout.plan import EpisodeSpec
from agentrl.runs.records import read_episodes, write_episodes
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tools.context import Exchanges
from agentrl.types import Task

from ..endpoint.played import collect
from ..engines.servers import KEY, Fake, Reply, spoken
from ..runs.origins import ORIGIN, Numerals
from .conftest import Make

ID = "test/Polite-v0"
ORDER = 'End with a line "Score: N", where N is a whole number from 1 to 5.'


class Polite(ToolEnv):
    """Greets; a judge grades how."""

    judge: Judge
    reward_weights = {"correct": 1.0, "polite": 0.5}  # noqa: RUF012

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"t{number}", prompt="Greet me.", answer="Hello") for number in range(4)]

    async def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float("Hello" in episode.final), "polite": await self.judge.grade(episode)}


@pytest.fixture
def polite(clean_registry: None, judge: Make) -> type[Polite]:
    agentrl.register(ID, Polite)
    Polite.judge = judge()
    return Polite


def play(*turns: str, concurrency: int = 64) -> Collected:
    """Play an episode for each turn, which is all that the agent says in it."""
    writer = Transcript()
    specs = [[EpisodeSpec(task_id=f"t{n}", seed=n, script=(writer.turn(turn),))] for n, turn in enumerate(turns)]
    return collect((ID, {}), writer, specs, ScriptedEngine(()), concurrency=concurrency, max_fault_rate=0.4)


def score(judge: Judge, text: str = "Hello", asking: Any = None) -> float:
    return asyncio.run(judge.score("Greet me.", text, asking=asking))


def test_the_score_becomes_a_part_of_the_reward_and_the_episode_keeps_it(
    fake: Fake, polite: type[Polite], tmp_path: Path
) -> None:
    fake.follow(spoken("Friendly.\nScore: 4"), spoken("Score: 1"))
    groups = play("Hello, sir", concurrency=1).groups + play("Go away").groups
    episodes = [episode for group in groups for episode in group]
    assert [episode.parts for episode in episodes] == [{"correct": 1.0, "polite": 0.75}, {"correct": 0.0, "polite": 0}]
    assert [episode.ret for episode in episodes] == [1.375, 0.0]
    (exchange,) = episodes[0].exchanges
    assert (exchange.model, exchange.answer, exchange.usage) == ("m", "Friendly.\nScore: 4", (11, 3))
    assert list(exchange.messages) == fake.asked[0][1]["messages"]
    write_episodes(tmp_path / "e.jsonl", episodes, Numerals(), ORIGIN)
    assert [record.trajectory.exchanges for record in read_episodes(tmp_path / "e.jsonl")] == [
        episode.exchanges for episode in episodes
    ]
    line = (tmp_path / "e.jsonl").read_text().replace('"usage": [11, 3]', '"usage": [11, "3"]')
    (tmp_path / "e.jsonl").write_text(line)
    with pytest.raises(AgentRLError, match="is no episode: exchanges"):
        list(read_episodes(tmp_path / "e.jsonl"))


def test_regrading_asks_nobody(
    fake: Fake,
    polite: type[Polite],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.follow(spoken("I don't know"), spoken("Score: 4"), spoken("Score: 5"))
    (group,) = play("Hello, sir").groups
    origin = replace(ORIGIN, env_id=ID, env_args={}, best_return=1.5)
    write_episodes(tmp_path / "e.jsonl", list(group), Numerals(), origin)
    asked = len(fake.asked)
    assert main(["replay", str(tmp_path / "e.jsonl"), "--regrade"]) == 0 and len(fake.asked) == asked == 2
    monkeypatch.setattr(polite, "judge", Judge("m", "Is it brief?", (1, 5), base_url=fake.url))
    assert main(["replay", str(tmp_path / "e.jsonl"), "--regrade"]) == 1 and len(fake.asked) == asked
    assert "the episode has no answer of 'm' to this question" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "e.jsonl"), "--regrade", "--tools", "live"]) == 1
    assert len(fake.asked) == asked + 1, "another rubric is another question"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "5",
        "Score: 6",
        "Score: 0",
        "Score: 4.5",
        "Score: \uff14",
        "Score: 5 or 4",
        "**Score: 5**",
        "Score: 5\nDone.",
    ],
)
def test_an_answer_is_read_strictly_and_asked_for_once_more(fake: Fake, judge: Make, answer: str) -> None:
    fake.follow(spoken(answer), spoken("Sorry.\nScore: 5\n"), *[spoken(answer)] * 2)
    assert score(judge()) == 1.0
    again = fake.asked[1][1]["messages"]
    assert again[:2] == fake.asked[0][1]["messages"] and again[2] == {"role": "assistant", "content": answer}
    with pytest.raises(InfrastructureError, match="the model 'm' gave no answer that can be read, twice"):
        score(judge())


def test_an_answer_that_was_cut_off_is_no_score(fake: Fake, judge: Make) -> None:
    fake.follow(spoken("Score: 1", "length"), spoken("Score: 1"))
    assert score(judge()) == 0.0 and len(fake.asked) == 2


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        ((401, {"error": {"message": f"wrong key {KEY}"}}), ConfigError, "refuses the request"),
        ((404, {"error": {"message": "no model m"}}), ConfigError, "no model m"),
        ((500, {}), InfrastructureError, "the judge's server failed"),
        ((200, {"choices": []}), InfrastructureError, "the judge's server failed"),
        ((200, b"<html>"), InfrastructureError, "the judge's server failed"),
        (spoken(7), InfrastructureError, "no text but int"),
    ],
)
def test_a_server_that_fails_is_a_fault(
    fake: Fake, judge: Make, reply: Reply, kind: type[AgentRLError], words: str
) -> None:
    fake.answer = lambda _path, _fields: reply
    with pytest.raises(kind, match=words) as caught:
        score(judge(retries=1))
    assert KEY not in str(caught.value) and isinstance(caught.value, ConfigError | InfrastructureError)


@pytest.mark.parametrize(
    "reply", [(400, {"error": {"message": "bad words"}}), spoken("Score: 5", "content_filter")], ids=["400", "filter"]
)
def test_a_refused_text_gets_the_lowest_score(fake: Fake, judge: Make, reply: Reply) -> None:
    asking = SimpleNamespace(exchanges=Exchanges())
    fake.follow(spoken("Hm."), reply)
    assert score(judge(), asking=asking) == 0.0
    assert [exchange.answer for exchange in asking.exchanges.new] == ["Hm.", "[refused by the server]\nScore: 1"]
    again = SimpleNamespace(exchanges=Exchanges(recorded=asking.exchanges.new))
    assert score(judge(), asking=again) == 0.0 and len(fake.asked) == 2
    fake.follow(reply)
    with pytest.raises(RefusedError):
        asyncio.run(judge().rank("?", ["a", "b"]))


def test_a_server_that_refuses_everything_ends_the_run(fake: Fake, judge: Make) -> None:
    fake.answer = lambda _path, _fields: (400, {"error": {"message": "unknown field"}})
    assert [score(judge()) for _ in range(7)] == [0.0] * 7
    with pytest.raises(ConfigError, match="unknown field"):
        score(judge())


def test_an_outage_of_a_minute_costs_no_episode(
    fake: Fake, polite: type[Polite], monkeypatch: pytest.MonkeyPatch
) -> None:
    import anyio

    fake.answer = lambda _path, _fields: spoken("Score: 5")
    fake.hangs_up, over = True, asyncio.Event()
    slept, real = defaultdict[object, float](float), anyio.sleep

    async def sleep(seconds: float) -> None:
        """Let time pass at once; the server is back when each of the four has waited for a minute."""
        slept[asyncio.current_task()] += seconds
        if slept[asyncio.current_task()] < 60:
            await real(0)
            return
        if sum(seconds >= 60 for seconds in slept.values()) == 4:
            fake.hangs_up = False
            over.set()
        await over.wait()

    monkeypatch.setattr(anyio, "sleep", sleep)
    collected = play("Hello", "Hi", "Hello?", "Who?")
    assert (collected.faults, len(collected.groups), len(slept)) == (0, 4, 4)
    fake.hangs_up = True
    with pytest.raises(FaultRateError, match=r"4 of 4 groups were lost to .* no judge's server answers at http://127"):
        play("Hello", "Hi", "Hello?", "Who?")


def test_a_judge_is_awaited_while_others_play(fake: Fake, polite: type[Polite]) -> None:
    # No judgement before all four are asked for: they wait side by side.
    together = threading.Barrier(4)

    def answer(_path: str, _fields: Mapping[str, Any]) -> Reply:
        together.wait(60)
        return spoken("Score: 5")

    fake.answer = answer
    assert len(play("Hello", "Hi", "Hello?", "Who?").groups) == 4 and not together.broken


def test_groups_are_ranked(fake: Fake, judge: Make) -> None:
    order = list[list[str]]()

    def answer(_path: str, fields: dict[str, Any]) -> Reply:
        lines = fields["messages"][1]["content"].splitlines()
        starts = [index for index, line in enumerate(lines) if line.startswith("BEGIN ANSWER")]
        order.append([lines[start + 1] for start in starts])
        best = sorted(range(1, len(starts) + 1), key=lambda number: len(order[-1][number - 1]), reverse=True)
        return spoken("Ranking: " + " > ".join(map(str, best)))

    fake.answer = answer
    texts = ["a", "cccc", "bb", "a", "ddddddd"]
    for some in (texts, texts[::-1]):
        shares = asyncio.run(judge().rank("Write.", some))
        expected = {"a": 0.0, "bb": pytest.approx(1 / 3), "cccc": pytest.approx(2 / 3), "ddddddd": 1.0}
        assert shares == [expected[text] for text in some]
    assert order[0] == order[1] != sorted(order[0]), "neither the caller nor the alphabet chooses the order"
    assert asyncio.run(judge().rank("Write.", ["a", "a"])) == [0.5, 0.5] and len(order) == 2
    fake.follow(*[spoken(f"Ranking: {wrong}") for wrong in ("1 > 1", "1")])
    with pytest.raises(InfrastructureError, match="twice: End with a line"):
        asyncio.run(judge().rank("Write.", ["a", "b"]))


def test_options_are_checked() -> None:
    wrong: list[dict[str, Any]] = [{"scale": (5, 5)}, {"at_once": 0}, {"tokens_a_minute": float("nan")}, {"tmp": 1}]
    for options, words in zip(wrong, ["scale", "at_once", "tokens_a_minute", "tmp"], strict=True):
        with pytest.raises(ConfigError, match=words):
            Judge("m", "Nice?", **options)
    with pytest.raises(ConfigError, match="name of a model"):
        Chat(model="")


def test_a_user_speaks_from_a_thread(fake: Fake) -> None:
    chat = Chat(model="m", base_url=fake.url, temperature=1.0, body={"seed": 3})
    fake.follow(spoken(" "), spoken("I want tea.\ud800 "), *[spoken("so long", "length")] * 2)
    assert chat.say([{"role": "user", "content": "What do you want?"}]) == "I want tea.?"
    fields = fake.asked[0][1]
    assert (fields["seed"], fields["temperature"], fields["max_completion_tokens"]) == (3, 1.0, 1024)
    with pytest.raises(InfrastructureError, match="twice: Say it again"):
        chat.say([{"role": "user", "content": "And?"}])
    assert (chat.spent.requests, chat.spent.read, chat.spent.written) == (4, 44, 12)
