"""Long chunks of prefill on a rank beside the first: they read every entry before them, so a view is a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from inference_engine.kernels.attention import CausalAttention
from inference_engine.kernels.expanded_attention import OwnQueries
from inference_engine.kernels.reads import StagedRead
from inference_engine.kv.numbers import StepTables
from inference_engine.kv.views import CausalView, Region, Scoring, StagedQueries


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalSpan:
    """A session's tokens in a step, from `first` to `stop`. views: by layer where they read by one, its region and how
    many slots of it."""

    first: int
    stop: int
    views: dict[int, tuple[Region, int]]

    @classmethod
    def of(cls, span: StagedQueries) -> Self:
        views = {}
        for layer, view in span.views.items():
            assert isinstance(view, CausalView), "no other views are planned for ranks"
            views[layer] = view.region, view.count
        return cls(first=span.packed.start, stop=span.packed.stop, views=views)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """A step that is not recorded, beside its numbers: how many tokens it has, of how many logits are computed, whether
    sessions have several tokens, how queries read that choose, and views of its sessions, if some read by views."""

    tokens: int
    kept: int
    has_chunks: bool
    reads: tuple[StagedRead, ...]
    views: tuple[CausalSpan, ...]


@dataclass(frozen=True, slots=True)
class CausalPlan:
    """As StepPlan, of spans. Implements AttentionPlan."""

    tables: StepTables
    spans: Sequence[CausalSpan]
    attend_causal: CausalAttention

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        head_sinks: Tensor | None = None,
        own: OwnQueries | None = None,
    ) -> Tensor:
        """See StepPlan.attend; K and V are where the tables say already."""
        assert keys is None and values is None and own is None, "a list writes K and V itself"
        scoring, buffer = Scoring(scaling=scaling, softcap=softcap, head_sinks=head_sinks), self.tables.buffer(layer)
        regions = queries  # unused if no query reads by numbers
        if any(layer not in span.views for span in self.spans):
            regions = self.tables.read(layer, queries, scaling=scaling, softcap=softcap, head_sinks=head_sinks)
        outs = []
        for span in self.spans:
            some = slice(span.first, span.stop)
            if layer not in span.views:
                outs.append(regions[some])
                continue
            region, count = span.views[layer]
            view = CausalView(region=region, count=count, attend_causal=self.attend_causal)
            outs.append(view.read(layer, queries[0, :, some].transpose(0, 1), buffer, scoring))
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]
