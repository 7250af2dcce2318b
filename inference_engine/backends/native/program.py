"""A model's list of operations with its packed weights: what one native call runs."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.model_spec import RotaryTable
from inference_engine.backends.native.packed_weights import PackedWeights, SourceTensor, TensorSource
from inference_engine.errors import ModelError, NotNative, Overloaded
from inference_engine.kv.geometry import ONE_ROTARY, SHORT_ROTARY, OpenChunk, Recurrent, StateTensor
from inference_engine.models.operations import (
    Add,
    Arrange,
    Attend,
    AttendEarlier,
    Convolve,
    DeltaRule,
    Embed,
    Experts,
    Gated,
    GatedNorm,
    Given,
    Multiply,
    Norm,
    Operation,
    OperationKernels,
    Product,
    Rotate,
    Scale,
    Select,
    SelectiveScan,
    SigmoidGate,
    Slice,
    Softcap,
    StepList,
    Tap,
    UnitNorm,
    Write,
)
from inference_engine.native.cores import usable_cores
from inference_engine.native.library import (
    Format,
    Kind,
    KVType,
    Library,
    NativeLayer,
    NativeMatrix,
    NativeOperation,
    NativeState,
    NativeStep,
    ProductIdentity,
    Rotary,
    Routing,
    Threads,
)
from inference_engine.native.library import Kernels as NativeKernels

_LANES = 16
# Room for 8 draft tokens behind those of a chunk and one. What other chunks take: `kakeya bench open-chunk`.
OPEN_CHUNK = OpenChunk(tokens=8, room=16)
_PIECES = 16
# Their places are the numbers of types.h.
_ACTIVATIONS = ("silu", "gelu_tanh", "relu")


class Program:
    """A model that is ready to run, one step at a time. To be closed."""

    def __init__(
        self,
        library: Library,
        steps: StepList,
        checkpoint: TensorSource,
        rotaries: Mapping[str, RotaryTable],
        *,
        trained_positions: int,
        identity: ProductIdentity,
        weights: str = "auto",
        kv_type: KVType = KVType.FLOAT32,
        threads: int = 0,
        level: str = "auto",
        shares: Program | None = None,
        open_chunk: OpenChunk = OPEN_CHUNK,
    ) -> None:
        """threads: 0 means one for each core. open_chunk: of recurrent states.

        shares: a program whose matrices are used under their names, and its threads; it stays open at least as long.

        Raises BackendError for weights that cannot be packed as asked for, NotNative for those that cannot be packed at
        all, ModelError for those that do not fit the list.
        """
        KERNELS.check(steps.operations)
        self.steps = steps
        self._chunk = open_chunk
        self.kernels: NativeKernels = library.kernels(level)
        self.kv_type = kv_type
        self.library = library
        self.registers = {name: index for index, name in enumerate(steps.widths)}
        shared = None if shares is None else shares.packed
        self.packed: PackedWeights = PackedWeights(library, checkpoint, weights, shared)
        self._vectors: list[NDArray[np.float32]] = []
        # Of what tokens are rotated by; SHORT_ROTARY is part of the other.
        self.tables = {name: index for index, name in enumerate(name for name in rotaries if name != SHORT_ROTARY)}
        self.turned = {name: 2 * len(table.angles) for name, table in rotaries.items()}
        with self.packed.packing(threads or usable_cores()):
            self._operations = [one for each in steps.operations for one in KERNELS[each](self, each)]
        self.count = len(self._operations)
        self.attends = [index for index, one in enumerate(self._operations) if one.kind == Kind.ATTEND]
        # Where a step may be cut. From SELECT on its tokens are those whose logits are wanted.
        last = next((index for index, one in enumerate(self._operations) if one.kind == Kind.SELECT), 0)
        piece = last // _PIECES + 1
        self.pieces = (0, *range(piece, last, piece), self.count)
        self._shares = shares
        self.threads: Threads = library.open_threads(threads) if shares is None else shares.threads
        self.identity = identity
        self._address = self._open(rotaries, trained_positions, identity)
        self._end = weakref.finalize(self, library.close_program, self._address)
        self._end.atexit = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights, without those of another program."""
        return self.packed.nbytes + sum(vector.nbytes for vector in self._vectors)

    def formats(self) -> dict[Format, int]:
        """Bytes of the packed matrices by format."""
        return self.packed.by_format()

    def run(self, step: NativeStep, first: int = 0, end: int | None = None) -> None:
        """The operations [first, end) of a step; a run begins with operation 0. Raises Overloaded without memory."""
        with self.threads.lock:
            assert self._end.alive, "the program is closed"
            if not self.library.run(self._address, step, first, self.count if end is None else end):
                raise Overloaded(
                    f"no memory is left for a step of {step.tokens} tokens; send fewer at a time"
                ) from MemoryError()

    def settle(self, states: int, held: int, kept: int, staged: int) -> None:
        """As `Settle` of `kv/context.py`, of states at this address. Raises Overloaded without memory."""
        with self.threads.lock:
            assert self._end.alive, "the program is closed"
            if not self.library.settle(self._address, states, held, kept, staged):
                raise Overloaded("no memory is left to fold recurrent states") from MemoryError()

    def states(self, layers: int) -> tuple[Recurrent | None, ...]:
        """By layer of a model of `layers`, what it keeps of the history; () if no layer does."""
        found: dict[int, Recurrent | None] = {
            one.layer: Recurrent((StateTensor((numbers,), "float32", 4),), self._chunk)
            for one, numbers in zip(self.steps.states, self._state_numbers, strict=True)
        }
        return tuple(found.get(number) for number in range(layers)) if found else ()

    @property
    def _state_numbers(self) -> list[int]:
        return [one.numbers(self._chunk.room) for one in self.steps.states]

    def register(self, name: str, tokens: int) -> NDArray[np.float32]:
        """[tokens, width], a view that is valid until the next step."""
        assert self._end.alive, "the program is closed"
        width = self.steps.widths[name]
        return self.library.register(self._address, self.registers[name], tokens * width).reshape(tokens, width)

    def close(self) -> None:
        """End its threads and free its memory, after the step that runs. Does nothing the second time.

        A program without references is closed, too.
        """
        if not self._end.alive:
            return
        with self.threads.lock:
            self._end()
        if self._shares is None:
            self.threads.close()

    def _open(self, rotaries: Mapping[str, RotaryTable], trained: int, identity: ProductIdentity) -> int:
        operations = (NativeOperation * self.count)(*self._operations)
        matrices = (NativeMatrix * len(self.packed.matrices))(*self.packed.matrices)
        vectors = (ctypes.c_void_p * len(self._vectors))(*(vector.ctypes.data for vector in self._vectors))
        layers = (NativeLayer * len(self.steps.layers))(
            *(
                NativeLayer(
                    *(one.query_heads, one.kv_heads, one.head_dim, one.value_dim),
                    *(entry.key_at, entry.value_at, entry.shared, entry.width),
                )
                for one, entry in ((layer, layer.entry) for layer in self.steps.layers)
            )
        )
        self._frequencies = {name: table.frequencies for name, table in rotaries.items()}
        short = self._frequencies.get(SHORT_ROTARY)
        tables = (Rotary * len(self.tables))(
            *(
                Rotary(
                    self._frequencies[name].ctypes.data,
                    None if short is None or name != ONE_ROTARY else short.ctypes.data,
                    2 * len(self._frequencies[name]),
                    trained,
                    rotaries[name].factor,
                )
                for name in self.tables
            )
        )
        starts = [0, *accumulate(self._state_numbers)]
        states = (NativeState * len(self.steps.states))(
            *(
                NativeState(
                    *(one.channels, one.taps, one.key_heads, one.value_heads, one.key_dim, one.value_dim),
                    *(self._chunk.tokens, self._chunk.room, start),
                )
                for one, start in zip(self.steps.states, starts, strict=False)
            )
        )
        arrays = operations, matrices, vectors, layers, tables, states
        widths = (ctypes.c_int64 * len(self.steps.widths))(*self.steps.widths.values())
        return self.library.open_program(self.kernels, self.threads, identity, self.kv_type, *arrays, widths)

    def lowered(self, operation: Operation, kind: Kind | None = None) -> NativeOperation:
        """The structure of an operation, of all that is not weights. kind: None: the one named as its class."""
        own = Kind[re.sub("(?<=[a-z])(?=[A-Z])", "_", type(operation).__name__).upper()] if kind is None else kind
        one = NativeOperation(kind=own)
        one.input = one.second = one.output = one.matrix = one.vector = one.table = one.layer = -1
        one.number = 1.0
        for each in fields(operation):
            value = getattr(operation, each.name)
            if value is not None and (place := _PLACES.get(each.name)) is not None:
                name, convert = place
                setattr(one, name, convert(self, value))
        return one

    def products(self, operation: Product) -> Iterator[NativeOperation]:
        """One structure for each run of matrices that are stored alike; their outputs lie one behind the other."""
        inputs = self.steps.widths[operation.input]
        width = self.steps.vocabulary if operation.output is None else self.steps.widths[operation.output]
        outputs = width if operation.count is None else operation.count
        assert 0 <= operation.offset <= width - outputs, "a product writes within its register"
        yield from self._ordered(operation)
        biases = dict(zip(operation.matrices, operation.biases, strict=False))
        offset = 0
        for names in self.packed.alike(operation.matrices):
            one = self.lowered(operation)
            sizes = [self.packed.rows(name) for name in names]
            one.matrix = self.packed.add(names, (sum(sizes), inputs))
            own = [self.numbers(biases[name], size) for name, size in zip(names, sizes, strict=True) if name in biases]
            one.vector = self.vector(np.concatenate(own)) if own else -1
            one.offset = operation.offset + offset
            offset += sum(sizes)
            yield one
        if offset != outputs:
            raise ModelError(
                f"{', '.join(operation.matrices)} have {offset} outputs, the configuration asks for {outputs}; the "
                "weights do not fit config.json"
            )

    def _ordered(self, operation: Product) -> Iterator[NativeOperation]:
        """The input in the order of the matrix's columns, where that is another one: it lies so afterwards."""
        orders = [self.packed.column_order(name) for name in operation.matrices]
        if all(order is None for order in orders):
            return
        first = orders[0]
        if first is None or any(order is None or not np.array_equal(order, first) for order in orders):
            raise NotNative(f"{', '.join(operation.matrices)} have their columns in several orders")
        for later in self.steps.operations[self.steps.operations.index(operation) + 1 :]:
            if operation.input in later.reads:
                raise NotNative(f"{operation.matrices[0]} has its columns in an order that only it has")
            if later.writes == operation.input:
                break
        places = tuple(np.argsort(first).tolist())
        yield from _arrange(self, Arrange(register=operation.input, heads=1, width=len(places), order=places))

    def numbers(self, name: str, width: int) -> NDArray[np.float32]:
        """Of a norm or a bias. Raises ModelError if they are not `width`."""
        return _sized(self.packed.checkpoint.tensor(name), name, width)

    def vector(self, numbers: NDArray[np.float32]) -> int:
        """The number of a vector, padded with zeros."""
        padded = np.zeros(-(-len(numbers) // _LANES) * _LANES, np.float32)
        padded[: len(numbers)] = numbers
        self._vectors.append(padded)
        return len(self._vectors) - 1


# -- from operations to structures -------------------------------------------------------------------------------------

# Where the kernels look for the fields of operations.
_PLACES: Mapping[str, tuple[str, Callable[[Program, Any], int | float]]] = {
    **{name: (name, lambda program, name: program.registers[name]) for name in ("input", "output")},
    "register": ("input", lambda program, name: program.registers[name]),
    **{name: ("second", lambda program, name: program.registers[name]) for name in ("router", "gate", "other")},
    **{name: (name, lambda _, number: number) for name in ("layer", "heads", "width", "offset")},
    "state": ("layer", lambda _, number: number),
    **{name: ("number", lambda _, number: number) for name in ("epsilon", "factor", "scaling", "limit")},
    "softcap": ("other", lambda _, number: number),
    "activation": ("activation", lambda _, name: _ACTIVATIONS.index(name)),
    "rotary": ("table", lambda program, name: program.tables[name]),
}
Lower = Callable[[Program, Any], Iterable[NativeOperation]]
KERNELS: OperationKernels[Lower] = OperationKernels("the native backend")


@KERNELS.of(Attend, Add, Gated, Given, Multiply, Select, SigmoidGate, Softcap, Tap, Write)
def _plain(program: Program, operation: Operation) -> Iterable[NativeOperation]:
    yield program.lowered(operation)


@KERNELS.of(AttendEarlier)
def _attend_earlier(program: Program, operation: AttendEarlier) -> Iterable[NativeOperation]:
    one = program.lowered(operation, Kind.ATTEND)
    one.flag = 1
    yield one


@KERNELS.of(Scale)
def _scale(program: Program, operation: Scale) -> Iterable[NativeOperation]:
    one = program.lowered(operation)
    if operation.width is None:
        one.width = program.steps.widths[operation.register]
    if operation.tensor is not None:
        one.number *= float(program.numbers(operation.tensor, 1)[0])
    yield one


@KERNELS.of(Arrange)
def _arrange(program: Program, operation: Arrange) -> Iterable[NativeOperation]:
    one, factors = program.lowered(operation), np.ones(operation.width, np.float32)
    order = np.array(operation.order, np.int32)
    assert np.array_equal(np.sort(order), np.arange(operation.width)), "each number has one place"
    if operation.weights is not None:
        own = order[: operation.weighted]
        factors[: len(own)] = program.numbers(operation.weights, operation.width)[own]
    one.vector, one.matrix = program.vector(factors), program.vector(order.view(np.float32))
    yield one


@KERNELS.of(Product)
def _product(program: Program, operation: Product) -> Iterable[NativeOperation]:
    return program.products(operation)


@KERNELS.of(Embed)
def _embed(program: Program, operation: Embed) -> Iterable[NativeOperation]:
    one = program.lowered(operation)
    one.matrix = program.packed.add(
        [operation.matrix], (program.steps.vocabulary, program.steps.widths[operation.output])
    )
    yield one


@KERNELS.of(Norm)
def _norm(program: Program, operation: Norm) -> Iterable[NativeOperation]:
    one, weights = program.lowered(operation), program.numbers(operation.weights, operation.width)
    one.vector = program.vector(weights + np.float32(1) if operation.plus_one else weights)
    yield one


@KERNELS.of(UnitNorm)
def _unit_norm(program: Program, operation: UnitNorm) -> Iterable[NativeOperation]:
    one = program.lowered(operation, Kind.NORM)
    one.vector = program.vector(np.ones(operation.width, np.float32))
    yield one


@KERNELS.of(GatedNorm)
def _gated_norm(program: Program, operation: GatedNorm) -> Iterable[NativeOperation]:
    one = program.lowered(operation)
    width = operation.width * (operation.heads if operation.first else 1)
    one.vector, one.flag = program.vector(program.numbers(operation.weights, width)), operation.first
    yield one


@KERNELS.of(Slice)
def _slice(program: Program, operation: Slice) -> Iterable[NativeOperation]:
    one = program.lowered(operation)
    one.offset, one.layer, one.flag = operation.first, operation.offset, operation.count
    yield one


@KERNELS.of(Convolve)
def _convolve(program: Program, operation: Convolve) -> Iterable[NativeOperation]:
    one, sizes = program.lowered(operation), program.steps.states[operation.state]
    tensors = [program.packed.checkpoint.tensor(name) for name in operation.weights]
    shapes = [tensor.shape for tensor in tensors]
    if any(shape[1:] != (1, sizes.taps) for shape in shapes) or sum(shape[0] for shape in shapes) != sizes.channels:
        raise ModelError(
            f"{', '.join(operation.weights)}: shapes {', '.join(map(str, shapes))}, the configuration asks for "
            f"{sizes.channels} channels and {sizes.taps} taps; the weights do not fit config.json"
        )
    together = np.concatenate([tensor.as_float32().reshape(-1, sizes.taps) for tensor in tensors])
    by_tap = np.ascontiguousarray(together.T)
    one.vector, one.flag = program.vector(by_tap.reshape(-1)), operation.activation == "silu"
    if operation.bias is not None:
        one.matrix = program.vector(program.numbers(operation.bias, sizes.channels))
    yield one


@KERNELS.of(DeltaRule, SelectiveScan)
def _rule(program: Program, operation: DeltaRule | SelectiveScan) -> Iterable[NativeOperation]:
    one, heads = program.lowered(operation), program.steps.states[operation.state].value_heads
    one.vector = program.vector(-np.exp(program.numbers(operation.decay, heads)))
    program.vector(program.numbers(operation.bias, heads))
    if isinstance(operation, SelectiveScan):
        program.vector(program.numbers(operation.skip, heads))
        one.number = operation.least
    else:
        one.flag = operation.doubles
    yield one


@KERNELS.of(Rotate)
def _rotate(program: Program, operation: Rotate) -> Iterable[NativeOperation]:
    if (turned := program.turned[operation.rotary]) > operation.width:
        raise NotNative(f"{turned} numbers are rotated of heads that have {operation.width}")
    yield program.lowered(operation)


@KERNELS.of(Experts)
def _experts(program: Program, operation: Experts) -> Iterable[NativeOperation]:
    one, packed, hidden = program.lowered(operation), program.packed, program.steps.widths[operation.input]
    routing = operation.routing
    one.heads, one.groups, one.chosen_groups = routing.chosen, routing.groups, routing.chosen_groups
    one.flag = routing.sums_to_one * Routing.SUMS_TO_ONE | (routing.scores == "sigmoid") * Routing.SIGMOID_SCORES
    one.number = routing.factor
    if operation.bias is not None:
        one.vector = program.vector(program.numbers(operation.bias, len(operation.matrices)))
    if operation.scales is not None:
        one.table = program.vector(program.numbers(operation.scales, len(operation.matrices)))
    one.matrix = len(packed.matrices)
    together = all(len([*packed.alike(first)]) == 1 for *first, _ in operation.matrices)
    is_gated = len(operation.matrices[0]) == 3
    one.width = 2 if together else 3  # matrices of an expert
    one.flag |= (not is_gated) * Routing.WITHOUT_GATE
    for *first, down in operation.matrices:
        inner = packed.rows(first[0])
        if packed.rows(first[-1]) != inner:
            raise ModelError(f"{' and '.join(first)} differ in their outputs; the weights do not fit config.json")
        for names in (first,) if together else ([name] for name in first):
            packed.add(names, (inner * len(names), hidden))
        packed.add([down], (hidden, inner))
    yield one


def _sized(tensor: SourceTensor, name: str, width: int) -> NDArray[np.float32]:
    """The numbers of a norm or a bias. Raises ModelError if they are not `width`."""
    if tensor.shape != (width,):
        raise ModelError(
            f"{name} has the shape {tensor.shape}, the configuration asks for {width} numbers; the weights do not fit "
            "config.json"
        )
    return tensor.as_float32()
