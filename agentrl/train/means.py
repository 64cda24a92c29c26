"""What a run works with: its model, and where its groups come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.config import Config
from agentrl.models.native import name_of
from agentrl.runs.assemble import Policy, assemble, load_policy
from agentrl.runs.loggers import find_loggers
from agentrl.train.groups import RolloutSource
from agentrl.train.live import Live, Sources
from agentrl.train.saved import SavedEpisodes
from agentrl.train.step import check_training_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a run works with."""

    policy: Policy
    """The model that is trained, and its tokenizer."""
    rollouts: RolloutSource
    """Gives the groups of each step."""
    live: Live | None = None
    """The environments; None where all episodes were played before."""
    decode_step: str = ""
    """What computes the engine's steps, where it is the embedded one; its bits follow from that."""
    update: str
    """What computes attention in updates and scores; their bits follow from that."""

    @property
    def made_by(self) -> dict[str, str]:
        """What the run's record says of it."""
        return {name: value for name, value in (("decode_step", self.decode_step), ("update", self.update)) if value}


def live(config: Config, sources: Sources, path: Path | None = None) -> Means:
    """Assemble the means of a run that plays; the model is ``model.path``, or the checkpoint at ``path``."""
    parts = assemble(config, sources.train, path, fleet=True)
    played = Live(config, parts, sources)
    step = getattr(parts.engine, "step", "")
    return Means(policy=parts, rollouts=played.rollouts, live=played, decode_step=step, update=_update(config, parts))


def saved(files: Sequence[Path], config: Config, path: Path | None = None) -> Means:
    """Assemble the means of a run on saved episodes; the model is ``model.path``, or the checkpoint at ``path``.

    Raises:
        UsageError: the episodes do not fit the settings or the model.
        TrajectoryError: a file holds anything but episodes.
    """
    check_training_config(config)
    find_loggers(config.log.to)
    rollouts = SavedEpisodes(files, config)
    policy = load_policy(config, path=path)
    rollouts.check_fit(policy)
    return Means(policy=policy, rollouts=rollouts, update=_update(config, policy))


def _update(config: Config, policy: Policy) -> str:
    return name_of(policy.model.device, getattr(torch, config.model.dtype))
