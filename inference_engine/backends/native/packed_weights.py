"""The weights of a program, packed into tiles for the kernels.

They keep the numbers of their file: blocks of a GGUF file are re-arranged, not quantised again. What is asked to be
quantised (`weights`) is quantised here, 32 inputs to a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_engine.backends.native.tile_memory import TileMemory
from inference_engine.errors import BackendError, ModelError, NotNative
from inference_engine.models.checkpoint import unpacked
from inference_engine.models.encodings import BY_NAME
from inference_engine.models.mapped import let_go
from inference_engine.native.library import Format, Library, NativeMatrix, PackError, Source

_LANES = 16
_NO_TILES: NDArray[np.uint8] = np.zeros(0, np.uint8)
_PACKED_AT_ONCE = 2**20  # numbers
_WHY = {
    PackError.NO_SUCH_FORMAT: "{name} is stored as {encoding}, which cannot be packed as {wanted}",
    PackError.BROKEN_BLOCKS: "{name} is stored as {encoding}, and its rows are not whole blocks of that",
    PackError.TOO_LARGE: "{name} has numbers that {wanted} cannot hold or that are not finite; use backend=torch",
}
_SMALL = (
    *("mlp.gate.weight", "mixer.gate.weight", "router.proj.weight", "shared_expert_gate.weight"),
    *(f"linear_attn.{name}.weight" for name in ("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj")),
)
WEIGHTS: Mapping[str, Format | None] = {
    "auto": None,
    "float32": Format.FLOAT32,
    "bfloat16": Format.BFLOAT16,
    "int8": Format.INT8,
    "int4": Format.INT4,
}


class SourceTensor(Protocol):
    """A tensor of a checkpoint (`models/checkpoint.py`): its numbers in the encoding of the file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def encoding(self) -> str: ...

    @property
    def data(self) -> NDArray[np.uint8]: ...

    @property
    def row_order(self) -> NDArray[np.int64] | None: ...

    @property
    def column_order(self) -> NDArray[np.int64] | None: ...

    def as_float32(self) -> NDArray[np.float32]: ...


class TensorSource(Protocol):
    """A model's tensors by transformers' names."""

    def names(self) -> Sequence[str]: ...

    def tensor(self, name: str) -> SourceTensor: ...


class _Job(NamedTuple):
    """Some rows of a matrix that are being packed."""

    name: str
    encoding: str
    wanted: Format
    result: Future[PackError]


class PackedWeights:
    """The packed matrices, each once. shared: of another program, found under their names.

    at_once: numbers that a thread packs before it takes other ones.
    """

    def __init__(
        self,
        library: Library,
        checkpoint: TensorSource,
        weights: str,
        shared: PackedWeights | None = None,
        *,
        at_once: int = _PACKED_AT_ONCE,
    ) -> None:
        self.matrices: list[NativeMatrix] = []
        self._library = library
        self.checkpoint = checkpoint
        self._weights = weights
        self._tiles: list[NDArray[np.uint8]] = []
        self._memory = TileMemory()
        self._found: dict[tuple[str, ...], int] = {}
        self._shared = shared
        self._at_once = at_once
        self._workers: Executor | None = None
        self._jobs: list[_Job] = []

    @contextmanager
    def packing(self, threads: int) -> Iterator[None]:
        """Within, matrices are added, and packed by so many threads; after it they are packed, and the checkpoint's
        file need not stay mapped. Raises BackendError or NotNative for one that cannot be packed.
        """
        with ThreadPoolExecutor(threads, thread_name_prefix="pack") as self._workers:
            yield
            for job in self._jobs:
                if (error := job.result.result()) is not PackError.PACKED:
                    self._workers.shutdown(cancel_futures=True)
                    # What was not asked for is no reason to refuse the model.
                    kind = NotNative if WEIGHTS[self._weights] is None else BackendError
                    wanted = job.wanted.name.lower()
                    raise kind(_WHY[error].format(name=job.name, encoding=job.encoding, wanted=wanted))
        self._workers, self._jobs = None, []
        del self.checkpoint

    @property
    def nbytes(self) -> int:
        return sum(tiles.nbytes for tiles in self._tiles)

    def by_format(self) -> dict[Format, int]:
        found: dict[Format, int] = {}
        for matrix, tiles in zip(self.matrices, self._tiles, strict=True):
            form = Format(matrix.format)
            found[form] = found.get(form, 0) + tiles.nbytes
        return found

    def alike(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Neighbours that are packed in the same format can be multiplied as one matrix, if they are whole tiles."""
        group: list[str] = []
        for name in names:
            if group and (self._format(group[-1]) != self._format(name) or self.rows(group[-1]) % _LANES):
                yield group
                group = []
            group.append(name)
        yield group

    def add(self, names: Sequence[str], shape: tuple[int, int]) -> int:
        """The index of these matrices, one below the other. Raises ModelError if together they have another shape."""
        if (index := self._found.get(tuple(names))) is not None:
            return index
        inputs = shape[1]
        if (matrix := self._of_another(names)) is not None:
            if (matrix.outputs, matrix.inputs) != shape:
                raise ModelError(
                    f"{', '.join(names)} of the model: shape mismatch: got [{matrix.outputs}, {matrix.inputs}], "
                    f"expected [{shape[0]}, {inputs}]"
                )
            return self._keep(names, matrix, None)
        tensors = [self.checkpoint.tensor(name) for name in names]
        wanted = self._format(names[0])
        if any(tensor.shape[1:] != (inputs,) for tensor in tensors) or (
            sum(tensor.shape[0] for tensor in tensors) != shape[0]
        ):
            raise ModelError(
                f"{', '.join(names)} have the shapes {', '.join(str(tensor.shape) for tensor in tensors)}, the "
                f"configuration asks for {shape[0]} outputs of {inputs} inputs; the weights do not fit config.json"
            )
        for name, tensor in zip(names, tensors, strict=True):
            _check_stored(name, tensor)
        assert all(tensor.shape[0] % _LANES == 0 for tensor in tensors[:-1]), "what lies above others is whole tiles"
        sizes = [self._library.packed_bytes(wanted, tensor.shape[0], inputs) for tensor in tensors]
        tiles = self._memory.take(sum(sizes))
        first = 0
        for name, tensor, size in zip(names, tensors, sizes, strict=True):
            self._pack(name, tensor, wanted, tiles[first : first + size])
            first += size
        outputs = sum(tensor.shape[0] for tensor in tensors)
        return self._keep(names, NativeMatrix(wanted, outputs, inputs, 0, tiles.ctypes.data), tiles)

    def _pack(self, name: str, tensor: SourceTensor, wanted: Format, tiles: NDArray[np.uint8]) -> None:
        """Have a matrix packed, some rows at a time: whole tiles, which lie one behind the other."""
        assert self._workers is not None, "matrices are added while they are packed"
        outputs, inputs = tensor.shape
        most = max(self._at_once // max(inputs, 1) // _LANES, 1) * _LANES
        for first in range(0, outputs, most):
            rows = slice(first, min(first + most, outputs))
            begin, end = (self._library.packed_bytes(wanted, row, inputs) for row in (rows.start, rows.stop))
            result = self._workers.submit(self._pack_rows, tensor, rows, wanted, tiles[begin:end])
            self._jobs.append(_Job(name, tensor.encoding, wanted, result))

    def _pack_rows(self, tensor: SourceTensor, rows: slice, wanted: Format, tiles: NDArray[np.uint8]) -> PackError:
        outputs, inputs = tensor.shape
        data, order = tensor.data, tensor.row_order
        if order is None:
            size = data.nbytes // outputs
            data = data[rows.start * size : rows.stop * size]
        else:
            order = order[rows]
        shape = rows.stop - rows.start, inputs
        if levels := BY_NAME[tensor.encoding].levels:
            blocks = data.reshape(outputs, -1)[order] if order is not None else data.reshape(shape[0], -1)
            pairs = pairs_of(unpacked(tensor.encoding, blocks), levels)
            error = PackError.TOO_LARGE
            if pairs is not None:
                error = self._library.pack(wanted, Source.PAIRS, pairs, shape, None, tiles)
        else:
            error = self._library.pack(wanted, Source[tensor.encoding], data, shape, order, tiles)
        let_go(data)
        return error

    def column_order(self, name: str) -> NDArray[np.int64] | None:
        """The stored column of each input; None: they are in order."""
        return None if self._of_another([name]) is not None else self.checkpoint.tensor(name).column_order

    def rows(self, name: str) -> int:
        """The outputs of a matrix. Raises ModelError for anything else."""
        if (matrix := self._of_another([name])) is not None:
            return matrix.outputs
        shape = self.checkpoint.tensor(name).shape
        if len(shape) != 2:
            raise ModelError(f"{name} has the shape {shape}, not that of a matrix; the weights do not fit config.json")
        return shape[0]

    def _keep(self, names: Sequence[str], matrix: NativeMatrix, tiles: NDArray[np.uint8] | None) -> int:
        self.matrices.append(matrix)
        self._tiles.append(_NO_TILES if tiles is None else tiles)
        self._found[tuple(names)] = len(self.matrices) - 1
        return self._found[tuple(names)]

    def _of_another(self, names: Sequence[str]) -> NativeMatrix | None:
        """The matrix of another program that has all these names, one below the other."""
        if self._shared is None or (index := self._shared._found.get(tuple(names))) is None:
            return None
        return self._shared.matrices[index]

    def _format(self, name: str) -> Format:
        if (matrix := self._of_another([name])) is not None:
            return Format(matrix.format)
        return packed_format(name, self.checkpoint.tensor(name), self._weights)


def pairs_of(numbers: NDArray[np.float32], levels: Sequence[int]) -> NDArray[np.uint8] | None:
    """Exactly these numbers [rows, inputs] as whole ones and a scale for every 16: the bytes of Source.PAIRS.

    levels: the magnitudes that whole numbers may have. None if the numbers are no such multiples, or not finite.
    """
    groups = numbers.reshape(-1, _LANES)
    most = np.abs(groups).max(axis=1)
    scales, codes = np.zeros_like(most), np.zeros(groups.shape, np.int8)
    left = np.flatnonzero(most != 0)
    with np.errstate(all="ignore"):
        for level in levels:
            own, tried = groups[left], most[left, None] / np.float32(level)
            whole = np.rint(own / tried)
            fits = (whole * tried == own).all(axis=1)
            scales[left[fits]], codes[left[fits]] = tried[fits, 0], whole[fits]
            left = left[~fits]
    if len(left):
        return None
    blocks = np.empty((len(groups) // 2, 2 * (scales.itemsize + _LANES)), np.uint8)
    blocks[:, : 2 * scales.itemsize] = scales.view(np.uint8).reshape(len(blocks), -1)
    blocks[:, 2 * scales.itemsize :] = codes.view(np.uint8).reshape(len(blocks), -1)
    return blocks


def _check_stored(name: str, tensor: SourceTensor) -> None:
    """Raise ModelError unless every number that is read lies within the tensor's own bytes."""
    rows, inputs = tensor.shape
    stored = BY_NAME[tensor.encoding]
    if inputs % stored.numbers or tensor.data.nbytes != rows * stored.bytes_of(inputs):
        raise ModelError(
            f"{name}: {tensor.data.nbytes} bytes cannot hold {tensor.shape} numbers of {tensor.encoding}; copy the "
            "file again"
        )
    order = tensor.row_order
    if order is not None and not (
        order.dtype == np.int64 and order.flags.c_contiguous and np.array_equal(np.sort(order), np.arange(rows))
    ):
        raise ModelError(f"{name}: its rows are not named by the numbers 0 to {rows - 1}")


def packed_format(name: str, tensor: SourceTensor, weights: str) -> Format:
    """The format that `weights` asks for: `auto` keeps the numbers of the file. Raises BackendError."""
    wanted = WEIGHTS[weights]
    if (stored := BY_NAME.get(tensor.encoding)) is None:
        raise NotNative(f"{name} is stored as {tensor.encoding}, which is not one of {', '.join(BY_NAME)}")
    if wanted is None:
        return Format[stored.tile]
    if not stored.is_float:
        raise BackendError(
            f"weights={weights} is for files of floating-point numbers; {name} is stored as {tensor.encoding}. "
            "Start with weights=auto, which keeps the numbers of the file"
        )
    # Routers are tiny and choose, and so is what says how long a state remembers; embeddings and heads lose most in
    # four bits.
    if name.endswith(_SMALL):
        return Format[stored.tile]
    if wanted is Format.INT4 and ("embed_tokens" in name or "lm_head" in name):
        return Format.INT8
    return wanted
