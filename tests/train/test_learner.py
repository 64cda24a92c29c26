"""What the learner can be told to do beside its updates: compute activations again, train adapters.

``model.dtype`` is the type of computation: what is trained and saved is float32, so that small steps add up.
"""

import asyncio
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.batch import as_batch
from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.models.load import ROUNDING, cast_copy
from agentrl.models.lora import add_adapters
from agentrl.models.tiny import make_model
from agentrl.train.learner import Learner
from agentrl.train.score import score
from agentrl.types import Group, Segment

from ..engines.asking import ragged, together
from .conftest import Make, trajectory
from .test_score import OPTIM, batch_of

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = [[3, 4], [7, 2, 3, 5, 1], [2, 30, 8, 1], [5, 9]]
MakeLearner = Callable[..., Learner]


@pytest.fixture
def learner(model: Any) -> MakeLearner:
    """Make a learner of a copy of the model: ``learner(rank=2)``."""

    def make(*, rank: int = 0, dtype: str = "float32", **options: Any) -> Learner:
        own = copy.deepcopy(model)
        if rank:
            add_adapters(own, rank=rank, alpha=rank, targets=(), base="base", seed=0)
        return Learner(own, OPTIM.model_copy(update=options), temperature=0.7, dtype=dtype)

    return make


def update(learner: Learner, rate: float = 1e-3) -> list[Tensor]:
    """One update on two packs or more; give the gradients that the optimizer saw."""
    batch, seen = batch_of(SHAPES), list[Tensor]()
    packs = learner.packs(batch, range(len(batch)))
    assert len(packs) > 1
    hook = learner.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(weight.grad.clone() for weight in learner.trained)
    )
    learner.update(packs, lambda _, stats: -(stats.logp * torch.linspace(-1, 2, len(stats.logp))).sum(), rate)
    hook.remove()
    return seen


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_computed_again_give_the_same_gradients(learner: MakeLearner, dtype: str, rank: int) -> None:
    keeping, again = learner(dtype=dtype, rank=rank), learner(dtype=dtype, rank=rank, gradient_checkpointing=True)
    layer, calls = again.model.model.layers[1].mlp, list[bool]()
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    for _ in range(2):
        # To the last bit: a run may change this setting when it goes on.
        for mine, theirs in zip(update(keeping), update(again), strict=True):
            assert torch.equal(mine, theirs) and mine.dtype == torch.float32
    packs = len(again.packs(batch_of(SHAPES), range(len(SHAPES))))
    assert len(calls) == 2 * 2 * packs, "each layer runs twice for each pack of each update"
    assert not again.model.model.layers[1].self_attn.training, "dropout stays off"


def test_a_model_that_cannot_compute_again_is_refused(learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Qwen3ForCausalLM.supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match=r"optim.gradient_checkpointing must be false for Qwen3ForCausalLM"):
        learner(gradient_checkpointing=True)


def modules() -> int:
    """All there are in this process."""
    return sum(issubclass(type(entry), torch.nn.Module) for entry in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_all_that_moves_and_their_base_is_the_reference(
    learner: MakeLearner, model: Any, dtype: str
) -> None:
    made, copied = (learner(rank=2, dtype=dtype, weight_decay=0.1) for _ in range(2))
    weights = {name: weight.clone() for name, weight in made.model.named_parameters()}
    copied.keep_reference(model)
    before = [made.score_reference(batch_of(SHAPES)), made.score(batch_of(SHAPES)).logp]
    for tuned in (made, copied):
        for _ in range(2):  # A has no gradient as long as B is 0
            update(tuned, 1e-2)
    moved = {name for name, weight in made.model.named_parameters() if not torch.equal(weight, weights[name])}
    assert moved == {name for name in weights if ".lora_" in name}
    assert len(made.optimizer.state) == len(moved) == len(made.trained)
    held = modules()
    wanted = copied.score_reference(batch_of(SHAPES))
    torch.testing.assert_close(made.score_reference(batch_of(SHAPES)), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(before[0], wanted, atol=1e-6, rtol=0)
    assert modules() == held, "there is no second model"
    # The adapters are on again, and learn on.
    assert float((made.score(batch_of(SHAPES)).logp - before[1]).abs().max()) > 0.01
    assert all(torch.equal(*pair) for pair in zip(update(made), update(copied), strict=True))
    monkey = made.model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.score_reference(batch_of(SHAPES))
    monkey.remove()
    assert all(torch.equal(*pair) for pair in zip(update(made), update(copied), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_steps_change_nearly_every_weight(small: Make, dtype: str) -> None:
    """In bfloat16 an update of 1e-6 moves one weight in fifty: the others are too large to feel it."""
    made = small(f"model.dtype={dtype}", "optim.lr=1e-6", "optim.warmup=0", "rollout.temperature=1.0")
    own = cast_copy(made.parts.model, getattr(torch, dtype))
    engine = TransformersEngine(own, slots=12, max_length=256, native=False)
    trainer = made.on(engine).trainer()
    before = copy.deepcopy(dict(made.parts.model.named_parameters()))
    for number in (1, 2):
        result = asyncio.run(trainer.step(number))
        assert result.metrics["grad_norm"] > 0
    moved = total = coarse = 0
    for name, weights in made.parts.model.named_parameters():
        assert weights.dtype == torch.float32
        seen = weights.grad is None and trainer.learner.optimizer.state[weights]["exp_avg"] != 0
        moved += int(((weights != before[name]) & seen).sum())
        total += int(seen.sum())
        coarse += int((weights.bfloat16() != before[name].bfloat16()).sum())
    assert moved > 0.99 * total > 0.9 * 0.99 * sum(weights.numel() for weights in before.values())
    assert coarse < 0.2 * total, "bfloat16 alone would show these steps: they are no test of it"
    # The engine samples from what was trained.
    sampled = dict(engine._compute._model.named_parameters())
    assert all(torch.equal(sampled[name], w.to(sampled[name].dtype)) for name, w in made.parts.model.named_parameters())


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_engine_and_trainer_are_as_near_as_measured(tokenizer: Any, dtype: torch.dtype, largest: float) -> None:
    """The figures beside ``ROUNDING``, on a model as it is initialised, at another temperature than 1."""
    model = make_model(tokenizer, hidden=64, layers=4, heads=4, seed=0)
    engine = TransformersEngine(cast_copy(model, dtype), slots=16, max_length=256)
    assert engine.rounding == ROUNDING[dtype] >= 5 * largest, "the check must stay silent on rounding alone"
    prompts = ragged(16)
    done = together(*(engine.generate(prompt, Sampling(temperature=0.7, max_tokens=64), seed=1) for prompt in prompts))
    answers = (Segment("policy", answer.token_ids, answer.logprobs, 0) for answer in done)
    openings = (Segment("prompt", prompt) for prompt in prompts)
    batch = as_batch([Group((trajectory(*segments),)) for segments in zip(openings, answers, strict=True)])
    with torch.no_grad():
        apart = score(model, batch, temperature=0.7, dtype=dtype).logp.double() - batch.sampler_logp
    assert float(apart.abs().max()) < largest
    # No bias: errors of a row add up as independent ones, √n times that of a token.
    assert abs(float(apart.mean())) < 4 * float(apart.std()) / len(apart) ** 0.5
