"""Match, amend, complete: exact without a match, close with one, and honest about what it read."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.attention import attend
from kakeya_mac.kernel import MacEntry, MacState, MacStats, mac_attend, match_limit

# The same float32 sums in another order: scores reach 15 and are known to 1e-6, values of size 3 are weighted by them.
ROUNDING = 5e-6
HEADS, KV_HEADS, DIM = 6, 2, 8
SCALING = DIM**-0.5
RING, BAND = 13, 5
LENGTH = 71
EVERYTHING = math.inf  # a threshold that every candidate passes


@dataclass(frozen=True)
class Stream:
    """Tokens in one layer: queries [T, Hq, D] unrotated and rotated, keys and values [Hkv, T, D]."""

    raw: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


def rotate(vectors: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of vectors [H, T, D], slow enough that near queries stay near within the query cache."""
    half = DIM // 2
    angles = positions[:, None] * 0.1 * 0.5 ** torch.arange(half)
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def stream(length: int = LENGTH, *, seed: int = 0, noise: float = 0.2, rotated: bool = True) -> Stream:
    """Queries that keep returning to one of three intents, and attend most to what is near."""
    rng = torch.Generator().manual_seed(seed)
    intents = torch.randn(3, HEADS, DIM, generator=rng)
    of_token = torch.randint(3, (length, HEADS), generator=rng)
    raw = intents[of_token, torch.arange(HEADS)] + noise * torch.randn(length, HEADS, DIM, generator=rng) + 2
    keys = torch.randn(KV_HEADS, length, DIM, generator=rng) + 2
    values = torch.randn(KV_HEADS, length, DIM, generator=rng)
    if not rotated:
        return Stream(raw, raw, keys, values)
    positions = torch.arange(length)
    return Stream(raw, rotate(raw.transpose(0, 1), positions).transpose(0, 1), rotate(keys, positions), values)


def step(state: MacState, tokens: Stream, position: int, **options: Any) -> tuple[Tensor, MacEntry, MacStats]:
    chosen = {"band": BAND, "threshold": 0.4, "scaling": SCALING, **options}
    return mac_attend(
        state, tokens.raw[position], tokens.queries[position], tokens.keys, tokens.values, position=position, **chosen
    )


def decode(
    state: MacState, tokens: Stream, positions: range, **options: Any
) -> tuple[Tensor, list[MacEntry], list[MacStats]]:
    """Token after token, each committed before the next. Outputs [T, Hq, D]."""
    outs, entries, stats = [], [], []
    for position in positions:
        out, entry, stat = step(state, tokens, position, **options)
        state.commit([entry])
        outs.append(out)
        entries.append(entry)
        stats.append(stat)
    return torch.stack(outs), entries, stats


def full(tokens: Stream, positions: range, **options: Any) -> Tensor:
    mask = torch.full((len(tokens.raw), len(tokens.raw)), -math.inf).triu(1)[positions.start : positions.stop]
    queries = tokens.queries[positions.start : positions.stop]
    return attend(queries, tokens.keys, tokens.values, mask, scaling=SCALING, **options)


def empty(ring: int = RING) -> MacState:
    return MacState.allocate(HEADS, DIM, ring)


def remembering(*queries: Tensor, ring: int = RING) -> MacState:
    """A state that holds `queries` at the positions after BAND, with summaries that are all zero."""
    state = empty(ring)
    for position, query in enumerate(queries, start=BAND + 1):
        zeros = torch.zeros(HEADS)
        depth = torch.zeros(HEADS, dtype=torch.int32)
        entry = MacEntry(position=position, query=query, out=torch.zeros(HEADS, DIM), lse=zeros, depth=depth)
        state.commit([entry])
    return state


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=ROUNDING, atol=ROUNDING)


def assert_equal(one: MacState | MacEntry | MacStats, other: MacState | MacEntry | MacStats) -> None:
    """To the bit."""
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        assert torch.equal(left, right) if isinstance(left, Tensor) else left == right, field.name


def error(outs: Tensor, expected: Tensor) -> float:
    return float((outs - expected).norm() / expected.norm())


# -- without a match -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", [0, 1, BAND, LENGTH + 9])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"head_sinks": torch.linspace(-2, 2, HEADS)}], ids=["plain", "softcap", "sinks"]
)
def test_threshold_zero_is_full_attention(band: int, options: dict[str, Any]) -> None:
    tokens, positions = stream(), range(LENGTH)
    outs, _, stats = decode(empty(), tokens, positions, threshold=0.0, band=band, **options)
    assert error(outs, full(tokens, positions, **options)) < 1e-6
    assert_close(outs, full(tokens, positions, **options))
    assert not torch.stack([stat.hits for stat in stats]).any()
    assert [stat.entries_read.tolist() for stat in stats] == [[position + 1] * HEADS for position in positions]


@pytest.mark.parametrize("band", [0, BAND])
def test_nothing_is_ever_nan_from_position_zero_on(band: int, subtests: pytest.Subtests) -> None:
    for threshold in (0.0, 0.4, EVERYTHING):
        with subtests.test(str(threshold)):
            state = empty()
            outs, entries, stats = decode(state, stream(), range(LENGTH), band=band, threshold=threshold)
            assert outs.isfinite().all()
            for entry in entries:
                assert entry.out.isfinite().all()
                assert not entry.lse.isnan().any()
            for stat in stats:
                assert not any(getattr(stat, field.name).isnan().any() for field in fields(stat))
            assert stats[0].distances.isposinf().all()


# -- the match -----------------------------------------------------------------------------------------------------


def test_a_match_is_strictly_below_its_share_of_coincidence() -> None:
    assert match_limit(DIM, 0.5) == 2.0
    past = torch.zeros(HEADS, DIM)
    tokens = stream()
    tokens.raw[BAND + 2] = 0
    tokens.raw[BAND + 2, :, 3] = torch.tensor([2.0, 1.999, -2.0, -1.999, 0.0, 3.0])
    _, _, stats = step(remembering(past), tokens, BAND + 2, threshold=0.5)
    assert stats.hits.tolist() == [False, True, False, True, True, False]
    assert stats.distances.tolist() == pytest.approx([2.0, 1.999, 2.0, 1.999, 0.0, 3.0])


def test_the_nearest_query_matches_and_of_equally_near_ones_the_latest() -> None:
    far, near = torch.full((HEADS, DIM), 0.3), torch.full((HEADS, DIM), 0.1)
    tokens = stream()
    position = BAND + 6
    tokens.raw[position] = 0
    _, _, stats = step(remembering(far, near, far, -near, far), tokens, position)
    assert stats.matches.tolist() == [BAND + 4] * HEADS


def test_heads_of_a_group_match_tokens_of_their_own() -> None:
    pasts = (
        torch.eye(3)[:, :, None, None].expand(3, 3, 2, DIM).reshape(3, HEADS, DIM)
    )  # at token i, heads 2 i and 2 i + 1
    tokens = stream()
    position = BAND + 4
    tokens.raw[position] = 1
    _, _, stats = step(remembering(*pasts), tokens, position)
    assert stats.matches.tolist() == [BAND + 1 + index // 2 for index in range(HEADS)]


def test_the_window_is_the_last_ring_positions_even_where_tokens_left_no_entry() -> None:
    tokens = stream()
    query = torch.zeros(HEADS, DIM)
    for position, is_hit in [(BAND + 1 + RING, True), (BAND + 2 + RING, False), (BAND + 1 + 3 * RING, False)]:
        tokens.raw[position] = query
        _, _, stats = step(remembering(query), tokens, position)
        assert stats.hits.tolist() == [is_hit] * HEADS, position


def test_a_token_matches_none_but_earlier_tokens() -> None:
    state, tokens = empty(), stream()
    decode(state, tokens, range(40))
    _, _, stats = step(state, tokens, 30, threshold=EVERYTHING)
    assert stats.hits.all()
    assert (stats.matches < 30).all()


# -- amend and complete --------------------------------------------------------------------------------------------


def test_a_repeated_query_gives_what_full_attention_gives_where_nothing_rotates() -> None:
    tokens = stream(rotated=False, noise=0.0)
    positions = range(LENGTH)
    sinks = torch.linspace(-2, 2, HEADS)
    outs, entries, stats = decode(empty(), tokens, positions, threshold=1e-3, head_sinks=sinks)
    assert torch.stack([stat.hits for stat in stats]).float().mean() > 0.7
    assert max(int(entry.depth.max()) for entry in entries) > 5, "along chains, too"
    assert_close(outs, full(tokens, positions, head_sinks=sinks))


def test_a_hit_reads_the_band_and_the_tail_and_nothing_before_them() -> None:
    tokens, position = stream(), LENGTH - 1
    state = empty()
    decode(state, tokens, range(position))
    out, entry, stats = step(state, tokens, position)
    assert stats.hits.any()
    starts = torch.where(stats.hits, stats.matches - BAND, 0)
    assert torch.equal(stats.entries_read, position - starts + 1)
    for group in range(KV_HEADS):
        heads = slice(group * HEADS // KV_HEADS, (group + 1) * HEADS // KV_HEADS)
        unread = int(starts[heads].min())
        tokens.keys[group, :unread], tokens.values[group, :unread] = 3.0, -1e6
    again, entry_again, _ = step(state, tokens, position)
    assert torch.equal(again, out)
    assert_equal(entry_again, entry)


def test_a_summary_covers_the_entries_before_the_band_each_under_the_query_that_read_it() -> None:
    tokens, positions = stream(), range(LENGTH)
    _, entries, stats = decode(empty(), tokens, positions)
    readers = torch.zeros(
        LENGTH, HEADS, LENGTH, dtype=torch.int64
    )  # [token, head, key]: which token's query weighs the key
    for position, stat in zip(positions, stats, strict=True):
        for head in range(HEADS):
            readers[position, head] = position
            if stat.hits[head]:
                match = int(stat.matches[head])
                readers[position, head, : match - BAND] = readers[match, head, : match - BAND]
    for entry in entries[BAND + 1 :]:
        end = entry.position - BAND
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            readers_here = tokens.queries[readers[entry.position, head, :end], head]
            scores = (readers_here * tokens.keys[kv_head, :end]).sum(-1) * SCALING
            assert_close(entry.lse[head], scores.logsumexp(0))
            expected = scores.softmax(0) @ tokens.values[kv_head, :end]
            assert_close(entry.out[head], expected)


# -- chains of hits ------------------------------------------------------------------------------------------------


# -- the state -----------------------------------------------------------------------------------------------------


def test_the_query_cache_holds_the_last_positions_and_no_others() -> None:
    state, tokens = empty(), stream()
    _, entries, _ = decode(state, tokens, range(LENGTH))
    assert sorted(state.positions.tolist()) == list(range(LENGTH - RING, LENGTH))
    fresh = empty()
    fresh.commit(entries[-RING:])
    assert_equal(fresh, state)


def test_a_token_that_is_not_committed_leaves_the_state_as_it_was() -> None:
    state, tokens = empty(), stream()
    decode(state, tokens, range(40))
    before = state.with_pending([])
    _, entry, _ = step(state, tokens, 40)
    pending = state.with_pending([entry])
    step(pending, tokens, 41)
    assert_equal(state, before)
    assert int(pending.positions[40 % RING]) == 40


@pytest.mark.parametrize("accepted", [0, 1, 5, 17])
def test_a_block_equals_its_tokens_one_by_one_and_keeps_what_was_accepted(accepted: int) -> None:
    tokens, first = stream(), 40
    state, alone = empty(), empty()
    decode(state, tokens, range(first))
    decode(alone, tokens, range(first))
    block, entries, stats = decode(state.with_pending([]), tokens, range(first, first + 17))  # longer than the ring
    assert (torch.stack([stat.matches for stat in stats]) >= first).any(), "tokens match tokens of their own block"
    state.commit(entries[:accepted])

    outs, _, stats_alone = decode(alone, tokens, range(first, first + accepted)) if accepted else (block[:0], [], [])
    assert torch.equal(block[:accepted], outs)
    for one, other in zip(stats[:accepted], stats_alone, strict=True):
        assert_equal(one, other)
    assert_equal(state, alone)
