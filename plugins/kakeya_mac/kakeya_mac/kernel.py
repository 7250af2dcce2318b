"""Match, amend, complete: a decoding query reuses the attention of a similar recent query to the same prefix.

    position   0 ……………… e | e ……… j | j+1 ……… p          query p matches the query at j; e = j − band
    hit          reused   |  band   |   tail             reused: j's summary of [0, e); band and tail: read afresh
    new entry    reused   |  read, up to p − band |      the rectified summary of [0, p − band) for later queries

A match is the nearest unrotated query among the last `ring` positions, by L2 distance, each query head for itself. It
is taken if distance < threshold · √(2 D): two independent queries with components of variance 1 lie about √(2 D) apart,
so `threshold` is a share of coincidence, and under that null a false match has probability P(χ²_D < threshold² · D).
0 never matches, which is full attention. Without a match every entry is read.

Summaries are snapshots. Entries before and after p − band are summed separately and merged for the output; nothing is
ever subtracted, so a band that holds nearly all of the mass costs no digits.

**What is approximated**: the summary was weighted by another query, rotated for another position. **It compounds**: an
entry made on a hit contains its match's summary, unchanged. After n links the oldest entries carry the weights of a
query up to n · limit away in distance and n · ring in position, though each link kept both within bounds. `chain_limit`
caps the links; None, as in the source, does not.

Source: MAC-Attention, sections 3.2-3.5 and appendix B. Its threshold τ counts in the other direction (its hits become
rarer as τ grows), so we read it as threshold = 1 − τ; its default τ = 0.45 is 0.55 here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from inference_engine.kernels.merge import attention_scores, merge_states, reduce_scores, with_head_sinks


@dataclass(frozen=True, kw_only=True, slots=True)
class MacEntry:
    """What one decoded token leaves for later ones. A head whose depth is -1 leaves nothing: zeros, and lse -inf."""

    position: int
    query: Tensor  # [Hq, D], unrotated, in the query cache's dtype
    out: Tensor  # [Hq, D] float32: attention of this query over [0, position − band)
    lse: Tensor  # [Hq] float32
    depth: Tensor  # [Hq] int32: links between this summary and one computed in full


@dataclass(frozen=True, kw_only=True, slots=True)
class MacStats:
    """What happened to one query, for each query head.

    The two masses are exact shares of the full softmax. Only the reference, which has all scores, can compute them.
    """

    hits: Tensor  # bool
    matches: Tensor  # int64: the matched position, -1 on a miss
    distances: Tensor  # float32: to the nearest candidate, taken or not; infinity if there was none
    entries_read: Tensor  # int64: entries that the head reads. A group that shares them reads its largest number
    band_mass: Tensor  # float32: on the band before the match; on a miss, on the band before the query itself
    reused_mass: Tensor  # float32: on the entries whose attention was reused; the error grows with it


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchTotals:
    """Sums over committed generated tokens of one layer. Tensors are on the device, and none is changed later.

    entries_present: entries that full attention would have read, in each head.
    group_entries_read: heads that share K and V read them once, as far back as the one that reads most.
    The masses are those of MacStats.
    """

    queries: int
    entries_present: int
    hits: Tensor  # [Hq]
    entries_read: Tensor  # [Hq]
    group_entries_read: Tensor  # [Hkv]
    band_mass: Tensor  # [Hq]
    reused_mass: Tensor  # [Hq]

    @staticmethod
    def of(position: int, stats: MacStats, kv_heads: int) -> MatchTotals:
        """The totals of one query."""
        return MatchTotals(
            queries=1,
            entries_present=position + 1,
            hits=stats.hits.long(),
            entries_read=stats.entries_read,
            group_entries_read=stats.entries_read.view(kv_heads, -1).amax(-1),
            band_mass=stats.band_mass,
            reused_mass=stats.reused_mass,
        )

    def plus(self, other: MatchTotals) -> MatchTotals:
        return MatchTotals(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MacState:
    """One layer's query cache: a ring buffer of past queries and their summaries; a position's slot is position % ring.

    Only `commit` changes it. `mac_attend` returns what would be added, so rejected drafts leave no trace.
    """

    queries: Tensor  # [Hq, ring, D], unrotated
    outs: Tensor  # [Hq, ring, D] float32
    lses: Tensor  # [Hq, ring] float32
    depths: Tensor  # [Hq, ring] int32, -1: the head has no entry there
    positions: Tensor  # [ring] int64, -1: empty

    @classmethod
    def allocate(
        cls,
        query_heads: int,
        head_dim: int,
        ring: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> MacState:
        """An empty state. `dtype` is that of the kept queries."""
        assert ring > 0, ring
        return cls(
            queries=torch.zeros(query_heads, ring, head_dim, dtype=dtype, device=device),
            outs=torch.zeros(query_heads, ring, head_dim, device=device, dtype=torch.float32),
            lses=torch.full((query_heads, ring), -math.inf, device=device, dtype=torch.float32),
            depths=torch.full((query_heads, ring), -1, device=device, dtype=torch.int32),
            positions=torch.full((ring,), -1, device=device, dtype=torch.int64),
        )

    @property
    def ring(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def commit(self, entries: Sequence[MacEntry]) -> None:
        """Write the entries of accepted tokens over those `ring` positions older, in order of position."""
        for entry in entries:
            slot = entry.position % self.ring
            self.queries[:, slot] = entry.query
            self.outs[:, slot] = entry.out
            self.lses[:, slot] = entry.lse
            self.depths[:, slot] = entry.depth
            self.positions[slot] = entry.position

    def with_pending(self, entries: Sequence[MacEntry]) -> MacState:
        """A copy with `entries` committed, for later queries of the same block; this state is unchanged.

        One copy serves a block: commit each further entry to it.
        """
        pending = MacState(**{field.name: getattr(self, field.name).clone() for field in fields(self)})
        pending.commit(entries)
        return pending

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def match_limit(head_dim: int, threshold: float | Tensor) -> float | Tensor:
    """The distance a match has to stay strictly below."""
    return threshold * math.sqrt(2 * head_dim)


def mac_attend(
    state: MacState,
    query_unrotated: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    *,
    band: int,
    threshold: float | Tensor,
    scaling: float,
    chain_limit: int | None = None,
    softcap: float | None = None,
    head_sinks: Tensor | None = None,
) -> tuple[Tensor, MacEntry, MacStats]:
    """Attend from the query at `position`; returns its output [Hq, D] in the dtype of `query`, its entry and
    statistics.

    query_unrotated, query: [Hq, D] · keys, values: [Hkv, S, D], entry s at position s, the query's own included;
    entries past `position` are not read. band: entries before a match that are read again, the same for the whole life
    of a state. threshold: see above; a tensor [Hq] gives each head its own. chain_limit: entries with more links than
    this are not kept; 0 keeps those of misses alone. softcap, head_sinks: as in `attend`. Sinks are no part of a
    summary: they join the output once. Reads `state` and does not change it. No synchronisation with the host.
    """
    own_query = query_unrotated.to(state.queries.dtype)
    hits, matches, distances = _match(state, own_query, position, band, threshold)
    slots = matches.clamp(min=0)[:, None] % state.ring  # [Hq, 1]
    starts = torch.where(hits, matches - band, 0)  # the first position each head reads

    seen = slice(0, position + 1)
    scores = attention_scores(query[None], keys[:, seen], scaling=scaling, softcap=softcap)  # [1, Hq, p + 1]
    split = max(0, position - band)
    is_reused = torch.arange(split, device=starts.device) < starts[:, None]  # a match is before p: starts ≤ split
    before = scores[..., :split].masked_fill(is_reused, -math.inf)

    reused_out, reused_lse = _reused(state, slots, hits)
    prefix_out, prefix_lse = merge_states(reused_out, reused_lse, *_single(before, values[:, :split]))
    out, lse = merge_states(prefix_out, prefix_lse, *_single(scores[..., split:], values[:, split : position + 1]))
    if head_sinks is not None:
        out, lse = with_head_sinks(out, lse, head_sinks)

    depth = torch.where(hits, state.depths.gather(1, slots)[:, 0] + 1, 0)
    is_kept = torch.ones_like(hits) if chain_limit is None else depth <= chain_limit
    entry = MacEntry(
        position=position,
        query=torch.where(is_kept[:, None], own_query, 0),
        out=torch.where(is_kept[:, None], prefix_out, 0),
        lse=torch.where(is_kept, prefix_lse, -math.inf),
        depth=torch.where(is_kept, depth, -1),
    )
    band_mass, reused_mass = _masses(scores[0], starts, torch.where(hits, matches, position), band)
    stats = MacStats(
        hits=hits,
        matches=matches,
        distances=distances,
        entries_read=position + 1 - starts,
        band_mass=band_mass,
        reused_mass=reused_mass,
    )
    return out.to(query.dtype), entry, stats


def _match(
    state: MacState, query: Tensor, position: int, band: int, threshold: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(hits, matches, distances), [Hq] each. Of equally near queries the latest is taken: it leaves the least to read.

    Candidates lie in the last `ring` positions and have a prefix to give: one within `band` of the start saves nothing,
    and would hide another that does.
    """
    # Differences, not |q|² + |k|² − 2 q·k: equal queries must be at distance 0.
    distances = (state.queries.float() - query.float()[:, None]).square().sum(-1).sqrt()  # [Hq, ring]
    positions = state.positions.expand_as(distances)
    is_candidate = (state.depths >= 0) & (positions > band) & (positions >= position - state.ring)
    distances = distances.masked_fill(~(is_candidate & (positions < position)), math.inf)
    nearest = distances.amin(-1)
    latest = torch.where(distances == nearest[:, None], positions, -1).amax(-1)
    hits = nearest < match_limit(query.shape[-1], threshold)
    return hits, torch.where(hits, latest, -1), nearest


def _reused(state: MacState, slots: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """The matched entries' summaries, (out [Hq, D], lse [Hq]); the state of no entries without a match."""
    out = state.outs.gather(1, slots[..., None].expand(-1, -1, state.outs.shape[-1]))[:, 0]
    return torch.where(hits[:, None], out, 0), torch.where(hits, state.lses.gather(1, slots)[:, 0], -math.inf)


def _single(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = reduce_scores(scores, values)
    return out[0], lse[0]


def _masses(scores: Tensor, starts: Tensor, anchors: Tensor, band: int) -> tuple[Tensor, Tensor]:
    """Shares of each head's softmax over scores [Hq, S]: on [anchor − band, anchor), and on [0, start)."""
    weights = scores.softmax(-1)
    positions = torch.arange(scores.shape[-1], device=scores.device)
    is_band = (positions >= anchors[:, None] - band) & (positions < anchors[:, None])
    return (weights * is_band).sum(-1), (weights * (positions < starts[:, None])).sum(-1)
