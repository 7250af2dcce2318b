"""Root mean square norm of some tokens, and gates of them, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.fused import RowNorm
from inference_engine.kernels.triton.dependent_launch import chained


def norm_of(states: Tensor, norm: RowNorm, *, residual: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """See `NormKernel`."""
    count, inputs = states.shape
    out = torch.empty_like(states)
    block = triton.next_power_of_2(inputs)
    _norm_tokens[(count,)](
        states,
        norm.weights,
        states if residual is None else residual,
        states if scale is None else scale,
        out,
        norm.epsilon,
        INPUTS=inputs,
        ADDS_ONE=norm.adds_one,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALE=scale is not None,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8,
        **chained(states.device),
    )
    return out


def gated_norm(
    states: Tensor, gate: Tensor, weights: Tensor, *, epsilon: float, width: int, heads: int, first: bool
) -> Tensor:
    """See `GatedNormKernel`."""
    out, block = torch.empty_like(states), triton.next_power_of_2(width)
    _norm_gated[(len(states), heads)](
        states,
        gate,
        weights,
        out,
        epsilon,
        HEADS=heads,
        WIDTH=width,
        FIRST=first,
        BLOCK=block,
        num_warps=1 if block <= 256 else 4 if block <= 4096 else 8,
        **chained(states.device),
    )
    return out


def sigmoid_gate(states: Tensor, gate: Tensor) -> Tensor:
    """See `SigmoidGateKernel`."""
    count, width = states.shape
    out, block = torch.empty_like(states), min(1024, triton.next_power_of_2(width))
    _open_gates[(count, triton.cdiv(width, block))](
        states,
        gate,
        out,
        WIDTH=width,
        IS_ONE=gate.shape[1] == 1 < width,
        BLOCK=block,
        num_warps=4,
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
    p_scale,
    p_out,
    epsilon,
    INPUTS: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    o_token = tl.program_id(0).to(tl.int64) * INPUTS
    o_in = tl.arange(0, BLOCK)
    m_in = o_in < INPUTS
    # No kernel writes the weights: they are on their way while the one before ends.
    b_factor = tl.load(p_norm + o_in, mask=m_in, other=0.0).to(tl.float32)
    if ADDS_ONE:
        b_factor += 1.0
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    b_states = tl.load(p_states + o_token + o_in, mask=m_in, other=0.0).to(tl.float32)
    b_out = b_states * tl.rsqrt(tl.sum(b_states * b_states, axis=0) / INPUTS + epsilon) * b_factor
    if HAS_RESIDUAL:
        b_out += tl.load(p_residual + o_token + o_in, mask=m_in, other=0.0).to(tl.float32)
    if HAS_SCALE:
        b_out *= tl.load(p_scale).to(tl.float32)
    tl.store(p_out + o_token + o_in, b_out.to(p_out.dtype.element_ty), mask=m_in)


@triton.jit
def _norm_gated(
    p_states,
    p_gate,
    p_norm,
    p_out,
    epsilon,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    o_in = tl.arange(0, BLOCK)
    m_in = o_in < WIDTH
    o = (tl.program_id(0).to(tl.int64) * HEADS + head) * WIDTH + o_in
    b_states = tl.load(p_states + o, mask=m_in, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + o, mask=m_in, other=0.0).to(tl.float32)
    b_gate /= 1.0 + tl.exp(-b_gate)
    o_norm = o_in
    if FIRST:
        b_states *= b_gate
        o_norm += head * WIDTH
    b_factor = tl.load(p_norm + o_norm, mask=m_in, other=0.0).to(tl.float32)
    b_out = b_states * tl.rsqrt(tl.sum(b_states * b_states, axis=0) / WIDTH + epsilon) * b_factor
    if not FIRST:
        b_out *= b_gate
    tl.store(p_out + o, b_out.to(p_out.dtype.element_ty), mask=m_in)


@triton.jit
def _open_gates(
    p_states,
    p_gate,
    p_out,
    WIDTH: tl.constexpr,
    IS_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o_in = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = o_in < WIDTH
    if IS_ONE:
        b_gate = tl.load(p_gate + token).to(tl.float32)
    else:
        b_gate = tl.load(p_gate + token * WIDTH + o_in, mask=m_in, other=0.0).to(tl.float32)
    b_states = tl.load(p_states + token * WIDTH + o_in, mask=m_in, other=0.0).to(tl.float32)
    b_out = b_states / (1.0 + tl.exp(-b_gate))
    tl.store(p_out + token * WIDTH + o_in, b_out.to(p_out.dtype.element_ty), mask=m_in)
