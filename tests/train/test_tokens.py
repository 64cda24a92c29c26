"""What a step records of each sampled token, against loops over single rows."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.runs.records import TRAINING, read_episodes, write_episodes
from agentrl.types import Trajectory

from ..runs.origins import ORIGIN, Signs
from .conftest import Make
from .test_trainer import energy_of, logp_of, step, trainer_of, weights_of

MANY = ("optim.minibatches=2", "optim.epochs=2", "optim.lr=3e-3", "algo.loss=ctpo", "algo.energy_ratio=false")


def near(values: Any, wanted: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float32), wanted.detach().float(), rtol=1e-3, atol=atol)


def test_each_token_s_numbers_are_those_of_its_first_pass(small: Make, reference: Any, tmp_path: Path) -> None:
    run = small("algo.advantage=otb", *MANY)
    trainer, _ = trainer_of(run)
    after: list[dict[str, Tensor]] = []

    def keep(*_: Any) -> None:
        after.append(weights_of(run))

    trainer.learner.optimizer.register_step_post_hook(keep)
    result = step(trainer)
    path = tmp_path / "e.jsonl"
    write_episodes(path, result.trajectories, Signs(), ORIGIN, result.advantages, result.record.by_episode())
    moved = copy.deepcopy(reference)
    moved.load_state_dict(after[0], strict=False)
    seen, clipped = {"first": 0, "second": 0}, 0
    for record in read_episodes(path):
        told, episode = record.training, record.trajectory
        assert set(told) == set(TRAINING) and record.advantages is not None
        old = logp_of(reference, episode)
        near(told["old_logp"], old)
        # A row of the first minibatch met the policy as it was; one of the second met it after one update.
        ratio = logp_of(moved, episode) - old
        first = max(map(abs, told["log_ratio"])) < 1e-5
        seen["first" if first else "second"] += 1
        near(told["log_ratio"], torch.zeros_like(ratio) if first else ratio)
        total = torch.tensor(told["log_ratio"]).cumsum(0)
        near(told["cumulative_log_ratio"], total)
        near(told["realized_energy"], energy_of(reference, episode).cumsum(0), 1e-3)
        near([b + a for b, a in zip(told["baseline"], record.advantages, strict=True)], to_go(episode))
        for t, (shift, cut, credit) in enumerate(zip(total, told["clipped"], record.advantages, strict=True), start=1):
            low, high, dual = (width * t**0.5 for width in (-0.025, 0.05, 0.05))
            out = float(shift) > high if credit > 0 else not low <= float(shift) <= dual
            assert cut == (out and credit != 0) or abs(float(shift) - (low if shift < 0 else high)) < 1e-4
            clipped += int(cut)
    assert all(seen.values()) and clipped


def to_go(episode: Trajectory) -> Tensor:
    """The rewards from each sampled token on."""
    lengths = [len(segment.token_ids) for segment in episode.sampled]
    return torch.tensor([sum(episode.rewards[turn:]) for turn, length in enumerate(lengths) for _ in range(length)])


def test_rows_that_are_not_trained_on_lack_what_updates_tell(small: Make) -> None:
    rejecting = ('algo.rejection={"token"=[0.0,1e-9]}', "optim.minibatches=1", "algo.advantage=group_mean")
    told = step(trainer_of(small(*rejecting))[0]).record.by_episode()
    assert told and all(set(one) == {"old_logp", "entropy"} for one in told)
