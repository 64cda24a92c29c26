"""Environment × tokenizer × dialect: an episode is replayed in tokens, as collectors play it.

Turns are given as the tokens that a model would sample, cut-off turns among them. The prompt grows by what the renderer
adds; beside it the same tokens are rendered once more from the environment's own record. Not covered: how well a model
reads the tokens, and whether a chat template that is given a whole conversation writes earlier turns in the same way.
"""

from collections.abc import Iterator, Sequence

from agentrl.checker.contract import TOLERANCE
from agentrl.checker.play import (
    SEED,
    ControlTokens,
    Subject,
    Turn,
    as_sentence,
    calls_of,
    gold_of,
    hostile_turns,
    play,
    score,
    short,
    step,
)
from agentrl.checker.report import Finding
from agentrl.env import ToolEnv
from agentrl.errors import RenderError
from agentrl.render import Renderer
from agentrl.types import Group, Message, Segment, Stop, Task, Trajectory


class _Wrong(Exception):
    """A replay found something out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.finding = Finding(code=code, message=message)


def check_tokens(subject: Subject) -> Iterator[Finding]:
    """ARL-T001 to T005, in episodes of good, hostile and cut-off turns and of the gold player's."""
    if subject.tokenizer is None:
        return
    try:
        renderer = Renderer(subject.tokenizer, tools=subject.env.dialect.template_tools)
        for number, turns in enumerate(_scripts(subject, renderer)):
            seeds = (SEED,) if number else (SEED, SEED + 1)
            members = [replay(subject.env, renderer, subject.tasks[0], turns, seed)[0] for seed in seeds]
            Group(tuple(members))
        yield from _check_gold(subject, renderer)
        yield from _check_calls(subject.env, renderer)
        yield from _check_control(renderer, subject.tokenizer)
    except RenderError as error:
        yield Finding(code="ARL-T001", message=as_sentence(error))
    except _Wrong as error:
        yield error.finding


def _scripts(subject: Subject, renderer: Renderer) -> Iterator[list[list[int]]]:
    """Episodes in tokens: every hostile turn with a turn after it, and turns that a limit has cut off."""
    env = subject.env
    calls = calls_of(env)
    yield [_turn(env, renderer, text) for text in [*calls, r"\boxed{unknown}"]]
    for text in hostile_turns(env):
        yield [_turn(env, renderer, text), renderer.turn("")]
    for call in calls:
        turn = _turn(env, renderer, call)
        yield [turn[:-1], turn[: len(turn) // 2], turn]
    cut = renderer.turn("h\u00e9llo \U0001f642")
    yield [cut[:-2], []]


def _turn(env: ToolEnv, renderer: Renderer, text: str) -> list[int]:
    dialect = env.dialect
    return renderer.turn(text, answered_by="tool" if dialect.parse(text) else "user", marks=dialect.marks)


def replay(
    env: ToolEnv, renderer: Renderer, task: Task, turns: Sequence[Sequence[int]], seed: int
) -> tuple[Trajectory, list[Turn]]:
    """Play ``turns`` as a collector does, and compare every prompt with the environment's own record.

    Returns:
        The episode, and what each step returned.

    Raises:
        RenderError: the chat template refuses what the environment says.
        StepRaised: ``step`` raised.
    """
    first, _ = env.reset(seed=seed, options={"task": task.id})
    segments, played = [renderer.prompt(first)], list[Turn]()
    for number, ids in enumerate(turns, start=1):
        segments.append(_policy(ids))
        before = _ids(segments)
        played.append(step(env, renderer.text(ids)))
        if not played[-1].over:
            segments += renderer.extend(ids, played[-1].messages)
        recorded = _recorded(env, renderer, turns[:number], over=played[-1].over)
        if _ids(recorded)[: len(before)] != before:
            raise _Wrong("ARL-T002", f"After turn {number} the prompt does not begin with the tokens played so far.")
        if _ids(recorded) != _ids(segments):
            raise _Wrong("ARL-T002", f"After turn {number} the record reads otherwise in tokens than what was shown.")
        if played[-1].over:
            break
    trajectory = Trajectory(
        task_id=task.id,
        seed=seed,
        segments=tuple(segments),
        rewards=(0.0,) * len(played),
        stop=Stop.TERMINATED if played and played[-1].terminated else Stop.TURN_LIMIT,
    )
    return trajectory, played


def _recorded(env: ToolEnv, renderer: Renderer, turns: Sequence[Sequence[int]], *, over: bool) -> list[Segment]:
    """The segments that the environment's record leads to, with the sampled tokens in place of the agent's turns."""
    stretches: list[list[Message]] = [[]]
    said: list[str] = []
    for message in env.episode.messages:
        if message["role"] == "assistant":
            said.append(message["content"])
            stretches.append([])
        else:
            stretches[-1].append(message)
    if len(said) == len(turns) and said != [renderer.text(ids) for ids in turns]:
        raise _Wrong("ARL-T003", f"After turn {len(turns)} the record holds other words of the agent than it sampled.")
    if not stretches[0]:
        raise _Wrong("ARL-T002", f"After turn {len(turns)} the record has lost the first observation.")
    segments = [renderer.prompt(stretches[0])]
    for number, (ids, messages) in enumerate(zip(turns, stretches[1:], strict=True), start=1):
        segments.append(_policy(ids))
        if not over or number < len(turns):
            segments += renderer.extend(ids, messages)
    return segments


def _policy(ids: Sequence[int]) -> Segment:
    return Segment("policy", tuple(ids), (0.0,) * len(ids), 0)


def _ids(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.token_ids]


def _check_gold(subject: Subject, renderer: Renderer) -> Iterator[Finding]:
    env = subject.env
    for task in subject.tasks:
        gold = gold_of(env, task)
        if gold is None:
            return
        turns = [_turn(env, renderer, text) for text in gold]
        trajectory, played = replay(env, renderer, task, turns, SEED)
        sampled = [list(segment.token_ids) for segment in trajectory.sampled]
        assert sampled == turns[: len(played)], "a trajectory holds the very turns that were played"
        reached = score(env, played)
        in_text = score(env, list(play(env, task, gold)))
        if reached < in_text - TOLERANCE:
            message = f"Gold scores {reached:g} in tokens and {in_text:g} in text on task {task.id!r}."
            yield Finding(code="ARL-T004", message=message)


def _check_calls(env: ToolEnv, renderer: Renderer) -> Iterator[Finding]:
    for call in calls_of(env):
        back = renderer.text(_turn(env, renderer, call))
        if env.dialect.parse(back) != env.dialect.parse(call):
            yield Finding(code="ARL-T004", message=f"The call {short(call)} comes back from tokens as {short(back)}.")


def _check_control(renderer: Renderer, tokenizer: ControlTokens) -> Iterator[Finding]:
    """Control tokens spelled by a task, a tool or the agent."""
    control = set(tokenizer.all_special_ids)
    for spelled in tokenizer.all_special_tokens:
        text = f"before {spelled} after"
        answers = (Message(role="tool", content=text, name="python"), Message(role="user", content=text))
        content = [s for m in answers for s in renderer.extend([], (m,)) if s.source != "template"]
        if control & set(_ids(content)):
            yield Finding(code="ARL-T005", message=f"{spelled!r} in a tool's answer becomes a control token.")
        if control & set(renderer.turn(text)[:-1]):
            yield Finding(code="ARL-T005", message=f"{spelled!r} in a turn's text becomes a control token.")
