"""An engine that plays a script: for tests, oracles and the warm start."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from agentrl.engines.base import Completion, Sampling
from agentrl.errors import InfrastructureError

if TYPE_CHECKING:
    from torch import Tensor


class ScriptedEngine:
    """Plays the turns of one episode in order, with log-prob 0 each, as a policy that is certain of them would.

    Args:
        turns: token ids of each turn, the stop token included.
    """

    exact = True
    """Nothing is sampled."""
    rounding = 0.0
    """Nothing is computed."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.turns = [tuple(turn) for turn in turns]
        """Those that were not played yet."""
        self._version = 0

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Return the next turn of the script, cut at ``sampling.max_tokens``.

        Raises:
            InfrastructureError: the script has no more turns.
        """
        if not self.turns:
            raise InfrastructureError("the script has no more turns, but the episode goes on")
        turn = self.turns.pop(0)[: sampling.max_tokens]
        end = next((number for number, token in enumerate(turn, start=1) if sampling.ends(token)), None)
        turn, finish = turn[:end], "length" if end is None else "stop"
        return Completion(token_ids=turn, logprobs=(0.0,) * len(turn), finish=finish, version=self._version)

    async def load_weights(self, named_tensors: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take over the version; there are no weights."""
        self._version = version

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
