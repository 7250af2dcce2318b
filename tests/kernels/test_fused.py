"""The fused operations in Triton give what their references give, and no token's numbers depend on the others'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.fused import PLAIN, SQUARES, Fused, RopeTable, RowNorm
from inference_engine.kv.geometry import EntryShape
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton

# Tokens, inputs, outputs: none, one or all of them a multiple of a tile.
SHAPES = ((1, 64, 32), (1, 200, 37), (1, 4100, 6), (5, 200, 37), (16, 1030, 6), (33, 200, 37), (70, 200, 37))
OF_ANY_NUMBER = ((1, 200, 37), (3, 1030, 6), (70, 200, 37), (100, 1030, 6))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(norm: RowNorm, device: torch.device) -> RowNorm:
    return RowNorm(weights=norm.weights.to(device), epsilon=norm.epsilon, adds_one=norm.adds_one)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A product with what stands around it, on the CPU."""

    matrix: Tensor
    bias: Tensor | None = None
    norm: RowNorm | None = None
    residual: Tensor | None = None
    activation: str | None = None

    def run(self, operations: Fused, states: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Of these states, on their device; tokens: whose residuals are added."""
        device = states.device
        return operations.product(
            states,
            self.matrix.to(device),
            bias=None if self.bias is None else self.bias.to(device),
            norm=None if self.norm is None else moved(self.norm, device),
            residual=None if self.residual is None else self.residual[tokens].to(device),
            activation=self.activation,
        )


def device_of_kernels() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Up to the order of adding, and one rounding to the dtype."""
    tolerance = 2e-5 if expected.dtype is torch.float32 else 1e-2
    worst = (found.cpu().float() - expected.float()).abs().max().item()
    return found.dtype == expected.dtype and worst <= tolerance * max(1.0, expected.float().abs().max().item())


def compare_products() -> None:
    from inference_engine.kernels.triton.fused import open_fused

    compare_shapes(open_fused(), SHAPES, is_invariant=False)


def compare_products_of_any_number() -> None:
    from inference_engine.kernels.triton.fused import open_invariant

    compare_shapes(open_invariant(), OF_ANY_NUMBER, is_invariant=True)


def compare_shapes(kernels: Fused, shapes: tuple[tuple[int, int, int], ...], *, is_invariant: bool) -> None:
    device = device_of_kernels()
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    for count, inputs, outputs in shapes:
        for dtype in (torch.float32, half):
            states = numbers(count, inputs, dtype=dtype)
            norm = RowNorm(weights=numbers(inputs, seed=1, dtype=dtype), epsilon=1e-5)
            from_one = RowNorm(weights=norm.weights, epsilon=1e-2, adds_one=True)
            whole = numbers(2 * outputs, inputs, seed=2, dtype=dtype) * inputs**-0.5
            bias = numbers(2 * outputs, seed=3, dtype=dtype)
            residual = numbers(count, outputs, seed=4, dtype=dtype)
            cases = (
                Case(matrix=whole, norm=norm, bias=bias),
                Case(matrix=whole[:outputs], residual=residual),
                Case(matrix=whole, norm=from_one, activation="silu"),
                Case(matrix=whole, bias=bias, activation="gelu_tanh"),
                Case(matrix=whole, bias=bias, activation=SQUARES),
            )
            for case in cases if dtype is torch.float32 else cases[1:3]:
                found = case.run(kernels, states.to(device))
                assert is_close(found, case.run(PLAIN, states)), (count, inputs, outputs, dtype, case.activation)
                for some in ((1, 3), (2, 3)) if is_invariant else ((1, 3),) if count <= 64 else ():
                    # numpy, which multiplies for the interpreter, has other orders for more columns
                    if count > 2 and (count <= 16 or device.type == "cuda"):
                        tokens = slice(*some)
                        few = case.run(kernels, states[tokens].to(device), tokens)
                        assert torch.equal(few, found[tokens]), "tokens beside a token change it"
            scale = residual[0, :1]
            found = kernels.norm(
                states.to(device), moved(from_one, device), residual=states.to(device), scale=scale.to(device)
            )
            expected = PLAIN.norm(states, from_one, residual=states, scale=scale)
            assert is_close(found, expected), (count, inputs, dtype)


def placed(
    operations: Fused,
    device: torch.device,
    *,
    count: int,
    sizes: tuple[int, int, int],
    norms: tuple[RowNorm, RowNorm] | None,
    turn: RopeTable | None,
    entry: EntryShape | None = None,
    **options: Any,
) -> list[Tensor]:
    """The queries, and the buffers of keys and of values after it. entry: other than keys and values side by side."""
    query_heads, kv_heads, head_dim = sizes
    entry = entry or EntryShape(head_dim, head_dim)
    given = 1 if options.get("values_are_keys") else 2
    heads = numbers(100, (query_heads + given * kv_heads) * head_dim)[:count]
    room = max(20, count * kv_heads)
    keys, values = entry.split(torch.full((room, entry.width), 7.0, device=device))
    writes = torch.randperm(room, generator=torch.Generator().manual_seed(3))[: count * kv_heads]
    queries = operations.place_heads(
        heads.to(device),
        keys,
        values,
        writes.to(device),
        query_heads=query_heads,
        kv_heads=kv_heads,
        norms=norms and (moved(norms[0], device), moved(norms[1], device)),
        turn=turn
        and RopeTable(
            cos=turn.cos.to(device),
            sin=turn.sin.to(device),
            rows=None if turn.rows is None else turn.rows.to(device),
        ),
        **options,
    )
    return [queries, keys, values]


def compare_heads() -> None:
    from inference_engine.kernels.triton.fused import open_fused

    kernels = open_fused()

    device = device_of_kernels()
    for count, sizes, adds_one in ((1, (6, 2, 48), False), (3, (2, 1, 16), True), (67, (2, 1, 24), False)):
        query_norm, key_norm = (
            RowNorm(weights=part, epsilon=1e-6, adds_one=adds_one) for part in numbers(2, sizes[2], seed=1)
        )
        angles = numbers(count, sizes[2] // 2, seed=2)
        turn = RopeTable(cos=angles.cos(), sin=angles.sin())
        turned = replace(turn, rows=torch.arange(count - 1, -1, -1))
        partly = RopeTable(cos=turn.cos[:, :4].contiguous(), sin=turn.sin[:, :4].contiguous())
        for norms, by in (
            ((query_norm, key_norm), turn),
            (None, turned),
            ((query_norm, key_norm), partly),
            (None, None),
        ):
            wanted = placed(PLAIN, torch.device("cpu"), count=count, sizes=sizes, norms=norms, turn=by)
            got = placed(kernels, device, count=count, sizes=sizes, norms=norms, turn=by)
            for expected, found in zip(wanted, got, strict=True):
                assert is_close(found, expected), (count, sizes, norms is None)
            if count > 64:  # several tokens share a program
                alone = placed(kernels, device, count=1, sizes=sizes, norms=norms, turn=by)
                assert torch.equal(alone[0], got[0][:1]), "tokens beside a token change it"


def compare_heads_that_share() -> None:
    """Values that are normed, that are keys, and whose still numbers entries hold once; queries without either."""
    from inference_engine.kernels.triton.fused import open_fused

    kernels, device = open_fused(), device_of_kernels()
    for count, dim, turned in ((1, 32, 4), (3, 48, 8), (67, 16, 2)):
        norms = tuple(RowNorm(weights=part, epsilon=1e-6) for part in numbers(2, dim, seed=1))
        angles = numbers(count, dim // 2, seed=2)
        angles[:, turned:] = 0.0
        turn = RopeTable(cos=angles.cos(), sin=angles.sin())
        still = tuple(number for number in range(dim) if number % (dim // 2) >= turned)
        entry = EntryShape(dim, dim, len(still))
        for kv_heads, shape, options in (
            (2, None, {"value_epsilon": 1e-5}),
            (2, None, {"value_epsilon": 1e-5, "values_are_keys": True}),
            (1, entry, {"value_epsilon": 1e-5, "values_are_keys": True, "shared": still}),
            (0, entry, {"shared": still}),
        ):
            sizes = (4, kv_heads, dim)
            wanted, got = (
                placed(by, to, count=count, sizes=sizes, norms=norms, turn=turn, entry=shape, **options)  # type: ignore[arg-type]
                for by, to in ((PLAIN, torch.device("cpu")), (kernels, device))
            )
            for expected, found in zip(wanted, got, strict=True):
                assert is_close(found, expected), (count, dim, kv_heads, options)


@pytest.mark.parametrize(
    "compare",
    [compare_products, compare_heads, *map(interpreted, (compare_products_of_any_number, compare_heads_that_share))],
)
def test_the_kernels_give_what_the_references_give(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
