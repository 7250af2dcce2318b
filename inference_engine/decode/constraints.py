"""Constrained output: which ids a Generate may take next, so that its tokens fit a schema, a regex, a grammar or a
choice.

    grammar     compiled once, by owner and content, on threads of low priority; what is too dear is refused
    automaton   one place in it: consume ids, roll back, the ids that may follow, those that must
    matching    the automaton of one Generate, moved on before a step: is it over? what may follow? what must?

    engine's thread     settle a step ▸ advance      before the next ▸ begin, look, cut      draw ▸ allow, along

A mask is a function of the tokens since the Generate began, so it is rebuilt from the history wherever a Generate goes
on. It takes longer than all else, and is worked out where a draw needs it: not where the likeliest id is drawn, and may
follow. Ids that end the Generate are allowed where the output may end, and nowhere else. What takes microseconds is
done at once. An automaton that took longer is moved on by workers while the device computes; one that is not done then
makes its own Generate wait for a later step, and no other.

Text is matched by llguidance (https://github.com/guidance-ai/llguidance), over the bytes of tokens.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import (
    ConstraintFailed,
    ConstraintUnavailable,
    InvalidConstraint,
    ModelError,
    QuotaExceeded,
)
from inference_engine.kernels.sampler import Mask
from inference_engine.types import Constraint, ConstraintKind, ReadTokenBytes, TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions  # types only: the package does not name it

MOST_GRAMMARS, MOST_PER_OWNER = 256, 16  # compiled ones that are kept
# Of what those were compiled from: a schema takes up to a hundred times its size.
MOST_SOURCE_BYTES, MOST_SOURCE_BYTES_PER_OWNER = 2**21, 2**18
MOST_COMPILING_PER_OWNER = 4  # one at a time; the others wait
_COMPILERS, _WORKERS = 4, 2
_COMPILER_PRIORITY = 5  # of its threads: a quarter of what a step's get, where both want the processor
GRACE_SECONDS = 0.001
# An automaton that takes longer is left to workers, for some tokens at first, and twice as many each time.
SLOW_SECONDS, _SLOW_TOKENS, _MOST_SLOW_TOKENS = 0.0005, 4, 1024
_RETRY_SECONDS = 1.0
# Of llguidance: work and memory of one grammar. A mask takes a few milliseconds at most.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 60_000,
    "step_max_items": 30_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}


# As Python's json.dumps writes it: a model knows that, and nothing is left open that a schema does not leave open.
# What a schema says in "x-guidance" comes before it.
_JSON: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Automaton(Protocol):
    """A place in a grammar. One thread at a time."""

    @property
    def is_over(self) -> bool:
        """May nothing follow?"""

    @property
    def may_end(self) -> bool:
        """Are the ids so far a whole output?"""

    @property
    def broken(self) -> str:
        """Why it cannot go on; "" if it can."""

    def consume(self, token_id: int) -> bool:
        """May the id follow? Then it is consumed; else the automaton may be `broken`."""

    def fitting(self, token_ids: Sequence[int]) -> int:
        """How many of them, from the first on, may follow."""

    def roll_back(self, count: int) -> None:
        """Undo the last `count` ids."""

    def forced(self) -> Sequence[int]:
        """Ids that spell what must follow, as the tokenizer would."""

    def mask(self) -> Mask:
        """The ids that may follow: the first one that is forced, or else all that fit. May be written to."""


class Grammar(Protocol):
    """A compiled constraint. Any thread."""

    def start(self) -> Automaton: ...


class ChoiceGrammar:
    """One of several lists of ids. Needs no tokenizer."""

    def __init__(self, choices: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.choices = sorted({tuple(choice) for choice in choices})
        self.vocab_size = vocab_size

    def start(self) -> ChoiceAutomaton:
        return ChoiceAutomaton(self)


class ChoiceAutomaton:
    """Implements Automaton: the ids so far, and which lists begin with them: neighbours, since lists are in order."""

    broken = ""

    def __init__(self, grammar: ChoiceGrammar) -> None:
        self._choices, self._vocab_size = grammar.choices, grammar.vocab_size
        self._left = [(0, len(grammar.choices))]  # after each number of ids: from one list to the one behind the last

    @property
    def _place(self) -> int:
        """How many ids there are so far."""
        return len(self._left) - 1

    @property
    def is_over(self) -> bool:
        first, behind = self._left[-1]
        return behind - first == 1 and self.may_end

    @property
    def may_end(self) -> bool:
        first, _ = self._left[-1]  # the shortest
        return len(self._choices[first]) == self._place

    def consume(self, token_id: int) -> bool:
        left = self._after(self._left[-1], self._place, token_id)
        if left is not None:
            self._left.append(left)
        return left is not None

    def _after(self, left: tuple[int, int], place: int, token_id: int) -> tuple[int, int] | None:
        """Which lists have the id there."""

        def id_of(choice: tuple[int, ...]) -> int:
            return choice[place] if place < len(choice) else -1

        first = bisect_left(self._choices, token_id, *left, key=id_of)
        behind = bisect_right(self._choices, token_id, first, left[1], key=id_of)
        return (first, behind) if first < behind else None

    def fitting(self, token_ids: Sequence[int]) -> int:
        left = self._left[-1]
        for count, token_id in enumerate(token_ids):
            after = self._after(left, self._place + count, token_id)
            if after is None:
                return count
            left = after
        return len(token_ids)

    def roll_back(self, count: int) -> None:
        if count:
            del self._left[-count:]

    def forced(self) -> Sequence[int]:
        first, behind = self._left[-1]  # in order: what the first and the last have in common, all have
        one, other = self._choices[first], self._choices[behind - 1]
        place = until = self._place
        while until < min(len(one), len(other)) and one[until] == other[until]:
            until += 1
        return one[place:until]

    def mask(self) -> Mask:
        place, (first, behind) = self._place, self._left[-1]
        bits = np.zeros(self._vocab_size, dtype=np.bool_)
        bits[[choice[place] for choice in self._choices[first:behind] if place < len(choice)]] = True
        return np.packbits(bits, bitorder="little")


class TextGrammar:
    """What llguidance compiles."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], mask_bytes: int) -> None:
        """ends: ids by which llguidance says that output may end."""
        self._matcher = matcher
        self._ends, self._mask_bytes = ends, mask_bytes
        self._lock = threading.Lock()

    def start(self) -> TextAutomaton:
        with self._lock:
            return TextAutomaton(self._matcher.deep_copy(), self._ends, self._mask_bytes)


class TextAutomaton:
    """Implements Automaton."""

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], mask_bytes: int) -> None:
        self._matcher = matcher
        self._ends, self._mask_bytes = ends, mask_bytes

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        return self.is_over or self._matcher.is_accepting()

    @property
    def broken(self) -> str:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def consume(self, token_id: int) -> bool:
        return token_id not in self._ends and self._matcher.consume_token(token_id)

    def fitting(self, token_ids: Sequence[int]) -> int:
        count = next((place for place, each in enumerate(token_ids) if each in self._ends), len(token_ids))
        return self._matcher.validate_tokens(list(token_ids[:count]))

    def roll_back(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise RuntimeError(f"llguidance cannot roll back: {self._matcher.get_error()}")

    def forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()

    def mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: self._mask_bytes].copy()
        for end in self._ends:
            bits[end >> 3] &= ~(1 << (end & 7)) & 0xFF
        return bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is known of the place of a Generate in its grammar.

    mask: with the ids that may end it; None: not worked out yet, or of no use. unmasked: why there can be none, or "".
    """

    is_over: bool
    may_end: bool
    forced: tuple[int, ...] = ()
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
        self._permitted = permitted
        self._min_tokens = min_tokens
        self._ids: list[int] = []  # that were consumed
        self._automaton: Automaton | None = None
        self._known: Look | None = None  # of the place after all tokens so far; None until it was looked at
        self._along: Sequence[Mask | None] = ()  # after each number of draft tokens, of the draw that is under way
        self._usable = 0  # of its samples
        self._next: Callable[..., list[Mask | None]] | None = None  # what is to be found out, and was not begun
        self._found: list[Mask | None] = []
        self._error: BaseException | None = None
        # Tokens that are left to workers yet, and how many were the last time; seconds of the last one.
        self._slow = self._slow_next = _SLOW_TOKENS
        self._took = 0.0
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
        if self._known.mask is not None and not self._known.mask.any():
            raise ConstraintFailed("no token of the vocabulary spells what has to follow", position)
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
        return self._known.forced if self.is_ready and self._known is not None else ()

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
        count = len(drafted) + 1
        self._wait_a_moment()
        found: Sequence[Mask | None] = ()
        if self._has_place:
            found = [self._masked_place(), *self._found[1:]]
        # Where nothing may follow, nothing is drawn: `look` says so.
        usable = [mask if mask is not None and mask.any() else None for mask in found[:count]]
        self._along = [*usable, *[None] * (count - len(usable))]
        self._usable = next((place for place, mask in enumerate(self._along) if mask is None), count)
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
        if known.forced:
            return token_id == known.forced[0]
        try:
            return automaton.fitting((token_id,)) == 1
        except BaseException as error:  # noqa: BLE001 - raised by `look`
            self._error = error
            return False

    def _masked_place(self) -> Mask | None:
        """The mask of the place that is known. What it fails with is raised by `look`."""
        known, automaton = self._known, self._automaton
        assert known is not None and automaton is not None
        if known.is_over or known.mask is not None:
            return known.mask
        began = time.perf_counter()
        try:
            if known.unmasked:
                raise _BrokenError(known.unmasked)
            mask = self._mask(automaton, len(self._ids))
            if automaton.broken:
                raise _BrokenError(automaton.broken)
        except BaseException as error:  # noqa: BLE001 - of one Generate, in a step of several
            self._error = error
            return None
        self._took += time.perf_counter() - began
        self._judge()
        self._known = replace(known, mask=mask, is_over=not mask.any() and known.may_end)
        return mask

    def _arrive(self) -> None:
        """Take what the worker found. Waits for it."""
        if self._working is not None:
            working, self._working = self._working, None
            self._error = working.exception()
            if self._error is None:
                self._found = working.result()
            self._judge()

    def _judge(self) -> None:
        """Was that slow?"""
        if self._took > SLOW_SECONDS:
            self._slow = self._slow_next = min(2 * self._slow_next, _MOST_SLOW_TOKENS)
            self._took = 0.0

    # -- at once, or by a worker ---------------------------------------------------------------------------------------

    def _go(self, token_ids: Sequence[int], *, has_mask: bool) -> list[Mask | None]:
        """has_mask: work it out, too."""
        began = time.perf_counter()
        if self._automaton is None:
            self._automaton = self._grammar.start()
        automaton = self._automaton
        for token_id in token_ids:
            if not automaton.consume(token_id):
                raise _BrokenError(automaton.broken or f"the id {token_id} does not follow")
        self._ids += token_ids
        is_over, may_end = automaton.is_over, automaton.may_end
        forced = () if is_over else tuple(automaton.forced())
        if automaton.broken:
            raise _BrokenError(automaton.broken)
        mask, unmasked = None, ""
        if has_mask and not is_over:
            mask = self._mask(automaton, len(self._ids))
            if unmasked := automaton.broken:  # an error where a draw needs it, as if no worker had looked
                mask, self._automaton = None, self._again()
            else:
                # An end that may not be drawn, and nothing else: the output is whole, and there is no more of it.
                is_over = not mask.any() and may_end
        self._took = time.perf_counter() - began
        self._known = Look(
            is_over=is_over,
            may_end=may_end,
            forced=() if is_over else forced,
            mask=None if is_over else mask,
            unmasked=unmasked,
        )
        return [self._known.mask]

    def _again(self) -> Automaton:
        """Another one, at the same place."""
        automaton = self._grammar.start()
        for token_id in self._ids:
            automaton.consume(token_id)
        return automaton

    def _mask(self, automaton: Automaton, tokens: int) -> Mask:
        """The ids that may follow so many, and those that end the Generate if they may."""
        mask, may_end = automaton.mask(), automaton.may_end and tokens >= self._min_tokens
        for end in self._stop_ids:
            mask[end >> 3] &= ~(1 << (end & 7)) & 0xFF
            mask[end >> 3] |= may_end << (end & 7)
        if self._permitted is not None:
            mask &= self._permitted
        return mask

    def _look_along(self, draft: Sequence[int], *, has_mask: bool) -> list[Mask | None]:
        """The first one is that of the place before the draft, which `_masked_place` knows."""
        automaton = self._automaton
        assert automaton is not None
        found, consumed = list[Mask | None]([None]), 0
        for token_id in draft:
            if not automaton.consume(token_id):
                break
            consumed += 1
            if automaton.is_over:
                break
            after = self._mask(automaton, len(self._ids) + consumed)
            if automaton.broken:
                break
            found.append(after)
        if automaton.broken:  # a draft changes no token, and ends nothing
            self._automaton = self._again()
        else:
            automaton.roll_back(consumed)
        return found


def _has(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def begin_all(matchings: Sequence[Matching]) -> None:
    """Before a step. Waits a moment for the workers that are under way: what they find may be drafted."""
    for each in matchings:
        each.begin()
    if working := [each._working for each in matchings if each._working is not None and not each.is_late]:
        wait(working, timeout=GRACE_SECONDS)


class Constraints:
    """The grammars of one engine, by owner and content, and the threads that compile and match them. Any thread.

    Nothing is loaded and no thread is started before the first constraint.
    """

    def __init__(self, vocab_size: int, read_tokens: ReadTokenBytes | None) -> None:
        self._vocab_size = vocab_size
        self._read_tokens = read_tokens
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._loaded: tuple[LLTokenizer, tuple[int, ...]] | None = None
        self._grammars: OrderedDict[tuple[str, Constraint], Grammar] = OrderedDict()  # used longest ago first
        self._asked: dict[str, OrderedDict[Constraint, Future[Grammar]]] = {}  # by owner, the first one under way
        self._compilers = ThreadPoolExecutor(_COMPILERS, "kakeya-grammar", initializer=_yield_the_processor)
        self._workers = ThreadPoolExecutor(_WORKERS, "kakeya-mask")

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def start(
        self,
        grammar: Grammar,
        before: Sequence[int],
        stop_ids: frozenset[int],
        *,
        permitted: NDArray[np.bool_] | None = None,
        min_tokens: int = 0,
    ) -> Matching:
        """permitted: [vocab_size]; see `Matching`."""
        packed = None if permitted is None else np.packbits(permitted, bitorder="little")
        return Matching(grammar, before, stop_ids, self._workers.submit, permitted=packed, min_tokens=min_tokens)

    def find(self, constraint: Constraint, owner: str) -> Grammar | None:
        """The compiled grammar, if it is there."""
        with self._lock:
            found = self._grammars.get((owner, constraint))
            if found is not None:
                self._grammars.move_to_end((owner, constraint))
            return found

    def compile(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        """Compile it, one after another of each owner. The result raises InvalidConstraint or ConstraintUnavailable.

        Raises QuotaExceeded if so many of the owner's are being compiled already.
        """
        with self._lock:
            if (found := self._grammars.get((owner, constraint))) is not None:
                there: Future[Grammar] = Future()
                there.set_result(found)
                return there
            asked = self._asked.setdefault(owner, OrderedDict())
            if (same := asked.get(constraint)) is not None:
                return same
            if len(asked) >= MOST_COMPILING_PER_OWNER:
                raise QuotaExceeded(
                    "constraints",
                    MOST_COMPILING_PER_OWNER,
                    f"{len(asked)} constraints of yours are being compiled, as many as one owner's may; retry later",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            future = asked[constraint] = Future()
            if len(asked) == 1:
                self._compilers.submit(self._compile_next, owner)
            return future

    def _compile_next(self, owner: str) -> None:
        with self._lock:
            constraint, future = next(iter(self._asked[owner].items()))
        grammar: Grammar | None = None
        error: BaseException | None = None
        try:
            grammar = self._compiled(constraint)
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for; a panic of the library, too
            error = raised
        with self._lock:
            if grammar is not None:
                self._keep(owner, constraint, grammar)
            del self._asked[owner][constraint]
            if self._asked[owner]:
                with contextlib.suppress(RuntimeError):  # the engine is closed
                    self._compilers.submit(self._compile_next, owner)
            else:
                del self._asked[owner]
        if grammar is None:
            assert error is not None
            future.set_exception(error)
        else:
            future.set_result(grammar)

    def _keep(self, owner: str, constraint: Constraint, grammar: Grammar) -> None:
        self._grammars[owner, constraint] = grammar
        self._drop([key for key in self._grammars if key[0] == owner], MOST_PER_OWNER, MOST_SOURCE_BYTES_PER_OWNER)
        self._drop(list(self._grammars), MOST_GRAMMARS, MOST_SOURCE_BYTES)

    def _drop(self, kept: list[tuple[str, Constraint]], most: int, most_bytes: int) -> None:
        """The first of them, until they are no more than that; the last one stays."""
        held = sum(len(key[1].source) for key in kept)
        for at, key in enumerate(kept[:-1]):
            if len(kept) - at <= most and held <= most_bytes:
                break
            held -= len(key[1].source)
            del self._grammars[key]

    def _compiled(self, constraint: Constraint) -> Grammar:
        grammar: Grammar
        if constraint.kind is ConstraintKind.CHOICE:
            grammar = ChoiceGrammar(constraint.choices, self._vocab_size)
        else:
            grammar = self._compiled_text(constraint)
        automaton = grammar.start()
        if automaton.is_over or automaton.broken or not automaton.mask().any():
            reason = f": {automaton.broken}" if automaton.broken else ""
            raise InvalidConstraint(f"{constraint.kind.value}: no output of one token or more fits it{reason}")
        return grammar

    def _compiled_text(self, constraint: Constraint) -> TextGrammar:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer, ends = self._tokenizer()
        grammar_from: dict[ConstraintKind, Callable[[str], str]] = {
            ConstraintKind.JSON_SCHEMA: lambda schema: LLMatcher.grammar_from_json_schema(schema, defaults=_JSON),
            ConstraintKind.REGEX: LLMatcher.grammar_from_regex,
            ConstraintKind.LARK: LLMatcher.grammar_from_lark,
        }
        try:
            source = grammar_from[constraint.kind](constraint.source)
        except ValueError as error:
            raise InvalidConstraint(f"{constraint.kind.value}: {_first_line(str(error))}") from error
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise InvalidConstraint(f"{constraint.kind.value}: {_first_line(matcher.get_error())}")
        return TextGrammar(matcher, ends, -(-self._vocab_size // 8))

    def _tokenizer(self) -> tuple[LLTokenizer, tuple[int, ...]]:
        """llguidance's view of the vocabulary, and the ids that it takes for an end. Loaded when it is used first."""
        with self._loading:
            if self._loaded is None:
                if self._read_tokens is None:
                    raise ConstraintUnavailable("it has no files that say the bytes of its model's tokens")
                try:
                    tokenizer = _made(self._read_tokens(), self._vocab_size)
                except (ModelError, ValueError) as error:
                    raise ConstraintUnavailable(_first_line(str(error))) from error
                self._loaded = tokenizer, tuple(tokenizer.eos_tokens)
            return self._loaded


def _made(tokens: TokenBytes, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if tokens.specification:
        return LLTokenizer(tokens.specification, n_vocab=vocab_size)
    return LLTokenizer(TokenizerWrapper(_ByBytes(tokens)), n_vocab=vocab_size)


class _ByBytes:
    """What TokenizerWrapper asks of a tokenizer. It spells what must follow by the longest tokens."""

    bos_token_id = None

    def __init__(self, tokens: TokenBytes) -> None:
        specials = {*tokens.specials}
        self.tokens = tokens.tokens
        self.special_token_ids = list(tokens.specials)
        self.eos_token_id = min(specials, default=0)
        self._ids = {of: at for at, of in reversed([*enumerate(tokens.tokens)]) if of and at not in specials}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            lengths = range(min(self._longest, len(text) - place), 0, -1)
            length = next((one for one in lengths if text[place : place + one] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[text[place : place + length]])
            place += length
        return ids


def _yield_the_processor() -> None:
    """Of the calling thread, where the system has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPILER_PRIORITY)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it cannot be compiled"])[0][:300]


class _BrokenError(Exception):
    """An automaton cannot go on."""
