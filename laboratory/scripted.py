"""A model that costs nothing and forgets nothing: its next token is a keyed hash of the history, read through K/V.

It proves the machinery around a model. Every token carries what it stands for, token id and position, hashed into its
key, its value and its query. Attention averages the values of the entries that a query sees, weighted by their keys;
the averages are laid on a grid, and the cells they fall into are hashed into logits:

    (token, position) ── hash ──▶ q, k, v          logits = hash(⌊ Σ softmax(q·k) v / CELL ⌋)

One entry lost, held twice, out of place or from another session moves every average, most of them into other cells, and
then every token is another one. Rounding moves them by 1e-15, and has to do so right at the edge of a cell to show: a
session alone, in any batch and after any split gives the same tokens. Everything else is the real thing: plan,
allocations, strategies, sampling.

A script says how long steps take and what goes wrong in them.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.base import Borrower, NeverFails, Result, Step, T
from inference_engine.errors import ModelError
from inference_engine.kernels.sampling import draw_all
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.memory.address_space import discard, reserve_zeros
from inference_engine.kv.memory.host import free_host_bytes
from inference_engine.kv.memory.pool import Pool
from inference_engine.types import Mode, ModelFacts

HEAD_DIM = 8
CELL = 2.0**-8  # of a thousand entries, one that is missing moves an average by an eighth of this
LOGIT_SCALE = 16.0
FIXED_SHAPE_QUANTA = (4, 16)  # nothing here needs padding; tokens are padded all the same, as for other models

_QUERY, _KEY, _VALUE = range(3)
_U64 = np.uint64


class Fault(enum.Enum):
    """What a step can be made to do."""

    NON_FINITE = "the token's logits are NaN"
    OUT_OF_MEMORY = "the device has no memory for the step"
    ERROR = "the device fails"
    HANG = "the step lasts until `Script.let_go`"


@dataclass(kw_only=True)
class Script:
    """How the device behaves; may be changed at any time, from any thread.

    step_seconds, token_seconds: the least a step takes, and what each of its tokens adds to that.
    faults: by token id; a step with a token of that id meets the fault, as often as is said (None: always).
    on_step: called with the step's number in the middle of every step, on the engine's thread.
    """

    step_seconds: float = 0.0
    token_seconds: float = 0.0
    faults: dict[int, tuple[Fault, int | None]] = field(default_factory=dict)
    on_step: Callable[[int], None] | None = None
    let_go: threading.Event = field(default_factory=threading.Event)

    def take(self, token_ids: NDArray[np.int64]) -> dict[int, Fault]:
        """The faults that these tokens meet, by token id; each that is counted counts."""
        if not self.faults:
            return {}
        met = {token: self.faults[token][0] for token in set(token_ids.tolist()) & set(self.faults)}
        for token in met:
            fault, times = self.faults[token]
            if times is not None:
                self.faults[token] = (fault, times - 1)
                if times <= 1:
                    del self.faults[token]
        return met


class ScriptedModel:
    """The arithmetic, without a device: what entries hold and what averages mean."""

    def __init__(self, *, key: int = 0, vocab_size: int = 256, layers: int = 1) -> None:
        """key: another one is another model."""
        self.key, self.vocab_size, self.layers = key, vocab_size, layers
        self._place_salts = _mix(np.arange(layers * HEAD_DIM, dtype=np.uint64) + _U64(key * 2654435761 & 0xFFFF_FFFF))
        self._token_salts = _mix(np.arange(vocab_size, dtype=np.uint64) + _U64(1 << 32))

    def states(
        self, layer: int, token_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [N, HEAD_DIM] of tokens, each number in [-1, 1)."""
        mixed = _mix(token_ids.astype(np.uint64) * _U64(0xD6E8_FEB8_6659_FD93) + positions.astype(np.uint64))
        salts = np.arange(3 * HEAD_DIM, dtype=np.uint64) + _U64((self.key * 64 + layer) * 3 * HEAD_DIM & 0xFFFF_FFFF)
        numbers = torch.from_numpy(_signed(_mix(mixed[:, None] ^ _mix(salts)[None, :]))).view(-1, 3, HEAD_DIM)
        return numbers[:, _QUERY], numbers[:, _KEY], numbers[:, _VALUE]

    def logits(self, averages: Sequence[Tensor]) -> Tensor:
        """float32 [N, V] in [0, LOGIT_SCALE) from one average [N, HEAD_DIM], float64, a layer."""
        cells = np.floor(torch.cat(list(averages), dim=1).numpy() / CELL).astype(np.int64).astype(np.uint64)
        mixed = _mix(cells + self._place_salts).sum(axis=1, dtype=np.uint64)  # where which cell is met counts
        return torch.from_numpy((_signed(_mix(mixed[:, None] ^ self._token_salts)) + 1.0) / 2.0 * LOGIT_SCALE).float()


class ScriptedForward(NeverFails):
    """The scripted model behind the same protocol as any other, on the CPU."""

    device = torch.device("cpu")
    has_address_space = True
    launcher = None
    indexes_keys = drafts_with_networks = records_graphs = False

    def __init__(
        self,
        model: ScriptedModel | None = None,
        script: Script | None = None,
        *,
        trained_positions: int = 8192,
        dtype: torch.dtype = torch.float64,
        mode: Mode = Mode.BATCHED,
    ) -> None:
        """dtype: of K and V. In float32, for strategies that know no other, rounding may decide about a token."""
        self.model = model or ScriptedModel()
        self.script = script or Script()
        self.steps = 0  # forwards so far
        self._trained_positions = trained_positions
        self.compute_dtype = dtype
        self._mode = mode

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            model_id="scripted",
            vocab_size=self.model.vocab_size,
            trained_positions=self._trained_positions,
            device="cpu",
            dtype=str(self.compute_dtype).removeprefix("torch."),
            mode=self._mode,
        )

    def geometry(self, *, page_tokens: int, segment_tokens: int) -> Geometry:
        token_quantum, key_quantum = FIXED_SHAPE_QUANTA if self._mode is Mode.FIXED_SHAPE else (1, 1)
        return Geometry(
            layers=(LayerGeometry(query_heads=1, kv_heads=1, head_dim=HEAD_DIM),) * self.model.layers,
            itemsize=self.compute_dtype.itemsize,
            trained_positions=self._trained_positions,
            page_tokens=page_tokens,
            segment_tokens=segment_tokens,
            token_quantum=token_quantum,
            key_quantum=key_quantum,
        )

    def free_bytes(self) -> int:
        return free_host_bytes()

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        zeros = partial(reserve_zeros, dtype=self.compute_dtype, is_sparse=address_bytes > 0)
        pool = Pool(geometry, capacity_bytes, zeros, address_bytes=address_bytes, discard=discard)
        return KVContext(geometry=geometry, pool=pool, rotate=_unrotated, device=self.device)

    def run(self, step: Step) -> Result:
        until = time.monotonic() + self.script.step_seconds + self.script.token_seconds * len(step.token_ids)
        self.steps += 1
        if self.script.on_step is not None:
            self.script.on_step(self.steps)
        # A padding token belongs to no session.
        faults = self.script.take(np.concatenate([step.token_ids[span.real] for span in step.plan.spans]))
        met = set(faults.values())
        if Fault.HANG in met:
            self.script.let_go.wait()
        if Fault.OUT_OF_MEMORY in met:
            raise torch.OutOfMemoryError("scripted: out of memory")
        if Fault.ERROR in met:
            raise RuntimeError("scripted: the device failed")
        with torch.inference_mode():
            logits = self._logits(step)
            poisoned = [token for token, fault in faults.items() if fault is Fault.NON_FINITE]
            if poisoned:
                logits[np.isin(step.token_ids[list(step.logit_queries)], poisoned)] = torch.nan
        if (rest := until - time.monotonic()) > 0:
            time.sleep(rest)
        step.on_computed()
        return Result(logits, self._taps(step) if step.tap_layers else None, draw_all(logits, step.draws))

    def lend(self, borrower: Borrower[T]) -> T:
        raise ModelError("a scripted model has no weights; start with --drafter ngram or none")

    def inference_mode(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _logits(self, step: Step) -> Tensor:
        averages = []
        for layer in range(self.model.layers):
            queries, keys, values = (
                states[None, None].to(self.compute_dtype)
                for states in self.model.states(layer, step.token_ids, step.plan.positions)
            )
            out = step.plan.attend(layer, queries, keys, values, scaling=1.0)  # [1, N, 1, D]
            averages.append(out[0, list(step.logit_queries), 0].double())
        return self.model.logits(averages)

    def _taps(self, step: Step) -> Tensor:
        """What a drafter may condition on: the tokens' values, [N, layers, HEAD_DIM]."""
        values = [self.model.states(layer, step.token_ids, step.plan.positions)[_VALUE] for layer in step.tap_layers]
        return torch.stack(values, dim=1)


def _unrotated(keys: Tensor, _shifts: Tensor, _rotary: str) -> Tensor:
    """Positions are in the entries themselves: keys mean the same wherever they are read."""
    return keys


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): every bit of the input moves half of the output's."""
    mixed = numbers + _U64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> _U64(30))) * _U64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> _U64(27))) * _U64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> _U64(31))


def _signed(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In [-1, 1), from the upper 53 bits."""
    return (numbers >> _U64(11)).astype(np.float64) * 2.0**-52 - 1.0
