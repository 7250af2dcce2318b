"""Decoders of archived tokens as the native library reads them (`native/src/restoring.h`)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import BackendError
from inference_engine.kv.context import ArchivedCodes, GroupAnalyser, LayerDecoder
from inference_engine.native.library import (
    Codes,
    Format,
    NativeLayerDecoder,
    NativeMatrix,
    PackError,
    ProductIdentity,
    Source,
    Turning,
    load,
)

Floats = NDArray[np.float32]
_WORD = 32
_LANES = 16
_READ_BEYOND, _SHORTS_READ_BEYOND = 32, 64  # levels: a table may be read as a vector or two
# Whole numbers of a decoder: so large at most, and so many products are added before they become a float. Their sum
# fits into 32 bits.
_MOST_LEVEL, _MOST_NUMBER, _WHOLE_BLOCK = 8191, 8191, 32
_LINE = 64  # bytes
# Levels of more bits lie closer to each other than whole numbers of their table may be apart.
_MOST_BITS = 10
_FINE = 256  # positions of a table of small angles, and the distance of those in one of large angles


@dataclass(frozen=True, slots=True, eq=False)
class RotationTables:
    """A rotation's cosines and sines, from which those of every position follow. fine, coarse: float32 [n, turned]."""

    fine: Floats
    coarse: Floats

    @staticmethod
    def of(frequencies: Floats, positions: int) -> RotationTables:
        """For positions below `positions`."""
        angles = frequencies.astype(np.float64)
        fine, coarse = np.arange(_FINE)[:, None] * angles, np.arange(-(-positions // _FINE))[:, None] * _FINE * angles
        tables = (np.concatenate([np.cos(turns), np.sin(turns)], axis=1) for turns in (fine, coarse))
        return RotationTables(*(table.astype(np.float32) for table in tables))

    @property
    def structure(self) -> Turning:
        return Turning(fine=self.fine.ctypes.data, coarse=self.coarse.ctypes.data, turned=self.fine.shape[1])


def native_codes(codes: ArchivedCodes) -> Codes:
    low, high = codes.halves
    return Codes(low=low.data_ptr(), high=high.data_ptr(), half=low.shape[1], first=codes.first)


@dataclass(frozen=True, slots=True, eq=False)
class CodedProduct:
    """What a decoder's codes stand for, and are multiplied with.

    levels: as many more of them can be read as the library asks. tables: where the levels of each code begin. Of the
    others there is one: matrices, by head, and what they point to; whole, a matrix of whole numbers as restoring.h has
    it, [Hkv, tiles, blocks, bytes].
    """

    levels: NDArray[np.generic]
    tables: NDArray[np.int32]
    matrices: ctypes.Array[NativeMatrix] | None = None
    packed: tuple[NDArray[np.uint8], ...] = ()
    whole: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NativeDecoder:
    """A `LayerDecoder` as the library reads it, with the arrays that it points to."""

    structure: NativeLayerDecoder
    product: CodedProduct
    arrays: tuple[object, ...]


_decoders: WeakKeyDictionary[LayerDecoder, dict[ProductIdentity, NativeDecoder]] = WeakKeyDictionary()


def native_decoder(decoder: LayerDecoder, identity: ProductIdentity) -> NativeDecoder:
    """Made once, for all sessions. identity: of the model; products are as exact as its own."""
    made = _decoders.setdefault(decoder, {})
    if identity not in made:
        made[identity] = _native_decoder(decoder, identity)
    return made[identity]


@dataclass(frozen=True, slots=True, eq=False)
class NativeAnalyser:
    """A `GroupAnalyser` as the library multiplies: of each layer a matrix [C, 2 · Hkv · D] and the means [2 · Hkv · D].

    Inputs are ordered head by head, K and V of each. arrays: what the matrices point to.
    """

    layers: tuple[tuple[NativeMatrix, Tensor], ...]
    arrays: tuple[object, ...]


_analysers: WeakKeyDictionary[GroupAnalyser, dict[ProductIdentity, NativeAnalyser]] = WeakKeyDictionary()


def native_analyser(analyser: GroupAnalyser, identity: ProductIdentity) -> NativeAnalyser:
    """Made once, for all sessions. identity: of the model; products are as exact as its own."""
    made = _analysers.setdefault(analyser, {})
    if identity not in made:
        made[identity] = _native_analyser(analyser, identity)
    return made[identity]


def _native_analyser(analyser: GroupAnalyser, identity: ProductIdentity) -> NativeAnalyser:
    layers, arrays = [], []
    for index, means in enumerate(analyser.means):
        matrix = analyser.make_matrix(index).cpu().flatten(0, 1).T.contiguous().numpy()
        # A number that lies between two codes would get the other one.
        packed, tiles = _packed(matrix, Format.INT8 if identity is ProductIdentity.QUANTISED else Format.FLOAT32)
        layers.append((packed, means.cpu().float().flatten().contiguous()))
        arrays.append(tiles)
    return NativeAnalyser(tuple(layers), tuple(arrays))


def _packed(matrix: Floats, kind: Format) -> tuple[NativeMatrix, NDArray[np.uint8]]:
    """A matrix [outputs, inputs] as the library has it, with its memory. Raises BackendError."""
    library = load()
    assert library is not None, "a native model has it"
    outputs, inputs = matrix.shape
    tiles = np.empty(library.packed_bytes(kind, outputs, inputs), np.uint8)
    data = np.ascontiguousarray(matrix, np.float32).view(np.uint8).reshape(-1)
    error = library.pack(kind, Source.F32, data, (outputs, inputs), None, tiles)
    if error is not PackError.PACKED:
        raise BackendError(f"the latent codec's matrix of {outputs} by {inputs} cannot be packed: {error.name}")
    return NativeMatrix(format=kind, outputs=outputs, inputs=inputs, tiles=tiles.ctypes.data), tiles


def _in_format(decoder: LayerDecoder, kind: Format) -> CodedProduct:
    """Of floats of 16 bits, which lose next to nothing. Or of bytes, as is what they are multiplied with: that loses a
    ten-thousandth of the squared deviations of entries; a latent loses hundredths."""
    packed = [_packed(own, kind) for own in decoder.make_matrix().cpu().numpy()]
    matrices = (NativeMatrix * len(packed))(*(matrix for matrix, _ in packed))
    levels = np.pad(decoder.levels.cpu().numpy().astype(np.float32), (0, _READ_BEYOND))
    tables = decoder.tables.cpu().numpy().astype(np.int32)
    return CodedProduct(levels, tables, matrices=matrices, packed=tuple(tiles for _, tiles in packed))


def _of_whole_numbers(decoder: LayerDecoder) -> CodedProduct:
    """Levels and matrix as whole numbers of 16 bits, which lose less than a hundredth of what codes do (restoring.h).

    Raises BackendError for what is not finite.
    """
    given, starts = decoder.levels.cpu().numpy().astype(np.float32), decoder.tables.tolist()
    if not np.isfinite(given).all():
        raise BackendError(f"the latent codec's {len(given)} levels have a number that is not finite")
    sizes = [2 << width for width in decoder.widths.tolist()]
    begins: dict[tuple[int, int], tuple[int, float]] = {}  # by table: where its whole numbers begin, and their unit
    levels: list[NDArray[np.int16]] = []
    end = 0
    for kind in zip(starts, sizes, strict=True):
        if kind not in begins:
            table = given[kind[0] : sum(kind)]
            unit = float(np.abs(table).max()) / _MOST_LEVEL or 1.0
            begins[kind] = end, unit
            levels.append(np.rint(table / unit).astype(np.int16))
            end += kind[1]
    found = [begins[kind] for kind in zip(starts, sizes, strict=True)]
    units = np.array([unit for _, unit in found], np.float32)
    matrix = decoder.make_matrix().cpu().numpy() * units  # [Hkv, 2 · D, C]
    if not np.isfinite(matrix).all():
        raise BackendError(f"the latent codec's matrix of {matrix.shape[1:]} has a number that is not finite")
    return CodedProduct(
        np.pad(np.concatenate(levels), (0, _SHORTS_READ_BEYOND)),
        np.array([begin for begin, _ in found], np.int32),
        whole=_whole_tiles(matrix),
    )


def _whole_tiles(matrix: Floats) -> NDArray[np.uint8]:
    """A matrix [Hkv, outputs, inputs] as restoring.h reads it: [Hkv, outputs / 16, blocks, bytes of a block]."""
    heads, outputs, inputs = matrix.shape
    padded = np.pad(matrix, ((0, 0), (0, 0), (0, -inputs % _WHOLE_BLOCK)))
    blocks = padded.reshape(heads, outputs // _LANES, _LANES, -1, _WHOLE_BLOCK)
    scales = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(_MOST_NUMBER)
    numbers = np.rint(blocks / np.where(scales > 0, scales, 1)).astype(np.int16)
    pairs = numbers.reshape(*blocks.shape[:-1], -1, 2).transpose(0, 1, 3, 4, 2, 5)  # by block: [pair, output, 2]
    tiles = _aligned((*pairs.shape[:3], pairs[0, 0, 0].nbytes + 4 * _LANES))
    tiles[..., : -4 * _LANES] = np.ascontiguousarray(pairs).view(np.uint8).reshape(*pairs.shape[:3], -1)
    tiles[..., -4 * _LANES :] = np.ascontiguousarray(scales[..., 0].swapaxes(2, 3)).view(np.uint8)
    return tiles


def _aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Memory that begins with a line of the caches: a vector that reaches into another line is read twice."""
    size = math.prod(shape)
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size].reshape(shape)


def _native_decoder(decoder: LayerDecoder, identity: ProductIdentity) -> NativeDecoder:
    widths = decoder.widths.cpu().int().contiguous()
    if identity is ProductIdentity.QUANTISED:
        product = _in_format(decoder, Format.INT8)
    elif int(widths.max()) > _MOST_BITS:
        product = _in_format(decoder, Format.FLOAT16)
    else:
        product = _of_whole_numbers(decoder)
    begins = (widths.cumsum(0) - widths).int()
    octets, lefts, rights = begins // 8, begins % 8, _WORD - widths
    scales, means = decoder.scales.cpu().contiguous(), decoder.means.cpu().contiguous()
    structure = NativeLayerDecoder(
        octets=octets.data_ptr(),
        lefts=lefts.data_ptr(),
        rights=rights.data_ptr(),
        tables=product.tables.ctypes.data,
        levels=product.levels.ctypes.data,
        scales=scales.data_ptr(),
        means=means.data_ptr(),
        matrices=None if product.matrices is None else ctypes.addressof(product.matrices),
        whole=None if product.whole is None else product.whole.ctypes.data,
        count=len(widths),
        chains=decoder.chains,
        first_byte=decoder.first_byte,
        bytes=1 - (-int(widths.sum()) // 8),
        # What says that there are matrices; their format says what they are multiplied with.
        identity=ProductIdentity.QUANTISED if product.whole is None else ProductIdentity.EXACT,
    )
    return NativeDecoder(structure, product, (octets, lefts, rights, scales, means))
