"""The noise of a place spelled out in numpy's unsigned words, which wrap and are shifted as SplitMix64 has it.

Nothing here comes from the engine: it is what draws are compared with.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


def plain_key(seed: int, position: int) -> int:
    """From 0 to 2⁶⁴ − 1."""
    start = mixed(np.array([seed + GOLDEN & WORD], dtype=np.uint64))
    return int(mixed(start + np.array([position * GOLDEN & WORD], dtype=np.uint64))[0])


def plain_noise(key: int, vocab: int) -> NDArray[np.float64]:
    """[V], of every id. A key may be a signed number, too."""
    ids = mixed(np.arange(vocab, dtype=np.uint64) * np.uint64(GOLDEN))
    bits = mixed(ids ^ np.uint64(key & WORD))
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return np.asarray(-np.log(-np.log(uniform)))


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
