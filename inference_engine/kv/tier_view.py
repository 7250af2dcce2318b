"""A view that reads a keep-set whose distant blocks may be in the second tier.

    position   0 … 127 | 128 … 255 | 256 … 383 | 384 … 895 | 896 … 1500        sink, window 512, resident from 896 on
    a block    at hand | fetched   |           | fetched   | at hand

What is read, and in which order, is what `GatherView` reads. A row is read at a time: its blocks have to be in the
lanes together, and there is room for those of one row. Which blocks they are has to be known on the host, which asks
the second tier for them: one synchronisation for each layer and row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from inference_engine.kernels.gather import attend_rows, gather_rows
from inference_engine.kv.layout import Positions
from inference_engine.kv.pool import Arena
from inference_engine.kv.tier_rows import TierRows
from inference_engine.kv.views import GatherView, Scoring


@dataclass(frozen=True, kw_only=True, slots=True)
class TierView(GatherView):
    """Reads each row's keep-set from the lanes, after the blocks that were not there were fetched into them."""

    tier: TierRows
    positions: tuple[int, ...]  # of the generated rows
    always_slots: Tensor  # [G, A]: where the rows that are always read lie; 0 for padding

    @staticmethod
    def of(view: GatherView, tier: TierRows, positions: Positions) -> TierView:
        """`view`, where its rows are in two tiers."""
        given = {field.name: getattr(view, field.name) for field in fields(view)}
        rows = view.always.rows
        slots = torch.from_numpy(tier.layout.slots(rows.clamp(min=0).cpu().numpy())).to(rows.device)
        return TierView(
            **{**given, "row_by_row": True}, tier=tier, positions=tuple(positions.tolist()), always_slots=slots
        )

    def _gather(self, layer: int, queries: Tensor, rows: slice, arena: Arena, scoring: Scoring) -> Tensor:
        kept = self._select(layer, queries, rows, arena, scoring)  # [1, Hkv, K]
        firsts = self.tier.fetch(layer, self.positions[rows.start], kept[0].cpu().numpy())
        size = self.selector.block
        in_blocks = torch.from_numpy(firsts).to(kept.device)[None, :, :, None] + torch.arange(size, device=kept.device)
        always = self.always.rows[rows, None].expand(-1, kept.shape[1], -1)
        # Sink and window are whole blocks here, so that a distant block is read as a whole.
        meant = (kept >= 0)[..., None].expand(-1, -1, -1, size)
        slots = torch.cat([self.always_slots[rows, None].expand_as(always), in_blocks.flatten(2)], dim=-1)
        seen = torch.cat([always >= 0, meant.flatten(2)], dim=-1)
        slots = slots.where(seen, 0)
        keys, values = (
            gather_rows(self.lane.slots(states, layer, 0, self.lane.lane), slots)
            for states in (arena.keys, arena.values)
        )
        out, _ = attend_rows(queries, keys, values, seen, scoring.scaling, scoring.softcap, scoring.head_sinks)
        return out
