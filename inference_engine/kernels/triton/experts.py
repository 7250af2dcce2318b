"""Mixtures of experts in Triton: of few tokens, the matrices of the chosen experts are read at the memory's speed.

    one token          router · choose · gates of the chosen experts · downs, weighted and added up
    up to 64 tokens    the same, by blocks of tokens that chose one expert, which tensor cores multiply; then a sum
    more               tokens sorted by expert, and a matrix library's grouped product, if it has one for the dtype

One token's sums are made on plain units, as in `products.py`. In blocks, the order in which a token's sums are added
does not depend on which tokens are beside it: in products, in weights, and where a token's experts are added up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_engine.kernels.fused import ExpertMatrices, RowNorm, choose_experts
from inference_engine.kernels.triton.dependent_launch import chained
from inference_engine.kernels.triton.products import (
    ACTIVATIONS,
    FEW,
    Products,
    gated_sums,
    gated_tokens,
    has_two,
    has_two_of,
    rows_of,
    sums_of_one,
)
from inference_engine.kernels.triton.row_norm import constants_of, norm_of
from inference_engine.kernels.triton.tiles import (
    fitting,
    shared_bytes,
    tile_of_downs,
    tile_of_gates,
    tile_of_some,
)

_LEAST, _MOST = 16, 64  # tokens of a block
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32


class MixtureOfExperts:
    """The mixtures of one user. is_invariant: as of `Products`."""

    def __init__(self, products: Products, *, is_invariant: bool = False) -> None:
        self._products = products
        self._is_invariant = is_invariant

    def __call__(
        self,
        states: Tensor,
        experts: ExpertMatrices,
        *,
        norm: RowNorm | None = None,
        residual: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """See `MixExperts`. Routers other than a softmax of all choose by operations of torch."""
        is_one = len(states) == 1 and not self._is_invariant
        chooses = experts.routing.is_softmax_alone and experts.bias is None
        normed = states if norm is None or is_one else norm_of(states, norm)
        products = logits
        if products is None:
            assert experts.router is not None, "something chooses"
            products = self._products(normed, experts.router, norm=norm if is_one else None)
        if is_one:
            ids, weights = choose(products, experts) if chooses else _chosen_by_torch(products, experts)
            inner = _inner_of_one(states, experts, ids, norm)
            return _down_of_one(inner, experts, ids, weights, residual)
        if not chooses:
            ids, weights = _chosen_by_torch(products, experts)
        elif len(states) <= FEW:
            weights, blocks = choose_in_blocks(products, experts)
            return _added_up(_by_blocks(normed, experts, blocks), None, weights, states, residual)
        else:
            ids, weights = choose(products, experts)
        if len(states) > FEW and not self._is_invariant and _has_grouped_products(states, experts):
            outputs, places = _by_library(normed, experts, ids)
            return _added_up(outputs, places, weights, states, residual)
        blocks = sort_in_blocks(ids, len(experts.gates))
        return _added_up(_by_blocks(normed, experts, blocks), None, weights, states, residual)


def _chosen_by_torch(products: Tensor, experts: ExpertMatrices) -> tuple[Tensor, Tensor]:
    found, weights = choose_experts(products, experts)
    return found.int(), weights


def _has_grouped_products(states: Tensor, experts: ExpertMatrices) -> bool:
    """Has torch a grouped product for these? It wants bfloat16, and rows that begin at a multiple of 16 bytes.

    On other devices torch multiplies expert by expert, and waits for how many tokens each has: that cannot be recorded.
    """
    return (
        states.is_cuda
        and states.dtype == torch.bfloat16
        and hasattr(torch.nn.functional, "grouped_mm")
        and torch.cuda.get_device_capability(states.device)[0] in (9, 10)
        and states.shape[1] % 8 == 0
        and experts.downs.shape[2] % 8 == 0
    )


def choose(products: Tensor, experts: ExpertMatrices) -> tuple[Tensor, Tensor]:
    """As `choose_experts`; ids int32."""
    count = len(products)
    ids = torch.empty((count, experts.chosen), dtype=torch.int32, device=products.device)
    weights = torch.empty((count, experts.chosen), dtype=torch.float32, device=products.device)
    block = triton.next_power_of_2(products.shape[1])
    _choose_experts[(count,)](
        products,
        weights if experts.scales is None else experts.scales,
        ids,
        weights,
        HAS_SCALES=experts.scales is not None,
        EXPERTS=products.shape[1],
        CHOSEN=experts.chosen,
        SUMS_TO_ONE=experts.routing.sums_to_one,
        BLOCK=block,
        HALVINGS=block.bit_length() - 1,
        PLACES=triton.next_power_of_2(experts.chosen),
        num_warps=1,
        **chained(products.device),
    )
    return ids, weights


def _inner_of_one(states: Tensor, experts: ExpertMatrices, ids: Tensor, norm: RowNorm | None) -> Tensor:
    """[chosen, I]: the gated products of one token, for each of its experts."""
    inputs, inner = states.shape[1], experts.downs.shape[2]
    out = torch.empty((experts.chosen, inner), dtype=states.dtype, device=states.device)
    tile = tile_of_gates(inputs)
    _gates_of_one[(triton.cdiv(inner, tile.rows), experts.chosen)](
        states,
        experts.gates,
        ids,
        experts.gates if norm is None else norm.weights,
        out,
        0.0 if norm is None else norm.epsilon,
        INPUTS=inputs,
        INNER=inner,
        ACTIVATION=ACTIVATIONS[experts.activation],
        **constants_of(norm),
        IS_EVEN=inputs % tile.width == 0 and inner % tile.rows == 0,
        ROWS=tile.rows,
        WIDTH=tile.width,
        num_warps=tile.warps,
        **chained(out.device),
    )
    return out


def _down_of_one(
    inner: Tensor, experts: ExpertMatrices, ids: Tensor, weights: Tensor, residual: Tensor | None
) -> Tensor:
    """[1, K]: the weighted products of all experts of a token, added up."""
    outputs = experts.downs.shape[1]
    out = torch.empty((1, outputs), dtype=inner.dtype, device=inner.device)
    places = triton.next_power_of_2(experts.chosen)
    tile = tile_of_downs(inner.shape[1], places)
    _downs_of_one[(triton.cdiv(outputs, tile.rows),)](
        inner,
        experts.downs,
        ids,
        weights,
        inner if residual is None else residual,
        out,
        OUTPUTS=outputs,
        INNER=inner.shape[1],
        CHOSEN=experts.chosen,
        HAS_RESIDUAL=residual is not None,
        ROWS=tile.rows,
        PLACES=places,
        WIDTH=tile.width,
        num_warps=tile.warps,
        **chained(out.device),
    )
    return out


class Blocks(NamedTuple):
    """Pairs of a token and an expert, those of one expert together, in blocks of `size` places.

    places: [blocks · size] of each place its pair. owners: [blocks] of each block its expert; -1: none. taken: how many
    places of it are taken.
    """

    places: Tensor
    owners: Tensor
    taken: Tensor
    size: int


def choose_in_blocks(products: Tensor, experts: ExpertMatrices) -> tuple[Tensor, Blocks]:
    """Of at most FEW tokens: weights as of `choose_experts`, float32 [N, chosen], and the pairs in blocks."""
    (count, number), device = products.shape, products.device
    most = min(count * experts.chosen, number + count * experts.chosen // _LEAST)
    weights = torch.empty((count, experts.chosen), dtype=torch.float32, device=device)
    places = torch.empty(most * _LEAST, dtype=torch.int32, device=device)
    owners, taken = (torch.empty(most, dtype=torch.int32, device=device) for _ in range(2))
    tokens, block = triton.next_power_of_2(count), triton.next_power_of_2(number)
    _choose_in_blocks[(1,)](
        products,
        weights if experts.scales is None else experts.scales,
        weights,
        places,
        owners,
        taken,
        count,
        most,
        HAS_SCALES=experts.scales is not None,
        EXPERTS=number,
        CHOSEN=experts.chosen,
        SUMS_TO_ONE=experts.routing.sums_to_one,
        TOKENS=tokens,
        BLOCK=block,
        HALVINGS=block.bit_length() - 1,
        PLACES=triton.next_power_of_2(experts.chosen),
        SIZE=_LEAST,
        MOST=triton.next_power_of_2(most),
        num_warps=max(1, min(16, tokens * block // 1024)),
        **chained(device),
    )
    return weights, Blocks(places, owners, taken, _LEAST)


def sort_in_blocks(ids: Tensor, experts: int) -> Blocks:
    """The pairs of ids [N, chosen] in blocks, by torch, without waiting for the device."""
    pairs, device = ids.numel(), ids.device
    size = _LEAST if pairs <= _LEAST * experts else _MOST
    most = min(pairs, experts + pairs // size)
    ordered, order = torch.sort(ids.flatten().long(), stable=True)
    firsts = torch.searchsorted(ordered, torch.arange(experts + 1, device=device))
    counts = firsts.diff()
    ends = ((counts + size - 1) // size).cumsum(0)
    begins = torch.cat((ends.new_zeros(1), ends))
    spots = begins[ordered] * size + torch.arange(pairs, device=device) - firsts[ordered]
    places = torch.zeros(most * size, dtype=torch.int32, device=device).scatter_(0, spots, order.int())
    blocks = torch.arange(most, device=device)
    owners = torch.searchsorted(ends, blocks, right=True)
    left = torch.cat((counts, counts.new_zeros(1)))[owners] - (blocks - begins[owners]) * size
    return Blocks(places, torch.where(owners < experts, owners, -1).int(), left.clamp(max=size).int(), size)


def _by_blocks(states: Tensor, experts: ExpertMatrices, blocks: Blocks) -> Tensor:
    """[N · chosen, K] float32: the products of each pair of a token and an expert, in their order."""
    pairs, inner = len(states) * experts.chosen, experts.downs.shape[2]
    gated = torch.empty((pairs, inner), dtype=states.dtype, device=states.device)
    _multiply_blocks(states, experts.gates, blocks, gated, chosen=experts.chosen, activation=experts.activation)
    out = torch.empty((pairs, experts.downs.shape[1]), dtype=torch.float32, device=states.device)
    _multiply_blocks(gated, experts.downs, blocks, out)
    return out


def _multiply_blocks(
    states: Tensor,
    matrices: Tensor,
    blocks: Blocks,
    out: Tensor,
    *,
    chosen: int = 1,
    activation: str | None = None,
) -> None:
    """Products of each pair with its expert's matrix, to its row of `out`. chosen: pairs that share a row of states."""
    inputs, outputs = states.shape[1], out.shape[1]
    matrices_at_once = 2 if has_two(activation) else 1
    tile = tile_of_some(outputs, inputs, states.element_size(), blocks.size, matrices_at_once)
    tile = fitting(tile, states.element_size(), blocks.size, matrices_at_once, shared_bytes(states.device))
    _products_of_blocks[(triton.cdiv(outputs, tile.rows), len(blocks.owners))](
        states,
        matrices,
        blocks.places,
        blocks.owners,
        blocks.taken,
        out,
        INPUTS=inputs,
        OUTPUTS=outputs,
        CHOSEN=chosen,
        ACTIVATION=ACTIVATIONS[activation],
        IS_EVEN=inputs % tile.width == 0 and outputs % tile.rows == 0,
        TOKENS=blocks.size,
        ROWS=tile.rows,
        WIDTH=tile.width,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chained(out.device),
    )


def _by_library(states: Tensor, experts: ExpertMatrices, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[N · chosen, K] rounded products, sorted by expert; and of each pair where its row is. Waits for nothing."""
    ordered, order = torch.sort(ids.view(-1), stable=True)
    ends = torch.searchsorted(
        ordered, torch.arange(len(experts.gates), dtype=ordered.dtype, device=ids.device), right=True, out_int32=True
    )
    grouped_mm = torch.nn.functional.grouped_mm
    sums = grouped_mm(states[order // experts.chosen], experts.gates.transpose(1, 2), offs=ends)
    out = grouped_mm(gated_tokens(sums, experts.activation), experts.downs.transpose(1, 2), offs=ends)
    places = torch.empty(len(order), dtype=torch.int32, device=ids.device)
    return out, places.scatter_(0, order, torch.arange(len(order), dtype=torch.int32, device=ids.device))


def _added_up(
    outputs: Tensor, places: Tensor | None, weights: Tensor, states: Tensor, residual: Tensor | None
) -> Tensor:
    """[N, K]: each token's products, weighted and added up in the order of its experts."""
    count, width = states.shape
    out = torch.empty_like(states)
    block = min(1024, triton.next_power_of_2(width))
    _add_experts[(count, triton.cdiv(width, block))](
        outputs,
        weights if places is None else places,
        weights,
        states if residual is None else residual,
        out,
        WIDTH=width,
        CHOSEN=weights.shape[1],
        HAS_PLACES=places is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4,
        **chained(out.device),
    )
    return out


@triton.jit
def _sums_of_rows(b_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALVINGS: tl.constexpr):
    """Sums of the rows of [ROWS, WIDTH], of pairs and then of pairs of sums.

    The order in which one reduction adds follows from which threads hold what, and so from the number of rows.
    """
    for step in tl.static_range(HALVINGS):
        b_rows = tl.sum(tl.reshape(b_rows, (ROWS, WIDTH >> (step + 1), 2)), axis=2)
    return tl.reshape(b_rows, (ROWS,))


@triton.jit
def _chosen(
    p_products,
    p_scales,
    o_token,
    m_token,
    HAS_SCALES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Experts and weights, [TOKENS, PLACES] each, and of each token and expert [TOKENS, BLOCK] its place; -1: none.

    Whatever the products are, the experts are different ones that there are: others would be read beside the matrices.
    """
    o_expert = tl.arange(0, BLOCK)
    m_tile = m_token[:, None] & (o_expert < EXPERTS)[None, :]
    o_tile = o_token[:, None] * EXPERTS + o_expert[None, :]
    b_products = tl.load(p_products + o_tile, mask=m_tile, other=float("-inf")).to(tl.float32)
    b_left = tl.where(b_products >= float("-inf"), b_products, float("-inf"))  # not of what is no number
    b_largest = tl.max(b_left, axis=1)
    b_shares = tl.where(m_tile, tl.exp(b_products - b_largest[:, None]), 0.0)
    if SUMS_TO_ONE:
        b_divisor = tl.sum(b_shares, axis=1) * 0.0  # not a number if one of them is none
    else:
        b_divisor = _sums_of_rows(b_shares, TOKENS, BLOCK, HALVINGS)
    # No expert is like one that was chosen.
    b_left = tl.where((o_expert < EXPERTS)[None, :], tl.maximum(b_left, _LOWEST), float("-inf"))
    o_place = tl.arange(0, PLACES)
    b_ids = tl.zeros((TOKENS, PLACES), dtype=tl.int32)
    b_weights = tl.zeros((TOKENS, PLACES), dtype=tl.float32)
    b_place = tl.full((TOKENS, BLOCK), -1, dtype=tl.int32)
    for place in tl.static_range(CHOSEN):
        b_value, b_expert = tl.max(b_left, axis=1, return_indices=True)
        b_weight = tl.exp(b_value - b_largest)
        b_ids = tl.where((o_place == place)[None, :], b_expert[:, None], b_ids)
        b_weights = tl.where((o_place == place)[None, :], b_weight[:, None], b_weights)
        if SUMS_TO_ONE:
            b_divisor += b_weight
        m_chosen = o_expert[None, :] == b_expert[:, None]
        b_place = tl.where(m_chosen & m_token[:, None], place, b_place)
        b_left = tl.where(m_chosen, float("-inf"), b_left)
    b_weights /= b_divisor[:, None]
    if HAS_SCALES:
        b_weights *= tl.load(p_scales + b_ids, mask=(o_place < CHOSEN)[None, :], other=0.0).to(tl.float32)
    return b_ids, b_weights, b_place


@triton.jit
def _choose_experts(
    p_products,
    p_scales,
    p_ids,
    p_weights,
    HAS_SCALES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    PLACES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    o_token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    m_token = o_token >= 0
    b_ids, b_weights, _ = _chosen(
        p_products, p_scales, o_token, m_token, HAS_SCALES, EXPERTS, CHOSEN, SUMS_TO_ONE, 1, BLOCK, HALVINGS, PLACES
    )
    o_place = tl.arange(0, PLACES)
    o_out = o_token[:, None] * CHOSEN + o_place[None, :]
    m_out = m_token[:, None] & (o_place < CHOSEN)[None, :]
    tl.store(p_ids + o_out, b_ids, mask=m_out)
    tl.store(p_weights + o_out, b_weights, mask=m_out)


@triton.jit
def _gates_of_one(
    p_states,
    p_gates,
    p_ids,
    p_norm,
    p_out,
    epsilon,
    INPUTS: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(1)
    MATRICES: tl.constexpr = 2 if has_two_of(ACTIVATION) else 1
    p_matrix = p_gates + tl.load(p_ids + place).to(tl.int64) * (MATRICES * INNER * INPUTS)
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < INNER
    b_sums, b_ups, b_squares = sums_of_one(
        p_states, p_matrix, p_norm, o_rows, m_rows, INNER, INPUTS, ACTIVATION, HAS_NORM, ADDS_ONE, IS_EVEN, ROWS, WIDTH
    )
    b_gate = tl.sum(b_sums, axis=1)
    b_up = tl.sum(b_ups, axis=1)
    if HAS_NORM:
        b_scale = tl.rsqrt(tl.sum(b_squares, axis=0) / INPUTS + epsilon)
        b_gate *= b_scale
        b_up *= b_scale
    b_out = gated_sums(b_gate, b_up, ACTIVATION)
    tl.store(p_out + place * INNER + o_rows, b_out.to(p_out.dtype.element_ty), mask=m_rows)


@triton.jit
def _downs_of_one(
    p_inner,
    p_downs,
    p_ids,
    p_weights,
    p_residual,
    p_out,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Rows of all chosen experts' matrices in one tile, so that enough reads are under way."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    o_tile = tl.arange(0, PLACES * ROWS)
    o_place = o_tile // ROWS
    m_place = o_place < CHOSEN
    o_rows = tl.program_id(0) * ROWS + o_tile % ROWS
    m_rows = m_place & (o_rows < OUTPUTS)
    b_expert = tl.load(p_ids + o_place, mask=m_place, other=0).to(tl.int64)
    b_weight = tl.load(p_weights + o_place, mask=m_place, other=0.0)
    p_rows = p_downs + (b_expert * OUTPUTS + o_rows) * INNER
    b_sums = tl.zeros((PLACES * ROWS, WIDTH), dtype=tl.float32)
    for first in range(0, INNER, WIDTH):
        o_in = first + tl.arange(0, WIDTH)
        m_in = o_in < INNER
        m_tile = m_rows[:, None] & m_in[None, :]
        b_tile = tl.load(p_rows[:, None] + o_in[None, :], mask=m_tile, other=0.0, eviction_policy="evict_first")
        b_inner = tl.load(p_inner + o_place[:, None] * INNER + o_in[None, :], mask=m_tile, other=0.0)
        b_sums += b_tile.to(tl.float32) * b_inner.to(tl.float32)
    b_out = tl.sum(tl.reshape(tl.sum(b_sums, axis=1) * b_weight, (PLACES, ROWS)), axis=0)
    o_out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_out = o_out < OUTPUTS
    if HAS_RESIDUAL:
        b_out += tl.load(p_residual + o_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["tokens", "most"])
def _choose_in_blocks(
    p_products,
    p_scales,
    p_weights,
    p_places,
    p_owners,
    p_taken,
    tokens,
    most,
    HAS_SCALES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    PLACES: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """As `_choose_experts`, of all tokens in one program, which sees how many chose each expert."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    o_token = tl.arange(0, TOKENS)
    m_token = o_token < tokens
    o_expert = tl.arange(0, BLOCK)
    _, b_weights, b_place = _chosen(
        p_products,
        p_scales,
        o_token,
        m_token,
        HAS_SCALES,
        EXPERTS,
        CHOSEN,
        SUMS_TO_ONE,
        TOKENS,
        BLOCK,
        HALVINGS,
        PLACES,
    )
    o_place = tl.arange(0, PLACES)
    m_weights = m_token[:, None] & (o_place < CHOSEN)[None, :]
    tl.store(p_weights + o_token[:, None] * CHOSEN + o_place[None, :], b_weights, mask=m_weights)
    m_pair = b_place >= 0
    b_counts = tl.sum(m_pair.to(tl.int32), axis=0)
    b_blocks = (b_counts + SIZE - 1) // SIZE
    b_begin = tl.cumsum(b_blocks, axis=0) - b_blocks
    b_rank = tl.cumsum(m_pair.to(tl.int32), axis=0) - 1  # of a pair among those of its expert
    b_pair = o_token[:, None] * CHOSEN + b_place
    tl.store(p_places + b_begin[None, :] * SIZE + b_rank, b_pair, mask=m_pair)
    for block in tl.static_range((TOKENS + SIZE - 1) // SIZE):
        m_block = block < b_blocks
        tl.store(p_owners + b_begin + block, o_expert, mask=m_block)
        tl.store(p_taken + b_begin + block, tl.minimum(b_counts - block * SIZE, SIZE), mask=m_block)
    o_block = tl.arange(0, MOST)
    tl.store(p_owners + o_block, -1, mask=(o_block >= tl.sum(b_blocks, axis=0)) & (o_block < most))


@triton.jit
def _products_of_blocks(
    p_states,
    p_matrices,
    p_places,
    p_owners,
    p_taken,
    p_out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some rows of an expert's matrix, with all tokens of a block, which are the columns of the tensor cores' tiles."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(1)
    expert = tl.load(p_owners + block)
    if expert < 0:
        return
    o_place = tl.arange(0, TOKENS)
    m_tokens = o_place < tl.load(p_taken + block)
    b_pair = tl.load(p_places + block * TOKENS + o_place, mask=m_tokens, other=0).to(tl.int64)
    p_tokens = p_states + b_pair // CHOSEN * INPUTS
    MATRICES: tl.constexpr = 2 if has_two_of(ACTIVATION) else 1
    p_matrix = p_matrices + expert.to(tl.int64) * (MATRICES * OUTPUTS * INPUTS)
    o_rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < OUTPUTS
    b_sums = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    b_ups = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for first in range(0, INPUTS, WIDTH):
        o_in = first + tl.arange(0, WIDTH)
        m_in = o_in < INPUTS
        m_states = m_in[:, None] & m_tokens[None, :]
        b_states = tl.load(p_tokens[None, :] + o_in[:, None], mask=m_states, other=0.0)
        b_tile = rows_of(p_matrix, o_rows, o_in, m_rows, m_in, INPUTS, IS_EVEN, "")
        b_sums = tl.dot(b_tile, b_states, b_sums, input_precision="ieee")
        if has_two_of(ACTIVATION):
            b_tile = rows_of(p_matrix, o_rows + OUTPUTS, o_in, m_rows, m_in, INPUTS, IS_EVEN, "")
            b_ups = tl.dot(b_tile, b_states, b_ups, input_precision="ieee")
    if ACTIVATION > 0:
        b_sums = gated_sums(b_sums, b_ups, ACTIVATION)
    p_row = p_out + b_pair * OUTPUTS
    m_out = m_rows[:, None] & m_tokens[None, :]
    tl.store(p_row[None, :] + o_rows[:, None], b_sums.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _add_experts(
    p_outputs,
    p_places,
    p_weights,
    p_residual,
    p_out,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o_in = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_in = o_in < WIDTH
    b_out = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(CHOSEN):
        row = token * CHOSEN + place
        weight = tl.load(p_weights + row)
        if HAS_PLACES:
            row = tl.load(p_places + row).to(tl.int64)
        b_out += tl.load(p_outputs + row * WIDTH + o_in, mask=m_in, other=0.0).to(tl.float32) * weight
    if HAS_RESIDUAL:
        b_out += tl.load(p_residual + token * WIDTH + o_in, mask=m_in, other=0.0).to(tl.float32)
    tl.store(p_out + token * WIDTH + o_in, b_out.to(p_out.dtype.element_ty), mask=m_in)
