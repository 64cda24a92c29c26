"""Get questions and scores of the library reasoning-gym from the single process that it runs in.

The process starts with the first question, which takes seconds, and has a fixed hash seed: some of the library's
questions depend on the order of a set.
"""

import json
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ConfigError, InfrastructureError
from agentrl.processes.per_process import PerProcess
from agentrl.processes.pool import WorkerPool
from agentrl.types import Task

MAX_CHARS = 20_000
"""A longer answer is wrong, whatever it says."""
SECONDS = 120.0
"""CPU time in which a question must be found."""


def question(name: str, config: Mapping[str, object], split: str, index: int) -> Task:
    """Return question number ``index`` of a split, always the same one.

    Returns:
        A task without id. Its answer is empty where the library has none. Its data are ``position``, the index of the
        question in the library's data set, or the seed of one.

    Raises:
        ConfigError: the task does not take these settings.
        InfrastructureError: the process ended.
    """
    made = _ask(do="question", name=name, config=_json(config), split=split, index=index)
    return Task(id="", prompt=made["question"], answer=made["answer"], data={"position": made["position"]})


def score(name: str, config: Mapping[str, object], task: Task, answer: str) -> float:
    """Return the library's score of ``answer``, from 0 to 1; 0 where its scorer fails on it or takes too long.

    Raises:
        InfrastructureError: the process ended.
    """
    if len(answer) > MAX_CHARS:
        return 0.0
    return float(_ask(do="score", name=name, config=_json(config), **task.data, answer=answer)["score"])


def _ask(**request: object) -> dict[str, Any]:
    reply = _pool.get().ask(request, seconds=SECONDS)
    if reply is None:
        raise InfrastructureError("reasoning-gym's process ended before it replied: it is started anew when asked")
    if "config" in reply:
        raise ConfigError(reply["config"])
    return reply


def _json(config: Mapping[str, object]) -> str:
    try:
        return json.dumps(config, sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"a setting of reasoning-gym must be a number, text, list or dict: {error}") from error


def _make_pool() -> WorkerPool:
    # One worker: what it has made of a data set is kept for the questions and answers that follow.
    return WorkerPool("agentrl.envs.reasoning_gym.worker", 1, name="reasoning-gym", failure=InfrastructureError)


_pool = PerProcess(_make_pool, close=WorkerPool.close, forget=WorkerPool.forget)
close_library = _pool.close
"""End the library's process; the next request starts another."""
