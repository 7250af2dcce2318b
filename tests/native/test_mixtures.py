"""Mixtures of experts on the CPU are those of the reference, whatever the router; a token's bits are its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inference_engine.kernels.fused import ExpertMatrices, mix_experts
from inference_engine.kernels.routing import Router
from inference_engine.models.operations import Embed, Experts, Operation, Product, Select, StepList
from tests.native.test_failures import _Tensors, logits_of

COUNT, WIDTH, INNER, VOCABULARY = 8, 32, 16, 50
ROUTERS = (
    Router(chosen=2),
    Router(chosen=3, sums_to_one=True),
    Router(chosen=2, scores="sigmoid", factor=2.5),
    Router(chosen=3, scores="sigmoid", sums_to_one=True, groups=4, chosen_groups=2),
    Router(chosen=1, groups=8, chosen_groups=3),
)


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_mixture_is_that_of_the_reference(router: Router, has_bias: bool) -> None:
    rng = np.random.default_rng(0)

    def made(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    gates, ups, downs = made(COUNT, INNER, WIDTH), made(COUNT, INNER, WIDTH), made(COUNT, WIDTH, INNER)
    tensors = {
        "words": made(VOCABULARY, WIDTH),
        "router": made(COUNT, WIDTH) / 4,
        "head": np.eye(VOCABULARY, WIDTH, dtype=np.float32),
    }
    tensors |= {
        f"{name}{at}": part[at] for name, part in zip("gud", (gates, ups, downs), strict=True) for at in range(COUNT)
    }
    if has_bias:
        tensors["bias"] = made(COUNT)
    experts = Experts(
        input="hidden",
        router="router",
        output="delta",
        matrices=tuple((f"g{at}", f"u{at}", f"d{at}") for at in range(COUNT)),
        routing=router,
        bias="bias" if has_bias else None,
        activation="silu",
    )
    operations: tuple[Operation, ...] = (
        Embed(output="hidden", matrix="words"),
        Product(input="hidden", output="router", matrices=("router",)),
        experts,
        Select(input="delta", output="last"),
        Product(input="last", output=None, matrices=("head",)),
    )
    widths = {"hidden": WIDTH, "router": COUNT, "delta": WIDTH, "last": WIDTH}
    steps = StepList(operations=operations, widths=widths, layers=(), hidden=WIDTH, vocabulary=VOCABULARY)
    ids = [int(token) for token in rng.integers(0, VOCABULARY, 40)]
    own = replace(
        ExpertMatrices(
            router=torch.from_numpy(tensors["router"]),
            gates=torch.from_numpy(np.concatenate([gates, ups], axis=1)),
            downs=torch.from_numpy(downs),
            routing=router,
            activation="silu",
        ),
        bias=torch.from_numpy(tensors["bias"]) if has_bias else None,
    )
    expected = mix_experts(torch.from_numpy(tensors["words"][ids]), own).numpy()

    found = logits_of(steps, _Tensors(**tensors), ids, threads=3)  # which take experts; few tokens share products
    np.testing.assert_allclose(found[:, :WIDTH], expected, rtol=1e-4, atol=1e-4)
    for first in (0, 7, 39):
        for threads in (1, 3):
            alone = logits_of(steps, _Tensors(**tensors), ids[first : first + 1], threads=threads)
            assert np.array_equal(alone[0], found[first])
