"""Histories of the step driver: what they show, that prompts are recorded as they were shown, and what is refused."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import AgentRLError, ConfigError
from agentrl.render.renderer import Renderer
from agentrl.rollout.driver import StepDriver
from agentrl.rollout.history import make_history
from agentrl.runs.assemble import make_collector
from agentrl.types import Message

from .conftest import ANSWER, CALL, Sums
from .test_policy import Told, check, policy_of

LONG = CALL.replace("2+2", "long " * 10)
RESULT = "the sum is " * 50 + "4"
"""What the tool answers to it."""


def play(renderer: Renderer, engine: Any, *, budget_of: float = 1.0, tokens: int = 4000, **options: Any) -> Any:
    """Play the task "calm" to its end; the budget is in tokens of the first prompt and a result."""
    env = Sums(max_turns=6)
    policy = policy_of(engine, renderer, tokens, 10 * tokens)
    policy.spec = type(policy.spec)(task_id="calm", seed=5)
    if "history" in options:
        result = [Message(role="tool", content=RESULT)]
        prompt = renderer.prompt(env.reset(options={"task": "calm"})[0]).token_ids
        options["budget"] = int(len(prompt) + budget_of * sum(len(s.token_ids) for s in renderer.extend([], result)))
    asyncio.run(StepDriver(**options).play(env, policy, policy.spec))
    env.close()
    return policy, options.get("budget", tokens)


def shown(renderer: Renderer, engine: Told) -> list[str]:
    tokenizer: Any = renderer.tokenizer
    return [tokenizer.decode(prompt) for prompt, _ in engine.asked]


def turns(renderer: Renderer, *texts: str) -> list[list[int]]:
    return [renderer.turn(text) for text in texts]


def test_old_results_are_shortened_oldest_first(renderer: Renderer, registered: None) -> None:
    engine = Told(turns(renderer, *[LONG] * 4, ANSWER))
    policy, budget = play(renderer, engine, history="shorten", budget_of=2.5)
    check(policy, engine.asked)
    prompts = shown(renderer, engine)
    line = "[result of python cut: 551 characters]"
    cuts = [prompt.count(line) for prompt in prompts]
    assert cuts[0] == cuts[1] == 0 and cuts == sorted(cuts) and cuts[-1] > 1
    assert all(prompt.index(line) < prompt.rindex("the sum is") for prompt in prompts[-2:]), "the newest stays"
    assert all(len(prompt) <= budget for prompt, _ in engine.asked)
    assert policy.forks == {"branch": len({*cuts}) - 1} and policy.rewards[-1] == 1.25


def test_a_line_that_does_not_shorten_stays_away(renderer: Renderer, registered: None) -> None:
    engine = Told(turns(renderer, CALL, CALL, ANSWER))
    policy, _ = play(renderer, engine, history="shorten", budget_of=0)
    assert len(policy.rows()) == 1 and not policy.forks
    engine = Told(turns(renderer, LONG, LONG, LONG, ANSWER))
    policy, _ = play(renderer, engine, history="shorten", budget_of=0, line="-")
    assert shown(renderer, engine)[-1].count("<|im_start|>tool\n-<|im_end|>") == 2, "each is cut once"
    engine = Told(turns(renderer, LONG, LONG, LONG, ANSWER))
    play(renderer, engine, history="shorten", budget_of=0)
    assert shown(renderer, engine)[-1].count("[result of python cut: 551 characters]") == 2, "a line is not shortened"


def test_a_summary_is_a_turn_and_begins_a_row(renderer: Renderer, registered: None) -> None:
    thoughtful = "<think>\nHm.\n</think>\nThe sum is 4."
    engine = Told(turns(renderer, LONG, thoughtful, CALL, LONG, "Still 4.", ANSWER))
    policy, _ = play(renderer, engine, history="summarize", budget_of=0.5, request="Sum up.")
    check(policy, engine.asked)
    assert policy.steps == [0, 2, 3, 5]
    prompts = shown(renderer, engine)
    end = "<|im_start|>user\nSum up.<|im_end|>\n<|im_start|>assistant\n"
    assert [prompt.endswith(end) for prompt in prompts] == [False, True, False, False, True, False]
    begin = "2+2?<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n"
    assert begin.format("The sum is 4.") in prompts[2] and begin.format("Still 4.") in prompts[5]
    assert all("long" not in prompt and "Hm." not in prompt for prompt in (prompts[2], prompts[5]))
    assert policy.forks == {"anew": 2}
    # Rewards are those of the environment's steps; a summary earns none of its own.
    assert policy.rewards == [0.25, 0.0, 0.25, 0.25, 0.0, 1.25]


def test_where_not_even_the_request_fits_the_episode_is_truncated(renderer: Renderer, registered: None) -> None:
    engine = Told(turns(renderer, LONG, "Never.", ANSWER))
    policy, _ = play(renderer, engine, history="summarize", budget_of=0, tokens=200)
    assert len(engine.asked) == 1 and policy.rewards == [0.25]


def test_a_script_has_no_summaries(renderer: Renderer, registered: None) -> None:
    script = turns(renderer, LONG, ANSWER)
    env, policy = Sums(), policy_of(ScriptedEngine(script), renderer, 4000)
    policy.spec = type(policy.spec)(task_id="calm", seed=5, script=tuple(map(tuple, script)))
    asyncio.run(StepDriver("summarize", budget=1).play(env, policy, policy.spec))
    env.close()
    assert policy.rewards == [0.25, 1.25] and len(policy.rows()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history": "shortn"}, "no history is called 'shortn'; did you mean 'shorten'"),
        ({"history": "shorten"}, "history 'shorten' can't be made with rollout.driver.options: missing .*'budget'"),
        ({"history": "summarize", "budget": 0}, "a number of tokens from 1, not 0"),
        ({"budget": 90}, "history 'append' can't be made .* unexpected keyword argument 'budget'"),
        ({"history": "shorten", "budget": 9, "line": "{length} of {size}"}, "use {name} and {length} alone"),
        ({"history": "template", "request": "x"}, "unexpected keyword argument 'request'"),
    ],
)
def test_unknown_words_are_refused_at_the_start(renderer: Renderer, options: Mapping[str, Any], message: str) -> None:
    config = parse_config({"rollout": {"driver": {"options": options}}})
    with pytest.raises(AgentRLError, match=message):
        make_collector(config, renderer, split="train")


def test_an_options_kind_is_checked() -> None:
    with pytest.raises(ConfigError, match="'9'"):
        make_history("shorten", {"budget": "9"})
