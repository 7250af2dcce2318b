"""A model's step on a device: the family's list of operations, in kernels (`backends/fused_operations.py`).

The weights are those of the torch model, which calibration and drafters run: matrices that are multiplied together are
laid one below the other, and the model's parameters become views of them. Matrices in fewer bits are read as they are,
and so are those of experts, which transformers keeps in one tensor a layer.
What the list means is said in `models/operations.py`; that it is right for a model is tested on a small twin of it
(`backends/torch_loading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from inference_engine.backends.fused_operations import FusedAttend, FusedExperts, FusedProduct, NormStep, fuse
from inference_engine.backends.model_spec import recurrent_of, state_layers
from inference_engine.backends.ranks.causal_plan import CausalPlan
from inference_engine.backends.ranks.group import ALONE, RankGroup
from inference_engine.backends.ranks.split_list import of_rank
from inference_engine.kernels.fused import SQUARES, ExpertMatrices, Fused, LatentHeads, RopeTable, RowNorm, gated
from inference_engine.kernels.fused import mix_experts as plain_mixture
from inference_engine.kernels.quantised import Matrix, QuantisedMatrix, joined
from inference_engine.kernels.states import (
    ROOM,
    STATE_FIELDS,
    StateKernels,
    StateLayer,
    by_delta_rule,
    by_scan,
    enter_span,
)
from inference_engine.kv.geometry import ONE_ROTARY, Recurrent
from inference_engine.kv.numbers import StepTables
from inference_engine.kv.plan import StepPlan
from inference_engine.models.checkpoint import text_name
from inference_engine.models.families import step_list
from inference_engine.models.families.list_writer import HEAD
from inference_engine.models.latent_attention import ListedQueries
from inference_engine.models.mixers import original_name
from inference_engine.models.operations import (
    Add,
    AllReduce,
    Attend,
    AttendLatent,
    Convolve,
    DeltaRule,
    Embed,
    Gated,
    GatedNorm,
    Multiply,
    Norm,
    NoStepListError,
    Operation,
    OperationKernels,
    PlainStep,
    Product,
    Rotate,
    Scale,
    Select,
    SelectiveScan,
    SigmoidGate,
    Slice,
    Softcap,
    Tap,
)
from inference_engine.models.quantised_linear import QuantisedLinear
from inference_engine.models.seam import Seam

# Of the largest number: torch multiplies normed states that were rounded, and they are thousands.
_MOST_ROUNDINGS = 4.0
_MOST_RULE_TOKENS = 300  # which the reference takes one by one
_CHECKED = (1, 2, 17, 64, 300, 2048)  # numbers of tokens, which have different tiles
MOST_TURN_BYTES = 2**28
_TURNS_AT_ONCE = 2**14  # positions
# Of a layer's experts: names in a model of transformers, and those of an expert's matrices in a checkpoint.
_GATES, _UPS, _DOWNS = "gate_up_proj", "up_proj", "down_proj"
_OF_EXPERTS = ("{}.gate_proj.weight", "{}.up_proj.weight", "{}.down_proj.weight")
_MOST_CHECKED = 2**27  # numbers of a product: a check must not take the memory that a model was given


@dataclass(slots=True, kw_only=True, eq=False)
class _State(PlainStep):
    """A step on its way through the list. turns: of the rotation tables. plan: tables, if all queries read regions."""

    turns: Mapping[str, RopeTable]
    plan: StepTables | StepPlan | CausalPlan

    @property
    def tables(self) -> StepTables:
        return self.plan if isinstance(self.plan, StepTables) else self.plan.tables


class OpListExecutor:
    """Runs steps by the list."""

    def __init__(self, seam: Seam, fused: Fused, group: RankGroup = ALONE) -> None:
        """Lays out the weights of the seam's model. Raises NoStepListError, and then they are as they were.

        group: the ranks whose parts make the model, of which this is one.
        """
        self._seam = seam
        self._fused = fused
        self._group = group
        names = _parameters(seam.model)
        quantised = _quantised(seam.model)
        of_experts = _names_of_experts(names)
        buffers = {_name(name): buffer for name, buffer in seam.model.named_buffers()}
        own = {*names, *buffers, *quantised, *of_experts}
        steps = step_list(seam.model.config.get_text_config(), seam.layers, own, seam.reads)
        self.steps = of_rank(steps, group.rank, group.ranks)
        rotaries = {each.rotary for each in self.steps.operations if isinstance(each, (Rotate, AttendLatent))}
        self._pairs = {name: len(seam.rotary_frequencies(name)[0]) for name in rotaries}
        self._operations = fuse(self.steps, {name: 2 * pairs for name, pairs in self._pairs.items()})
        KERNELS.check(self._operations)
        self._tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in names.items()} | buffers
        self._joined: dict[tuple[str, ...], Tensor] = {}
        self._quantised: dict[tuple[str, ...], QuantisedMatrix] = {}
        self._rotaries = rotaries
        self._turns = {name: table for name in rotaries if (table := self._table_of(name)) is not None}
        self._check_shapes(quantised)
        self._experts = {
            operation.experts: self._matrices_of(operation)
            for operation in self._operations
            if isinstance(operation, FusedExperts)
        }
        # Weights of norms times a factor, float32.
        self._factored = {
            (each.norm, each.factor): self._tensors[each.norm.weights].float() * each.factor
            for each in self._operations
            if isinstance(each, FusedProduct) and each.norm is not None and each.factor != 1.0
        }
        self._backs = {
            each.back: torch.tensor(each.back, device=seam.model.device)
            for each in self._operations
            if isinstance(each, FusedAttend) and each.back is not None
        }
        for operation in self._operations:
            if isinstance(operation, FusedProduct):
                matrices = operation.product.matrices
                if any(name in quantised for name in matrices):
                    self._join_quantised(matrices, quantised)
                else:
                    self._join(matrices, names)
                self._join(operation.product.biases, names)
        self._latents = {each: self._latent(each) for each in self._operations if isinstance(each, AttendLatent)}
        self._layers = state_layers(self.steps)
        self._numbers = {
            operation: self._numbers_of(operation)
            for operation in self._operations
            if isinstance(operation, (Convolve, DeltaRule, SelectiveScan))
        }

    @property
    def states(self) -> tuple[Recurrent | None, ...]:
        """By layer of the model, what it keeps of the history; () if no layer does."""
        return recurrent_of(self.steps, len(self._seam.reads), is_numbered=True)

    def settle(self, states: Tensor, held: int, kept: int, staged: int) -> None:
        """`Settle` of `kv/context.py`."""
        self._state_kernels.settle(states, self._layers, held, kept, staged)

    @property
    def _state_kernels(self) -> StateKernels:
        assert self._fused.states is not None, "a list is refused without them"
        return self._fused.states

    @torch.inference_mode()
    def check(self) -> None:
        """Try a product of each shape on the model's own weights. Raises NoStepListError if one is not as torch's is.

        The twin that a list is tested on is small and in float32: it has other tiles.
        """
        seen: set[tuple[object, ...]] = set()
        for operation in self._operations:
            if isinstance(operation, FusedExperts):
                self._check_experts(operation, seen)
            if isinstance(operation, (DeltaRule, SelectiveScan)):
                self._check_rule(operation, seen)
            if not isinstance(operation, FusedProduct):
                continue
            product, matrix = operation.product, self._matrix(operation.product)
            options = (operation.norm is None, not product.biases, operation.adds, operation.activation)
            if (tuple(matrix.shape), *options) in seen:
                continue
            seen.add((tuple(matrix.shape), *options))
            for count in (count for count in _CHECKED if count * len(matrix) <= _MOST_CHECKED):
                self._refuse_if_far(self._difference(operation, matrix, count), product.matrices, count)

    def _refuse_if_far(self, difference: float, names: Sequence[str], count: int, least: float = 1e-5) -> None:
        if not difference <= max(_MOST_ROUNDINGS * torch.finfo(self._seam.dtype).eps, least):
            raise NoStepListError(
                f"{', '.join(names)}: products of {count} tokens differ by {difference:.3g} of the largest number from "
                "torch's"
            )

    def _check_experts(self, operation: FusedExperts, seen: set[tuple[object, ...]]) -> None:
        """As `check`. The order of adding must not decide which experts are compared.

        So the router gives inputs as they are. Of more than a few tokens they are not normed: some would be rounded up
        here and down there.
        """
        own = self._experts[operation.experts]
        count, _, inputs = own.gates.shape
        experts = replace(own, router=torch.eye(count, inputs, dtype=own.gates.dtype, device=own.gates.device))
        key = (tuple(own.gates.shape), own.chosen, operation.adds)
        if key in seen:
            return
        seen.add(key)
        generator = torch.Generator().manual_seed(0)
        widest = own.chosen * max(own.gates.shape[1:])
        for count in (count for count in _CHECKED if count * widest <= _MOST_CHECKED):
            states = torch.randn(count, own.gates.shape[2], generator=generator).to(own.gates.device, own.gates.dtype)
            norm = self._norm(operation.norm) if operation.norm is not None and count <= 2 else None
            # First without: what the mixture is added to is larger, and would hide what is wrong with it.
            for residual in (None, states.flip(1)) if operation.adds else (None,):
                expected = plain_mixture(states, experts, norm=norm, residual=residual).float()
                found = self._fused.mix_experts(states, experts, norm=norm, residual=residual).float()
                difference = float((found - expected).abs().max() / expected.abs().max())
                self._refuse_if_far(difference, operation.experts.matrices[0], count)

    def _check_rule(self, operation: DeltaRule | SelectiveScan, seen: set[tuple[object, ...]]) -> None:
        """As `check`: of a session's first tokens, in steps of them all."""
        layer, device = replace(self._layers[operation.state], offset=0), self._seam.model.device
        key = (type(operation), *layer.sizes)
        if key in seen:
            return
        seen.add(key)
        generator = torch.Generator().manual_seed(0)
        numbers = self.steps.states[operation.state].numbers(ROOM)
        for count in (count for count in _CHECKED if count <= _MOST_RULE_TOKENS):
            sizes = (layer.channels, self.steps.widths[operation.gate])
            inputs, gates = (
                torch.randn(count, size, generator=generator).to(device, self._seam.dtype) for size in sizes
            )
            memory = torch.zeros(2, numbers, dtype=torch.float32, device=device)
            table: NDArray[np.int64] = np.zeros((count, STATE_FIELDS), np.int64)
            after = 0 if count <= ROOM else memory[1].data_ptr()
            enter_span(table, 0, 1, slice(0, count), 0, memory[0].data_ptr(), after)
            found = self._rule_of(operation, inputs, gates, torch.from_numpy(table).to(device), layer)
            expected = self._expected_rule(operation, inputs.float(), gates.float(), layer)
            difference = float((found.float() - expected).abs().max() / expected.abs().max())
            # A token's sum is of all before it, in another order.
            self._refuse_if_far(difference, (operation.decay,), count, least=1e-4)

    def _expected_rule(
        self, operation: DeltaRule | SelectiveScan, inputs: Tensor, gates: Tensor, layer: StateLayer
    ) -> Tensor:
        rates, bias, skips = self._numbers[operation]
        if isinstance(operation, DeltaRule):
            return by_delta_rule(inputs, gates, layer, rates=rates, bias=bias, doubles=operation.doubles)
        return by_scan(inputs, gates, layer, rates=rates, bias=bias, skips=skips, least=operation.least)

    def _difference(self, operation: FusedProduct, matrix: Matrix, count: int) -> float:
        """The largest, as a share of the largest number. What torch multiplies is rounded to the model's dtype."""
        product = operation.product
        bias = self._joined[product.biases] if product.biases else None
        norm = None if operation.norm is None else self._norm(operation.norm, operation.factor)
        outputs, inputs = matrix.shape
        dtype = self._seam.dtype
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(count, inputs, generator=generator).to(matrix.device, dtype)
        residual = torch.randn(count, outputs, generator=generator).to(matrix.device, dtype)
        residual_or_none = residual if operation.adds else None
        normed = states if norm is None else norm.of(states.float()).to(dtype)
        numbers = matrix.unpacked(dtype) if isinstance(matrix, QuantisedMatrix) else matrix
        expected = F.linear(normed, numbers, bias).float()
        if operation.activation is not None:
            expected = gated(expected, operation.activation)
        if operation.adds:
            expected = expected + residual.float()
        found = self._fused.product(
            states, matrix, bias=bias, norm=norm, residual=residual_or_none, activation=operation.activation
        )
        return float((found.float() - expected).abs().max() / expected.abs().max())

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        kept: Tensor,
        plan: StepTables | StepPlan | CausalPlan,
        tap_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [n, V] float32 of the tokens `kept` [n], of a rank its own; hidden states [N, layers, hidden] if there
        are tap layers.

        ids, positions: [N]. plan: tables, if all queries read regions. Within `Seam.attending`, and in inference mode.
        """
        # Made before the list begins: a kernel reads them while the one before it ends.
        turns = {name: self._turn(name, positions) for name in self._rotaries}
        state = _State(
            ids=ids,
            kept=kept,
            tap_layers=tap_layers,
            tensor=self._tensors.__getitem__,
            turn=lambda name: turns[name].halves(),
            turns=turns,
            plan=plan,
        )
        for operation in self._operations:
            KERNELS[operation](self, operation, state)
        assert state.logits is not None, "a list ends in logits"
        return state.logits, torch.stack(state.taps, dim=1) if state.taps else None

    def all_reduce(self, operation: AllReduce, state: _State) -> None:
        state.registers[operation.register] = self._group.sum(state.registers[operation.register])

    def add_norm(self, operation: NormStep, state: _State) -> None:
        residual = None if operation.residual is None else state.registers[operation.residual]
        states, norm = state.registers[operation.norm.input], self._norm(operation.norm)
        scale = None if operation.scale is None else self._tensors[operation.scale]
        state.registers[operation.output] = self._fused.norm(states, norm, residual=residual, scale=scale)

    def mix(self, operation: FusedExperts, state: _State) -> None:
        state.registers[operation.output] = self._fused.mix_experts(
            state.registers[operation.experts.input if operation.norm is None else operation.norm.input],
            self._experts[operation.experts],
            norm=None if operation.norm is None else self._norm(operation.norm),
            residual=state.registers[operation.output] if operation.adds else None,
            logits=None if operation.router is not None else state.registers[operation.experts.router],
        )

    def multiply(self, operation: FusedProduct, state: _State) -> None:
        product, output = operation.product, operation.output
        out = self._fused.product(
            state.registers[operation.norm.input if operation.norm else product.input],
            self._matrix(product),
            bias=self._joined[product.biases] if product.biases else None,
            norm=None if operation.norm is None else self._norm(operation.norm, operation.factor),
            residual=state.registers[output] if operation.adds and output is not None else None,
            activation=operation.activation,
        )
        if output is None:
            state.logits = out.float()
        elif operation.is_part:
            state.registers[output] = out.new_empty((len(out), self.steps.widths[output]))
            state.registers[output][:, : product.count].copy_(out)
        else:
            state.registers[output] = out

    def attend(self, operation: FusedAttend, state: _State) -> None:
        attend, plan = operation.attend, state.plan
        layer = self.steps.layers[attend.layer]
        heads = state.registers[attend.input]
        tables = state.tables
        buffer = tables.buffer(attend.layer)
        queries = self._fused.place_heads(
            heads,
            buffer.keys,
            buffer.values,
            tables.writes[attend.layer],
            query_heads=layer.query_heads,
            kv_heads=layer.kv_heads if isinstance(attend, Attend) else 0,
            norms=None if operation.norms is None else (self._norm(operation.norms[0]), self._norm(operation.norms[1])),
            turn=state.turns.get(operation.rotary),
            value_epsilon=operation.value_epsilon,
            values_are_keys=operation.values_are_keys,
            shared=operation.shared,
        )
        scoring: dict[str, Any] = {"scaling": attend.scaling, "softcap": attend.softcap, "head_sinks": None}
        by_head = queries.transpose(0, 1)[None]
        if isinstance(plan, StepTables):
            out = plan.read(attend.layer, by_head, **scoring)
        else:
            out = plan.attend(attend.layer, by_head, None, None, **scoring)
        if operation.back is not None:
            out = out.view(len(heads), layer.query_heads, -1).index_select(-1, self._backs[operation.back])
        state.registers[attend.output] = out.reshape(len(heads), -1)

    def attend_latent(self, operation: AttendLatent, state: _State) -> None:
        layer, plan, tables = self._latents[operation], state.plan, state.tables
        heads, latent = state.registers[operation.input], state.registers[operation.latent]
        assert not isinstance(plan, CausalPlan), "ranks have no latent attention"
        entries = tables.buffer(operation.layer).keys
        rotated = entries.shape[1] - layer.rank
        queries = self._fused.place_latent(
            heads[:, : layer.heads * (layer.own + rotated)],
            latent[:, operation.offset :],
            entries,
            tables.writes[operation.layer],
            layer,
            state.turns[operation.rotary],
        )
        own = ListedQueries(queries, layer, self._fused)
        scoring: dict[str, Any] = {"scaling": operation.scaling, "softcap": None, "head_sinks": None}
        out = plan.attend(operation.layer, queries.transpose(0, 1)[None], None, None, **scoring, own=own)
        state.registers[operation.output] = out.reshape(len(heads), -1)

    def _latent(self, operation: AttendLatent) -> LatentHeads:
        """Raises NoStepListError for a matrix of another size."""
        matrix, rank = self._tensors[operation.matrix], self.steps.layers[operation.layer].value_dim
        wanted = (operation.heads * (operation.own + operation.value), rank)
        if tuple(matrix.shape) != wanted:
            raise NoStepListError(f"{operation.matrix} has the shape {tuple(matrix.shape)}, not {wanted}")
        return LatentHeads(
            halves=matrix.view(operation.heads, -1, rank),
            own=operation.own,
            norm=RowNorm(weights=self._tensors[operation.norm], epsilon=operation.epsilon),
            pairs=operation.pairs,
            keeps_pairs=operation.keeps_pairs,
        )

    def convolve(self, operation: Convolve, state: _State) -> None:
        weights, bias = self._numbers[operation][:2]
        state.registers[operation.output] = self._state_kernels.convolve(
            state.registers[operation.input],
            state.tables.states,
            self._layers[operation.state],
            weights=weights,
            bias=bias if operation.bias is not None else None,
            activates=operation.activation == "silu",
        )

    def run_rule(self, operation: DeltaRule | SelectiveScan, state: _State) -> None:
        inputs, gates = state.registers[operation.input], state.registers[operation.gate]
        layer = self._layers[operation.state]
        state.registers[operation.output] = self._rule_of(operation, inputs, gates, state.tables.states, layer)

    def _rule_of(
        self, operation: DeltaRule | SelectiveScan, inputs: Tensor, gates: Tensor, table: Tensor, layer: StateLayer
    ) -> Tensor:
        rates, bias, skips = self._numbers[operation]
        kernels = self._state_kernels
        if isinstance(operation, DeltaRule):
            doubles = operation.doubles
            return kernels.delta_rule(inputs, gates, table, layer, rates=rates, bias=bias, doubles=doubles)
        return kernels.scan(inputs, gates, table, layer, rates=rates, bias=bias, skips=skips, least=operation.least)

    def norm_gated(self, operation: GatedNorm, state: _State) -> None:
        state.registers[operation.output] = self._fused.gated_norm(
            state.registers[operation.input],
            state.registers[operation.gate],
            self._tensors[operation.weights],
            epsilon=operation.epsilon,
            width=operation.width,
            heads=operation.heads,
            first=operation.first,
        )

    def open_gate(self, operation: SigmoidGate, state: _State) -> None:
        states, gate = state.registers[operation.input], state.registers[operation.gate]
        state.registers[operation.output] = self._fused.sigmoid_gate(states, gate)

    def _numbers_of(self, operation: Convolve | DeltaRule | SelectiveScan) -> tuple[Tensor, ...]:
        """In float32: weights [taps, C] and bias of a convolution; rates, bias and skips of a rule. Raises
        NoStepListError for tensors of other sizes, or without kernels."""
        if self._fused.states is None:
            raise NoStepListError("there are no kernels of recurrent states here")
        layer = self._layers[operation.state]
        if isinstance(operation, Convolve):
            tensors = [self._tensors[name] for name in operation.weights]
            if any(tuple(each.shape[1:]) != (1, layer.taps) for each in tensors) or (
                sum(len(each) for each in tensors) != layer.channels
            ):
                shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
                raise NoStepListError(f"{operation.weights[0]}: {shapes}, not {layer.channels} of {layer.taps} taps")
            weights = torch.cat([each.float().view(-1, layer.taps) for each in tensors]).T.contiguous()
            return weights, weights if operation.bias is None else self._tensors[operation.bias].float()
        names = operation.decay, operation.bias, getattr(operation, "skip", operation.bias)
        decay, bias, skips = (self._tensors[name].float() for name in names)
        if any(each.shape != (layer.value_heads,) for each in (decay, bias, skips)):
            raise NoStepListError(f"{', '.join(names)} are not numbers of {layer.value_heads} heads")
        return -decay.exp(), bias, skips

    def _turn(self, name: str, positions: Tensor) -> RopeTable:
        """By which tokens at `positions` [N] are rotated."""
        if name in self._turns and not self._seam.is_beyond_trained:
            is_one = self._seam.short_positions is None or name != ONE_ROTARY
            # Those of short histories lie behind the trained positions.
            rows = (
                positions
                if is_one
                else torch.where(positions < 0, self._seam.trained_positions + ~positions, positions)
            )
            return replace(self._turns[name], rows=rows)
        like = torch.empty(0, dtype=self._seam.dtype, device=positions.device)
        return _halved(*self._seam.turns(like, positions, name), self._pairs[name])

    @torch.inference_mode()
    def _table_of(self, name: str) -> RopeTable | None:
        """The turns of all trained positions, which a step would work out anew; None: they would be too large.

        Behind them lie those of short histories, where these have a table of their own.
        """
        seam = self._seam
        like = torch.empty(0, dtype=seam.dtype, device=seam.model.device)
        numbers = 2 * self._pairs[name] * seam.trained_positions
        if numbers * seam.dtype.itemsize > MOST_TURN_BYTES:
            return None
        short = seam.short_positions if name == ONE_ROTARY else None
        last = seam.trained_positions + (short or 0)
        positions = torch.arange(last, device=like.device)
        positions = torch.where(positions < seam.trained_positions, positions, ~(positions - seam.trained_positions))
        parts = [
            _halved(*seam.turns(like, positions[first:end], name), self._pairs[name])
            for first, end in pairwise([*range(0, last, _TURNS_AT_ONCE), last])
        ]
        return RopeTable(cos=torch.cat([part.cos for part in parts]), sin=torch.cat([part.sin for part in parts]))

    def _norm(self, norm: Norm, factor: float = 1.0) -> RowNorm:
        if factor != 1.0:
            return RowNorm(weights=self._factored[norm, factor], epsilon=norm.epsilon)
        return RowNorm(weights=self._tensors[norm.weights], epsilon=norm.epsilon, adds_one=norm.plus_one)

    def _matrix(self, product: Product) -> Matrix:
        found = self._quantised.get(product.matrices)
        return self._joined[product.matrices] if found is None else found

    def _matrices_of(self, operation: FusedExperts) -> ExpertMatrices:
        """Raises NoStepListError unless the tensors have the sizes that the list gives them, and the model's dtype."""
        experts, router = operation.experts, None if operation.router is None else operation.router.matrices[0]
        has_gates = len(experts.matrices[0]) == 3
        first = (_OF_EXPERTS if has_gates else _OF_EXPERTS[1:])[0].format(0)
        layer = experts.matrices[0][0].removesuffix(first)
        names = (f"{layer}{_GATES if has_gates else _UPS}", f"{layer}{_DOWNS}", *(() if router is None else (router,)))
        gates, downs, *routers = (self._tensors[name] for name in names)
        count, inputs, inner = len(experts.matrices), self.steps.widths[experts.input], downs.shape[-1]
        wanted = (count, (1 + has_gates) * inner, inputs), (count, inputs, inner), *((count, inputs) for _ in routers)
        found = tuple(tuple(each.shape) for each in (gates, downs, *routers))
        if found != wanted:
            raise NoStepListError(f"{', '.join(names)} have the shapes {found}, not {wanted}")
        if any(each.dtype != self._seam.dtype or not each.is_contiguous() for each in (gates, downs, *routers)):
            raise NoStepListError(f"{', '.join(names)} are not all {self._seam.dtype}, row by row")
        return ExpertMatrices(
            router=routers[0] if routers else None,
            gates=gates,
            downs=downs,
            routing=experts.routing,
            bias=None if experts.bias is None else self._tensors[experts.bias],
            scales=None if experts.scales is None else self._tensors[experts.scales],
            activation=experts.activation if has_gates else SQUARES,
        )

    def _check_shapes(self, quantised: Mapping[str, QuantisedLinear]) -> None:
        """Raise NoStepListError unless the matrices have the outputs and inputs of their registers."""
        widths = self.steps.widths
        for operation in self._operations:
            if isinstance(operation, FusedProduct):
                product = operation.product
                shapes = [
                    quantised[name].matrix.shape if name in quantised else tuple(self._tensors[name].shape)
                    for name in product.matrices
                ]
                outputs = self.steps.vocabulary if product.output is None else product.count or widths[product.output]
                if sum(shape[0] for shape in shapes) != outputs or any(
                    shape[1:] != (widths[product.input],) for shape in shapes
                ):
                    raise NoStepListError(
                        f"{', '.join(product.matrices)} have the shapes {', '.join(map(str, shapes))}, not together "
                        f"{outputs} outputs of {widths[product.input]} inputs"
                    )

    def _join(self, names: tuple[str, ...], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Lay tensors one below the other; the model's parameters become views."""
        if not names or names in self._joined:
            return
        own = [parameters[name] for name in names]
        if len(own) == 1:
            self._joined[names] = own[0].detach()
            return
        with torch.no_grad():
            laid = torch.cat([parameter.detach() for parameter in own])
        first = 0
        for name, parameter in zip(names, own, strict=True):
            parameter.data = laid[first : first + len(parameter)]
            self._tensors[name] = parameter.detach()
            first += len(parameter)
        self._joined[names] = laid

    def _join_quantised(self, names: tuple[str, ...], layers: Mapping[str, QuantisedLinear]) -> None:
        """As `_join`. Raises NoStepListError for matrices of several formats."""
        if names in self._quantised:
            return
        own = [layers[name] for name in names if name in layers]
        if len(own) == 1 == len(names):
            self._quantised[names] = own[0].matrix
            return
        whole = joined([layer.matrix for layer in own]) if len(own) == len(names) else None
        if whole is None:
            raise NoStepListError(f"{', '.join(names)} are multiplied together and quantised in different formats")
        first = 0
        for layer in own:
            layer.matrix = whole.rows(first, layer.out_features)
            first += layer.out_features
        self._quantised[names] = whole


KERNELS: OperationKernels[Callable[[OpListExecutor, Any, _State], None]] = OperationKernels("torch's executor of lists")
KERNELS.of(FusedProduct)(OpListExecutor.multiply)
KERNELS.of(AllReduce)(OpListExecutor.all_reduce)
KERNELS.of(NormStep)(OpListExecutor.add_norm)
KERNELS.of(FusedAttend)(OpListExecutor.attend)
KERNELS.of(FusedExperts)(OpListExecutor.mix)
KERNELS.of(AttendLatent)(OpListExecutor.attend_latent)
KERNELS.of(Convolve)(OpListExecutor.convolve)
KERNELS.of(DeltaRule, SelectiveScan)(OpListExecutor.run_rule)
KERNELS.of(GatedNorm)(OpListExecutor.norm_gated)
KERNELS.of(SigmoidGate)(OpListExecutor.open_gate)


@KERNELS.of(Slice)
def _slice(executor: OpListExecutor, operation: Slice, state: _State) -> None:
    """Behind the first, into the register of the first: a copy each."""
    states = state.registers[operation.input]
    if not operation.offset:
        width = executor.steps.widths[operation.output]
        state.registers[operation.output] = states.new_empty(len(states), width)
    out = state.registers[operation.output]
    count, heads = len(states), operation.heads
    whole = states[:, : heads * operation.width].view(count, heads, operation.width)
    own = out[:, operation.offset : operation.offset + heads * operation.count].view(count, heads, operation.count)
    own.copy_(whole[..., operation.first : operation.first + operation.count])


@KERNELS.of(Embed, Norm, Rotate, Add, Gated, Multiply, Scale, Tap, Select, Softcap)
def _plain(_: OpListExecutor, operation: Operation, state: _State) -> None:
    operation.plain(state)


def _halved(cos: Tensor, sin: Tensor, pairs: int) -> RopeTable:
    """Of cosines and sines [N, pairs or 2 · pairs] of a rotation: two numbers are turned by one angle."""
    return RopeTable(cos=cos[:, :pairs].contiguous(), sin=sin[:, :pairs].contiguous())


def _quantised(model: PreTrainedModel) -> dict[str, QuantisedLinear]:
    """The text model's layers of quantised matrices, by the names that these have in a checkpoint."""
    return {
        _name(f"{name}.weight"): module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)
    }


def _names_of_experts(parameters: Mapping[str, Tensor]) -> set[str]:
    """Those that a checkpoint has for the matrices that transformers keeps in one tensor."""
    found = set()
    for name, parameter in parameters.items():
        stem, _, kind = name.rpartition(".experts.")
        if stem and parameter.dim() == 3:
            of_one = {_GATES: _OF_EXPERTS[:2], _UPS: _OF_EXPERTS[1:2], _DOWNS: _OF_EXPERTS[2:]}.get(kind, ())
            found |= {f"{stem}.experts.{each.format(expert)}" for each in of_one for expert in range(len(parameter))}
    return found


def _name(of_model: str) -> str:
    """Of a tensor of a model, that in a checkpoint of the text model alone."""
    return text_name(original_name(of_model))


def _parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The text model's parameters, by the names of a checkpoint; a tied head is the embedding alone."""
    found = {_name(name): parameter for name, parameter in model.named_parameters()}
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and HEAD in found and head.weight is not found[HEAD]:
        raise NoStepListError("the head is not the model's own")
    return found
