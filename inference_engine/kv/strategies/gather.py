"""Gather strategy: every entry stays; a generated token reads the sink, the window and what it selects of the rest.

    position  0 … 127 | 128 … 255 | 256 … 383 | 384 … 511 | 512 … 900
    bounds    ■ ■ ■ ■ |           | ■ ■ ■ ■ ■ | ■ ■ ■ ■ ■ | ■ ■ ■ ■ ■      two distant blocks of 128
    components■ ■ ■ ■ |  ■     ■  |        ■  | ■      ■  | ■ ■ ■ ■ ■      five distant tokens

Each KV head of each layer selects for itself. Scorer `components` selects tokens: an index keeps the `rank` leading
components of each unrotated key in `bits` bits, and the tokens of largest estimated weight are read
(`kernels/components.py`). It needs components calibrated for the model (`kakeya train components`). Scorer `bounds`
selects blocks and needs nothing: the smallest and largest value of each key channel in a block bound the score of any
of its keys from above.

Appended tokens read everything, so stored entries are exact. Tokens that the model generated read what they select,
whether they were sampled one by one or verified together. A budget of the whole history equals `full`. Memory is that
of `full` and the index or one entry per block; reads are saved.

Source: the Constant-Support reports (block-aligned gather-decode); Tang et al., Quest, arXiv 2406.10774 (bounds);
Singhania et al., Loki, arXiv 2406.02542 (components of keys for the choice).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from inference_engine.kernels.components import IndexShape
from inference_engine.kernels.gather import MOST_BLOCKS
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.layout import LayerRule
from inference_engine.kv.parts.block_index import BlockSelector
from inference_engine.kv.parts.component_index import TokenSelector
from inference_engine.kv.strategies.token_options import (
    BITS,
    LEAST_RANK,
    RUN,
    default_rank,
    require_components,
    require_index,
    require_rank,
    require_window,
    trial_rank,
)
from inference_engine.kv.strategy import COMPONENTS, KVStrategy, require

if TYPE_CHECKING:
    from inference_engine.kv.context import KVContext

_SCORERS = ("components", "bounds")
_BLOCK = 128
_BUDGET = 4864  # one block of sink, 640 local entries, 32 distant blocks
_TOKENS_BUDGET = 1280  # the sink, 512 to 544 local entries, some 600 distant tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather(KVStrategy):
    """budget: entries a generated token may read: the sink, the window, and distant ones, in whole blocks or by token.

    scorer: None is `components` where the model's are calibrated, else `bounds`. block: of `bounds`. rank,
    bits, run: of `components`: how many, bits of each, positions that share a rotation. None: as the model needs.
    """

    name: ClassVar[str] = "gather"

    budget: int | None = None
    block: int | None = None
    sink: int = 128
    window: int = 512
    scorer: str | None = None
    rank: int | None = None
    bits: int | None = None
    run: int | None = None

    def __post_init__(self) -> None:
        require(self.block is None or self.block >= 1, "block", f"must be ≥ 1, got {self.block}")
        require(self.sink >= 0, "sink", f"must be ≥ 0, got {self.sink}")
        require(self.window >= 1, "window", f"must be ≥ 1, got {self.window}")
        require(
            self.scorer is None or self.scorer in _SCORERS,
            "scorer",
            f"there is no scorer {self.scorer!r}; there are {', '.join(_SCORERS)}",
        )
        if self.scorer is not None:
            foreign = ("block",) if self.by_tokens else ("rank", "bits", "run")
            for option in foreign:
                require(getattr(self, option) is None, option, f"has no meaning with scorer {self.scorer}")
        require(self.rank is None or self.rank >= 1, "rank", f"must be ≥ 1, got {self.rank}")
        require_index(self.bits, self.run)
        # Without a scorer and a block it is not known yet which the model has: `resolved` checks again.
        is_open = self.scorer is None and self.block is None
        if self.budget is not None and not (is_open and self.budget >= self._tokens(0).most_entries):
            least = self._least
            what = "tile of the index" if self.by_tokens else "block of the query"
            require(
                self.budget >= least,
                "budget",
                f"must hold the sink, the window and the {what}, {least} entries; got {self.budget}",
                least=least,
            )

    @property
    def by_tokens(self) -> bool:
        """Are tokens selected, by components? Otherwise blocks are."""
        return self.scorer == "components"

    @property
    def calibrated(self) -> str:
        return COMPONENTS if self.by_tokens else ""

    @property
    def _least(self) -> int:
        return self._tokens(0).most_entries if self.by_tokens else self._blocks(0).most_entries

    @property
    def _most(self) -> int:
        default = _TOKENS_BUDGET if self.by_tokens else _BUDGET
        return max(default, self._least) if self.budget is None else self.budget

    def _blocks(self, count: int) -> BlockSelector:
        return BlockSelector(block=self.block or _BLOCK, sink=self.sink, window=self.window, count=count)

    def _tokens(self, count: int) -> TokenSelector:
        shape = IndexShape(rank=self.rank or LEAST_RANK, bits=self.bits or BITS, run=self.run or RUN)
        return TokenSelector(shape=shape, sink=self.sink, window=self.window, count=count)

    @property
    def distant_blocks(self) -> int:
        return (self._most - self._least) // (self.block or _BLOCK)

    def check(self, geometry: Geometry) -> None:
        page, room = geometry.page_tokens, geometry.trained_positions
        for name, value in (("block", self.block or 0), ("sink", self.sink), ("window", self.window)):
            require(value <= room, name, f"must be at most {room}, the model's positions, got {value}", limit=room)
        block = self.block or _BLOCK
        require(
            self.by_tokens or block % page == 0,
            "block",
            f"must be a multiple of the page size {page}, got {block}",
            page_tokens=page,
        )
        require_window(self.window, geometry)
        if geometry.is_split:
            require(not self.by_tokens, "scorer", "components are not there with tensor_parallel yet; choose bounds")
            least = -(-room // MOST_BLOCKS)
            require(block >= least, "block", f"must be ≥ {least} with tensor_parallel, got {block}", least=least)
        if self.by_tokens:
            require_rank(self.rank, geometry)

    def resolved(self, geometry: Geometry, *, has_components: bool = False) -> Gather:
        scorer = self.scorer
        if scorer is None:
            asks_for_blocks, asks_for_tokens = self.block is not None, (self.rank, self.bits, self.run) != (None,) * 3
            has_components &= not geometry.is_split
            scorer = "components" if asks_for_tokens or (has_components and not asks_for_blocks) else "bounds"
        found = replace(self, scorer=scorer)
        if not found.by_tokens:
            return replace(found, budget=found._most, block=found.block or _BLOCK)
        rank = self.rank or default_rank(geometry)
        found = replace(found, rank=rank, bits=self.bits or BITS, run=self.run or RUN)
        return replace(found, budget=found._most)

    def ready(self, context: KVContext) -> None:
        if not self.by_tokens:
            return
        require_components(context, self._tokens(0).shape.rank, "scorer", "scorer bounds")

    @classmethod
    def trials(cls, geometry: Geometry) -> tuple[Gather, ...]:
        blocks = cls(scorer="bounds", block=4, sink=4, window=16, budget=96)
        tokens = cls(scorer="components", sink=4, window=16, budget=96, rank=trial_rank(geometry), bits=4, run=1)
        return blocks, tokens

    def rule(self, layer: int, geometry: Geometry) -> LayerRule:
        if self.by_tokens:
            return LayerRule(mechanisms=(self._tokens(self._most - self._least),))
        return LayerRule(mechanisms=(self._blocks(self.distant_blocks),))
