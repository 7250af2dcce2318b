"""One operation over many regions gives what attending to each by itself gives, in the reference and in the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.bounds import block_bounds, bounds_scores
from inference_engine.kernels.by_session import attend_by_session
from inference_engine.kernels.gather import always_read, distant_blocks, gather_attend, select
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kernels.reads import (
    FIELDS,
    PREFIX_HEAD_SLOTS,
    PREFIX_START,
    SINK,
    START,
    AttentionCall,
    BlockRead,
    RaggedAttention,
    StagedRead,
)
from inference_engine.kernels.topk import topk_by_sorting
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.layout import LayerRule, Layout
from inference_engine.kv.numbers import RegionLines
from inference_engine.kv.parts.block_index import BlockSelector, choose_blocks
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton
from tests.kernels.poisoned import poison
from tests.kernels.rows import in_rows

Build = Callable[[tuple[int, int, int], torch.dtype], tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]]
SEGMENT = 16
BLOCKS = 41  # at least as many as any history here has
RECORD = BlockRead(blocks=BLOCKS)
READS = (StagedRead(RECORD, upto=4096, tokens=4096),)
REFERENCES: tuple[RaggedAttention, ...] = (attend_ragged, attend_by_session)
SHAPES = [(3, 3, 64), (9, 3, 64), (4, 1, 24), (2, 2, 16), (8, 1, 256)]


def geometry(native: int | None, kv_heads: int, query_heads: int, head_dim: int, *, segment: int = SEGMENT) -> Geometry:
    layer = LayerGeometry(
        query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, native_window=native, rotary="default"
    )
    return Geometry(
        layers=(layer,),
        itemsize=4,
        trained_positions=4096,
        page_tokens=4,
        segment_tokens=segment,
        token_quantum=1,
        key_quantum=1,
    )


RULES = {
    "full": (LayerRule(), None),
    "native": (LayerRule(), 24),
    "sink-window": (LayerRule(sink=4, window=20), None),
    "sink-window-native": (LayerRule(sink=4, window=10), 12),
    "no-sink": (LayerRule(window=16), None),
    "one-entry": (LayerRule(window=0), None),
}
LENGTHS = [1, 5, 16, 17, 40, 63, 64, 65, 200]


def layouts(*, segment: int = SEGMENT, limits: tuple[int, ...] = (256, 40)) -> list[tuple[str, Layout]]:
    return [
        (f"{name}-{limit}", Layout.of(rule, geometry(native, 1, 1, 16, segment=segment), native, limit))
        for name, (rule, native) in RULES.items()
        for limit in limits
    ]


def held(layout: Layout, length: int) -> np.ndarray:
    """Which position each slot holds once a history has this length, by the layout's own words."""
    slots = np.full(layout.capacity, -1, dtype=np.int64)
    positions = np.arange(length)
    start = layout.segment_start(length - 1)
    stays = (positions < layout.sink) | (positions >= layout.horizon(start))
    slots[layout.slots(positions[stays])] = positions[stays]
    return slots


@pytest.mark.parametrize(("name", "layout"), layouts(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_numbers_of_a_query_let_it_see_what_its_layout_lets_it_see(name: str, layout: Layout) -> None:
    from inference_engine.kernels.ragged_attention import seen

    for length in (length for length in LENGTHS if layout.window is not None or length <= layout.capacity):
        for first in {length - 1, max(layout.segment_start(length - 1), length - 3)}:
            queries = np.arange(first, length)
            own = held(layout, length)
            numbers = RegionLines(layout).of(queries, last=length - 1, count=layout.capacity)
            expected = layout.visible(queries, own)
            for place, line in enumerate(numbers):
                found = seen(torch.arange(layout.capacity), line.tolist())
                assert found.tolist() == expected[place].tolist(), (length, int(queries[place]))


def line_of(start: int, layout: Layout, queries: np.ndarray, *, count: int) -> np.ndarray:
    """The lines of queries, the last of which is that of the last position, over regions that begin at `start`."""
    lines = RegionLines(layout).of(queries, last=int(queries[-1]), count=count)
    lines[:, START] = start
    return lines


def case(
    shape: tuple[int, int, int], dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Queries of sessions of all kinds and lengths, and what each gives by itself."""
    query_heads, kv_heads, dim = shape
    torch.manual_seed(seed)
    keys, values = (torch.randn(60_000 // kv_heads, dim).to(dtype) for _ in range(2))
    lines, alone, asked, start = [], [], [], 1
    for _, layout in layouts():
        for length in (length for length in LENGTHS if layout.window is not None or length <= layout.capacity):
            own = held(layout, length)
            query = torch.randn(1, query_heads, dim).to(dtype)
            lines.append(line_of(start, layout, np.array([length - 1]), count=layout.capacity)[0].tolist())
            index = start + torch.arange(kv_heads)[:, None] * layout.region + torch.arange(layout.capacity)
            mask = torch.zeros(1, layout.capacity)
            mask[0, ~torch.from_numpy(layout.visible(np.array([length - 1]), own)[0])] = float("-inf")
            alone.append(attend(query.float(), keys[index].float(), values[index].float(), mask, scaling=dim**-0.5))
            asked.append(query)
            start = (start + 7) % 100 + 1
    lines.append([0] * FIELDS)
    asked.append(torch.randn(1, query_heads, dim).to(dtype))
    alone.append(torch.zeros(1, query_heads, dim))
    return torch.cat(asked), keys, values, torch.tensor(lines), alone


def chunks(
    shape: tuple[int, int, int], dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """As `case`, of chunks of prefills that fill tiles and do not, with others' queries and padding between."""
    query_heads, kv_heads, dim = shape
    torch.manual_seed(seed)
    keys, values = (torch.randn(8_000, dim).to(dtype) for _ in range(2))
    lines, alone, asked, start = [], [], [], 1
    tile = max(16, 64 * kv_heads // query_heads)  # queries of a tile of the kernel, or more
    for number, layout in enumerate(chosen[1] for chosen in layouts(segment=48, limits=(200,))[::2]):
        long = (20, 22 + 2 * tile) if layout.window is None else (146, 146 + min(46, tile + 8))
        for first, length in ((0, 1), long)[number % 2 :]:
            queries = np.arange(first, length)
            own = held(layout, length)
            count = min(length, layout.capacity)
            lines.append(line_of(start, layout, queries, count=count))
            index = start + torch.arange(kv_heads)[:, None] * layout.region + torch.arange(count)
            mask = torch.zeros(len(queries), count)
            mask[~torch.from_numpy(layout.visible(queries, own[:count]))] = float("-inf")
            asked.append(torch.randn(len(queries), query_heads, dim).to(dtype))
            kept, valued = keys[index].float(), values[index].float()
            alone.append(attend(asked[-1].float(), kept, valued, mask, scaling=dim**-0.5))
            start += 150
    # A query between padding queries, in a tile that begins and ends with such.
    lone = lines[0][:1]
    for count, line in ((2 * tile - sum(map(len, lines)) % tile + 3, None), (1, lone), (2 * tile, None)):
        lines.append(np.zeros((count, FIELDS), dtype=np.int64) if line is None else line)
        asked.append(torch.randn(count, query_heads, dim).to(dtype))
        alone.append(torch.zeros(count, query_heads, dim))
    index = int(lone[0, 0]) + torch.arange(kv_heads)[:, None] * int(lone[0, 1]) + torch.arange(int(lone[0, 6]) + 1)
    alone[-2] = attend(asked[-2].float(), keys[index].float(), values[index].float(), None, scaling=dim**-0.5)
    return torch.cat(asked), keys, values, torch.from_numpy(np.concatenate(lines)), alone


def selections(
    shape: tuple[int, int, int], dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """As `case`, of queries that read selected blocks as in `kernels/gather.py`, each beside one that reads all."""
    query_heads, kv_heads, dim = shape
    torch.manual_seed(seed)
    keys, values = (torch.randn(16_000, dim).to(dtype) for _ in range(2))
    lines, alone, asked, start = [], [], [], 1
    for block, sink, count in ((4, 4, 3), (8, 5, 2), (4, 0, 0), (4, 0, 1), (8, 12, 100), (16, 16, 2)):
        selector = BlockSelector(block=block, sink=sink, window=20, count=count)
        layout = Layout.of(LayerRule(mechanisms=(selector,)), geometry(None, kv_heads, query_heads, dim), None, 160)
        for length in (41, 97, 160):
            own = start + torch.arange(kv_heads)[:, None] * layout.region
            slots = own + torch.arange(length)
            whole = slots[:, : length // block * block]
            target = own + layout.summaries_from + torch.arange(length // block)
            keys[target], values[target] = block_bounds(keys[whole], block)
            queries = np.array([length - 1])
            always = always_read(queries, selector.local_starts(queries), sink=selector.sink_tokens, device="cpu")
            candidates = distant_blocks(always, block=block, count=length // block)
            asked.append(torch.randn(1, query_heads, dim).to(dtype))
            low, high = keys[target].float(), values[target].float()
            kept = select(bounds_scores(asked[-1], low, high, dim**-0.5), candidates, count)
            given = (asked[-1].float(), keys[slots].float(), values[slots].float())
            alone.append(gather_attend(*given, kept, always, block=block, scaling=dim**-0.5)[0])
            whole_line = line_of(start, layout, queries, count=length)
            line = whole_line.copy()
            choose_blocks(line, RECORD, layout, selector, queries)
            lines += [line[0].tolist(), whole_line[0].tolist()]
            asked.append(torch.randn(1, query_heads, dim).to(dtype))
            given = (asked[-1].float(), keys[slots].float(), values[slots].float())
            alone.append(attend(*given, None, scaling=dim**-0.5))
            start += kv_heads * layout.region
    return torch.cat(asked), keys, values, torch.tensor(lines), alone


def forks(
    shape: tuple[int, int, int], dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """As `case`, of forks of one session, each beside another session; some in tiles of their own."""
    query_heads, kv_heads, dim = shape
    torch.manual_seed(seed)
    keys, values = (torch.randn(16_000, dim).to(dtype) for _ in range(2))
    own, limit, prefix, lent = geometry(None, kv_heads, query_heads, dim), 256, 5, 96
    whole = Layout.of(LayerRule(), own, None, limit)
    tile = max(16, 64 * kv_heads // query_heads)
    heads = torch.arange(kv_heads)[:, None]
    lines, alone, asked, start = [], [], [], 1000
    for base, length, count in ((40, 41, 1), (96, 200, 3), (17, 90, 1), (64, 70 + 2 * tile, 2 * tile + 5)):
        layout = whole.behind(base, own, limit)
        queries = np.arange(length - count, length)
        line = line_of(start, layout, queries, count=length)
        line[:, PREFIX_START], line[:, PREFIX_HEAD_SLOTS] = prefix, lent
        other = start + kv_heads * layout.region  # no region is another's
        lines += [line, line_of(other, replace(whole, capacity=layout.capacity), np.array([9]), count=10)]
        before = prefix + heads * lent + torch.arange(base)
        index = torch.cat([before, start + heads * layout.region + torch.arange(length - base)], dim=1)
        mask = torch.zeros(count, length)
        mask[~torch.from_numpy(whole.visible(queries, np.arange(length)))] = float("-inf")
        neighbour = other + heads * layout.region + torch.arange(10)
        for asked_for, read, under in ((count, index, mask), (1, neighbour, None)):
            asked.append(torch.randn(asked_for, query_heads, dim).to(dtype))
            given = (asked[-1].float(), keys[read].float(), values[read].float())
            alone.append(attend(*given, under, scaling=dim**-0.5))
        start += 2 * kv_heads * layout.region
    return torch.cat(asked), keys, values, torch.from_numpy(np.concatenate(lines)), alone


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_reads_the_blocks_that_gathering_reads(shape: tuple[int, int, int]) -> None:
    queries, keys, values, regions, alone = selections(shape, torch.float32)

    for attention, entries in product(REFERENCES, ((keys, values), in_rows(keys, values))):
        out = attention(
            AttentionCall(queries, *entries, regions, kv_heads=shape[1], scaling=shape[2] ** -0.5, reads=READS)
        )
        assert torch.allclose(out, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("build", [case, chunks, forks])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_gives_each_query_what_it_gets_by_itself(shape: tuple[int, int, int], build: Build) -> None:
    queries, keys, values, regions, alone = build(shape, torch.float32)

    for attention, entries in product(REFERENCES, ((keys, values), in_rows(keys, values))):
        out = attention(AttentionCall(queries, *entries, regions, kv_heads=shape[1], scaling=shape[2] ** -0.5))
        assert torch.allclose(out, torch.cat(alone), atol=1e-5)


def moved(call: AttentionCall, device: torch.device) -> AttentionCall:
    """On the device, with keys and values side by side."""
    keys, values = in_rows(call.keys.to(device), call.values.to(device))
    return replace(call, queries=call.queries.to(device), keys=keys, values=values, lines=call.lines.to(device))


def kernel_of() -> RaggedAttention:
    """Imported late: Triton decides at that moment whether it interprets."""
    from inference_engine.kernels.triton.ragged_attention import attend_ragged as kernel

    return kernel


def device_of_kernels() -> torch.device:
    """A GPU, or where there is none the interpreter, set to cut queries into fewer parts."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    from inference_engine.kernels.triton import block_selection, few_queries, gather, query_tiles, ragged_attention

    # It takes long for each program: fewer than would fill a GPU.
    ragged_attention._PROGRAMS, ragged_attention._MOST_PARTS, ragged_attention._LEAST_PART = 32, 3, 64
    ragged_attention._MERGED_AT_ONCE = 2
    query_tiles._PROCESSORS, query_tiles._LEAST_PART, query_tiles._MERGED, query_tiles._MERGED_OF_FEW = 7, 1, 2, 4
    query_tiles._OF_FEW = query_tiles._OF_FEW._replace(slots=16)
    query_tiles._OF_MANY = query_tiles._OF_MANY._replace(rows=64, slots=16)
    query_tiles._OF_FLOATS = query_tiles._OF_FLOATS._replace(slots=16)
    few_queries._TILE, few_queries._PROGRAMS = few_queries._TILE._replace(rows=16), 12
    few_queries._PROGRAMS_OF_ONE = 6
    gather._PARTS, gather._PARTS_OF_MANY = 6, 2
    block_selection._SHORT, block_selection._NARROW, block_selection._FEW = 8, 16, 4
    gather._READ = gather._READ._replace(rows=16)
    return torch.device("cpu")


def compare_kernel() -> None:
    """What a child process below runs: the kernel against the reference, interpreted where there is no GPU."""
    device = device_of_kernels()
    kernel = kernel_of()
    is_quick = device.type == "cuda"
    half = torch.bfloat16 if is_quick else torch.float16  # the interpreter has no bfloat16
    for number, shape in enumerate(SHAPES):
        for dtype, tolerance in ((torch.float32, 2e-5), (half, 2e-2)):
            given = case(shape, dtype)[:4]
            count = len(given[3])
            # As many as are served query by query, and a few by themselves: these are split into more parts.
            # Interpreted, each shape has some of the lines, and all shapes together have all of them.
            parts = (slice(0, 64), slice(64, count)) if is_quick else (slice(number, count, len(SHAPES)),)
            for part in (*parts, slice(count - 3, count)) if dtype is torch.float32 else (slice(number, number + 6),):
                softcaps = (None, 3.0) if is_quick else ((None, 3.0)[number % 2],)
                for softcap in softcaps if part.start == count - 3 else (None,):
                    queries, keys, values, regions = (given[0][part], *given[1:3], given[3][part])
                    heads, scaling = shape[1], shape[2] ** -0.5
                    call = AttentionCall(
                        queries, keys, values, regions, kv_heads=heads, scaling=scaling, softcap=softcap
                    )
                    expected = attend_ragged(call)
                    out = kernel(moved(call, device)).cpu()
                    assert out.dtype == dtype
                    worst = (out.float() - expected.float()).abs().max().item()
                    assert worst < tolerance, (shape, dtype, softcap, worst)


def compare_chunks_and_selections() -> None:
    """What the other child process runs; one shape where it is interpreted."""
    device = device_of_kernels()
    # Of many numbers some are above 4, where bfloat16 has steps of a thirty-second.
    tolerances = {torch.float32: 2e-5, torch.bfloat16: 4e-2} if device.type == "cuda" else {torch.float32: 2e-5}
    for shape in SHAPES if device.type == "cuda" else [(4, 1, 24)]:
        for dtype, tolerance in tolerances.items():
            compare_alone(chunks, shape, dtype, tolerance, device)
            compare_alone(selections, shape, dtype, tolerance, device, reads=READS)
            compare_alone(forks, shape, dtype, tolerance, device)


def compare_selecting_steps() -> None:
    """Steps with selected blocks, over memory that begins as rubbish: each query's result, whatever is beside it."""
    from inference_engine.kernels.triton import block_selection, few_queries, gather, ragged_attention

    device = device_of_kernels()
    poison(block_selection, few_queries, gather)
    shape = (4, 2, 24)
    queries, keys, values, regions, _ = selections(shape, torch.float32)
    keys[:: len(keys) // 40] = 0.25  # some equal scores
    # On the CPU: where a mask has an odd width, torch's own kernel reads beside it.
    call = AttentionCall(queries, keys, values, regions, kv_heads=shape[1], scaling=0.2, reads=READS)
    expected = attend_ragged(call).to(device)
    call = moved(call, device)

    def attend(some: slice, kernel: RaggedAttention) -> Tensor:
        return kernel(call.of(some))

    for kernel in (ragged_attention.attend_ragged, ragged_attention.attend_invariant):
        together = attend(slice(None), kernel)
        assert torch.allclose(together, expected, atol=2e-5)
        for some in (slice(0, 1), slice(7, 8), slice(14, 18)):
            alone = attend(some, kernel)
            assert torch.allclose(alone, together[some], atol=2e-5)
            is_own = torch.equal(alone, together[some])
            assert is_own or kernel is ragged_attention.attend_ragged, "a query's bits depend on what is beside it"
    ragged_attention._FEW_QUERIES = 4  # now these are many
    few = replace(ragged_attention.attend_ragged, alone_upto=4)
    assert torch.allclose(attend(slice(0, 12), few), expected[:12], atol=2e-5)
    compare_lists(device)


def compare_beside_selections() -> None:
    """Queries that read all they see, in steps in which others select blocks: chunks, forks, rings, padding."""
    from inference_engine.kernels.triton.few_queries import attend_few

    device, shape = device_of_kernels(), (4, 2, 24)
    for build in (case, chunks, forks):
        queries, keys, values, regions, alone = build(shape, torch.float32)
        expected, count = torch.cat(alone), 64 if device.type == "cuda" else 20
        for first in range(0, len(queries), count if device.type == "cuda" else 4 * count):
            some = slice(first, first + count)
            given = AttentionCall(queries, keys, values, regions, kv_heads=shape[1], scaling=shape[2] ** -0.5)
            call = moved(given.of(some), device)
            out = torch.full_like(call.queries, float("nan"))
            listed = torch.zeros(len(out), shape[1], 4, dtype=torch.int32, device=device)
            attend_few(call, out, listed=listed)
            assert torch.allclose(out.cpu(), expected[some], atol=2e-5), (build, first)


def compare_tiles() -> None:
    """Tiles of neighbouring queries, over memory that begins as rubbish: few and many, alone and beside others'."""
    from inference_engine.kernels.triton import query_tiles

    device = device_of_kernels()
    poison(query_tiles)
    is_quick = device.type == "cuda"
    kinds = {torch.float32: 2e-5, torch.bfloat16: 4e-2} if is_quick else {torch.float32: 2e-5, torch.float16: 2e-2}
    shapes = SHAPES if is_quick else [(4, 1, 24), (4, 2, 16)]
    for (dtype, tolerance), shape in zip(kinds.items(), shapes, strict=False):
        for build in (case, chunks, forks):
            queries, keys, values, regions, alone = build(shape, dtype)
            expected = torch.cat(alone)
            call = AttentionCall(queries, keys, values, regions, kv_heads=shape[1], scaling=shape[2] ** -0.5)
            for count, first in ((len(queries), 0), (3, 1), (1, 0), (37, 20)):
                some = slice(first, min(len(queries), first + count))
                out = torch.full_like(queries[some], float("nan"), device=device)
                query_tiles.attend_tiles(moved(call.of(some), device), out)
                worst = (out.cpu().float() - expected[some].float()).abs().max().item()
                assert worst < tolerance, (build, shape, dtype, some, worst)


def compare_lists(device: torch.device) -> None:
    """The lists of blocks of rows of several lengths, against the definition; NaN and equal scores among them."""
    from inference_engine.kernels.triton.block_selection import Scores, select_blocks

    lines, expected, tile = [], [], 4
    scores = torch.randn(9, 2, BLOCKS)
    best = torch.full((9, 2, -(-BLOCKS // tile)), float("nan"))
    scores[2:] = scores[2:].round()
    scores[4:, 0, 5:9] = torch.tensor([float("nan"), float("-inf"), -0.0, float("inf")])
    scores[5:, 1] = 0
    for row, (kept, sink, local) in enumerate(
        [
            (3, 4, 160),
            (3, 0, 64),
            (0, 4, 160),
            (40, 4, 160),
            (7, 4, 160),
            (1, 0, 160),
            (5, 4, 44),
            (9, 160, 40),
            (39, 0, 160),
        ]
    ):
        line = torch.zeros(FIELDS, dtype=torch.int64)
        line[SINK] = sink
        RECORD.fill(line.numpy(), kept=kept, local=local, block=4)
        lines.append(line)
        candidates = torch.arange(BLOCKS)
        candidates = (candidates * 4 >= sink) & (candidates * 4 < local)
        if candidates.any():
            own = torch.split(scores[row, :, candidates], tile, dim=1)
            best[row, :, : len(own)] = torch.stack([part.amax(1) for part in own], dim=1)
        expected.append(topk_by_sorting(scores[row], kept, candidates=candidates))
    listed = select_blocks(Scores(scores.to(device), best.to(device)), torch.stack(lines).to(device)).cpu()
    for row, blocks in enumerate(expected):
        for head, own in enumerate(blocks):
            found = listed[row, head, : int((own >= 0).sum())]
            assert found.tolist() == own[own >= 0].tolist(), (row, head)


def compare_alone(
    build: Build,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    tolerance: float,
    device: torch.device,
    *,
    reads: tuple[StagedRead, ...] = (),
) -> None:
    """The kernel against what each query gives by itself."""
    queries, keys, values, regions, alone = build(shape, dtype)
    call = AttentionCall(queries, keys, values, regions, kv_heads=shape[1], scaling=shape[2] ** -0.5, reads=reads)
    out = kernel_of()(moved(call, device)).cpu()
    worst = (out.float() - torch.cat(alone).float()).abs().max().item()
    assert worst < tolerance, (build, shape, dtype, worst)


@pytest.mark.parametrize(
    "compare",
    [
        compare_kernel,
        interpreted(compare_selecting_steps),
        interpreted(compare_chunks_and_selections),
        interpreted(compare_beside_selections),
        interpreted(compare_tiles),
    ],
)
def test_the_kernel_gives_what_the_reference_gives(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
