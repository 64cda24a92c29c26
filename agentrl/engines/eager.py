"""Run a decoder's step by PyTorch: any model, device and type that transformers has.

Legend: T new tokens end to end, B rows, d hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.engines.rng import uniforms
from agentrl.models.cache import CachedRows, RowCache, longest_short
from agentrl.models.linear import LANES
from agentrl.models.logits import logits_of


class EagerStep:
    """Computes steps of ``model`` by its own forward pass.

    Args:
        model: a causal language model loaded with ``attn_implementation="agentrl"``.
        rows: rows of the cache.
    """

    name = "PyTorch"
    """Name in a run's record."""

    def __init__(self, model: Any, rows: int) -> None:
        self._model, self._rows = model, rows
        self.forget()

    @torch.no_grad()
    def take(self, name: str, weight: Tensor) -> None:
        """Copy a weight in, by the name that the model has for it."""
        self._model.get_parameter(name).copy_(weight)

    def forget(self) -> None:
        """Drop all cached keys and values, and their memory."""
        self._cache = RowCache(self._rows, longest_short(self._model.device))

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Replace all of one row by the first ``length`` cached tokens of another, or of its own."""
        self._cache.copy_prefix(source, target, length)

    @torch.inference_mode()
    def forward(self, rows: Sequence[int], cached: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        """Run new tokens of ``rows``, which hold ``cached`` tokens each; the last hidden state of each row [B, d]."""
        device = self._model.device
        like = torch.zeros((), dtype=self._model.dtype, device=device)
        plan = CachedRows(self._cache, rows, cached, [len(part) for part in new], like)
        tokens = torch.tensor([token for part in new for token in part], device=device)
        # Tokens that don't fill a vector of the processor are summed in another order. With padding, a token's bits do
        # not depend on the number of tokens.
        padding = (0, -len(tokens) % LANES)
        out = self._model.base_model(
            input_ids=pad(tokens, padding)[None],
            position_ids=pad(plan.positions, padding)[None],
            use_cache=False,
            agentrl_plan=plan,
        )
        return out.last_hidden_state[0][plan.last]

    @torch.inference_mode()
    def sample(
        self, hidden: Tensor, temperatures: Sequence[float], seeds: Sequence[int], counters: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Sample a token for each hidden state [B, d]; the tokens, and their log-probs.

        Args:
            hidden: last hidden states.
            temperatures: 0 takes the likeliest token, whose log-prob is 0 then.
            seeds: of each row's noise.
            counters: tokens that each row has sampled before.
        """
        logits = logits_of(self._model, hidden)
        device = logits.device
        temperature = torch.tensor(temperatures, device=device)
        greedy = temperature == 0.0
        # Greedy rows divide by 1: their results are not used, but a division by 0 would fill them with NaN.
        logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
        cdf = logp.exp().double().cumsum(-1)
        # Inverse transform sampling. The uniform is scaled by the cdf's end, which rounding keeps from being 1.
        # right=True skips tokens of probability 0, and the clamp is for a point that rounding puts on the very end.
        noise = uniforms(torch.tensor(seeds, device=device), torch.tensor(counters, device=device))
        points = noise[:, None] * cdf[:, -1:]
        chosen = torch.searchsorted(cdf, points, right=True)[:, 0].clamp_(max=logp.shape[1] - 1)
        tokens = torch.where(greedy, logits.argmax(-1), chosen)
        logprobs = torch.where(greedy, 0.0, logp.gather(1, tokens[:, None])[:, 0])
        # Rounding may give a log-prob slightly above 0, which the trainer would refuse.
        return tokens.tolist(), logprobs.clamp_(max=0.0).tolist()
