"""Finds the padding of tokens and keys that makes results batch-invariant: equal bits, whatever else is in the batch.

Matrix libraries choose the order of summation by shape: on a CPU the result for one token alone and among 64 differs in
the last bits. Shapes that are multiples of some quantum can give equal bits. The quantum is found here by test, on the
model's own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from inference_engine.backends.packed_linear import PackedLinear
from inference_engine.errors import BackendError
from inference_engine.kernels.attention import attend
from inference_engine.kv.geometry import LayerGeometry
from inference_engine.models.quantised_linear import QuantisedLinear

if TYPE_CHECKING:
    from inference_engine.models.seam import Seam

_TOKEN_QUANTA = (2, 4, 8, 16)
_KEY_QUANTA = (512, 1024)
_TOKENS = 320  # attention kernels change their blocks at 192 and 768 queries, times the heads of a group


def probe_quanta(seam: Seam) -> tuple[int, int]:
    """(token quantum, key quantum) that give bit-identical results. Raises BackendError if no candidate does."""
    device = next(seam.model.parameters()).device
    for tokens in _TOKEN_QUANTA:
        if all(_linear_agrees(linear, tokens, device, seam.dtype) for linear in _distinct_linears(seam)):
            for keys in _KEY_QUANTA:
                shapes = _head_shapes(seam.layers)
                if all(_attention_agrees(shape, tokens, keys, device, seam.dtype) for shape in shapes):
                    return tokens, keys
    raise _unavailable(seam.dtype, device)


def probe_attention(layers: Sequence[LayerGeometry], device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """As `probe_quanta`, for a model whose products have one order of adding for any number of tokens."""
    for tokens in _TOKEN_QUANTA:
        for keys in _KEY_QUANTA:
            if all(_attention_agrees(shape, tokens, keys, device, dtype) for shape in _head_shapes(layers)):
                return tokens, keys
    raise _unavailable(dtype, device)


def _unavailable(dtype: torch.dtype, device: torch.device) -> BackendError:
    return BackendError(
        f"determinism=batch-invariant is not available here: with {dtype} on {device} no token quantum of "
        f"{_TOKEN_QUANTA} and key quantum of {_KEY_QUANTA} gives equal bits; start with determinism=off"
    )


def _distinct_linears(seam: Seam) -> Iterator[nn.Linear | PackedLinear | QuantisedLinear]:
    """One linear layer of each shape."""
    seen: set[tuple[int, int]] = set()
    for module in seam.model.modules():
        if isinstance(module, nn.Linear | PackedLinear | QuantisedLinear):
            shape = (module.in_features, module.out_features)
            if shape not in seen:
                seen.add(shape)
                yield module


def _head_shapes(layers: Sequence[LayerGeometry]) -> set[tuple[int, int, int]]:
    return {(layer.query_heads, layer.kv_heads, layer.head_dim) for layer in layers}


@torch.inference_mode()
def _linear_agrees(
    linear: nn.Linear | PackedLinear | QuantisedLinear, quantum: int, device: torch.device, dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_TOKENS, linear.in_features, generator=generator).to(device, dtype)
    whole = linear(states)
    for tokens in (quantum, 2 * quantum, 3 * quantum, 32):
        for first in (0, quantum, _TOKENS - tokens):
            if not torch.equal(linear(states[first : first + tokens].contiguous()), whole[first : first + tokens]):
                return False
    return True


@torch.inference_mode()
def _attention_agrees(
    heads: tuple[int, int, int], token_quantum: int, key_quantum: int, device: torch.device, dtype: torch.dtype
) -> bool:
    query_heads, kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    queries = random(_TOKENS, query_heads, head_dim)
    keys, values = (random(kv_heads, 3 * key_quantum, head_dim) for _ in range(2))
    past = key_quantum - _TOKENS - 3

    def run(first: int, tokens: int, count: int) -> Tensor:
        last = torch.arange(past + first, past + first + tokens, device=device)
        visible = torch.arange(count, device=device) <= last[:, None]
        mask = torch.zeros(tokens, count, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        return attend(queries[first : first + tokens], keys[:, :count], values[:, :count], mask, scaling=head_dim**-0.5)

    whole = run(0, _TOKENS, key_quantum)
    return all(
        torch.equal(run(first, tokens, count), whole[first : first + tokens])
        for tokens in (token_quantum, 3 * token_quantum)
        for first in (0, token_quantum, _TOKENS - tokens)
        for count in (key_quantum, 2 * key_quantum, 3 * key_quantum)
    )
