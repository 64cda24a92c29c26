"""``agentrl replay --agent``: start programs of agents again, whose requests the recorded turns answer."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from agentrl.config import Config, load_config
from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import FaultRateError, UsageError
from agentrl.eval.compare import parting
from agentrl.eval.replay import Change, Replayed, verdict
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec
from agentrl.runs.assemble import make_collector, make_renderer, run_tokenizer, task_mix, with_dialect
from agentrl.runs.records import Record
from agentrl.runs.settings import read_config

_WHAT = {"template": "observation", "policy": "turn"}
"""What differs, by the source of the first token that does; ``prompt``, ``tool`` and ``row`` are called so."""


def agent_config(path: Path) -> Config:
    """Read the settings of a run, or a settings file, that names an agent's program.

    Raises:
        UsageError: its driver starts none.
    """
    config = read_config(path) if path.is_dir() else load_config(path=path)
    driver = config.rollout.driver.name
    if driver in ("step", "serve"):
        raise UsageError(
            f"the driver of {str(path)!r} is {driver!r}, which starts no program: name the settings that the episodes "
            "were played with"
        )
    return with_dialect(config)


def replay_agents(records: Sequence[Record], config: Config) -> Iterator[Replayed]:
    """Play episodes of an agent's program again: its n-th request is answered by the n-th recorded turn.

    Programs that are not deterministic, or print times and random names, differ; the first difference is reported.
    Titles are not recorded: the turns of an agent that asks for some can't be told apart.

    Args:
        records: episodes of the config's environments.
        config: names the program, as ``rollout.driver``, and the model, whose tokenizer is used.

    Raises:
        UsageError: the tokenizer can't be loaded.
    """
    collectors, splits = dict[str, Collector](), dict.fromkeys(record.origin.split for record in records)
    mix = task_mix(config, next(iter(splits)))
    tokenizer = run_tokenizer(config, mix)
    renderer = make_renderer(config, tokenizer, mix)
    # The longest recorded turn is not to be cut.
    sampling = Sampling(max_tokens=config.rollout.episode_tokens)
    with ExitStack() as stack, asyncio.Runner() as runner:
        for split in splits:
            collectors[split] = stack.enter_context(closing(make_collector(config, renderer, split=split)))
        for record in records:
            before = record.trajectory
            script = tuple(segment.token_ids for segment in before.sampled)
            spec = EpisodeSpec(task_id=before.task_id, seed=before.seed, env=before.env, script=script)
            change, again = None, None
            try:
                collected = runner.run(collectors[record.origin.split].collect([[spec]], ScriptedEngine(()), sampling))
                (played,) = collected.groups[0].trajectories
                pieces = tuple(
                    tuple(tokenizer.decode([token]) for token in segment.token_ids) for segment in played.segments
                )
                again = Record(trajectory=played, origin=record.origin, pieces=pieces)
                change = _change(record, again)
            except FaultRateError as error:
                change = Change(turn=0, what="fault", recorded="", now=str(error))
            now = verdict(again) if again else None
            yield Replayed(task_id=before.task_id, seed=before.seed, change=change, recorded=verdict(record), now=now)


def _change(before: Record, now: Record) -> Change | None:
    token = parting(before, now)
    if token is not None:
        what = _WHAT.get(token.source, token.source)
        return Change(turn=token.turn, what=what, recorded=token.before + token.a, now=token.before + token.b)
    ends = [record.trajectory.stop.value for record in (before, now)]
    if ends[0] != ends[1]:
        return Change(turn=len(before.trajectory.sampled), what="end", recorded=ends[0], now=ends[1])
    if before.trajectory.rewards != now.trajectory.rewards:
        returns = [f"{record.trajectory.ret:g}" for record in (before, now)]
        return Change(turn=len(before.trajectory.sampled), what="reward", recorded=returns[0], now=returns[1])
    return None
