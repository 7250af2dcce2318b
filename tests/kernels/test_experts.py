"""Mixtures of experts in Triton give what their reference gives, whatever the numbers of tokens and of experts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from inference_engine.kernels.fused import PLAIN, ExpertMatrices, RowNorm, choose_experts
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton
from tests.kernels.test_fused import device_of_kernels, is_close, moved, numbers

# Tokens, inputs, inner numbers, experts, chosen: none, one or all of them a multiple of a tile.
SHAPES = (
    (1, 64, 32, 4, 2),
    (1, 72, 40, 5, 3),
    (1, 600, 24, 9, 9),
    (2, 72, 40, 5, 3),
    (17, 64, 40, 130, 1),
    (70, 72, 40, 3, 2),
)


def made(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> ExpertMatrices:
    """With a router whose products are inputs, so that no order of adding decides who is chosen."""
    _, inputs, inner, experts, chosen = shape
    router = torch.zeros(experts, inputs)
    router[torch.arange(experts), torch.arange(experts) % inputs] = 1.0
    return ExpertMatrices(
        router=router.to(device, dtype),
        gates=(numbers(experts, 2 * inner, inputs, seed=1) * inputs**-0.5).to(device, dtype),
        downs=(numbers(experts, inputs, inner, seed=2) * inner**-0.5).to(device, dtype),
        chosen=chosen,
        sums_to_one=bool(chosen % 2),
        activation="silu" if chosen % 3 else "gelu_tanh",
    )


def on_cpu(experts: ExpertMatrices) -> ExpertMatrices:
    return replace(experts, router=experts.router.cpu(), gates=experts.gates.cpu(), downs=experts.downs.cpu())


def compare_mixtures() -> None:
    from inference_engine.kernels.triton.fused import open_fused, open_invariant

    device, kernels = device_of_kernels(), (open_fused(), open_invariant())
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    for shape in SHAPES:
        for dtype in (torch.float32, half):
            experts = made(shape, dtype, device)
            states = numbers(shape[0], shape[1], dtype=dtype)
            norm = RowNorm(weights=numbers(shape[1], seed=3, dtype=dtype).abs() + 0.5, epsilon=1e-5)
            for by, residual in ((norm, states.flip(0)), (None, None)):
                expected = PLAIN.mix_experts(states, on_cpu(experts), norm=by, residual=residual)
                for operations in kernels:
                    found = operations.mix_experts(
                        states.to(device),
                        experts,
                        norm=by and moved(by, device),
                        residual=None if residual is None else residual.to(device),
                    )
                    assert is_close(found, expected), (shape, dtype, by is None)


def compare_tokens_alone() -> None:
    """A token's bits are the same beside any others where that is promised, and beside up to 64 in any case."""
    from inference_engine.kernels.triton.fused import open_fused, open_invariant

    device = device_of_kernels()
    # numpy, which multiplies for the interpreter, has other orders for more columns: there each block has one size.
    count, alone = (600, (0, 3, 599)) if device.type == "cuda" else (18, (0, 17))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    experts = made((count, 256, 96, 4, 2), dtype, device)
    states = numbers(count, 256, dtype=dtype).to(device)
    for operations, most, least in ((open_invariant(), count, 1), (open_fused(), min(count, 64), 2)):
        together = operations.mix_experts(states[:most], experts)
        for first in (each for each in alone if each + least <= most):
            few = operations.mix_experts(states[first : first + least], experts)
            assert torch.equal(few, together[first : first + least]), "tokens beside a token change it"


def compare_choices() -> None:
    """Of equal products the first are chosen. Whatever products are, the experts are ones that there are."""
    from inference_engine.kernels.triton.fused import open_fused

    device, mix = device_of_kernels(), open_fused().mix_experts
    experts = made((4, 64, 32, 6, 3), torch.float32, device)
    for count in (1, 4):
        equal = torch.ones(count, 64)
        assert is_close(mix(equal.to(device), experts), PLAIN.mix_experts(equal, on_cpu(experts)))
        for broken, place in ((float("nan"), 2), (float("nan"), 5), (float("inf"), 1), (float("-inf"), 0)):
            states = numbers(count, 64)
            states[0, place] = broken
            found = mix(states.to(device), experts).cpu()
            assert not found[0].isfinite().any(), (count, broken)
            assert torch.equal(found[1:].isfinite(), torch.ones_like(found[1:], dtype=torch.bool)), (count, broken)


def compare_blocks() -> None:
    """Each pair is in one block, which is its expert's, and is weighted as the reference weights it."""
    from inference_engine.kernels.triton import experts as kernels

    device = device_of_kernels()
    for count, number, chosen in ((1, 1, 1), (3, 6, 6), (17, 5, 2), (40, 9, 3), (64, 130, 8)):
        experts = made((count, 8, 8, number, chosen), torch.float32, device)
        for products in (numbers(count, number), torch.zeros(count, number)):
            ids, weights = choose_experts(products, experts)
            found_weights, blocks = kernels.choose_in_blocks(products.to(device), experts)
            assert is_close(found_weights, weights)
            for found in (blocks, kernels.sort_in_blocks(ids.to(device), number)):
                places, owners, taken = (each.cpu() for each in (found.places, found.owners, found.taken))
                pairs = [
                    (pair, int(owner))
                    for place, (owner, filled) in enumerate(zip(owners, taken, strict=True))
                    for pair in places[place * found.size : place * found.size + int(filled)].tolist()
                    if owner >= 0
                ]
                assert sorted(pairs) == list(enumerate(ids.flatten().tolist())), (count, number, chosen)


@pytest.mark.parametrize(
    "compare", [compare_mixtures, compare_tokens_alone, interpreted(compare_choices), interpreted(compare_blocks)]
)
def test_the_kernels_give_what_the_reference_gives(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
