"""One session's K and V: which rows it holds, where, and their life.

    stage(n)       the next n positions get slots; their rows are written by this step's attention
    commit(length) staged rows below `length` stay, the rest are wiped; then, at a segment boundary, rows leave

Eviction happens in `commit`, never before, so a rejected draft leaves no trace. Slots are wiped when they are opened,
rejected or evicted: the lanes' bytes are a function of the committed rows alone.

Where a strategy has its old rows restored (`kv/archived_rows.py`), a session wakes for a Generate and sleeps after it.
Awake, it is a session like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import InvariantViolated, NoCapacity
from inference_engine.kv.archived_rows import ArchivedRows
from inference_engine.kv.context import KVContext
from inference_engine.kv.draft_memory import DraftMemory
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.lanes import LaneGroup, demands
from inference_engine.kv.query_rings import MatchTotals
from inference_engine.kv.slab import Slab, slab_bytes
from inference_engine.kv.sleeping import SleepingRows
from inference_engine.kv.strategy import KVStrategy, Placement
from inference_engine.kv.streaming import StreamingRows
from inference_engine.kv.transfers import TransferTotals
from inference_engine.kv.trunk import MOST_PIECES, Trunk
from inference_engine.types import Bound, Footprint


class SessionKV:
    """The live state behind a strategy's spec.

    Everything but construction and `release` runs on the engine's thread.
    """

    def __init__(
        self,
        strategy: KVStrategy,
        context: KVContext,
        limit_tokens: int | None,
        trunks: Sequence[Trunk] = (),
        *,
        tokens: int | None = None,
    ) -> None:
        """Reserve what is sustained. Raises NoCapacity, with nothing taken, if there is no room for it.

        trunks: the first rows, one trunk for each set of layers; they are borrowed until the session is released.
        tokens: be granted memory for a history of so many, and more as it grows (`grow`). None: for all it may become.
        """
        self.strategy = strategy
        self.context = context
        self.limit_tokens = limit_tokens
        self.base = trunks[0].end if trunks else 0  # positions whose rows are in the trunks
        self.length = self.base  # committed positions
        self.staged = 0  # positions staged beyond `next_position`
        self.staged_generated: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.evicted = 0  # committed positions that no query can read any more
        self.bound = bound_of(strategy, context, limit_tokens, base=self.base)
        self.draft_memory: DraftMemory | None = None  # what a drafter remembers of the session
        self._resident: list[LaneGroup] = []
        self._archived: ArchivedRows | None = None
        self._replayed: int | None = None  # while rows are computed again: how far
        self._is_awake = False
        self._tier_bytes = 0  # reserved of the second tier
        self._plan = _placement(strategy, context, limit_tokens, self.base)
        self._has_windows, self._is_selective = self._plan.has_windows, self._plan.is_selective
        self._is_reserved = False
        self.is_dropped = False
        self.grows = tokens is not None and grows_with_history(strategy, context, limit_tokens)
        self.granted_tokens = limit_tokens  # memory is granted for a history of so many; None: for any
        self._granted = self.bound  # what that may hold
        self._granted_apart = 0  # bytes granted beside those of resident slabs
        self._trunks = tuple(trunks)
        for trunk in trunks:
            trunk.borrow()
        self.reserve(tokens)

    def reserve(self, tokens: int | None = None) -> None:
        """Take what is sustained. Raises NoCapacity, with nothing taken, if there is no room for it.

        tokens: of the history, where memory is granted as it grows.
        """
        assert not self._is_reserved
        if self.grows:
            assert tokens is not None
            self.granted_tokens = self._whole(tokens)
            self._granted = self.bound_at(tokens)
        needed, pool = self._granted, self.context.pool
        is_granted = False
        try:
            is_granted = not self.grows or pool.grant(self._granted_rows)
            is_reserved = is_granted and self._reserve(self._plan)
        except BaseException:
            self._give_up(is_granted)
            raise
        if not is_reserved:
            self._give_up(is_granted)
            raise self._refusal(needed)
        if self.grows:
            self._note_grants()
        self._is_reserved, self.is_dropped = True, False

    def _refusal(self, needed: Bound) -> NoCapacity:
        """Nothing is taken, and there was no room."""
        pool = self.context.pool
        if needed.sustained_bytes > pool.capacity_bytes - pool.reserved_bytes:
            return no_capacity(self.context, needed)
        return NoCapacity(
            f"memory is free, but no address space is left for a session of up to {self.bound.sustained_bytes} bytes "
            "of K/V: each of its layers needs one stretch of it. Close sessions, or ask for a smaller limit_tokens",
            retry_after_seconds=1.0,
            needed_bytes=self.bound.sustained_bytes,
        )

    def _give_up(self, is_granted: bool) -> None:
        self.release()
        if self.grows and is_granted:
            self.context.pool.ungrant(self._granted_rows)

    # -- memory that is granted as the history grows ----------------------------------------------------------------

    def bound_at(self, tokens: int) -> Bound:
        """What the session may hold while its history is no longer than `tokens`, in whole segments of them."""
        if not self.grows:
            return self.bound
        bound = bound_of(self.strategy, self.context, self._whole(tokens), base=self.base)
        return replace(bound, tier_bytes=self.bound.tier_bytes)

    def covers(self, tokens: int) -> bool:
        """Is memory granted for a history of so many tokens?"""
        return not self.grows or self.granted_tokens is None or self.granted_tokens >= min(tokens, self._most_tokens)

    def grow(self, tokens: int) -> bool:
        """Be granted memory for a history of `tokens`. False, and nothing changed, if there is none left.

        Under the store's lock; nothing lies elsewhere afterwards.
        """
        if self.covers(tokens):
            return True
        before, grown = self._granted_rows, self.bound_at(tokens)
        if not self.context.pool.grant(grown.sustained_bytes - self._granted.sustained_bytes):
            return False
        self.granted_tokens, self._granted = self._whole(tokens), grown
        assert self._granted_rows >= before, "a longer history needs no less"
        self._note_grants()
        return True

    def _whole(self, tokens: int) -> int:
        """`tokens` in whole segments, past the rows that others hold."""
        return whole_segments(max(tokens, self.base + 1), self.context.geometry, self._most_tokens)

    @property
    def _most_tokens(self) -> int:
        assert self.limit_tokens is not None, "what has no limit is granted whole"
        return self.limit_tokens

    @property
    def _granted_rows(self) -> int:
        """Bytes granted but for those of the drafter, which are reserved by themselves."""
        return self._granted.sustained_bytes - _draft_bytes(self.context)

    def _note_grants(self) -> None:
        """Share what is granted out to the slabs, which may outlive the session."""
        plan = _placement(self.strategy, self.context, self.granted_tokens, self.base)
        geometry = self.context.geometry
        for group, (layers, layout) in zip(self._resident, plan.resident, strict=True):
            group.slab.nbytes = slab_bytes(demands(geometry, layers, layout), itemsize=geometry.itemsize)
        self._granted_apart = self._granted_rows - sum(group.slab.nbytes for group in self._resident)

    @property
    def reserved(self) -> Bound:
        """What is granted, and may be needed to wake: nothing once the session was released or dropped."""
        return self._granted if self._is_reserved else Bound(sustained_bytes=0, peak_bytes=0)

    def drop(self) -> None:
        """Give everything back, to `reserve` it again later: the session is empty then, and its tokens are staged anew.

        Any thread, while nothing else touches the session.
        """
        trunks, self._trunks = self._trunks, ()
        self.release()
        self._trunks = trunks
        self.draft_memory = None
        self.length, self.staged, self.evicted = self.base, 0, 0
        self._replayed = None
        self.is_dropped = True

    @property
    def freeable(self) -> Bound:
        """What `drop` would give back: nothing of what forks read."""
        is_lent = any(slab.is_lent for slab in self.slabs)
        return Bound(sustained_bytes=0, peak_bytes=0) if is_lent else self.reserved

    # -- forks ------------------------------------------------------------------------------------------------------

    def share(self) -> tuple[Trunk, ...]:
        """Trunks of the committed rows for a fork of this session, one for each set of layers; () if it has to copy.

        Rows are read where they lie only where each stays there as it is, and sums may be taken in another order; a few
        of them are copied sooner than read apart. Nothing is borrowed yet.
        """
        geometry = self.context.geometry
        if not self._plan.keeps_every_row or geometry.row_quantum > 1 or geometry.key_quantum > 1:
            return ()
        lent = [trunk.pieces for trunk in self._trunks] or [() for _ in self._plan.resident]
        if self.length - self.base >= geometry.segment_tokens and len(lent[0]) < MOST_PIECES:
            lent = [(*pieces, group.piece(self.length)) for pieces, group in zip(lent, self._resident, strict=True)]
        if not lent[0]:
            return ()
        if not self._resident:  # its own rows were dropped
            return self._trunks
        return tuple(group.trunk_of(pieces) for group, pieces in zip(self._resident, lent, strict=True))

    @property
    def shared_bytes(self) -> int:
        """Bytes of rows that are read where other sessions hold them. They are in no bound of this one."""
        return sum(trunk.nbytes for trunk in self._trunks)

    @property
    def slabs(self) -> list[Slab]:
        """What was reserved for this session and may be lent."""
        return [group.slab for group in self._resident]

    @property
    def borrowed(self) -> list[Slab]:
        """What was reserved for other sessions and is read by this one."""
        return [piece.slab for trunk in self._trunks for piece in trunk.pieces]

    def _reserve(self, plan: Placement) -> bool:
        if self.bound.tier_bytes:
            assert self.context.tier is not None, "this engine has no second tier"
            self.context.tier.reserve(self.bound.tier_bytes)
            self._tier_bytes = self.bound.tier_bytes
        memories = self.context.draft_memories
        if memories is not None and memories.demands(self.context.geometry):
            self.draft_memory = memories.open(self.context)
            if self.draft_memory is None:
                return False
        rows = replace(self.context, pool=self.context.pool.ungranted()) if self.grows else self.context
        for (layers, layout), trunk in zip(plan.resident, self._trunks or repeat(None), strict=False):
            group = LaneGroup.reserve(rows, layers, layout, trunk)
            if group is None:
                return False
            self._resident.append(group)
        if plan.restorer is None:
            self._is_awake = True
            return True
        kind = StreamingRows if plan.restorer.streams else SleepingRows
        self._archived = kind.reserve(self.context, plan, sustained=rows)
        return self._archived is not None

    @property
    def groups(self) -> tuple[LaneGroup, ...]:
        """The lanes that attention reads."""
        archived = self._archived  # read once: other threads that ask for facts do so while it is released
        return (*self._resident, *(archived.lanes if archived is not None else ()))

    # -- waking and sleeping ----------------------------------------------------------------------------------------

    @property
    def next_position(self) -> int:
        """The position whose row comes next: `length`, unless rows are being computed again."""
        return self.length if self._replayed is None else self._replayed

    @property
    def pending_replay(self) -> int:
        """Positions whose rows have to be computed again before new ones."""
        if self._archived is None or (self._is_awake and self._replayed is None):
            return 0
        return self._archived.replay_end(self.length) - (self._replayed or 0)

    def wake(self, tokens: int) -> bool:
        """Get ready for histories of up to `tokens`. False, and nothing taken, if the pool has no room now.

        Old rows are restored from the archive, now or in attention, or, where nothing is kept of them, are to be staged
        again from position 0 (`next_position`). Raises RestorationFailed, and the session sleeps on as it was.
        """
        if self._archived is None or self._is_awake:
            return True
        limit = tokens if self.limit_tokens is None else min(tokens, self.limit_tokens)
        plan = self.strategy.placement(self.context.geometry, max(limit, self.length))
        if not self._archived.wake(plan, self.length):
            return False
        if self._archived.replay_end(self.length):
            self._replayed = 0
        self._is_awake = True
        return True

    @property
    def takes_room(self) -> bool:
        """Does the session need room to wake, and give it back when it sleeps?"""
        return self._archived is not None

    def ask_finite(self) -> None:
        """Let the device tell whether old rows that were read or left so far are finite. Nobody waits for it."""
        if self._archived is not None:
            self._archived.ask_finite()

    def require_finite(self) -> None:
        """Raise RestorationFailed if some of those asked for are not finite; then `forget` is all that is left.

        To be called before anything that a step computed from them is told to anybody.
        """
        if self._archived is not None:
            self._archived.require_finite()

    def sleep(self) -> None:
        """Keep the exact rows, give back what waking took. What was not committed is gone.

        Raises as `require_finite`.
        """
        assert self.staged == 0
        if self._archived is None or not self._is_awake:
            return
        self.ask_finite()
        self.require_finite()
        self._archived.sleep(self.length if self._replayed is None else None)
        self._replayed = None
        self._is_awake = False

    def forget(self) -> None:
        """Drop every row, as if nothing had been committed: what was kept of them cannot be trusted any more.

        Rows that forks read, or that this one reads where others hold them, stay: no step since could write to them.
        Should the device fail meanwhile, the session is empty all the same: rows are wiped again when they are opened.
        """
        floor = min((group.floor for group in self._resident), default=0)
        held = [np.flatnonzero(group.held >= floor) for group in self._resident]
        length = max(self.length, self.next_position + self.staged)
        self.length, self.staged, self.evicted = floor, 0, 0
        self._replayed = None
        with ExitStack() as stack:
            if self._archived is not None:
                self._is_awake = False
                stack.callback(self._archived.forget)
            for group, slots in zip(self._resident, held, strict=True):
                group.held[slots] = -1
                stack.callback(group.forget, slots, length)

    def copy_from(self, other: SessionKV) -> None:
        """Hold the committed rows of `other`, which sleeps, as if they had been computed here. Only while empty.

        `other` has the same strategy; its limit may differ. Rows in the trunks are there already. What a drafter
        remembers is not copied. Raises OSError if the second tier cannot take its part; then `forget` is all that is
        left.
        """
        assert self.length == self.base and not other.staged and (other._archived is None or not other._is_awake)
        length = other.length
        if length <= self.base:
            return
        for group, theirs in zip(self._resident, other._resident, strict=True):
            group.copy_from(theirs, length)
        if self._archived is not None and other._archived is not None:
            self._archived.copy_from(other._archived, length)
        self.length, self.evicted = length, other.evicted

    # -- the life of rows -------------------------------------------------------------------------------------------

    @property
    def reads_lanes(self) -> bool:
        """Are all rows that it reads in lanes, so that steps of it can be nothing but numbers?"""
        return all(group.source is None or group.has_one_trunk for group in self.groups)

    @property
    def is_selective(self) -> bool:
        """Does it matter to `room` whether the model generated a token?"""
        return self._is_selective

    def room(self, *, generated: bool = True) -> int:
        """Positions that can be staged in one step, within the limit; generated: the model generated some of them.

        Where rows leave, or generated ones read selectively, that is up to the end of the open segment; otherwise
        segments are no concern.
        """
        segment = self.context.geometry.segment_tokens
        at = self.next_position
        to_limit = math.inf if self.limit_tokens is None else self.limit_tokens - at
        is_cut = self._has_windows or (self._is_selective and generated)
        to_boundary = segment - at % segment if is_cut else math.inf
        to_replayed = math.inf if self._replayed is None else self.pending_replay
        to_granted = math.inf if not self.grows or self.granted_tokens is None else self.granted_tokens - at
        return int(min(to_limit, to_boundary, to_replayed, to_granted))

    def stage(self, count: int, generated: NDArray[np.bool_] | None = None) -> None:
        """Give the next `count` positions their slots. They are not committed yet.

        generated: [count], which of them the model generated; None: none. It decides what they read, where a strategy
        makes a difference.
        """
        assert self._is_awake, "a session has to wake before it stages"
        room = self.room(generated=self._is_selective and generated is not None and bool(generated.any()))
        assert self.staged == 0 and 0 < count <= room, (self.staged, count, room)
        first = self.next_position
        positions = np.arange(first, first + count, dtype=np.int64)
        groups = self.groups
        for group in groups:
            opened, needed = (group.open_rows(length) for length in (first, first + count))
            if needed > opened:
                group.open(opened, needed)
            if (group.held[group.layout.slots(positions)] >= 0).any():
                raise InvariantViolated("INV1", f"a slot for positions from {first} is still held")
            if group.rings is not None and generated is not None and generated.any():
                group.rings.stage()
        for group in groups:
            group.held[group.layout.slots(positions)] = positions
        self.staged = count
        self.staged_generated = np.zeros(count, dtype=np.bool_) if generated is None else generated

    def commit(self, length: int) -> None:
        """Keep staged rows below `length`, wipe the others, and evict what no later query may see.

        Raises RestorationFailed if rows that leave the exact window cannot be kept, or those of an earlier step turn
        out not to be finite; then `forget` is all that is left.
        """
        before = self.next_position
        if not before <= length <= before + self.staged:
            raise InvariantViolated("INV2", f"commit to {length} of {before} and {self.staged} staged positions")
        rejected = np.arange(length, before + self.staged, dtype=np.int64)
        self.staged = 0
        if self._replayed is None:
            self.length = length
            if length // self.context.geometry.segment_tokens > before // self.context.geometry.segment_tokens:
                self.evicted = self.strategy.evicted(self.context.geometry, length)
        else:
            self._replayed = length
        groups = self.groups
        # The tables first, the device second: should the device fail, the tables are right.
        for group in groups if len(rejected) else ():
            group.held[group.layout.slots(rejected)] = -1
        for group in groups:
            if len(rejected):
                group.drop(rejected)
            group.keep_sink(before, length)
            group.summarize(before, length)
            if group.rings is not None:
                group.rings.commit(length)
        if self._replayed is None and self._archived is not None:
            self._archived.archive(before, length)
        for group in self.groups:
            if group.layout.horizon(length) > group.layout.horizon(before):
                group.evict(length)
            if group.tier is not None:
                group.tier.commit(length)
        if self._archived is not None and self._replayed is not None and not self.pending_replay:
            self._archived.end_replay(self._replayed, self.length)
            self._replayed = None

    def statistics(self) -> dict[int, MatchTotals]:
        """What matching past queries saved and missed, by layer; empty where a strategy does not match any."""
        by_layer: dict[int, MatchTotals] = {}
        for group in self.groups:
            if group.rings is not None:
                by_layer.update(group.rings.totals)
        return by_layer

    def transfers(self) -> TransferTotals:
        """What moved between the device and the second tier; nothing where a strategy has none."""
        archived = self._archived  # read once, as in `groups`
        totals = [group.tier.totals for group in self._resident if group.tier is not None]
        return reduce(TransferTotals.beside, totals, TransferTotals() if archived is None else archived.transfers())

    def check(self) -> None:
        """INV-1: per layer, resident and evicted positions add up to the cached length."""
        cached = self.next_position + self.staged
        for group in self.groups:
            resident = int(np.count_nonzero(group.held >= 0))
            gone = max(0, group.layout.horizon(self.next_position) - group.layout.sink) + group.layout.base
            if resident + gone != cached:
                raise InvariantViolated(
                    "INV1", f"{resident} resident and {gone} evicted positions where {cached} are cached"
                )

    def release(self) -> None:
        """Give everything back, though some of it fail; the rows are unreachable afterwards. Safe to call twice."""
        resident, self._resident = self._resident, []
        archived, self._archived = self._archived, None
        tier_bytes, self._tier_bytes = self._tier_bytes, 0
        trunks, self._trunks = self._trunks, ()
        granted, self._granted_apart = self._granted_apart, 0
        self._is_awake = self._is_reserved = False
        with ExitStack() as stack:
            stack.callback(self.context.pool.ungrant, granted)
            # The last comes first: bytes of the tier are promised to others once what took them is given back.
            if tier_bytes and self.context.tier is not None:
                stack.callback(self.context.tier.release, tier_bytes)
            if self.draft_memory is not None:
                stack.callback(self.draft_memory.release)
            if archived is not None:
                stack.callback(archived.release)
            for trunk in trunks:
                stack.callback(trunk.give_back)
            for group in resident:
                stack.callback(group.release)

    # -- facts ------------------------------------------------------------------------------------------------------

    def footprint(self) -> Footprint:
        """Bytes of opened pages by kind: rows, the sink's second copies, bounds of blocks, rings of past queries, the
        archive, the lanes of a woken session, what a drafter remembers, blocks fetched from the second tier."""
        length = self.next_position + self.staged
        held = {"rows": 0, "sink_copy": 0}
        beyond = 0
        for group in self._resident:
            held["rows"] += group.open_rows(length) * group.row_bytes
            held["sink_copy"] += min(group.layout.spare, length) * group.row_bytes
            if group.layout.selector is not None:
                blocks = self.length // group.layout.selector.block
                held["bounds"] = held.get("bounds", 0) + blocks * group.row_bytes
            if group.rings is not None:
                held["mac"] = held.get("mac", 0) + group.rings.held_bytes()
            if group.tier is not None:
                held["fetched"] = held.get("fetched", 0) + group.tier.fetched_bytes()
                beyond += group.tier.held_bytes()
        if self._archived is not None:
            for kind, count in self._archived.held_bytes(self.length, length).items():
                held[kind] = held.get(kind, 0) + count
            beyond += self._archived.tier_bytes(self.length)
        if self.draft_memory is not None:
            held["draft"] = self.draft_memory.held_bytes()
        return Footprint(held, tier_bytes=beyond)


def grows_with_history(strategy: KVStrategy, context: KVContext, limit_tokens: int | None) -> bool:
    """Can memory be granted as the history grows? Where there is no limit, windows bound it from the start."""
    return limit_tokens is not None and strategy.length_limit(context.geometry) is not None


def whole_segments(tokens: int, geometry: Geometry, limit_tokens: int) -> int:
    """`tokens` rounded up to segments, and to rows that are opened together; at most `limit_tokens`."""
    unit = math.lcm(geometry.segment_tokens, geometry.opening_tokens)
    return min(limit_tokens, -(-tokens // unit) * unit)


def no_capacity(context: KVContext, needed: Bound) -> NoCapacity:
    return NoCapacity(
        f"the session needs {needed.peak_bytes} bytes of K/V, and of the server's {context.pool.capacity_bytes} not so "
        "many are free now. Close sessions, or ask for a smaller limit_tokens or another strategy",
        retry_after_seconds=1.0,
        needed_bytes=needed.peak_bytes,
        capacity_bytes=context.pool.capacity_bytes,
    )


def bound_of(strategy: KVStrategy, context: KVContext, limit_tokens: int | None, *, base: int = 0) -> Bound:
    """Bytes that a session may hold: its rows by its strategy, and what a drafter remembers of it.

    base: so many of its first rows others hold.
    """
    rows = _placement(strategy, context, limit_tokens, base).bound(context.geometry)
    draft = _draft_bytes(context)
    return replace(rows, sustained_bytes=rows.sustained_bytes + draft, peak_bytes=rows.peak_bytes + draft)


def _draft_bytes(context: KVContext) -> int:
    demands = () if context.draft_memories is None else context.draft_memories.demands(context.geometry)
    return slab_bytes(demands, itemsize=context.geometry.itemsize)


def _placement(strategy: KVStrategy, context: KVContext, limit_tokens: int | None, base: int) -> Placement:
    plan = strategy.placement(context.geometry, limit_tokens)
    if not base:
        return plan
    assert limit_tokens is not None, "where every row stays there is a limit"
    return plan.behind(base, context.geometry, limit_tokens)
