"""Latent attention of many queries at once: keys and values of all heads are made, read, and forgotten.

    queries [T, H, own + rope] · compressed [S, rank] · rotated [S, rope] · halves [H, own + value, rank]
    keys of head h   compressed · halves[h, :own]ᵀ | rotated        values   compressed · halves[h, own:]ᵀ

Multiplications of a head, with P pairs of a query and an entry that it sees:

    absorbed   T · rank · (own + value)   +   P · (2 · rank + rope)          (`models/latent_attention.py`)
    expanded   S · rank · (own + value)   +   P · (own + rope + value)

A pair costs less, and each entry as much as a query does. So a prompt from its beginning is always cheaper expanded,
and a single token never; behind a long history it takes rank · (own + value) / (2 · rank − own − value) queries, 171 of
DeepSeek V2's and V3's sizes. Sums round in another place than those of absorbed attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.kernels.attention import attend_causal

MOST_NUMBERS = 2**23  # of keys and values that are there at once
MOST_SCORES = 2**20
_MOST_FUSED = 2**29  # numbers, where fused operations need no scores


@dataclass(frozen=True, slots=True)
class WholeEntries:
    """All that queries read, in one softmax: keys and values [Hkv, S, D], mask [T, S] as in `attend`.

    is_causal: in place of a mask, queries stand at the last T entries, and see all up to their own.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    is_causal: bool = False


class OwnQueries(Protocol):
    """A step's queries in a layer whose entries stand for keys and values of all heads (latent attention)."""

    @property
    def chooses(self) -> bool:
        """Does the model choose what each reads? Then `expanded` alone gives that."""

    def absorbed(self, some: slice) -> Tensor:
        """[T, Hq, D] for entries as they are stored. some: of the step's tokens."""

    def output(self, out: Tensor) -> Tensor:
        """[T, Hq, Dv] of entries as they are stored -> of the layer."""

    def expanded(self, some: slice, entries: WholeEntries, *, scaling: float) -> Tensor | None:
        """What `output` gives, from keys and values of all heads; None where that is dearer."""


def is_cheaper(queries: int, entries: int, *, rank: int, own: int, value: int) -> bool:
    """Does it take fewer multiplications than absorbed attention? The queries are the last of the entries."""
    pairs = queries * entries - queries * (queries - 1) // 2
    return (entries - queries) * rank * (own + value) < pairs * (2 * rank - own - value)


def expanded_if_cheaper(
    queries: Tensor, entries: WholeEntries, halves: Tensor, *, own: int, scaling: float
) -> Tensor | None:
    """`OwnQueries.expanded` of queries [T, H, own + rope]. Without a mask it always is: fused operations are fast."""
    rank, value = halves.shape[2], halves.shape[1] - own
    if not entries.is_causal and not is_cheaper(len(queries), entries.keys.shape[1], rank=rank, own=own, value=value):
        return None
    compressed, rotated = entries.keys[0].tensor_split([rank], dim=-1)
    if entries.is_causal:
        return _attend_causal_expanded(queries, compressed, rotated, halves, scaling=scaling)
    return attend_expanded(queries, compressed, rotated, halves, entries.mask, scaling=scaling)


def _attend_causal_expanded(
    queries: Tensor, compressed: Tensor, rotated: Tensor, halves: Tensor, *, scaling: float
) -> Tensor:
    """As `attend_expanded`, by fused operations, which want values as large as keys: zeros are behind them."""
    (count, heads, width), entries = queries.shape, len(compressed)
    own = width - rotated.shape[1]
    value = halves.shape[1] - own
    widest, at_once = max(width, value), max(1, min(heads, _MOST_FUSED // (entries * 3 * width)))
    out = queries.new_empty((count, heads, value))
    for first in range(0, heads, at_once):
        some = slice(first, min(first + at_once, heads))
        made = torch.matmul(compressed, halves[some].mT)  # [H, S, own + value]
        keys, values = (made.new_zeros((len(made), entries, widest)) for _ in range(2))
        keys[..., :own], keys[..., own:width], values[..., :value] = made[..., :own], rotated, made[..., own:]
        asked = F.pad(queries[:, some], (0, widest - width))
        out[:, some] = attend_causal(asked, keys, values, scaling=scaling)[..., :value]
    return out


def attend_expanded(
    queries: Tensor, compressed: Tensor, rotated: Tensor, halves: Tensor, mask: Tensor | None, *, scaling: float
) -> Tensor:
    """Softmax attention; returns [T, H, value] in the dtype of `queries`. mask: [T, S] as in `attend`."""
    (count, heads, width), entries = queries.shape, len(compressed)
    own = width - rotated.shape[1]
    value = halves.shape[1] - own
    at_once = max(1, min(heads, MOST_NUMBERS // (entries * (width + own + 2 * value))))
    piece = max(1, MOST_SCORES // (at_once * entries))
    seen = _seen(mask, count, entries, piece)
    by_head = queries.transpose(0, 1)  # [H, T, own + rope]
    compressed, rotated = compressed.to(queries.dtype), rotated.to(queries.dtype)
    out = queries.new_empty((count, heads, value))
    for first in range(0, heads, at_once):
        some = slice(first, min(first + at_once, heads))
        made = (compressed @ halves[some].flatten(0, 1).mT).view(entries, -1, own + value).transpose(0, 1)
        keys = torch.cat((made[..., :own], rotated.expand(len(made), -1, -1)), dim=-1)
        values = made[..., own:].contiguous()
        for begin, until in zip(range(0, count, piece), seen, strict=True):
            part = slice(begin, min(begin + piece, count))
            scores = (by_head[some, part] @ keys[:, :until].mT).float() * scaling
            if mask is not None:
                scores += mask[part, :until]
            weights = scores.softmax(dim=-1).to(values.dtype)
            out[part, some] = (weights @ values[:, :until]).transpose(0, 1)
    return out


def _seen(mask: Tensor | None, count: int, entries: int, piece: int) -> list[int]:
    """For each piece of queries, how many entries one of them may see: what lies behind is not computed."""
    starts = range(0, count, piece)
    if mask is None:
        return [entries] * len(starts)
    places = torch.arange(1, entries + 1, device=mask.device)
    ends = [(mask[start : start + piece] == 0).any(0).mul(places).max() for start in starts]
    return [max(1, end) for end in torch.stack(ends).tolist()]
