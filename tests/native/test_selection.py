"""Native attention over chosen tokens: what the reference reads, and the same bits beside others and at every level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.native.decoders import RotationTables
from inference_engine.backends.native.forward import NativeAttention
from inference_engine.backends.native.key_indexes import NativeIndex, NativeIndexes
from inference_engine.kernels.components import (
    IndexShape,
    KeyComponents,
    component_scores,
    encode,
    pack,
    token_weights,
)
from inference_engine.kernels.gather import always_read, attend_entries, gather_attend, gather_vectors, select
from inference_engine.kernels.reads import (
    COUNT,
    FIELDS,
    HEAD_SLOTS,
    LAST,
    SINK,
    START,
    UPTO,
    AttentionCall,
    TokenRead,
)
from inference_engine.kv.context import LayerIndex
from inference_engine.kv.parts.component_index import TokenSelector
from inference_engine.native.library import ProductIdentity
from tests.kernels.rows import in_rows
from tests.tiny_native import library


@dataclass(frozen=True)
class Table:
    frequencies: np.ndarray


HKV, D, SCALING = 2, 32, 0.2
FREQUENCIES = (1000.0 ** -(np.arange(12) / 12)).astype(np.float32)  # 24 of 32 numbers are rotated
KINDS = {
    "exact positions": (IndexShape(rank=9, bits=3, run=1), 5, 3),
    "runs of two": (IndexShape(rank=16, bits=4, run=2), 0, 1),
    "runs of four": (IndexShape(rank=8, bits=3, run=4), 40, 7),
    # Where fields lie is known to the compiler.
    "usual codes": (IndexShape(rank=16, bits=3, run=4), 5, 3),
    "usual codes of wide heads": (IndexShape(rank=32, bits=3, run=4), 0, 5),
}


def rotate(vectors: Tensor, shifts: Tensor) -> Tensor:
    angles = (shifts[:, None].double() * torch.from_numpy(FREQUENCIES).double()).float()
    left, right, rest = torch.split(vectors, [12, 12, 8], dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin(), rest], -1)


def components(rank: int) -> KeyComponents:
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(HKV, D, D, generator=generator)).Q
    return KeyComponents(mean=torch.randn(HKV, D, generator=generator), basis=basis, deviations=torch.ones(HKV, D))


class Session:
    """Entries of one session in a pool, and their index."""

    def __init__(
        self,
        shape: IndexShape,
        sink: int,
        group: int,
        *,
        length: int = 700,
        kept: int = 60,
        identity: ProductIdentity = ProductIdentity.EXACT,
        has_series: bool = True,
    ) -> None:
        """has_series: slow frequencies are a series, as they are served; else each has a table."""
        slow = {} if has_series else {"slow": 0.0}
        generator = torch.Generator().manual_seed(length)
        unrotated = torch.randn(HKV, length, D, generator=generator) * 1.5
        self.shape, self.length, self.group = shape, length, group
        self.selector = TokenSelector(shape=shape, sink=sink, window=50, count=kept)
        self.keys = rotate(unrotated, torch.arange(length)).contiguous()
        self.values = torch.randn(HKV, length, D, generator=generator)
        self.components = components(shape.rank)
        tiles = length // shape.tile
        self.codes = encode(unrotated[:, : tiles * shape.tile], self.components, shape)
        words = pack(self.codes.view(HKV, tiles, shape.tile, -1).transpose(0, 1), shape)
        stored = words.view(tiles, HKV, -1).view(torch.uint8)
        layer = LayerIndex(
            layer=0,
            rotary="default",
            shape=shape,
            components=self.components,
            halves=(stored[0::2].contiguous(), stored[1::2].contiguous()),
            capacity=length,
        )
        index = NativeIndexes(
            {"default": Table(FREQUENCIES)}, {"default": RotationTables.of(FREQUENCIES, 10_000)}, identity, **slow
        ).open(layer)
        assert index is not None
        self.index: NativeIndex = index

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, HKV * self.group, D, generator=torch.Generator().manual_seed(count))

    def lines(self, positions: np.ndarray) -> Tensor:
        lines = torch.zeros(len(positions), FIELDS, dtype=torch.int64)
        numbers = {
            START: 0,
            HEAD_SLOTS: self.length,
            COUNT: self.length,
            LAST: self.length - 1,
            SINK: self.selector.sink,
        }
        for field, number in numbers.items():
            lines[:, field] = number
        lines[:, UPTO] = torch.from_numpy(positions)
        local, shape = self.selector.local_starts(positions), self.selector.shape
        own = {"kept": self.selector.count, "local": local, "shape": shape.number, "index": self.index.number}
        TokenRead(shape=shape).fill(lines.numpy(), **own)
        return lines

    def stored(self) -> tuple[Tensor, Tensor]:
        return in_rows(self.keys.reshape(-1, D), self.values.reshape(-1, D))

    def attend(
        self, queries: Tensor, lines: Tensor, *, level: str = "auto", threads: int = 1, softcap: float | None = None
    ) -> Tensor:
        lib = library()
        with lib.open_threads(threads) as opened:
            attention = NativeAttention(lib.kernels(level), opened)
            keys, values = self.stored()
            call = AttentionCall(queries, keys, values, lines, kv_heads=HKV, scaling=SCALING, softcap=softcap)
            return attention(call)

    def expected(self, queries: Tensor, positions: np.ndarray, softcap: float | None = None) -> Tensor:
        """What the reference reads, and the reference's attention over it."""
        starts = self.selector.local_starts(positions)
        always = always_read(positions, starts, sink=self.selector.sink, device="cpu")
        rows = self.components.rows(self.shape)
        scores = component_scores(queries, self.codes, rows, self.shape, rotate, SCALING)
        places = torch.arange(self.codes.shape[1])
        candidates = (places >= self.selector.sink) & (places < torch.from_numpy(starts)[:, None])
        near = always.positions[:, None].expand(-1, HKV, -1)
        read = partial(gather_vectors, indices=near.clamp(min=0))
        _, lse = attend_entries(queries, read(self.keys), read(self.values), near >= 0, SCALING, softcap)
        weights = token_weights(scores, candidates, lse, HKV, softcap)
        chosen = select(weights, candidates, self.selector.count)
        out, _ = gather_attend(
            queries, self.keys, self.values, chosen, always, block=1, scaling=SCALING, softcap=softcap
        )
        return out


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_reads_the_tokens_that_the_reference_chooses(kind: str, softcap: float | None) -> None:
    """With a table for every frequency: slow ones as a series may choose another token of almost its weight."""
    session = Session(*KINDS[kind], has_series=False)
    positions = np.array([3, 60, 255, 400, 511, 698, 699])  # from one without a distant token on
    queries = session.queries(len(positions))

    found = session.attend(queries, session.lines(positions), softcap=softcap)

    torch.testing.assert_close(found, session.expected(queries, positions, softcap), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["runs of two", "usual codes", "usual codes of wide heads"])
def test_other_queries_threads_and_instructions_change_no_bit(kind: str) -> None:
    session = Session(*KINDS[kind])
    positions = np.arange(680, 700)
    queries, lines = session.queries(len(positions)), session.lines(positions)

    together = session.attend(queries, lines, threads=2)

    for level in library().levels():
        alone = [session.attend(queries[i : i + 1], lines[i : i + 1], level=level) for i in (0, 11, 19)]
        assert torch.equal(torch.cat(alone), together[[0, 11, 19]]), level


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800000])
def test_a_query_that_is_not_finite_gives_no_finite_output(bits: int) -> None:
    """And ends nothing: whichever sign the processor gave it."""
    session = Session(*KINDS["runs of four"])
    queries, lines = session.queries(1), session.lines(np.array([690]))
    queries[0, 0, 3] = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)[0]

    for level in library().levels():
        assert not session.attend(queries, lines, level=level)[0, 0].isfinite().any(), level
