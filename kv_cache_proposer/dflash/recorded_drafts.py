"""The drafter's two computations as recorded graphs, one per number of blocks and one per number of tokens.

    propose   ids [N, B] | positions [N, B] | where each ring buffer begins
              | keys of noise [N, B − 1] | temperatures [N]
              | what each block sees: of a slot its position + 1, or 0       → draft tokens [N, B − 1]
    observe   positions [R] | buffer vectors to write                    beside them taps [R, taps, hidden]

A draft for a small target is a few dozen launches, which take the host longer than the device, like a decode step
(`inference_engine/backends/graphs.py`). Every ring buffer is read whole, so that shapes do not depend on histories.
Noise is worked out for every block, and none of it added at temperature 0; temperatures are float64, passed as their
bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.recording import GraphMemory, Recording, padded
from kv_cache_proposer.dflash.draft_tokens import TargetDraws, choose_draft_tokens
from kv_cache_proposer.dflash.drafter_memory import RingMemory
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import TargetWords

Numbers = NDArray[np.int64]
BLOCKS = (1, 2, 4, 8, 16)
TOKENS = (1, 2, 4, 8, 16, 32, 64)


class DrafterGraphs:
    """Records everything when it is made. `buffers`: K and V of the pool, as vectors of the drafter's head size."""

    def __init__(
        self, network: DFlashNetwork, words: TargetWords, buffers: tuple[Tensor, Tensor], *, taps_dtype: torch.dtype
    ) -> None:
        config = network.config
        self._network = network
        self._words = words
        self._buffers = buffers
        self._device = buffers[0].device
        self._regions = config.layers * config.kv_heads
        # Offsets of a ring buffer's vectors; padding reads the start of the buffer, however small it is.
        # Kept here: a recording reads this memory, which would be reused once no reference holds it.
        offsets = torch.arange(self._regions * config.context_window, device=self._device)
        self._ring_vectors = offsets.clamp(max=len(buffers[0]) - 1)
        memory = GraphMemory()
        shape = (TOKENS[-1], len(config.tap_layers), config.hidden)
        self._taps = torch.zeros(shape, dtype=taps_dtype, device=self._device)
        self._proposing = {count: self._record_proposing(count, memory) for count in reversed(BLOCKS)}
        self._observing = {count: self._record_observing(count, memory) for count in reversed(TOKENS)}

    @staticmethod
    def can_propose(blocks: int) -> bool:
        return blocks <= BLOCKS[-1]

    @staticmethod
    def can_observe(tokens: int) -> bool:
        return tokens <= TOKENS[-1]

    def propose(
        self,
        memories: Sequence[RingMemory],
        ids: Numbers,
        first: Numbers,
        keys: Numbers,
        temperatures: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """The draft tokens [N, B − 1] after each block's first id. ids: [N, B]; first: [N], where the blocks begin.

        keys: [N, B − 1], and temperatures: [N], as `TargetDraws` has them.
        """
        config = self._network.config
        window, size = config.context_window, config.block_size
        count = len(memories)
        visible = np.ones((count, window + size), dtype=np.int64)
        starts = np.array([memory.first_vector for memory in memories], dtype=np.int64)
        for place, (memory, position) in enumerate(zip(memories, first.tolist(), strict=True)):
            visible[place, :window] = np.where(memory.visible(position, window), memory.held + 1, 0)
        blocks = BLOCKS[bisect_left(BLOCKS, count)]
        positions = first[:, None] + np.arange(size)
        parts = (ids, positions, starts, keys, temperatures.view(np.int64), visible)
        numbers = [padded(part, blocks).reshape(-1) for part in parts]
        draft_tokens = self._proposing[blocks].run(*numbers)
        found: NDArray[np.int64] = draft_tokens[:count].cpu().numpy()
        return found

    def observe(self, taps: Sequence[Tensor], positions: Numbers, index: Numbers) -> None:
        """Write the K and V of taps, R in all, [r, taps, hidden] each, at `positions` [R].

        index: [layers · Hkv, R] vectors of the buffers.
        """
        count, first = len(positions), 0
        size = TOKENS[bisect_left(TOKENS, count)]
        for part in taps:
            self._taps[first : first + len(part)].copy_(part)
            first += len(part)
        where = padded(index.T.copy(), size).T  # padding writes to vector 0, which belongs to no session
        self._observing[size].run(padded(positions, size), where.reshape(-1))

    def _record_proposing(self, count: int, memory: GraphMemory) -> Recording[Tensor]:
        config = self._network.config
        window, size = config.context_window, config.block_size
        sizes = [count * numbers for numbers in (size, size, 1, size - 1, 1, window + size)]
        offsets = self._ring_vectors

        def compute(numbers: Tensor) -> Tensor:
            ids, positions, starts, keys_of_noise, temperatures, visible = torch.split(numbers, sizes)
            index = starts[:, None] + offsets
            seen = visible.view(count, 1, 1, -1) > 0
            held = visible.view(count, -1)[:, :window] - 1
            # Vectors that were never written may hold NaN, which a mask does not remove.
            unseen = ~seen[..., :window, None]  # [N, 1, 1, window, 1]
            shape = (count, config.layers, config.kv_heads, window, config.head_dim)
            keys, values = (buffer[index].view(shape).masked_fill(unseen, 0) for buffer in self._buffers)
            context = list(zip(keys.unbind(1), values.unbind(1), strict=True))
            block = self._words.embed(ids.view(count, size), config.embedding_scale)
            states = self._network(block, positions.view(count, size), context, seen, held)
            draws = TargetDraws(keys_of_noise.view(count, -1), temperatures.view(torch.float64))
            return choose_draft_tokens(self._network, self._words, states[:, 1:], draws)

        padding = np.zeros(sum(sizes), dtype=np.int64)
        padding[-sizes[-1] :] = 1  # a block sees at least itself
        return Recording(padding, self._device, compute, memory)

    def _record_observing(self, count: int, memory: GraphMemory) -> Recording[None]:
        taps = self._taps[:count]

        def compute(numbers: Tensor) -> None:
            states = self._network.context(taps[None], numbers[None, :count])
            for buffer, part in zip(self._buffers, zip(*states, strict=True), strict=True):
                written = torch.stack(part)[:, 0].to(buffer.dtype).reshape(-1, buffer.shape[1])
                buffer.index_copy_(0, numbers[count:], written)

        return Recording(np.zeros(count * (1 + self._regions), dtype=np.int64), self._device, compute, memory)
