"""Two runs of one config end in the same bytes, however long the tools take."""

from pathlib import Path

import pytest

from agentrl.runs.folder import read_jsonl
from agentrl.runs.records import read_episodes

from .conftest import SHAPED, Train, rows_of, same_weights

JITTERY = (
    "import os, time\n"
    + SHAPED.replace("class Shaped", "class Jittery")
    .replace("test/Shaped-v0", "test/Jittery-v0")
    .replace("=Shaped)", "=Jittery)")
    + """
def respond(self, episode):
    time.sleep(os.urandom(1)[0] / 255 * 0.05)
    return ()

Jittery.respond = respond
"""
)
"""The clock alone differs between two runs: no seed governs how long a tool's answer takes, at most 50 ms."""


@pytest.mark.slow
def test_tools_of_varying_speed_change_no_byte(train: Train, tmp_path: Path) -> None:
    (tmp_path / "jittery.py").write_text(JITTERY)
    settings = ("env.id=jittery:test/Jittery-v0", "rollout.tasks=4", "rollout.concurrency=9", "eval.every=0")
    for command in [train(name, *settings) for name in ("one", "two")]:  # side by side: there is more to disturb them
        assert command.wait() == 0, command.err
    one, two = (tmp_path / "runs" / name for name in ("one", "two"))
    rows = read_jsonl(one / "metrics.jsonl")
    assert sum(row["tool_calls"] for row in rows) > 10, "tools must run, or nothing is disturbed"
    assert rows_of(one) == rows_of(two)
    assert same_weights(one, two)
    for row in rows:
        file = f"episodes/step-{row['step']:06d}.jsonl.zst"
        recorded = [[record.trajectory for record in read_episodes(run / file)] for run in (one, two)]
        segments = [[trajectory.segments for trajectory in trajectories] for trajectories in recorded]
        assert segments[0] == segments[1]
