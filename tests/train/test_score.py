"""Scoring: the statistics of sampled tokens in a ragged pack, against full logits row by row.

What rows share up to where they fork is computed once, and nobody's scores or gradients change by that.
"""

import copy
import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GraniteConfig, Lfm2Config

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch, as_batch
from agentrl.config import OptimSettings
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import UsageError
from agentrl.models import attention
from agentrl.models.attention import NAME
from agentrl.models.load import _check_rows, cast_copy, load_model
from agentrl.train.learner import Learner
from agentrl.train.score import hidden_states, score
from agentrl.types import Group, Segment, Trajectory

from ..algos.scoring import assert_stats_close, of_logits
from ..engines.asking import PROMPT, ask, expected_logprobs
from .conftest import trajectory, turn

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIM = OptimSettings(max_grad_norm=1e9, max_tokens=45)
SHAPES = [[3, 4], [1, 1], [7, 2, 3, 5, 1], [2], [2, 30, 8, 1]]
"""For each row the lengths of prompt, turn, tool answer, turn …"""


def batch_of(shapes: list[list[int]]) -> Batch:
    groups: list[Group] = []
    for number, shape in enumerate(shapes):
        segments = [
            turn(tokens) if i % 2 else Segment("tool" if i else "prompt", tokens)
            for i, length in enumerate(shape)
            for tokens in [tuple((31 * number + 17 * i + 7 * j) % 250 + 3 for j in range(length))]
        ]
        groups.append(Group((trajectory(*segments, task_id=str(number)),)))
    return as_batch(groups)


def full_stats(model: Any, batch: Batch, temperature: float) -> TokenStats:
    """The statistics from the whole [n, V] logits of each row by itself."""
    stats: list[TokenStats] = []
    for row in range(len(batch)):
        begin, end = batch.row_starts[row : row + 2].tolist()
        tokens, sampled = batch.tokens[begin:end], batch.sampled[batch.starts[row] : batch.starts[row + 1]] - begin
        stats.append(of_logits(model(tokens[None]).logits[0, sampled - 1] / temperature, tokens[sampled]))
    return TokenStats(*map(torch.cat, zip(*stats, strict=True)))


def test_only_the_places_before_sampled_tokens_meet_the_vocabulary(model: Any) -> None:
    batch = batch_of(SHAPES)
    hidden = hidden_states(model, batch)
    assert hidden.shape == (len(batch.sampled), model.config.hidden_size)
    assert len(batch.sampled) == sum(length for shape in SHAPES for length in shape[1::2]) < len(batch.tokens)


def test_a_batch_without_a_sampled_token_has_no_scores(model: Any) -> None:
    assert [len(part) for part in score(model, batch_of([[2], [4]]), temperature=1.0)] == [0, 0, 0]


def test_a_model_comes_back_from_its_folder(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config._attn_implementation == NAME
    batch = batch_of(SHAPES)
    with torch.no_grad():
        assert torch.equal(score(loaded, batch, temperature=1.0).logp, score(model, batch, temperature=1.0).logp)
    loaded.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert load_model(tmp_path / "half").dtype == torch.float32


def test_half_precision_is_that_of_a_model_cast_to_it_and_its_gradients_are_whole(model: Any) -> None:
    batch, whole, half = batch_of(SHAPES), copy.deepcopy(model), cast_copy(model, torch.bfloat16)
    got = score(whole, batch, temperature=0.7, dtype=torch.bfloat16)
    wanted = score(half, batch, temperature=0.7, dtype=torch.bfloat16)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    assert not torch.equal(got.logp, score(whole, batch, temperature=0.7).logp)
    got.logp.sum().backward()
    wanted.logp.sum().backward()
    for mine, theirs in zip(whole.parameters(), half.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype == mine.dtype == torch.float32
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad.float(), rtol=0.1, atol=0.02 * float(mine.grad.abs().max()))


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "64"}, {"num_attention_heads": 0}, {"hidden_act": "nope"}, {"vocab_size": -1}]
)
def test_a_config_of_anyones_is_refused_in_a_sentence(model: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    model.config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}), encoding="utf-8")
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match=r"no model can be loaded from .*: \w"):
            load_model(folder)


def test_pickled_weights_run_nothing(model: Any, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    model.config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UsageError, match="no model can be loaded from"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_called_that(model: Any, tmp_path: Path, value: float) -> None:
    own = copy.deepcopy(model)
    with torch.no_grad():
        own.model.norm.weight[3] = value
    own.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"the weights model.norm.weight of .* hold NaN or infinity"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="no model can be loaded from"):
        load_model(tmp_path)


TINY = {
    **{"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "pad_token_id": 0},
    **{"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2},
}
CAPPED = Gemma3TextConfig(
    **TINY, layer_types=["full_attention"] * 2, final_logit_softcapping=0.8, initializer_range=0.5
)
SCALED = GraniteConfig(**TINY, logits_scaling=8.0, initializer_range=1.0)


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [*(("plain", temperature) for temperature in (0.7, 1.0, 1.3)), ("biased", 1.3), (CAPPED, 1.3), (SCALED, 1.3)],
)
def test_a_pack_is_scored_as_its_rows_are_whatever_a_model_does_to_its_logits(
    model: Any, reference: Any, tmp_path: Path, kind: Any, temperature: float
) -> None:
    if kind in (CAPPED, SCALED):
        # One in fifteen of such models makes more of rounding than the gradients below may differ.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(kind).save_pretrained(tmp_path)
        ours, theirs = load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        ours, theirs = copy.deepcopy(model), copy.deepcopy(reference)
        for own in (ours, theirs) if kind == "biased" else ():
            own.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, own.config.vocab_size))
    batch = batch_of(SHAPES)
    largest = theirs(batch.tokens[None]).logits.abs().max()
    assert kind is not CAPPED or largest > 0.7, "the cap would not matter"
    got, expected = score(ours, batch, temperature=temperature), full_stats(theirs, batch, temperature)
    assert_stats_close(got, expected, 1e-4)
    got.logp.sum().backward()
    expected.logp.sum().backward()
    for (name, mine), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    # What an engine samples has the log-probs that transformers gives it.
    completion = ask(TransformersEngine(ours), seed=1, max_tokens=12, temperature=temperature)
    wanted = expected_logprobs(theirs, PROMPT, completion, temperature)
    assert completion.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_model_that_changes_its_logits_otherwise_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's product is taken for logits, so its log-probs would be those of another model."""
    _check_rows(model)
    forward = type(model).forward

    def halved(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        out.logits = out.logits / 2
        return out

    monkeypatch.setattr(type(model), "forward", halved)
    with pytest.raises(UsageError, match="changes its logits in a way of its own"):
        _check_rows(model)


def test_a_model_with_a_state_beside_attention_is_refused(tmp_path: Path) -> None:
    """A row packed behind another would begin with that one's state."""
    config = Lfm2Config(**TINY, layer_types=["conv", "full_attention"], initializer_range=1.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="carries a state from one token to the next"):
        load_model(tmp_path)


ASKED = tuple(range(40, 52))


def member(task: str, prompt: Sequence[int], answer: Sequence[int], tool: Sequence[int] = ()) -> Trajectory:
    """An episode of one turn; ``tool`` stands between the prompt and the turn."""
    segments = [Segment("prompt", tuple(prompt)), *([Segment("tool", tuple(tool))] if tool else [])]
    return trajectory(*segments, *([turn(answer)] if answer else []), task_id=task)


def groups_of_three() -> Batch:
    """Twelve prompt tokens thrice and turns of 1, 7 and 40 that begin alike; two thrice, and turns that do not."""
    long = [member("a", ASKED, range(60, 60 + length)) for length in (1, 40, 7)]
    short = [member("b", (5, 6), range(70 + length, 70 + 2 * length)) for length in (30, 2, 3)]
    return as_batch([Group(tuple(long)), Group(tuple(short))])


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """How many tokens each forward pass computes."""
    counts: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *parts: counts.append(parts[1][0].numel()))
    yield counts
    handle.remove()


def assert_alike(model: Any, batch: Batch, shared: int) -> None:
    """The pack scores as its rows do by themselves, with the same gradients, and computes so many tokens less."""
    rows = [part.tolist() for part in batch.tokens.split(batch.row_starts.diff().tolist())]
    computed = len({tuple(row[: position + 1]) for row in rows for position in range(len(row))})
    assert computed == len(batch.tokens) - shared
    together, alone = copy.deepcopy(model), copy.deepcopy(model)
    weight = torch.linspace(-1, 1, len(batch.sampled))
    with counted(together) as counts:
        logp = score(together, batch, temperature=1.2).logp
    assert counts == [computed]
    rows = torch.cat([score(alone, batch.split(100, [row])[0], temperature=1.2).logp for row in range(len(batch))])
    torch.testing.assert_close(logp, rows, rtol=1e-4, atol=1e-4)
    (logp * weight).sum().backward()
    (rows * weight).sum().backward()
    for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def forks() -> Batch:
    """Forks in the prompt, in a tool's answer and in a turn; one row is a whole other one's beginning."""
    tool_tokens = [(80, 81), (80, 82), (80, 81), (80, 81)]
    turns = [(60, 61, 62), (60, 61, 62), (60, 61), (60, 63, 64)]
    return as_batch([Group(tuple(member("a", ASKED, *turn) for turn in zip(turns, tool_tokens, strict=True)))])


def two_groups(prompt: Sequence[int], other: Sequence[int]) -> Batch:
    return as_batch(
        [Group((member(task, tokens, (60, last)),)) for task, tokens, last in (("a", prompt, 61), ("b", other, 62))]
    )


def with_a_silent_row() -> Batch:
    return as_batch([Group((member("a", ASKED, (60, 61)), member("a", ASKED, (62,)), member("a", ASKED, ())))])


@pytest.mark.parametrize(
    ("batch", "order", "shared"),
    [
        pytest.param(groups_of_three(), range(6), 2 * len(ASKED) + 1 + 7 + 2 * 2, id="each prompt once per pack"),
        pytest.param(groups_of_three(), [4, 2, 0, 5], len(ASKED) + 1 + 2, id="with whichever of a group comes first"),
        pytest.param(two_groups(ASKED, ASKED), (0, 1), len(ASKED) + 1, id="groups with equal prompts"),
        pytest.param(two_groups(ASKED, (*ASKED[:3], 99, *ASKED[4:])), (0, 1), 3, id="nothing after another token"),
        pytest.param(forks(), range(4), 3 * len(ASKED) + 3 + 2 + 2 + 1, id="what was told and said until they fork"),
        pytest.param(with_a_silent_row(), (0, 1, 2), 2 * len(ASKED), id="a row that never spoke, the last"),
        pytest.param(with_a_silent_row(), (2, 1, 0), 2 * len(ASKED), id="a row that never spoke, the first"),
    ],
)
def test_rows_share_what_they_begin_with(model: Any, batch: Batch, order: Sequence[int], shared: int) -> None:
    (pack,) = batch.split(1000, order)
    assert_alike(model, pack, shared)


@pytest.mark.parametrize("window", [None, 5])
def test_long_rows_share_in_any_order(model: Any, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Each row attends by itself, four queries at a time, over what others have computed."""
    monkeypatch.setattr(attention, "_LONG", 14)
    monkeypatch.setattr(attention, "_QUERIES", 4)
    own = copy.deepcopy(model)
    for layer in own.model.layers:
        layer.self_attn.sliding_window = window
    turns = [(60, 61, 62), (60, 61, 70, 71, 72, 73), (60, 61, 70, 75), (66,), ()]
    batch = as_batch([Group(tuple(member("a", ASKED, turn) for turn in turns))])
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 3, 1)):
        (pack,) = batch.split(1000, order)
        assert_alike(own, pack, 4 * len(ASKED) + 2 * 2 + 1)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 5e-6), (torch.float64, 1e-6)])
def test_an_update_of_packs_is_that_of_rows(model: Any, reference: Any, dtype: torch.dtype, rounding: float) -> None:
    """Against transformers' own attention and whole logits, a row at a time: nothing shared, nothing packed.

    Its norms are computed in float32 whatever the weights are.
    """
    tokens = tuple(range(60, 100))
    late = [member("late", ASKED, (*tokens[:forks], 100, 101 + forks)) for forks in (36, 38, 38, 40)]
    early = [member("early", ASKED[:9], (120 + index, *tokens[:20])) for index in range(4)]
    batch = as_batch([Group(tuple(late)), Group(tuple(early))])
    weight = torch.linspace(-1, 2, len(batch.sampled), dtype=dtype)
    ours, theirs = copy.deepcopy(model).to(dtype), copy.deepcopy(reference).to(dtype)
    optim = OPTIM.model_copy(update={"max_tokens": 150})
    learner = Learner(ours, optim, temperature=0.7, dtype=str(dtype).removeprefix("torch."))
    seen: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.extend(weight.grad.clone() for weight in learner.trained))
    packs = learner.packs(batch, range(len(batch)))
    with counted(ours) as counts:
        learner.update(packs, lambda number, stats: (stats.logp * weight[packs[number].index]).sum(), 0.0)
    assert len(counts) == len(packs) > 1 and sum(counts) < 0.75 * len(batch.tokens)
    (full_stats(theirs, batch, 0.7).logp * weight).sum().backward()
    for mine, wanted in zip(seen, theirs.parameters(), strict=True):
        assert (mine - wanted.grad).abs().max() < rounding * wanted.grad.abs().max()
