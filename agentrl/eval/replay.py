"""``agentrl replay``: play recorded actions again, and report the first turn whose result differs."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from agentrl.errors import EnvContractError, InfrastructureError, UnknownNameError, UsageError
from agentrl.eval.episodes import env_call, remake
from agentrl.eval.pages import Section
from agentrl.runs.records import Record
from agentrl.segments import shared_length
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tools.function import Tool, ToolContext, ToolError
from agentrl.toolenv.tools.python import open_sandboxes
from agentrl.types import CutTurn, CutTurns, Message, Stop, ToolRun, Trajectory

Tools = Literal["live", "recorded"]
"""Whether tools run again, or answer what they answered then."""
_Recorded = tuple[Message, ToolRun]
_ENDS = {(True, False): "terminated", (False, True): "truncated", (False, False): "went on"}
_ROUNDING = 1e-9
_AROUND = 60
"""Characters shown on each side of a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The first difference between a recorded episode and its replay."""

    turn: int
    """The assistant's turn that it follows, from 1; 0 for the beginning."""
    what: str
    """``task`` is not there, ``prompt``, ``tool``: its answer, ``observation``: other messages, ``reward``, ``end``,
    ``error``: the environment's own code raised, ``fault``: its sandbox failed."""
    recorded: str
    """The recorded text."""
    now: str
    """The replay's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How an episode was graded."""

    ret: float
    """Its return."""
    won: bool
    """Whether it succeeded."""
    parts: Mapping[str, float]
    """The parts of the final reward; none where it was not graded."""


def verdict(record: Record) -> Verdict:
    """Return how a recorded episode was graded."""
    return Verdict(ret=record.trajectory.ret, won=record.won, parts=record.trajectory.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """An episode that was played again."""

    task_id: str
    """Its task."""
    seed: int
    """Its seed."""
    change: Change | None
    """The first change; None where all is equal."""
    recorded: Verdict
    """As recorded."""
    now: Verdict | None
    """As graded now; None where it was not played to its end."""

    @property
    def regraded(self) -> bool:
        """True where the grades differ."""
        now, before = self.now, self.recorded
        return now is not None and (
            now.won != before.won or not _near(now.ret, before.ret) or now.parts != before.parts
        )


class RecordedTool:
    """Answers calls of a tool with what it answered when the episode was recorded.

    Args:
        tool: whose name, description and parameters are used; it never runs.
        results: recorded answers of the current turn, shared by all tools; each is served once.
    """

    def __init__(self, tool: Tool, results: deque[_Recorded]) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self._results = results

    def call(self, arguments: Mapping[str, object], ctx: ToolContext) -> str:
        """Return the answer to the recorded call with this name and these arguments; ``ctx`` is not used.

        Raises:
            ToolError: the tool answered with an error, or there is no such call in this turn.
        """
        for recorded in self._results:
            message, run = recorded
            if run.name == self.name and run.arguments == arguments:
                self._results.remove(recorded)
                if not run.ok:
                    raise ToolError(message["content"])
                return message["content"]
        raise ToolError("this call was not recorded")

    def open(self, seed: int) -> None:
        """Begin an episode."""

    def close(self) -> None:
        """End it."""


def replay(
    records: Sequence[Record],
    *,
    tools: Tools,
    trusted: bool,
    regrade: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Replayed]:
    """Play the recorded actions of episodes again, each in an episode of its own of the environment that it names.

    Args:
        records: the episodes.
        tools: with ``recorded``, neither tools nor their sandbox run, and no judge or simulated user is asked.
        trusted: see ``agentrl.eval.episodes.remake``.
        regrade: continue after a change, so that every episode is graded.
        say: prints a line for each environment before it is made.

    Raises:
        UsageError: an environment is not there or not to be made, or an episode's messages are not those of its turns.
        SandboxUnavailable: an environment runs programs, and no sandbox can be opened here.
    """
    # Episodes of equal origin share an environment, whose recorded tools share the answers of the current turn.
    made: dict[str, tuple[ToolEnv, deque[_Recorded]]] = {}
    with ExitStack() as stack:
        for record in records:
            key = env_call(record.origin)
            if key not in made:
                say(f"environment: {key}")
                env = stack.enter_context(closing(remake(record.origin, trusted=trusted)))
                results = deque[_Recorded]()
                if tools == "recorded":
                    env.tools = [RecordedTool(tool, results) for tool in env.tools]
                open_sandboxes(env.tools)
                made[key] = env, results
            env, results = made[key]
            # Judges and simulated users answer as they did, too.
            env.recorded = record.trajectory.exchanges if tools == "recorded" else None
            yield _replayed(record, env, results, to_end=regrade)


def _replayed(record: Record, env: ToolEnv, results: deque[_Recorded], *, to_end: bool) -> Replayed:
    trajectory = record.trajectory
    _check(record)
    change, rewards, ended = None, list[float](), False
    try:
        for turn_change, reward in _turns(record, env, results):
            rewards.append(reward)
            change = change or turn_change
            # After a change the recorded turns answer other observations than they did: only a grade still counts.
            if change and not to_end:
                break
        else:
            ended = True
    except UnknownNameError as error:
        change = change or Change(turn=0, what="task", recorded=trajectory.task_id, now=str(error))
    except (EnvContractError, InfrastructureError) as error:
        what = "fault" if isinstance(error, InfrastructureError) else "error"
        change = change or Change(turn=len(rewards), what=what, recorded="", now=str(error))
    now = None
    if ended:
        ret = math.fsum(rewards)
        now = Verdict(ret=ret, won=ret >= env.best_return - _ROUNDING, parts=env.episode.parts or {})
    return Replayed(
        task_id=trajectory.task_id,
        seed=trajectory.seed,
        change=change,
        recorded=verdict(record),
        now=now,
    )


def _turns(record: Record, env: ToolEnv, results: deque[_Recorded]) -> Iterator[tuple[Change | None, float]]:
    """Replay an episode; yield the difference and the reward of its reset, then those of each turn."""
    trajectory = record.trajectory
    observation, _ = env.reset(seed=trajectory.seed % 2**32, options={"task": trajectory.task_id})
    opening = trajectory.messages[: len(trajectory.messages) - sum(1 + len(answers) for _, answers in trajectory.turns)]
    yield _message_change(0, opening, observation), 0.0
    runs, steps = iter(trajectory.tool_runs), _steps(trajectory)
    for number, (text, answers) in enumerate(trajectory.turns, start=1):
        results.clear()
        results.extend(zip((message for message in answers if message["role"] == "tool"), runs, strict=False))
        cut = trajectory.sampled[steps[number - 1]].cut
        action = CutTurn(text, _cut_treatment(record, answers)) if cut else text
        last = number == len(trajectory.turns)
        messages, reward, *end, _ = env.step(action)
        if last and not any(end) and trajectory.stop is Stop.TOKEN_LIMIT:
            reward += env.truncate(Stop.TOKEN_LIMIT)
        change = _message_change(number, answers, messages)
        # A reward is paid to the latest turn: after a call of a sub-agent, to the sub-agent's last one.
        before = math.fsum(trajectory.rewards[steps[number - 1] : None if last else steps[number]])
        if change is None and not _near(reward, before):
            change = Change(turn=number, what="reward", recorded=f"{before:g}", now=f"{reward:g}")
        ended = _end(trajectory, last=last, cut=cut and not answers)
        if change is None and tuple(end) != ended:
            change = Change(turn=number, what="end", recorded=_ENDS[ended], now=_ENDS[end[0], end[1]])
        yield change, reward
        if any(end):
            return


def _check(record: Record) -> None:
    trajectory = record.trajectory
    spoken, answers = len(trajectory.turns), sum(message["role"] == "tool" for message in trajectory.messages)
    if (spoken, answers) != (len(_steps(trajectory)), len(trajectory.tool_runs)):
        raise UsageError(
            f"the episode of task {trajectory.task_id!r} has {len(trajectory.sampled)} turns and "
            f"{len(trajectory.tool_runs)} tool calls, but messages of {spoken} and {answers}: it can't be played again"
        )


def _steps(trajectory: Trajectory) -> Sequence[int]:
    """Return which turn each of the assistant's messages is."""
    return trajectory.steps or range(len(trajectory.sampled))


def _cut_treatment(record: Record, answers: Sequence[Message]) -> CutTurns:
    """Return how the environment treated a cut turn, judged by the messages that followed it."""
    if not answers:
        return "answer" if record.trajectory.stop is Stop.TERMINATED else "end"
    # Its calls ran, as they do under "answer" and "continue"; only the grader may see the difference.
    return "answer" if record.evaluation.get("rollout.truncated.turn") == "answer" else "continue"


def _end(trajectory: Trajectory, *, last: bool, cut: bool) -> tuple[bool, bool]:
    """Return the flags ``terminated`` and ``truncated`` that the step of a recorded turn returned."""
    if not last or trajectory.stop is Stop.TERMINATED:
        return last, False
    # Where tokens ran out between two turns, the environment did not see the episode's end.
    return False, cut or trajectory.stop is not Stop.TOKEN_LIMIT


def _message_change(turn: int, recorded: Sequence[Message], now: Sequence[Message]) -> Change | None:
    for before, after in zip_longest(recorded, now):
        if before == after:
            continue
        tool = before is not None and after is not None and before["role"] == after["role"] == "tool"
        what = "prompt" if turn == 0 else "tool" if tool else "observation"
        texts = [_described(message) for message in (before, after)]
        shared = shared_length(*texts)
        start = max(0, shared - _AROUND)
        cut = [("…" if start else "") + text[start : shared + _AROUND] for text in texts]
        return Change(turn=turn, what=what, recorded=cut[0], now=cut[1])
    return None


def _described(message: Message | None) -> str:
    if message is None:
        return "no message"
    names = (message["role"], message.get("name", ""), message.get("tool_call_id", ""))
    return f"{' '.join(filter(None, names))}: {message['content']}"


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def sections(episodes: Sequence[Replayed], *, regrade: bool) -> Iterator[Section]:
    """Yield the changes of replayed episodes as sections of a report."""
    changed = [(episode, episode.change) for episode in episodes if episode.change]
    counts = Counter(change.what for _, change in changed)
    summary = ", ".join(f"{count} at first in {what}" for what, count in counts.most_common())
    if regrade:
        graded = [(episode, episode.now) for episode in episodes if episode.now and episode.regraded]
        yield Section(
            title=f"{len(graded)} of {len(episodes)} episodes are graded differently",
            head=["task", "seed", "return", "now", "won", "now", "parts", "now"] if graded else (),
            rows=[_graded(episode, now) for episode, now in graded],
        )
        # A new grader is expected to change rewards.
        changed = [(episode, change) for episode, change in changed if change.what != "reward"]
    yield Section(
        title=f"{len(changed)} of {len(episodes)} episodes changed",
        text=[summary] if changed and not regrade else (),
        head=["task", "seed", "turn", "what", "recorded", "now"] if changed else (),
        rows=[
            (episode.task_id, episode.seed, change.turn, change.what, repr(change.recorded), repr(change.now))
            for episode, change in changed
        ],
    )


def _graded(episode: Replayed, now: Verdict) -> tuple[object, ...]:
    pairs = [(f"{grade.ret:g}", grade.won, dict(grade.parts)) for grade in (episode.recorded, now)]
    return episode.task_id, episode.seed, *(cell for both in zip(*pairs, strict=True) for cell in both)
