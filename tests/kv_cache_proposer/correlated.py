"""Entries like a model's: few causes seen in every layer, a mean, and a little of each entry's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.codec import LatentCodec
from kv_cache_proposer.f_theta.fit import fit
from kv_cache_proposer.f_theta.group_layout import LayerShape
from kv_cache_proposer.f_theta.importance import from_projections
from kv_cache_proposer.f_theta.statistics import Statistics

# Layers of unlike shape, the model's layer 2 left out, sizes that are multiples of nothing.
SHAPES = (
    LayerShape(layer=0, kv_heads=2, head_dim=6),
    LayerShape(layer=1, kv_heads=2, head_dim=6),
    LayerShape(layer=3, kv_heads=3, head_dim=5),
    LayerShape(layer=4, kv_heads=1, head_dim=10),
    LayerShape(layer=5, kv_heads=2, head_dim=6),
)
QUERY_GROUP = 3
HIDDEN = 32
CAUSES = 9


@dataclass(frozen=True, slots=True)
class Entries:
    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]

    def __getitem__(self, entries: slice) -> Entries:
        return Entries(*([part[entries] for part in parts] for parts in (self.keys, self.values, self.queries)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_entries(count: int, *, seed: int = 1, outlier: float = 1.0) -> Entries:
    """`count` entries from one fixed mixing of causes; `outlier` scales how far they lie from the mean."""
    mixing, draw = generator(0), generator(seed)
    causes = torch.randn(count, CAUSES, generator=draw) * torch.linspace(3.0, 0.3, CAUSES) * outlier
    parts: list[list[Tensor]] = [[], []]
    queries: list[Tensor] = []
    for shape in SHAPES:
        for part in parts:
            size = (shape.kv_heads, shape.head_dim)
            mean = torch.randn(size, generator=mixing)
            own = 0.1 * torch.randn(count, *size, generator=draw)
            part.append(torch.einsum("nc,chd->nhd", causes, torch.randn(CAUSES, *size, generator=mixing)) + mean + own)
        heads = shape.kv_heads * QUERY_GROUP
        queries.append(torch.randn(count, heads, shape.head_dim, generator=draw))
    return Entries(parts[0], parts[1], queries)


def make_projections() -> dict[int, Tensor]:
    draw = generator(7)
    return {
        shape.layer: torch.randn(HIDDEN, shape.kv_heads * QUERY_GROUP * shape.head_dim, generator=draw)
        for shape in SHAPES
    }


def make_statistics(entries: Entries | None = None, *, group_layers: int = 2, chunk: int = 700) -> Statistics:
    entries = make_entries(3000) if entries is None else entries
    statistics = Statistics(SHAPES, group_layers=group_layers)
    for first in range(0, len(entries.keys[0]), chunk):
        part = entries[first : first + chunk]
        statistics.add(part.keys, part.values, part.queries)
    return statistics


def make_codec(
    bytes_per_token: int = 24, *, group_layers: int = 2, precision: str = "float16", kernels: str = "auto"
) -> LatentCodec:
    statistics = make_statistics(group_layers=group_layers)
    importances = from_projections(statistics, make_projections())
    return fit(statistics, importances, bytes_per_token=bytes_per_token, precision=precision, kernels=kernels)


def relative_error(codec: LatentCodec, entries: Entries) -> float:
    """Squared error over squared distance from the entries' mean, over all layers."""
    keys, values = codec.decode(codec.encode(entries.keys, entries.values))
    exact, restored = [*entries.keys, *entries.values], [*keys, *values]
    error = sum(float((a - b).square().sum()) for a, b in zip(exact, restored, strict=True))
    return error / sum(float((a - a.mean(0)).square().sum()) for a in exact)
