"""Fused operations of a step: norms, products, RoPE, gates and experts, everything between two attentions.

    norm · product · bias · activation or residual      one `product`
    norm of heads · rotation · write of K and V         one `place_heads`
    norm, and the sum with what it is added to          one `norm`
    norm · router · the products of chosen experts      one `mix_experts`
    a norm and its gate · a gate alone                  one `gated_norm` · one `sigmoid_gate`

Inputs and outputs have the model's dtype; what is between them is float32 and is rounded once. The references below run
anywhere; `triton/fused.py` has the same operations for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.kernels.quantised import Matrix, QuantisedMatrix
from inference_engine.kernels.routing import Router
from inference_engine.kernels.states import StateKernels

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda states: F.gelu(states, approximate="tanh"),
}
SQUARES = "relu2"  # of what is positive: an activation of sums that nothing else is multiplied with


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowNorm:
    """Root mean square norm: x / rms(x) · weights, or · (1 + weights). weights [n], in the model's dtype."""

    weights: Tensor
    epsilon: float
    adds_one: bool = False

    def of(self, states: Tensor) -> Tensor:
        """states [..., n] float32; returns as many, not rounded."""
        factor = self.weights.float() + 1.0 if self.adds_one else self.weights.float()
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.epsilon) * factor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RopeTable:
    """What heads are rotated by, in halves: cosines and sines [n, D / 2], or less where their first numbers alone are
    turned. rows: of each token its row, int64 [N]; None: they follow each other.
    """

    cos: Tensor
    sin: Tensor
    rows: Tensor | None = None

    def halves(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token, [N, D / 2]."""
        return (self.cos, self.sin) if self.rows is None else (self.cos[self.rows], self.sin[self.rows])

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """The same, float32, twice as wide."""
        cos, sin = (part.float().repeat(1, 2) for part in self.halves())
        return cos, sin


class ProductKernel(Protocol):
    def __call__(
        self,
        states: Tensor,
        matrix: Matrix,
        *,
        bias: Tensor | None = None,
        norm: RowNorm | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """states [N, K] · matrix [O, K], as [N, O]. Numbers of a quantised matrix are not rounded to the model's dtype.

        bias: [O]. norm: applied to states first. residual: [N, O], added at the end. activation: of the first half of
        the outputs, which is multiplied with the second; then the result is [N, O / 2], without a residual. SQUARES is
        one of all outputs.
        """


class PlaceHeads(Protocol):
    def __call__(
        self,
        heads: Tensor,
        keys: Tensor,
        values: Tensor,
        writes: Tensor,
        *,
        query_heads: int,
        kv_heads: int,
        norms: tuple[RowNorm, RowNorm] | None = None,
        turn: RopeTable | None = None,
        value_epsilon: float | None = None,
        values_are_keys: bool = False,
        shared: tuple[int, ...] = (),
    ) -> Tensor:
        """The queries [N, Hq, D] of `heads` [N, (Hq + 2 Hkv) · D]: a token's queries, keys and values.

        Keys and values go to vectors `writes` [N · Hkv] of `keys` and `values` [vectors, D]. norms: of queries and of
        keys, each head by itself. turn: what queries and keys are rotated by. `writes` and `turn` must be made before
        `heads` are: a kernel may read them while the one before it ends. value_epsilon: of a norm of values without
        weights. values_are_keys: values are what keys are before their norm, and `heads` have none.

        shared: the numbers of a head that entries hold once, for value and key: queries and keys begin with them, in
        this order, and values end with them (`models/keyed_values.py`). Those of queries are multiplied by the weights
        of the norm of keys.
        """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LatentHeads:
    """How a token's queries and its compressed vector become what attention takes (`AttendLatent`).

    halves: [H, own + value, rank], of keys and of values of each head. norm: of compressed vectors. pairs, keeps_pairs:
    as there.
    """

    halves: Tensor
    own: int
    norm: RowNorm
    pairs: bool
    keeps_pairs: bool

    @property
    def heads(self) -> int:
        return self.halves.shape[0]

    @property
    def rank(self) -> int:
        return self.halves.shape[2]

    def turned(self, states: Tensor, turn: RopeTable) -> Tensor:
        """states [N, H, rotated] float32, rotated."""
        cos, sin = (part.float()[:, None] for part in turn.halves())
        halves = (states[..., ::2], states[..., 1::2]) if self.pairs else states.chunk(2, dim=-1)
        found = halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin
        return torch.stack(found, dim=-1).flatten(-2) if self.keeps_pairs else torch.cat(found, dim=-1)


class PlaceLatent(Protocol):
    def __call__(
        self, queries: Tensor, latent: Tensor, entries: Tensor, writes: Tensor, layer: LatentHeads, turn: RopeTable
    ) -> Tensor:
        """The queries [N, H, own + rotated] of `queries` [N, H · (own + rotated)], which may be a part of rows, turned.

        latent: [N, rank + rotated], likewise; normed and turned it goes to vectors `writes` [N] of `entries` [vectors,
        rank + rotated]. `writes` and `turn` must be made before the others are.
        """


class HeadProducts(Protocol):
    def __call__(self, states: Tensor, matrices: Tensor, *, rest: Tensor | None = None) -> Tensor:
        """[N, H, O] of states [N, H, K] and matrices [H, K, O], of any strides. rest: [N, H, R], behind it."""


class NormKernel(Protocol):
    def __call__(
        self, states: Tensor, norm: RowNorm, *, residual: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """The norm of states [N, K], added to `residual` [N, K] if there is one; times the one number of `scale`."""


class GatedNormKernel(Protocol):
    def __call__(
        self, states: Tensor, gate: Tensor, weights: Tensor, *, epsilon: float, width: int, heads: int, first: bool
    ) -> Tensor:
        """`GatedNorm` of `models/operations.py`: states, gate [N, heads · width]."""


class SigmoidGateKernel(Protocol):
    def __call__(self, states: Tensor, gate: Tensor) -> Tensor:
        """states [N, K] · sigmoid(gate), which has one number or as many."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertMatrices:
    """Of E experts with I inner numbers over K inputs: router [E, K], gates [E, 2 I, K], downs [E, K, I].

    gates: of each expert the matrix whose products are activated, and below it the one that they are multiplied with;
    activated by SQUARES there is none, and gates are [E, I, K]. routing: how a token's experts are chosen. bias: [E],
    of `routing`. scales: [E], by which weights are multiplied. router: None where others make the logits.
    """

    router: Tensor | None
    gates: Tensor
    downs: Tensor
    routing: Router
    activation: str
    bias: Tensor | None = None
    scales: Tensor | None = None

    @property
    def chosen(self) -> int:
        return self.routing.chosen


class MixExperts(Protocol):
    def __call__(
        self,
        states: Tensor,
        experts: ExpertMatrices,
        *,
        norm: RowNorm | None = None,
        residual: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """The mixture of experts for states [N, K], as many.

        norm: applied to states first. residual: [N, K], added at the end. A token's experts are chosen by `logits`
        [N, E]; None: by its products with the router, rounded to the dtype of the states.
        """


def product(
    states: Tensor,
    matrix: Matrix,
    *,
    bias: Tensor | None = None,
    norm: RowNorm | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """See `ProductKernel`."""
    wide = states.float()
    numbers = matrix.unpacked(torch.float32) if isinstance(matrix, QuantisedMatrix) else matrix.float()
    out = (wide if norm is None else norm.of(wide)) @ numbers.T
    if bias is not None:
        out = out + bias.float()
    if activation is not None:
        out = gated(out, activation)
    if residual is not None:
        out = out + residual.float()
    return out.to(states.dtype)


def gated(states: Tensor, activation: str) -> Tensor:
    """The activation of the first half of states [..., 2 n], times the second half; by SQUARES, of all of them."""
    if activation == SQUARES:
        return states.relu().square()
    gate, up = states.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def place_heads(
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    writes: Tensor,
    *,
    query_heads: int,
    kv_heads: int,
    norms: tuple[RowNorm, RowNorm] | None = None,
    turn: RopeTable | None = None,
    value_epsilon: float | None = None,
    values_are_keys: bool = False,
    shared: tuple[int, ...] = (),
) -> Tensor:
    """See `PlaceHeads`."""
    count, head_dim = len(heads), keys.shape[-1]
    own = heads.float().view(count, -1, head_dim)
    moved = own[:, : query_heads + kv_heads]
    kept = own[:, query_heads:] if values_are_keys else own[:, query_heads + kv_heads :]
    if value_epsilon is not None:
        kept = kept * torch.rsqrt(kept.square().mean(-1, keepdim=True) + value_epsilon)
    if norms is not None:
        moved = torch.cat((norms[0].of(moved[:, :query_heads]), norms[1].of(moved[:, query_heads:])), dim=1)
    if turn is not None:
        cos, sin = (part[:, None] for part in turn.of_tokens())
        turned, still = moved.tensor_split([cos.shape[-1]], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        moved = torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, still), dim=-1)
    queries = moved[:, :query_heads]
    if shared:
        assert norms is not None, "keys differ from values by the weights of their norm"
        others = sorted({*range(head_dim)} - {*shared})
        queries = torch.cat((queries[..., shared] * norms[1].weights[[*shared]].float(), queries[..., others]), dim=-1)
        moved, kept = moved[..., others], kept[..., [*others, *shared]]
    if not kv_heads:
        return queries.to(heads.dtype)
    for entries, given in ((keys[:, len(shared) :], moved[:, query_heads:]), (values, kept)):
        entries.index_copy_(0, writes, given.reshape(-1, given.shape[-1]).to(entries.dtype))
    return queries.to(heads.dtype)


def place_latent(
    queries: Tensor, latent: Tensor, entries: Tensor, writes: Tensor, layer: LatentHeads, turn: RopeTable
) -> Tensor:
    """See `PlaceLatent`."""
    by_head = queries.view(len(queries), layer.heads, -1)
    own, rotated = by_head.tensor_split([layer.own], dim=-1)
    compressed, of_key = latent.float().tensor_split([layer.rank], dim=-1)
    parts = layer.norm.of(compressed), layer.turned(of_key[:, None], turn)[:, 0]
    entries.index_copy_(0, writes, torch.cat(parts, dim=-1).to(entries.dtype))
    return torch.cat((own, layer.turned(rotated.float(), turn).to(queries.dtype)), dim=-1)


def head_products(states: Tensor, matrices: Tensor, *, rest: Tensor | None = None) -> Tensor:
    """See `HeadProducts`."""
    found = torch.bmm(states.transpose(0, 1), matrices).transpose(0, 1)
    return found if rest is None else torch.cat((found, rest), dim=-1)


def norm(states: Tensor, norm: RowNorm, *, residual: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """See `NormKernel`."""
    out = norm.of(states.float())
    out = out if residual is None else out + residual.float()
    return (out if scale is None else out * scale.float()).to(states.dtype)


def gated_norm(
    states: Tensor, gate: Tensor, weights: Tensor, *, epsilon: float, width: int, heads: int, first: bool
) -> Tensor:
    """See `GatedNormKernel`."""
    opens = F.silu(gate.float())
    inner = states.float() * opens if first else states.float()
    part = inner.view(len(states), heads, width)
    normed = part * (part.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    out = normed.flatten(1) * weights.float() if first else (normed * weights.float()).flatten(1) * opens
    return out.to(states.dtype)


def sigmoid_gate(states: Tensor, gate: Tensor) -> Tensor:
    """See `SigmoidGateKernel`."""
    return (states.float() * gate.float().sigmoid()).to(states.dtype)


def choose_experts(products: Tensor, experts: ExpertMatrices) -> tuple[Tensor, Tensor]:
    """As `Router.choose`, and times `scales`. products: [N, E], the router's."""
    ids, weights = experts.routing.choose(products, experts.bias)
    return ids, weights if experts.scales is None else weights * experts.scales.float()[ids]


def mix_experts(
    states: Tensor,
    experts: ExpertMatrices,
    *,
    norm: RowNorm | None = None,
    residual: Tensor | None = None,
    logits: Tensor | None = None,
) -> Tensor:
    """See `MixExperts`."""
    wide = states.float() if norm is None else norm.of(states.float())
    if logits is None:
        assert experts.router is not None, "something chooses"
        logits = (wide @ experts.router.float().T).to(states.dtype)
    ids, weights = choose_experts(logits, experts)
    out = torch.zeros_like(wide)
    for expert in set(ids.flatten().tolist()):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        inner = gated(wide[tokens] @ experts.gates[expert].float().T, experts.activation)
        out.index_add_(0, tokens, inner @ experts.downs[expert].float().T * weights[tokens, places, None])
    return (out if residual is None else out + residual.float()).to(states.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """The fused operations of a device. states: of layers with a recurrent state; None: it has none of these."""

    product: ProductKernel = product
    place_heads: PlaceHeads = place_heads
    place_latent: PlaceLatent = place_latent
    head_products: HeadProducts = head_products
    norm: NormKernel = norm
    mix_experts: MixExperts = mix_experts
    gated_norm: GatedNormKernel = gated_norm
    sigmoid_gate: SigmoidGateKernel = sigmoid_gate
    states: StateKernels | None = None


PLAIN = Fused()
