"""A DFlash network made ready to draft for a model, whatever executes the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inference_engine.backends.base import EmbeddingAndHead
from inference_engine.backends.native.program import Program
from inference_engine.backends.packed_linear import can_pack, pack_linears
from inference_engine.models.seam import Seam
from kv_cache_proposer.dflash.drafter import BlockDrafter, DFlashDrafter
from kv_cache_proposer.dflash.native import NativeDrafter
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.shortlist import Shortlist, can_shortlist
from kv_cache_proposer.dflash.target import TargetWords, words_in, words_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BesideTarget:
    """Implements Borrower: the drafter of `network`, which is taken over.

    is_packed: may its products, and the ids that it scores, be rounded where that is faster?

    Raises DrafterError for a target that it does not fit, NotNative for a network that the native kernels do not run.
    """

    network: DFlashNetwork
    is_packed: bool
    records_graphs: bool

    def of_program(self, program: Program) -> BlockDrafter:
        return NativeDrafter(self.network, program)

    def of_modules(self, seam: Seam) -> BlockDrafter:
        return self._on_torch(words_of(seam.model))

    def of_matrices(self, words: EmbeddingAndHead) -> BlockDrafter:
        return self._on_torch(words_in(words.embedding, words.head))

    def _on_torch(self, words: TargetWords) -> BlockDrafter:
        if self.is_packed and can_shortlist(words):
            assert words.head_weight is not None
            words = replace(words, shortlist=Shortlist(words.head_weight))
        drafter = DFlashDrafter(self.network, words, records_graphs=self.records_graphs)
        if self.is_packed and can_pack(self.network):
            pack_linears(self.network)
        return drafter
