"""Gathered attention: it reads the selected blocks alone, each entry once, and equals dense attention under a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.bounds import block_bounds, bounds_scores
from inference_engine.kernels.gather import (
    QUERIES_AT_ONCE,
    Always,
    always_read,
    distant_blocks,
    gather_attend,
    gather_vectors,
    masked_attend,
    select,
)

# Sums of the same float32 numbers, of size 1, in another order.
ROUNDING: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
DIM, KV_HEADS = 24, 2
SCALING = DIM**-0.5

each_group = pytest.mark.parametrize("group", [1, 3, 4])
each_block = pytest.mark.parametrize("block", [16, 64, 128])
EXTRAS = ("plain", "softcap", "head sinks", "both")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def arguments(extra: str, group: int) -> dict[str, Any]:
    return {
        "scaling": SCALING,
        "softcap": 2.0 if extra in ("softcap", "both") else None,
        "head_sinks": draw(KV_HEADS * group, seed=9) if extra in ("head sinks", "both") else None,
    }


def read_from(positions: list[int], local_starts: list[int], sink: int, *, width: int | None = None) -> Always:
    return always_read(np.array(positions), np.array(local_starts), sink=sink, width=width, device="cpu")


def union(kept: Tensor, positions: list[int], local_starts: list[int], sink: int, block: int, count: int) -> Tensor:
    """[T, Hkv, S] bool, from sets of slots in plain Python."""
    seen = torch.zeros(len(positions), kept.shape[1], count, dtype=torch.bool)
    for query, (position, start) in enumerate(zip(positions, local_starts, strict=True)):
        for head in range(kept.shape[1]):
            slots = {*range(min(sink, position + 1)), *range(start, position + 1)}
            for chosen in kept[query, head].tolist():
                if chosen >= 0:
                    slots |= set(range(chosen * block, min((chosen + 1) * block, position + 1)))
            seen[query, head, list(slots)] = True
    return seen


@each_group
@each_block
def test_it_equals_dense_attention_under_the_mask(group: int, block: int, subtests: pytest.Subtests) -> None:
    for extra in EXTRAS:
        with subtests.test(extra):
            count, sink = 5 * block + 11, 5
            positions = [count - 1, count - 2, 3 * block + 7]
            local_starts = [4 * block, 4 * block - 3, 3 * block]
            queries, keys, values = draw(3, KV_HEADS * group, DIM), *draw(2, KV_HEADS, count, DIM, seed=1)
            kept = torch.tensor([[[1, 3], [2, -1]], [[0, 3], [-1, -1]], [[0, 2], [1, 2]]])
            options = arguments(extra, group)
            always = read_from(positions, local_starts, sink)
            out, lse = gather_attend(queries, keys, values, kept, always, block=block, **options)
            seen = union(kept, positions, local_starts, sink, block, count)
            expected_out, expected_lse = masked_attend(queries, keys, values, seen, **options)
            torch.testing.assert_close(out, expected_out, **ROUNDING)
            torch.testing.assert_close(lse, expected_lse, **ROUNDING)


@each_group
def test_the_mask_means_what_it_means_to_attend(group: int, subtests: pytest.Subtests) -> None:
    for extra in EXTRAS:
        with subtests.test(extra):
            queries, keys, values = draw(4, KV_HEADS * group, DIM), *draw(2, KV_HEADS, 77, DIM, seed=1)
            seen = torch.rand(4, 77, generator=torch.Generator().manual_seed(2)) < 0.4
            mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            options = arguments(extra, group)
            expected = attend(queries, keys, values, mask, **options)
            out, _ = masked_attend(queries, keys, values, seen[:, None].expand(-1, KV_HEADS, -1), **options)
            torch.testing.assert_close(out, expected, **ROUNDING)


@each_group
@each_block
def test_a_budget_as_long_as_the_history_is_full_attention(group: int, block: int, subtests: pytest.Subtests) -> None:
    for extra in EXTRAS:
        with subtests.test(extra):
            count, sink = 4 * block + 13, 3
            positions = [count - 3, count - 2, count - 1]
            queries, keys, values = draw(3, KV_HEADS * group, DIM), *draw(2, KV_HEADS, count, DIM, seed=1)
            always = read_from(positions, [3 * block + 5] * 3, sink)
            scores = bounds_scores(queries, *block_bounds(keys[:, : 4 * block], block), SCALING)
            kept = select(scores, distant_blocks(always, block=block, count=4), k=10)
            options = arguments(extra, group)
            out, _ = gather_attend(queries, keys, values, kept, always, block=block, **options)
            causal = torch.arange(count) > torch.tensor(positions)[:, None]
            mask = torch.zeros(3, count).masked_fill(causal, -torch.inf)
            torch.testing.assert_close(out, attend(queries, keys, values, mask, **options), **ROUNDING)


@given(st.data())
def test_no_entry_counts_twice_and_none_is_lost_whatever_the_edges(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    block = data.draw(st.integers(1, 20))
    sink = data.draw(st.integers(0, 70))
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
    local_starts = [data.draw(st.integers(0, position)) for position in positions]
    blocks = -(-count // block)
    kept = torch.full((len(positions), 1, blocks), -1)
    for query in range(len(positions)):
        chosen = data.draw(st.lists(st.integers(0, blocks - 1), unique=True))
        kept[query, 0, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
    # Equal scores: lse counts the entries, and each value is of one entry, so out shows which.
    queries, keys = torch.zeros(len(positions), 1, count), torch.zeros(1, count, count)
    values = torch.eye(count)[None]
    always = read_from(positions, local_starts, sink)
    out, lse = gather_attend(queries, keys, values, kept, always, block=block, scaling=1.0)
    seen = union(kept, positions, local_starts, sink, block, count)[:, 0]
    before_local = torch.arange(count) < torch.tensor(local_starts)[:, None]
    local_and_sink = union(torch.full_like(kept, -1), positions, local_starts, sink, block, count)[:, 0]
    seen &= before_local | local_and_sink
    torch.testing.assert_close(lse[:, 0].exp(), seen.sum(-1).float())
    torch.testing.assert_close(out[:, 0], seen / seen.sum(-1, keepdim=True))


def test_entries_that_are_not_selected_are_not_touched() -> None:
    count, block = 300, 16
    keys, values = draw(2, KV_HEADS, count, DIM)
    kept = torch.tensor([[[3, 7], [3, -1]]])
    seen = union(kept, [250], [240], 4, block, count)
    poison = ~seen.any(dim=(0, 1))
    keys[:, poison], values[:, poison] = torch.nan, torch.nan
    out, lse = gather_attend(
        draw(1, KV_HEADS, DIM), keys, values, kept, read_from([250], [240], 4), block=block, scaling=SCALING
    )
    assert out.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("layout", ["regions of a buffer", "a projection", "one head for all", "a part"])
def test_entries_are_found_in_every_layout_without_copying_the_rest(layout: str) -> None:
    heads, count, dim = 3, 20, 8
    buffer = draw(600, dim)
    states = {
        "regions of a buffer": buffer.as_strided((heads, count, dim), (29 * dim, dim, 1), 7 * dim),
        "a projection": buffer[: heads * count].view(count, heads, dim).transpose(0, 1),
        "one head for all": buffer[:count].expand(heads, -1, -1),
        "a part": buffer[: 4 * 40].view(4, 40, dim)[1:, 5:25],
    }[layout]
    entries = torch.randint(0, count, (2, heads, 11), generator=torch.Generator().manual_seed(1))
    expected = states[torch.arange(heads)[:, None], entries]
    assert torch.equal(gather_vectors(states, entries), expected)


def test_a_padded_query_past_the_last_entry_reads_what_there_is() -> None:
    queries, keys, values = draw(2, KV_HEADS, DIM), *draw(2, KV_HEADS, 50, DIM, seed=1)
    kept = torch.full((2, KV_HEADS, 1), 3)  # entries 48 … 63, of which two exist
    always = read_from([49, 90], [40, 70], 4)
    out, lse = gather_attend(queries, keys, values, kept, always, block=16, scaling=SCALING)
    seen = torch.zeros(2, KV_HEADS, 50, dtype=torch.bool)
    seen[0, :, [0, 1, 2, 3, *range(40, 50)]] = True
    seen[1, :, [0, 1, 2, 3, 48, 49]] = True
    torch.testing.assert_close((out, lse), masked_attend(queries, keys, values, seen, scaling=SCALING), **ROUNDING)


def test_a_query_does_not_depend_on_its_company() -> None:
    count, block = 200, 16
    positions = [150 + index for index in range(QUERIES_AT_ONCE + 5)]
    local_starts = [100 + index // 2 for index in range(len(positions))]
    queries = draw(len(positions), 6, DIM)
    keys, values = draw(2, KV_HEADS, count, DIM, seed=1)
    kept = torch.arange(KV_HEADS * 3).view(1, KV_HEADS, 3).expand(len(positions), -1, -1)
    together = gather_attend(
        queries, keys, values, kept, read_from(positions, local_starts, 4), block=block, scaling=SCALING
    )
    for index in range(len(positions)):
        only = slice(index, index + 1)
        always = read_from(positions[only], local_starts[only], 4)
        out, lse = gather_attend(queries[only], keys, values, kept[only], always, block=block, scaling=SCALING)
        torch.testing.assert_close(out, together[0][only], **ROUNDING)
        torch.testing.assert_close(lse, together[1][only], **ROUNDING)


def test_padding_of_any_kind_changes_nothing() -> None:
    queries, keys, values = draw(2, KV_HEADS, DIM), *draw(2, KV_HEADS, 100, DIM, seed=1)
    kept = torch.tensor([[[1, 2], [3, 1]]]).expand(2, -1, -1)
    padded = torch.cat([torch.full((2, KV_HEADS, 1), -1), kept, torch.full((2, KV_HEADS, 3), -1)], dim=-1)
    narrow, wide = (read_from([90, 95], [80, 80], 4, width=width) for width in (None, 64))
    assert wide.positions.shape == (2, 64)
    expected = gather_attend(queries, keys, values, kept, narrow, block=16, scaling=SCALING)
    result = gather_attend(queries, keys, values, padded, wide, block=16, scaling=SCALING)
    torch.testing.assert_close(result, expected, **ROUNDING)


def test_the_dtype_of_the_entries_changes_the_entries_alone() -> None:
    queries, keys, values = (some.bfloat16() for some in (draw(1, 6, DIM), *draw(2, KV_HEADS, 64, DIM, seed=1)))
    kept, always = torch.tensor([[[0], [1]]]), read_from([60], [40], 2)
    expected = gather_attend(queries.float(), keys.float(), values.float(), kept, always, block=16, scaling=SCALING)
    result = gather_attend(queries, keys, values, kept, always, block=16, scaling=SCALING)
    assert result[0].dtype == result[1].dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_a_query_that_sees_nothing_is_an_empty_state() -> None:
    queries, keys, values = draw(2, KV_HEADS, DIM), *draw(2, KV_HEADS, 9, DIM, seed=1)
    seen = torch.zeros(2, KV_HEADS, 9, dtype=torch.bool)
    seen[0] = True
    out, lse = masked_attend(queries, keys, values, seen, scaling=SCALING)
    assert (out[1] == 0).all()
    assert lse[1].isneginf().all()
    assert lse[0].isfinite().all()


def test_candidates_are_the_blocks_wholly_outside_sink_and_local_where_these_end_at_blocks() -> None:
    always = read_from([100, 79, 10], [64, 48, 0], 16)
    blocks = distant_blocks(always, block=16, count=6)
    assert blocks.int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [0] * 6]


def test_a_block_that_sink_or_local_cut_is_a_candidate() -> None:
    blocks = distant_blocks(read_from([100], [65], 4), block=16, count=6)
    assert blocks.int().tolist() == [[1, 1, 1, 1, 1, 0]]


def test_the_best_candidates_are_selected_per_query_and_head_and_ties_go_to_the_first() -> None:
    scores = torch.tensor([[[9.0, 1, 5, 3, 5], [0, 0, 0, 0, 0]], [[9.0, 1, 5, 3, 5], [1, 2, 3, 4, 5]]])
    candidates = torch.tensor([[False, True, True, True, True], [True, False, False, True, False]])
    kept = select(scores, candidates, 3)
    assert kept.tolist() == [[[2, 3, 4], [1, 2, 3]], [[0, 3, -1], [0, 3, -1]]]


@pytest.mark.parametrize(("blocks", "k"), [(0, 4), (5, 0)])
def test_without_blocks_only_sink_and_local_are_read(blocks: int, k: int) -> None:
    queries, keys, values = draw(1, KV_HEADS, DIM), *draw(2, KV_HEADS, 90, DIM, seed=1)
    always = read_from([85], [70], 4)
    kept = select(torch.zeros(1, KV_HEADS, blocks), distant_blocks(always, block=16, count=blocks), k)
    assert kept.shape == (1, KV_HEADS, 0)
    out, _ = gather_attend(queries, keys, values, kept, always, block=16, scaling=SCALING)
    seen = union(kept, [85], [70], 4, 16, 90)
    torch.testing.assert_close(out, masked_attend(queries, keys, values, seen, scaling=SCALING)[0], **ROUNDING)


def test_a_width_too_small_is_refused_not_truncated() -> None:
    with pytest.raises(AssertionError, match="25 entries"):
        read_from([100], [80], 4, width=24)
