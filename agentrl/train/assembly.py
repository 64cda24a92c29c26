"""Assemble what a run is made of: its model, and the source of its groups."""

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
class RunParts:
    """The parts that a run is made of."""

    policy: Policy
    """The model that is trained, and its tokenizer."""
    rollouts: RolloutSource
    """The source of the groups of each step."""
    live: Live | None = None
    """The environments; None where all episodes were played before."""
    decode_step: str = ""
    """Name of the code that computes the embedded engine's steps, whose bits follow from it; empty elsewhere."""
    update: str
    """Name of the code that computes attention in updates and scores, whose bits follow from it."""

    @property
    def made_by(self) -> dict[str, str]:
        """Both names, for the versions that the run's folder records."""
        return {name: value for name, value in (("decode_step", self.decode_step), ("update", self.update)) if value}


def assemble_live(config: Config, sources: Sources, path: Path | None = None) -> RunParts:
    """Assemble a run that plays its episodes; the model is ``model.path``, or the checkpoint at ``path``."""
    parts = assemble(config, sources.train, path, fleet=True)
    live = Live(config, parts, sources)
    step = getattr(parts.engine, "step", "")
    return RunParts(
        policy=parts, rollouts=live.rollouts, live=live, decode_step=step, update=_attention_of(config, parts)
    )


def assemble_saved(files: Sequence[Path], config: Config, path: Path | None = None) -> RunParts:
    """Assemble a run on saved episodes; the model is ``model.path``, or the checkpoint at ``path``.

    Raises:
        UsageError: the episodes do not fit the settings or the model.
        TrajectoryError: a file holds anything but episodes.
    """
    check_training_config(config)
    find_loggers(config.log.to)
    rollouts = SavedEpisodes(files, config)
    policy = load_policy(config, path=path)
    rollouts.check_fit(policy)
    return RunParts(policy=policy, rollouts=rollouts, update=_attention_of(config, policy))


def _attention_of(config: Config, policy: Policy) -> str:
    return name_of(policy.model.device, getattr(torch, config.model.dtype))
