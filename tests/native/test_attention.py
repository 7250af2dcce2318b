"""The native attention gives what the reference gives, and a query's bits depend on nothing but what it reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.native.forward import NativeAttention
from inference_engine.kernels.attention import attend
from inference_engine.kernels.merge import attend_causal_state, attend_state
from inference_engine.kernels.ragged_attention import attend_ragged, kept, seen
from inference_engine.kernels.reads import (
    BASE,
    COUNT,
    FIELDS,
    FLOOR,
    HEAD_SLOTS,
    KIND,
    LAST,
    PREFIX_HEAD_SLOTS,
    PREFIX_START,
    RING,
    SINK,
    SINK_FLOOR,
    START,
    UPTO,
    AttentionCall,
    BlockRead,
    StagedRead,
)
from inference_engine.native import build
from inference_engine.native.library import load, why_missing
from tests.kernels.rows import in_rows
from tests.tiny_native import library as tiny_library

LEVELS = ["plain", "neon", "i8mm", "avx2", "avxvnni", "avx512"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZE = 24_000  # vectors of a buffer
BLOCKS = BlockRead(blocks=1)
KEPT, LOCAL, BLOCK, BOUNDS = (BLOCKS.word(name) for name in BLOCKS.WORDS)

pytestmark = pytest.mark.skipif(load() is None, reason=str(why_missing()))


class Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "regions", "head_sinks", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("count", "query_stride", "region_stride", "out_stride", "row")),
        *(
            (name, ctypes.c_int32)
            for name in ("query_heads", "kv_heads", "head_dim", "value_dim", "kv_type", "reserved")
        ),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build.LIBRARY))
    loaded.kakeya_kernels.restype = ctypes.c_void_p
    loaded.kakeya_open_threads.restype = ctypes.c_void_p
    return loaded


@cache
def threads(count: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(library().kakeya_open_threads(count))


@cache
def kernels(level: str) -> ctypes.c_void_p | None:
    found = library().kakeya_kernels(level.encode())
    return None if found is None else ctypes.c_void_p(found)


def best_level() -> str:
    return [level for level in LEVELS if kernels(level)][-1]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call: queries [N, Hq, Dk], keys [R, Dk], values [R, Dv], equally far apart, lines [N, FIELDS]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    lines: NDArray[np.int64]
    kv_heads: int
    softcap: float | None = None
    head_sinks: Tensor | None = None

    @property
    def scaling(self) -> float:
        return float(self.queries.shape[-1] ** -0.5)

    def of(self, chosen: list[int]) -> Case:
        return replace(self, queries=self.queries[chosen].clone(), lines=self.lines[chosen].copy())


def run(case: Case, *, level: str | None = None, thread_count: int = 1) -> Tensor:
    queries, lines = case.queries.contiguous(), np.ascontiguousarray(case.lines)
    (count, query_heads, dim), value_dim = queries.shape, case.values.shape[1]
    out = torch.full((count, query_heads, value_dim), 7.0)
    call = Attention(
        queries=queries.data_ptr(),
        keys=case.keys.data_ptr(),
        values=case.values.data_ptr(),
        regions=lines.ctypes.data,
        head_sinks=None if case.head_sinks is None else case.head_sinks.data_ptr(),
        out=out.data_ptr(),
        lse=None,
        count=count,
        query_stride=query_heads * dim,
        region_stride=FIELDS,
        out_stride=query_heads * value_dim,
        row=case.keys.stride(0),
        query_heads=query_heads,
        kv_heads=case.kv_heads,
        head_dim=dim,
        value_dim=value_dim,
        kv_type=DTYPES.index(case.keys.dtype),
        scaling=case.scaling,
        softcap=case.softcap or 0.0,
    )
    library().kakeya_attend(kernels(level or best_level()), threads(thread_count), ctypes.byref(call))
    return out


# -- lines of every kind ----------------------------------------------------------------------------------------------


@dataclass
class Buffer:
    """Gives out regions of a buffer one after another, with a gap between them."""

    rng: np.random.Generator
    kv_heads: int
    used: int = 3

    def region(self, slots: int) -> tuple[int, int]:
        head_slots = slots + int(self.rng.integers(0, 5))
        start = self.used
        self.used += head_slots * self.kv_heads + int(self.rng.integers(0, 9))
        assert self.used <= SIZE, "the buffer is too small"
        return start, head_slots


def line(start: int, head_slots: int, count: int, upto: int) -> NDArray[np.int64]:
    numbers = np.zeros(FIELDS, dtype=np.int64)
    numbers[[START, HEAD_SLOTS, COUNT, UPTO, LAST]] = start, head_slots, count, upto, count - 1
    return numbers


Kind = Callable[[Buffer, int, int], list[NDArray[np.int64]]]


def full(buffer: Buffer, length: int, queries: int) -> list[NDArray[np.int64]]:
    """The last `queries` positions of a history."""
    start, head_slots = buffer.region(length)
    return [line(start, head_slots, length, upto) for upto in range(length - queries, length)]


def native(buffer: Buffer, length: int, queries: int) -> list[NDArray[np.int64]]:
    """They see a window only."""
    lines = full(buffer, length, queries)
    for numbers in lines:
        numbers[[FLOOR, SINK_FLOOR]] = max(0, numbers[UPTO] - 40)
    return lines


def ring(buffer: Buffer, length: int, queries: int) -> list[NDArray[np.int64]]:
    """A sink, and a ring that holds the last positions; the native window may hide the sink."""
    sink, window = int(buffer.rng.integers(0, 7)), length // 3 + 1
    slots = window + queries + int(buffer.rng.integers(0, 20))
    start, head_slots = buffer.region(sink + slots)
    lines = []
    for upto in range(length - queries, length):
        numbers = line(start, head_slots, min(length, sink + slots), upto)
        numbers[[SINK, RING, LAST, FLOOR]] = sink, slots, length - 1, max(0, upto - window)
        numbers[SINK_FLOOR] = buffer.rng.choice([0, 2, max(0, upto - window)])
        lines.append(numbers)
    return lines


def forks(buffer: Buffer, length: int, queries: int) -> list[NDArray[np.int64]]:
    """Forks of one prefix, and the session that has it."""
    base = int(buffer.rng.integers(1, length + 1))
    prefix_start, prefix_slots = buffer.region(base)
    lines = []
    for _ in range(queries):
        own = int(buffer.rng.integers(1, 70))
        start, head_slots = buffer.region(own)
        for upto in range(max(0, base + own - 2), base + own):
            numbers = line(start, head_slots, base + own, upto)
            numbers[[PREFIX_START, PREFIX_HEAD_SLOTS, BASE]] = prefix_start, prefix_slots, base
            lines.append(numbers)
    return [*lines, line(prefix_start, prefix_slots, base, base - 1)]


def blocks(buffer: Buffer, length: int, queries: int) -> list[NDArray[np.int64]]:
    """They select; what a region has besides entries are summaries."""
    block, found = int(buffer.rng.choice([4, 16, 64])), -(-length // 4)
    start, head_slots = buffer.region(length + found)
    lines = []
    for upto in range(length - queries, length):
        numbers = line(start, head_slots, length, upto)
        local = max(0, (upto - int(buffer.rng.integers(0, 90))) // block * block)
        BLOCKS.fill(numbers, kept=buffer.rng.integers(0, 6), local=local, block=block, bounds=length)
        numbers[SINK] = buffer.rng.choice([0, 3, block])
        lines.append(numbers)
    return lines


def nothing(buffer: Buffer, length: int, queries: int) -> list[NDArray[np.int64]]:
    """Padding, and queries before the first entry that they could see."""
    start, head_slots = buffer.region(length)
    blind = line(start, head_slots, length, 5)
    blind[[FLOOR, SINK_FLOOR]] = 6
    return [np.zeros(FIELDS, dtype=np.int64), line(start, head_slots, length, -1), blind]


KINDS: dict[str, Kind] = {kind.__name__: kind for kind in (full, native, ring, forks, blocks, nothing)}
SHAPES = [(9, 3, 64), (3, 3, 16), (8, 1, 80), (14, 2, 64), (4, 2, 96), (16, 1, 256), (2, 1, 112), (5, 1, 128)]


def case_of(
    kinds: list[tuple[str, int, int]],
    shape: tuple[int, int, int] = (9, 3, 64),
    dtype: torch.dtype = torch.float32,
    *,
    softcap: float | None = None,
    seed: int = 0,
) -> Case:
    """kinds: name, length of the history, queries."""
    query_heads, kv_heads, dim = shape
    rng = np.random.default_rng(seed)
    buffer = Buffer(rng, kv_heads)
    lines = [numbers for name, length, queries in kinds for numbers in KINDS[name](buffer, length, queries)]
    noise = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(buffer.used + 9, dim, generator=noise).to(dtype) for _ in range(2))
    queries = torch.randn(len(lines), query_heads, dim, generator=noise) * 2
    return Case(queries=queries, keys=keys, values=values, lines=np.array(lines), kv_heads=kv_heads, softcap=softcap)


def reference(case: Case) -> Tensor:
    """In float64, except where blocks are selected."""
    found = attend_ragged(
        AttentionCall(
            case.queries.double(),
            *in_rows(case.keys.double(), case.values.double()),
            torch.from_numpy(case.lines),
            kv_heads=case.kv_heads,
            scaling=case.scaling,
            softcap=case.softcap,
            reads=[StagedRead(BLOCKS, upto=4096, tokens=4096)],
        )
    )
    sees = [bool(slots_read(case, row).any()) for row in range(len(case.lines))]
    return found.masked_fill(~torch.tensor(sees)[:, None, None], 0).float()


def slots_read(case: Case, row: int) -> Tensor:
    """[Hkv, count], by the reference."""
    numbers = case.lines[row].tolist()
    slots = torch.arange(numbers[COUNT])
    if not numbers[KIND]:
        return seen(slots, numbers).expand(case.kv_heads, -1)
    heads = numbers[START] + torch.arange(case.kv_heads)[:, None] * numbers[HEAD_SLOTS]
    return kept(case.queries[row : row + 1], case.keys, case.values, heads, numbers, scaling=case.scaling)[0]


MIX = [
    ("full", 300, 20),
    ("nothing", 30, 0),
    ("full", 1, 1),
    ("ring", 333, 9),
    ("blocks", 700, 3),
    ("forks", 290, 4),
    ("native", 270, 17),
    ("full", 777, 1),
    ("ring", 17, 3),
    ("blocks", 40, 2),
    ("forks", 20, 2),
]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


# -- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_of_every_kind_equal_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = case_of(MIX, shape, dtype, seed=sum(shape))
    torch.testing.assert_close(run(case, thread_count=2), reference(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_head_sinks_join_the_softmax(softcap: float | None) -> None:
    case = case_of([("full", 300, 7), ("ring", 90, 3), ("nothing", 9, 0)], softcap=softcap)
    case = replace(case, head_sinks=torch.linspace(-3, 9, 9))
    found = run(case)
    for row, numbers in enumerate(case.lines.tolist()):
        read = slots_read(case, row)[0]
        if not read.any():
            assert (found[row] == 0).all()
            continue
        index = numbers[START] + torch.arange(case.kv_heads)[:, None] * numbers[HEAD_SLOTS] + read.nonzero()[:, 0]
        expected = attend(
            case.queries[row : row + 1],
            case.keys[index],
            case.values[index],
            None,
            scaling=case.scaling,
            softcap=softcap,
            head_sinks=case.head_sinks,
        )
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_histories_equal_the_reference(dtype: torch.dtype) -> None:
    case = case_of([("full", 5000, 3), ("blocks", 4990, 2)], (6, 2, 32), dtype)
    expected = reference(case)
    for count in (1, 2):
        torch.testing.assert_close(run(case, thread_count=count), expected, rtol=1e-5, atol=1e-5)


def test_equal_bounds_choose_the_first_blocks_and_what_is_no_number_is_chosen() -> None:
    case = case_of([("blocks", 900, 6)], (2, 1, 16), seed=1)
    numbers = case.lines[0]
    case.lines[:, SINK] = 16
    BLOCKS.fill(case.lines, kept=3, local=800, block=16)
    first = int(numbers[START] + numbers[BOUNDS])
    case.keys[first : first + 60] = -1
    case.values[first : first + 60] = 1
    torch.testing.assert_close(run(case), reference(case), rtol=1e-5, atol=1e-5)
    case.values[first + 30] = float("nan")
    torch.testing.assert_close(run(case), reference(case), rtol=1e-5, atol=1e-5)


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"), [((9, 3, 64), torch.float32), ((8, 1, 80), torch.float16), ((4, 4, 32), torch.bfloat16)]
)
def test_bits_depend_on_no_neighbour_and_on_no_thread(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = case_of(MIX, shape, dtype, seed=5)
    rows = list(range(len(case.lines)))
    expected = torch.cat([run(case.of([row])) for row in rows])
    shuffled = np.random.default_rng(1).permutation(rows).tolist()
    for count in (1, 2, 3):
        assert_equal(run(case, thread_count=count), expected)
        assert_equal(run(case.of(shuffled), thread_count=count), expected[shuffled])
        assert_equal(run(case.of(rows[::-1]), thread_count=count), expected[rows[::-1]])
        assert_equal(run(case.of(rows[3::7]), thread_count=count), expected[rows[3::7]])
        for row in rows[::11]:
            assert_equal(run(case.of([row]), thread_count=count), expected[[row]])


@pytest.mark.parametrize("level", ["avx2", "avx512"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level_of_instructions_has_the_same_bits(level: str, dtype: torch.dtype) -> None:
    if kernels(level) is None or kernels("plain") is None:
        pytest.skip("this processor, or this build of the library, does not have it")
    for shape, softcap in (((9, 3, 48), None), ((7, 1, 80), 4.0)):
        case = case_of(MIX, shape, dtype, softcap=softcap, seed=2)
        case = replace(case, head_sinks=torch.linspace(-1, 2, shape[0]))
        assert_equal(run(case, level=level, thread_count=2), run(case, level="plain", thread_count=2))


# -- what is not seen, and what is not a number -----------------------------------------------------------------------


def read_by_any(case: Case) -> Iterator[Tensor]:
    for row, numbers in enumerate(case.lines.tolist()):
        for head, read in enumerate(slots_read(case, row)):
            slots = read.nonzero()[:, 0]
            own = numbers[START] + head * numbers[HEAD_SLOTS] - numbers[BASE] + slots
            prefix = numbers[PREFIX_START] + head * numbers[PREFIX_HEAD_SLOTS] + slots
            yield torch.where(slots < numbers[BASE], prefix, own)
            if numbers[KIND]:
                yield numbers[START] + head * numbers[HEAD_SLOTS] + numbers[BOUNDS] + torch.arange(numbers[COUNT] // 4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_no_query_sees_has_no_effect(poison: float, dtype: torch.dtype) -> None:
    case = case_of(MIX, dtype=dtype, seed=8)
    expected = run(case)
    unread = torch.ones(len(case.keys), dtype=torch.bool)
    unread[torch.cat(list(read_by_any(case)))] = False
    assert unread.sum() > 100
    for states in (case.keys, case.values):
        states[unread] = poison
    assert_equal(run(case, thread_count=2), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_key_and_a_value_give_the_bits_of_two_buffers(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = case_of([(kind, 300, 5) for kind in KINDS], shape, dtype, seed=4)
    keys, values = in_rows(case.keys, case.values)
    assert_equal(run(replace(case, keys=keys, values=values), thread_count=2), run(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["beside the key", "inside the key"])
def test_values_have_a_size_of_their_own(inside: bool, dtype: torch.dtype) -> None:
    """As latent attention has them."""
    case = case_of([("full", 300, 40), ("ring", 300, 1), ("forks", 100, 3), ("nothing", 9, 3)], (4, 1, 80), dtype)
    keys, values = (case.keys, case.keys[:, :64]) if inside else in_rows(case.keys, case.values[:, :16].clone())
    case = replace(case, keys=keys, values=values)
    torch.testing.assert_close(run(case, thread_count=2), reference(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_only_queries_that_see_what_is_not_finite_have_no_number(which: str, poison: float) -> None:
    case = case_of([("full", 300, 40), ("full", 50, 3)], seed=8)
    expected = run(case)
    slot = 281
    numbers = case.lines[0]
    getattr(case, which)[numbers[START] + slot, 5] = poison  # the first of three heads
    found = run(case)
    sees = torch.tensor([row < 40 and int(case.lines[row][UPTO]) >= slot for row in range(len(case.lines))])
    assert not found[sees][:, :3, 5].isfinite().any()
    assert which == "values" or found[sees][:, :3].isnan().all()
    assert_equal(found[sees][:, 3:].contiguous(), expected[sees][:, 3:].contiguous())
    assert_equal(found[~sees], expected[~sees])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_a_piece_and_of_recent_entries_equal_the_reference(dtype: torch.dtype, softcap: float | None) -> None:
    """Of queries that lie in a wider register; each has the bits that it has alone."""
    generator = torch.Generator().manual_seed(3)
    queries = 3 * torch.randn(41, 12, 32, generator=generator)[:, :6]
    keys, values = torch.randn(2, 2, 300, 32, generator=generator).to(dtype)
    with tiny_library().open_threads(2) as opened:
        attention = NativeAttention(tiny_library().kernels(), opened)
        for count in (300, 41):
            given = (keys[:, :count], values[:, :count])
            piece = attention.piece(queries, *given, scaling=0.3, softcap=softcap)
            recent = attention.causal_state(queries, *given, scaling=0.3, softcap=softcap)
            assert piece[0].shape == recent[0].shape == (41, 6, 32) and piece[1].shape == recent[1].shape == (41, 6)
            for found, expected in (
                (piece, attend_state(queries, *given, None, scaling=0.3, softcap=softcap)),
                (recent, attend_causal_state(queries, *given, scaling=0.3, softcap=softcap)),
            ):
                for own, wanted in zip(found, expected, strict=True):
                    torch.testing.assert_close(own, wanted, atol=2e-5, rtol=2e-5)
            alone = attention.piece(queries[7:8], *given, scaling=0.3, softcap=softcap)
            assert all(torch.equal(own[7:8], one) for own, one in zip(piece, alone, strict=True))
