"""Episodes: recorded as they were played, many at a time, and faults that are never outcomes."""

import asyncio
import gc
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentrl.engines.base import Completion, Sampling
from agentrl.engines.rng import derive_seed, uniforms
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import EnvContractError, FaultRateError, InfrastructureError, TrajectoryError
from agentrl.rollout.collector import Collected
from agentrl.types import Stop, Trajectory

from ..engines.around import Overheard
from .conftest import ANSWER, CALL, Make, Sums, collect, journal, only, scripted, specs

pytestmark = pytest.mark.usefixtures("one_thread", "registered")


def sources(trajectory: Trajectory) -> str:
    return " ".join(segment.source for segment in trajectory.segments)


def test_an_episode_is_recorded_as_it_was_played(make_collector: Make, tokenizer: Any) -> None:
    collector = make_collector()
    engine = Overheard(ScriptedEngine([collector._renderer.turn(turn) for turn in (CALL, CALL, ANSWER)]))
    trajectory = only(collect(collector, specs("chatty"), engine=engine))
    turn = "policy template tool template prompt template"
    assert sources(trajectory) == f"prompt {turn} {turn} policy"
    assert trajectory.rewards == (0.25, 0.25, 1.25) and trajectory.parts == {"correct": 1.0}
    assert trajectory.stop is Stop.TERMINATED and [run.ok for run in trajectory.tool_runs] == [True, True]
    tokens = trajectory.token_ids
    for (asked, sampling, _, completion), segment in zip(engine.heard, trajectory.sampled, strict=True):
        assert asked == tokens[: len(asked)], "each prompt is the record so far"
        assert tokens[len(asked) : len(asked) + len(completion.token_ids)] == completion.token_ids == segment.token_ids
        assert segment.logprobs == completion.logprobs and sampling.stop_ids == collector._renderer.stop_ids
    last, _, _, completion = engine.heard[-1]
    assert tokens == (*last, *completion.token_ids)
    segment = [message["content"] for message in trajectory.messages if message["role"] == "assistant"]
    assert segment == [CALL, CALL, ANSWER]
    written = tokenizer.apply_chat_template(list(trajectory.messages), return_dict=False)
    assert list(tokens) == written[: len(tokens)], "the record is the conversation that the template would write"


def test_the_environments_turn_limit_ends_an_episode(make_collector: Make) -> None:
    trajectory = only(collect(make_collector(max_turns=2), specs("calm"), CALL, CALL, CALL))
    assert trajectory.stop is Stop.TURN_LIMIT and trajectory.rewards == (0.25, 0.25)
    assert sources(trajectory) == "prompt policy template tool template policy"


@pytest.mark.parametrize("room", [0, -3])
def test_a_prompt_that_leaves_no_room_is_an_episode_without_a_turn(make_collector: Make, room: int) -> None:
    whole = only(collect(make_collector(), specs("calm"), ANSWER))
    trajectory = only(collect(make_collector(tokens=len(whole.segments[0].token_ids) + room), specs("calm"), ANSWER))
    assert (trajectory.stop, trajectory.rewards, sources(trajectory)) == (Stop.TOKEN_LIMIT, (), "prompt")


def test_a_tool_answer_that_leaves_no_room_ends_the_episode_with_its_turn(make_collector: Make) -> None:
    whole = only(collect(make_collector(), specs("calm"), "```python\nlong\n```", ANSWER))
    needed = len(whole.token_ids) - len(whole.segments[-1].token_ids)
    cut = only(collect(make_collector(tokens=needed), specs("calm"), "```python\nlong\n```", ANSWER))
    assert cut.stop is Stop.TOKEN_LIMIT and cut.segments == whole.segments[:2] and cut.rewards == (0.25,)
    one_more = only(collect(make_collector(tokens=needed + 1), specs("calm"), "```python\nlong\n```", ANSWER))
    assert one_more.n_sampled == cut.n_sampled + 1


def test_a_fault_is_played_again_on_a_fresh_environment(make_collector: Make) -> None:
    done: list[Trajectory] = []
    collected = collect(make_collector(), specs("fault-once"), CALL, ANSWER, on_episode=done.append)
    trajectory = only(collected)
    assert (collected.faults, collected.lost) == (1, 0) and done == [trajectory]
    assert trajectory.rewards == (0.25, 1.25) and sources(trajectory) == "prompt policy template tool template policy"
    assert journal.played["fault-once"] == 4 and journal.made == 2


def test_a_group_that_lost_one_member_is_left_out_whole(make_collector: Make) -> None:
    class Mortal(ScriptedEngine):
        async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
            if seed == derive_seed(2, 0):
                raise InfrastructureError("the second episode is cursed")
            return await super().generate(prompt_ids, sampling, seed=seed)

    collector = make_collector(max_fault_rate=0.5)
    turn = collector._renderer.turn(ANSWER)
    collected = collect(collector, specs("calm", "calm2", members=3), engine=Mortal([turn] * 5))
    assert [(group.task_id, len(group)) for group in collected.groups] == [("calm2", 3)]
    assert (collected.faults, collected.lost) == (2, 1)


def test_too_many_lost_groups_end_the_collection(make_collector: Make) -> None:
    with pytest.raises(FaultRateError, match=r"1 of 2 groups.*the sandbox is gone") as caught:
        collect(make_collector(max_fault_rate=0.4), specs("calm", "fault-always"), ANSWER)
    assert isinstance(caught.value.__cause__, InfrastructureError)


def test_a_machine_that_can_play_nothing_is_told_at_once(make_collector: Make) -> None:
    lines: list[str] = []
    collector = make_collector(max_fault_rate=0.1, concurrency=2, say=lines.append)
    with pytest.raises(FaultRateError, match=r"^9 of 40 groups were lost .*the sandbox is gone"):
        collect(collector, specs(*["fault-always"] * 40), ANSWER)
    assert journal.made < 30, "most groups were not begun"
    assert lines == ["infrastructure fault: the sandbox is gone"]
    # An evaluation may lose them all, and still says why.
    collector = make_collector(max_fault_rate=1.0, say=lines.append)
    assert collect(collector, specs(*["fault-always"] * 4, "calm"), ANSWER).lost == 4 and len(lines) == 2


def test_a_bug_in_an_environment_is_raised_once(make_collector: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Asyncio writes each error that nobody asks for to the terminal, behind the one that says it all."""
    with pytest.raises(KeyError, match="a bug in the environment"):
        collect(make_collector(), specs(*["slow"] * 6, *["bug"] * 4, "calm", members=3), CALL, CALL, ANSWER)
    gc.collect()
    assert not caplog.records


def test_a_step_that_leaves_the_process_is_the_environments_fault(make_collector: Make) -> None:
    with pytest.raises(EnvContractError, match=r"Sums\.step raised SystemExit\(0\)"):
        collect(make_collector(), specs("exit", "calm"), ANSWER)


def test_environments_are_closed_only_after_their_last_step(make_collector: Make) -> None:
    """Who gives up in the middle of a tool call waits for it: a tool that is closed before would be left open."""
    collector = make_collector()

    async def give_up() -> None:
        asked = scripted(collector, specs(*["slow"] * 5), CALL, CALL, ANSWER)
        playing = asyncio.create_task(collector.collect(asked, ScriptedEngine(()), Sampling()))
        while not journal.at_once:
            await asyncio.sleep(0.001)
        # Twice, as the end of an event loop does.
        for _ in range(2):
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(give_up())
    assert not journal.at_once and not journal.open_tools


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_episodes_run_at_a_time_than_allowed(make_collector: Make, limit: int) -> None:
    collector = make_collector(concurrency=limit)
    for _ in range(2):  # each in an event loop of its own
        collected = collect(collector, specs(*["slow"] * 9), ANSWER)
        assert len(collected.groups) == 9 and journal.most_at_once <= limit == journal.made


def test_tools_of_all_episodes_at_play_run_at_once(make_collector: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that waits, for a server say, keeps no other from starting."""
    together = threading.Barrier(70)

    def meet(_: Sums, step: Callable[[str], Any], action: str) -> Any:
        together.wait(60)
        return step(action)

    monkeypatch.setattr(Sums, "misbehave", meet)
    collected = collect(make_collector(concurrency=70), specs(*["calm"] * 70), ANSWER)
    assert len(collected.groups) == 70 == journal.most_at_once


def test_groups_come_in_order_whatever_ends_first(make_collector: Make) -> None:
    asked = specs("slow", "calm", "slow", "calm2", members=2)
    collected = collect(make_collector(), asked, CALL, ANSWER)
    assert [group.task_id for group in collected.groups] == ["slow", "calm", "slow", "calm2"]
    assert [[t.seed for t in group] for group in collected.groups] == [[s.seed for s in group] for group in asked]
    assert collected.clock.tools >= 8 * 0.02 and collected.seconds > 0 and collected.clock.engine > 0


def test_a_group_whose_members_began_differently_is_refused(make_collector: Make) -> None:
    with pytest.raises(TrajectoryError, match="different prompts"):
        collect(make_collector(), specs("fickle", members=2), ANSWER)


def test_nothing_to_play_is_nothing_collected(make_collector: Make) -> None:
    collected = collect(make_collector(), [])
    assert (collected.groups, collected.faults, collected.lost) == ((), 0, 0)


def segments_of(collected: Collected) -> list[Any]:
    return [(t.seed, t.segments, t.stop) for group in collected.groups for t in group]


def test_seeds_alone_decide_what_a_real_engine_plays(make_collector: Make, make_engine: Callable[..., Any]) -> None:
    """One after the other on few slots, or all at once: the same episodes."""
    asked = specs("calm", "slow", "calm2", members=3)
    few = collect(make_collector(concurrency=2), asked, engine=make_engine(slots=1), max_tokens=12)
    many = collect(make_collector(concurrency=64), asked, engine=make_engine(slots=16), max_tokens=12)
    assert segments_of(few) == segments_of(many)
    assert len({t.token_ids for group in few.groups for t in group}) == 9


def test_turns_and_episodes_do_not_share_their_noise(make_collector: Make) -> None:
    collector = make_collector(max_turns=6)
    seeds: list[int] = []
    for group in specs(*["calm"] * 8):
        engine = Overheard(ScriptedEngine([collector._renderer.turn(CALL)] * 6))
        collect(collector, [group], engine=engine)
        seeds += [seed for _, _, seed, _ in engine.heard]
    assert len(seeds) == 48 and len({seed % 2**62 for seed in seeds}) == 48
    noise = [uniforms(torch.tensor([seed] * 50), torch.arange(50)).tolist() for seed in seeds]
    assert len(set(itertools.chain(*noise))) == 48 * 50


def test_a_collector_plays_the_same_again_and_in_another_process_and_can_be_closed_twice(make_collector: Make) -> None:
    here, asked = make_collector(), specs("calm", "chatty")
    played, again = collect(here, asked, CALL, ANSWER), collect(here, asked, CALL, ANSWER)
    assert journal.made <= 2
    copy = pickle.loads(pickle.dumps(here))
    sent = pickle.loads(pickle.dumps(collect(copy, asked, CALL, ANSWER)))
    assert (
        segments_of(sent) == segments_of(again) == segments_of(played) and sent.sandbox.keys() == played.sandbox.keys()
    )
    copy.close()
    here.close()
