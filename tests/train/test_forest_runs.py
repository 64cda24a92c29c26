"""Whole runs on episodes of two rows: they resume, and their saved episodes teach the same."""

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engines.base import Sampling
from agentrl.errors import UsageError
from agentrl.rollout.driver import StepDriver
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.policy import Policy
from agentrl.runs.checkpoint import load_unused
from agentrl.runs.folder import checkpoints
from agentrl.runs.records import read_episodes, write_episodes
from agentrl.segments import Row, complete_rows
from agentrl.toolenv.base import ToolEnv
from agentrl.train.run import resume, train
from agentrl.train.saved import SavedEpisodes
from agentrl.types import Segment

from ..forests import forest
from .conftest import Make, OnDisk, quiet, rows_of, same_weights

EVERY = ("optim.steps=3", "save.every=1", "save.episodes_every=1", "eval.tasks=1", "run.deterministic=true")


class Twice(StepDriver):
    """Plays the environment after a turn that nobody continues: the next turn begins another row."""

    async def play(self, env: ToolEnv, policy: Policy, spec: EpisodeSpec) -> None:
        messages, _ = await policy.run(env.reset, seed=spec.seed % 2**32, options={"task": spec.task_id})
        await policy.turn(messages)
        await super().play(env, policy, spec)


TWICE = f"rollout.driver={__name__}:Twice"


@pytest.mark.slow
def test_kept_and_saved_episodes_of_several_rows_are_those_that_were_played(on_disk: OnDisk) -> None:
    run = train(on_disk("run.name=lag", "rollout.overlap=lag", TWICE, *EVERY), quiet())
    unused = load_unused(checkpoints(run)[1])
    assert len(unused) == 12 and all(len(episode.rows) == 2 for episode in unused)
    trained = [record.trajectory for record in read_episodes(run / "episodes" / "step-000002.jsonl.zst")]
    assert unused == trained, "with the log-probs that they were trained with"
    cut = shutil.copytree(run, run.with_name("cut"))
    for path in checkpoints(cut)[2:]:
        shutil.rmtree(path)
    resume(cut, quiet())
    assert rows_of(cut) == rows_of(run) and len(rows_of(run)) == 3 and same_weights(run, cut)
    assert all(row["turns_mean"] == 2 and row["grad_norm"] > 0 for row in rows_of(run))


def test_groups_share_their_opening_and_each_row_has_to_fit(
    small: Make, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    run, rng = small("optim.steps=1"), random.Random(3)
    openings = [Segment("prompt", (5, 6)), Segment("prompt", (5, 7))]
    played = [forest(rng, openings[number % 2], 1 + number % 3) for number in range(6)]
    origin = run.mix.origins(Sampling(temperature=1.0, max_tokens=12))[""]
    file = tmp_path / "e.jsonl"
    policy: Any = SimpleNamespace(model=model, tokenizer=tokenizer)

    def saved(*overrides: str) -> SavedEpisodes:
        write_episodes(file, played, tokenizer, origin)
        return SavedEpisodes([file], small(*overrides, "optim.steps=1").config)

    groups = asyncio.run(saved().batch(1)).trained
    assert [list(group) for group in groups] == [played[::2], played[1::2]]
    longest = max(len(row) for episode in played for row in complete_rows(episode.rows))
    assert longest > max(len(row.token_ids) for episode in played for row in episode.rows)
    limits = f"optim.max_tokens={longest}", f"rollout.episode_tokens={longest}"
    saved(*limits).check_fit(policy)
    shorter = [limit.replace(str(longest), str(longest - 1)) for limit in limits]
    with pytest.raises(UsageError, match=f"of {longest} tokens does not fit into max_tokens={longest - 1}"):
        saved(*shorter).check_fit(policy)
    strange = Row((Segment("tool", (300,)),), 0, 2)
    played[0] = replace(played[0], segments=(), rows=(*played[0].rows, strange))
    with pytest.raises(UsageError, match=r"has the token 300, and the model of model\.path only 300"):
        saved().check_fit(policy)
