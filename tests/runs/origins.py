"""Where the episodes of these tests say that they come from, and what gives their tokens texts."""

from typing import Any

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


class Signs:
    """A tokenizer of single characters."""

    def decode(self, token_ids: int | list[int], **_: Any) -> str:
        assert isinstance(token_ids, list)
        return "".join(map(chr, token_ids))


class Numerals:
    """A tokenizer whose text of a token is its id."""

    def decode(self, token_ids: int | list[int], **_: Any) -> str:
        assert isinstance(token_ids, list)
        return "".join(f"{token} " for token in token_ids)
