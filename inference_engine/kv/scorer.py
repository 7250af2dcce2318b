"""The scorer interface: which of a layer's old entries stay, by a score that is computed from the entries themselves.

    position   0 1 2 3 4 5 6 7 | 8 … 15 | 16 … 21         sink = 8, window = 0, segment = 8: length 22
    before     ■ ■ ■ ■ ■ ■ ■ ■ | ■ … ■  |                  at length 16 the segment from 8 to 15 leaves the window;
    after      ■   ■ ■     ■   | ■ ■ ■  | ■ … ■            of 16 entries the 8 of the highest scores keep a place

Without a scorer the first `sink` entries of a layer stay. With one, their places are for the entries of the highest
scores: whenever a segment leaves the window, its entries compete with those that hold the places. Each KV head keeps
entries of its own. Keys stay rotated at their own positions.

What is kept is a function of the history alone: scores are computed at segment boundaries, of committed entries and the
segment's last query, never of how the tokens arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Entries of which some may stay, those that hold places first, and the query of the segment's last token.

    keys, values [L, n, Hkv, D] float32, of L alike layers; query [L, Hq, D] float32. Keys and query are rotated (RoPE)
    at their own positions. scaling, softcap: of the layers' attention, as `kernels/attention.py` has them.
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    scaling: float
    softcap: float | None

    def weights(self) -> Tensor:
        """[L, Hkv, group, n]: the attention that each query head of each KV head pays to the candidates, 1 in sum."""
        layers, _, heads, head_dim = self.keys.shape
        query = self.query.view(layers, heads, -1, head_dim)
        scores = torch.einsum("lhgd,lnhd->lhgn", query, self.keys) * self.scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores.softmax(dim=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryScorer(ABC):
    """A spec without state: equal scorers score alike. Nothing here waits for the device."""

    @abstractmethod
    def scores(self, candidates: Candidates) -> Tensor:
        """[L, Hkv, n]: the entries of the highest scores stay, the earlier one of two equal ones."""
