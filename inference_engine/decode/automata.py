"""What a constraint compiles to: a grammar, and places in it.

    grammar     compiled once; starts automata
    automaton   one place in it: consume ids, roll back, the ids that may follow, those that must

Text is matched by llguidance (https://github.com/guidance-ai/llguidance), over the bytes of tokens.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from inference_engine.kernels.sampler import Mask

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_ROLLED_BACK = 1024
MOST_FORCED_BYTES = 2**14  # that must follow a place: they are spelt together
_WORD = 4  # bytes of what llguidance writes at once


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
        """Undo the last `count` ids, at most MOST_ROLLED_BACK."""

    def forced(self) -> Sequence[int]:
        """Ids that spell what must follow, as the tokenizer would; of many the first ones."""

    def mask(self) -> Mask:
        """The ids that may follow: the first one that is forced, or else all that fit. May be written to, and is
        until the next one is asked for."""


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
        self._spelt: Sequence[int] | None = None  # what must follow at the beginning; None: not known yet

    def start(self) -> TextAutomaton:
        with self._lock:
            automaton = TextAutomaton(self._matcher.deep_copy(), self._ends, self._mask_bytes, self._spelt)
            if self._spelt is None:
                automaton.lex()
                self._spelt = automaton.spelt()
            return automaton


class TextAutomaton:
    """Implements Automaton.

    llguidance spells what must follow anew in each place, and in its masks, too, which takes 0.3 ms for a thousand
    characters, under Python's lock. So it is spelt once for a text, in its first place, however that was reached: the
    ids depend on the ids before alone. A place that more must follow than `MOST_FORCED_BYTES` breaks it.
    """

    def __init__(
        self, matcher: LLMatcher, ends: Sequence[int], mask_bytes: int, spelt: Sequence[int] | None = None
    ) -> None:
        """spelt: what must follow, if it is known."""
        self._matcher = matcher
        self._ends = ends
        words = np.zeros(-(-mask_bytes // _WORD), dtype=np.uint32)
        self._mask, self._at = words.view(np.uint8)[:mask_bytes], (words.ctypes.data, words.nbytes)  # looked up once
        self._bytes = self._mask.data
        # What must follow, from so many ids on; None: not known yet.
        self._spelt: tuple[Sequence[int], int] | None = None if spelt is None else (spelt, 0)
        self._before: deque[tuple[Sequence[int], int]] = deque(maxlen=MOST_ROLLED_BACK)
        self._forced_bytes = 0  # what must follow, where it was spelt

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        return self.is_over or self._matcher.is_accepting()

    @property
    def broken(self) -> str:
        if self._forced_bytes > MOST_FORCED_BYTES:
            return f"{self._forced_bytes:,} bytes must follow, at most {MOST_FORCED_BYTES:,} may at once"
        return first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def consume(self, token_id: int) -> bool:
        if token_id in self._ends:
            return False
        ids, at = spelt = self._spell()
        if not self._matcher.consume_token(token_id):
            return False
        self._before.append(spelt)
        self._spelt = (ids, at + 1) if at + 1 < len(ids) and ids[at] == token_id else None
        return True

    def _spell(self) -> tuple[Sequence[int], int]:
        if self._spelt is None:
            self._forced_bytes = len(self._matcher.compute_ff_bytes())
            is_long = self._forced_bytes > MOST_FORCED_BYTES
            self._spelt = () if is_long else self._matcher.compute_ff_tokens(), 0
        return self._spelt

    def lex(self) -> None:
        """Find what must follow without Python's lock, as masks do: what is asked then has little to do."""
        self._matcher.unsafe_compute_mask_ptr(*self._at)

    def spelt(self) -> Sequence[int]:
        """What must follow from here."""
        ids, at = self._spell()
        return ids[at:]

    def fitting(self, token_ids: Sequence[int]) -> int:
        count = next((place for place, each in enumerate(token_ids) if each in self._ends), len(token_ids))
        return self._matcher.validate_tokens(list(token_ids[:count]))

    def roll_back(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise RuntimeError(f"llguidance cannot roll back: {self._matcher.get_error()}")
        if count:
            self._forced_bytes = 0
        for _ in range(count):
            self._spelt = self._before.pop()

    def forced(self) -> Sequence[int]:
        ids, at = self._spell()
        return ids[at : at + MOST_ROLLED_BACK]

    def mask(self) -> Mask:
        ids, at = self._spell()
        if ids:
            self._mask.fill(0)
            if ids[at] not in self._ends:
                self._bytes[ids[at] >> 3] = 1 << (ids[at] & 7)
            return self._mask
        self._matcher.unsafe_compute_mask_ptr(*self._at)
        for end in self._ends:
            self._bytes[end >> 3] &= ~(1 << (end & 7)) & 0xFF
        return self._mask


def first_line(text: str) -> str:
    return (text.strip().splitlines() or ["it cannot be compiled"])[0][:300]
