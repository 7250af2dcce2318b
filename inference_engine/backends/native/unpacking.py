"""Compressed entries, decoded by the native library straight into the regions of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kv.compressor import KVCompressor
from inference_engine.kv.context import Rotate
from inference_engine.kv.layout import Positions
from inference_engine.native.library import CodedAs, Coding, Kernels, KVType, Threads, Unpacking

_LANES = 16
_KINDS = {None: CodedAs.LEVELS, torch.float32: CodedAs.FLOAT32, torch.bfloat16: CodedAs.BFLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class NativeUnpacker:
    """Implements Unpacker. turned: by rotation table, how many numbers of a head are rotated."""

    kernels: Kernels
    threads: Threads
    kv_type: KVType
    rotate: Rotate
    turned: Mapping[str, int]

    def reads(self, compressor: KVCompressor, head_dim: int) -> bool:
        return compressor.coding is not None and head_dim % _LANES == 0

    def unpack(
        self,
        compressor: KVCompressor,
        codes: Sequence[Tensor],
        means: Sequence[Tensor],
        slots: Positions,
        regions: Sequence[Tensor],
        targets: Positions,
        *,
        shifts: Positions | None,
        rotary: str,
    ) -> None:
        heads, region, head_dim = regions[0].shape
        coding, _levels = _coding_of(compressor, head_dim)
        addresses = [
            np.array([tensor.data_ptr() for tensor in tensors], np.int64) for tensors in (codes, means, regions)
        ]
        sources, places = (np.ascontiguousarray(some, np.int64) for some in (slots, targets))
        turned = 0 if shifts is None else self.turned.get(rotary, 0)
        turns = self._turns(shifts, rotary, head_dim, turned) if shifts is not None and turned else None
        slot_bytes, head_bytes, _ = codes[0].stride()
        self.kernels.unpack(
            self.threads,
            Unpacking(
                coding=coding,
                codes=addresses[0].ctypes.data,
                means=addresses[1].ctypes.data,
                out=addresses[2].ctypes.data,
                from_slots=sources.ctypes.data,
                to_slots=places.ctypes.data,
                turns=None if turns is None else turns.data_ptr(),
                slot_bytes=slot_bytes,
                head_bytes=head_bytes,
                region_slots=region,
                count=len(slots),
                layers=len(codes),
                heads=heads,
                head_dim=head_dim,
                turned=turned,
                kv_type=self.kv_type,
            ),
        )

    def _turns(self, shifts: Positions, rotary: str, head_dim: int, turned: int) -> Tensor:
        """[n, turned], cosines and sines as the model's own rotation has them: it turns vectors of 1 and 0."""
        ones = torch.zeros((1, len(shifts), head_dim))
        ones[..., : turned // 2] = 1
        return self.rotate(ones, torch.from_numpy(shifts), rotary)[0, :, :turned].contiguous()


@lru_cache
def _coding_of(compressor: KVCompressor, head_dim: int) -> tuple[Coding, NDArray[np.float32] | None]:
    """With the array that it points to."""
    given = compressor.coding
    assert given is not None
    levels = None if given.levels is None else np.array(given.levels, np.float32)
    coding = Coding(
        kind=_KINDS[given.dtype],
        bits=given.bits,
        group=0 if given.dtype is not None else min(given.group or head_dim, head_dim),
        has_centres=given.has_centres,
        is_signed=given.is_signed,
        is_rotated=given.is_rotated,
        middle=given.middle,
        levels=None if levels is None else levels.ctypes.data,
    )
    return coding, levels
