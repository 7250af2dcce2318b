"""How one session's queries of a step read its entries, in one set of layers.

Where the device has an operation for it, what they read is plan numbers (`kv/numbers.py`). Otherwise it is a view: made
once a step, on the host, and then asked layer after layer. A view holds no session. Those of a mechanism lie beside it
in `parts/`; here are the views that read every entry, in regions or chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.attention import attend, attend_causal
from inference_engine.kernels.merge import Merging, attend_state, with_head_sinks
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.pool import KVBuffer
from inference_engine.kv.numbers import StepNumbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How scores become weights in a layer; see `kernels/attention.py`."""

    scaling: float
    softcap: float | None
    head_sinks: Tensor | None


# on_choice(layer, scores [T, Hkv, B], candidates [T, B], chosen [T, Hkv, K]): told of every choice of blocks.
OnChoice = Callable[[int, Tensor, Tensor, Tensor], None]


class View(Protocol):
    """`read(layer, queries [T, Hq, D], buffer, scoring)` gives [T, Hq, D]; the step's own rows are written already."""

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor: ...


@dataclass(kw_only=True, slots=True)
class StagedQueries:
    """What one session has staged in a step.

    packed, real: where its tokens lie in the step, with padding and without. positions: those of `packed`.
    first, end: the positions that are staged. generated: [end - first], which of them the model generated.
    views: by layer; none where the queries read by numbers.
    """

    positions: Positions
    packed: slice
    real: slice
    first: int
    end: int
    generated: NDArray[np.bool_]
    has_generated: bool
    has_appended: bool
    views: dict[int, View] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.end - self.first

    @property
    def generated_queries(self) -> NDArray[np.int64]:
        """Which of the session's rows, counted from its padding on, the model generated."""
        queries: NDArray[np.int64] = self.real.start - self.packed.start + np.flatnonzero(self.generated)
        return queries


@dataclass(kw_only=True, slots=True)
class StepReads:
    """What the reads of all sessions of a step are written to, and made with.

    attends_together: may queries read by numbers, in one operation of the device? Otherwise every session has views.
    most_queries: sessions that stage more have views, too.
    on_choice: told of the blocks that generated tokens read, where they are chosen by plain operations.
    selects: does a query that reads by numbers choose blocks?
    """

    geometry: Geometry
    device: torch.device
    mask_dtype: torch.dtype
    attends_together: bool
    most_queries: int
    numbers: StepNumbers
    on_choice: OnChoice | None = None
    selects: bool = False

    @property
    def is_fixed_shape(self) -> bool:
        return self.geometry.key_quantum > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Where the keys of one session lie in a set of layers: `region` slots for each KV head, from a layer's start."""

    starts: Mapping[int, int]  # first buffer row, by layer
    heads: int
    region: int

    def slots(self, states: Tensor, layer: int, first: int, count: int) -> Tensor:
        """[Hkv, count, D], the slots from `first` on: a view."""
        dim = states.shape[-1]
        offset = (self.starts[layer] + first) * dim
        return states.as_strided((self.heads, count, dim), (self.region * dim, dim, 1), offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseView:
    """Reads the first `count` slots under a mask [T, count] (None: each query sees each key)."""

    region: Region
    count: int
    mask: Tensor | None

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        return attend(
            queries,
            self.region.slots(buffer.keys, layer, 0, self.count),
            self.region.slots(buffer.values, layer, 0, self.count),
            self.mask,
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalView:
    """Reads the first `count` slots, where each holds its own position and the step's rows are the last of them."""

    region: Region
    count: int

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        return attend_causal(
            queries,
            self.region.slots(buffer.keys, layer, 0, self.count),
            self.region.slots(buffer.values, layer, 0, self.count),
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            head_sinks=scoring.head_sinks,
        )


# -- entries that are read chunk by chunk ------------------------------------------------------------------------------


class EntrySource(Protocol):
    """Where the entries of a session are that its regions do not hold."""

    def chunk(self, layer: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys, rotated at their own positions, and values of the positions [first, last): [Hkv, n, D] each.

        In any float dtype, and good until the next call. Raises RestorationFailed if they cannot be had.
        """


def chunks_between(first: int, last: int, size: int) -> tuple[range, ...]:
    """The positions [first, last) in chunks of `size`, counted from `first`; the last one may be shorter."""
    return tuple(range(start, min(start + size, last)) for start in range(first, last, size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Consecutive rows of the step that are read in one operation: the first `count` slots under a mask.

    mask: additive, [T, count]; None when each of the rows sees each key.
    """

    queries: slice
    count: int
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkView:
    """Reads resident entries as `DenseView` does, and merges in those that are elsewhere, chunk by chunk.

        regions      ■ ■ ■ ■                       | ■ ■ ■ ■ ■      resident, one state
        elsewhere            | c c c | c c c | c |                a state for each chunk: fetched, attended to, let go

    The states are merged by their log-sum-exps (`kernels/merge.py`), so that the result is attention over all entries,
    and no more than one chunk of one layer is there at a time. Where chunks begin and end is a function of positions
    alone, and each query sees every entry of every chunk: they are in an earlier segment.

    portions: all rows of the step; one portion, or in fixed-shape mode one for each row quantum, so that the shape of
    each operation depends on a row's position alone.
    """

    region: Region
    portions: Sequence[Portion]
    source: EntrySource
    chunks: Sequence[range]

    def read(self, layer: int, queries: Tensor, buffer: KVBuffer, scoring: Scoring) -> Tensor:
        states = [
            Merging(*self._read_regions(layer, queries[portion.queries], portion, buffer, scoring))
            for portion in self.portions
        ]
        for chunk in self.chunks:
            keys, values = self.source.chunk(layer, chunk.start, chunk.stop)
            for portion, state in zip(self.portions, states, strict=True):
                state.add(*_attend(queries[portion.queries], keys, values, None, scoring))
        out, lse = (torch.cat(parts) for parts in zip(*(state.state() for state in states), strict=True))
        if scoring.head_sinks is not None:
            out, _ = with_head_sinks(out, lse, scoring.head_sinks)
        return out.to(queries.dtype)

    def _read_regions(
        self, layer: int, queries: Tensor, portion: Portion, buffer: KVBuffer, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        keys, values = (self.region.slots(states, layer, 0, portion.count) for states in (buffer.keys, buffer.values))
        return _attend(queries, keys, values, portion.mask, scoring)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The state of these rows. Head sinks are left out of it: they count once, in the end."""
    return attend_state(queries, keys, values, mask, scaling=scoring.scaling, softcap=scoring.softcap)
