"""Sequences of several ids that end a Generate, wherever its steps and drafts cut them.

    sequences   [7 8 9]   [8 9]
    steps       … 7 | 8 9 4     the second step is used up to its 9: both are complete there, and the longer one counts

A sequence counts if it lies within what the Generate gives: a function of its tokens alone, so nothing of it is kept
but their end, which is read from the history where a Generate goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CompleteSequence(NamedTuple):
    """tokens: how many there are until it is complete. which: of the sequences."""

    tokens: int
    which: int


class StopSequences:
    """Those of one Generate, with the end of its tokens so far."""

    def __init__(self, sequences: Sequence[Sequence[int]], before: Sequence[int] = (), *, min_tokens: int = 0) -> None:
        """before: the tokens that the Generate has already. min_tokens: a sequence that is complete within the first so
        many does not count.
        """
        self._by_last: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # the longest first
        for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index])):
            self._by_last.setdefault(sequences[index][-1], []).append((index, tuple(sequences[index])))
        self._kept = max(map(len, sequences)) - 1  # tokens that a sequence may have begun with
        self._end: list[int] = []
        self._ignored = min_tokens  # of the tokens to come
        self.advance(before)

    def find(self, token_ids: Sequence[int]) -> CompleteSequence | None:
        """Where the first sequence is complete in the tokens that come next. Nothing is kept of them."""
        text = [*self._end, *token_ids]
        for place in range(len(self._end) + max(0, self._ignored), len(text)):
            for index, sequence in self._by_last.get(text[place], ()):
                start = place + 1 - len(sequence)
                if start >= 0 and tuple(text[start : place + 1]) == sequence:
                    return CompleteSequence(place + 1 - len(self._end), index)
        return None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed."""
        self._ignored -= len(token_ids)
        self._end = [*self._end, *token_ids][-self._kept :] if self._kept else []
