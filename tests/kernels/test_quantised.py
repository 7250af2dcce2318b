"""Products with matrices in fewer bits give what products with their numbers give, in Triton and by the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.fused import PLAIN, Fused
from inference_engine.kernels.quantised import QuantisedMatrix, joined, pack_codes, quantise
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton
from tests.kernels.poisoned import poison
from tests.kernels.test_fused import Case, device_of_kernels, is_close, moved, numbers

# Tokens, inputs, outputs: none, one or all of them a multiple of a tile or of a group.
SHAPES = (
    (1, 64, 32),
    (1, 200, 37),
    (1, 1400, 6),
    (5, 200, 37),
    (16, 1030, 6),
    (64, 256, 37),
    (33, 2100, 6),
    (70, 200, 37),
)
OF_ANY_NUMBER = ((1, 200, 37), (3, 1030, 6), (70, 200, 37), (70, 2100, 6))


def fp8(outputs: int, inputs: int, group: int) -> QuantisedMatrix:
    """Any codes but NaN, and a scale for each group."""
    codes = numbers(outputs, inputs, seed=2).clamp(-4, 4).to(torch.float8_e4m3fn)
    scales = numbers(outputs, -(-inputs // group), seed=5).abs() * inputs**-0.5
    return QuantisedMatrix(codes=codes, scales=scales, zeros=None, inputs=inputs, group=group)


def int4(outputs: int, inputs: int, group: int, *, has_zeros: bool) -> QuantisedMatrix:
    generator = torch.Generator().manual_seed(2)
    groups = -(-inputs // group)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, 17, (outputs, groups), generator=generator).to(torch.uint8)
    scales = (numbers(outputs, groups, seed=5).abs() * 0.2 * inputs**-0.5).half()
    packed = pack_codes(codes, group)
    # What fills up the last group is not to be read.
    packed.view(outputs, groups, group // 2)[:, -1] |= filling(inputs, group)
    return QuantisedMatrix(codes=packed, scales=scales, zeros=zeros if has_zeros else None, inputs=inputs, group=group)


def filling(inputs: int, group: int) -> Tensor:
    """The largest codes behind the last input."""
    is_filling = torch.arange(group) >= (inputs - 1) % group + 1
    low, high = (is_filling.to(torch.uint8) * 15).chunk(2)
    return low | (high << 4)


def matrices(outputs: int, inputs: int) -> dict[str, QuantisedMatrix]:
    return {
        "fp8": fp8(outputs, inputs, inputs),
        "fp8 in groups": fp8(outputs, inputs, 128),
        "int4": int4(outputs, inputs, 128, has_zeros=False),
        "int4 with zeros": int4(outputs, inputs, 32, has_zeros=True),
    }


def product(operations: Fused, case: Case, matrix: QuantisedMatrix, states: Tensor) -> Tensor:
    device = states.device
    return operations.product(
        states,
        matrix.to(device),
        bias=None if case.bias is None else case.bias.to(device),
        norm=None if case.norm is None else moved(case.norm, device),
        residual=None if case.residual is None else case.residual.to(device),
        activation=case.activation,
    )


def poison_products() -> None:
    from inference_engine.kernels.triton import products, quantised, row_norm

    poison(products, quantised, row_norm)


def compare_products() -> None:
    from inference_engine.kernels.triton.fused import open_fused

    poison_products()
    compare_shapes(open_fused(), SHAPES, is_invariant=False)


def compare_products_of_any_number() -> None:
    from inference_engine.kernels.triton.fused import open_invariant

    poison_products()
    compare_shapes(open_invariant(), OF_ANY_NUMBER, is_invariant=True)


def compare_shapes(kernels: Fused, shapes: tuple[tuple[int, int, int], ...], *, is_invariant: bool) -> None:
    from inference_engine.kernels.fused import RowNorm

    device = device_of_kernels()
    half = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    for number, (count, inputs, outputs) in enumerate(shapes):
        for kind, (name, whole) in enumerate(matrices(2 * outputs, inputs).items()):
            if device.type != "cuda" and (number + kind) % 2:
                continue  # interpreted, shapes take turns
            for dtype in (torch.float32, half):
                states = numbers(count, inputs, dtype=dtype)
                norm = RowNorm(weights=numbers(inputs, seed=1, dtype=dtype), epsilon=1e-5, adds_one=True)
                bias = numbers(2 * outputs, seed=3, dtype=dtype)
                residual = numbers(count, outputs, seed=4, dtype=dtype)
                cases = (
                    (Case(matrix=states, norm=norm, bias=bias, activation="silu"), whole),
                    (Case(matrix=states, residual=residual), whole.rows(outputs, outputs)),
                )
                for case, matrix in cases if dtype is torch.float32 else cases[:1]:
                    found = product(kernels, case, matrix, states.to(device))
                    expected = product(PLAIN, case, matrix, states)
                    assert is_close(found, expected), (count, inputs, outputs, name, dtype, case.activation)
                    # numpy, which multiplies for the interpreter, has other orders for more columns
                    if case.residual is None and 2 < count <= (100 if device.type == "cuda" else 16):
                        # One token alone, or two, or, as more than 32 have another tile, one more than those.
                        some = slice(2, 3) if is_invariant else slice(1, 3) if count <= 32 else slice(33)
                        few = product(kernels, case, matrix, states[some].to(device))
                        if count <= 64 or is_invariant:
                            assert torch.equal(few, found[some]), "tokens beside a token change it"


def compare_numbers() -> None:
    from inference_engine.kernels.triton.quantised import unpacked

    poison_products()
    device = device_of_kernels()
    for outputs, inputs in ((3, 200), (5, 128), (2, 4100)):
        for name, matrix in matrices(outputs, inputs).items():
            found = unpacked(matrix.to(device), torch.float32).cpu()
            assert torch.equal(found, matrix.unpacked(torch.float32)), (outputs, inputs, name)


def compare_every_code() -> None:
    """Products with unit vectors are the numbers themselves: every 8-bit float, every code with every zero, exactly."""
    from inference_engine.kernels.triton.fused import open_invariant

    poison_products()
    device, product_of = device_of_kernels(), open_invariant().product
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    floats = torch.where(codes.float().isnan(), torch.zeros(()), codes.float()).to(torch.float8_e4m3fn)
    ones = torch.ones(4, 1)
    zeros = torch.arange(17, dtype=torch.uint8)[:, None]
    nibbles = pack_codes((torch.arange(128) % 16).expand(17, -1), 128)
    for matrix in (
        QuantisedMatrix(codes=floats, scales=ones, zeros=None, inputs=64, group=64),
        QuantisedMatrix(codes=floats, scales=torch.ones(4, 2), zeros=None, inputs=64, group=32),
        QuantisedMatrix(codes=nibbles, scales=torch.ones(17, 1), zeros=zeros, inputs=128, group=128),
        QuantisedMatrix(codes=nibbles, scales=torch.ones(17, 1), zeros=None, inputs=128, group=128),
    ):
        units = torch.eye(matrix.inputs, dtype=dtype, device=device)
        found = torch.cat(
            [product_of(units[first : first + 16], matrix.to(device)) for first in range(0, len(units), 16)]
        )
        assert torch.equal(found.T.float().cpu(), matrix.unpacked(torch.float32)), matrix.format


def check_counters() -> None:
    """The smallest tiles have 16 rows."""
    from inference_engine.kernels.triton.tiles import MOST_TILES, parts_of, parts_of_quantised

    for outputs in range(16, 2**15, 16):
        parts = (parts_of(outputs, 8192), *(parts_of_quantised(outputs, 8192, matrices) for matrices in (1, 2)))
        assert max(parts) == 1 or outputs // 16 <= MOST_TILES, "programs that share a sum need a counter for each tile"


def test_programs_that_share_a_sum_have_counters() -> None:
    run_with_triton(check_counters)


@pytest.mark.parametrize(
    "compare",
    [
        *(interpreted(compare) for compare in (compare_products, compare_products_of_any_number)),
        compare_numbers,
        compare_every_code,
    ],
)
def test_the_kernels_give_what_the_references_give(compare: Callable[[], None]) -> None:
    run_with_triton(compare)


def test_a_quantised_matrix_is_within_half_a_step_of_its_numbers() -> None:
    matrix = numbers(7, 200, seed=1) * torch.logspace(-3, 1, 7)[:, None]
    eighth = quantise(matrix, "fp8")
    # Three bits behind the first, or steps of 2^-9 where numbers are small.
    step = torch.maximum(matrix.abs() * 2**-4, eighth.scales * 2**-10)
    assert bool(((eighth.unpacked(torch.float32) - matrix).abs() <= step * 1.0001).all())
    assert eighth.nbytes == 7 * (200 + 4)

    fourth = quantise(matrix, "int4")
    groups = torch.nn.functional.pad(matrix, (0, 56)).view(7, 2, 128)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = torch.nn.functional.pad(fourth.unpacked(torch.float32) - matrix, (0, 56)).view(7, 2, 128)
    # That of numbers which are rounded to the nearest of evenly spaced ones, or less.
    assert bool((error.square().mean(-1) <= step.square() / 12 * 1.3).all())
    assert fourth.nbytes == 7 * (128 + 2 * 2 + 2)


@pytest.mark.parametrize("name", ["fp8", "fp8 in groups", "int4", "int4 with zeros"])
def test_matrices_that_are_laid_together_are_views_of_it(name: str) -> None:
    one, other = matrices(4, 200)[name], matrices(6, 200)[name]
    both = joined([one, other])
    assert both is not None
    assert torch.equal(both.rows(4, 6).unpacked(torch.float32), other.unpacked(torch.float32))
    assert both.rows(4, 6).codes.untyped_storage().data_ptr() == both.codes.untyped_storage().data_ptr()
    assert joined([one, quantise(numbers(4, 200), "fp8" if name != "fp8" else "int4")]) is None
