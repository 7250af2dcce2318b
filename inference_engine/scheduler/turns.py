"""When an owner was last served, for prefilling and for decoding: who waited longest comes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

Turn = tuple[str, bool]  # an owner, and whether it prefills
_MOST = 4096  # beyond these, who was served longest ago counts as never served


class Turns:
    """Bounded, whoever comes."""

    def __init__(self) -> None:
        self._steps = 0
        self._last: OrderedDict[Turn, int] = OrderedDict()  # served longest ago first

    def last(self, turn: Turn) -> int:
        """The number of the step that last served it; 0 for none."""
        return self._last.get(turn, 0)

    def served(self, turns: Iterable[Turn]) -> None:
        """One more step has served these."""
        self._steps += 1
        for turn in turns:
            self._last[turn] = self._steps
            self._last.move_to_end(turn)
        while len(self._last) > _MOST:
            self._last.popitem(last=False)
