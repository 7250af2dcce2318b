"""A session's token ids, append-only, each with a mark: appended or generated. Forks share their common prefix.

    history    branch 0                branch 1
               leaf leaf … leaf        leaf leaf leaf (open)
    a fork     the same branch 0       the same two leaves, and a copy of the open one

A leaf holds LEAF_TOKENS tokens, a branch BRANCH_LEAVES leaves. A full one never changes, so forks hold the same object;
`holders` is its reference count, and a `Holdings` counts it once. A full branch also stores the set of ids in it, so
that a repetition penalty need not walk the history.

One thread writes at a time. Others may read, without a lock, positions that were reported to them: a leaf grows by
replacing it with a larger copy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import SessionClosed
from inference_engine.types import Mark

TokenIds = NDArray[np.uint32]
Marks = NDArray[np.uint8]

LEAF_TOKENS = 4096
BRANCH_LEAVES = 64
BRANCH_TOKENS = BRANCH_LEAVES * LEAF_TOKENS

_LEAST_CAPACITY = 64
_TOKEN_BYTES = 5  # an id and a mark
_LEAF_BYTES = 384  # its objects, beside their numbers
_BRANCH_BYTES = 768
_TIDY_SECONDS, _TIDY_LEAVES = 0.0005, 8  # the clock is read once in so many leaves


@dataclass(slots=True, weakref_slot=True)
class Holdings:
    """Tokens and bytes of several histories together. Parts that forks share count once while any of them is open."""

    tokens: int = 0
    nbytes: int = 0


class Leaves:
    """Allocates leaves, and frees them later: freeing the memory of a long history takes milliseconds.

    `tidy` frees a few, and each new leaf frees two old ones, so that the total never exceeds its earlier peak.
    """

    def __init__(self) -> None:
        self._going: deque[list[_Leaf]] = deque()
        self._count = 0  # of leaves in them
        self._given_up: deque[tuple[Holdings, Holdings]] = deque()  # (holdings, part of it that a stretch gave up)

    @property
    def going_bytes(self) -> int:
        """Bytes of ended histories that are not freed yet."""
        return self._count * (LEAF_TOKENS * _TOKEN_BYTES + _LEAF_BYTES)

    def tidy(self, most: int = 256) -> bool:
        """Free that many leaves, or as many as half a millisecond allows. Is there more to free?"""
        ends = time.perf_counter() + _TIDY_SECONDS  # what a leaf takes differs tenfold between machines
        while self._going and most:
            count = min(most, _TIDY_LEAVES, len(self._going[0]))
            del self._going[0][-count:]
            most -= count
            self._count -= count
            if not self._going[0]:
                self._going.popleft()
            if time.perf_counter() > ends:
                break
        return bool(self._going)

    def recount(self) -> None:
        """Subtract what stretches gave up. They do so on any thread; only the writing thread changes holdings."""
        while self._given_up:
            holdings, part = self._given_up.popleft()
            holdings.tokens -= part.tokens
            holdings.nbytes -= part.nbytes

    def _new(self, capacity: int) -> _Leaf:
        self.tidy(2)
        return _Leaf(np.empty(capacity, dtype=np.uint32), np.empty(capacity, dtype=np.uint8))

    def _free(self, leaves: list[_Leaf]) -> None:
        if leaves:
            self._going.append(leaves)
            self._count += len(leaves)


class _Leaf:
    __slots__ = ("holders", "ids", "marks")

    def __init__(self, ids: TokenIds, marks: Marks) -> None:
        self.ids = ids
        self.marks = marks
        self.holders = 1  # branches

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.marks.nbytes + _LEAF_BYTES


class _Branch:
    __slots__ = ("holders", "leaves", "seen", "shared")

    def __init__(self, leaves: list[_Leaf]) -> None:
        self.leaves = leaves
        self.holders = 1  # histories
        self.shared = 0  # this many of the first leaves may have other holders
        self.seen: NDArray[np.uint8] | None = None  # a bit for each id up to the largest that occurs, once it is full


class History:
    """The token ids of one session, or of its journal.

    length: of the history in tokens; changed here alone. It grows, but for tokens that were reported to no reader
    (`take_back`). holdings: counts this history and others together. leaves:
    allocates and frees leaves.
    keeps_seen: store the set of ids of each full branch, so that `seen` is cheap.
    """

    def __init__(
        self, holdings: Holdings | None = None, leaves: Leaves | None = None, *, keeps_seen: bool = True
    ) -> None:
        self.holdings = Holdings() if holdings is None else holdings
        self._leaves = Leaves() if leaves is None else leaves
        self._keeps_seen = keeps_seen
        self._branches: list[_Branch | None] = []
        self.length = 0
        self._capacity = 0
        self._open: _Leaf | None = None  # the one that the last token went to, from position `_open_first` on
        self._open_first = 0
        self._is_released = False

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, where: int) -> int: ...

    @overload
    def __getitem__(self, where: slice) -> TokenIds: ...

    def __getitem__(self, where: int | slice) -> int | TokenIds:
        """A token id, or those of a stretch without steps."""
        if isinstance(where, slice):
            start, stop, step = where.indices(self.length)
            assert step == 1, step
            return self.ids(start, stop)
        position = where + self.length if where < 0 else where
        if not 0 <= position < self.length:
            raise IndexError(where)
        return int(self.ids(position, position + 1)[0])

    # -- growing ----------------------------------------------------------------------------------------------------

    def reserve(self, adding: int) -> int:
        """Allocate, so that `extend` by `adding` tokens allocates nothing; returns the position of the first of them.

        Changes nothing on MemoryError.
        """
        end = self.length + adding
        while self._capacity < end:
            self._grow(end)
        return self.length

    def extend(self, token_ids: TokenIds, mark: Mark) -> None:
        """Add tokens, all or, if it raises MemoryError, none."""
        before, done, adding = self.length, 0, len(token_ids)
        if self._open is not None:  # a fast path: generated tokens come one by one, or a few
            leaf, place = self._open, before - self._open_first
            end = place + adding
            if end < len(leaf.ids):
                if adding == 1:  # numpy takes a third of the time for an item
                    leaf.ids[place], leaf.marks[place] = token_ids[0], mark
                else:
                    leaf.ids[place:end], leaf.marks[place:end] = token_ids, mark
                self.length = before + adding
                self.holdings.tokens += adding
                return
        if before + adding > self._capacity:
            self.reserve(adding)
        while done < adding:
            leaf, place = self._leaf(before + done), (before + done) % LEAF_TOKENS
            count = min(adding - done, LEAF_TOKENS - place)
            leaf.ids[place : place + count] = token_ids[done : done + count]
            leaf.marks[place : place + count] = mark
            done += count
        self.length = before + done
        self.holdings.tokens += done
        if self.length < self._capacity:
            self._open, self._open_first = self._leaf(self.length), self.length // LEAF_TOKENS * LEAF_TOKENS
        if self._keeps_seen and self.length // BRANCH_TOKENS > before // BRANCH_TOKENS:
            for index in range(before // BRANCH_TOKENS, self.length // BRANCH_TOKENS):
                with suppress(MemoryError):  # then it is computed when it is needed
                    self._seen_of(self._branch(index))

    def take_back(self, length: int) -> None:
        """Remove the tokens from `length` on, which no fork has and no reader. Their memory stays, for others."""
        self.holdings.tokens -= self.length - length
        self.length = length
        self._open = None
        for branch in self._branches[length // BRANCH_TOKENS :]:
            if branch is not None and branch.seen is not None:  # of a branch that is not full any more
                self.holdings.nbytes -= branch.seen.nbytes
                branch.seen = None

    def _grow(self, end: int) -> None:
        """Allocate more, up to the end of one leaf at most."""
        place = self._capacity % LEAF_TOKENS
        first = self._capacity - place  # of the last leaf if that can grow, else of the next one
        capacity = max(2 * place, _LEAST_CAPACITY)
        while capacity < min(end - first, LEAF_TOKENS):
            capacity *= 2
        bigger = self._leaves._new(capacity)
        added = bigger.nbytes
        if place:
            leaf = self._leaf(first)
            used = max(0, self.length - first)
            bigger.ids[:used], bigger.marks[:used] = leaf.ids[:used], leaf.marks[:used]
            added -= leaf.nbytes
            self._branch(first // BRANCH_TOKENS).leaves[first % BRANCH_TOKENS // LEAF_TOKENS] = bigger
        else:
            if first % BRANCH_TOKENS == 0:
                self._branches.append(_Branch([]))
                added += _BRANCH_BYTES
            self._branch(first // BRANCH_TOKENS).leaves.append(bigger)
        self._capacity = first + capacity
        self._open = None  # it may have been replaced
        self.holdings.nbytes += added

    # -- sharing ----------------------------------------------------------------------------------------------------

    @staticmethod
    def unshared_tokens(length: int) -> int:
        """Tokens that a fork at `length` copies: those of its open leaf."""
        return length % LEAF_TOKENS

    def fork(self, length: int) -> History:
        """A history that begins with this one's first `length` tokens and counts in the same holdings."""
        assert 0 <= length <= self.length
        other = History(self.holdings, self._leaves, keeps_seen=self._keeps_seen)
        copied = self.unshared_tokens(length)
        whole = length - copied
        full, rest = divmod(whole // LEAF_TOKENS, BRANCH_LEAVES)
        shared = self._branches[:full]
        opened: _Branch | None = None
        tail_bytes = 0
        if rest or copied:
            began = self._branch(full)
            opened = _Branch(began.leaves[:rest])
            began.shared, opened.shared = max(began.shared, rest), rest
            if copied:
                capacity = _LEAST_CAPACITY
                while capacity < copied:
                    capacity *= 2
                tail = self._leaves._new(capacity)
                tail.holders, tail_bytes = 0, tail.nbytes
                tail.ids[:copied] = self.ids(whole, length)
                tail.marks[:copied] = self.marks(whole, length)
                opened.leaves.append(tail)
                other._capacity = capacity
        other._branches = [*shared, opened] if opened is not None else shared
        other.length, other._capacity = length, whole + other._capacity
        # From here on nothing is allocated.
        for branch in shared:
            assert branch is not None
            branch.holders += 1
        if opened is not None:
            self.holdings.nbytes += _BRANCH_BYTES + tail_bytes
            self.holdings.tokens += copied
            for leaf in opened.leaves:
                leaf.holders += 1
        return other

    def release(self) -> None:
        """Free the parts that no other history holds. The length stays; reading raises SessionClosed from now on.

        Idempotent. Readers that still need ids take a `Stretch` before.
        """
        if self._is_released:
            return
        self._is_released = True
        self._open = None
        for index, branch in enumerate(self._branches):
            assert branch is not None
            branch.holders -= 1
            if not branch.holders:
                self._let_go(branch, min(BRANCH_TOKENS, max(0, self.length - index * BRANCH_TOKENS)))
            self._branches[index] = None

    def _let_go(self, branch: _Branch, tokens: int) -> None:
        """Free a branch of `tokens` tokens that no history holds any more, except leaves that other branches hold.

        Only leaves that may be shared are checked one by one: there may be thousands of others.
        """
        leaves, shared = branch.leaves, branch.shared
        going = [leaf for leaf in leaves[:shared] if _is_unheld(leaf)] + leaves[shared:]
        small = [leaf for leaf in going[-1:] if len(leaf.ids) < LEAF_TOKENS]
        held = len(leaves) - len(going)
        holdings = self.holdings
        holdings.nbytes -= _BRANCH_BYTES + (0 if branch.seen is None else branch.seen.nbytes)
        holdings.nbytes -= (len(going) - len(small)) * (LEAF_TOKENS * _TOKEN_BYTES + _LEAF_BYTES)
        holdings.nbytes -= sum(leaf.nbytes for leaf in small)
        holdings.tokens -= tokens - held * LEAF_TOKENS
        self._leaves._free(going[: len(going) - len(small)])

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, including those shared with forks."""
        total = 0
        for index, branch in enumerate(self._branches):
            if branch is None:
                continue
            total += _BRANCH_BYTES + (0 if branch.seen is None else branch.seen.nbytes)
            if (index + 1) * BRANCH_TOKENS <= self.length:  # so all its leaves are full
                total += BRANCH_TOKENS * _TOKEN_BYTES + BRANCH_LEAVES * _LEAF_BYTES
            else:
                total += sum(leaf.nbytes for leaf in branch.leaves)
        return total

    # -- reading ----------------------------------------------------------------------------------------------------

    def ids(self, start: int = 0, stop: int | None = None) -> TokenIds:
        """Positions [start, stop), uint32: a view where they lie in one leaf, else a copy. Not to be written to."""
        end = self.length if stop is None else min(stop, self.length)
        place = start % LEAF_TOKENS
        if start < end and place + end - start <= LEAF_TOKENS:
            return self._leaf(start).ids[place : place + end - start]
        pieces = [leaf.ids[part] for leaf, part in self._pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint32)

    def marks(self, start: int = 0, stop: int | None = None) -> Marks:
        """As `ids`, the marks of positions [start, stop), uint8."""
        end = self.length if stop is None else min(stop, self.length)
        place = start % LEAF_TOKENS
        if start < end and place + end - start <= LEAF_TOKENS:
            return self._leaf(start).marks[place : place + end - start]
        pieces = [leaf.marks[part] for leaf, part in self._pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)

    def runs(self) -> Iterator[tuple[TokenIds, Mark]]:
        """The history in order, as stretches of equal mark."""
        began, position, mark = 0, 0, -1
        for leaf, part in self._pieces(0, None):
            marks = leaf.marks[part]
            edges = (np.flatnonzero(np.diff(marks)) + 1).tolist()
            for edge in [0, *edges]:
                if marks[edge] != mark:
                    if position + edge > began:
                        yield self.ids(began, position + edge), Mark(mark)
                    began, mark = position + edge, int(marks[edge])
            position += len(marks)
        if position > began:
            yield self.ids(began, position), Mark(mark)

    def seen(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which ids occur, bool [vocab_size]. The sets of full branches are stored, so only the rest is walked."""
        packed = np.zeros((vocab_size + 7) // 8, dtype=np.uint8)
        full = self.length // BRANCH_TOKENS
        for index in range(full):
            known = self._seen_of(self._branch(index))
            np.bitwise_or(packed[: len(known)], known, out=packed[: len(known)])
        table = np.unpackbits(packed, count=vocab_size).view(np.bool_)
        for leaf, part in self._pieces(full * BRANCH_TOKENS, None):
            table[leaf.ids[part].astype(np.intp)] = True
        return table

    def _seen_of(self, branch: _Branch) -> NDArray[np.uint8]:
        """The set of ids of a full branch, as bits."""
        if branch.seen is None:
            ids = np.concatenate([leaf.ids for leaf in branch.leaves]).astype(np.intp)
            table = np.zeros(int(ids.max()) + 1, dtype=np.bool_)
            table[ids] = True
            branch.seen = np.packbits(table)
            self.holdings.nbytes += branch.seen.nbytes
        return branch.seen

    def _pieces(self, start: int, stop: int | None) -> Iterator[tuple[_Leaf, slice]]:
        stop = self.length if stop is None else min(stop, self.length)
        while start < stop:
            place = start % LEAF_TOKENS
            count = min(stop - start, LEAF_TOKENS - place)
            yield self._leaf(start), slice(place, place + count)
            start += count

    def _branch(self, index: int) -> _Branch:
        branch = self._branches[index]
        if branch is None:
            raise SessionClosed
        return branch

    def _leaf(self, position: int) -> _Leaf:
        branch = self._branches[position // BRANCH_TOKENS]  # as `_branch` does: every token comes here a few times
        if branch is None:
            raise SessionClosed
        return branch.leaves[position % BRANCH_TOKENS // LEAF_TOKENS]


class Stretch:
    """The ids of positions [start, stop), for a reader that has not read them when their history ends.

    Cheap for any length: whole leaves are shared, only partial ones copied. It counts in the history's holdings until
    it is given up.
    """

    __slots__ = ("_counted", "_leaves", "_pieces", "_start")

    def __init__(self, history: History, start: int, stop: int) -> None:
        self._start = start
        self._leaves = history._leaves
        self._pieces = [
            leaf.ids if part.stop - part.start == LEAF_TOKENS else np.array(leaf.ids[part])
            for leaf, part in history._pieces(start, stop)
        ]
        nbytes = sum(piece.nbytes + _LEAF_BYTES for piece in self._pieces)
        history.holdings.tokens += stop - start
        history.holdings.nbytes += nbytes
        self._counted = [(history.holdings, Holdings(stop - start, nbytes))]  # or empty

    def ids(self, start: int, stop: int) -> TokenIds:
        """As `History.ids`, for positions within the stretch."""
        pieces: list[TokenIds] = []
        while start < stop:
            leaf = start // LEAF_TOKENS
            begin = max(self._start, leaf * LEAF_TOKENS)
            pieces.append(self._pieces[leaf - self._start // LEAF_TOKENS][start - begin : stop - begin])
            start += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint32)

    def give_up(self) -> None:
        """Stop counting it: it will not be read again. From any thread, also while a lock is held; idempotent."""
        with suppress(IndexError):
            self._leaves._given_up.append(self._counted.pop())


def _is_unheld(leaf: _Leaf) -> bool:
    """Drop one branch's hold. Is it the last?"""
    leaf.holders -= 1
    return not leaf.holders
