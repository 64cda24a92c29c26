"""What real agents sent is continued where they continued it, and forks only where they rewrote history."""

import asyncio

import pytest

from agentrl.render.renderer import Renderer

from ..rollout.test_policy import check
from .conftest import scripted
from .recorded import FOLDER, play, session_of

NAMES = sorted(path.name.removesuffix(".jsonl.zst") for path in FOLDER.iterdir())
FORKS = {
    # A compaction asks for a summary where it leaves out the last turn, and goes on from it.
    "cc-compact7": {"dropped": 3, "rewritten": 1},
    "cx-compact": {"rewritten": 1, "dropped": 1},
    "oc-compact": {"rewritten": 3, "again": 1},
    # A second process, whose system message has changed.
    "cc-job": {"rewritten": 1},
    "cc-sub": {"sub_agent": 2},
    # An empty or malformed answer that the client dropped.
    "cc-fail-null-1": {"dropped": 1},
    "pf-mini-null-1": {"dropped": 3},
    # The first entry of an answer that was cut off stays in the history.
    "cx-fail-cut9-1": {"dropped": 1},
    # A warm-up that asks for no answer.
    "cx-ws2": {"rewritten": 1},
    # These write every assistant's turn anew.
    "py-aider2": {"rewritten": 2},
    "py-smol-tool": {"dropped": 6},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_agent_forks_where_it_rewrites_history_and_nowhere_else(renderer: Renderer, name: str) -> None:
    engine, policy = scripted(renderer, [])
    session = session_of(policy)
    played = []

    async def run() -> None:
        async for row, answer in play(name, session, engine, renderer):
            played.append((row, answer))

    asyncio.run(run())
    assert dict(+policy.forks) == FORKS.get(name, {})
    assert not session.counts["edited"]
    # Answers that were cut off on their way are not recorded, and titles neither.
    recorded = sum(answer is not None for _, answer in played) - session.counts["requests title"]
    assert len(policy.rewards) == recorded >= 1
    if len(engine.asked) == recorded:
        check(policy, engine.asked)
