"""An index of keys that says which old entries a query reads: leading components of keys before RoPE, few bits each.

    key before RoPE     ≈ mean + Σ_j basis_j · step_j · (code_j + ½ − levels / 2)          r codes of `bits` bits

A key before rotation lies near a few directions, which calibration finds for each layer and KV head. A token's score is
that of its rebuilt key at its position. Instead of rotating every rebuilt key, the query is rotated back, once for each
run of `run` neighbouring positions, by the mean of their rotations, and projected; then a token costs r products.

    score(t) = scaling · q · R(t) k̂ = scaling · Σ_j (basis_j · R(−t) q) · c_j(t)
    weight   = Σ over the group's query heads of their softmax, over what the query reads anyway and all candidates

The k candidates of largest weight are read exactly, the lowest position first among equals. What is read anyway (sink
and window) enters the softmax with its exact scores.

Codes lie in tiles of 32 runs. A lane is a pair of runs, as far before the tile's middle as behind it: a kernel then
works out sums and differences of the two. Lane l of vector v has the token at offset `of_vector[v, l]`, and the codes
of all vectors of a lane are one string of bits, cut into words.

    tile   words [W, 16] int32, W = ⌈2 · run · r · bits / 32⌉

Source: Loki, arXiv 2406.02542 (components for the choice); here of keys before rotation, quantised, by token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_engine.kernels.latents import CodeTables, Synthesis

LANES = 16
RUNS_OF_TILE = 32
RUNS = (1, 2, 4, 8)
MOST_TILE = RUNS_OF_TILE * max(RUNS)
MOST_BITS = 8
_WORD = 32
# Components with few levels are cut at three deviations, others at four.
_REACH, _FINE_REACH, _FINE_BITS = 3.0, 4.0, 4

# rotate(vectors [H, n, D], shifts [n]): each rotated to a position so much later (negative: earlier)
RotateBy = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexShape:
    """rank: components of a key. bits: of a component. run: positions that share a rotation of the query."""

    rank: int
    bits: int
    run: int

    @property
    def number(self) -> int:
        """A number of its own, positive, by which plan lines name it."""
        return (self.rank << 16) + (self.bits << 8) + self.run

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return RUNS_OF_TILE * self.run

    @property
    def levels(self) -> int:
        """How many codes a component has."""
        return 1 << self.bits

    @property
    def vectors(self) -> int:
        return 2 * self.run

    @property
    def words(self) -> int:
        """Words of a lane."""
        return -(-self.vectors * self.rank * self.bits // _WORD)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of one KV head."""
        return self.words * LANES * 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyComponents:
    """What calibration found of a layer's unrotated keys: mean [Hkv, D]; basis [Hkv, D, R], orthonormal, the largest
    spread first; deviations [Hkv, R]. All float32.
    """

    mean: Tensor
    basis: Tensor
    deviations: Tensor

    @property
    def rank(self) -> int:
        return self.basis.shape[-1]

    def to(self, device: torch.device) -> KeyComponents:
        return KeyComponents(
            mean=self.mean.to(device), basis=self.basis.to(device), deviations=self.deviations.to(device)
        )

    def steps(self, shape: IndexShape) -> Tensor:
        """[Hkv, r], the size of a code's step."""
        reach = _REACH if shape.bits < _FINE_BITS else _FINE_REACH
        return self.deviations[:, : shape.rank] * (2 * reach / shape.levels)

    def rows(self, shape: IndexShape) -> Tensor:
        """[Hkv, r + 1, D], what codes are multiplied with; the last row is what is added whatever they are."""
        scaled = self.basis[..., : shape.rank].mT * self.steps(shape)[..., None]
        middle = 0.5 - shape.levels / 2
        return torch.cat([scaled, (self.mean + middle * scaled.sum(1))[:, None]], dim=1)


class KeyIndexes(Protocol):
    """A device's own tables for indexes of keys. All that is given or returned lies on the device."""

    def turns(self, frequencies: Tensor, head_dim: int, shape: IndexShape, tokens: int, device: torch.device) -> Any:
        """What all indexes of keys that are rotated alike share, for histories of up to `tokens`.

        frequencies: [turned / 2] float64 on the host, radians a position of each pair of channels, halves apart.
        """

    def rows(self, components: KeyComponents, shape: IndexShape, turned: int, device: torch.device) -> Any:
        """What indexes of the same layer share. turned: channels that are rotated."""

    def numbers(self, halves: Sequence[Tensor], rows: Any, turns: Any) -> Tensor:
        """An index, whose address is the word INDEX of lines (`kernels/reads.py`).

        halves: its bytes in K and in V, [pairs of tiles, Hkv, tile_bytes] uint8. All that is given must outlive it.
        """

    def archive(
        self, halves: tuple[Tensor, Tensor], first: int, tables: CodeTables, synthesis: Synthesis, found: Tensor
    ) -> Tensor:
        """Where tokens of an index's layer come from that are in no region: from their codes, position `first` on.

        halves: of the codes, uint8 [places, half] each. found: float32 [2], becomes NaN where one of the keys, or of
        the values, that are restored is not finite. All that is given must outlive it.
        """

    def name_archive(self, numbers: Tensor, archive: Tensor | None) -> None:
        """From now on an index, by its numbers, restores chosen tokens from this archive, or from none."""

    def write_tiles(
        self,
        keys: Tensor,
        table: Tensor,
        *,
        kv_heads: int,
        region: int,
        first: int,
        end: int,
        shape: IndexShape,
        sink: int = 0,
        ring: int = 0,
    ) -> None:
        """Write the tiles [first, end) of every layer of the table from its keys in the buffer [R, D], one at each
        position; from position `sink` on in a ring buffer of so many slots behind the sink, if ring > 0. As
        `pack(encode(…))` of the keys rotated back, up to rounding, and each tile by itself.

        table: [layers, 2] int64, the addresses of the indexes, and the first buffer vectors of the regions, which have
        `region` vectors for each KV head.
        """


# Components by layer: of every layer whose queries may read all entries.
ModelComponents = Mapping[int, KeyComponents]


def components_digest(components: ModelComponents) -> str:
    """SHA-256 of all components: what sessions that choose by them belong to. Empty without any."""
    if not components:
        return ""
    digest = hashlib.sha256()
    for layer, found in sorted(components.items()):
        digest.update(str(layer).encode())
        for part in (found.mean, found.basis, found.deviations):
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def encode(keys: Tensor, components: KeyComponents, shape: IndexShape) -> Tensor:
    """Codes [Hkv, n, r] int64 of unrotated keys [Hkv, n, D] in any float dtype."""
    centred = keys.float() - components.mean[:, None]
    found = centred @ components.basis[..., : shape.rank] / components.steps(shape)[:, None]
    return (found.floor() + shape.levels // 2).clamp(0, shape.levels - 1).nan_to_num().long()


def pack(codes: Tensor, shape: IndexShape) -> Tensor:
    """Codes [..., tile, r] of whole tiles -> their words [..., W, 16] int32."""
    lead, total = codes.shape[:-2], shape.vectors * shape.rank
    by_lane = codes[..., of_vector(shape.run).to(codes.device), :]  # [..., vectors, 16, r]
    strings = by_lane.transpose(-3, -2).reshape(*lead, LANES, total)
    bits = (strings[..., None] >> torch.arange(shape.bits, device=codes.device) & 1).reshape(
        *lead, LANES, total * shape.bits
    )
    bits = torch.nn.functional.pad(bits, (0, shape.words * _WORD - bits.shape[-1]))
    weights = torch.ones((), dtype=torch.int64, device=codes.device) << torch.arange(_WORD, device=codes.device)
    words = (bits.view(*lead, LANES, shape.words, _WORD) * weights).sum(-1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32).transpose(-1, -2).contiguous()


def unpack(words: Tensor, shape: IndexShape) -> Tensor:
    """The inverse of `pack`: [..., W, 16] int32 -> [..., tile, r] int64."""
    lead, total = words.shape[:-2], shape.vectors * shape.rank
    longs = words.transpose(-1, -2).long() & (2**_WORD - 1)
    bits = (longs[..., None] >> torch.arange(_WORD, device=words.device) & 1).reshape(*lead, LANES, shape.words * _WORD)
    strings = bits[..., : total * shape.bits].reshape(*lead, LANES, total, shape.bits)
    codes = (strings << torch.arange(shape.bits, device=words.device)).sum(-1)
    by_lane = codes.view(*lead, LANES, shape.vectors, shape.rank).transpose(-3, -2)
    found = torch.empty(*lead, shape.tile, shape.rank, dtype=torch.int64, device=words.device)
    found[..., of_vector(shape.run).to(words.device).flatten(), :] = by_lane.flatten(-3, -2)
    return found


@lru_cache(maxsize=8)
def of_vector(run: int) -> Tensor:
    """[2 · run, 16], the offset in a tile of each lane of each vector: even vectors have runs behind the middle."""
    vectors, lanes = torch.arange(2 * run)[:, None], torch.arange(LANES)
    runs = torch.where(vectors % 2 == 0, RUNS_OF_TILE // 2 + lanes, RUNS_OF_TILE // 2 - 1 - lanes)
    return runs * run + vectors // 2


def component_scores(
    queries: Tensor, codes: Tensor, rows: Tensor, shape: IndexShape, rotate: RotateBy, scaling: float
) -> Tensor:
    """Scores [T, Hq, N] float32 of the first N positions, whole tiles, by their codes [Hkv, N, r].

    queries: [T, Hq, D], rotated. rows: `KeyComponents.rows`.
    """
    count, query_heads, head_dim = queries.shape
    kv_heads, positions, rank = codes.shape
    if not positions or not count:
        return torch.zeros(count, query_heads, positions, device=queries.device)
    group, runs = query_heads // kv_heads, positions // shape.run
    offsets = torch.arange(shape.run)
    starts = torch.arange(0, positions, shape.run)
    found = []
    for query in queries.float():  # one by one: a query rotated to every run is larger than the codes
        mean = rotate(query[:, None].expand(-1, shape.run, -1), -offsets).mean(1)
        turned = rotate(mean[:, None].expand(-1, runs, -1), -starts)  # [Hq, N / run, D]
        projected = turned.reshape(kv_heads, group * runs, head_dim) @ rows.mT
        projected = projected.view(kv_heads, group, runs, rank + 1)
        by_run = codes.float().view(kv_heads, 1, runs, shape.run, rank)
        scores = (by_run @ projected[..., :rank, None])[..., 0] + projected[..., rank:]
        found.append(scores.reshape(query_heads, positions))
    return torch.stack(found) * scaling


def token_weights(
    scores: Tensor, candidates: Tensor, near: Tensor, kv_heads: int, softcap: float | None = None
) -> Tensor:
    """Weights [T, Hkv, N] of tokens: the group's softmax over the candidates and what is read anyway, summed.

    scores: [T, Hq, N]. candidates: [T, N]. near: [T, Hq], the log-sum-exp of the exact scores of what is read anyway.
    """
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~candidates[:, None], -math.inf)
    total = torch.logaddexp(scores.logsumexp(-1), near) if scores.shape[-1] else near
    weights = (scores - total[..., None]).exp()
    count, heads, positions = scores.shape
    return weights.view(count, kv_heads, heads // kv_heads, positions).sum(2)
