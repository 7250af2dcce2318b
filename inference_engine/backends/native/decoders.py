"""Decoders of archived tokens as the native library reads them (`native/src/restoring.h`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from inference_engine.kernels.components import LANES
from inference_engine.kv.context import ArchivedCodes, LayerDecoder
from inference_engine.native.library import Codes, Format, Matrix
from inference_engine.native.library import LayerDecoder as NativeLayerDecoder


def native_codes(codes: ArchivedCodes) -> Codes:
    low, high = codes.halves
    return Codes(low=low.data_ptr(), high=high.data_ptr(), half=low.shape[1], first=codes.first)


@dataclass(frozen=True, slots=True, eq=False)
class NativeDecoder:
    """A `LayerDecoder` as the library reads it, with the arrays that it points to."""

    structure: NativeLayerDecoder
    arrays: tuple[object, ...]


_decoders: WeakKeyDictionary[LayerDecoder, NativeDecoder] = WeakKeyDictionary()


def native_decoder(decoder: LayerDecoder) -> NativeDecoder:
    """Made once, for all sessions. Its matrices are in 16 bits, in tiles of 16 outputs (`native/src/types.h`)."""
    found = _decoders.get(decoder)
    if found is None:
        found = _decoders[decoder] = _native_decoder(decoder)
    return found


def _native_decoder(decoder: LayerDecoder) -> NativeDecoder:
    matrix = decoder.make_matrix().cpu()
    heads, outputs, count = matrix.shape
    fits = bool(matrix.abs().max() <= torch.finfo(torch.float16).max)
    tiles = matrix.view(heads, outputs // LANES, LANES, count).mT.contiguous()
    tiles = tiles.to(torch.float16 if fits else torch.bfloat16)
    kind = Format.FLOAT16 if fits else Format.BFLOAT16
    matrices = (Matrix * heads)(
        *(Matrix(format=kind, outputs=outputs, inputs=count, tiles=own.data_ptr()) for own in tiles)
    )
    widths = decoder.widths.cpu().int().contiguous()
    begins = (widths.cumsum(0) - widths).int()
    tables, levels, scales, means = (
        states.cpu().contiguous() for states in (decoder.tables.int(), decoder.levels, decoder.scales, decoder.means)
    )
    structure = NativeLayerDecoder(
        begins=begins.data_ptr(),
        widths=widths.data_ptr(),
        tables=tables.data_ptr(),
        levels=levels.data_ptr(),
        scales=scales.data_ptr(),
        means=means.data_ptr(),
        matrices=ctypes.addressof(matrices),
        count=count,
        chains=decoder.chains,
        first_byte=decoder.first_byte,
        bytes=1 - (-int(widths.sum()) // 8),
    )
    return NativeDecoder(structure, (begins, widths, tables, levels, scales, means, matrices, tiles))
