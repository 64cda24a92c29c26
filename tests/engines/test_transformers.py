"""The embedded engine: the right distribution, the same tokens whatever runs beside, and no work done twice."""

import asyncio
import copy
from typing import Any

import pytest
import torch

from agentrl.engines.base import Completion, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ConfigError

from .asking import PROMPT, MakeEngine, ask, expected_logprobs, full_logp, outcomes, ragged, together

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[True, False], ids=["native", "eager"])
def make_engine(request: pytest.FixtureRequest, model: Any) -> MakeEngine:
    """Engines that compute in C, and by PyTorch."""
    if request.param:
        request.getfixturevalue("compiler")
    return lambda **options: TransformersEngine(copy.deepcopy(model), **{"native": request.param, **options})


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_those_of_a_full_forward(make_engine: MakeEngine, reference: Any, temperature: float) -> None:
    engine, prompts = make_engine(slots=4), ragged(7)
    sampling = Sampling(temperature=temperature, max_tokens=12)
    completions = together(*(engine.generate(prompt, sampling, seed=i) for i, prompt in enumerate(prompts)))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == 12
        wanted = expected_logprobs(reference, prompt, completion, temperature)
        assert completion.logprobs == pytest.approx(wanted, abs=1e-4)


def test_greedy_takes_the_most_probable_token(make_engine: MakeEngine, reference: Any) -> None:
    engine = make_engine()
    completion = ask(engine, temperature=0.0, seed=1)
    assert completion == ask(engine, temperature=0.0, seed=2)
    best = full_logp(reference, [*PROMPT, *completion.token_ids]).argmax(-1).tolist()
    assert list(completion.token_ids) == best[len(PROMPT) - 1 : -1]
    assert completion.logprobs == (0.0,) * 8


def test_requests_of_other_temperatures_share_a_step(make_engine: MakeEngine) -> None:
    temperatures = [0.0, 0.7, 1.0, 2.0]
    engine = make_engine()
    mixed = together(*(engine.generate(PROMPT, Sampling(temperature=t, max_tokens=8), seed=3) for t in temperatures))
    alone = [ask(make_engine(), temperature=t, seed=3) for t in temperatures]
    assert [c.token_ids for c in mixed] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in mixed}) == 4


def test_company_changes_no_bit_on_a_cpu_alone(model: Any) -> None:
    exact = [TransformersEngine(copy.deepcopy(model).to(device), slots=2).exact for device in ("cpu", "meta")]
    assert exact == [True, False]


def test_other_seeds_give_other_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    turns = together(*(engine.generate(PROMPT, Sampling(max_tokens=8), seed=seed) for seed in range(20)))
    assert len({turn.token_ids for turn in turns}) == 20
    assert ask(engine, seed=7).token_ids == turns[7].token_ids != ask(engine, seed=2**63 - 1).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_tokens_come_as_often_as_the_softmax_says(make_engine: MakeEngine, reference: Any, temperature: float) -> None:
    count, engine = 3000, make_engine(slots=300)
    sampling = Sampling(temperature=temperature, max_tokens=1)
    turns = together(*(engine.generate(PROMPT, sampling, seed=seed) for seed in range(count)))
    seen = torch.bincount(torch.tensor([turn.token_ids[0] for turn in turns]), minlength=engine._vocab)
    expected = count * full_logp(reference, PROMPT, temperature)[-1].exp()
    common = expected >= 5
    assert common.sum() > 5
    seen = torch.cat([seen[common], seen[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    chi_square, freedom = float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_stop_token_ends_a_completion_and_belongs_to_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = ask(engine, seed=5)
    stop = free.token_ids[4]
    end = free.token_ids.index(stop) + 1
    stopped = ask(engine, seed=5, stop_ids=(299, stop))
    assert stopped.token_ids == free.token_ids[:end] and stopped.finish == "stop" and free.finish == "length"
    assert stopped.logprobs == pytest.approx(free.logprobs[:end], abs=1e-4)
    assert ask(engine, seed=5, max_tokens=3, stop_ids=free.token_ids[2:3]).finish == "stop", "at the limit too"


def test_who_watches_sees_each_token_and_ends_the_completion(make_engine: MakeEngine) -> None:
    engine, seen = make_engine(), list[int]()
    alone = ask(engine, seed=1)
    watched = ask(engine, seed=1, watch=lambda token: seen.append(token) or len(seen) == 3)
    assert tuple(seen) == watched.token_ids == alone.token_ids[:3] and watched.logprobs == alone.logprobs[:3]
    assert (watched.finish, alone.finish) == ("stop", "length")


def test_the_next_turn_computes_only_what_is_new(make_engine: MakeEngine, reference: Any) -> None:
    engine = make_engine(slots=3)
    tokens, computed, new = list(PROMPT), 0, len(PROMPT)
    for turn, answer in enumerate([(8, 9, 10), (11,), ()]):
        completion = ask(engine, tokens, seed=turn)
        assert engine.computed_tokens - computed == new + 7, "the last sampled token is computed with the next turn"
        assert completion.logprobs == pytest.approx(expected_logprobs(reference, tokens, completion, 1.0), abs=1e-4)
        computed, new = engine.computed_tokens, 1 + len(answer)
        tokens += [*completion.token_ids, *answer]


@pytest.mark.parametrize("back", [1, 2, 5])
def test_a_prompt_that_leaves_the_parked_tokens_is_computed(make_engine: MakeEngine, reference: Any, back: int) -> None:
    engine = make_engine(slots=3)
    answer = ask(engine)
    # The last sampled token is in no cache yet: the one before it is the last that is parked.
    parked = [*PROMPT, *answer.token_ids[:-1]]
    other = [*parked, 9, 9]
    other[len(parked) - back] = (parked[-back] + 1) % 250 + 3
    completion = ask(engine, other, seed=1)
    assert completion.logprobs == pytest.approx(expected_logprobs(reference, other, completion, 1.0), abs=1e-4)


def test_group_members_share_the_work_on_their_prompt(make_engine: MakeEngine, reference: Any) -> None:
    for slots in (8, 2, 1):
        engine = make_engine(slots=slots)
        members = together(*(engine.generate(PROMPT, Sampling(max_tokens=5), seed=seed) for seed in range(6)))
        assert engine.computed_tokens == len(PROMPT) + 5 * 1 + 6 * 4, "one prompt, and its last token per other member"
        assert len({member.token_ids for member in members}) == 6
        for member in members:
            assert member.logprobs == pytest.approx(expected_logprobs(reference, PROMPT, member, 1.0), abs=1e-4)


def test_a_shared_prompt_of_one_token_is_nothing_to_share(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    turns = together(*(engine.generate((5,), Sampling(max_tokens=2), seed=seed) for seed in range(5)))
    assert turns == [ask(make_engine(), (5,), seed=seed, max_tokens=2) for seed in range(5)]


def test_a_long_prompt_is_computed_in_parts_and_holds_up_nobody(
    make_engine: MakeEngine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,100 tokens take three of the nine steps that another request needs; a second member waits, and copies."""
    engine, prompt = make_engine(slots=4), tuple(i * i % 250 + 3 for i in range(1100))
    widths: list[int] = []
    forward = engine._compute.forward

    def counted(rows: Any, cached: Any, new: Any) -> Any:
        widths.append(sum(map(len, new)))
        return forward(rows, cached, new)

    monkeypatch.setattr(engine._compute, "forward", counted)
    short = engine.generate(PROMPT, Sampling(max_tokens=9), seed=0)
    leader, *members = together(short, *(engine.generate(prompt, Sampling(max_tokens=5), seed=i) for i in range(2)))
    assert max(widths) == 512 + len(PROMPT) and len(widths) == 9
    assert engine.computed_tokens == len(PROMPT) + 8 + len(prompt) + 1 + 2 * 4
    later = ask(engine, (*prompt, *members[1].token_ids, *prompt[:700]), seed=5)
    assert engine.computed_tokens == len(PROMPT) + 8 + len(prompt) + 1 + 2 * 4 + 1 + 700 + 7
    rows = [(PROMPT, leader), *((prompt, member) for member in members)]
    for begun, completion in [*rows, ((*prompt, *members[1].token_ids, *prompt[:700]), later)]:
        assert completion.logprobs == pytest.approx(expected_logprobs(reference, begun, completion, 1.0), abs=1e-4)
    # The longest row is forgotten with the weights, and its row of the cache is used for a short one.
    asyncio.run(engine.load_weights([], 1))
    assert ask(engine, seed=4).token_ids == ask(make_engine(), seed=4).token_ids


def test_who_comes_while_all_slots_are_taken_waits(make_engine: MakeEngine) -> None:
    engine, order = make_engine(slots=2), []

    async def request(number: int) -> None:
        await engine.generate((*PROMPT, number), Sampling(max_tokens=3), seed=number)
        order.append(number)

    outcomes(*map(request, range(5)))
    assert [set(order[:2]), set(order[2:4]), set(order[4:])] == [{0, 1}, {2, 3}, {4}]


@pytest.mark.parametrize(
    ("prompt", "seed", "message"),
    [
        ((), 0, "prompt is empty"),
        ((1,) * 30, 0, "exceed the engine's max_length of 32"),
        ((1, 10**6), 0, "outside the model's vocabulary"),
        ((-1,), 0, "outside the model's vocabulary"),
        ((1,), 2**63, "seed"),
        ((1,), -1, "seed"),
    ],
)
def test_a_request_that_can_not_be_met_is_refused_alone(
    make_engine: MakeEngine, prompt: tuple[int, ...], seed: int, message: str
) -> None:
    engine, few = make_engine(max_length=32), Sampling(max_tokens=3)
    fine, refused = outcomes(engine.generate(PROMPT, few, seed=0), engine.generate(prompt, few, seed=seed))
    assert isinstance(fine, Completion) and isinstance(refused, ConfigError) and message in str(refused)


def test_the_longest_request_that_fits_is_met(make_engine: MakeEngine) -> None:
    assert len(ask(make_engine(max_length=32), (1,) * 29, max_tokens=3).token_ids) == 3


def test_an_engine_needs_our_attention_and_a_slot(reference: Any, make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="attn_implementation"):
        TransformersEngine(reference)
    with pytest.raises(ConfigError, match="slots is 0"):
        make_engine(slots=0)
