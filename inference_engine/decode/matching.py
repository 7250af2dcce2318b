"""The place of a Generate in its grammar: its automaton, moved on before a step. Is it over? What may, must follow?

    engine's thread     settle a step ▸ advance      before the next ▸ begin, look, cut      draw ▸ allow, along

A mask is a function of the tokens since the Generate began, so it is rebuilt from the history wherever a Generate goes
on. It takes longer than all else, and is worked out where a draw needs it: not where the likeliest id is drawn on the
host, and may follow. What a device draws needs all masks, which are worked out while it is at the step. Ids that end
the Generate are allowed where the output may end, and nowhere else. What takes microseconds is done at once: the first
place is found by a worker, as are those of an automaton that took longer, while the device computes; one that is not
done then makes its own Generate wait for a later step, and no other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference_engine.decode.automata import Automaton, Grammar
from inference_engine.errors import ConstraintFailed
from inference_engine.kernels.sampler import Mask

GRACE_SECONDS = 0.001
_NAMED = 8  # ids, in an error
# Of a processor: an automaton that takes longer is left to workers, for some tokens at first, twice as many each time.
# Its time costs as much to read as a step of an automaton, so it is read once the clock on the wall shows that much.
SLOW_SECONDS, _SLOW_TOKENS, _MOST_SLOW_TOKENS = 0.0005, 4, 1024


@dataclass(slots=True)
class Look:
    """What is known of the place of a Generate in its grammar.

    forced: None: not worked out yet. mask: with the ids that may end it, one at least; None: not worked out yet, or of
    no use. unmasked: why there can be none, or "".
    """

    is_over: bool
    may_end: bool
    forced: Sequence[int] | None = None
    mask: Mask | None = None
    unmasked: str = ""


class Matching:
    """The place of one Generate in its grammar; implements Masks. Called on the engine's thread.

    Its automaton is moved on at once where that takes microseconds, which it does nearly always, and by a worker where
    it took longer, at its beginning or lately: then `_working` is what it will know.
    """

    def __init__(
        self,
        grammar: Grammar,
        before: Sequence[int],
        stop_ids: frozenset[int],
        work_on: Callable[[Callable[[], Any]], Future[Any]],
        *,
        permitted: Mask | None = None,
        min_tokens: int = 0,
    ) -> None:
        """before: the ids that the Generate has already. stop_ids: those that end it, once it has `min_tokens`.
        permitted: the ids that may be drawn whatever the grammar says; None: all.
        """
        self._grammar = grammar
        self._work_on = work_on
        self._stop_ids = stop_ids
        self._stop_bits: dict[int, int] = {}  # by the byte of a mask
        for end in stop_ids:
            self._stop_bits[end >> 3] = self._stop_bits.get(end >> 3, 0) | 1 << (end & 7)
        self._permitted = permitted
        self._min_tokens = min_tokens
        self._ids: list[int] = []  # that were consumed
        self._automaton: Automaton | None = None
        self._known: Look | None = None  # of the place after all tokens so far; None until it was looked at
        self._along: Sequence[Mask | None] = ()  # after each number of draft tokens, of the draw that is under way
        self._usable = 0  # of its samples
        self._next: Callable[..., list[Mask]] | None = None  # what is to be found out, and was not begun
        self._found: list[Mask] = []  # along the draft tokens
        self._error: BaseException | None = None
        # Tokens that are left to workers yet, and how many will be; seconds of the last one.
        self._slow, self._slow_next = 0, _SLOW_TOKENS
        self._took = 0.0
        self._clock: Callable[[], float] = time.perf_counter
        self.is_late = False  # a step came to its draw before the worker was done
        self._working: Future[Any] | None = work_on(functools.partial(self._go, before, has_mask=True))

    def begin(self) -> None:
        """Before a step: have what follows the last tokens found out."""
        if self._next is None:
            return
        todo, self._next = self._next, None
        if self._slow:
            self._slow -= 1
            self._working = self._work_on(functools.partial(todo, has_mask=True))
            return
        try:
            self._found = todo(has_mask=False)
        except BaseException as error:  # noqa: BLE001 - raised by `look`; a panic of the library, too
            self._error = error
        self._judge()

    @property
    def is_ready(self) -> bool:
        """Does `look` not wait?"""
        return self._next is None and (self._working is None or self._working.done())

    def look(self, position: int) -> Look:
        """The place after all tokens so far. Waits. Raises ConstraintFailed; position: of the token to come."""
        self.is_late = False
        self._arrive()
        if (error := self._error) is not None:
            if not isinstance(error, _BrokenError):
                raise RuntimeError("an automaton failed") from error  # a panic of the library is no Exception
            raise ConstraintFailed(str(error), position) from error
        assert self._known is not None
        return self._known

    @property
    def fits_constraint(self) -> bool:
        """Are the tokens so far known to be a whole output?"""
        return self._known is not None and self._known.may_end

    def advance(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed, none of which ends the Generate."""
        self._known = None
        self._next = functools.partial(self._go, token_ids)

    def forced(self) -> Sequence[int]:
        """Ids that follow in any output, if they are known."""
        return self._forced_at(self._known) if self.is_ready and self._known is not None else ()

    def _forced_at(self, known: Look) -> Sequence[int]:
        """At the place that is known. What it fails with is raised by `look`."""
        if known.forced is None:
            assert self._automaton is not None
            known.forced = ()
            try:
                known.forced = () if known.is_over else self._automaton.forced()
                if self._automaton.broken:
                    raise _BrokenError(self._automaton.broken)
            except BaseException as error:  # noqa: BLE001 - of one Generate, in a step of several
                self._error = error
        return known.forced

    def goes_on(self, *, is_drafted: bool) -> bool:
        """Is a step worth launching behind the one that is being drawn? Not if that came too early to be used, nor if
        ids are known that would be drafted after its own."""
        return not self.is_late and not (is_drafted and len(self.forced()) > 1)

    def cut(self, draft: Sequence[int]) -> int:
        """How much of a draft may follow; the masks along that are found out."""
        is_slow = self._slow > 0 and self._slow_next > _SLOW_TOKENS
        if is_slow or not self.is_ready or self._known is None or self._automaton is None:
            return 0
        count = next((place for place, each in enumerate(draft) if each in self._stop_ids), len(draft))
        if count := self._automaton.fitting(draft[:count]):
            self._next = functools.partial(self._look_along, draft[:count])
            self.begin()
        return count

    def along(self, drafted: Sequence[int]) -> Sequence[Mask | None]:
        if self._along:  # the device looks again
            return self._along
        self._wait_a_moment()
        place = self._masked_place() if self._has_place else None
        if not drafted:
            self._along, self._usable = (place,), int(place is not None)
            return self._along
        # Where nothing may follow, nothing is drawn: `look` says so.
        found = () if place is None else (place, *self._found)[: len(drafted) + 1]
        self._along, self._usable = (*found, *[None] * (len(drafted) + 1 - len(found))), len(found)
        return self._along

    def allow(self, drafted: Sequence[int], token_ids: Sequence[int]) -> bool:
        if not drafted and not self._along:
            self._wait_a_moment()
            if self._has_place and (known := self._known) is not None and known.mask is None and not known.is_over:
                is_allowed = self._fits(token_ids[0])
                self._usable = int(is_allowed)
                return is_allowed
        masks = self.along(drafted)
        return all(mask is None or _has(mask, each) for mask, each in zip(masks, token_ids, strict=True))

    def end_draw(self) -> int:
        """A step was drawn. Returns how many of its samples may be used: none after the output's end, and none if the
        masks came late."""
        usable, self._usable, self._along = self._usable, 0, ()
        return usable

    def _wait_a_moment(self) -> None:
        """For the worker."""
        if self._working is not None:
            wait([self._working], timeout=GRACE_SECONDS)
            self.is_late = not self._working.done()
        if not self.is_late:
            self._arrive()

    @property
    def _has_place(self) -> bool:
        """Is the place known from which is drawn?"""
        return not self.is_late and self._error is None and self._known is not None

    def _fits(self, token_id: int) -> bool:
        """May the id follow? As the mask would say, in a tenth of its time."""
        known, automaton = self._known, self._automaton
        assert known is not None and automaton is not None
        if self._permitted is not None and not _has(self._permitted, token_id):
            return False
        if token_id in self._stop_ids:
            return known.may_end and len(self._ids) >= self._min_tokens
        if forced := self._forced_at(known):
            return self._error is None and token_id == forced[0]
        try:
            return self._error is None and automaton.fitting((token_id,)) == 1
        except BaseException as error:  # noqa: BLE001 - raised by `look`
            self._error = error
            return False

    def _masked_place(self) -> Mask | None:
        """The mask of the place that is known. What it fails with is raised by `look`."""
        known, automaton = self._known, self._automaton
        assert known is not None and automaton is not None
        if known.is_over or known.mask is not None:
            return known.mask
        began = self._clock()
        try:
            if known.unmasked:
                raise _BrokenError(known.unmasked)
            self._keep(automaton.mask())
        except BaseException as error:  # noqa: BLE001 - of one Generate, in a step of several
            self._error = error
            return None
        self._took += self._clock() - began
        self._judge()
        return known.mask

    def _keep(self, mask: Mask) -> None:
        """The automaton's mask of the place that is known. Raises _BrokenError."""
        known, automaton = self._known, self._automaton
        assert known is not None and automaton is not None
        if automaton.broken:
            raise _BrokenError(automaton.broken)
        mask = self._with_ends(mask, may_end=known.may_end, tokens=len(self._ids))
        if not _is_empty(mask):
            known.mask = mask
        elif known.may_end:
            # An end that may not be drawn, and nothing else: the output is whole, and there is no more of it.
            known.is_over, known.forced = True, ()
        else:
            left = np.flatnonzero(np.unpackbits(automaton.mask(), bitorder="little"))[:_NAMED].tolist()
            only = f"only by ids that may not be drawn here, or end the Generate: {left}" if left else "by no id"
            raise _BrokenError(f"what has to follow is spelt {only}")

    def _arrive(self) -> None:
        """Take what the worker found. Waits for it."""
        if self._working is not None:
            working, self._working = self._working, None
            self._error = working.exception()
            if self._error is None:
                self._found = working.result()
            self._judge(is_certain=True)

    def _judge(self, *, is_certain: bool = False) -> None:
        """Was that slow? is_certain: it was timed on its processor."""
        if self._took <= SLOW_SECONDS:
            return
        if is_certain or self._clock is time.thread_time:
            self._slow, self._slow_next = self._slow_next, min(2 * self._slow_next, _MOST_SLOW_TOKENS)
        self._clock, self._took = time.thread_time, 0.0

    # -- at once, or by a worker ---------------------------------------------------------------------------------------

    def _go(self, token_ids: Sequence[int], *, has_mask: bool) -> list[Mask]:
        """has_mask: work it out, too, and what is forced."""
        clock = time.thread_time if has_mask else self._clock
        began = clock()
        if self._automaton is None:
            self._automaton = self._grammar.start()
        automaton = self._automaton
        for token_id in token_ids:
            if not automaton.consume(token_id):
                raise _BrokenError(automaton.broken or f"the id {token_id} does not follow")
        self._ids += token_ids
        self._known = known = Look(automaton.is_over, automaton.may_end)
        if has_mask and not known.is_over:
            known.forced = automaton.forced()
            if automaton.broken:
                raise _BrokenError(automaton.broken)
            mask = automaton.mask()
            if unmasked := automaton.broken:  # an error where a draw needs it, as if no worker had looked
                known.unmasked, self._automaton = unmasked, self._again()
            else:
                self._keep(mask)
        self._took = clock() - began
        return []

    def _again(self) -> Automaton:
        """Another one, at the same place."""
        automaton = self._grammar.start()
        for token_id in self._ids:
            automaton.consume(token_id)
        return automaton

    def _with_ends(self, mask: Mask, *, may_end: bool, tokens: int) -> Mask:
        """`mask` after so many tokens, with the ids that end the Generate if they may. It is written to."""
        bits = mask.data
        may_end = may_end and tokens >= self._min_tokens
        for place, ends in self._stop_bits.items():
            bits[place] = bits[place] | ends if may_end else bits[place] & ~ends
        if self._permitted is not None:
            mask &= self._permitted
        return mask

    def _look_along(self, draft: Sequence[int], *, has_mask: bool) -> list[Mask]:
        """After each token of the draft, as far as something may follow."""
        automaton, known = self._automaton, self._known
        assert automaton is not None and known is not None
        if known.mask is not None:  # the automaton is about to write over it
            known.mask = known.mask.copy()
        found, consumed = list[Mask](), 0
        for token_id in draft:
            if not automaton.consume(token_id):
                break
            consumed += 1
            if automaton.is_over:
                break
            tokens = len(self._ids) + consumed
            after = self._with_ends(automaton.mask().copy(), may_end=automaton.may_end, tokens=tokens)
            if automaton.broken or _is_empty(after):
                break
            found.append(after)
        if automaton.broken:  # a draft changes no token, and ends nothing
            self._automaton = self._again()
        else:
            automaton.roll_back(consumed)
        return found


def _is_empty(mask: Mask) -> bool:
    return not mask.tobytes().rstrip(b"\0")


def _has(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def begin_all(matchings: Sequence[Matching]) -> None:
    """Before a step. Waits a moment for the workers that are under way: what they find may be drafted."""
    working = []
    for each in matchings:
        each.begin()
        if each._working is not None and not each.is_late:
            working.append(each._working)
    if working:
        wait(working, timeout=GRACE_SECONDS)


class _BrokenError(Exception):
    """An automaton cannot go on."""
