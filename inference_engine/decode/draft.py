"""The interface between the engine and a drafter, which proposes draft tokens for speculative decoding.

    propose   sessions that can use a draft → token ids for the positions after their history
    observe   tokens that were committed → whatever state the drafter keeps of them

The target samples every position itself; a draft token is accepted if it equals that sample. So a drafter never changes
a token, however bad its drafts are. Drafters live above the engine, which knows only this interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.context import DraftMemories, DraftMemory, KVContext, NoDraftMemories

__all__ = ["CommittedTokens", "DraftMemory", "DraftMethod", "Drafter", "NoDrafter", "TokenIds", "Tokens", "Wanted"]

TokenIds = NDArray[np.uint32]
_NO_TOKENS: TokenIds = np.zeros(0, dtype=np.uint32)


class Tokens(Protocol):
    """Token ids in order. Reading a stretch costs what the stretch is long."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, where: int, /) -> int: ...

    @overload
    def __getitem__(self, where: slice, /) -> TokenIds: ...


class DraftMethod(NamedTuple):
    """One of the methods of a drafter. Acceptance and cost are measured for each method; a tuple, because every token
    looks them up.

    longest: most tokens in one draft. needs_entries: it must observe every committed token before it can draft.
    """

    name: str
    longest: int
    needs_entries: bool


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """Committed tokens of one session, in order of position, each once.

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
    """One session that can use a draft of 1 to `limit` tokens.

    history: every recorded id; the last one was just sampled and has no K/V yet. The draft begins after it.
    temperature, seed: of the target's sampling; temperature 0 is greedy. The token at position p is drawn with the
    noise of (seed, p) (`kernels/gumbel_noise.py`), and a drafter may use the same noise.
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
        """Its name, for display."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's layers after which it needs hidden states, ascending; () for none."""

    @property
    def longest(self) -> int:
        """The most tokens it can propose at once."""

    def prepare(self, context: KVContext) -> None:
        """Get ready for the sessions of `context`. Called once, before there are any."""

    def method(self, history: Tokens) -> DraftMethod | None:
        """The method it would draft with after this history; None for no draft. Called often, so it must be cheap."""

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        """Tokens of several sessions were committed."""

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        """A draft for each, of at most its limit; an empty one where the drafter has none."""


class NoDrafter(NoDraftMemories):
    """Implements Drafter: it drafts nothing, and its name is empty."""

    name = ""
    tap_layers = ()
    longest = 0

    def prepare(self, context: KVContext) -> None:
        pass

    def method(self, history: Tokens) -> DraftMethod | None:
        return None

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        pass

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        return [_NO_TOKENS] * len(wanted)
