"""Blocks that are not on the device: to read them there changes no bit, and what is fetched stays at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.kernels import reads as fields
from inference_engine.kernels.offloaded import OffloadedRecord
from inference_engine.kernels.reads import AttentionCall, BlockRead, OffloadedBlockRead, StagedRead
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton
from tests.kernels.rows import in_rows
from tests.kernels.test_ragged_attention import device_of_kernels

HEADS, GROUP = 2, 2
BLOCKS, OFFLOADED = BlockRead(blocks=40), OffloadedBlockRead(blocks=40)


@dataclass(kw_only=True)
class History:
    """A session's entries twice: all in slots that are their positions, and with some blocks in the host's memory."""

    dim: int
    block: int
    sink: int  # entries, whole blocks
    count: int  # entries
    resident: int  # from this position on, whole blocks
    ring: int
    places: int
    kept: int
    chunk: int
    dtype: torch.dtype
    seed: int = 0
    device: torch.device = field(default_factory=device_of_kernels)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        blocks = -(-self.count // self.block)
        self.region = self.sink + self.ring + blocks + self.places * self.block
        self.plain_region = blocks * self.block + blocks
        keys, values = (
            torch.randn(HEADS, blocks * self.block, self.dim, generator=generator).to(self.dtype) for _ in range(2)
        )
        by_block = keys.view(HEADS, blocks, self.block, self.dim)
        low, high = by_block.amin(2), by_block.amax(2)
        # Poisoned: what is nowhere written must not be read.
        made = [torch.full((HEADS, self.region, self.dim), float("nan"), dtype=self.dtype) for _ in range(2)]
        held = torch.cat([torch.arange(self.sink), torch.arange(self.resident, self.count)])
        slots = torch.where(held < self.sink, held, self.sink + (held - self.sink) % self.ring)
        for states, source, bounds in zip(made, (keys, values), (low, high), strict=True):
            states[:, slots] = source[:, held]
            states[:, self.sink + self.ring :][:, :blocks] = bounds
        away = self.resident - self.sink
        self.chunks = []
        for first in range(0, away, self.chunk):
            chunk = torch.full((2, 2, HEADS, self.chunk, self.dim), float("nan"), dtype=self.dtype)
            some = slice(self.sink + first, min(self.sink + first + self.chunk, self.resident))
            chunk[1] = chunk[1].index_copy(
                2, torch.arange(some.stop - some.start), torch.stack([keys[:, some], values[:, some]])
            )
            self.chunks.append(chunk.pin_memory() if self.device.type == "cuda" else chunk)
        self.record = OffloadedRecord.of(
            layers=2,
            kv_heads=HEADS,
            places=self.places,
            fetched_from=self.sink + self.ring + blocks,
            chunks=len(self.chunks),
            chunk_tokens=self.chunk,
            layer_bytes=self.chunks[0][0].nbytes,
            device=self.device,
        )
        self.record.table.copy_(torch.tensor([chunk.data_ptr() for chunk in self.chunks]))
        plain = [torch.cat([keys, low], 1), torch.cat([values, high], 1)]
        self.begin = HEADS * self.plain_region
        self.expected: dict[tuple[int, int], Tensor] = {}  # by the number of queries, and what they were drawn with
        self.keys, self.values = in_rows(
            *(
                torch.cat([whole.flatten(0, 1), parts.flatten(0, 1)]).to(self.device)
                for whole, parts in zip(plain, made, strict=True)
            )
        )

    def lines(self, positions: list[int], *, may_fetch: bool) -> tuple[Tensor, Tensor]:
        """Of queries: over all entries in their slots, and with those that are away."""
        plain = torch.zeros(len(positions), fields.FIELDS, dtype=torch.int64)
        plain[:, fields.HEAD_SLOTS], plain[:, fields.SINK] = self.plain_region, self.sink
        plain[:, fields.LAST] = positions[-1]
        plain[:, fields.UPTO] = torch.tensor(positions)
        plain[:, fields.COUNT] = positions[-1] + 1
        local = np.array([(at - self.block) // self.block * self.block for at in positions])
        own = {"kept": self.kept, "local": local, "block": self.block}
        away = plain.clone()
        bounds = -(-self.count // self.block) * self.block
        BLOCKS.fill(plain.numpy(), bounds=bounds, **own)
        away[:, fields.START], away[:, fields.HEAD_SLOTS] = self.begin, self.region
        away[:, fields.RING], away[:, fields.COUNT] = self.ring, self.sink + self.ring
        own |= {"bounds": self.sink + self.ring, "places": self.record.addresses[1]}
        OFFLOADED.fill(away.numpy(), offloaded_end=self.resident if may_fetch else -self.resident, **own)
        return plain.to(self.device), away.to(self.device)

    def attended(self, queries: Tensor, lines: Tensor, record: BlockRead = BLOCKS) -> Tensor:
        from inference_engine.kernels.triton.ragged_attention import attend_ragged

        reads = [StagedRead(record, upto=len(queries), tokens=self.count)]
        options: dict[str, Any] = {"kv_heads": HEADS, "scaling": self.dim**-0.5, "reads": reads}
        return attend_ragged(AttentionCall(queries, self.keys, self.values, lines, **options))

    def compare(self, positions: list[int], *, may_fetch: bool, seed: int) -> list[int]:
        """Attend twice. Returns how many blocks were found in places, and how many were not."""
        plain, away = self.lines(positions, may_fetch=may_fetch)
        queries = torch.randn(
            len(positions), HEADS * GROUP, self.dim, generator=torch.Generator().manual_seed(seed)
        ).to(self.device, self.dtype)
        before = self.record.counts[1].sum(0)
        asked = len(positions), seed
        if asked not in self.expected:
            self.expected[asked] = self.attended(queries, plain)
        expected = self.expected[asked]
        found = self.attended(queries, away, OFFLOADED)
        assert expected.isfinite().all()
        worst = float((found - expected).abs().max())
        # A GPU's compiler may join a product and a sum in one of the two, and not in the other.
        allowed = 0.0 if self.device.type == "cpu" else 1e-5 if self.dtype == torch.float32 else 2e-3
        assert worst <= allowed, (self, positions, worst)
        assert not self.record.counts[0].any() and (self.record.places[0] == -1).all(), "another layer's"
        return (self.record.counts[1].sum(0) - before).tolist()


def compare_kernel() -> None:
    """What a child process runs."""
    _compare_kernel(slice(0, None if torch.cuda.is_available() else 1))


def compare_halves() -> None:
    _compare_kernel(slice(1, 2))


def _compare_kernel(which: slice) -> None:
    from inference_engine.kernels.triton import block_places, block_selection, gather

    if device_of_kernels().type != "cuda":  # each program takes its time
        gather._PARTS, block_places._FOUND, block_selection._SCORING_PROGRAMS = 4, 4, 2
    shapes = [
        History(dim=24, block=8, sink=8, count=137, resident=112, ring=40, places=5, kept=5, chunk=24,
                dtype=torch.float32),
        History(dim=32, block=64, sink=64, count=570, resident=448, ring=192, places=3, kept=3, chunk=192,
                dtype=torch.float16),
        # More places than blocks that are chosen at once; blocks that a tile does not divide.
        History(dim=16, block=24, sink=24, count=240, resident=192, ring=72, places=6, kept=4, chunk=120,
                dtype=torch.float32),
    ]  # fmt: skip
    for history in shapes[which]:
        last = history.count - 1
        assert history.compare([last], may_fetch=False, seed=1)[0] == 0
        assert (history.record.places == -1).all(), "nothing may be fetched"
        found, missed = history.compare([last], may_fetch=True, seed=1)
        assert found == 0 and missed > 0
        assert int((history.record.places >= 0).sum()) == missed
        assert history.compare([last], may_fetch=True, seed=1) == [missed, 0], "they stayed at hand"
        for seed in (2, 3) if history is shapes[0] else ():
            asked = sum(history.compare([last], may_fetch=True, seed=seed))
            assert history.compare([last], may_fetch=True, seed=seed) == [asked, 0]
        held = history.record.places.clone()
        for row in held[1].tolist():
            some = [block for block in row if block >= 0]
            assert len(some) == len(set(some)), "a block is in one place"
        # Several queries of a session read, and change nothing.
        history.compare([last - 2, last - 1, last], may_fetch=False, seed=9)
        assert torch.equal(history.record.places, held)
    # Beside queries that read all, and of two sessions in one step.
    one = shapes[0]
    plain, away = one.lines([one.count - 1], may_fetch=True)
    whole = plain.clone()
    whole[:, fields.KIND] = 0
    queries = torch.randn(3, HEADS * GROUP, one.dim, generator=torch.Generator().manual_seed(3)).to(one.device)
    mixed = one.attended(queries, torch.cat([whole, away, plain]), OFFLOADED)
    expected = one.attended(queries, torch.cat([whole, plain, plain]))
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compare", [compare_kernel, interpreted(compare_halves)])
def test_it_reads_what_it_would_on_the_device_to_the_bit_and_keeps_it_at_hand(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
