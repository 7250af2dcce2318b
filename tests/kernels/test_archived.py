"""Queries that read old entries from their codes, in Triton, give what the reference gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.kernels import archived as reference
from inference_engine.kernels.archived import LayerArchive, ReadFrom, Unpacked
from inference_engine.kernels.latents import Turn, operand_dtype
from inference_engine.kernels.ragged_attention import (
    ARCHIVE,
    COUNT,
    FIELDS,
    FLOOR,
    HEAD_SLOTS,
    LAST,
    RING,
    SINK,
    START,
    UPTO,
    attend_ragged,
)
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton
from tests.kernels.poisoned import poison
from tests.kernels.test_latents import made_codes, made_synthesis, made_tables, made_turn

LENGTH = 190
# Hkv, group, D, codes, chains.
SIZES = [(2, 3, 32, 37, 2), (1, 7, 64, 130, 37), (3, 1, 128, 64, 1)]
# Sink, slots behind it, position, floor: the second has few old entries, the third none, the fourth holds all.
SESSIONS = [(5, 40, 170, 139), (3, 24, 61, 40), (5, 30, 20, 0), (0, 0, 50, 0)]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True, kw_only=True)
class Step:
    """Sessions of one layer: what their queries read, by the references and by kernels."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    lines: list[list[int]]
    archives: list[LayerArchive | None]
    options: dict[str, Any]
    read: ReadFrom

    def regions(self, numbers: Sequence[int], rows: Sequence[int]) -> Tensor:
        lines = [list(self.lines[row]) for row in rows]
        known = iter(numbers)
        for row, line in zip(rows, lines, strict=True):
            if self.archives[row] is not None:
                line[ARCHIVE] = next(known)
        return torch.tensor(lines, device=self.queries.device)

    def room(self, count: int) -> Tensor:
        return reference.open_room(self.read, queries=count, device=self.keys.device).fill_(torch.nan)

    def attended(
        self,
        attend: Callable[..., Tensor],
        open_archives: Callable[..., Any],
        rows: Sequence[int] | None = None,
        *,
        units: Tensor | None = None,
        is_first: bool = True,
        **others: Any,
    ) -> Tensor:
        """rows: of the queries that are in the step; None: all."""
        rows = range(len(self.lines)) if rows is None else rows
        given = [archive for row in rows if (archive := self.archives[row]) is not None]
        known = open_archives(given) if given else None
        regions = self.regions([] if known is None else known.numbers, rows)
        unpacked = Unpacked(units=self.room(len(rows)) if units is None else units, is_first=is_first)
        queries = self.queries[list(rows)]
        return attend(queries, self.keys, self.values, regions, unpacked=unpacked, **self.options, **others)


def made_step(
    size: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    turns: bool = True,
    softcap: float | None = None,
    layer: int = 0,
) -> Step:
    heads, group, dim, count, chains = size
    tables = made_tables(count, chains, device)
    synthesis = made_synthesis((0, count, chains, heads, dim), dtype, device)
    if layer:  # of the same group: other entries of the same numbers
        synthesis.means.neg_()
    turn: Turn | None = made_turn(LENGTH, dim, device) if turns else None
    generator = torch.Generator().manual_seed(layer)
    lines: list[list[int]] = []
    archives: list[LayerArchive | None] = []
    start = 1
    for sink, ring, position, floor in SESSIONS:
        slots = sink + ring if ring else position + 1
        line = [0] * FIELDS
        line[START], line[HEAD_SLOTS], line[COUNT], line[SINK] = start, slots, min(slots, position + 1), sink
        line[RING], line[LAST], line[UPTO], line[FLOOR] = ring, position, position, floor
        lines.append(line)
        start += heads * slots
        halves = made_codes(max(1, position), tables, device)
        found = torch.zeros(2, device=device)
        archives.append(
            LayerArchive(halves=halves, first=sink, tables=tables, synthesis=synthesis, turn=turn, found=found)
            if ring
            else None
        )
    lines.insert(2, [0] * FIELDS)  # padding
    archives.insert(2, None)
    keys, values = torch.randn((2, start, dim), generator=generator).to(device, dtype)
    queries = torch.randn((len(lines), heads * group, dim), generator=generator).to(device, dtype)
    options = {"kv_heads": heads, "scaling": dim**-0.5, "softcap": softcap}
    more = tables.padded + 64  # another session's have so many
    read = ReadFrom(numbers=more, tokens=LENGTH, dtype=operand_dtype(dtype), begins=(0,))
    return Step(queries=queries, keys=keys, values=values, lines=lines, archives=archives, options=options, read=read)


def small_parts() -> str:
    """The device of the kernels; where it interprets, histories are cut into few parts."""
    from inference_engine.kernels.triton import archived

    poison(archived)
    if torch.cuda.is_available():
        return "cuda"
    archived._FAR, archived._NEAR, archived._TILE, archived._NEAR_SLOTS = 3, 2, 32, 16
    archived._UNPACKED, archived._THREADS = 16, 16
    return "cpu"


def compare_archived() -> None:
    """What a child process runs: sessions with and without archives, and padding between them, over rubbish."""
    _compare_archived(SIZES[:1])


def compare_larger() -> None:
    _compare_archived(SIZES[1:])


def _compare_archived(sizes: Sequence[tuple[int, int, int, int, int]]) -> None:
    from inference_engine.kernels.triton.archived import open_archives
    from inference_engine.kernels.triton.ragged_attention import attend_invariant
    from inference_engine.kernels.triton.ragged_attention import attend_ragged as attend

    device = small_parts()
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]
    for size in sizes:
        number = SIZES.index(size)
        for kind, dtype in enumerate(dtypes):
            if device == "cpu" and (number + kind) % 2:
                continue  # the interpreter takes its time
            turns, softcap = number != 1, 4.0 if number == 1 else None
            step = made_step(size, dtype, device, turns=turns, softcap=softcap)
            expected = step.attended(attend_ragged, reference.open_archives)
            found = step.attended(attend, open_archives)
            tolerance = TOLERANCES[dtype]
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=f"{size} {dtype}")
            assert not found[2].any(), "padding reads something"
            if not number:
                found = step.attended(attend_invariant, open_archives, rows=range(1, len(step.lines)))
                torch.testing.assert_close(found, expected[1:], atol=tolerance, rtol=tolerance)


def compare_rooms() -> None:
    """What a child process runs: numbers that are unpacked once, queries that take turns, and a query alone."""
    from inference_engine.kernels.triton.archived import open_archives
    from inference_engine.kernels.triton.ragged_attention import attend_ragged as attend

    device, size, dtype = small_parts(), SIZES[0], torch.float32
    first, second = (made_step(size, dtype, device, layer=layer) for layer in (0, 1))
    units = first.room(len(first.lines))
    first.attended(attend, open_archives, units=units)
    expected = second.attended(attend, open_archives)
    before = units.clone()
    found = second.attended(attend, open_archives, units=units, is_first=False)
    assert torch.equal(found, expected), "a layer does not read the numbers that its group has unpacked"
    assert torch.equal(units.nan_to_num(), before.nan_to_num()), "and unpacks them again"
    for rooms in (1, 2):
        found = second.attended(attend, open_archives, units=units[:rooms], is_first=False)
        assert torch.equal(found, expected), "queries that take turns read other numbers than their own"
    for row in (0, 1):
        alone = second.attended(attend, open_archives, rows=[row])
        assert torch.equal(alone[0], expected[row]), "a query's bits depend on what is beside it"


def compare_lengths() -> None:
    """What a child process runs: as many old entries as fill tiles, one more, one fewer, one, and all of them."""
    from inference_engine.kernels.triton import archived
    from inference_engine.kernels.triton.ragged_attention import attend_ragged as attend

    device = small_parts()
    step = made_step(SIZES[0], torch.float32, device)
    sink, tile, all_parts = SESSIONS[0][0], archived._TILE // 2, (archived._FAR, 1)
    for tokens in (1, tile - 1, tile, tile + 1, 2 * tile, 150):
        step.lines[0][FLOOR] = sink + tokens
        expected = step.attended(attend_ragged, reference.open_archives, rows=[0])
        for parts in all_parts:  # by many programs, and all tiles by one
            archived._FAR = parts
            found = step.attended(attend, archived.open_archives, rows=[0])
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5, msg=str((tokens, parts)))


def compare_broken() -> None:
    """What a child process runs: entries that are not finite, keys and values, are found; those behind are not read."""
    from inference_engine.kernels.triton.archived import open_archives
    from inference_engine.kernels.triton.ragged_attention import attend_ragged as attend

    device = small_parts()
    for place, broken in ((3, [True, False]), (40, [False, True])):
        step = made_step(SIZES[0], torch.float32, device)
        own = step.archives[0]
        assert own is not None
        step.attended(attend, open_archives, rows=[0])
        assert own.found.isfinite().all()
        own.synthesis.means[0, place] = torch.inf
        step.attended(attend, open_archives, rows=[0])
        assert own.found.isnan().tolist() == broken
        # The fourth line has an archive, none of whose entries has left its region.
        other = step.archives[3]
        assert other is not None
        step.attended(attend, open_archives, rows=[3])
        assert other.found.isfinite().all(), "entries are read that have not left"


@pytest.mark.parametrize(
    "compare",
    [
        compare_archived,
        *(interpreted(compare) for compare in (compare_broken, compare_larger, compare_rooms, compare_lengths)),
    ],
)
def test_the_kernels_do_what_the_reference_does(compare: Callable[[], None]) -> None:
    run_with_triton(compare)


def test_a_room_has_at_most_so_many_bytes_and_at_least_one_query() -> None:
    short = ReadFrom(numbers=1024, tokens=2**13, dtype=torch.float16, begins=(0,))
    long = replace(short, tokens=2**20)
    few, one = (reference.open_room(read, queries=64, device=torch.device("meta")) for read in (short, long))

    assert few.nbytes <= reference.MOST_BYTES < few.nbytes + few[0].nbytes
    assert few.dtype == torch.float16
    assert len(one) == 1
    assert short.fits and not long.fits


def test_rooms_are_of_few_sizes_and_never_too_small() -> None:
    sizes = {tokens: reference.room_for(tokens) for tokens in range(1, 9000)}

    assert all(size >= tokens for tokens, size in sizes.items())
    assert {*sizes.values()} == {1024, 2048, 4096, 8192, 16384}


def test_steps_of_two_rates_have_room_for_the_larger_and_unpack_where_either_begins() -> None:
    small = ReadFrom(numbers=64, tokens=2**13, dtype=torch.float16, begins=(0, 4))
    large = replace(small, numbers=128, tokens=2**10, begins=(0, 3))

    assert small.beside(None) == small
    assert small.beside(large) == large.beside(small) == replace(small, numbers=128, begins=(0, 3, 4))
