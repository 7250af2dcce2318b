"""A model on the CPU: a step is one native call, or one of each piece where a prefill may be left meanwhile.

    the queries of all sessions read by plan numbers    one call from ids to logits
    some need a view (restored or offloaded entries)    a call up to each layer's attention, the plan attends, a call on

Both use the same kernels, whose sums run in one order for one token and for many. So a token's logits do not depend on
what else is in the step, as long as its entries are read by numbers.

K and V are kept in float32 or in 16 bits: rounded once, when they are written, and converted in registers when they
are read. Everything is computed in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.backends.base import Borrower, NeverFails, Result, Step, T
from inference_engine.backends.model_spec import ModelSpec
from inference_engine.backends.native.decoders import RotationTables
from inference_engine.backends.native.entry_coder import NativeChoice, NativeCoder
from inference_engine.backends.native.key_indexes import NativeIndexes
from inference_engine.backends.native.program import Program
from inference_engine.backends.quanta import probe_attention
from inference_engine.kernels.cpu_sampling import Heavy
from inference_engine.kernels.kv_dtype import as_kept
from inference_engine.kernels.ops import REFERENCE
from inference_engine.kernels.prefill_attention import State
from inference_engine.kernels.reads import (
    COUNT,
    FIELDS,
    HEAD_SLOTS,
    UPTO,
    AttentionCall,
    ReadRecord,
    RegionRead,
    require_support,
)
from inference_engine.kernels.sampling import Draws, Sample, draw_all
from inference_engine.kernels.trellis import Trellis, levels_of, pack, scale
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.memory.address_space import discard, reserve_zeros
from inference_engine.kv.memory.host import free_host_bytes
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.plan import StepPlan
from inference_engine.models.operations import Attend, AttendEarlier
from inference_engine.native.library import AttentionArguments, Kernels, KVType, NativeStep, StateSpan, Threads
from inference_engine.types import Mode, ModelFacts

_BYTES = 8  # of each number of a step
_NO_LOGITS = torch.empty(0, 0)
_MOST_HEAVY = 1024  # ids of a row that are worth a look before others
KV_DTYPES = {KVType.FLOAT32: torch.float32, KVType.FLOAT16: torch.float16, KVType.BFLOAT16: torch.bfloat16}


class NativeForward(NeverFails):
    """Implements Forward."""

    device, compute_dtype = torch.device("cpu"), torch.float32
    indexes_keys = has_address_space = True
    drafts_with_networks = records_graphs = False
    launcher = None
    inference_mode = nullcontext  # nothing has gradients, and to enter torch's takes as long as a plan

    def __init__(self, spec: ModelSpec, facts: ModelFacts, program: Program) -> None:
        self.spec = spec
        self.program = program
        self.facts = facts
        self._kv_dtype = KV_DTYPES[program.kv_type]
        layers = spec.layers
        attention = NativeAttention(program.kernels, program.threads)
        trellis = Trellis(NativeChoice(program.kernels, program.threads), levels_of, scale, pack)
        self._ops = replace(
            REFERENCE,
            attend_ragged=attention,
            attend_piece=attention.piece,
            attend_causal_state=attention.causal_state,
            trellis=trellis,
            attends_together=True,
            attends_in_one_order=True,
            attend_generated=attention,
        )
        tables = spec.rotaries
        whole = {name: table for name, table in tables.items() if not table.still}  # kernels turn the first numbers
        turns = {name: RotationTables.of(table.frequencies, spec.trained_positions) for name, table in whole.items()}
        self._coder = NativeCoder(
            kernels=program.kernels,
            threads=program.threads,
            kv_type=program.kv_type,
            identity=program.identity,
            rotate=self._rotate,
            turned={name: 2 * len(table.frequencies) for name, table in tables.items()},
            turns=turns,
        )
        self._indexes = NativeIndexes(whole, turns, program.identity)
        self._writes, self._writes_per_token = _write_offsets([layer.kv_heads for layer in layers])
        self._states = program.states(len(spec.reads))
        self._arguments: _Arguments | None = None  # of the last step

    def lend(self, borrower: Borrower[T]) -> T:
        return borrower.of_program(self.program)

    def free_bytes(self) -> int:
        return free_host_bytes()

    @cached_property
    def _quanta(self) -> tuple[int, int]:
        """Found once for all engines over this model."""
        if self.facts.mode is Mode.BATCHED:
            return 1, 1
        return probe_attention(self.spec.layers, self.device, self.compute_dtype)

    def geometry(self, *, page_tokens: int, segment_tokens: int) -> Geometry:
        # Products and attention by numbers have one order for any number of tokens; attention by views has not.
        token_quantum, key_quantum = self._quanta
        return Geometry(
            layers=self.spec.layers,
            reads=self.spec.reads,
            states=self._states,
            itemsize=self._kv_dtype.itemsize,
            trained_positions=self.spec.trained_positions,
            short_positions=self.spec.short_positions,
            is_endless=self.spec.is_endless,
            page_tokens=page_tokens,
            segment_tokens=segment_tokens,
            token_quantum=token_quantum,
            key_quantum=key_quantum,
            joins_segments=self.facts.mode is Mode.BATCHED,
        )

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        zeros = partial(reserve_zeros, dtype=self._kv_dtype, is_sparse=address_bytes > 0)
        return KVContext(
            geometry=geometry,
            pool=Pool(geometry, capacity_bytes, zeros, address_bytes=address_bytes, discard=discard),
            rotate=self._rotate,
            device=self.device,
            ops=self._ops,
            coder=self._coder,
            open_index=self._indexes.open,
            settle=self._settle,
        )

    def _settle(self, states: Tensor, held: int, kept: int, staged: int) -> None:
        self.program.settle(states.data_ptr(), held, kept, staged)

    def _rotate(self, keys: Tensor, shifts: Tensor, name: str) -> Tensor:
        """In float32, whatever the keys are kept in: they are rounded once, when they are written."""
        return self.spec.rotate(keys.float(), shifts, name)

    def run(self, step: Step) -> Result:
        with self.program.threads.lock:  # several engines may run one model
            raw, tapped, peaks = self._forward(step)
        step.on_computed()
        if isinstance(step.draws, Draws) and not step.needs_logits:
            # No operation of torch: between two steps, when the caches hold weights, each takes as long as a plan.
            if step.draws.are_greedy:
                return Result(_NO_LOGITS, tapped, [peaks[rows.start : rows.stop] for rows in step.draws.rows])
            if (found := step.draws.of_peaks(peaks)) is not None:
                return Result(_NO_LOGITS, tapped, found)
        logits = torch.from_numpy(raw)
        samples = draw_all(logits, step.draws, self._ops.noise_of_all, self._weigh, peaks) if step.draws else ()
        return Result(logits, tapped, samples)

    def _weigh(
        self,
        rows: Sequence[NDArray[np.float32]],
        masks: Sequence[NDArray[np.uint8] | None],
        temperatures: Sequence[float],
    ) -> list[Heavy | None]:
        """Implements Weigh."""
        ids = np.empty((len(rows), _MOST_HEAVY), np.int64)
        program, scales = self.program, (1.0 / np.array(temperatures)).astype(np.float32)
        found, rest = program.kernels.weigh(program.threads, rows, masks, scales, ids)
        return [
            Heavy(own[:count], weight) if count <= _MOST_HEAVY else None
            for own, count, weight in zip(ids, found.tolist(), rest.tolist(), strict=True)
        ]

    def _forward(self, step: Step) -> tuple[NDArray[np.float32], Tensor | None, list[Sample]]:
        """The logits, the hidden states after the layers that the step asks for, and, if it draws, the largest of each
        row of logits."""
        plan, steps = step.plan, self.program.steps
        tokens, asked, taps = plan.query_count, len(step.logit_queries), len(step.tap_layers)
        logits = np.empty((asked, steps.vocabulary), np.float32)
        tapped = torch.empty(tokens, taps, steps.hidden) if taps else None
        if self._arguments is None or not self._arguments.fit(step):
            self._arguments = _Arguments(step, steps.vocabulary, self._writes, self._writes_per_token)
        native = self._arguments.filled(step)
        native.logits = _address_of(logits)
        native.tapped = None if tapped is None else tapped.data_ptr()
        spans = _spans(plan) if self._states else ()
        native.spans, native.span_count = ctypes.addressof(spans) if spans else None, len(spans)
        if not plan.is_numbers_only:
            self._run_by_layers(step, native)
        elif plan.is_wanted is None:
            self.program.run(native)
        else:
            for first, end in pairwise(self.program.pieces):
                plan.require_wanted()
                self.program.run(native, first, end)
        largest = self._arguments.largest[: asked if native.largest else 0].tolist()
        return logits, tapped, [Sample(max(token_id, 0), None, token_id >= 0) for token_id in largest]

    def _run_by_layers(self, step: Step, native: NativeStep) -> None:
        """The plan attends, layer by layer; everything else is native."""
        program, first, tokens = self.program, 0, step.plan.query_count
        attends = [one for one in program.steps.operations if isinstance(one, Attend | AttendEarlier)]
        with torch.inference_mode():
            for index, attend in zip(program.attends, attends, strict=True):
                program.run(native, first, index)
                layer = program.steps.layers[attend.layer]
                heads = torch.from_numpy(program.register(attend.input, tokens))
                states = heads.view(tokens, -1, layer.head_dim).transpose(0, 1)[None]
                keys_at, values_at = layer.query_heads, layer.query_heads + layer.kv_heads
                own = (states[:, keys_at:values_at], states[:, values_at:]) if isinstance(attend, Attend) else ()
                keys, values = (
                    (as_kept(part, self._kv_dtype).to(self._kv_dtype) for part in own) if own else (None, None)
                )
                out = step.plan.attend(
                    attend.layer,
                    states[:, :keys_at],
                    keys,
                    values,
                    scaling=attend.scaling,
                    softcap=attend.softcap,
                )
                torch.from_numpy(program.register(attend.output, tokens)).copy_(out.reshape(tokens, -1))
                first = index + 1
        program.run(native, first)


class _Arguments:
    """What a native call is given, in memory that is used again for steps of as many tokens and logits: while one
    session decodes, most of it stays as it is. Used by the holder of the threads' lock."""

    def __init__(self, step: Step, vocabulary: int, writes: NDArray[np.int64], writes_per_token: int) -> None:
        """writes, writes_per_token: as `_write_offsets` returns them."""
        tokens, asked = self._counts = step.plan.query_count, len(step.logit_queries)
        self._tap_layers = step.tap_layers
        self._regions = writes_per_token * tokens
        self._writes_at = writes * tokens
        self.largest = np.empty(asked, np.int64)
        taps = np.array(step.tap_layers, np.int32)
        # One array, so that one address is asked for.
        own = np.empty(2 * tokens + len(writes) + asked, np.int64)
        self._ids, self._positions = own[:tokens], own[tokens : 2 * tokens]
        self._writes, self._queries = own[2 * tokens : len(own) - asked], own[len(own) - asked :]
        ids = _address_of(own)
        self._kept = own, taps
        self._largest_at = _address_of(self.largest)
        self._native = NativeStep(
            ids=ids,
            positions=ids + _BYTES * tokens,
            writes=ids + 2 * _BYTES * tokens,
            logit_queries=ids + _BYTES * (len(own) - asked),
            taps=_address_of(taps),
            tokens=tokens,
            logit_count=asked,
            vocabulary=vocabulary,
            tap_count=len(taps),
        )

    def fit(self, step: Step) -> bool:
        counts = step.plan.query_count, len(step.logit_queries)
        return counts == self._counts and step.tap_layers == self._tap_layers

    def filled(self, step: Step) -> NativeStep:
        """The structure for a step that they fit, valid until the next one. Not in it: where the results go."""
        plan, native = step.plan, self._native
        self._ids[:], self._positions[:], self._queries[:] = step.token_ids, plan.rotary_positions, step.logit_queries
        numbers = _address_of(plan.numbers.all)
        np.add(self._writes_at, numbers, out=self._writes)
        native.regions = numbers + self._regions
        native.pool = plan.pool.address
        native.largest = self._largest_at if step.draws else None
        return native


@dataclass(frozen=True, slots=True, eq=False)
class NativeAttention:
    """Implements RaggedAttention on float32 queries; by methods AttendEntries."""

    kernels: Kernels
    threads: Threads
    name: ClassVar[str] = "native"

    def supports(self, record: ReadRecord) -> bool:
        return isinstance(record, RegionRead) or self.name in record.KERNELS

    def __call__(self, call: AttentionCall) -> Tensor:
        require_support(self, call.reads)
        out, _ = self._attend(call, has_lse=False)
        return out

    def piece(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
    ) -> State:
        """Implements AttendEntries, of a piece, of entries in a dtype that K and V are kept in."""
        seen = torch.full((len(queries),), keys.shape[1] - 1)
        return self._state(queries, keys, values, seen, scaling, softcap)

    def causal_state(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, scaling: float, softcap: float | None = None
    ) -> State:
        """Implements AttendEntries, as `attend_causal_state`, of entries in a dtype that K and V are kept in."""
        seen = torch.arange(keys.shape[1] - len(queries), keys.shape[1])
        return self._state(queries, keys, values, seen, scaling, softcap)

    def _state(
        self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float, softcap: float | None
    ) -> State:
        """seen: int64 [T], the last of the entries that each query sees."""
        kv_heads, entries, head_dim = keys.shape
        if not _is_by_vectors(keys) or values.stride() != keys.stride():  # one line says where both lie
            both = torch.cat((keys, values), dim=-1)
            keys, values = both[..., :head_dim], both[..., head_dim:]
        lines, (apart, row, _) = torch.zeros((len(queries), FIELDS), dtype=torch.int64), keys.stride()
        lines[:, HEAD_SLOTS], lines[:, COUNT] = apart // row, entries
        lines[:, UPTO] = seen
        keys, values = (part.as_strided((1, part.shape[2]), (row, 1)) for part in (keys, values))
        call = AttentionCall(queries, keys, values, lines, kv_heads=kv_heads, scaling=scaling, softcap=softcap)
        return self._attend(call, has_lse=True)

    def _attend(self, call: AttentionCall, *, has_lse: bool) -> State:
        """The second is empty unless `has_lse`."""
        queries, keys, lines = call.queries, call.keys, call.lines.contiguous()
        count, heads, head_dim = queries.shape
        if queries.stride()[1:] != (head_dim, 1):  # those of a step lie in a wider register
            queries = queries.contiguous()
        value_dim = call.values.shape[1]
        out = torch.empty((count, heads, value_dim))
        lse = torch.empty((count, heads) if has_lse else 0)
        self.kernels.attend(
            self.threads,
            AttentionArguments(
                queries=queries.data_ptr(),
                keys=keys.data_ptr(),
                values=call.values.data_ptr(),
                regions=lines.data_ptr(),
                head_sinks=None,
                out=out.data_ptr(),
                lse=lse.data_ptr() if has_lse else None,
                count=count,
                query_stride=queries.stride(0),
                region_stride=FIELDS,
                out_stride=heads * value_dim,
                row=call.row,
                query_heads=heads,
                kv_heads=call.kv_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                kv_type=next(kind for kind, dtype in KV_DTYPES.items() if dtype == keys.dtype),
                scaling=call.scaling,
                softcap=call.cap,
            ),
        )
        return out, lse


def _is_by_vectors(states: Tensor) -> bool:
    """[H, n, D], heads whole numbers of vectors apart? Those of a chunk of which only a part is read are so, too."""
    apart, row, step = states.stride()
    return step == 1 and row >= states.shape[2] and not apart % row


def _address_of(array: NDArray[Any]) -> int:
    """Without the object that `array.ctypes` makes."""
    address: int = array.__array_interface__["data"][0]
    return address


def _spans(plan: StepPlan) -> ctypes.Array[StateSpan]:
    found = plan.states
    return (StateSpan * len(found))(
        *(
            StateSpan(
                tokens.start,
                tokens.stop - tokens.start,
                position,
                states.before.data_ptr(),
                None if states.after is None else states.after.data_ptr(),
            )
            for tokens, position, states in found
        )
    )


def _write_offsets(kv_heads: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Where each layer's writes begin in a step's numbers, and where its regions do: bytes for each token of the step.

    See `kv/numbers.py`: the layers with equally many KV heads lie together.
    """
    offsets, first = np.zeros(len(kv_heads), np.int64), 0
    for heads in dict.fromkeys(kv_heads):
        for layer, own in enumerate(kv_heads):
            if own == heads:
                offsets[layer] = first
                first += heads * 8
    return offsets, first
