"""The drafter beside a native target: its own lists of operations, run by the target's executor.

Its programs use the target's packed embedding and head, and the target's threads. A draft is no output, so activations
are rounded to 8 bits before products with quantised matrices, whatever the target's numeric identity is, and the head's
scores of them are the scores.

    session's memory   K and V of the ring buffer, then those of the block, where each layer's are written in turn
    a query's region   the ring buffer as a shared prefix, then the block: every query of a block sees the same, except
                       in layers with a window or a causal mask

Arrays of some size are numpy's: torch would wake threads of its own for them, beside those that have just computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.model_spec import RotaryTable
from inference_engine.backends.native.program import Program
from inference_engine.backends.native.trial import LoadedTensors
from inference_engine.errors import NotNative
from inference_engine.kernels.reads import (
    BASE,
    COUNT,
    FIELDS,
    FLOOR,
    HEAD_SLOTS,
    PREFIX_HEAD_SLOTS,
    PREFIX_START,
    SINK,
    START,
    UPTO,
)
from inference_engine.models.operations import Product, StepList
from inference_engine.native.library import NativeStep, ProductIdentity
from kv_cache_proposer.dflash.draft_tokens import LIKELIEST, TargetDraws, best_alone, best_path
from kv_cache_proposer.dflash.drafter import BlockDrafter
from kv_cache_proposer.dflash.drafter_config import DFlashConfig
from kv_cache_proposer.dflash.drafter_memory import Positions, RingMemory
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.step_lists import AFTER, ROTARY, STATES, WORDS, chain_list, observe_list, propose_list

Numbers = NDArray[np.int64]
Floats = NDArray[np.float32]
# Logits are looked through in so many rows, all of them at once.
_ROWS = 64


class NativeDrafter(BlockDrafter):
    """Draws from the target's embedding and head, which stay packed once."""

    def __init__(
        self, network: DFlashNetwork, target: Program, *, observe_weights: str = "bfloat16", weights: str = "int8"
    ) -> None:
        """network: on the CPU, in float32; it is packed, not kept.

        observe_weights, weights: formats of the matrices that observe and of the others. Columns of `fc` differ in size
        as taps do, so it is not quantised 32 inputs to a scale.

        Raises DrafterError for a target it does not fit, NotNative for a network that the kernels do not run.
        """
        config, steps = network.config, target.steps
        super().__init__(config, hidden=steps.hidden, vocabulary=steps.vocabulary, keeps_block=True)
        if config.head_dim % 16:
            raise NotNative(f"the drafter has heads of {config.head_dim} numbers, which is no multiple of 16")
        head = _head_of(steps)
        stored = LoadedTensors(network.state_dict())
        turns = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        rotaries = {ROTARY: RotaryTable(angles=tuple((config.rope_theta**-turns).tolist()), factor=1.0)}

        def program(own: StepList, formats: str, tables: Mapping[str, RotaryTable] = rotaries) -> Program:
            # No position counts as trained: angles are computed in float64, as the network's are.
            return Program(
                target.library,
                own,
                stored,
                tables,
                trained_positions=0,
                identity=ProductIdentity.QUANTISED,
                weights=formats,
                kv_type=target.kv_type,
                level=target.kernels.level,
                shares=target,
            )

        self._observe = program(observe_list(config), observe_weights)
        self._propose = program(propose_list(config, vocabulary=steps.vocabulary, head=head), weights)
        chain = chain_list(config, vocabulary=steps.vocabulary, head=head)
        self._chain = program(chain, weights, {}) if config.chain else None
        self._vocabulary = steps.vocabulary
        self._reaches: dict[tuple[int, bool], list[int]] = {}  # the layers of each
        for layer, reach in enumerate(config.reaches):
            self._reaches.setdefault(reach, []).append(layer)
        self._layer_vectors = np.arange(config.layers) * config.kv_heads * config.context_window

    @property
    def weight_bytes(self) -> int:
        """Bytes of its packed weights, without the target's."""
        programs = (self._observe, self._propose, self._chain)
        return sum(program.weight_bytes for program in programs if program is not None)

    def write(self, memories: Sequence[RingMemory], taps: Sequence[Tensor], place: Positions, index: Positions) -> None:
        given = torch.cat(list(taps)).float().contiguous()
        writes = _by_layer(index, self.config)
        addresses = writes.ctypes.data + writes.strides[0] * np.arange(len(writes), dtype=np.int64)
        positions = np.ascontiguousarray(place)
        self._observe.run(
            NativeStep(
                positions=positions.ctypes.data,
                writes=addresses.ctypes.data,
                pool=memories[0].pool.address,
                given=given.data_ptr(),
                tokens=len(place),
            )
        )

    def choose(
        self,
        memories: Sequence[RingMemory],
        ids: Numbers,
        first: Numbers,
        keys: Numbers,
        temperatures: NDArray[np.float64],
        longest: int,
    ) -> Numbers:
        logits, states = self._run_blocks(memories, ids, first, longest)
        if self._chain is None and not temperatures.any():
            best: Numbers = logits.argmax(axis=-1).reshape(len(memories), longest)
            return best
        shape = (len(memories), longest, -1)
        scores, largest = _largest(logits, min(LIKELIEST, self._vocabulary))
        places = largest.reshape(shape)
        found, likeliest = torch.from_numpy(places), torch.from_numpy(scores.reshape(shape))
        draws = None
        if temperatures.any():
            draws = TargetDraws(torch.from_numpy(keys[:, :longest].copy()), torch.from_numpy(temperatures))
        if self._chain is None or longest == 1:
            alone = found[..., 0] if draws is None else best_alone(found, likeliest, draws)
            return alone.numpy()
        onward = torch.from_numpy(self._pairs(self._chain, places, states.reshape(shape)))
        return best_path(found, likeliest[:, 0], onward, draws).numpy()

    def _run_blocks(
        self, memories: Sequence[RingMemory], ids: Numbers, first: Numbers, longest: int
    ) -> tuple[Floats, Floats]:
        """Logits [N · longest, V] and states [N · longest, hidden] of the first places of each block."""
        config, count = self.config, len(memories)
        size = config.block_size
        regions = np.zeros((config.layers, count, size, FIELDS), np.int64)
        writes = np.empty((count, size, config.kv_heads), np.int64)
        for place, (memory, position) in enumerate(zip(memories, first.tolist(), strict=True)):
            own = memory.block_vectors()
            writes[place] = own.T
            lines = regions[:, place]
            lines[..., START], lines[..., HEAD_SLOTS] = own[0, 0], size
            for reach, layers in self._reaches.items():
                self._fill_sight(lines, layers, memory, position, *reach)
            lines[..., PREFIX_START] = (memory.first_vector + self._layer_vectors)[:, None]
            lines[..., PREFIX_HEAD_SLOTS] = config.context_window
        # Every layer writes where the one before it did: that is not read any more.
        addresses = np.full(config.layers, writes.ctypes.data, np.int64)
        positions = first[:, None] + np.arange(size)
        asked = (np.arange(count)[:, None] * size + 1 + np.arange(longest)).reshape(-1)
        logits = np.empty((len(asked), self._vocabulary), np.float32)
        states, taps = np.empty((len(asked), config.hidden), np.float32), np.array([STATES], np.int32)
        tokens = np.ascontiguousarray(ids)
        self._propose.run(
            NativeStep(
                ids=tokens.ctypes.data,
                positions=positions.ctypes.data,
                writes=addresses.ctypes.data,
                regions=regions.ctypes.data,
                pool=memories[0].pool.address,
                logit_queries=asked.ctypes.data,
                logits=logits.ctypes.data,
                taps=taps.ctypes.data,
                tapped=states.ctypes.data,
                tokens=count * size,
                logit_count=len(asked),
                vocabulary=self._vocabulary,
                tap_count=1,
            )
        )
        return logits, states

    def _fill_sight(
        self, lines: Numbers, layers: Sequence[int], memory: RingMemory, position: int, window: int, is_causal: bool
    ) -> None:
        """What the places of a block that begins at `position` see in some layers. lines: [layers, B, FIELDS]."""
        size = self.config.block_size
        for query in range(size) if window or is_causal else (slice(None),):
            since = position + query - window + 1 if window and isinstance(query, int) else 0
            last = query if is_causal and isinstance(query, int) else size - 1
            sight = memory.sight(position, max(0, since))
            for layer in layers:
                line = lines[layer, query]
                line[..., COUNT], line[..., UPTO] = sight.end + size, sight.end + last
                line[..., SINK], line[..., FLOOR], line[..., BASE] = sight.before, sight.since, sight.end

    def _pairs(self, chain: Program, ids: Numbers, states: Floats) -> Floats:
        """Scores [N, G − 1, K, K] of each pair of neighbours. ids: [N, G, K]; states: [N, G, hidden]."""
        # The state of the next place; behind the last one there is none, and what stands there is not used.
        given = np.repeat(np.roll(states, -1, axis=1), ids.shape[-1], axis=1)
        taps, tapped = np.array([AFTER, WORDS], np.int32), np.empty((*ids.shape, 2, states.shape[-1]), np.float32)
        tokens = np.ascontiguousarray(ids)
        chain.run(
            NativeStep(
                ids=tokens.ctypes.data,
                taps=taps.ctypes.data,
                tapped=tapped.ctypes.data,
                given=given.ctypes.data,
                tokens=ids.size,
                tap_count=2,
            )
        )
        pairs: Floats = np.matmul(tapped[:, :-1, :, AFTER], tapped[:, 1:, :, WORDS].swapaxes(-1, -2))
        return pairs


def _head_of(steps: StepList) -> str:
    """The name of the target's head. Raises NotNative if it has a bias, which a drafter's scores would lack."""
    head = next(one for one in steps.operations if isinstance(one, Product) and one.output is None)
    if head.biases:
        raise NotNative("the target's head has a bias")
    return head.matrices[0]


def _by_layer(index: Positions, config: DFlashConfig) -> Numbers:
    """[layers · Hkv, n] → [layers, n, Hkv]."""
    shaped = index.reshape(config.layers, config.kv_heads, -1)
    return np.ascontiguousarray(shaped.transpose(0, 2, 1))


def _largest(logits: Floats, count: int) -> tuple[Floats, Numbers]:
    """The `count` largest of each row, from the largest down, and where they are.

    They are among the columns of a table of 64 rows whose largest number is largest: one pass, which writes nothing
    else, finds each column's maximum.
    """
    rows, width = logits.shape
    columns = width // _ROWS
    if columns <= count:
        places = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
        return np.take_along_axis(logits, places, -1), places
    table = logits[:, : columns * _ROWS].reshape(rows, _ROWS, columns)
    chosen = np.argpartition(table.max(axis=1), -count, axis=-1)[:, -count:]
    within = (chosen[:, None] + columns * np.arange(_ROWS)[:, None]).reshape(rows, -1)
    rest = np.broadcast_to(np.arange(columns * _ROWS, width), (rows, width - columns * _ROWS))
    candidates = np.concatenate([within, rest], axis=-1)
    found = np.take_along_axis(logits, candidates, -1)
    best = np.argsort(-found, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(found, best, -1), np.take_along_axis(candidates, best, -1)
