"""What a drafter is to the engine: cheap draft tokens of what a session's model will say next.

    propose   sessions that want a draft → token ids for the positions after their history
    observe   rows that were committed → whatever the drafter wants to remember of them

A draft is a draft token and nothing else: the target samples every position itself, and a draft token stays if it is
that sample. So a drafter, however wrong, never changes a token. Drafters lie above the engine; this is all it knows of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.context import DraftMemories, DraftMemory, KVContext

__all__ = ["DraftMemory", "DraftMethod", "Drafter", "Seen", "TokenIds", "Tokens", "Wanted"]

TokenIds = NDArray[np.uint32]


class Tokens(Protocol):
    """Token ids in order. Reading a stretch costs what the stretch is long."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, where: int, /) -> int: ...

    @overload
    def __getitem__(self, where: slice, /) -> TokenIds: ...


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """One of the ways in which a drafter drafts. How often draft tokens are right, and what they cost, is known for
    each.

    longest: the most tokens it gives at once. needs_entries: it has to be told of every committed row before.
    """

    name: str
    longest: int
    needs_entries: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows of one session that were committed, in order of position, each once.

    Positions never go back; those of Generates that had no drafting, or whose drafter failed, are missing.
    taps: [n, len(tap_layers), hidden], the target's hidden states after those layers, in its dtype and on its device;
    None if the drafter asks for none.
    """

    memory: DraftMemory | None
    first: int
    token_ids: TokenIds  # [n]
    taps: Tensor | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """One session that could use a draft of at most `limit` tokens, at least one.

    history: every recorded id; the last one was just sampled and has no row yet. The draft begins after it.
    temperature, seed: what the target samples with, greedily at 0: the token that will be number p of the history is
    drawn with the noise of (seed, p) (`kernels/noise.py`), and a drafter may draft with it.
    """

    memory: DraftMemory | None
    history: Tokens
    limit: int
    temperature: float = 0.0
    seed: int = 0


class Drafter(DraftMemories, Protocol):
    """A drafter on the target's device. Only the engine's thread calls it, but for `demands` and `open`."""

    @property
    def name(self) -> str:
        """What it is called, for people."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's layers after which it wants hidden states, ascending; () for none."""

    @property
    def longest(self) -> int:
        """The most tokens it can propose at once."""

    def prepare(self, context: KVContext) -> None:
        """Get ready for the sessions of `context`. Called once, before there are any."""

    def method(self, history: Tokens) -> DraftMethod | None:
        """In which way it would draft after this history; None if it has nothing to say. Asked often: cheap."""

    def observe(self, seen: Sequence[Seen]) -> None:
        """Rows of several sessions were committed."""

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        """A draft for each, of at most its limit; an empty one where the drafter has nothing to say."""
