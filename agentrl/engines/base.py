"""The engine contract: token ids in, sampled token ids and their log-probs out."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from agentrl.errors import ConfigError
from agentrl.segments import Swaps

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for sampling one completion.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most probable token."""
    max_tokens: int = 256
    """Most tokens to sample."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the completion; the one that does is part of it."""
    watch: Callable[[int], bool] | None = field(default=None, compare=False, repr=False)
    """Called with each token in order, on the event loop; the completion ends where it returns True."""

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not self.temperature >= 0.0:
            raise ConfigError(f"temperature is {self.temperature}: it must be 0 (greedy) or more")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}: it must be at least 1")

    def ends(self, token: int) -> bool:
        """Return True if the completion ends with this token; each one is asked about once, in order."""
        heard = self.watch is not None and self.watch(token)
        return heard or token in self.stop_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: tuple[int, ...]
    """The sampled tokens, the stop token included [n]."""
    logprobs: tuple[float, ...]
    """Log-prob of each under the distribution it was sampled from [n], in nats; 0 where sampling is greedy."""
    finish: Literal["stop", "length"]
    """``stop``: ended by a stop token, or by who watched; ``length``: cut off by ``max_tokens``."""
    version: int
    """Version of the weights that sampled it, up to the first swap."""
    swaps: Swaps = ()
    """Where new weights came while it was sampled."""
    usage: tuple[int, int] | None = None
    """Tokens that a server says it has read and written; None without a server."""


def check_request(prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, *, vocab: int, max_length: int) -> None:
    """Refuse a request that would fail in the model, and with it every request that is computed beside it.

    Raises:
        ConfigError: the prompt is empty or not in the vocabulary, prompt and completion may not fit into
            ``max_length``, or the seed is not in [0, 2⁶³).
    """
    if not prompt_ids:
        raise ConfigError("the prompt is empty: there is nothing to continue")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab:
        raise ConfigError(f"the prompt has tokens outside the model's vocabulary of {vocab}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"the seed {seed} is not in [0, 2⁶³)")
    if len(prompt_ids) + sampling.max_tokens > max_length:
        raise ConfigError(
            f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new ones exceed the engine's max_length "
            f"of {max_length}"
        )


class Engine(Protocol):
    """Contract of everything that samples tokens."""

    @property
    def exact(self) -> bool:
        """True if prompt, sampling, weights and seed decide the tokens, whatever runs concurrently."""
        ...

    @property
    def rounding(self) -> float:
        """Largest error of a log-prob that rounding in the engine's arithmetic explains, in nats."""
        ...

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation of ``prompt_ids``.

        Args:
            prompt_ids: all tokens so far.
            sampling: temperature and limits.
            seed: of this completion's sampling noise; an ``exact`` engine is deterministic in it.

        Raises:
            InfrastructureError: the engine failed.
        """
        ...

    async def load_weights(self, named_tensors: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Load new weights; later requests are answered with them and carry ``version``.

        It may be called while requests are running, and each engine documents how it finishes those. A log-prob is
        always that under the version of its token, given all tokens before it.

        Raises:
            InfrastructureError: a tensor is unknown to the model or of another shape.
        """
        ...

    def close(self) -> None:
        """Release the engine's resources; it can't be used afterwards. Calling twice is allowed."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can leave a GPU to the trainer between playing and new weights."""

    async def sleep(self) -> None:
        """Free the GPU's memory until ``load_weights``; called when no request runs.

        Raises:
            InfrastructureError: the engine failed.
        """
        ...
