"""Mixtures of experts in Triton give what their reference gives, whatever the numbers of tokens and of experts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inference_engine.kernels.fused import PLAIN, SQUARES, ExpertMatrices, RowNorm, choose_experts
from inference_engine.kernels.routing import Router
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
        routing=Router(chosen=chosen, sums_to_one=bool(chosen % 2)),
        activation="silu" if chosen % 3 else "gelu_tanh",
    )


def on_cpu(experts: ExpertMatrices) -> ExpertMatrices:
    names = ("router", "gates", "downs", "bias", "scales")
    return replace(experts, **{name: given.cpu() for name in names if (given := getattr(experts, name)) is not None})


def compare_mixtures() -> None:
    from inference_engine.kernels.triton.fused import open_fused, open_invariant

    device, kernels = device_of_kernels(), (open_fused(), open_invariant())
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    for shape in SHAPES:
        for dtype in (torch.float32, half):
            experts = made(shape, dtype, device)
            if shape[3] % 2:  # a router of another kind, whose choice is torch's
                routing = replace(experts.routing, scores="sigmoid", factor=1.5)
                experts = replace(experts, routing=routing, bias=numbers(shape[3], seed=5).to(device))
            if not shape[4] % 2:
                experts = replace(experts, scales=numbers(shape[3], seed=6).to(device, dtype))
            logits = None
            if shape[2] == 40:  # without a router, and without gates
                logits = numbers(shape[0], shape[3], seed=7, dtype=dtype)
                ups = experts.gates[:, : shape[2]].contiguous()
                experts = replace(experts, router=None, gates=ups, activation=SQUARES)
            states = numbers(shape[0], shape[1], dtype=dtype)
            norm = RowNorm(weights=numbers(shape[1], seed=3, dtype=dtype).abs() + 0.5, epsilon=1e-5)
            for by, residual in ((norm, states.flip(0)), (None, None)):
                expected = PLAIN.mix_experts(states, on_cpu(experts), norm=by, residual=residual, logits=logits)
                for operations in kernels:
                    found = operations.mix_experts(
                        states.to(device),
                        experts,
                        norm=by and moved(by, device),
                        residual=None if residual is None else residual.to(device),
                        logits=None if logits is None else logits.to(device),
                    )
                    assert is_close(found, expected), (shape, dtype, by is None)


def compare_tokens_alone() -> None:
    """In `invariant` a token's bits are the same beside any others, otherwise beside 1 to 63 of them."""
    from inference_engine.kernels.triton.fused import open_fused, open_invariant

    device = device_of_kernels()
    # numpy, which multiplies for the interpreter, has other orders for more columns: there each block has one size.
    on_gpu = device.type == "cuda"
    count, alone, inputs, number = (600, (0, 3, 599), 2048, 8) if on_gpu else (18, (0, 17), 256, 4)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    states = numbers(count, inputs, dtype=dtype).to(device)
    for chosen in (2, 3):
        experts = made((count, inputs, 96, number, chosen), dtype, device)
        for operations, most, least in ((open_invariant(), count, 1), (open_fused(), min(count, 64), 2)):
            together = operations.mix_experts(states[:most], experts)
            for first in (each for each in alone if each + least <= most):
                few = operations.mix_experts(states[first : first + least], experts)
                assert torch.equal(few, together[first : first + least]), "tokens beside a token change it"


def compare_weights() -> None:
    """They are those of the reference, of any number of tokens; on a GPU, to the bit the same for each number."""
    from inference_engine.kernels.triton.experts import choose, choose_in_blocks

    device = device_of_kernels()
    for number, chosen in ((64, 8), (128, 8), (60, 4), (130, 7)):
        for sums_to_one in (True, False):
            routing = Router(chosen=chosen, sums_to_one=sums_to_one)
            experts = replace(made((1, 8, 8, number, chosen), torch.float32, device), routing=routing)
            products = numbers(70, number).to(device)
            _, weights = choose(products, experts)
            assert is_close(weights, choose_experts(products.cpu(), experts)[1])
            for count in (1, 2, 7, 16, 64):
                few, _ = choose_in_blocks(products[:count], experts)
                assert is_close(few, weights[:count].cpu())
                assert device.type == "cpu" or torch.equal(few, weights[:count]), (number, chosen, count)


def compare_choices() -> None:
    """Of equal products the first are chosen. Whatever products are, a token's experts are several that there are."""
    from inference_engine.kernels.triton.experts import choose, choose_in_blocks

    device = device_of_kernels()
    experts = made((4, 8, 8, 6, 3), torch.float32, device)
    nan, inf = float("nan"), float("inf")
    rows = (
        [1.0] * 6,
        [-inf, 0.0, -inf, -inf, 1.0, -inf],
        [-inf] * 6,
        [nan, 0.0, 2.0, nan, 1.0, 0.0],
        [nan] * 6,
        [0.0, inf, 1.0, inf, 2.0, 0.0],
        [-3.4e38, -inf, -3.4e38, -inf, -inf, -inf],
    )
    products = torch.tensor(rows, device=device)
    expected_ids, expected = choose_experts(products.cpu(), experts)
    ids, weights = (each.cpu() for each in choose(products, experts))
    few, blocks = choose_in_blocks(products, experts)

    for found in (weights, few.cpu()):
        assert torch.equal(found.isnan().all(1), expected.isnan().all(1))
        assert torch.equal(found.isnan().any(1), expected.isnan().any(1))
        sound = ~expected.isnan().any(1)
        assert is_close(found[sound], expected[sound])
    for row in ids.tolist():
        assert len(set(row)) == 3 and set(row) <= set(range(6)), row
    assert ids[0].tolist() == [0, 1, 2] and ids[1, :2].tolist() == expected_ids[1, :2].tolist()
    assert sorted(pairs_of(blocks)) == list(enumerate(ids.flatten().tolist()))


def pairs_of(blocks: Any) -> list[tuple[int, int]]:
    """Each pair, and the expert in whose block it lies."""
    places, owners, taken = (each.cpu() for each in (blocks.places, blocks.owners, blocks.taken))
    return [
        (pair, int(owner))
        for place, (owner, filled) in enumerate(zip(owners, taken, strict=True))
        if owner >= 0
        for pair in places[place * blocks.size : place * blocks.size + int(filled)].tolist()
    ]


def compare_blocks() -> None:
    """Each pair is in one block, which is its expert's."""
    from inference_engine.kernels.triton.experts import choose_in_blocks, sort_in_blocks

    device = device_of_kernels()
    for count, number, chosen in ((1, 1, 1), (3, 6, 6), (17, 5, 2), (40, 9, 3), (64, 130, 8), (300, 3, 2)):
        experts = made((count, 8, 8, number, chosen), torch.float32, device)
        for products in (numbers(count, number), torch.zeros(count, number)):
            ids, _ = choose_experts(products, experts)
            expected = list(enumerate(ids.flatten().tolist()))
            assert sorted(pairs_of(sort_in_blocks(ids.to(device), number))) == expected, (count, number, chosen)
            if count <= 64:
                _, blocks = choose_in_blocks(products.to(device), experts)
                assert sorted(pairs_of(blocks)) == expected, (count, number, chosen)


@pytest.mark.parametrize(
    "compare",
    [
        compare_choices,
        *map(interpreted, (compare_mixtures, compare_tokens_alone, compare_weights, compare_blocks)),
    ],
)
def test_the_kernels_give_what_the_reference_gives(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
