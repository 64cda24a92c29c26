"""Only what the policy sampled is trained on: shown on real episodes with the real tool, from text to gradient.

One group of a two-step problem: members that a random model plays, and one that a gold player does, whose turns call
the Python tool, read its answers and hear the user's second question.

Shapes: S sampled tokens of all rows, T tokens of the pack, V vocabulary.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

import agentrl  # noqa: F401  # registers the environments
from agentrl.algos.advantages import otb
from agentrl.algos.head import token_energy
from agentrl.algos.losses import LossOut, ctpo
from agentrl.batch import Batch, as_batch
from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.engines.scripted import ScriptedEngine
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.attention import PackedRows
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec, TaskSource
from agentrl.rollout.player import EpisodeLimits
from agentrl.sandboxes import SandboxUnavailable
from agentrl.toolenv.tools.python import shared_sandbox
from agentrl.train.invariants import check_trained_tokens
from agentrl.train.score import score
from agentrl.types import Group, Segment, Trajectory

from ..engines.around import Around, Overheard

GOLD_SEED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
    """A group of real episodes, and what the engines said while they were played."""

    group: Group
    turns: Sequence[tuple[tuple[int, ...], Completion]]
    """Each prompt, and what came."""


class GoldLast(Around):
    """Plays the gold turns in the episode whose seed is ``GOLD_SEED``."""

    def __init__(self, engine: Engine, gold: Sequence[Sequence[int]]) -> None:
        super().__init__(engine)
        self.gold, self.seeds = ScriptedEngine(gold), {derive_seed(GOLD_SEED, turn) for turn in range(len(gold))}

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        return await (self.gold if seed in self.seeds else self.engine).generate(prompt_ids, sampling, seed=seed)


@pytest.fixture(scope="module")
def played(tokenizer: Any, model: Any, one_thread: None) -> Played:
    try:
        shared_sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    renderer = Renderer(tokenizer)
    source = TaskSource("agentrl/Arithmetic-v0", {"level": 4}, "train")
    gold = source.gold(source.tasks[0], "the test plays", "")
    engine = Overheard(GoldLast(TransformersEngine(model, slots=4), [renderer.turn(turn) for turn in gold]))
    limits = EpisodeLimits(episode_tokens=1500)
    collector = Collector({"": ("agentrl/Arithmetic-v0", {"level": 4})}, renderer, limits=limits, concurrency=1)
    task = source.tasks[0].id
    members = [[EpisodeSpec(task_id=task, seed=seed) for seed in range(GOLD_SEED + 1)]]
    with closing(collector):
        collected = asyncio.run(collector.collect(members, engine, Sampling(max_tokens=120)))
    return Played(group=collected.groups[0], turns=[(prompt, done) for prompt, _, _, done in engine.heard])


def full_logits(model: Any, batch: Batch) -> Tensor:
    """The logits of every token of the pack, a leaf [T, V]."""
    with torch.no_grad():
        plan = PackedRows(batch.row_starts)
        positions = batch.positions[None]
        out = model.base_model(batch.tokens[None], position_ids=positions, use_cache=False, agentrl_plan=plan)
        return model.get_output_embeddings()(out.last_hidden_state[0]).requires_grad_()


def sampled_logp(logits: Tensor, batch: Batch) -> Tensor:
    rows = torch.log_softmax(logits, dim=-1)[batch.sampled - 1]
    return rows.gather(1, batch.tokens[batch.sampled][:, None])[:, 0]


def loss_of(logits: Tensor, batch: Batch) -> tuple[LossOut, Tensor]:
    """CTPO with OTB advantages, its old log-probs a little off; and the advantages [S]."""
    logp = sampled_logp(logits, batch)
    probs = torch.softmax(logits.detach(), dim=-1)[batch.sampled - 1]
    energy = token_energy(logp.detach(), probs.square().sum(-1))
    advantages = otb(batch.rewards, energy, batch.starts, batch.group)
    old = logp.detach() + 1e-4 * torch.sin(torch.arange(len(logp)))
    return ctpo(logp, old, advantages, batch.starts), advantages


def with_tools(group: Group, change: Callable[[Segment], Segment]) -> Group:
    def changed(trajectory: Trajectory) -> Trajectory:
        segments = tuple(change(segment) if segment.source == "tool" else segment for segment in trajectory.segments)
        return dataclasses.replace(trajectory, segments=segments)

    return Group(tuple(changed(trajectory) for trajectory in group))


def test_the_episodes_are_what_this_file_is_about(played: Played) -> None:
    gold = played.group.trajectories[GOLD_SEED]
    assert gold.ret == 1.0 and all(run.ok for run in gold.tool_runs) and len(gold.tool_runs) == 2
    assert {segment.source for segment in gold.segments} == {"prompt", "policy", "template", "tool"}
    assert [message["role"] for message in gold.messages][1:] == [
        *("user", "assistant", "tool", "user", "assistant", "tool", "assistant")
    ]
    assert all(trajectory.n_sampled > 0 for trajectory in played.group)


def test_tokens_trained_on_are_the_tokens_that_were_sampled(played: Played) -> None:
    batch = as_batch([played.group])
    sampled = [token for _, completion in played.turns for token in completion.token_ids]
    assert batch.tokens[batch.sampled].tolist() == sampled
    assert batch.sampler_logp.tolist() == pytest.approx([lp for _, turn in played.turns for lp in turn.logprobs])
    check_trained_tokens([played.group], batch.tokens, batch.in_time(batch.sampled))


def test_only_sampled_tokens_have_a_gradient_at_the_logits(played: Played, model: Any) -> None:
    batch = as_batch([played.group])
    logits = full_logits(model, batch)
    out, advantages = loss_of(logits, batch)
    out.loss.backward()
    assert logits.grad is not None
    predicts = torch.zeros(len(batch.tokens), dtype=torch.bool)
    predicts[batch.sampled - 1] = True
    assert 0 < predicts.sum() < len(batch.tokens)
    assert torch.count_nonzero(logits.grad[~predicts]) == 0, "prompt, template and tool tokens: exactly zero"
    trained = (logits.grad[batch.sampled - 1] != 0).any(1)
    # Where one member is left of its group and all its reward is behind it, nothing is there to learn.
    assert torch.equal(trained, advantages != 0) and trained.any()


def test_a_tools_words_are_context_for_the_model_and_no_term_of_the_loss(played: Played, model: Any) -> None:
    """With the logits held fixed nothing changes, bit for bit, when the tool had said something else."""
    batch = as_batch([played.group])
    other = as_batch([with_tools(played.group, lambda s: Segment("tool", tuple(token + 1 for token in s.token_ids)))])
    assert not torch.equal(batch.tokens, other.tokens) and batch.tokens.shape == other.tokens.shape
    logits = full_logits(model, batch)
    (loss, credit), (second, other_credit) = loss_of(logits, batch), loss_of(logits, other)
    assert torch.equal(loss.loss, second.loss) and torch.equal(credit, other_credit)
    assert all(torch.equal(loss.metrics[name], second.metrics[name]) for name in loss.metrics)
    gradients = [torch.autograd.grad(out.loss, logits)[0] for out in (loss, second)]
    assert torch.equal(*gradients)
    with torch.no_grad():
        before, after = (score(model, each, temperature=1.0).logp for each in (batch, other))
    gold = slice(int(batch.starts[GOLD_SEED]), None)
    first_turn = len(played.group.trajectories[GOLD_SEED].sampled[0].token_ids)
    torch.testing.assert_close(before[: gold.start + first_turn], after[: gold.start + first_turn])
    assert not torch.allclose(before[gold][first_turn:], after[gold][first_turn:])


@pytest.mark.parametrize("times", [0, 5])
def test_however_long_a_tool_talks_the_credit_stays(played: Played, times: int) -> None:
    """Positions t and the sums along an episode count sampled tokens only: these are all that advantages are told."""
    batch = as_batch([played.group])
    longer = as_batch([with_tools(played.group, lambda s: Segment("tool", s.token_ids * times))])
    assert len(batch.tokens) != len(longer.tokens)
    for name in ("starts", "group", "rewards", "sampler_logp", "index"):
        assert torch.equal(getattr(batch, name), getattr(longer, name))
