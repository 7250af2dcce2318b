"""Methods of papers that read or keep a part of a long history, each small and in plain torch, for comparison.

    Quest       2406.10774   pages of 16: the largest product that a page's key bounds allow; best pages, by query head
    Loki        2406.02542   principal components of rotated keys: best tokens by product in the leading quarter
    SnapKV      2404.14469   once, at the prompt's end: what its last queries look at stays, the rest is gone
    ShadowKV    2410.21465   keys of low rank, before rotation; best chunks of 8 by their mean key; outlier chunks exact

They see what a session's strategy sees: the entries of the prompt, computed with full attention, then a query at a
time. `budget` is how many of the prompt's tokens a query reads, or, with SnapKV, how many stay; what was generated is
read in full, which favours none of them. Where a paper does more for speed (kernels, overlapped fetching), nothing of
that is here: these answer what is found and what it takes in bytes, not how fast.

A mask stands for reading less: what is not seen is not read. Shapes: B sessions of one length, S tokens of the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from inference_engine.kv.geometry import Geometry, LayerGeometry

BYTES = 2  # of a number of an entry, as sessions keep them


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """What one layer has after the prompt: its keys [B, Hkv, S, D] and its last queries [B, Hq, n, D], both rotated.

    scaling: of their products. layer: its index in the model. turn: keys [B, Hkv, S, D] of positions
    0 … S − 1, rotated to them, or back.
    """

    keys: Tensor
    queries: Tensor
    scaling: float
    layer: int
    turn: Turn


class Turn(Protocol):
    def __call__(self, keys: Tensor, *, back: bool) -> Tensor: ...


class LayerChoice(ABC):
    """What later queries see of one layer's prompt."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys  # [B, Hkv, S, D], that queries are multiplied with

    @abstractmethod
    def seen(self, queries: Tensor) -> Tensor:
        """queries [B, Hq, D], rotated. Which tokens of the prompt each may read: bool [B, Hq, S]."""


class Method(ABC):
    """name: in tables. calibrated: whether `calibrate` needs keys of other text before `choice`."""

    name: str
    calibrated = False

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def __str__(self) -> str:
        return f"{self.name}, {self.budget} of the prompt"

    def calibrate(self, layer: int, keys: Tensor) -> None:
        """Rotated keys [Hkv, n, D] of calibration text, of one layer."""

    @abstractmethod
    def choice(self, layer: Prompted) -> LayerChoice: ...

    @abstractmethod
    def held_bytes(self, layer: LayerGeometry, tokens: int) -> tuple[int, int]:
        """What one layer of a session of `tokens` takes on the device and off it, in 16-bit numbers."""


def per_group(scores: Tensor, kv_heads: int) -> Tensor:
    """[B, Hq, …] → [B, Hkv, group, …]."""
    return scores.reshape(len(scores), kv_heads, -1, *scores.shape[2:])


def best(scores: Tensor, count: int) -> Tensor:
    """bool, like scores [..., n]: the `count` largest of each."""
    chosen = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)


def entry_bytes(layer: LayerGeometry) -> int:
    return 2 * layer.kv_heads * layer.head_dim * BYTES


class Quest(Method):
    """Pages of 16; the first two layers read everything, as in the paper."""

    name = "Quest"
    page, dense_layers = 16, 2

    def choice(self, layer: Prompted) -> LayerChoice:
        if layer.layer < self.dense_layers:
            return _Everything(layer.keys)
        return _Pages(layer, self.page, self.budget)

    def held_bytes(self, layer: LayerGeometry, tokens: int) -> tuple[int, int]:
        pages = -(-tokens // self.page)
        return entry_bytes(layer) * tokens + 2 * layer.kv_heads * layer.head_dim * BYTES * pages, 0


class _Everything(LayerChoice):
    def seen(self, queries: Tensor) -> Tensor:
        return queries.new_ones((*queries.shape[:2], self.keys.shape[2]), dtype=torch.bool)


class _Pages(LayerChoice):
    def __init__(self, layer: Prompted, page: int, budget: int) -> None:
        super().__init__(layer.keys)
        self._page, self._count = page, max(1, budget // page)
        padded = functional.pad(layer.keys, (0, 0, 0, -layer.keys.shape[2] % page), mode="constant", value=torch.nan)
        pages = padded.reshape(*padded.shape[:2], -1, page, padded.shape[3])
        self._low = pages.nan_to_num(torch.inf).amin(3)
        self._high = pages.nan_to_num(-torch.inf).amax(3)

    def seen(self, queries: Tensor) -> Tensor:
        grouped = per_group(queries, self.keys.shape[1])[..., None, :]
        bounds = torch.maximum(grouped * self._low[:, :, None], grouped * self._high[:, :, None]).sum(-1)
        bounds[..., -1] = torch.inf  # the page that is being filled
        pages = best(bounds.flatten(1, 2), self._count)
        return pages.repeat_interleave(self._page, dim=-1)[..., : self.keys.shape[2]]


class Loki(Method):
    """Components of rotated keys, calibrated on other text; the leading quarter of the channels."""

    name = "Loki"
    calibrated = True

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self._bases: dict[int, Tensor] = {}

    def calibrate(self, layer: int, keys: Tensor) -> None:
        centred = keys.double() - keys.double().mean(1, keepdim=True)
        _, directions = torch.linalg.eigh((centred.mT @ centred).cpu())
        rank = max(1, keys.shape[-1] // 4)
        self._bases[layer] = directions.flip(-1)[..., :rank].to(keys)

    def choice(self, layer: Prompted) -> LayerChoice:
        return _Components(layer.keys, self._bases[layer.layer], self.budget)

    def held_bytes(self, layer: LayerGeometry, tokens: int) -> tuple[int, int]:
        return entry_bytes(layer) * tokens, 0  # keys are kept in the basis itself


class _Components(LayerChoice):
    def __init__(self, keys: Tensor, basis: Tensor, budget: int) -> None:
        super().__init__(keys)
        self._basis, self._budget = basis, budget
        self._reduced = torch.einsum("bhsd,hdr->bhsr", keys, basis)

    def seen(self, queries: Tensor) -> Tensor:
        grouped = torch.einsum("bhgd,hdr->bhgr", per_group(queries, self.keys.shape[1]), self._basis)
        return best((grouped @ self._reduced.mT).flatten(1, 2), self._budget)


class SnapKV(Method):
    """The last 32 tokens of the prompt vote, their weights smoothed over 5 neighbours; the winners and they stay."""

    name = "SnapKV"
    observed, smoothed = 32, 5

    def choice(self, layer: Prompted) -> LayerChoice:
        return _Kept(layer, self.observed, self.smoothed, self.budget)

    def held_bytes(self, layer: LayerGeometry, tokens: int) -> tuple[int, int]:
        return entry_bytes(layer) * min(tokens, self.budget), 0


class _Kept(LayerChoice):
    def __init__(self, layer: Prompted, observed: int, smoothed: int, budget: int) -> None:
        super().__init__(layer.keys)
        count, kv_heads = layer.keys.shape[2], layer.keys.shape[1]
        queries = per_group(layer.queries[:, :, -observed:], kv_heads)  # [B, Hkv, group, n, D]
        last = queries.shape[3]
        scores = queries @ layer.keys[:, :, None].mT * layer.scaling
        places = torch.arange(count, device=scores.device)
        scores = scores.masked_fill(places > places[-last:, None], -torch.inf)
        votes = scores.softmax(-1).sum((2, 3))[..., : count - last]
        if votes.shape[-1]:
            votes = functional.avg_pool1d(votes, smoothed, stride=1, padding=smoothed // 2)
        kept = best(votes, max(0, budget - last)) if votes.shape[-1] else votes.bool()
        self._kept = torch.cat([kept, kept.new_ones((*kept.shape[:2], last))], dim=-1)

    def seen(self, queries: Tensor) -> Tensor:
        return self._kept.repeat_interleave(queries.shape[1] // self.keys.shape[1], dim=1)


class ShadowKV(Method):
    """Rank 160 of 1,024, chunks of 8 and 48 outliers in the paper: rank follows the width, outliers are half at most.

    Chosen chunks are read with rebuilt keys and exact values, which lie on the host; the last 32 tokens are exact.
    """

    name = "ShadowKV"
    chunk, outliers, local, share = 8, 48, 32, 160 / 1024

    def choice(self, layer: Prompted) -> LayerChoice:
        return _Chunks(layer, self)

    def rank(self, kv_heads: int, head_dim: int) -> int:
        return max(1, round(self.share * kv_heads * head_dim))

    def exact_chunks(self) -> int:
        return min(self.outliers, self.budget // 2 // self.chunk)

    def held_bytes(self, layer: LayerGeometry, tokens: int) -> tuple[int, int]:
        width = layer.kv_heads * layer.head_dim
        rank = self.rank(layer.kv_heads, layer.head_dim)
        numbers = rank * (tokens + width) + width * (tokens // self.chunk)
        return BYTES * numbers + entry_bytes(layer) * min(tokens, self.budget), BYTES * width * tokens


class _Chunks(LayerChoice):
    def __init__(self, layer: Prompted, method: ShadowKV) -> None:
        count, size = layer.keys.shape[2], method.chunk
        self._size, self._scaling = size, layer.scaling
        self._whole = max(0, count - method.local) // size  # chunks; the rest is exact
        exact = layer.keys[:, :, : self._whole * size]
        chunks = exact.reshape(*exact.shape[:2], self._whole, size, exact.shape[3])
        self._landmarks = chunks.mean(3)
        # The least cosine of a chunk's keys with their mean: chunks that their mean stands for badly.
        near = functional.cosine_similarity(chunks, self._landmarks[:, :, :, None], dim=-1).amin(-1)
        self._outliers = best(-near, method.exact_chunks())
        budget = method.budget - (count - self._whole * size)
        self._count = max(0, budget // size - method.exact_chunks())
        joined = layer.turn(layer.keys, back=True).transpose(1, 2).flatten(2).float()  # [B, S, Hkv · D]
        rank = min(method.rank(layer.keys.shape[1], layer.keys.shape[3]), *joined.shape[1:])
        products = (joined.mT @ joined).double()
        directions = torch.linalg.eigh(products)[1][..., -rank:].float()
        low = (joined @ directions @ directions.mT).view(layer.keys.transpose(1, 2).shape).transpose(1, 2)
        rebuilt = layer.turn(low.to(layer.keys.dtype), back=False)
        is_exact = torch.cat(
            [
                self._outliers.repeat_interleave(size, dim=-1),
                self._outliers.new_ones((*self._outliers.shape[:2], count - self._whole * size)),
            ],
            dim=-1,
        )
        super().__init__(torch.where(is_exact[..., None], layer.keys, rebuilt))
        self._is_exact = is_exact

    def seen(self, queries: Tensor) -> Tensor:
        kv_heads = self.keys.shape[1]
        scores = per_group(queries, kv_heads) @ self._landmarks.mT * self._scaling  # [B, Hkv, group, chunks]
        weights = scores.float().softmax(-1).amax(2).masked_fill(self._outliers, -1.0)
        chosen = best(weights, self._count).repeat_interleave(self._size, dim=-1)
        rest = chosen.new_zeros((*chosen.shape[:2], self.keys.shape[2] - chosen.shape[2]))
        seen = torch.cat([chosen, rest], dim=-1) | self._is_exact
        return seen.repeat_interleave(queries.shape[1] // kv_heads, dim=1)


METHODS: dict[str, type[Method]] = {one.name.lower(): one for one in (Quest, Loki, SnapKV, ShadowKV)}


def held_bytes(method: Method, geometry: Geometry, tokens: int) -> tuple[int, int]:
    """Of a session, on the device and off it; layers with a window of their own keep that."""
    on = off = 0
    for layer in geometry.layers:
        if layer.native_window is not None:
            on += entry_bytes(layer) * min(tokens, layer.native_window)
            continue
        own = method.held_bytes(layer, tokens)
        on, off = on + own[0], off + own[1]
    return on, off
