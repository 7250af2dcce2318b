"""Indexers: a layer's own choice of the tokens that its latent attention reads (DeepSeek V3.2, GLM 5).

    stored        compressed [rank] | rotated [rope] | index key [D]      an entry has its index key behind it
    score         Σ_h weight_h · relu(index query_h · index key)          of a token and an entry that it may see
    read          the `most` entries of highest score, of equal ones the earliest

A layer may read what the one before it has chosen; it keeps no index keys. Where all that a token sees is no more than
`most`, the layer is plain latent attention.

Source: DeepSeek-V3.2, arXiv 2512.02556, section 2.1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inference_engine.errors import ModelError
from inference_engine.kernels.expanded_attention import WholeEntries
from inference_engine.kernels.gather import attend_entries
from inference_engine.kernels.topk import topk_by_sorting
from inference_engine.models.latent_attention import LatentQueries

_NAME = "indexer"
_PARTS = ("wq_b", "wk", "k_norm", "weights_proj")
_SIZES = ("n_heads", "head_dim", "qk_rope_head_dim", "index_topk")
# Families, and by which of their functions indexers rotate.
_ROTATIONS = {"DeepseekV32Indexer": "apply_rotary_pos_emb", "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave"}
_MOST_SCORES = 2**22  # at once, of all index heads
_MOST_NUMBERS = 2**23  # of chosen entries, at once


@dataclass(slots=True, eq=False)
class IndexedStep:
    """What an indexer has made of a step's tokens, and what these have chosen: for its layer and those that follow it.

    queries: [N, H, D]; weights: [N, H] float32, scaled. most: how many entries a token reads.
    """

    queries: Tensor
    weights: Tensor
    most: int
    _chosen: dict[int, Tensor] = field(init=False, default_factory=dict)

    def own(self, latent: LatentQueries, index_dim: int) -> IndexedQueries:
        return IndexedQueries(latent, self, index_dim)

    def chosen(self, some: slice, index_keys: Tensor | None, mask: Tensor | None) -> Tensor:
        """[T, K] int64 of these tokens, ascending, -1 for none. index_keys: [S, D]; None: as the layer before chose."""
        found = self._chosen.get(some.start)
        if index_keys is None:
            assert found is not None, "the first layers choose"
            return found
        queries, weights, keys = self.queries[some].float(), self.weights[some], index_keys.float().mT
        piece = max(1, _MOST_SCORES // (queries.shape[1] * len(index_keys)))
        parts = []
        for first in range(0, len(queries), piece):
            part = slice(first, first + piece)
            by_head = (queries[part] @ keys).relu_()  # [t, H, S]
            scores = (weights[part, None] @ by_head)[:, 0]
            seen = None if mask is None else mask[part] == 0
            parts.append(topk_by_sorting(scores, self.most, candidates=seen))
        found = self._chosen[some.start] = torch.cat(parts)
        return found


class KeepsIndexKeys(Protocol):
    """index_keys: [1, 1, N, D] of the step."""

    index_keys: Tensor | None


class StepIndexer(nn.Module):
    """Replaces a layer's indexer, whose parts it keeps: it scores nothing, and gives the attention what will."""

    wq_b: nn.Module
    wk: nn.Module
    k_norm: nn.Module
    weights_proj: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        if missing := [name for name in (*_PARTS, *_SIZES) if not hasattr(original, name)]:
            raise ModelError(f"{type(original).__name__} has no {missing[0]}; this kind of indexer cannot be served")
        rotation = _ROTATIONS.get(type(original).__name__, "")
        self._rotate: Any = getattr(sys.modules[type(original).__module__], rotation, None)
        if self._rotate is None:
            raise ModelError(f"{type(original).__name__} is an indexer of a kind that is not known")
        self.wq_b, self.wk, self.k_norm, self.weights_proj = (getattr(original, name) for name in _PARTS)
        self.heads, self.head_dim, self.rope, self.most = (int(getattr(original, name)) for name in _SIZES)

    def forward(
        self, hidden: Tensor, query: Tensor, angles: tuple[Tensor, Tensor], *_: object, past_key_values: KeepsIndexKeys
    ) -> IndexedStep:
        """hidden [1, N, width], query [1, N, rank]. past_key_values: what is in a cache's place."""
        queries = self.wq_b(query).view(1, -1, self.heads, self.head_dim)
        keys = self.k_norm(self.wk(hidden)).unsqueeze(2)
        turned, other = self._rotate(queries[..., : self.rope], keys[..., : self.rope], *angles, unsqueeze_dim=2)
        queries = torch.cat((turned, queries[..., self.rope :]), dim=-1)
        keys = torch.cat((other, keys[..., self.rope :]), dim=-1)
        weights = self.weights_proj(hidden).float()
        past_key_values.index_keys = keys.transpose(1, 2)
        return IndexedStep(queries[0], weights[0] * (self.heads**-0.5 * self.head_dim**-0.5), self.most)


def take_indexers(model: nn.Module) -> None:
    """Replace every indexer of an attention layer by one of a step's tokens."""
    for attention in [module for module in model.modules() if isinstance(getattr(module, _NAME, None), nn.Module)]:
        indexer = getattr(attention, _NAME)
        if not isinstance(indexer, StepIndexer):
            setattr(attention, _NAME, StepIndexer(indexer))


def index_dim(attention: nn.Module) -> int:
    """Numbers of an index key in each entry of the layer; 0 if it has none."""
    indexer = getattr(attention, _NAME, None)
    return 0 if indexer is None else int(indexer.head_dim)


@dataclass(frozen=True, slots=True)
class IndexedQueries:
    """Implements OwnQueries. latent: of the same step. index_dim: 0: the layer reads what one before it has chosen."""

    latent: LatentQueries
    step: IndexedStep
    index_dim: int

    chooses = True

    def absorbed(self, some: slice) -> Tensor:
        """With zeros for index keys."""
        queries = self.latent.absorbed(some)
        return torch.cat((queries, queries.new_zeros((*queries.shape[:2], self.index_dim))), dim=-1)

    def output(self, out: Tensor) -> Tensor:
        return self.latent.output(out)

    def expanded(self, some: slice, entries: WholeEntries, *, scaling: float) -> Tensor:
        """What `output` gives, of what each token chooses."""
        width = entries.keys.shape[-1] - self.index_dim
        own, index_keys = entries.keys[..., :width], entries.keys[0, :, width:] if self.index_dim else None
        count = entries.keys.shape[1]
        if count <= self.step.most:
            mask = entries.mask
        else:
            chosen = self.step.chosen(some, index_keys, entries.mask)
            if not self.latent.is_cheaper_expanded(len(chosen), count):
                return self._of_chosen(some, own[0], chosen, scaling)
            mask = own.new_full((len(chosen), count + 1), float("-inf"))
            mask = mask.scatter_(1, chosen.where(chosen >= 0, count), 0.0)[:, :count]
        found = self.latent.expanded(some, WholeEntries(own, entries.values, mask), scaling=scaling)
        if found is not None:
            return found
        places = torch.arange(count, device=own.device).expand(len(self.step.queries[some]), -1)
        return self._of_chosen(some, own[0], places if mask is None else places.where(mask == 0, -1), scaling)

    def _of_chosen(self, some: slice, entries: Tensor, chosen: Tensor, scaling: float) -> Tensor:
        """Absorbed attention over chosen entries of [S, width], [T, K] of them."""
        queries, rank = self.latent.absorbed(some), self.latent.halves.rank
        piece = max(1, _MOST_NUMBERS // (chosen.shape[1] * entries.shape[1]))
        outs = []
        for first in range(0, len(chosen), piece):
            part = chosen[first : first + piece]
            read = entries[part.clamp(min=0)][:, None]  # [t, 1, K, width]
            seen = (part >= 0)[:, None]
            outs.append(attend_entries(queries[first : first + piece], read, read[..., :rank], seen, scaling)[0])
        return self.latent.output(torch.cat(outs).to(queries.dtype))
