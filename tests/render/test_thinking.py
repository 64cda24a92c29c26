"""Earlier turns without their thinking: rows spell what the chat template renders, in tokens that were sampled."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentrl.errors import RenderError
from agentrl.render.renderer import Renderer
from agentrl.segments import complete_rows
from agentrl.types import Message

from ..rollout.test_policy import Told, assistant, check, policy_of
from .conftest import MORE, SYSTEM, TEMPLATES, USER, byte_tokens, renderer_of, result, tokenizer_of, whole

THOUGHT = "<think>\nLet me see.\n</think>\n\n"
ANSWERS: Sequence[tuple[str, Sequence[Message]]] = [
    ("print(12 + 30)", [result("42")]),
    ("print(1)", [result("1"), result("", 1)]),
    ("42", [MORE]),
    ("print(3 * 42)", [result("126")]),
    ("126", [USER]),
    ("你好 é", [MORE]),
    ("42.", []),
]
TALK = [(text, answers) for text, answers in ANSWERS if not answers or answers[0]["role"] == "user"]


def sampled(renderer: Renderer, text: str, answered_by: Any = "user") -> tuple[int, ...]:
    """A turn as a model samples it, with the tokens of thinking."""
    ids = renderer.tokenizer(text, add_special_tokens=False).input_ids
    return (*ids, renderer.turn("", answered_by=answered_by)[-1])


def play(
    renderer: Renderer, rounds: Sequence[tuple[str, Sequence[Message]]], thoughts: Sequence[str], **options: Any
) -> tuple[Any, list[str]]:
    """Play a conversation; compare each prompt with the template's rendering of its messages."""
    texts = [thought + text for (text, _), thought in zip(rounds, itertools.cycle(thoughts), strict=False)]
    ends = ["tool" if answers and answers[0]["role"] == "tool" else "user" for _, answers in rounds]
    engine = Told([sampled(renderer, text, end) for text, end in zip(texts, ends, strict=True)])
    policy = policy_of(engine, renderer, 4000, 40000)
    messages, wanted = [SYSTEM, USER], list[str]()

    async def go() -> None:
        for text, (_, answers) in zip(texts, rounds, strict=True):
            wanted.append(renderer.tokenizer.decode(whole(renderer, messages, **options)))
            before = policy.tokens(messages, past="template")
            assert await policy.turn(messages, past="template") == text
            assert before == len(engine.asked[-1][0])
            messages.extend([assistant(text), *answers])

    asyncio.run(go())
    check(policy, engine.asked)
    assert [renderer.tokenizer.decode(prompt) for prompt, _ in engine.asked] == wanted
    # Whatever of a turn is shown are its own tokens.
    for (prompt, _), number in zip(engine.asked, range(len(rounds)), strict=True):
        for (_, turn), (text, _) in zip(engine.asked[:number], rounds, strict=False):
            answer = turn[-len(sampled(renderer, text)) :]
            assert any(prompt[at : at + len(answer)] == answer for at in range(len(prompt)))
    return policy, wanted


async def ask_twice(policy: Any) -> None:
    """Play two turns, the second after another question."""
    text = await policy.turn([USER], past="template")
    await policy.turn([USER, assistant(text), MORE], past="template")


@pytest.mark.parametrize("rounds", [ANSWERS, TALK], ids=["tools", "talk"])
def test_qwens_thinking_is_dropped_before_the_newest_question(rounds: Any) -> None:
    policy, wanted = play(renderer_of("qwen3"), rounds, [THOUGHT])
    questions = sum(bool(answers) and answers[0]["role"] == "user" for _, answers in rounds)
    assert policy.forks == {"thinking": questions} and len(policy.rows()) == questions + 1
    assert wanted[-1].count("Let me see.") == 0
    rows = complete_rows(policy.rows())
    assert len(rows[-1]) < sum(map(len, rows))


def test_turns_with_blank_thinking_and_without_are_shown_as_the_template_does() -> None:
    thoughts = [THOUGHT, "<think>\n\n</think>\n\n", ""]
    policy, _ = play(renderer_of("qwen3"), ANSWERS, thoughts)
    assert policy.forks == {"thinking": 3}
    # An empty block that the prompt opens is in no earlier turn.
    plain = renderer_of("qwen3", enable_thinking=False)
    policy, _ = play(plain, ANSWERS, [""], enable_thinking=False)
    assert policy.forks == {"thinking": len(ANSWERS) - 1}


def test_an_empty_block_in_place_of_thinking_is_the_templates() -> None:
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    changed = source.replace(
        "'<|im_start|>assistant\\n' + said +", "'<|im_start|>assistant\\n<think></think>' + said +"
    )
    assert changed != source
    policy, wanted = play(Renderer(tokenizer_of("qwen3", changed)), TALK, [THOUGHT])
    assert policy.forks == {"thinking": len(TALK) - 1} and "<think></think>42<|im_end|>" in wanted[-1]


def test_deepseeks_opened_thinking_is_dropped_at_once() -> None:
    policy, wanted = play(renderer_of("deepseek_r1"), TALK, ["Let me see.\n</think>\n\n"])
    assert policy.forks == {"thinking": len(TALK) - 1}
    assert wanted[-1].count("<think>") == 1
    play(renderer_of("deepseek_r1"), ANSWERS[2:5], ["Let me see.</think>"])


QWEN_OPENS = """{%- set ns = namespace(question=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and '</think>' in m.content -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.question -%}
{{ '<think>\n' + m.content.split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' }}
{%- endif -%}
{{ m.content.split('</think>')[-1].strip('\n') + '<|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}
"""
"""As Qwen3's thinking models of July 2025: the prompt opens the thinking."""


def test_thinking_that_the_prompt_opens_stays_until_the_next_question() -> None:
    renderer = Renderer(tokenizer_of("qwen3", QWEN_OPENS))
    policy, _ = play(renderer, ANSWERS, ["Let me see.\n</think>\n\n"])
    assert policy.forks == {"thinking": 3}


def test_a_token_across_the_border_stays_whole_and_is_counted() -> None:
    """A tokenizer without tokens for the marks of thinking may write the last of them and the answer as one."""
    control = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    made = byte_tokens(control, "x", ["ab</think>", "</think>42"] * 9, size=275, words=False)
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=source)
    renderer = Renderer(tokenizer)
    engine = Told([sampled(renderer, "<think>ab</think>42"), sampled(renderer, "42")])
    policy = policy_of(engine, renderer)
    asyncio.run(ask_twice(policy))
    check(policy, engine.asked)
    assert policy.forks == {"token": 1}
    (_, turn), (prompt, _) = engine.asked
    shown = renderer.text(turn[-2:-1])
    assert shown.endswith(">42") and shown != "42", "the token in which the answer begins"
    assert f"<|im_start|>assistant\n{shown}<|im_end|>" in renderer.tokenizer.decode(prompt)


def test_without_anything_to_drop_rows_are_as_sampled() -> None:
    for name in ("qwen2_5", "llama3", "glm4"):
        renderer = renderer_of(name)
        assert not renderer.drops_thinking
        engine = Told([renderer.turn("42")] * 2)
        policy = policy_of(engine, renderer)
        asyncio.run(ask_twice(policy))
        assert len(policy.rows()) == 1 and not policy.forks
    with pytest.raises(RenderError, match="gpt-oss"):
        _ = renderer_of("harmony").drops_thinking
