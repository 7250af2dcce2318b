"""A transformers model on torch, on CPU or CUDA with the same code."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from inference_engine.backends.base import Borrower, Result, Step, T
from inference_engine.backends.device_indexes import DeviceIndexes, can_index
from inference_engine.backends.graphs import SIZES, RecordedKind, StepGraphs
from inference_engine.backends.op_list_executor import OpListExecutor
from inference_engine.backends.pinned import Landing
from inference_engine.backends.quanta import probe_quanta
from inference_engine.backends.ranks.causal_plan import CausalPlan, CausalSpan, StepShape
from inference_engine.backends.ranks.leader import ALONE, Followers
from inference_engine.backends.recorded_compute import RecordedCompute
from inference_engine.backends.recording import GraphMemory
from inference_engine.backends.torch_coder import TorchCoder
from inference_engine.errors import BackendError
from inference_engine.kernels.graph_io import KeyedRows
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kernels.sampling import Drawing, Draws, draw_all, start_drawing
from inference_engine.kernels.transfer import on_device
from inference_engine.kv.context import Coder, Compute, KVContext, NoCoder, compute_plainly, settle_nothing
from inference_engine.kv.geometry import SEGMENTS_IN_A_CHUNK, Geometry
from inference_engine.kv.memory.address_space import discard, reserve_zeros
from inference_engine.kv.memory.host import free_host_bytes
from inference_engine.kv.memory.pool import Pool
from inference_engine.kv.numbers import Numbers, StepTables
from inference_engine.models.quantised_linear import QuantisedLinear
from inference_engine.models.seam import Seam
from inference_engine.types import Mode, ModelFacts

# Of appended tokens, where a step reads offloaded or restored entries, or the model has a window of its own.
_SEGMENTS_AT_ONCE = 4
_SEGMENTS_IN_A_CHUNK = 16  # of restored ones
# Estimates: how long the host takes at most to launch a layer that is not recorded, and how much a GPU multiplies.
_LAUNCHING_SECONDS, _PRODUCTS_A_SECOND = 4e-4, 4e14


class _Launched:
    """Implements Launched."""

    def __init__(self, result: Result, draw: Callable[[], Drawing], *, waits: bool = False) -> None:
        """draw: starts its draws. waits: not yet."""
        self._result, self._draw = result, draw
        self._drawing = None if waits else draw()

    @property
    def _drawn(self) -> Drawing:
        assert self._drawing is not None, "its draws were begun"
        return self._drawing

    @property
    def ids(self) -> Tensor:
        return self._drawn.ids

    def draw(self) -> None:
        if self._drawing is None:
            self._drawing = self._draw()

    def result(self) -> Result:
        return Result(self._result.logits, self._result.taps, self._drawn.samples())


class TorchForward:
    """Runs the model through the attention seam. The model is taken over: it can no longer be called without a plan."""

    indexes_keys = False  # a GPU's operation reads less and takes longer than one that chooses blocks

    def __init__(
        self,
        seam: Seam,
        facts: ModelFacts,
        device: torch.device,
        *,
        ops: DeviceOps = REFERENCE,
        records_graphs: bool = False,
        listed: OpListExecutor | None = None,
        followers: Followers = ALONE,
    ) -> None:
        """ops: operations of the device. records_graphs: record steps with one attention call for all sessions.

        listed: runs the steps in place of torch's modules, over the same weights. followers: the other ranks of a model
        that has several: they run what is run here, so all of it is plan numbers.
        """
        self.seam = seam
        self.facts = facts
        self.device, self.compute_dtype = device, seam.dtype
        self.has_address_space = device.type == "cpu"
        self._ops = ops
        self.records_graphs = records_graphs
        self.listed = listed
        self.followers = followers
        self._is_whole = self.drafts_with_networks = followers.group.ranks == 1
        self._compute = self._run_here if self._is_whole else self._run_with_others
        # One for each pool: graphs read and write the addresses they were recorded with.
        self._graphs: WeakKeyDictionary[Pool, StepGraphs] = WeakKeyDictionary()
        self._memory = GraphMemory(ops.step_ends)
        self._landing = Landing()

    def lend(self, borrower: Borrower[T]) -> T:
        if not self._is_whole:
            raise BackendError(
                f"tensor_parallel={self.followers.group.ranks}: no rank has all of the model, which this needs; start "
                "with tensor_parallel=1"
            )
        return borrower.of_modules(self.seam)

    def inference_mode(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def failure(self) -> str:
        return self.followers.failure()

    @cached_property
    def _quanta(self) -> tuple[int, int]:
        """Found once for all engines: they run the same weights."""
        needs_none = self.facts.mode is Mode.BATCHED or self._ops.attends_in_one_order
        return (1, 1) if needs_none else probe_quanta(self.seam)

    def geometry(self, *, page_tokens: int, segment_tokens: int) -> Geometry:
        token_quantum, key_quantum = self._quanta
        is_fast = token_quantum == 1 and self._reads_at_once
        return Geometry(
            layers=self.seam.layers,
            reads=self.seam.reads,
            states=self.seam.states if self.listed is None else self.listed.states,
            itemsize=self.seam.dtype.itemsize,
            trained_positions=self.seam.trained_positions,
            short_positions=self.seam.short_positions,
            is_endless=self.seam.is_endless,
            page_tokens=page_tokens,
            segment_tokens=segment_tokens,
            token_quantum=token_quantum,
            key_quantum=key_quantum,
            holds_restored=False,
            is_split=not self._is_whole,
            segments_at_once=_SEGMENTS_AT_ONCE if is_fast else 1,
            segments_in_a_chunk=_SEGMENTS_IN_A_CHUNK if is_fast else SEGMENTS_IN_A_CHUNK,
        )

    @property
    def _reads_at_once(self) -> bool:
        """Does a fused operation attend to many tokens and entries, without memory for all of their scores?"""
        return self.device.type != "cpu" and self.seam.dtype.itemsize == 2 and not self.seam.has_softcap

    def free_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return free_host_bytes()

    @cached_property
    def _busy_tokens(self) -> int:
        """With so many tokens a GPU computes a step for longer than the host launches it."""
        model = self.seam.model
        products: int = 2 * sum(parameter.numel() for parameter in model.parameters())
        config = model.config.get_text_config()
        experts, chosen = (getattr(config, name, None) for name in ("num_experts", "num_experts_per_tok"))
        if isinstance(experts, int) and isinstance(chosen, int) and 0 < chosen <= experts:
            of_experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
            products -= 2 * of_experts * (experts - chosen) // experts
        quantised = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
        products += 2 * sum(layer.out_features * layer.in_features for layer in quantised)
        return math.ceil(len(self.seam.reads) * _LAUNCHING_SECONDS * _PRODUCTS_A_SECOND / products)

    @cached_property
    def _has_indexes(self) -> bool:
        is_able = self._ops.key_indexes is not None and self._ops.attends_together
        return is_able and can_index(self.seam, self.device)

    def open(
        self,
        geometry: Geometry,
        capacity_bytes: int,
        *,
        address_bytes: int = 0,
        tap_layers: tuple[int, ...] = (),
    ) -> KVContext:
        followers = self.followers
        mirror = None if self._is_whole else followers
        followers.open(
            page_tokens=geometry.page_tokens,
            segment_tokens=geometry.segment_tokens,
            capacity_bytes=capacity_bytes,
            address_bytes=address_bytes,
        )
        if self.device.type == "cpu":
            zeros = partial(reserve_zeros, dtype=self.seam.dtype, is_sparse=address_bytes > 0)
            pool = Pool(geometry, capacity_bytes, zeros, address_bytes=address_bytes, discard=discard, mirror=mirror)
        else:
            make = partial(torch.zeros, dtype=self.seam.dtype, device=self.device)
            pool = Pool(geometry, capacity_bytes, make, mirror=mirror)
        most_queries: int | None = None
        busy: int | None = None
        compute: Compute = compute_plainly
        if self.records_graphs and self._ops.attends_together and geometry.token_quantum == 1:
            self._graphs[pool] = StepGraphs(
                self.seam,
                geometry,
                pool,
                self._ops.attend_ragged,
                tap_layers=tap_layers,
                memory=self._memory,
                listed=self.listed,
                ends=self._ops.step_ends,
                followers=followers,
                has_long_reads=self._ops.long_reads is not None and self._is_whole,
                attend_chunks=self._ops.attend_chunks,
            )
            most_queries, busy = SIZES[-1], max(SIZES[-1] + 1, self._busy_tokens)
            segment = geometry.segment_tokens
            # Beyond one segment, padding to the next size adds fewer entries than are wanted.
            compute = RecordedCompute((segment, 2 * segment, SEGMENTS_IN_A_CHUNK * segment), self._memory)
        own_coder = TorchCoder(self.seam, self._ops.latents, self.device)
        coder: Coder = own_coder if self._ops.attends_together else NoCoder()
        context = KVContext(
            geometry=geometry,
            pool=pool,
            rotate=self.seam.rotate,
            device=self.device,
            ops=self._ops,
            compute=compute,
            coder=coder,
            settle=settle_nothing if self.listed is None else self.listed.settle,
            most_tokens_at_once=most_queries,
            busy_tokens=busy,
        )
        if not self._is_whole:
            # Forks that read in the memory of several sessions do so by views, which are no numbers.
            return replace(context, coder=NoCoder(), most_pieces=1)
        if not self._has_indexes:
            return context
        assert self._ops.key_indexes is not None
        indexes = DeviceIndexes(
            self.seam,
            self._ops.key_indexes,
            self.device,
            own_coder,
            trained_positions=geometry.trained_positions,
        )
        return replace(context, open_index=indexes.open, open_tiles=indexes.open_tiles)

    @property
    def launcher(self) -> TorchForward:
        return self

    def run(self, step: Step) -> Result:
        result = self._compute(step)
        step.on_computed()
        if not step.draws:
            return result
        with torch.inference_mode():
            samples = draw_all(result.logits, step.draws, self._ops.noise_of_all)
        return replace(result, samples=samples)

    def can_launch(self, step: Step) -> bool:
        """On a GPU only recorded steps: launching the others takes the host as long as the device."""
        graphs = self._graphs.get(step.plan.pool)
        if graphs is not None:
            return graphs.can_run(step)
        return self.device.type == "cpu" and step.plan.is_numbers_only

    def launch(self, step: Step, fed: Tensor | None = None) -> _Launched:
        graphs = self._graphs.get(step.plan.pool)
        draws = step.draws if isinstance(step.draws, Draws) else Draws(step.draws)
        is_of_each = len(draws) == len(step.logit_queries)
        is_plain = is_of_each and draws.are_largest
        has_masks = not is_plain and draws.have_masks
        if graphs is not None and is_of_each and not has_masks:  # which can run it, as `can_launch` said
            rows = self._keyed(draws, self.facts.vocab_size) if self._is_whole and not is_plain else None
            if is_plain or rows is not None:
                return self._launch_drawn(step, draws, rows, graphs, fed)
        result = self._compute(step, fed)
        step.on_computed()

        def draw() -> Drawing:
            with torch.inference_mode():
                rows = self._keyed(draws, result.logits.shape[1]) if has_masks and is_of_each else None
                if rows is not None:
                    return self._draw_allowed(result.logits, draws, rows)
                drawing = start_drawing(result.logits, draws, self._ops.noise_of_all)
                drawing.send()
            return drawing

        return _Launched(result, draw, waits=has_masks)

    def _keyed(self, draws: Draws, vocab: int) -> KeyedRows | None:
        # Whether all draws of a step are keyed depends on other sessions.
        return draws.keyed(vocab, self.device, cuts=self.facts.mode is Mode.BATCHED)

    def _launch_drawn(
        self, step: Step, draws: Draws, rows: KeyedRows | None, graphs: StepGraphs, fed: Tensor | None
    ) -> _Launched:
        """Nothing but a token of each row is wanted: it is found where the recorded step leaves its logits.

        rows: None for the ids of the largest, which are found within the step.
        """
        ends, count = self._ops.step_ends, len(draws)
        with torch.inference_mode():
            if self._is_whole:
                logits, peaks, taps = graphs.run_in_place(step, fed)
            else:
                with self.followers.together():
                    logits, peaks, taps = graphs.run_in_place(step, fed)
            peaks, scores = (peaks, None) if rows is None else ends.draw(logits, peaks, rows)
            ids: list[Tensor] = []
            landed = self._landing.take(
                4 * count, self.device, lambda host: ids.append(ends.publish(peaks, count, host, scores))
            )
        # What it does may run another recording, which writes over the peaks.
        step.on_computed()
        return _Launched(Result(peaks.largest[:0], taps), lambda: draws.drawn(ids[0], landed))

    def _draw_allowed(self, logits: Tensor, draws: Draws, rows: KeyedRows) -> Drawing:
        """Tokens that masks allow, which the device reads where the host has written them."""
        ends, count, words = self._ops.step_ends, len(draws), -(-logits.shape[1] // 32)
        ids: list[Tensor] = []

        def write(host: Tensor) -> None:
            allowed = host[4 * count :].view(torch.int32).view(count, words)
            draws.allow(allowed.numpy().view(np.uint8))
            peaks, scores = ends.peaks(logits, allowed), None
            if not draws.are_largest_allowed:
                peaks, scores = ends.draw(logits, peaks, rows, allowed)
            ids.append(ends.publish(peaks, count, host[: 4 * count], scores))

        landed = self._landing.take(4 * count, self.device, write, read=count * words)
        return draws.drawn(ids[0], landed)

    def _run_with_others(self, step: Step, fed: Tensor | None = None) -> Result:
        with self.followers.together():
            return self._run_here(step, fed)

    def _run_here(self, step: Step, fed: Tensor | None = None) -> Result:
        graphs = self._graphs.get(step.plan.pool)
        if graphs is not None and graphs.can_run(step):
            return graphs.run(step, fed)
        plan = step.plan
        kept_queries = np.asarray(step.logit_queries, dtype=np.int64)
        # One copy for all three.
        parts, count = (step.token_ids, plan.rotary_positions, kept_queries), len(step.token_ids)
        if not self._is_whole:
            views = () if plan.is_numbers_only else tuple(CausalSpan.of(span) for span in plan.spans)
            shape = StepShape(
                tokens=count,
                kept=len(kept_queries),
                has_chunks=plan.has_chunks,
                reads=plan.tables.reads,
                views=views,
            )
            self.followers.compute(shape, (*parts[1:], plan.numbers.all))
        numbers = on_device(np.concatenate(parts, dtype=np.int64), self.device)
        ids, positions, kept = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        ids = ids if fed is None else fed
        with torch.inference_mode(), self.seam.attending(plan, plan.positions):
            if self.listed is not None:
                by = plan.tables if plan.is_numbers_only else plan
                logits, taps = self.listed.run(ids, positions, kept, by, step.tap_layers)
                return Result(self.followers.group.gather(logits), taps)
            with self.seam.tapped(step.tap_layers) as states:
                out = self.seam.model(
                    input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept
                )
            return Result(out.logits[0].float(), torch.stack(states, dim=2)[0] if states else None)

    # -- as a rank beside the first one --------------------------------------------------------------------------------

    def replay(self, context: KVContext, kind: RecordedKind, numbers: Numbers, *, collects: bool) -> None:
        """Run a recorded step, of which the first rank alone knows the ids. collects: are its logits wanted there?"""
        self._graphs[context.pool].replay(kind, numbers, collects=collects)

    def compute(self, context: KVContext, shape: StepShape, numbers: Numbers) -> None:
        """The same of a step that is not recorded: its positions, the tokens whose logits are computed, its tables."""
        listed, tokens, end = self.listed, shape.tokens, shape.tokens + shape.kept
        assert listed is not None, "ranks run lists"
        found = on_device(numbers, self.device)
        tables = StepTables.over(
            found[end:],
            context.geometry,
            context.pool,
            self._ops.attend_ragged,
            tokens=tokens,
            reads=shape.reads,
            has_chunks=shape.has_chunks,
        )
        own = numbers[:tokens]
        plan = CausalPlan(tables, shape.views, self._ops.attend_causal) if shape.views else tables
        with torch.inference_mode(), self.seam.attending(plan, np.where(own < 0, ~own, own)):
            ids, positions, kept = torch.zeros_like(found[:tokens]), found[:tokens], found[tokens:end]
            self.followers.group.gather(listed.run(ids, positions, kept, plan, ())[0])
