"""DFlash as the engine sees it: committed tokens become the drafter's KV entries, a block of masks becomes a draft.

    observe   taps of all sessions' tokens ── one product ── K and V, into each session's ring buffer
    propose   [last token, MASK × (B − 1)] of all sessions ── one forward over their ring buffers ── the best ids

All sessions are drafted for in one batch: shorter ring buffers are padded and masked. A draft for a greedy target is
greedy; one for a target that samples is drawn with the target's own noise, which is known before the target's logits
are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.decode.draft import CommittedTokens, DraftMemory, DraftMethod, TokenIds, Tokens, Wanted
from inference_engine.kernels.gumbel_noise import key
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.pool import Demand, Pool
from kv_cache_proposer.dflash.draft_tokens import TargetDraws, choose_draft_tokens
from kv_cache_proposer.dflash.drafter_config import DFlashConfig
from kv_cache_proposer.dflash.drafter_memory import (
    Positions,
    RingMemory,
    RingShape,
    buffers_of,
    memory_demand,
    write_entries,
    write_index,
)
from kv_cache_proposer.dflash.network import DFlashNetwork, Entries
from kv_cache_proposer.dflash.recorded_drafts import DrafterGraphs
from kv_cache_proposer.dflash.target import TargetWords
from kv_cache_proposer.drafter_errors import DrafterError


class RingDrafter:
    """What drafters that read the target's hidden states have in common: a ring buffer of entries for each session."""

    def __init__(
        self, name: str, method: DraftMethod, ring: RingShape, tap_layers: tuple[int, ...], *, reads: int, hidden: int
    ) -> None:
        """reads: numbers of a hidden state that the drafter was made for; hidden: of the target's.

        Raises DrafterError if they differ.
        """
        if hidden != reads:
            raise DrafterError(f"the drafter reads hidden states of {reads} numbers, the target's have {hidden}")
        self.name, self.tap_layers = name, tap_layers
        self._method, self._ring = method, ring

    @property
    def longest(self) -> int:
        return self._method.longest

    def demands(self, geometry: Geometry) -> tuple[Demand, ...]:
        return (memory_demand(self._ring, geometry),)

    def open(self, context: KVContext) -> DraftMemory | None:
        return RingMemory.reserve(self._ring, context)

    def prepare(self, context: KVContext) -> None:
        """Nothing is recorded or laid out before the first draft."""

    def method(self, history: Tokens) -> DraftMethod | None:
        return self._method


class BlockDrafter(RingDrafter, ABC):
    """One network for all sessions. It draws from the target's embedding and head, which stay the target's."""

    def __init__(self, config: DFlashConfig, *, hidden: int, vocabulary: int, keeps_block: bool = False) -> None:
        """hidden, vocabulary: the target's. keeps_block: a session's memory has room for entries of the block.

        Raises DrafterError for a target it does not fit.
        """
        ring = RingShape(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.context_window,
            block=config.block_size if keeps_block else 0,
        )
        method = DraftMethod("network", longest=config.block_size - 1, needs_entries=True)
        super().__init__("dflash", method, ring, config.tap_layers, reads=config.hidden, hidden=hidden)
        if config.mask_token_id >= vocabulary:
            raise DrafterError(f"the drafter's mask is id {config.mask_token_id}, the target has {vocabulary} ids")
        self.config = config

    @abstractmethod
    def write(self, memories: Sequence[RingMemory], taps: Sequence[Tensor], place: Positions, index: Positions) -> None:
        """Write the K and V of tokens at the positions `place` [R]. taps: [r, taps, hidden] each, R in all.

        memories: those they are of. index: [layers · Hkv, R] vectors of the buffers.
        """

    @abstractmethod
    def choose(
        self,
        memories: Sequence[RingMemory],
        ids: NDArray[np.int64],
        first: NDArray[np.int64],
        keys: NDArray[np.int64],
        temperatures: NDArray[np.float64],
        longest: int,
    ) -> NDArray[np.int64]:
        """At least `longest` draft tokens [N, …] of each block. ids: [N, B]; first: [N], where the blocks begin.

        keys: [N, B − 1], and temperatures: [N], as `TargetDraws` has them.
        """

    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        seen = [one for one in seen if len(one.token_ids)]
        if not seen:
            return
        memories = [ring_of(one.memory) for one in seen]
        kept = [memory.hold(one.first, len(one.token_ids)) for memory, one in zip(memories, seen, strict=True)]
        taps, positions = [], []
        for one, (places, _) in zip(seen, kept, strict=True):
            assert one.taps is not None, "taps were asked for"
            taps.append(one.taps[int(places[0]) :])
            positions.append(one.first + places)
        index = write_index(memories, [slots for _, slots in kept])
        with torch.inference_mode():
            self.write(memories, taps, np.concatenate(positions), index)

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        if not wanted:
            return []
        limits = [min(one.limit, self.longest) for one in wanted]
        first = np.array([len(one.history) - 1 for one in wanted], dtype=np.int64)
        ids = np.full((len(wanted), self.config.block_size), self.config.mask_token_id, dtype=np.int64)
        ids[:, 0] = [int(one.history[-1]) for one in wanted]
        memories = [ring_of(one.memory) for one in wanted]
        keys, temperatures = noise_of(wanted, self.longest)
        with torch.inference_mode():
            draft_tokens = self.choose(memories, ids, first, keys, temperatures, max(limits))
        return [draft_tokens[place, :limit].astype(np.uint32) for place, limit in enumerate(limits)]


class DFlashDrafter(BlockDrafter):
    """The network on torch, beside a target on torch."""

    def __init__(self, network: DFlashNetwork, words: TargetWords, *, records_graphs: bool = False) -> None:
        """network: on the target's device, in its dtype. records_graphs: as the target's steps are, on a GPU.

        Raises DrafterError for a target it does not fit.
        """
        vocab_size, hidden = words.embeddings.shape
        super().__init__(network.config, hidden=hidden, vocabulary=vocab_size)
        self._network = network.eval().requires_grad_(requires_grad=False)
        self._words = words
        self._device = words.embeddings.device
        self._records_graphs = records_graphs
        # One per pool: graphs read and write where they were recorded.
        self._graphs: WeakKeyDictionary[Pool, DrafterGraphs] = WeakKeyDictionary()

    def prepare(self, context: KVContext) -> None:
        if self._records_graphs:
            buffers = buffers_of(self.config.head_dim, context)
            self._graphs[context.pool] = DrafterGraphs(
                self._network, self._words, buffers, taps_dtype=next(self._network.parameters()).dtype
            )

    def write(self, memories: Sequence[RingMemory], taps: Sequence[Tensor], place: Positions, index: Positions) -> None:
        graphs = self._graphs.get(memories[0].pool)
        if graphs is not None and graphs.can_observe(len(place)):
            graphs.observe(taps, place, index)
            return
        states = self._network.context(torch.cat(list(taps))[None], torch.from_numpy(place).to(self._device)[None])
        keys, values = (torch.stack(part)[:, 0] for part in zip(*states, strict=True))
        write_entries(memories[0], index, keys, values)

    def choose(
        self,
        memories: Sequence[RingMemory],
        ids: NDArray[np.int64],
        first: NDArray[np.int64],
        keys: NDArray[np.int64],
        temperatures: NDArray[np.float64],
        longest: int,
    ) -> NDArray[np.int64]:
        graphs = self._graphs.get(memories[0].pool)
        if graphs is not None and graphs.can_propose(len(memories)):
            return graphs.propose(memories, ids, first, keys, temperatures)
        context, mask, held = self._context(memories, first)
        block = self._words.embed(torch.from_numpy(ids).to(self._device), self.config.embedding_scale)
        positions = torch.from_numpy(first[:, None] + np.arange(self.config.block_size)).to(self._device)
        states = self._network(block, positions, context, mask, held)
        draws = None
        if temperatures.any():
            on_device = (torch.from_numpy(part).to(self._device) for part in (keys[:, :longest], temperatures))
            draws = TargetDraws(*on_device)
        chosen = choose_draft_tokens(self._network, self._words, states[:, 1 : longest + 1], draws)
        draft_tokens: NDArray[np.int64] = chosen.cpu().numpy()
        return draft_tokens

    def _context(
        self, memories: Sequence[RingMemory], first: NDArray[np.int64]
    ) -> tuple[list[Entries], Tensor, Tensor]:
        """Every layer's entries of all sessions, padded to the longest ring buffer in use, each block's mask, and the
        entries' positions [N, count].
        """
        (keys, values), visible, held = padded_entries(memories, first.tolist(), self.config.block_size)
        mask = torch.from_numpy(visible).to(self._device)[:, None, None]
        return list(zip(keys, values, strict=True)), mask, torch.from_numpy(held).to(self._device)


def padded_entries(
    memories: Sequence[RingMemory], first: Sequence[int], places: int
) -> tuple[tuple[Tensor, Tensor], NDArray[np.bool_], Positions]:
    """K and V of all sessions, padded to the longest ring buffer in use: [layers, N, Hkv, count, D] each; what is seen
    of them from the positions `first`, and of `places` more behind them: [N, count + places]; and their positions
    [N, count].
    """
    count = max(memory.used for memory in memories)
    visible = np.ones((len(memories), count + places), dtype=np.bool_)
    parts: list[tuple[Tensor, Tensor]] = []
    for place, (memory, position) in enumerate(zip(memories, first, strict=True)):
        visible[place, :count] = memory.visible(position, count)
        keys, values = memory.states(min(count, memory.used))
        short = count - keys.shape[2]
        parts.append((_padded(keys, short), _padded(values, short)))
    keys, values = (torch.stack(part, dim=1) for part in zip(*parts, strict=True))
    return (keys, values), visible, np.stack([memory.held[:count] for memory in memories])


def noise_of(wanted: Sequence[Wanted], places: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What `TargetDraws` holds, for drafts of so many places: keys [N, places] and temperatures [N]."""
    keys = np.zeros((len(wanted), places), dtype=np.int64)
    for own, one in zip(keys, wanted, strict=True):
        if one.temperature:
            first = len(one.history)
            own[:] = [key(one.seed, position) for position in range(first, first + places)]
    return keys, np.array([one.temperature for one in wanted], dtype=np.float64)


def _padded(states: Tensor, count: int) -> Tensor:
    return F.pad(states, (0, 0, 0, count)) if count else states


def ring_of(memory: DraftMemory | None) -> RingMemory:
    assert isinstance(memory, RingMemory), "a session's memory is the one that `open` gave"
    return memory
