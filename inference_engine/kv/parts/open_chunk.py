"""Recurrent states as kernels of our own keep them: after whole chunks, and the entries of the tokens since.

    position   … 15 | 16 17 18 | 19 20        a chunk of 8
               state  committed  staged       after 24 tokens the chunk is folded into the state

A rejected draft is entries that are not counted, and so is all behind a position of the open chunk that the session
goes back to: no state was written. A step of more tokens than there is room for gives a state of its own, in memory of
the step, which takes the place of the committed one when all of it is kept.

A token is computed from the state at the last multiple of a chunk before it, and the entries since, however many tokens
a step has: so its bits do not depend on that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import InvariantViolated
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry, OpenChunk
from inference_engine.kv.layout import Positions
from inference_engine.kv.memory.allocation import Allocation
from inference_engine.kv.memory.pool import Demand
from inference_engine.kv.part import Saved
from inference_engine.kv.parts.recurrent import MOST_REJECTED, PrefixStates, RecurrentStates, States
from inference_engine.kv.views import StatesOfStep


class OpenChunkStates(RecurrentStates):
    """committed: its state is that after the last whole chunk before `position`."""

    def __init__(
        self, context: KVContext, allocation: Allocation, demands: Sequence[Demand], prefix: PrefixStates | None
    ) -> None:
        super().__init__(context, allocation, demands, prefix)
        self._after_step: Tensor | None = None
        self._is_computed = False

    @property
    def _chunk(self) -> OpenChunk:
        chunk = self._context.geometry.open_chunk
        assert chunk is not None
        return chunk

    def _after(self, position: int) -> States | None:
        """Those of the whole open chunk, of which a position needs a part."""
        own = self.committed.position
        return self.committed if self._chunk.begin(own) <= position <= own else super()._after(position)

    # -- a step ----------------------------------------------------------------------------------------------------

    def stage(self, positions: Positions, generated: NDArray[np.bool_]) -> int:
        first = super().stage(positions, generated)
        if not first:
            self._of.clear()
        assert first == self._of.position, "a session goes back before it stages"
        is_short = first % self._chunk.tokens + len(positions) <= self._chunk.room
        self._after_step = None if is_short else torch.zeros_like(self._of.memory)
        self._is_computed = False
        return first

    def of_step(self) -> StatesOfStep:
        self._is_computed = True
        return StatesOfStep(self._of.memory, self._after_step)

    def keepable(self, count: int) -> int:
        return count if count == self._staged or self._after_step is None else 0

    def commit(self, before: int, length: int, rejected: Positions) -> None:
        kept, staged, after = length - before, self._staged, self._after_step
        self._staged, self._after_step = 0, None
        if kept and not self._is_computed:
            raise InvariantViolated("INV1", f"{kept} tokens are kept, and no state was computed for them")
        if after is not None:
            if kept and len(rejected):
                raise InvariantViolated(
                    "INV1", f"{kept} of {staged} tokens are kept, and states are there after all of them"
                )
            if kept:
                self._of.memory.copy_(after)
        else:
            held = before % self._chunk.tokens
            if kept < staged or held + kept >= self._chunk.tokens:
                self._context.settle(self._of.memory, held, kept, staged)
        self._of.position = length

    # -- as a whole ------------------------------------------------------------------------------------------------

    def copy_to(self, to: States, position: int) -> None:
        super().copy_to(to, position)
        self._go_back(to, position)

    def _go_back(self, states: States, position: int) -> None:
        """Within the open chunk."""
        held = position % self._chunk.tokens
        if (behind := states.position - position) > 0:
            self._context.settle(states.memory, held, 0, behind)
        states.position = position

    def save(self, length: int) -> Saved:
        if not length or length == self.committed.position:
            return super().save(length)
        copy = States(self.committed.layers, torch.empty_like(self.committed.memory))
        self.copy_to(copy, length)
        return {"states": list(copy.views.values())}

    def forget(self, at: int, length: int) -> None:
        if self._chunk.begin(self.committed.position) <= at < self.committed.position:
            self._go_back(self.committed, at)
        super().forget(at, length)
        self._after_step = None


def reserve_states(context: KVContext, *, replays: bool, prefix: PrefixStates | None = None) -> RecurrentStates | None:
    """None, and nothing taken, if the pool has no room."""
    kind = RecurrentStates if context.geometry.open_chunk is None else OpenChunkStates
    return kind.reserve(context, replays=replays, prefix=prefix)


def most_rejected(geometry: Geometry) -> int:
    """The most staged positions that a commit may reject beside others that it keeps."""
    if not geometry.states:
        return sys.maxsize
    chunk = geometry.open_chunk
    return MOST_REJECTED if chunk is None else chunk.room - chunk.tokens
