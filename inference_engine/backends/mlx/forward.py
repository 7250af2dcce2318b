"""A model on MLX: all sessions of a step in one graph, K and V where the plan says.

    the queries of all sessions read by numbers    one graph from ids to logits; then its K and V are put into the pool
    some need a view (offloaded entries), or       computed up to each layer's attention, the plan attends in torch, the
    select blocks                                  graph goes on

The pool is memory that MLX allocates and torch sees, too: on Apple silicon the GPU reads what the host writes. MLX
reads it and never writes it, as an array that something else looks at would be copied, whole, by each write. So the K
and V of a step are handed to its attention beside the pool, and the host writes them when the step is computed. What
is done to entries between steps is the code of all backends.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import torch
from torch import Tensor

from inference_engine.backends.base import Borrower, EmbeddingAndHead, NeverFails, Result, Step, T
from inference_engine.backends.mlx.bridge import MLX_DTYPES, as_mlx, as_torch
from inference_engine.backends.mlx.device import usable_bytes
from inference_engine.backends.mlx.operation_kernels import AttendCall
from inference_engine.backends.mlx.program import MLXProgram
from inference_engine.backends.mlx.reading import readings
from inference_engine.backends.mlx.region_attention import attend, part_of
from inference_engine.backends.mlx.step_states import StepStates, settle
from inference_engine.backends.model_spec import ModelSpec, recurrent_of
from inference_engine.errors import BackendError
from inference_engine.kernels.by_session import attend_by_session
from inference_engine.kernels.ops import REFERENCE
from inference_engine.kernels.sampling import draw_all
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import EntryShape, Geometry
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.plan import StepPlan
from inference_engine.types import ModelFacts


class MlxForward(NeverFails):
    """Implements Forward."""

    launcher = None
    records_graphs = indexes_keys = drafts_with_networks = False
    inference_mode = contextlib.nullcontext
    has_address_space = False  # what MLX allocates is memory at once

    def __init__(self, spec: ModelSpec, facts: ModelFacts, program: MLXProgram, *, dtype: torch.dtype) -> None:
        """dtype: of activations, and of K and V."""
        self.spec = spec
        self.facts = facts
        self.compute_dtype = dtype
        self.device = torch.device("cpu")  # where torch works on what MLX computes: the memory is that of both
        self._program = program
        self._states = recurrent_of(program.steps, len(spec.reads))
        self._ops = replace(REFERENCE, attend_ragged=attend_by_session, attends_together=True)
        # By the address that torch has of a pool: it may have several views.
        self._pools: dict[int, mx.array] = {}

    def lend(self, borrower: Borrower[T]) -> T:
        embedding, head = self._program.embedding(), self._program.head()
        mx.eval(embedding, *([] if head is None else [head]))
        words = EmbeddingAndHead(embedding=as_torch(embedding), head=None if head is None else as_torch(head))
        return borrower.of_matrices(words)

    def free_bytes(self) -> int:
        return usable_bytes()

    def geometry(self, *, page_tokens: int, segment_tokens: int) -> Geometry:
        return Geometry(
            layers=self.spec.layers,
            reads=self.spec.reads,
            states=self._states,
            itemsize=self.compute_dtype.itemsize,
            trained_positions=self.spec.trained_positions,
            short_positions=self.spec.short_positions,
            is_endless=self.spec.is_endless,
            page_tokens=page_tokens,
            segment_tokens=segment_tokens,
        )

    def open(
        self, geometry: Geometry, capacity_bytes: int, *, address_bytes: int = 0, tap_layers: tuple[int, ...] = ()
    ) -> KVContext:
        """Raises BackendError for more memory than there is: MLX would end the process."""
        if capacity_bytes > (most := usable_bytes()):
            raise BackendError(
                f"kv_bytes is {capacity_bytes}, and MLX can take {most} bytes here, all of them now; set a smaller one"
            )

        def zeros(count: int) -> Tensor:
            # In two dimensions: a length has 32 bits.
            memory = mx.zeros((count // geometry.alignment, geometry.alignment), dtype=MLX_DTYPES[self.compute_dtype])
            mx.eval(memory)
            found = as_torch(memory).view(-1)
            self._pools[found.data_ptr()] = memory
            return found

        pool = Pool(geometry, capacity_bytes, zeros)
        weakref.finalize(pool, self._pools.pop, pool.address, None)
        return KVContext(
            geometry=geometry,
            pool=pool,
            rotate=self._rotate,
            device=self.device,
            ops=self._ops,
            settle=self._settle,
        )

    def _settle(self, states: Tensor, held: int, kept: int, staged: int) -> None:
        settle(states, self._program.state_layers, held, kept, staged)

    def _rotate(self, keys: Tensor, shifts: Tensor, name: str) -> Tensor:
        """In float32, whatever the keys are kept in: they are rounded once, when they are written."""
        return self.spec.rotate(keys.float(), shifts, name)

    def run(self, step: Step) -> Result:
        plan = step.plan
        pool = self._pools[plan.pool.address]
        states = StepStates(plan, pool, self.compute_dtype.itemsize) if self._states else None
        attention: _Together | _ByPlan = _ByPlan(plan)
        if plan.is_numbers_only and not plan.records:
            attention = _Together(plan, self.spec, pool)
        try:
            logits, tapped = self._program.run(
                step.token_ids,
                plan.rotary_positions,
                attention,
                states,
                logit_queries=step.logit_queries,
                tap_layers=step.tap_layers,
            )
            computed = [logits, *([] if tapped is None else [tapped]), *attention.written()]
            computed += [] if states is None else states.written()
            mx.async_eval(computed)  # type: ignore[no-untyped-call]
            step.on_computed()
            mx.eval(computed)
            mx.synchronize()  # what fails on a GPU may be said here and not by what waited for it
        except RuntimeError as error:  # MLX has no type of its own for it
            with contextlib.suppress(RuntimeError):
                mx.synchronize()  # or it would be said to the next step
            if re.match(r"\[(metal::)?malloc|\[METAL\] .*: Insufficient Memory", str(error)):
                raise MemoryError(str(error)) from error  # for a buffer, as MLX says it, or a command of Metal
            raise
        attention.write()
        if states is not None:
            states.write()
        found = as_torch(logits)
        samples = draw_all(found, step.draws, self._ops.noise_of_all) if step.draws else ()
        return Result(found, None if tapped is None else as_torch(tapped), samples)


class _Together:
    """Implements Attention: all sessions in one graph. Its K and V are written when it is computed."""

    def __init__(self, plan: StepPlan, spec: ModelSpec, pool: mx.array) -> None:
        self._plan = plan
        self._layers = spec.layers
        self._pool = {width: pool.reshape(-1, width) for width in {layer.entry.width for layer in spec.layers}}
        self._readings = readings(plan)
        self._fresh: dict[int, tuple[mx.array, mx.array]] = {}
        self._rows: list[tuple[Sequence[int], mx.array, mx.array]] = []

    def __call__(self, call: AttendCall, queries: mx.array, keys: mx.array | None, values: mx.array | None) -> mx.array:
        index, layer = call.layer, self._layers[call.layer]
        pool, scaling, softcap = self._pool[layer.entry.width], call.scaling, call.softcap
        if keys is not None and values is not None:
            shared = layer.entry.shared
            if shared and shared < layer.value_dim:  # as they are stored: those of the value
                keys = mx.concatenate([values[..., -shared:], keys[..., shared:]], axis=-1)
            self._fresh[index] = _kept(keys), _kept(values)
        keys, values = self._fresh[index]
        outs: dict[int, mx.array] = {}
        for reading in self._readings[index]:
            tokens = reading.tokens
            parts = [part_of(pool, run, layer) for run in reading.runs]
            parts.append((keys[tokens].swapaxes(0, 1), values[tokens].swapaxes(0, 1)))
            outs[tokens.start] = attend(queries[tokens], parts, reading.visible, scaling=scaling, softcap=softcap)
        out = mx.concatenate([outs[first] for first in sorted(outs)]) if len(outs) > 1 else next(iter(outs.values()))
        return out.reshape(len(out), -1)

    def written(self) -> list[mx.array]:
        """The step's K and V, [layers · N · Hkv, D] for layers alike."""
        alike: dict[tuple[int, EntryShape], list[int]] = {}
        for index in self._fresh:
            layer = self._layers[index]
            alike.setdefault((layer.kv_heads, layer.entry), []).append(index)
        for (_, shape), layers in alike.items():
            keys, values = (
                mx.stack([self._fresh[layer][part] for layer in layers]).reshape(-1, dim)
                for part, dim in enumerate((shape.key, shape.value))
            )
            self._rows.append((layers, keys, values))
        return [states for _, keys, values in self._rows for states in (keys, values)]

    def write(self) -> None:
        tables = self._plan.tables
        for layers, keys, values in self._rows:
            places = torch.cat([tables.writes[layer] for layer in layers])
            buffer = tables.buffer(layers[0])
            buffer.keys.index_copy_(0, places, as_torch(keys))
            buffer.values.index_copy_(0, places, as_torch(values))


class _ByPlan:
    """Implements Attention: the plan attends in torch, layer by layer, and has written K and V when it returns."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def __call__(self, call: AttendCall, queries: mx.array, keys: mx.array | None, values: mx.array | None) -> mx.array:
        own = [] if keys is None or values is None else [_kept(keys), _kept(values)]
        states = [mx.contiguous(part) for part in (queries, *own)]
        mx.eval(states)
        mx.synchronize()  # as in `run`: what has failed must not be written
        with torch.inference_mode():
            given = [as_torch(part).transpose(0, 1)[None] for part in states]
            pair = (given[1], given[2]) if own else (None, None)
            out = self._plan.attend(call.layer, given[0], *pair, scaling=call.scaling, softcap=call.softcap)
            return as_mlx(out[0].flatten(1))

    def written(self) -> list[mx.array]:
        return []

    def write(self) -> None:
        pass


def _kept(states: mx.array) -> mx.array:
    """What is too large for float16 is NaN, as `as_kept` has it: it must not be lost in a softmax."""
    if states.dtype != mx.float16:
        return states
    return mx.where(mx.isinf(states), mx.array(float("nan"), dtype=mx.float16), states)
