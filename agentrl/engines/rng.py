"""Counter-based randomness: the same seed and counter give the same number, whatever else runs concurrently.

Sampling noise that depends on a request's own seed and step alone makes its tokens independent of its neighbours in the
batch, and a run repeatable in whatever order its episodes finish.
"""

import hashlib

import torch
from torch import Tensor

_SIGN_BIT = 1 << 63
_WORD = 1 << 64


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2⁶³) from any parts; equal parts give equal seeds, in every process."""
    # hash() would not do: its value for texts differs from process to process.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _SIGN_BIT


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """Compute one number in [0, 1) per pair of seed and counter.

    Args:
        seeds: int64 [n].
        counters: int64 [n].

    Returns:
        float64 [n], with 53 random bits.

    The hash is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
    over ``seed + (counter + 1)·γ``.
    """
    # The hash is defined on unsigned words. int64 sums and products wrap around to the same bits.
    state = seeds + (counters + 1) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shift(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shift(state, 27)) * _signed(0x94D049BB133111EB)
    state = state ^ _shift(state, 31)
    return _shift(state, 11).to(torch.float64) * 2.0**-53


def _signed(word: int) -> int:
    return word - _WORD if word >= _SIGN_BIT else word


def _shift(state: Tensor, bits: int) -> Tensor:
    # An int64 shift copies the sign bit in from the left; the mask replaces the copies by the zeros of the hash.
    return (state >> bits) & ((1 << (64 - bits)) - 1)
