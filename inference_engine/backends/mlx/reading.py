"""What the queries of one session read in a layer, from a plan's numbers: runs of entries in the pool, and their masks.

    region of a head   slot  0 … base-1 | base …              | …
                             prefix     | entries kept before | the step's own, written after it
    read               prefix of a fork   own entries           new: from the forward itself

The step's own entries are not in the pool while it runs: they are handed to attention directly. So nothing waits for a
write. Layers whose lines differ only in where their regions start share what is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from inference_engine.kernels.by_session import seen_by
from inference_engine.kernels.reads import (
    BASE,
    COUNT,
    FLOOR,
    HEAD_SLOTS,
    PREFIX_HEAD_SLOTS,
    PREFIX_START,
    RING,
    SINK_FLOOR,
    START,
    UPTO,
)
from inference_engine.kv.plan import StepPlan

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EntryRun:
    """Entries `first` to `first + count` of each head's region, whose heads begin `head_slots` vectors apart.

    start: the buffer vector where the region of the first head begins.
    """

    start: int
    head_slots: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """What the T queries of a session see in layers alike.

    prefix, own: slots (first, end) in the regions. kept: [T, S] over the entries of both, new: [T, T] over the step's
    own; None if all are seen. is_causal: all in the regions, and of the step's own all up to the query itself.
    """

    prefix: tuple[int, int]
    own: tuple[int, int]
    kept: mx.array | None
    new: mx.array | None
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class LayerReading:
    """What queries `tokens` of the step read in one layer."""

    tokens: slice
    runs: tuple[EntryRun, ...]
    visible: Visible


def readings(plan: StepPlan) -> list[list[LayerReading]]:
    """By layer, one for each session of a step. Their queries read by numbers, and none selects blocks."""
    regions, geometry = plan.numbers.regions, plan.numbers.geometry
    places = {layer: (heads, at) for heads, layers in geometry.by_heads.items() for at, layer in enumerate(layers)}
    found: list[list[LayerReading]] = [[] for _ in geometry.layers]
    for span in plan.spans:
        known: dict[bytes, Visible] = {}
        lines = regions[:, span.packed].copy()
        starts, prefixes = lines[:, 0, START].tolist(), lines[:, 0, PREFIX_START].tolist()
        lines[:, :, (START, PREFIX_START)] = 0
        for layer in range(len(found)):
            heads, at = places[layer]
            own, start = lines[layer], starts[layer]
            base = int(own[0, BASE])
            slots = plan.numbers.writes[heads][at, span.packed, 0] - start + base
            key = own.tobytes() + slots.tobytes()
            if (visible := known.get(key)) is None:
                visible = known[key] = _visible(own, slots)
            runs = _runs(visible, own[0], start=start, prefix=prefixes[layer])
            found[layer].append(LayerReading(span.packed, tuple(runs), visible))
    return found


def _runs(visible: Visible, line: NDArray[np.int64], *, start: int, prefix: int) -> Iterator[EntryRun]:
    first, end = visible.prefix
    if end > first:
        yield EntryRun(prefix, int(line[PREFIX_HEAD_SLOTS]), first, end - first)
    first, end = visible.own
    if end > first:
        base = int(line[BASE])
        yield EntryRun(start, int(line[HEAD_SLOTS]), first - base, end - first)


def _visible(lines: NDArray[np.int64], new: NDArray[np.int64]) -> Visible:
    """lines: [T, FIELDS] of queries of one session. new: [T], the slots of their own entries."""
    count, base = int(lines[0, COUNT]), int(lines[0, BASE])
    assert (lines[:, COUNT] == count).all() and count, "queries of a session look at the same slots"
    tokens = len(lines)
    is_plain = not (lines[0, RING] or lines[:, FLOOR].any() or lines[:, SINK_FLOOR].any())
    if is_plain and new[0] == count - tokens and (lines[:, UPTO] == new).all():
        before = count - tokens
        causal = None if tokens == 1 else mx.tri(tokens, dtype=mx.bool_)
        return Visible((0, min(base, before)), (base, max(base, before)), None, causal, is_causal=True)
    seen = seen_by(lines)
    new_mask = seen[:, new]
    seen[:, new] = False
    prefix, own = _trimmed(seen[:, :base], 0), _trimmed(seen[:, base:], base)
    mask = np.concatenate([seen[:, slice(*prefix)], seen[:, slice(*own)]], axis=1)
    kept, own_mask = (None if one.all() else mx.array(one) for one in (mask, new_mask))
    return Visible(prefix, own, kept, own_mask)


def _trimmed(seen: Mask, offset: int) -> tuple[int, int]:
    """The slots that are seen at all, from the first to behind the last."""
    found = np.flatnonzero(seen.any(axis=0))
    return (offset, offset) if not len(found) else (offset + int(found[0]), offset + int(found[-1]) + 1)
