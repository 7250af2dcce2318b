"""Bytes of K/V that a session is granted: all at once, or more as its history grows.

A grant takes bytes of the pool's capacity by whole segments of history, and divides them among allocations, which were
reserved for the longest history and may outlive the session.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from inference_engine.kv.context import KVContext
from inference_engine.kv.memory.allocation import Allocation, allocation_bytes
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.strategy import (
    KVStrategy,
    Placement,
    bound_of,
    bytes_apart,
    grows_with_history,
    placed,
    whole_segments,
)
from inference_engine.types import Bound


class Grant:
    """What is granted to one session. All that changes it is called under the store's lock."""

    def __init__(
        self,
        strategy: KVStrategy,
        context: KVContext,
        limit_tokens: int | None,
        base: int,
        plan: Placement,
        *,
        may_grow: bool,
    ) -> None:
        """base: positions whose entries lie in other sessions. plan: for the longest history. may_grow: memory is
        granted as the history grows, where it can be."""
        self.grows = may_grow and grows_with_history(strategy, context, limit_tokens)
        self.tokens = limit_tokens  # memory is granted for a history of so many; None: for any
        self.whole = self.bound = bound_of(strategy, context, limit_tokens, base=base)  # of all; of what is granted
        self._strategy, self._context, self._limit_tokens, self._base = strategy, context, limit_tokens, base
        self._allocations: Sequence[Allocation] = ()
        self._reserved_bytes = bytes_apart(context, plan)  # of states and of the drafter, which the pool counts itself
        self._apart = 0  # bytes granted outside the allocations

    def bound_at(self, tokens: int) -> Bound:
        """Bytes that the session may hold while its history has at most `tokens` tokens, rounded up to segments."""
        if not self.grows:
            return self.whole
        bound = bound_of(self._strategy, self._context, self.whole_tokens(tokens), base=self._base)
        return replace(bound, tier_bytes=self.whole.tier_bytes)

    def covers(self, tokens: int) -> bool:
        """Is memory granted for a history of `tokens`?"""
        return tokens <= self.covered_tokens

    @property
    def covered_tokens(self) -> float:
        """The longest history that memory is granted for."""
        return math.inf if self.tokens is None or self.tokens == self._limit_tokens else self.tokens

    def take(self, tokens: int | None) -> bool:
        """Take it of the pool, where it grows for so many tokens of history; False if the pool has too little left."""
        if not self.grows:
            return True
        assert tokens is not None
        self._set(tokens)
        return self._context.pool.grant(self._kv_bytes)

    def give_up(self) -> None:
        """What `take` took, where nothing could be reserved in it."""
        if self.grows:
            self._context.pool.ungrant(self._kv_bytes)

    def divide(self, allocations: Sequence[Allocation]) -> None:
        """Among the allocations that were reserved in it, from now on."""
        self._allocations = allocations
        if self.grows:
            self._divide()

    def grow(self, tokens: int) -> bool:
        """Grant memory for a history of `tokens`. False, and nothing changed, if the pool has none left.

        No entry is moved.
        """
        if self.covers(tokens):
            return True
        grown = self.bound_at(tokens)
        added = grown.sustained_bytes - self.bound.sustained_bytes
        assert added >= 0, "a longer history needs no less"
        if not self._context.pool.grant(added):
            return False
        self.tokens, self.bound = self.whole_tokens(tokens), grown
        self._divide()
        return True

    def shrink(self, tokens: int) -> None:
        """Give back what a history of `tokens` does not need."""
        if self.grows and self.whole_tokens(tokens) < (self.tokens or 0):
            before = self.bound.sustained_bytes
            self._set(tokens)
            self._divide()
            self._context.pool.ungrant(before - self.bound.sustained_bytes)

    def end(self) -> int:
        """No allocation is the session's any more. Returns the bytes outside of them, which go back to the pool."""
        apart, self._apart, self._allocations = self._apart, 0, ()
        return apart

    def whole_tokens(self, tokens: int) -> int:
        """`tokens` rounded up to segments, and beyond the shared prefix."""
        assert self._limit_tokens is not None, "a session without a limit is granted all its memory at once"
        return whole_segments(max(tokens, self._base + 1), self._context.geometry, self._limit_tokens)

    def _set(self, tokens: int) -> None:
        self.tokens, self.bound = self.whole_tokens(tokens), self.bound_at(tokens)

    @property
    def _kv_bytes(self) -> int:
        return self.bound.sustained_bytes - self._reserved_bytes

    def _divide(self) -> None:
        plan = placed(self._strategy, self._context, self.tokens, self._base)
        geometry = self._context.geometry
        for allocation, (layers, layout) in zip(self._allocations, plan.resident, strict=True):
            need = LayerEntries.need(geometry, layers, layout)
            allocation.nbytes = allocation_bytes(need.demands, itemsize=geometry.itemsize)
        self._apart = self._kv_bytes - sum(allocation.nbytes for allocation in self._allocations)
