"""Checks of environment × tokenizer × dialect: episodes are played in tokens, as collectors play them.

Turns are token ids as a model would sample them, cut-off turns among them. The renderer must write whatever the
environment says. Not covered: how well a model reads the tokens, and whether the chat template writes earlier turns the
same way when it is given the whole conversation.
"""

from collections.abc import Iterator, Sequence

from agentrl.errors import RenderError
from agentrl.render.renderer import Renderer
from agentrl.render.tokens import ChatTokenizer
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.checker.contract import TOLERANCE
from agentrl.toolenv.checker.report import Finding
from agentrl.toolenv.checker.subject import Subject, Turn, as_sentence, short
from agentrl.toolenv.tools.context import SubTurn, scripted
from agentrl.types import Message, Segment, Task


def check_tokenizer(subject: Subject) -> Iterator[Finding]:
    """ARL-T001, T004, T005: play good, hostile and cut-off turns, and those of the gold player."""
    if subject.tokenizer is None:
        return
    try:
        dialect = subject.env.dialect
        renderer = Renderer(subject.tokenizer, tools=dialect.template_tools, marks=dialect.marks)
        for turns in _scripts(subject, renderer):
            play_in_tokens(subject, renderer, subject.tasks[0], turns)
        yield from _check_gold(subject, renderer)
        yield from _check_calls(subject, renderer)
        yield from _check_control(renderer, subject.tokenizer)
    except RenderError as error:
        yield Finding("ARL-T001", as_sentence(error))


def _scripts(subject: Subject, renderer: Renderer) -> Iterator[list[list[int]]]:
    """Yield episodes in tokens: every hostile turn with a turn after it, and turns cut off at a token limit."""
    env, calls = subject.env, subject.calls()
    yield [_turn(env, renderer, text) for text in [*calls, r"\boxed{unknown}"]]
    for text in subject.hostile_turns():
        yield [_turn(env, renderer, text), renderer.turn("")]
    for call in calls:
        turn = _turn(env, renderer, call)
        yield [turn[:-1], turn[: len(turn) // 2], turn]
    # Cut inside the emoji, whose bytes may be several tokens: half a character has to survive as well.
    cut = renderer.turn("h\u00e9llo \U0001f642")
    yield [cut[:-2], []]


def _turn(env: ToolEnv, renderer: Renderer, text: str) -> list[int]:
    dialect = env.dialect
    return renderer.turn(text, answered_by="tool" if dialect.parse(text) else "user", marks=dialect.marks)


def play_in_tokens(subject: Subject, renderer: Renderer, task: Task, turns: Sequence[Sequence[int]]) -> list[Turn]:
    """Play ``turns`` as a collector does; return the result of each step.

    Raises:
        RenderError: the chat template refuses what the environment says.
        StepRaised: ``step`` raised.
    """
    renderer.prompt(subject.begin(task))
    played = list[Turn]()
    for turn in turns:
        played.append(subject.step(renderer.text(turn)))
        if played[-1].over:
            break
        renderer.extend(turn, played[-1].messages)
    return played


def _ids(segments: Sequence[Segment]) -> list[int]:
    return [token for segment in segments for token in segment.token_ids]


def _check_gold(subject: Subject, renderer: Renderer) -> Iterator[Finding]:
    for task in subject.tasks:
        gold = subject.gold(task)
        if gold is None:
            return
        subject.env.sub_policy = scripted(gold)
        turns = [_turn(subject.env, renderer, text) for text in gold if not isinstance(text, SubTurn)]
        played = play_in_tokens(subject, renderer, task, turns)
        # Compared with gold in text: where gold fails there too, that is ARL-E003.
        in_tokens, in_text = subject.score(played), subject.score_of(task, gold)
        if in_tokens < in_text - TOLERANCE:
            message = f"Gold scores {in_tokens:g} in tokens and {in_text:g} in text on task {task.id!r}."
            yield Finding("ARL-T004", message)


def _check_calls(subject: Subject, renderer: Renderer) -> Iterator[Finding]:
    parse = subject.env.dialect.parse
    for call in subject.calls():
        back = renderer.text(_turn(subject.env, renderer, call))
        if parse(back) != parse(call):
            yield Finding("ARL-T004", f"The call {short(call)} comes back from tokens as {short(back)}.")


def _check_control(renderer: Renderer, tokenizer: ChatTokenizer) -> Iterator[Finding]:
    """Spell every control token in a task, a tool's answer and the agent's text."""
    control = set(tokenizer.all_special_ids)
    for spelled in tokenizer.all_special_tokens:
        text = f"before {spelled} after"
        answers = (Message(role="tool", content=text, name="python"), Message(role="user", content=text))
        # Segments of the template rightly hold control tokens, and so does the end of a turn below.
        content = [s for m in answers for s in renderer.extend([], (m,)) if s.source != "template"]
        if control & set(_ids(content)):
            yield Finding("ARL-T005", f"{spelled!r} in a tool's answer becomes a control token.")
        if control & set(renderer.turn(text)[:-1]):
            yield Finding("ARL-T005", f"{spelled!r} in a turn's text becomes a control token.")
