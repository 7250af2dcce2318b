"""Multi-head latent attention (MLA): the keys and values of all heads are made from one short vector a token.

    stored   compressed [rank] | rotated [rope]         a vector a token and layer: one KV head, read by all query heads
    query    of head h [own | rope]  ->  own · keys_h [rank] | rope
    output   weights · compressed [rank]  ->  · values_h

Where a step has many tokens of a session, keys and values of all heads are cheaper (`kernels/expanded_attention.py`).

keys_h and values_h are the halves of `kv_b_proj`. A query times its half of them, once, stands for the product of every
compressed vector with that half, so entries are read as they are stored, whatever the number of heads.

transformers gives the compressed pair to its cache before it makes keys and values of all heads from it. An object in
the cache's place keeps the pair for the registered attention function; nothing is expanded.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inference_engine.errors import ModelError
from inference_engine.kernels.expanded_attention import OwnQueries, WholeEntries, expanded_if_cheaper, is_cheaper
from inference_engine.kernels.fused import Fused, LatentHeads
from inference_engine.models.quantised_linear import QuantisedLinear

_EXPANDED = "kv_b_proj"
INDEXED = "indexed_attention"  # the type of layers with an indexer
_CACHE, _MASK = "past_key_values", "attention_mask"
_OF_ATTENTION = ("num_heads", "qk_nope_head_dim", "v_head_dim")
_INDEX_SIZES = ("index_topk", "index_n_heads", "index_head_dim", "q_lora_rank")
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Chooser(Protocol):
    """Of a step's tokens: `models/indexer.py`."""

    def own(self, latent: LatentQueries, index_dim: int) -> OwnQueries:
        """These queries, reading what it chooses by the last `index_dim` numbers of entries; 0: as it has chosen."""


class NoMask:
    """In the place of a mask, of which layers with an indexer ask a part."""

    def __getitem__(self, _part: object) -> None:
        return None


NO_MASK = NoMask()


class EntryForm(Protocol):
    """How what a layer gives attention becomes what its entries hold, and the output of these what the layer awaits."""

    def stored(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, H, N, D] each, of the layer -> the same of its entries."""

    def own(self, query: Tensor, chooser: Chooser | None) -> OwnQueries | None:
        """Of `stored` queries, how they read entries, if not as keys and values. Then `output` is what it gives.

        chooser: what chooses entries for them, by the model's design.
        """

    def output(self, out: Tensor) -> Tensor:
        """[1, N, Hq, Dv] of entries -> of the layer."""


class HeadHalves(nn.Module):
    """Replaces `kv_b_proj`, whose two halves it multiplies with queries and with outputs; inference only.

    The layer still calls it, for one token, whose keys and values are not used.
    """

    def __init__(self, weight: Tensor, *, heads: int, key: int, value: int) -> None:
        """weight: [heads · (key + value), rank]."""
        super().__init__()
        self.heads, self.key, self.value = heads, key, value
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    def forward(self, compressed: Tensor) -> Tensor:
        return compressed.new_zeros((*compressed.shape[:-1], self.heads * (self.key + self.value)))

    def of_queries(self, own: Tensor) -> Tensor:
        """[H, N, key] -> [H, N, rank]."""
        return torch.bmm(own, self.by_head[:, : self.key])

    def of_outputs(self, out: Tensor) -> Tensor:
        """[H, N, rank] -> [H, N, value]."""
        return torch.bmm(out, self.by_head[:, self.key :].transpose(1, 2))

    @property
    def by_head(self) -> Tensor:
        """[H, key + value, rank]."""
        return self.weight.view(self.heads, self.key + self.value, -1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, key={self.key}, value={self.value}"


class LatentEntries(threading.local):
    """Implements EntryForm for one layer: several engines may run one model, each on its thread."""

    def __init__(self, attention: nn.Module) -> None:
        self._attention = attention
        self._halves: HeadHalves = getattr(attention, _EXPANDED)
        self._pair: tuple[Tensor, Tensor] | None = None
        self.index_keys: Tensor | None = None  # [1, 1, N, D] of the step, where the layer has an indexer

    def update(self, compressed: Tensor, rotated: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """In the place of a cache: keep the step's pair, [1, 1, N, rank] and [1, 1, N, rope]. Returns one token of it,
        so that no more is expanded."""
        self._pair = compressed, rotated
        return compressed[:, :, :1], rotated[:, :, :1]

    def stored(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pair, self._pair = self._pair, None
        if pair is None:
            raise ModelError(
                f"{type(self._attention).__name__} does not give its compressed vectors to a cache before it expands "
                "them; this kind of latent attention cannot be served"
            )
        keys = pair if self.index_keys is None else (*pair, self.index_keys)
        return query, torch.cat(keys, dim=-1), pair[0]

    def own(self, query: Tensor, chooser: Chooser | None) -> OwnQueries:
        latent, index_keys = LatentQueries(query[0], self._halves), self.index_keys
        self.index_keys = None
        if chooser is None:
            return latent
        return chooser.own(latent, 0 if index_keys is None else index_keys.shape[-1])

    def output(self, out: Tensor) -> Tensor:
        return out


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Implements OwnQueries. queries: [H, N, own + rope]."""

    queries: Tensor
    halves: HeadHalves

    @property
    def chooses(self) -> bool:
        return False

    def absorbed(self, some: slice) -> Tensor:
        own, turned = self.queries[:, some].tensor_split([self.halves.key], dim=-1)
        return torch.cat((self.halves.of_queries(own), turned), dim=-1).transpose(0, 1)

    def output(self, out: Tensor) -> Tensor:
        return self.halves.of_outputs(out.transpose(0, 1)).transpose(0, 1)

    def is_cheaper_expanded(self, queries: int, entries: int) -> bool:
        return is_cheaper(queries, entries, rank=self.halves.rank, own=self.halves.key, value=self.halves.value)

    def expanded(self, some: slice, entries: WholeEntries, *, scaling: float) -> Tensor | None:
        queries, halves = self.queries[:, some].transpose(0, 1), self.halves
        return expanded_if_cheaper(queries, entries, halves.by_head, own=halves.key, scaling=scaling)


@dataclass(frozen=True, slots=True)
class ListedQueries:
    """Implements OwnQueries for a list's executor. queries: [N, H, own + rotated]."""

    queries: Tensor
    layer: LatentHeads
    fused: Fused

    @property
    def chooses(self) -> bool:
        return False

    def absorbed(self, some: slice) -> Tensor:
        own, rotated = self.queries[some].tensor_split([self.layer.own], dim=-1)
        return self.fused.head_products(own, self.layer.halves[:, : self.layer.own], rest=rotated)

    def output(self, out: Tensor) -> Tensor:
        return self.fused.head_products(out, self.layer.halves[:, self.layer.own :].mT)

    def expanded(self, some: slice, entries: WholeEntries, *, scaling: float) -> Tensor | None:
        return expanded_if_cheaper(self.queries[some], entries, self.layer.halves, own=self.layer.own, scaling=scaling)


def is_latent(attention: nn.Module) -> bool:
    """Does it make its keys and values from compressed vectors?"""
    return hasattr(attention, _EXPANDED)


def entry_form(attention: nn.Module) -> EntryForm | None:
    """Of an attention layer of a model that `absorb_projections` has been through. It is made to give its pair.

    None: entries are the keys and values themselves.
    """
    if not isinstance(getattr(attention, _EXPANDED, None), HeadHalves):
        return None
    entries = LatentEntries(attention)
    masked = {} if getattr(attention, "indexer", None) is None else {_MASK: NO_MASK}

    def in_place_of_cache(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return given, {**named, **masked, _CACHE: entries}

    attention.register_forward_pre_hook(in_place_of_cache, with_kwargs=True)
    return entries


@torch.no_grad()
def absorb_projections(model: nn.Module) -> None:
    """Replace every `kv_b_proj` of an attention layer by its halves. Raises ModelError for one that has no halves."""
    for attention in [module for module in model.modules() if hasattr(module, _EXPANDED)]:
        projection = getattr(attention, _EXPANDED)
        if isinstance(projection, HeadHalves):
            continue
        heads, key, value = (int(getattr(attention, name, 0)) for name in _OF_ATTENTION)
        weight = _weight(projection)
        if weight is None or len(weight) != heads * (key + value):
            raise ModelError(
                f"{type(attention).__name__} makes keys and values of {_EXPANDED} in a way that is not known; this "
                "kind of latent attention cannot be served"
            )
        setattr(attention, _EXPANDED, HeadHalves(weight, heads=heads, key=key, value=value))


def _weight(projection: nn.Module) -> Tensor | None:
    """[outputs, rank] in the dtype of the model; None for what is no product alone."""
    if getattr(projection, "bias", None) is not None:
        return None
    if isinstance(projection, QuantisedLinear):
        return projection.matrix.unpacked(projection.dtype)
    return projection.weight if isinstance(projection, nn.Linear) else None


def check_latent(config: Any) -> None:
    """Raise ModelError for sizes that cannot be. config: transformers', of a text model with latent attention."""
    name = config.model_type
    sizes: dict[str, Any] = {size: getattr(config, size, None) for size in _SIZES}
    if getattr(config, "q_lora_rank", None) is not None:
        sizes["q_lora_rank"] = config.q_lora_rank
    if getattr(config, "index_topk", None) is not None:
        if INDEXED not in (getattr(config, "layer_types", None) or ()):
            raise ModelError(
                f"{name!r} chooses the tokens that attention reads (index_topk {config.index_topk}), and no layer of "
                "it has an indexer; those of deepseek_v32 and glm_moe_dsa have"
            )
        sizes |= {size: getattr(config, size, None) for size in _INDEX_SIZES}
    for size, given in sizes.items():
        if not isinstance(given, int) or given < 1:
            raise ModelError(f"{name!r}: {size} is {given}; latent attention needs at least 1")
    if (kv_heads := getattr(config, "num_key_value_heads", None)) not in (None, heads := config.num_attention_heads):
        raise ModelError(
            f"{name!r}: num_key_value_heads is {kv_heads}; in latent attention it is num_attention_heads, {heads}"
        )
    if sizes.get("index_head_dim", config.qk_rope_head_dim) < config.qk_rope_head_dim:
        raise ModelError(
            f"{name!r}: index_head_dim is {config.index_head_dim}, of which qk_rope_head_dim, "
            f"{config.qk_rope_head_dim}, are rotated"
        )
    if sizes["qk_rope_head_dim"] % 2:
        raise ModelError(f"{name!r}: qk_rope_head_dim is {config.qk_rope_head_dim}; numbers are rotated in pairs")
