"""Root mean square norm of some tokens, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.fused import RowNorm
from inference_engine.kernels.triton.dependent_launch import chained


def norm_of(states: Tensor, norm: RowNorm, *, residual: Tensor | None = None) -> Tensor:
    """See `Norm`."""
    count, inputs = states.shape
    out = torch.empty_like(states)
    block = triton.next_power_of_2(inputs)
    _norm_tokens[(count,)](
        states,
        norm.weights,
        states if residual is None else residual,
        out,
        norm.epsilon,
        INPUTS=inputs,
        ADDS_ONE=norm.adds_one,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
        **chained(states.device),
    )
    return out


def constants_of(norm: RowNorm | None) -> dict[str, bool]:
    """Of a kernel that norms what it multiplies."""
    return {"HAS_NORM": norm is not None, "ADDS_ONE": norm is not None and norm.adds_one}


@triton.jit
def _norm_tokens(
    p_states,
    p_norm,
    p_residual,
    p_out,
    epsilon,
    INPUTS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    o_token = tl.program_id(0).to(tl.int64) * INPUTS
    o_in = tl.arange(0, BLOCK)
    m_in = o_in < INPUTS
    b_states = tl.load(p_states + o_token + o_in, mask=m_in, other=0.0).to(tl.float32)
    b_factor = tl.load(p_norm + o_in, mask=m_in, other=0.0).to(tl.float32)
    if ADDS_ONE:
        b_factor += 1.0
    b_out = b_states * tl.rsqrt(tl.sum(b_states * b_states, axis=0) / INPUTS + epsilon) * b_factor
    if HAS_RESIDUAL:
        b_out += tl.load(p_residual + o_token + o_in, mask=m_in, other=0.0).to(tl.float32)
    tl.store(p_out + o_token + o_in, b_out.to(p_out.dtype.element_ty), mask=m_in)
