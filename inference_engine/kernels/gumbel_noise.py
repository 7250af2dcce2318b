"""Gumbel noise of a seed, a position and a token id, and of nothing else: what a sampled token is drawn with.

    token = the id with the largest  logit ÷ temperature + noise(seed, position, id)

With Gumbel noise that is a draw from the softmax (Maddison et al., arXiv 1411.0030). No sum is involved, so the order
in which a device adds cannot change it. And a caller that draws for the same place with the same noise from another
distribution, d away in total variation, comes to the same token at least (1 − d) ÷ (1 + d) of the time: so a drafter
that knows the noise drafts what is sampled, not what is likeliest (Daliri et al., arXiv 2408.07978).

Bits are mixed as SplitMix64 mixes them (Steele et al., OOPSLA '14).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Of keys [n], int64, for every id below the vocabulary's size: float64 [n, vocab], to which nothing else writes.
NoiseOfAll = Callable[[Tensor, int], Tensor]

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_WORD = (1 << 64) - 1
_HOST = torch.device("cpu")
BITS = 52  # of a uniform number: with half a step added it is never 0 and never 1 in float64


def key(seed: int, position: int) -> int:
    """What all noise at a position is made of: 64 bits, as a signed number. seed, position: from 0 to 2⁶⁴ − 1."""
    return _signed(_mixed(_mixed(seed + GOLDEN & _WORD) + position * GOLDEN & _WORD))


def keys_of(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int64]:
    """`key` of each seed [rows] and position [..., rows]."""
    golden = np.uint64(GOLDEN)
    return _mix_words_(_mix_words_(seeds + golden) + positions * golden).view(np.int64)


def noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise, float64, of `keys` and `token_ids`, int64 of shapes that broadcast."""
    return _gumbel(keys ^ _scrambled(token_ids))


def noise_of_all(keys: Tensor, vocab: int) -> Tensor:
    """See `NoiseOfAll`."""
    return _gumbel(keys[:, None] ^ _all_scrambled(vocab, keys.device))


def steps_of_all(key: int, vocab: int) -> NDArray[np.uint64]:
    """The 52 bits that the noise of each id below the vocabulary's size is made of, on the host. It grows with them."""
    return _steps(_scrambled_on_host(vocab) ^ np.uint64(key & _WORD))


def noise_on_host(keys: NDArray[np.int64], token_ids: NDArray[np.int64], vocab: int) -> NDArray[np.float64]:
    """`noise` of as many keys and ids [n], bit for bit. Far fewer calls of torch, which is what a few ids cost."""
    uniform = _steps(_scrambled_on_host(vocab)[token_ids] ^ keys.view(np.uint64)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-BITS
    torch.from_numpy(uniform).log_().neg_().log_().neg_()
    return uniform


def _scrambled_on_host(vocab: int) -> NDArray[np.uint64]:
    return _all_scrambled(vocab, _HOST).numpy().view(np.uint64)


def _steps(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`bits` are written over."""
    bits = _mix_words_(bits)
    bits >>= np.uint64(64 - BITS)
    return bits


def _mix_words_(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mixed` in place."""
    moved = np.empty_like(bits)
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        bits ^= np.right_shift(bits, np.uint64(shift), out=moved)
        if factor is not None:
            bits *= np.uint64(factor)
    return bits


@lru_cache(maxsize=8)
def _all_scrambled(vocab: int, device: torch.device) -> Tensor:
    return _scrambled(torch.arange(vocab, device=device))


def _scrambled(token_ids: Tensor) -> Tensor:
    """Neighbouring ids have nothing in common afterwards."""
    return _mix_(token_ids * _signed(GOLDEN))


def _gumbel(bits: Tensor) -> Tensor:
    """`bits` are written over."""
    steps = _shifted(_mix_(bits), 64 - BITS)
    uniform = steps.double().add_(0.5).mul_(2.0**-BITS)
    return uniform.log_().neg_().log_().neg_()


def _mix_(bits: Tensor) -> Tensor:
    """`_mixed` in place."""
    bits ^= _shifted(bits, SHIFTS[0])
    for factor, shift in zip(FACTORS, SHIFTS[1:], strict=True):
        bits *= _signed(factor)
        bits ^= _shifted(bits, shift)
    return bits


def _mixed(bits: int) -> int:
    bits ^= bits >> SHIFTS[0]
    for factor, shift in zip(FACTORS, SHIFTS[1:], strict=True):
        bits = bits * factor & _WORD
        bits ^= bits >> shift
    return bits


def _shifted(bits: Tensor, count: int) -> Tensor:
    """To the right, with zeros coming in from the left."""
    return (bits >> count).bitwise_and_((1 << 64 - count) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
