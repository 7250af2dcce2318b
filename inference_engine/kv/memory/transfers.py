"""What a session moves between the device and the second tier.

kept      entries or latents that leave the device
streamed  those that are read in place, chunk by chunk
fetched   blocks that a generated token reads, into slots of the session's own regions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import reduce

from inference_engine.kv.memory.tier import Count
from inference_engine.metrics import TRANSFERS


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferTotals:
    """Bytes moved between the tiers for a session, over its life and in its last step. Blocks are those of one KV head.

    steps: forwards that added positions. Bytes count what moved in other forwards, and between steps, too.
    blocks_found: blocks that an earlier token had fetched already.
    """

    steps: int = 0
    kept_bytes: int = 0
    streamed_bytes: int = 0
    fetched_bytes: int = 0
    last_step_bytes: int = 0
    blocks_fetched: int = 0
    blocks_found: int = 0

    def beside(self, other: TransferTotals) -> TransferTotals:
        """The sum of both, where `other` is of the same steps and other layers."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return TransferTotals(**{**sums, "steps": max(self.steps, other.steps)})

    @staticmethod
    def together(totals: Iterable[TransferTotals]) -> TransferTotals:
        """The sum of all, which are of the same steps and different layers."""
        return reduce(TransferTotals.beside, totals, TransferTotals())


class Transfers:
    """Counts what is moved for one session, or for some layers of it. Engine's thread only, but for `totals`."""

    def __init__(self, count: Count) -> None:
        self.totals = TransferTotals()
        self._count = count
        self._length = 0
        self._moved: Counter[str] = Counter()  # since the last commit; the names are those of the totals

    def add(self, **moved: int) -> None:
        """Count towards the running step, by the names of the totals."""
        self._moved.update(moved)

    def settle(self) -> None:
        """Add what moved between steps to the totals, and report it."""
        self.commit(self._length)

    def commit(self, length: int) -> None:
        """The history now has `length` tokens: add what moved since the last call to the totals, and report it."""
        moved = {kind: self._moved[f"{kind}_bytes"] for kind in TRANSFERS}
        sums = {name: getattr(self.totals, name) + count for name, count in self._moved.items()}
        if length > self._length:
            sums |= {"steps": self.totals.steps + 1, "last_step_bytes": sum(moved.values())}
        self.totals = replace(self.totals, **sums)
        self._moved.clear()
        self._length = length
        for kind, count in moved.items():
            self._count(kind, count)


class NoTransfers(Transfers):
    """For entries that never leave the device: counts neither bytes nor steps."""

    def __init__(self) -> None:
        super().__init__(lambda _kind, _bytes: None)

    def commit(self, length: int) -> None:
        pass
