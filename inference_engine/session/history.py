"""A session's token ids, append-only, each with the mark that says how it came."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from inference_engine.session.journal import TokenIds
from inference_engine.types import Mark

_FIRST_CAPACITY = 256


class History:
    """Grows by doubling; reading a stretch copies nothing."""

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.uint32)
        self._marks = np.empty(_FIRST_CAPACITY, dtype=np.uint8)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: TokenIds, mark: Mark) -> None:
        end = self._length + len(token_ids)
        if end > len(self._ids):
            capacity = max(end, 2 * len(self._ids))
            self._ids = np.resize(self._ids, capacity)
            self._marks = np.resize(self._marks, capacity)
        self._ids[self._length : end] = token_ids
        self._marks[self._length : end] = mark
        self._length = end

    def runs(self) -> Iterator[tuple[TokenIds, Mark]]:
        """The history in order, as stretches of equal mark. Views, as `ids` gives them."""
        marks = self.marks()
        edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), self._length] if self._length else []
        for start, stop in pairwise(edges):
            yield self.ids(start, stop), Mark(int(marks[start]))

    def ids(self, start: int = 0, stop: int | None = None) -> TokenIds:
        """A view of positions [start, stop). Valid until the history grows."""
        return self._ids[start : self._length if stop is None else min(stop, self._length)]

    def marks(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._marks[start : self._length if stop is None else min(stop, self._length)]
