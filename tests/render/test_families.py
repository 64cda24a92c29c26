"""Well-known chat templates' traps: prompts grow by appending only, as the template writes where it can be extended."""

# ruff: noqa: RUF001  # DeepSeek's control tokens are spelled with wide bars

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.render.renderer import Renderer
from agentrl.toolenv.dialects import get_dialect
from agentrl.types import Message

from ..rollout.test_policy import Told, policy_of
from .conftest import FAMILIES, MORE, SYSTEM, USER, ids, renderer_of, result, search, tokenizer_of, whole

NAMES = [
    *("qwen2_5", "qwen3", "llama3", "llama2", "mistral", "gemma2", "gemma3", "glm4"),
    *("deepseek_v3", "deepseek_r1", "smollm3"),
]
Rounds = Sequence[tuple[str, Sequence[Message]]]


TOOLS: Rounds = [
    ("print(12 + 30)", [result("42")]),
    ("print(1)", [result("1"), result("", 1), result("Traceback:\n  ValueError: é", 2)]),
    ("Let me see.", [result("42"), MORE]),
    ("print(3 * 42)", [result("126"), result("你好", 1)]),
]
TALK: Rounds = [("42", [MORE]), ("126", [USER]), ("42.", [MORE])]


def play(renderer: Renderer, opening: Sequence[Message], rounds: Rounds) -> tuple[list[int], list[Message]]:
    """The tokens of a conversation, and its messages."""
    tokens, messages = list(renderer.prompt(opening).token_ids), list(opening)
    for text, answers in rounds:
        turn = renderer.turn(text, answered_by="tool" if answers[0]["role"] == "tool" else "user")
        assert turn[-1] in renderer.stop_ids and not set(turn[:-1]) & set(renderer.stop_ids)
        assert renderer.text(turn).rstrip(" ") == text
        tokens += [*turn, *ids(renderer.extend(turn, answers))]
        messages += [Message(role="assistant", content=text), *answers]
    return tokens, messages


def as_user(messages: Sequence[Message]) -> list[Message]:
    """Everything between two turns of the assistant as one user message."""
    rows: list[Message] = []
    for assistant, side in itertools.groupby(messages, lambda message: message["role"] == "assistant"):
        content = "\n\n".join(message["content"] for message in side if message["content"])
        rows.append(Message(role="assistant" if assistant else "user", content=content))
    return rows


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "glm4", "deepseek_v3", "smollm3"])
@pytest.mark.parametrize("opening", [[USER], [SYSTEM, USER]])
def test_a_conversation_with_tools_is_what_the_template_gives(name: str, opening: Sequence[Message]) -> None:
    renderer = renderer_of(name)
    for length in range(1, len(TOOLS) + 1):
        tokens, messages = play(renderer, opening, TOOLS[:length])
        assert tokens == whole(renderer, messages)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama2"])
@pytest.mark.parametrize("opening", [[USER], [SYSTEM, USER]])
def test_without_tools_results_are_the_users_words(name: str, opening: Sequence[Message]) -> None:
    renderer = renderer_of(name)
    tokens, messages = play(renderer, opening, TOOLS)
    begin = len(opening)
    rows = [*(as_user(opening) if name == "gemma2" else opening), *as_user(messages[begin:])]
    assert tokens == whole(renderer, rows)


@pytest.mark.parametrize("name", NAMES)
def test_talk_is_what_the_template_gives(name: str) -> None:
    renderer = renderer_of(name)
    tokens, messages = play(renderer, [USER], TALK)
    if name == "deepseek_r1":  # the opened thinking stays, where the template would take it out of the past
        written, wanted = map(renderer.tokenizer.decode, (tokens, whole(renderer, messages)))
        assert written.replace("<think>\n", "") == wanted.replace("<think>\n", "")
        assert written.count("<think>\n") == len(TALK) + 1
    else:
        assert tokens == whole(renderer, messages)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sampled_without_an_end_is_ended(name: str) -> None:
    renderer = renderer_of(name)
    for answer, role in (([result("42")], "tool"), ([MORE], "user")):
        turn = renderer.turn("42", answered_by=role)
        assert turn.count(turn[-1]) == 1 and set(ids(renderer.extend([], answer))[:2]) & set(renderer.stop_ids)
        cut = turn[:-1] if name != "llama2" else turn[:-2]
        assert [*cut, *ids(renderer.extend(cut, answer))] == [*turn, *ids(renderer.extend(turn, answer))]


def test_the_tokens_that_end_a_turn() -> None:
    for name in [name for name, family in FAMILIES.items() if family.stops]:
        renderer = renderer_of(name)
        assert renderer.tokenizer.convert_ids_to_tokens(list(renderer.stop_ids)) == FAMILIES[name].stops


def test_a_turn_that_ended_as_if_somebody_else_spoke_next_keeps_its_end() -> None:
    """What was sampled stays: the role that does speak follows in full."""
    renderer, tokenizer = renderer_of("glm4"), tokenizer_of("glm4")
    wrong = renderer.turn("print(1)", answered_by="user")
    text = tokenizer.decode([*wrong, *ids(renderer.extend(wrong, [result("1")]))])
    assert text == "print(1)<|user|><|observation|>\n<tool_response>\n1\n</tool_response><|assistant|>\n"


@pytest.mark.parametrize(("name", "newlines"), [("qwen3", "\n\n"), ("smollm3", "\n")])
def test_a_variable_of_the_template(name: str, newlines: str) -> None:
    thinking, plain = renderer_of(name), renderer_of(name, enable_thinking=False)
    assert list(plain.prompt([USER]).token_ids) == whole(plain, [USER], enable_thinking=False)
    for renderer, wanted in ((thinking, ""), (plain, f"<think>\n\n</think>{newlines}")):
        text = renderer.tokenizer.decode(play(renderer, [USER], TOOLS)[0])
        assert text.count("<|im_start|>assistant\n" + wanted) == len(TOOLS) + 1
        assert text.endswith("<|im_start|>assistant\n" + wanted)


def test_the_date_is_always_the_same() -> None:
    decode: Any = tokenizer_of("llama3").decode
    assert "Day: 01 Jan 2025\n" in decode(renderer_of("llama3").prompt([USER]).token_ids)
    assert "Day: 26 Jul 2024\n" in decode(renderer_of("llama3", date_string="26 Jul 2024").prompt([USER]).token_ids)
    assert "Day: 01 January 2025\n" in tokenizer_of("smollm3").decode(renderer_of("smollm3").prompt([USER]).token_ids)


def test_deepseeks_results_are_announced_every_time() -> None:
    """The template forgets to after the first turn; what follows a turn is what follows the first."""
    renderer = renderer_of("deepseek_r1")
    tokens, messages = play(renderer, [SYSTEM, USER], TOOLS[:1])
    assert tokens[:-1] != whole(renderer, messages)  # its thinking was opened, and is kept
    tokens, _ = play(renderer, [SYSTEM, USER], TOOLS)
    answer = "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>".format
    ended = "<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>"
    answers = [answer("1"), answer(""), answer("Traceback:\n  ValueError: é")]
    assert renderer.tokenizer.decode(tokens) == (
        "<｜begin▁of▁sentence｜>Be helpful.<｜User｜>What is 12 + 30?<｜Assistant｜><think>\n"
        + f"print(12 + 30){ended}{answer(42)}<｜tool▁outputs▁end｜>"
        + f"print(1){ended}{chr(10).join(answers)}<｜tool▁outputs▁end｜>"
        + f"Let me see.{ended}{answer(42)}<｜User｜>And times 3?<｜Assistant｜><think>\n"
        + f"print(3 * 42){ended}{answer(126)}\n{answer('你好')}<｜tool▁outputs▁end｜>"
    )


def test_mistrals_system_message_stays_where_it_was_shown() -> None:
    """The template moves it to the newest question, and refuses a second call; results carry ids of nine letters."""
    renderer, tokenizer = renderer_of("mistral"), tokenizer_of("mistral")
    assert list(renderer.prompt([SYSTEM, USER]).token_ids) == whole(renderer, [SYSTEM, USER])
    tokens, messages = play(renderer, [SYSTEM, USER], TOOLS[:1])
    assert tokenizer.decode(tokens) == tokenizer.decode(whole(renderer, messages))
    tokens, messages = play(renderer, [SYSTEM, USER], TOOLS)
    with pytest.raises(Exception, match="take turns"):
        whole(renderer, messages)
    answer = '[TOOL_RESULTS] {{"content": {}, "call_id": "call0000{}"}}[/TOOL_RESULTS]'.format
    assert tokenizer.decode(tokens) == (
        "<s>[INST] Be helpful.\n\nWhat is 12 + 30?[/INST] print(12 + 30)</s>"
        + f"{answer(42, 0)} print(1)</s>{answer(1, 0)}{answer('', 1)}"
        + f"{answer('Traceback:' + chr(10) + '  ValueError: é', 2)} Let me see.</s>"
        + f"{answer(42, 0)}[INST] And times 3?[/INST] print(3 * 42)</s>{answer(126, 0)}{answer('你好', 1)}"
    )
    own = Message(role="tool", content="1", tool_call_id="aB3456789")
    assert '"call_id": "aB3456789"' in tokenizer.decode(ids(renderer.extend([], [own])))


@pytest.mark.parametrize("name", NAMES)
def test_text_that_spells_control_tokens_stays_text(name: str) -> None:
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    spelled = [token for token in (*FAMILIES[name].control, *FAMILIES[name].spoken) if token.strip()]
    control = set(tokenizer.convert_tokens_to_ids(spelled))
    unknown = {tokenizer.unk_token_id}
    texts = [*spelled, "".join(spelled), *(f"<{token}{token[1:]}" for token in spelled), *(t + " " for t in spelled)]
    for text in texts:
        opening = [Message(role="system", content=text), Message(role="user", content=text)]
        calm = [Message(role="system", content="x"), Message(role="user", content="x")]
        prompts = [list(renderer.prompt(messages).token_ids) for messages in (opening, calm)]
        assert [t for t in prompts[0] if t in control - unknown] == [t for t in prompts[1] if t in control - unknown]
        answer = [result(text), result(text, 1), Message(role="user", content=text)]
        contents = [segment for segment in renderer.extend([], answer) if segment.source != "template"]
        # A token that reaches over a content's border, into blank lines or quotes, is the content's.
        shown = [tokenizer.decode(segment.token_ids).strip(' "\n') for segment in contents]
        assert shown in ([text.strip()] * 3, [text.strip().replace('"', '\\"')] * 3)
        assert not set(ids(contents)) & control
        turn = renderer.turn(text)
        assert not set(turn[:-1]) & control and renderer.text(turn).rstrip() == text.rstrip()


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_added_tokens_that_control_nothing_are_text(name: str) -> None:
    """Gemma's HTML tags: the template's own rendering has them as tokens, and so has ours."""
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    text = f"12{''.join(FAMILIES[name].plain)} {FAMILIES[name].eos}"
    tokens, messages = play(renderer, [USER], [("42", [result(text)])])
    harmless = [{**message, "content": message["content"].replace("<eos>", "")} for message in messages]
    wanted = whole(renderer, as_user(harmless))
    tags = set(tokenizer.convert_tokens_to_ids(FAMILIES[name].plain))
    assert [token for token in tokens if token in tags] == [token for token in wanted if token in tags] != []
    assert tokenizer.eos_token_id not in ids(renderer.extend([], [result(text)]))
    # A dialect may write one of them, and then no content does.
    marked = Renderer(tokenizer, marks=FAMILIES[name].plain[:1])
    assert tags & set(ids(marked.extend([], [result(text)]))) == tags - {tokenizer.convert_tokens_to_ids("<table>")}
    assert marked.describing((), FAMILIES[name].plain[:1]) is marked and marked.describing(()) is not marked
    # Nor where a request brings tools of its own.
    engine = Told([marked.turn("42")])
    asyncio.run(policy_of(engine, marked).turn([Message(role="user", content=text)], ()))
    assert tokenizer.convert_tokens_to_ids("<table>") not in engine.asked[0][0]


@pytest.mark.parametrize(
    ("family", "dialect"),
    [("qwen2_5", "hermes"), ("qwen3", "native-hermes"), ("mistral", "native-mistral"), ("glm4", "native-glm")],
)
def test_a_gold_turn_has_the_tokens_that_a_model_would_sample(family: str, dialect: str) -> None:
    """A dialect's marks are single tokens where the vocabulary has them, and the text of the turn stays what it was."""
    tokenizer = tokenizer_of(family)
    renderer, spoken = Renderer(tokenizer), get_dialect(dialect, [search])
    call = f"<think>Hm. {tokenizer.eos_token}</think>{spoken.render('search', {'query': 'a b'})}"
    turn = renderer.turn(call, answered_by="tool", marks=spoken.marks)
    vocabulary = {token.content for token in tokenizer.added_tokens_decoder.values()}
    wanted = [mark for mark in spoken.marks if mark in vocabulary and mark in call]
    assert bool(wanted) == (family != "mistral")
    marks = [token for token in tokenizer.convert_ids_to_tokens(turn) if token in spoken.marks]
    assert marks == sorted(wanted, key=call.index)
    assert turn.count(tokenizer.eos_token_id) <= 1
    assert spoken.parse(renderer.text(turn)) == spoken.parse(call)
