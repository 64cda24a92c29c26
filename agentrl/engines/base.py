"""The engine contract: token ids in, sampled token ids and their log-probs out."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    """Logits are divided by this; 0 takes the most probable token."""
    max_tokens: int = 256
    """Most tokens to sample."""
    stop_ids: tuple[int, ...] = ()
    """Sampling ends with any of these tokens, which is part of the completion."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ConfigError(f"temperature is {self.temperature}: it must be 0 (greedy) or more")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}: it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled."""

    token_ids: tuple[int, ...]
    """The sampled tokens, the stop token included [n]."""
    logprobs: tuple[float, ...]
    """Log-prob of each under the distribution it was sampled from [n], in nats; 0 where sampling is greedy."""
    finish: Literal["stop", "length"]
    """Whether a stop token came, or the limit did."""
    version: int
    """Version of the weights that sampled it."""


class Engine(Protocol):
    """Whatever samples tokens."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation of ``prompt_ids``.

        Args:
            prompt_ids: all tokens so far.
            sampling: temperature and limits.
            seed: the same prompt, sampling, weights and seed give the same tokens, whatever runs beside.

        Raises:
            InfrastructureError: the engine failed.
        """
        ...

    def load_weights(self, named_tensors: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take over new weights; completions from now on carry ``version``."""
        ...
