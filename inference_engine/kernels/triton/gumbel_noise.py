"""`noise_of_all` of `kernels/gumbel_noise.py` in Triton: one launch instead of some twenty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference_engine.kernels.gumbel_noise import BITS, FACTORS, GOLDEN, SHIFTS

_BLOCK = 1024
_GOLDEN: tl.constexpr = tl.constexpr(GOLDEN)
_FACTOR_1: tl.constexpr = tl.constexpr(FACTORS[0])
_FACTOR_2: tl.constexpr = tl.constexpr(FACTORS[1])
_SHIFT_1: tl.constexpr = tl.constexpr(SHIFTS[0])
_SHIFT_2: tl.constexpr = tl.constexpr(SHIFTS[1])
_SHIFT_3: tl.constexpr = tl.constexpr(SHIFTS[2])
_UNUSED_BITS: tl.constexpr = tl.constexpr(64 - BITS)
_STEP: tl.constexpr = tl.constexpr(2.0**-BITS)


def noise_of_all(keys: Tensor, vocab: int) -> Tensor:
    """See `NoiseOfAll`."""
    out = torch.empty((len(keys), vocab), dtype=torch.float64, device=keys.device)
    _noise[(triton.cdiv(vocab, _BLOCK), len(keys))](keys, out, vocab, BLOCK=_BLOCK)
    return out


@triton.jit
def _noise(p_keys, p_out, vocab, BLOCK: tl.constexpr):
    index = tl.program_id(1).to(tl.int64)
    key = tl.load(p_keys + index).to(tl.uint64, bitcast=True)
    o_id = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + index * vocab + o_id, noise_of(key, o_id), mask=o_id < vocab)


@triton.jit
def noise_of(key, o_id):
    """Of ids, int64, and a key, uint64."""
    b_bits = _mixed(_mixed(o_id.to(tl.uint64) * _GOLDEN) ^ key)
    b_uniform = ((b_bits >> _UNUSED_BITS).to(tl.int64).to(tl.float64) + 0.5) * _STEP
    return -tl.log(-tl.log(b_uniform))


@triton.jit
def _mixed(b_bits):
    b_bits = (b_bits ^ (b_bits >> _SHIFT_1)) * _FACTOR_1
    b_bits = (b_bits ^ (b_bits >> _SHIFT_2)) * _FACTOR_2
    return b_bits ^ (b_bits >> _SHIFT_3)
