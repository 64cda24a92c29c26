"""Groups from files of saved episodes, in place of an engine and environments: each file is the batch of a step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from agentrl.batch import as_batch
from agentrl.config import Config
from agentrl.errors import TrajectoryError, UsageError
from agentrl.rollout.collected import Clock, Collected
from agentrl.runs.assemble import Policy
from agentrl.runs.records import Record, read_episodes
from agentrl.train.credit import ALONE, compares
from agentrl.train.groups import RolloutSource, StepGroups
from agentrl.train.learner import Learner
from agentrl.types import Group, Origin, Segment, Trajectory, flatten


class SavedEpisodes(RolloutSource):
    """A ``RolloutSource`` of episodes that were played before, each file the batch of a step.

    The episodes of a file that began with the same prompt of the same task are a group, in the order of the file. They
    may be off-policy, sampled by other weights than the model's: ``algo.correction`` weighs them as it weighs those of
    an engine.

    Args:
        files: one for each step, in order.
        config: the run's settings.

    Raises:
        UsageError: a file can't be read, its episodes were played in another environment or with other settings than
            the config's, or the config's advantage finds nothing to compare.
        TrajectoryError: a file holds anything but episodes.
    """

    def __init__(self, files: Sequence[Path], config: Config) -> None:
        self._files, self._config = files, config
        self.origins = self._origins = dict[str, Origin]()
        self.rounding, self.steps = math.inf, len(files)
        self._texts: dict[tuple[int, str], Path] = {}
        if config.optim.steps < len(files):
            raise UsageError(
                f"--episodes names {len(files)} files, a step each, and optim.steps is {config.optim.steps}: raise "
                "it, or name fewer"
            )
        self._groups = [self._read(file) for file in files]

    def check_fit(self, policy: Policy) -> None:
        """Check that a model and its tokenizer can have sampled the episodes.

        Raises:
            UsageError: they can't, or an episode does not fit into ``optim.max_tokens``.
        """
        size, most = len(policy.model.get_input_embeddings().weight), self._config.optim.max_tokens  # pyright: ignore
        for (token, text), file in self._texts.items():
            if not 0 <= token < size:
                raise UsageError(f"{file} has the token {token}, and the model of model.path only {size}: set that to "
                                 "the model that sampled it")  # fmt: skip
            if (own := policy.tokenizer.decode([token])) != text:
                raise UsageError(
                    f"{file} was sampled with another tokenizer: token {token} is {text!r} there, and {own!r} for that "
                    "of model.path"
                )
        for file, groups in zip(self._files, self._groups, strict=True):
            try:
                batch = as_batch(groups)
                batch.split(most)
            except TrajectoryError as error:
                raise UsageError(f"{file} can't be trained on: {error}") from error
            if not len(batch.sampled):
                raise UsageError(f"{file} has no sampled token, so there is nothing to learn from it")

    async def batch(self, number: int) -> StepGroups:
        """Return the groups of the file of step ``number``."""
        groups = tuple(self._groups[number - 1])
        collected = Collected(groups=groups, faults=0, lost=0, seconds=0.0, clock=Clock(), sandbox={})
        return StepGroups(collected=collected, trained=groups)

    def check(self, groups: Sequence[Group]) -> Tensor:
        """Check nothing, since the files were checked as they were read; all tokens count as new."""
        return torch.zeros(sum(episode.n_sampled for episode in flatten(groups)), dtype=torch.long)

    async def published(self, learner: Learner, version: int) -> None:
        """Do nothing, since no engine samples."""

    def state(self) -> Mapping[str, object]:
        """Return the names of the files, with which a resumed run continues."""
        return {"episodes": [str(file.resolve()) for file in self._files]}

    def _read(self, file: Path) -> list[Group]:
        episodes_by_prompt: dict[tuple[str, str, Segment], list[Trajectory]] = {}
        for record in self._records(file):
            episode = record.trajectory
            episodes_by_prompt.setdefault((episode.env, episode.task_id, episode.segments[0]), []).append(episode)
        groups = [Group(tuple(episodes)) for episodes in episodes_by_prompt.values()]
        if not groups:
            raise UsageError(f"{file} holds no episode")
        if compares(self._config.algo) and max(map(len, groups)) == 1:
            raise UsageError(
                f"{file} has one episode of each task, and algo.advantage={self._config.algo.advantage!r} compares "
                f"several: play them with --attempts 2 or more, or {ALONE}"
            )
        return groups

    def _records(self, file: Path) -> Iterator[Record]:
        try:
            for record in read_episodes(file):
                self._check_origin(file, record)
                for segment, texts in zip(record.trajectory.segments, record.pieces, strict=True):
                    self._texts |= dict.fromkeys(zip(segment.token_ids, texts, strict=True), file)
                yield record
        except OSError as error:
            raise UsageError(f"{str(file)!r} can't be read: {error.strerror}") from error

    def _check_origin(self, file: Path, record: Record) -> None:
        """Refuse an episode of another environment or other settings than the config's."""
        origin, name = record.origin, record.trajectory.env
        table = f"env.mix.{name}" if name else "env"
        env = self._config.env.played.get(name)
        rollout = self._config.rollout
        wanted = {
            f"{table}.id": (origin.env_id, env and env.id),
            f"{table}.args": (origin.env_args, env and env.args),
            "rollout.temperature": (origin.temperature, rollout.temperature),
            "rollout.turn_tokens": (origin.turn_tokens, rollout.turn_tokens),
        }
        for setting, (recorded, configured) in wanted.items():
            if recorded != configured:
                raise UsageError(
                    f"{file} was played with {setting}={recorded!r}, and the config has {configured!r}: set it so"
                )
        first_origin = self._origins.setdefault(name, origin)
        for field in fields(Origin):
            earlier, own = getattr(first_origin, field.name), getattr(origin, field.name)
            if earlier != own:
                raise UsageError(f"{file} has episodes of another {field.name} than before, {own!r} and {earlier!r}: "
                                 "train on them apart")  # fmt: skip
