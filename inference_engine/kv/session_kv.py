"""The KV cache of one session: which entries it holds, where they lie, and when they come and go.

    stage(n)       the next n positions get slots; this step's attention writes their entries
    commit(length) staged entries below `length` stay, the rest are wiped; at a segment boundary, entries are evicted

Eviction happens in `commit`, never before, so a rejected draft leaves no trace. Slots are wiped when they are opened,
rejected or evicted: the regions' bytes are a function of the committed entries alone.

Where a strategy restores old entries (`kv/parts/archived.py`), a session becomes active for a Generate and idle after
it. An active session is a session like any other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import InvariantViolated, NoCapacity
from inference_engine.kv.context import DraftMemory, KVContext
from inference_engine.kv.grant import Grant
from inference_engine.kv.memory.allocation import Allocation
from inference_engine.kv.memory.pool import Demand, Run
from inference_engine.kv.part import Held, Part, Saved, saved_under, under
from inference_engine.kv.parts.archived import ArchivedEntries, Asked
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.parts.open_chunk import most_rejected, reserve_states
from inference_engine.kv.parts.recurrent import PrefixStates, RecurrentStates
from inference_engine.kv.parts.shared_prefix import SharedPrefix
from inference_engine.kv.strategy import (
    KVStrategy,
    Placement,
    no_address_space,
    no_capacity,
    placed,
    placement_demands,
)
from inference_engine.types import Bound, Footprint

_NO_BYTES = Bound(sustained_bytes=0, peak_bytes=0)


class SessionKV:
    """The live state behind a strategy's spec.

    Everything but construction and `release` runs on the engine's thread.
    """

    def __init__(
        self,
        strategy: KVStrategy,
        context: KVContext,
        limit_tokens: int | None,
        prefixes: Sequence[SharedPrefix] = (),
        *,
        tokens: int | None = None,
        is_dropped: bool = False,
    ) -> None:
        """Reserve the sustained memory. Raises NoCapacity, with nothing taken, if there is no room for it.

        prefixes: the first entries, for each set of layers; they are borrowed until the session is released.
        tokens: grant memory for a history of so many tokens, and more as it grows (`grant`). None: for the longest one.
        is_dropped: begin as `drop` leaves a session, without memory.
        """
        self.strategy = strategy
        self.context = context = context.of(strategy.geometry(context.geometry).within(limit_tokens))
        self.limit_tokens = limit_tokens
        self.base = prefixes[0].end if prefixes else 0  # positions whose entries lie in other sessions
        self.length = self.base  # committed positions
        self.coming = 0  # so many positions will have entries, which are copied before the next Generate
        self.going: int | None = None  # entries from there on are dropped before the next Generate (`rewind`)
        self.staged = 0  # positions staged beyond `next_position`
        self.staged_generated: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.evicted = 0  # committed positions that no query can read any more
        self._quiet_until = 0  # until there, a token is little more than an entry in the tables (`Part.stage`)
        self._tables: tuple[LayerEntries, ...] = ()  # of the regions that positions were staged in last
        self._quiet_footprint: tuple[int, Footprint] | None = None  # while that is so; with the pages that are open
        self.parts: tuple[Part, ...] = ()  # in the order of a step: what commits after others comes after them
        self.draft_memory: DraftMemory | None = None  # one of the parts, if a drafter keeps state per session
        self.states: RecurrentStates | None = None  # one of the parts, if layers of the model have recurrent states
        # The most staged positions that a commit may reject beside others that it keeps.
        self.most_rejected = most_rejected(context.geometry)
        self._resident: tuple[LayerEntries, ...] = ()  # the parts whose entries are not archived
        self._archived: tuple[ArchivedEntries, ...] = ()  # the part that archives and restores old entries, if any
        self._replayed: int | None = None  # while entries are recomputed: up to which position
        self._is_active = False
        self._tier_bytes = 0  # reserved in the second tier
        self._plan = placed(strategy, context, limit_tokens, self.base)
        self.is_selective = self._plan.is_selective  # does `room` depend on whether the model generated a token?
        # Where a step ends at the latest: without, and with generated tokens.
        segment = context.geometry.segment_tokens
        step = self._plan.step(segment)
        self._steps = (step, segment if self.is_selective else step)
        self._ends_alone = self._plan.ends_alone
        self.reads_taps = bool(self._plan.archived) and self._plan.restorer.reads_taps  # by `commit`
        # Do only archived layers want steps to end with a segment?
        self._joins_segments = all(layout.step is None for _, layout in self._plan.resident)
        self._is_reserved = False
        self.is_dropped = is_dropped
        self.grant = Grant(strategy, context, limit_tokens, self.base, self._plan, may_grow=tokens is not None)
        self.bound = self.grant.whole
        self._prefixes = tuple(prefixes)
        for prefix in prefixes:
            prefix.borrow()
        if not is_dropped:
            self.reserve(tokens)

    def reserve(self, tokens: int | None = None) -> None:
        """Reserve the sustained memory. Raises NoCapacity, with nothing taken, if there is no room for it.

        tokens: length of the history, where memory is granted as it grows.
        """
        assert not self._is_reserved
        is_granted = False
        try:
            is_granted = self.grant.take(tokens)
            is_reserved = is_granted and self._reserve(self._plan)
        except BaseException:
            self._give_up(is_granted)
            raise
        if not is_reserved:
            self._give_up(is_granted)
            raise self._refusal(self.grant.bound)
        self.grant.divide(self.allocations)
        self._is_reserved, self.is_dropped = True, False

    def _refusal(self, needed: Bound) -> NoCapacity:
        """The error for a reservation that found no room; nothing is taken."""
        pool = self.context.pool
        if needed.sustained_bytes > pool.capacity_bytes - pool.reserved_bytes:
            return no_capacity(self.context, needed)
        return no_address_space(self.bound.sustained_bytes)

    def _give_up(self, is_granted: bool) -> None:
        if self.is_dropped:
            self._release_own()  # it is refused, and stays as it was dropped
        else:
            self.release()
        if is_granted:
            self.grant.give_up()

    @property
    def reserved(self) -> Bound:
        """Bytes that are granted, and the peak that waking may need. Zero once the session was released or dropped."""
        return self.grant.bound if self._is_reserved else _NO_BYTES

    def drop(self) -> None:
        """Give all memory back, to `reserve` it again later. The session is then empty, and its tokens are staged anew.

        Safe from any thread that has the session to itself.
        """
        self._release_own()
        self.length, self.coming, self.staged, self.evicted = self.base, 0, 0, 0
        self._replayed = None
        self.is_dropped = True
        self._end_quiet()

    def _release_own(self) -> None:
        """Give back all memory but what is borrowed: the history of a fork begins in entries of another session."""
        prefixes, self._prefixes = self._prefixes, ()
        try:
            self.release()
        finally:
            self._prefixes = prefixes

    def shrink(self) -> None:
        """Give back what is granted beyond the entries that it has, and what no fork needs. Under the store's lock;
        nothing is staged.
        """
        self.end_lending()
        for part in self._archived:
            part.shrink()
        if self._is_reserved:
            self.grant.shrink(max(1, self.length))

    @property
    def may_be_kept(self) -> bool:
        """After its session has closed: is it as between Generates, its memory all its own and of the pool alone?

        Then `release` gives all of it back, at any time.
        """
        is_at_rest = self._is_reserved and not self.staged and not self.coming and self.can_be_copied
        is_at_rest &= self.going is None
        is_its_own = not self.base and not self.bound.tier_bytes
        return is_at_rest and is_its_own and not any(each.is_lent for each in self.allocations)

    def as_it_is(self) -> SessionKV:
        """What it holds now, to copy from on the engine's thread: `release` may be called meanwhile by another one,
        and that thread alone writes to what is given back."""
        return copy(self)

    @property
    def runs(self) -> list[Run]:
        """Those of the pool that `drop` would give back, if nothing is lent."""
        return [run for part in self.parts for run in part.runs]

    @property
    def demands(self) -> tuple[Demand, ...]:
        """What `reserve` takes of the pool, in this order."""
        return placement_demands(self.context, self._plan)

    @property
    def freeable(self) -> Bound:
        """What `drop` would give back. Nothing while forks read the entries."""
        # Without a list or a generator: it is asked of each session of an owner in turn.
        for group in self._resident:
            if group.allocation.is_lent:
                return _NO_BYTES
        return self.grant.bound if self._is_reserved else _NO_BYTES

    # -- forks, and going back --------------------------------------------------------------------------------------

    def share(self, at: int) -> tuple[SharedPrefix, ...]:
        """The committed entries of the first `at` positions for a fork of this session, by set of layers; () if it has
        to copy them.

        Entries are shared only if all of them stay in place unchanged and the order of summation is free. A short
        history is copied: that is cheaper than reading one more piece. Where layers have recurrent states, a prefix
        ends where these are, or with a shared prefix. Nothing is borrowed yet.
        """
        geometry, until = self.context.geometry, self._until(min(at, self.length))
        if self.states is not None and not self.states.holds(until):
            until = self.base if self.base <= until else 0
        if any(layer.is_indexed for layer in geometry.layers):
            return ()  # an indexer scores all entries of a layer at once
        if not until or not self._plan.keeps_every_entry or geometry.token_quantum > 1 or geometry.key_quantum > 1:
            return ()
        borrowed = tuple(prefix.until(until) for prefix in self._prefixes)
        lent = [prefix.pieces for prefix in borrowed] or [() for _ in self._plan.resident]
        if until - self.base < geometry.segment_tokens or len(lent[0]) == self.context.most_pieces:
            return borrowed
        states: PrefixStates | None = None
        if self.states is not None and (states := self.states.lend(until)) is None:
            return borrowed
        return tuple(
            group.prefix_of((*pieces, group.piece(until)), None if place else states)
            for place, (group, pieces) in enumerate(zip(self._resident, lent, strict=True))
        )

    def end_lending(self) -> None:
        """Give back what no fork needs of what `share` took."""
        if self.states is not None:
            self.states.end_lending(self._lent_until)

    @property
    def _lent_until(self) -> int:
        """To which position forks read entries of this session; 0: none does."""
        return max([group.allocation.lent_until for group in self._resident if group.allocation.is_lent] or [0])

    def take_prefix_states(self) -> None:
        """Engine's thread, before the session that lends moves on or ends: copy the states at the prefix's end."""
        if self._prefixes and (states := self._prefixes[0].states) is not None:
            states.fill()

    def kept(self, at: int) -> int:
        """How many of the first `at` positions have the entries that they would have if the history ended there.

        All that are committed, or about to be copied; or, where entries have left since that it would have, or a
        recurrent state has gone on, those of a shared prefix alone.
        """
        held = max(self.coming, self.length)  # in this order: `copy_from` writes them in the other one
        length = self._until(min(at, held))
        can_rewind = length == held or all(part.can_rewind(length, held) for part in self.parts)
        return length if can_rewind else min(length, self.base)

    def _until(self, length: int) -> int:
        """Of so many first positions those that stay, if a cut is still to come."""
        return length if self.going is None else min(length, self.going)

    def would_keep(self, at: int, length: int) -> bool:
        """As `kept`, of what is saved after `length`: would it have the first `at` positions, once that is loaded?
        Without memory it says so only where all entries stay."""
        can_rewind = all(part.can_rewind(at, length) for part in self.parts) if self.parts else self.keeps_every_entry
        return at == length or can_rewind

    def pending(self, length: int, *, found: int = 0) -> int:
        """Of a history of `length`, the tokens that a Generate would prefill: the last one at least.

        found: so many first ones would have entries, those of other sessions or of a copy. All, where they are
        recomputed and it has no memory that says which.
        """
        if self._plan.restorer.replays and self._plan.archived and not self._archived:
            return length
        kept = max(found, self.kept(max(0, length - 1)))
        return length - kept + max((part.replay_end(kept) for part in self._archived), default=0)

    def can_rewind(self, at: int) -> bool:
        """Can it go back to `at` where it is? Not before or within entries that lie in other sessions' memory, or that
        forks read: they could not be written anew. Called under the store's lock."""
        return at >= max(self.base, self._lent_until)

    def will_rewind(self, at: int) -> None:
        """`rewind` will be called, to `at` at most, also if the memory has become another session's by then."""
        self.going = self._until(at)

    def rewind(self, at: int) -> None:
        """While idle, and only if it can: the history ends at `at`, or where it was to end before (`will_rewind`). What
        it would not have is gone (`kept`)."""
        assert not self.staged and self.can_be_copied
        try:
            self._rewind(self._until(at))
        finally:
            self.going = None

    def _rewind(self, at: int) -> None:
        if at >= self.length:
            return
        if self.kept(at) < at or not at:
            self.forget()
            return
        length, self.length = self.length, at
        self.evicted = self.strategy.evicted(self.context.geometry, at)
        self._end_quiet()
        for part in self.parts:
            part.forget(at, length)

    @property
    def keeps_every_entry(self) -> bool:
        """Do entries stay where they are, unchanged, as long as the session has them, and nothing else is needed?"""
        return self._plan.keeps_every_entry and not self.context.geometry.states

    @property
    def can_be_copied(self) -> bool:
        """Is it as it is between Generates, or no different while one runs?"""
        return not (self.takes_room and self._is_active)

    @property
    def shared_bytes(self) -> int:
        """Bytes of entries that lie in other sessions' memory and are read there.

        This session's bound excludes them.
        """
        return sum(prefix.nbytes for prefix in self._prefixes)

    @property
    def allocations(self) -> list[Allocation]:
        """The allocations reserved for this session, which forks may borrow."""
        return [group.allocation for group in self._resident]

    @property
    def borrowed(self) -> list[Allocation]:
        """The allocations of other sessions that this one reads."""
        return [allocation for prefix in self._prefixes for allocation in prefix.allocations]

    def _reserve(self, plan: Placement) -> bool:
        context = self.context
        sustained = replace(context, pool=context.pool.ungranted()) if self.grant.grows else context
        context.tier.reserve(self.bound.tier_bytes)
        self._tier_bytes = self.bound.tier_bytes
        for (layers, layout), prefix in zip(plan.resident, self._prefixes or repeat(None), strict=False):
            entries = LayerEntries.reserve(sustained, layers, layout, prefix)
            if entries is None:
                return False
            self.parts += (entries,)
            self._resident += (entries,)
        if plan.archived:
            archived = plan.restorer.entries.reserve(context, self.strategy, plan, sustained=sustained)
            if archived is None:
                return False
            assert isinstance(archived, ArchivedEntries)
            self.parts += (archived,)
            self._archived = (archived,)
        if context.geometry.states:
            before = self._prefixes[0].states if self._prefixes else None
            self.states = reserve_states(context, replays=plan.restorer.replays, prefix=before)
            if self.states is None:
                return False
            self.parts += (self.states,)
        if context.draft_memories.demands(context.geometry):
            self.draft_memory = context.draft_memories.open(context)
            if self.draft_memory is None:
                return False
            self.parts += (self.draft_memory,)
        self._is_active = not self.takes_room
        return True

    @property
    def groups(self) -> tuple[LayerEntries, ...]:
        """The regions that attention reads."""
        if not self._archived:
            return self._resident
        return (*self._resident, *(group for archived in self._archived for group in archived.regions))

    # -- active and idle --------------------------------------------------------------------------------------------

    @property
    def next_position(self) -> int:
        """The next position to compute: `length`, unless entries are being recomputed."""
        return self.length if self._replayed is None else self._replayed

    @property
    def pending_replay(self) -> int:
        """Positions whose entries must be recomputed before new ones."""
        if self._is_active and self._replayed is None:
            return 0
        return self._replay_end - (self._replayed or 0)

    @property
    def _replay_end(self) -> int:
        return max((part.replay_end(self.length) for part in self._archived), default=0)

    def wake(self, tokens: int) -> bool:
        """Make the session active, for histories of up to `tokens`. False if the pool has no room now:
        then it takes nothing.

        Old entries are restored from the archive, now or in attention. Where the archive keeps nothing, they are
        staged again from position 0 (`next_position`). Raises RestorationFailed, and the session stays idle as it was.
        """
        if self._is_active:
            return True
        most = max(self.length, tokens if self.limit_tokens is None else min(tokens, self.limit_tokens))
        if not all(part.wake(most, self.length) for part in self._archived):
            return False
        if self._replay_end:
            self._replayed = 0
        self._is_active = True
        self._end_quiet()
        return True

    @property
    def takes_room(self) -> bool:
        """Does waking take room in the pool, for old entries, which the idle session gives back?

        They are what `require_finite` checks.
        """
        return bool(self._archived)

    @property
    def commits_ahead(self) -> bool:
        """May the staged token be committed before its step is computed? Not where old entries are archived with it,
        which are checked before.
        """
        is_quiet = self.staged == 1 and self.length + 1 < self._quiet_until
        return not self._archived or (is_quiet and not self.reads_taps)

    def ask_finite(self) -> tuple[Asked, ...]:
        """Start a check on the device that archived and restored entries are finite. Nothing waits for it."""
        return tuple([part.ask_finite() for part in self._archived])

    def require_finite(self, asked: tuple[Asked, ...] | None = None) -> None:
        """Raise RestorationFailed if a check of `ask_finite` failed; asked: that one, or one before it.

        After that, only `forget` can be called. Call it before any result that was computed from those entries reaches
        a client.
        """
        for index, part in enumerate(self._archived):
            part.require_finite(None if asked is None else asked[index])

    def idle(self) -> None:
        """Make the session idle: keep the exact entries, give back what waking took. Uncommitted entries are lost.

        Raises as `require_finite`.
        """
        assert self.staged == 0
        if not self._is_active or not self.takes_room:
            return
        self.ask_finite()
        self.require_finite()
        self._end_quiet()
        for part in self._archived:
            part.idle(self.length if self._replayed is None else None)
        self._replayed = None
        self._is_active = False

    def forget(self) -> None:
        """Drop every entry, because the stored ones cannot be trusted any more.

        Entries of a shared prefix stay, and so do those that forks read: no later step could write to them. If the
        device fails here, the session is still empty: slots are wiped again when they are opened.
        """
        length = max(self.length, self.next_position + self.staged)
        floor = min(length, min((group.floor for group in self._resident), default=0))
        self.length, self.coming, self.staged, self.evicted = floor, 0, 0, 0
        self._replayed = None
        self._is_active = not self.takes_room
        self._end_quiet()
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.forget, floor, length)

    def kept_of(self, other: SessionKV, at: int) -> int:
        """Of so many of the first `at` positions this session can have the entries that `other` has kept."""
        return other.kept(at) if self.context.geometry.rotates_as(other.context.geometry) else 0

    def copy_from(self, other: SessionKV, at: int) -> None:
        """Copy what `other`, which is idle, has `kept` of the first `at` positions into this empty session.

        `other` has the same strategy; its limit may differ. Entries of a shared prefix are not copied, and none at all
        where its keys are turned otherwise. Raises OSError if the second tier cannot store its part; after that, only
        `forget` can be called.
        """
        assert self.length == self.base and not other.staged and other.can_be_copied
        length = self.kept_of(other, at)
        self.take_prefix_states()
        if length <= self.base or other.is_dropped:
            self.coming = 0
            return
        for part, theirs in zip(self.parts, other.parts, strict=True):
            part.copy_from(theirs, length)
        self.length, self.evicted = length, self.strategy.evicted(self.context.geometry, length)
        self.coming = 0  # after the length: what will be prefilled is asked by other threads (`kept`)
        self._end_quiet()

    # -- copies in files --------------------------------------------------------------------------------------------

    def save(self) -> Saved:
        """The committed entries of this idle session, for `load`: enough to continue bit for bit.

        Tensors are made while they are read; some are views. Entries of a shared prefix are among them.
        """
        assert not self.staged and self.can_be_copied
        saved: dict[str, Iterable[tuple[Tensor, ...]]] = {}
        for index, part in enumerate(self.parts):
            saved |= under(index, part.save(self.length))
        return saved

    def load(self, length: int, saved: Saved) -> None:
        """Take what a session of the same strategy saved after a history of `length`, into this empty and idle one.

        Raises OSError if the second tier cannot store its part; after an error, only `forget` can be called.
        """
        assert self.length == self.base < length and not self.staged and self.can_be_copied
        self.length = length  # so that `forget` wipes what an error leaves
        self._end_quiet()
        for index, part in enumerate(self.parts):
            part.load(length, saved_under(index, saved))
        self.evicted = self.strategy.evicted(self.context.geometry, length)

    # -- a step -----------------------------------------------------------------------------------------------------

    @property
    def fits_numbers(self) -> bool:
        """Do all its queries read regions, so that its steps can be plan numbers alone?"""
        return not self._plan.by_view and all(prefix.is_one_piece for prefix in self._prefixes)

    @property
    def reads_causally(self) -> bool:
        """Do all layers keep every entry in order, so that long chunks need no mask?"""
        return all(group.reads_causally for group in self.groups)

    @property
    def reads_regions_alone(self) -> bool:
        """Do all its queries read by plan numbers, and all that they see, wherever the device can do that?"""
        return not any(group.parts for group in self.groups)

    def room(self, *, generated: bool = True) -> int:
        """Positions that can be staged in one step, within the limit; generated: the model generated some of them.

        If entries are evicted, or generated tokens read selected blocks, a step ends at the end of the open segment; if
        entries are offloaded, or by a window of the model's own, at the end of as many as appended tokens may take.
        Otherwise segments do not limit it. Appended tokens may go on behind that end where old entries are restored for
        each step.
        """
        at = self.length if self._replayed is None else self._replayed  # `next_position`
        step = self._steps[generated]
        to_boundary = math.inf if step is None else step - at % step
        if self._ends_alone and to_boundary > 1:
            to_boundary -= 1
        if not generated and self._archived and self._joins_segments and self._replayed is None:
            to_boundary += self._archived[0].room_beyond(at)
        to_replayed = math.inf if self._replayed is None else self.pending_replay
        to_granted = math.inf if self.grant.tokens is None else self.grant.tokens - at
        return int(min(to_boundary, to_replayed, to_granted))

    def stage(self, count: int, generated: NDArray[np.bool_] | None = None) -> None:
        """Give the next `count` positions their slots. They are not committed yet.

        generated: [count], which of them the model generated; None: none. Some strategies let those read less. Raises
        RestorationFailed, with nothing staged, if entries that leave within the step cannot be archived.
        """
        if count == 1 and self.length < self._quiet_until and generated is not None and generated[0]:
            assert self.staged == 0
            for group in self._tables:
                group.advance(self.length)
            self.staged, self.staged_generated = 1, generated
            return
        self._end_quiet()
        if self.states is not None:
            self.end_lending()
        assert self._is_active, "a session has to wake before it stages"
        room = self.room(generated=self.is_selective and generated is not None and bool(generated.any()))
        assert self.staged == 0 and 0 < count <= room, (self.staged, count, room)
        first = self.next_position
        positions = np.arange(first, first + count, dtype=np.int64)
        self.staged_generated = np.zeros(count, dtype=np.bool_) if generated is None else generated
        until = sys.maxsize
        try:
            for part in self.parts:
                until = min(until, part.stage(positions, self.staged_generated))
        except BaseException:
            for archived in self._archived:
                archived.take_back(first)
            raise
        self._tables = self.groups
        for group in self._tables:
            group.enter(positions)
        self.staged = count
        if count == 1 and self.staged_generated[0] and self._replayed is None:
            self._quiet_until = min(until, self._most_quiet(first))

    def _most_quiet(self, position: int) -> int:
        segment = self.context.geometry.segment_tokens
        end = position - position % segment + segment  # where entries may be evicted
        return end if self.grant.tokens is None else min(end, self.grant.tokens)

    def _end_quiet(self) -> None:
        """More happens than that tokens are entered in the tables."""
        self._quiet_until, self._quiet_footprint = 0, None

    def commit_one(self) -> None:
        """As `commit`, of the only token that is staged."""
        if self.staged == 1 and self.length + 1 < self._quiet_until:
            self.staged, self.length = 0, self.length + 1
        else:
            self.commit(self.next_position + 1)

    def commit(self, length: int, taps: Tensor | None = None) -> None:
        """Keep staged entries below `length`, wipe the others, and evict entries that no later query may see.

        taps: [n, taps, hidden] of the tokens that are kept, if it `reads_taps`.

        Raises RestorationFailed if entries that leave the exact window cannot be archived, or those of an earlier step
        are not finite. After that, only `forget` can be called.
        """
        if self.reads_taps and length > self.length:
            if taps is None or len(taps) != length - self.length:
                raise InvariantViolated("INV2", f"positions up to {length} are committed without a drafter's taps")
            for archived in self._archived:
                archived.keep_taps(self.length, taps)
        if self.staged == 1 and length == self.length + 1 < self._quiet_until:
            self.staged, self.length = 0, length
            return
        before = self.next_position
        self._end_quiet()
        if not before <= length <= before + self.staged:
            raise InvariantViolated("INV2", f"commit to {length} of {before} and {self.staged} staged positions")
        rejected = np.arange(length, before + self.staged, dtype=np.int64)
        self.staged = 0
        if self._replayed is not None:
            self._replayed = length
        else:
            self.length = length
            if length // self.context.geometry.segment_tokens > before // self.context.geometry.segment_tokens:
                self.evicted = self.strategy.evicted(self.context.geometry, length)
        # The tables first, the device second: if the device fails, the tables are right.
        if len(rejected):
            for group in self._tables:
                group.reject(rejected)
        for part in self.parts:
            part.commit(before, length, rejected)
        if self._replayed is not None and not self.pending_replay:
            for archived in self._archived:
                archived.end_replay(length, self.length)
            self._replayed = None

    def keepable(self, count: int) -> int:
        """How many of the staged positions a commit can keep if it rejects the last ones: `count`, or none of them."""
        return count if self.states is None else self.states.keepable(count)

    def discard_staged(self) -> None:
        """Take back what is staged, if anything is: no trace of it is left."""
        if self.staged:
            self.commit(self.next_position)

    def statistics(self) -> dict[int, Any]:
        """What mechanisms count, by layer. Empty if none of them counts anything."""
        return self._held(self.next_position + self.staged).counted

    def check(self) -> None:
        """INV-1: per layer, resident and evicted positions add up to the cached length."""
        for group in self.groups:
            group.check(self.next_position, self.next_position + self.staged)

    def release(self) -> None:
        """Give all memory back; a part that fails does not stop the others. Safe to call twice."""
        parts, self.parts = self.parts, ()
        self._resident, self._archived, self._tables = (), (), ()
        self.states, self.draft_memory = None, None
        prefixes, self._prefixes = self._prefixes, ()
        tier_bytes, self._tier_bytes = self._tier_bytes, 0
        granted = self.grant.end()
        self._end_quiet()
        self._is_active = self._is_reserved = False
        with ExitStack() as stack:
            stack.callback(self.context.pool.ungrant, granted)
            # Callbacks run last to first: the parts free their tier memory before its bytes are promised to other
            # sessions.
            stack.callback(self.context.tier.release, tier_bytes)
            for prefix in prefixes:
                stack.callback(prefix.give_back)
            for part in parts:
                stack.callback(part.release)

    # -- facts ------------------------------------------------------------------------------------------------------

    def footprint(self) -> Footprint:
        """Bytes of opened pages by kind: entries, second copies of the sink, block bounds, the archive, the regions of
        an active session, recurrent states, a drafter's memory, and blocks fetched from the second tier."""
        end = (self.length if self._replayed is None else self._replayed) + self.staged  # `next_position`
        pages = -(-(end - self.base) // self.context.geometry.opening_tokens)
        if self._quiet_footprint is not None and self._quiet_footprint[0] == pages:
            return self._quiet_footprint[1]
        held = self._held(end)
        footprint = Footprint(held.by_kind, tier_bytes=held.tier_bytes)
        if end < self._quiet_until and self.draft_memory is None:  # which observes several tokens together
            self._quiet_footprint = pages, footprint
        return footprint

    @property
    def spare_bytes(self) -> int:
        """Bytes that it has beyond its bound, from what is free, until they are needed. Any thread."""
        return sum([part.spare_bytes for part in self._archived])

    def _held(self, end: int) -> Held:
        held = Held(by_kind={"entries": 0, "sink_copy": 0})
        for part in self.parts:
            part.report(held, self.length, end)
        return held
