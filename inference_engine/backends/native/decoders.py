"""Decoders of archived tokens as the native library reads them (`native/src/restoring.h`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.errors import BackendError
from inference_engine.kv.context import ArchivedCodes, GroupAnalyser, LayerDecoder
from inference_engine.native.library import Codes, Format, Identity, Matrix, PackError, Source, Turning, load
from inference_engine.native.library import LayerDecoder as NativeLayerDecoder

Floats = NDArray[np.float32]
_WORD = 32
_READ_BEYOND = 32  # levels: a table may be read as a vector or two
_FINE = 256  # positions of a table of small angles, and the distance of those in one of large angles


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """A rotation's cosines and sines, from which those of every position follow. fine, coarse: float32 [n, turned]."""

    fine: Floats
    coarse: Floats

    @staticmethod
    def of(frequencies: Floats, positions: int) -> Turns:
        """For positions below `positions`."""
        angles = frequencies.astype(np.float64)
        fine, coarse = np.arange(_FINE)[:, None] * angles, np.arange(-(-positions // _FINE))[:, None] * _FINE * angles
        tables = (np.concatenate([np.cos(turns), np.sin(turns)], axis=1) for turns in (fine, coarse))
        return Turns(*(table.astype(np.float32) for table in tables))

    @property
    def structure(self) -> Turning:
        return Turning(fine=self.fine.ctypes.data, coarse=self.coarse.ctypes.data, turned=self.fine.shape[1])


def native_codes(codes: ArchivedCodes) -> Codes:
    low, high = codes.halves
    return Codes(low=low.data_ptr(), high=high.data_ptr(), half=low.shape[1], first=codes.first)


@dataclass(frozen=True, slots=True, eq=False)
class NativeDecoder:
    """A `LayerDecoder` as the library reads it, with the arrays that it points to."""

    structure: NativeLayerDecoder
    arrays: tuple[object, ...]


_decoders: WeakKeyDictionary[LayerDecoder, dict[Identity, NativeDecoder]] = WeakKeyDictionary()


def native_decoder(decoder: LayerDecoder, identity: Identity) -> NativeDecoder:
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

    layers: tuple[tuple[Matrix, Tensor], ...]
    arrays: tuple[object, ...]


_analysers: WeakKeyDictionary[GroupAnalyser, dict[Identity, NativeAnalyser]] = WeakKeyDictionary()


def native_analyser(analyser: GroupAnalyser, identity: Identity) -> NativeAnalyser:
    """Made once, for all sessions. identity: of the model; products are as exact as its own."""
    made = _analysers.setdefault(analyser, {})
    if identity not in made:
        made[identity] = _native_analyser(analyser, identity)
    return made[identity]


def _native_analyser(analyser: GroupAnalyser, identity: Identity) -> NativeAnalyser:
    layers, arrays = [], []
    for index, means in enumerate(analyser.means):
        matrix = analyser.make_matrix(index).cpu().flatten(0, 1).T.contiguous().numpy()
        # A number that lies between two codes would get the other one.
        packed, tiles = _packed(matrix, Format.INT8 if identity is Identity.QUANTISED else Format.FLOAT32)
        layers.append((packed, means.cpu().float().flatten().contiguous()))
        arrays.append(tiles)
    return NativeAnalyser(tuple(layers), tuple(arrays))


def _packed(matrix: Floats, kind: Format) -> tuple[Matrix, NDArray[np.uint8]]:
    """A matrix [outputs, inputs] as the library has it, with its memory. Raises BackendError."""
    library = load()
    assert library is not None, "a native model has it"
    outputs, inputs = matrix.shape
    tiles = np.empty(library.packed_bytes(kind, outputs, inputs), np.uint8)
    data = np.ascontiguousarray(matrix, np.float32).view(np.uint8).reshape(-1)
    error = library.pack(kind, Source.F32, data, (outputs, inputs), None, tiles)
    if error is not PackError.PACKED:
        raise BackendError(f"the latent codec's matrix of {outputs} by {inputs} cannot be packed: {error.name}")
    return Matrix(format=kind, outputs=outputs, inputs=inputs, tiles=tiles.ctypes.data), tiles


def _native_decoder(decoder: LayerDecoder, identity: Identity) -> NativeDecoder:
    # In 16 bits a matrix loses next to nothing. In bytes, what it is multiplied with, too, a ten-thousandth of the
    # squared deviations of entries is lost; a latent loses hundredths.
    kind = Format.INT8 if identity is Identity.QUANTISED else Format.FLOAT16
    packed = [_packed(own, kind) for own in decoder.make_matrix().cpu().numpy()]
    matrices = (Matrix * len(packed))(*(matrix for matrix, _ in packed))
    tiles = [own for _, own in packed]
    widths = decoder.widths.cpu().int().contiguous()
    begins = (widths.cumsum(0) - widths).int()
    octets, lefts, rights = begins // 8, begins % 8, _WORD - widths
    tables, levels, scales, means = (
        states.cpu().contiguous() for states in (decoder.tables.int(), decoder.levels, decoder.scales, decoder.means)
    )
    levels = F.pad(levels, (0, _READ_BEYOND))
    structure = NativeLayerDecoder(
        octets=octets.data_ptr(),
        lefts=lefts.data_ptr(),
        rights=rights.data_ptr(),
        tables=tables.data_ptr(),
        levels=levels.data_ptr(),
        scales=scales.data_ptr(),
        means=means.data_ptr(),
        matrices=ctypes.addressof(matrices),
        count=len(widths),
        chains=decoder.chains,
        first_byte=decoder.first_byte,
        bytes=1 - (-int(widths.sum()) // 8),
        identity=identity,
    )
    return NativeDecoder(structure, (octets, lefts, rights, tables, levels, scales, means, matrices, tiles))
