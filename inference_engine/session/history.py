"""A session's token ids, append-only, each with the mark that says how it came."""

from __future__ import annotations

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

    def ids(self, start: int = 0, stop: int | None = None) -> TokenIds:
        """A view of positions [start, stop). Valid until the history grows."""
        return self._ids[start : self._length if stop is None else min(stop, self._length)]

    def marks(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self._marks[start : self._length if stop is None else min(stop, self._length)]
