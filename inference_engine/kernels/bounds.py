"""Upper bounds of the scores in a block of keys, from two vectors per block instead of all its keys.

    q · k  =  Σ_d q_d k_d  ≤  Σ_d max(q_d low_d, q_d high_d)        for every key k of the block, low ≤ k ≤ high

The bound is taken per query head and the best head of a KV head's group counts, so neither one rare key in a
block nor one searching head in a group is averaged away.
Source: Tang et al., Quest, arXiv 2406.10774. Keys are bounded as they are stored, rotated.

    queries [T, Hq, D] · keys [..., S, D] · low, high [Hkv, B, D] · scores [T, Hkv, B] float32
"""

from __future__ import annotations

from torch import Tensor


def block_bounds(keys: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each channel in each block: [..., S, D] -> two of [..., B, D], S = B · block."""
    blocks = _whole_blocks(keys, block)
    return blocks.amin(-2), blocks.amax(-2)


def bounds_scores(queries: Tensor, low: Tensor, high: Tensor, scaling: float) -> Tensor:
    """Upper bound of scaling · q · k over the keys of each block and the query heads of each group, up to rounding.

    scaling must be positive, bounds finite. A soft-cap would not change the order and is left out.
    """
    assert scaling > 0, f"scaling is {scaling}"
    query_count, query_heads, head_dim = queries.shape
    kv_heads, count, _ = low.shape
    folded = (
        queries.float().reshape(query_count, kv_heads, -1, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    )
    scores = folded.clamp(min=0) @ high.float().mT + folded.clamp(max=0) @ low.float().mT  # [Hkv, T · group, B]
    best = scores.view(kv_heads, query_count, query_heads // kv_heads, count).amax(2)
    return best.transpose(0, 1) * scaling


def _whole_blocks(keys: Tensor, block: int) -> Tensor:
    *lead, count, head_dim = keys.shape
    assert count % block == 0, f"{count} keys are no whole number of blocks of {block}"
    return keys.reshape(*lead, count // block, block, head_dim)
