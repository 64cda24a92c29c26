"""Where the episodes of these tests say that they come from."""

from agentrl.types import Origin

ORIGIN = Origin(
    env_id="test/Made-v0",
    env_args={"level": 2},
    split="train",
    best_return=1.0,
    dialect="fence 0123456789abcdef",
    temperature=0.7,
    turn_tokens=9,
)
