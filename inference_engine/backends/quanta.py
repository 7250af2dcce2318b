"""Finds the padding of tokens and keys that makes results batch-invariant: equal bits, whatever else is in the batch.

Matrix libraries choose the order of summation by shape: on a CPU the result for one token alone and among 64 differs in
the last bits. Shapes that are multiples of some quantum can give equal bits. The quantum is found here by test, on the
model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from inference_engine.backends.packed_linear import PackedLinear
from inference_engine.errors import BackendError
from inference_engine.kernels.attention import attend
from inference_engine.kv.geometry import LayerGeometry
from inference_engine.models.latent_attention import HeadHalves
from inference_engine.models.quantised_linear import QuantisedLinear

if TYPE_CHECKING:
    from inference_engine.models.seam import Seam

Product = Callable[[Tensor], Tensor]

_TOKEN_QUANTA = (2, 4, 8, 16)
_KEY_QUANTA = (512, 1024)
_TOKENS = 320  # attention kernels change their blocks at 192 and 768 queries, times the heads of a group


def probe_quanta(seam: Seam) -> tuple[int, int]:
    """(token quantum, key quantum) that give bit-identical results. Raises BackendError if no candidate does."""
    device = next(seam.model.parameters()).device
    if seam.states:
        raise BackendError(
            f"determinism=batch-invariant is not available for the model type {seam.model.config.model_type!r}: its "
            "recurrent states are computed for as many tokens as a step has; start with determinism=off"
        )
    if any(".experts." in name for name, _ in seam.model.named_parameters()):
        raise BackendError(
            "determinism=batch-invariant is not available for a mixture of experts on torch's modules: how an expert's "
            "product is added up depends on how many tokens of the step it has; start with determinism=off"
        )
    for tokens in _TOKEN_QUANTA:
        if all(_product_agrees(product, tokens, device, seam.dtype) for product in _distinct_products(seam)):
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


def _distinct_products(seam: Seam) -> Iterator[tuple[int, Product]]:
    """One product of each shape: how many numbers it takes of a token, and the function."""
    seen: set[tuple[int, ...]] = set()
    for module in seam.model.modules():
        if isinstance(module, nn.Linear | PackedLinear | QuantisedLinear):
            shape: tuple[int, ...] = (module.in_features, module.out_features)
            products: list[tuple[int, Product]] = [(module.in_features, module)]
        elif isinstance(module, HeadHalves):
            shape = (module.heads, module.key, module.value, module.rank)
            products = [
                (module.heads * module.key, partial(_by_head, module.of_queries, module.heads)),
                (module.heads * module.rank, partial(_by_head, module.of_outputs, module.heads)),
            ]
        else:
            continue
        if shape not in seen:
            seen.add(shape)
            yield from products


def _by_head(product: Product, heads: int, states: Tensor) -> Tensor:
    return product(states.view(len(states), heads, -1).transpose(0, 1)).transpose(0, 1)


def _head_shapes(layers: Sequence[LayerGeometry]) -> set[tuple[int, int, int, int]]:
    return {(layer.query_heads, layer.kv_heads, layer.head_dim, layer.value_dim) for layer in layers}


@torch.inference_mode()
def _product_agrees(product: tuple[int, Product], quantum: int, device: torch.device, dtype: torch.dtype) -> bool:
    inputs, function = product
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_TOKENS, inputs, generator=generator).to(device, dtype)
    whole = function(states)
    for tokens in (quantum, 2 * quantum, 3 * quantum, 32):
        for first in (0, quantum, _TOKENS - tokens):
            if not torch.equal(function(states[first : first + tokens].contiguous()), whole[first : first + tokens]):
                return False
    return True


@torch.inference_mode()
def _attention_agrees(
    heads: tuple[int, int, int, int], token_quantum: int, key_quantum: int, device: torch.device, dtype: torch.dtype
) -> bool:
    query_heads, kv_heads, head_dim, value_dim = heads
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    queries = random(_TOKENS, query_heads, head_dim)
    keys, values = (random(kv_heads, 3 * key_quantum, width) for width in (head_dim, value_dim))
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
