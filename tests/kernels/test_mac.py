"""Match, amend, complete: exact without a match, close with one, and honest about what it read."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.mac import MacEntry, MacState, MacStats, mac_attend, match_limit
from inference_engine.kernels.merge import attend_state
from tests.further import further

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


def test_a_repeated_query_does_not_match_at_threshold_zero() -> None:
    query = torch.ones(HEADS, DIM)
    tokens = stream()
    tokens.raw[20] = query
    _, _, stats = step(remembering(query), tokens, BAND + 2 + 5, threshold=0.0)
    assert not stats.hits.any()


def test_the_threshold_makes_a_difference() -> None:
    tokens, positions = stream(), range(LENGTH)
    assert error(decode(empty(), tokens, positions)[0], full(tokens, positions)) > 1e-4


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


def test_independent_queries_are_about_one_threshold_apart() -> None:
    one, other = torch.randn(2, 1000, 64, generator=torch.Generator().manual_seed(0))
    limit = match_limit(64, 1.0)
    assert float((one - other).norm(dim=-1).mean()) == pytest.approx(limit, rel=0.01)


def test_each_head_may_have_its_own_threshold() -> None:
    tokens = stream()
    thresholds = torch.tensor([0.0, EVERYTHING] * (HEADS // 2))
    _, _, stats = step(remembering(torch.zeros(HEADS, DIM)), tokens, BAND + 2, threshold=thresholds)
    assert stats.hits.tolist() == [False, True] * (HEADS // 2)


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


def test_a_match_within_a_band_of_the_start_has_nothing_to_give_and_is_none() -> None:
    state = empty()
    _, _, stats = decode(state, stream(), range(BAND + 3), threshold=EVERYTHING)
    matches = torch.stack([stat.matches for stat in stats])
    assert (matches[: BAND + 2] == -1).all()
    assert (matches[BAND + 2] == BAND + 1).all()


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


def test_queries_are_compared_in_the_dtype_of_the_query_cache() -> None:
    tokens = stream()
    state = MacState.allocate(HEADS, DIM, RING, dtype=torch.bfloat16)
    decode(state, tokens, range(20))
    tokens.raw[20] = tokens.raw[19]
    _, _, stats = step(state, tokens, 20)
    assert stats.distances.tolist() == [0.0] * HEADS


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


def test_entries_past_the_position_are_not_read() -> None:
    tokens = stream()
    state = empty()
    decode(state, tokens, range(40))
    expected, _, _ = step(state, tokens, 40)
    tokens.keys[:, 41:], tokens.values[:, 41:] = float("nan"), float("nan")
    assert torch.equal(step(state, tokens, 40)[0], expected)


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


def test_a_band_that_holds_all_but_a_millionth_costs_the_summary_no_digits() -> None:
    tokens, position = stream(), 40
    # Along the first axis, the query looks at the band and at nothing else.
    tokens.queries[position, :, 0], tokens.keys[..., 0] = 40 / SCALING, 0.0
    tokens.keys[:, position - BAND : position + 1, 0] = 1.0
    _, entry, _ = step(empty(), tokens, position)

    def exact(end: int) -> tuple[Tensor, Tensor]:
        out, lse = attend_state(
            tokens.queries[[position]], tokens.keys[:, :end], tokens.values[:, :end], None, scaling=SCALING
        )
        return out[0], lse[0]

    out, lse = exact(position - BAND)
    assert (lse - exact(position + 1)[1] < math.log(1e-6)).all()
    assert_close(entry.out, out)
    assert_close(entry.lse, lse)


def test_masses_are_shares_of_the_full_softmax() -> None:
    tokens, position = stream(), LENGTH - 1
    state = empty()
    decode(state, tokens, range(position))
    tokens.raw[position, 0] += 100  # a miss for one head
    _, _, stats = step(state, tokens, position)
    assert stats.hits.any()
    assert not stats.hits[0]
    group = HEADS // KV_HEADS
    scores = torch.einsum("hd,hsd->hs", tokens.queries[position], tokens.keys.repeat_interleave(group, 0)) * SCALING
    weights = scores.softmax(-1)
    for head in range(HEADS):
        is_hit = bool(stats.hits[head])
        anchor = int(stats.matches[head]) if is_hit else position
        assert float(stats.band_mass[head]) == pytest.approx(
            float(weights[head, anchor - BAND : anchor].sum()), rel=ROUNDING
        )
        reused = float(weights[head, : anchor - BAND].sum()) if is_hit else 0.0
        assert float(stats.reused_mass[head]) == pytest.approx(reused, rel=ROUNDING)


@pytest.mark.parametrize("seed", [0, further(1), further(2)])
def test_amending_a_band_makes_hits_better(seed: int) -> None:
    tokens, positions = stream(121, seed=seed), range(121)
    expected = full(tokens, positions)
    errors = [error(decode(empty(), tokens, positions, band=band, chain_limit=0)[0], expected) for band in (0, 8, 16)]
    assert errors[0] > 1.5 * errors[1]
    assert errors[1] > 1.5 * errors[2]


# -- chains of hits ------------------------------------------------------------------------------------------------


def test_depth_counts_the_links_back_to_a_full_pass() -> None:
    tokens = stream()
    tokens.raw[:] = 1.0  # each token matches the one before it
    _, entries, _ = decode(empty(), tokens, range(40))
    assert [entry.depth.tolist() for entry in entries[BAND + 1 :]] == [[links] * HEADS for links in range(34)]


def test_entries_with_more_links_than_the_limit_are_not_kept(subtests: pytest.Subtests) -> None:
    for limit in (0, 1, 3):
        with subtests.test(str(limit)):
            state = empty()
            _, entries, stats = decode(state, stream(), range(LENGTH), threshold=EVERYTHING, chain_limit=limit)
            assert max(int(entry.depth.max()) for entry in entries) == limit
            assert int(state.depths.max()) <= limit
            later = torch.stack([stat.hits for stat in stats])[BAND + 2 :]
            assert later.any()
            assert not later.all(), "when the window holds no entry any more, a full pass renews the chain"


def test_an_entry_that_is_not_kept_leaves_its_slot_empty() -> None:
    state, tokens = empty(), stream()
    decode(state, tokens, range(BAND + 3), threshold=EVERYTHING, chain_limit=0)  # the last one hits
    slot = (BAND + 2) % RING
    assert (state.depths[:, slot] == -1).all()
    assert not state.queries[:, slot].any()
    assert not state.outs[:, slot].any()
    assert state.lses[:, slot].isneginf().all()


@pytest.mark.parametrize("seed", [0, further(1), further(2)])
def test_error_adds_up_along_chains_and_a_limit_stops_it(seed: int) -> None:
    tokens, positions = stream(121, seed=seed), range(121)
    expected = full(tokens, positions)
    unlimited, short = (
        error(decode(empty(), tokens, positions, band=8, chain_limit=limit)[0], expected) for limit in (None, 0)
    )
    assert unlimited > 1.5 * short


# -- the state -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_does_not_grow(dtype: torch.dtype, subtests: pytest.Subtests) -> None:
    per_head = DIM * (dtype.itemsize + 4) + 4 + 4  # a query, a float32 summary, its lse and depth
    for ring in (1, RING, 64):
        with subtests.test(str(ring)):
            state = MacState.allocate(HEADS, DIM, ring, dtype=dtype)
            assert state.nbytes == ring * (HEADS * per_head + 8)
            decode(state, stream(), range(20))
            assert state.nbytes == ring * (HEADS * per_head + 8)


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


def test_a_list_of_pending_entries_is_what_committing_them_would_be() -> None:
    tokens = stream()
    state = empty()
    decode(state, tokens, range(30))
    _, entries, _ = decode(state.with_pending([]), tokens, range(30, 34))
    expected, _, _ = step(state.with_pending(entries), tokens, 34)
    state.commit(entries)
    assert torch.equal(step(state, tokens, 34)[0], expected)


def test_outputs_come_in_the_dtype_of_the_query_and_summaries_in_float32() -> None:
    tokens = stream()
    half = Stream(*(x.bfloat16() for x in (tokens.raw, tokens.queries, tokens.keys, tokens.values)))
    state = MacState.allocate(HEADS, DIM, RING, dtype=torch.bfloat16)
    outs, entries, _ = decode(state, half, range(LENGTH), threshold=0.0)
    assert outs.dtype == torch.bfloat16
    assert entries[-1].out.dtype == entries[-1].lse.dtype == torch.float32
    # The only rounding is that of the output.
    exact = Stream(*(x.float() for x in (half.raw, half.queries, half.keys, half.values)))
    torch.testing.assert_close(outs.float(), full(exact, range(LENGTH)), rtol=2**-8, atol=1e-6)


def test_no_number_is_fetched_from_the_device() -> None:
    tokens = Stream(*(getattr(stream(), field.name).to("meta") for field in fields(Stream)))  # which has none to give
    state = MacState.allocate(HEADS, DIM, RING, device="meta")
    outs, _, _ = decode(
        state, tokens, range(9), head_sinks=torch.zeros(HEADS, device="meta"), chain_limit=1, softcap=2.0
    )
    assert outs.shape == (9, HEADS, DIM)
