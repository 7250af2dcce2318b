"""Codes become entries, and entries numbers: what a decoder says, and in Triton what the references give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.latents import (
    PLAIN,
    AnalysedLayer,
    Analysis,
    CodeTables,
    LatentOps,
    MadeLayer,
    Synthesis,
    operand_dtype,
    padded,
)
from tests.kernels.own_process import run_with_triton

# Tokens, codes, chains, Hkv, D.
SIZES = [(3, 5, 1, 2, 32), (70, 37, 2, 3, 64), (1, 300, 37, 1, 32), (65, 64, 2, 2, 128)]
FIRST_BYTE = 5


def made_tables(count: int, chains: int, device: str, most_bits: int = 7) -> CodeTables:
    generator = torch.Generator().manual_seed(count)
    widths = torch.randint(1, most_bits + 1, (count,), generator=generator, dtype=torch.int32)
    sizes = 2 ** (widths + 1)
    return CodeTables.of(
        widths,
        (sizes.cumsum(0) - sizes).int().to(device),
        torch.randn(int(sizes.sum()), generator=generator),
        torch.rand(256, generator=generator) + 0.5,
        chains=chains,
        first_byte=FIRST_BYTE,
    )


def made_codes(tokens: int, tables: CodeTables, device: str, behind: int = 3) -> tuple[Tensor, Tensor]:
    """Two halves, with other bytes before and behind the group's own."""
    width = FIRST_BYTE + 1 + -(-int(tables.widths.sum()) // 8) + behind
    half = -(-width // 2)
    codes = torch.randint(0, 256, (tokens, 2 * half), generator=torch.Generator().manual_seed(tokens))
    return codes[:, :half].to(torch.uint8).to(device), codes[:, half:].to(torch.uint8).to(device)


def units_one_by_one(low: Tensor, high: Tensor, tables: CodeTables) -> Tensor:
    """As `LayerDecoder` describes them."""
    found = []
    for code in torch.cat((low, high), dim=1).tolist():
        own = code[FIRST_BYTE:]
        bits = "".join(f"{byte:08b}" for byte in own[1:])
        begins, widths = tables.begins.tolist(), tables.widths.tolist()
        codes = [int(bits[begin : begin + width], 2) for begin, width in zip(begins, widths, strict=True)]
        lasts = [0] * (3 * tables.chains) + [number & 1 for number in codes]

        def last(place: int, steps: int, lasts: list[int] = lasts) -> int:
            return lasts[place + (3 - steps) * tables.chains]

        places = [
            int(tables.tables[at]) + 4 * (number >> 1) + ((last(at, 0) ^ last(at, 1) ^ last(at, 3)) << 1 | last(at, 2))
            for at, number in enumerate(codes)
        ]
        found.append(tables.levels[places] * tables.scales[own[0]])
    return torch.stack(found)


def made_turn(tokens: int, dim: int, device: str) -> tuple[Tensor, Tensor]:
    angles = torch.rand((tokens, dim // 2), generator=torch.Generator().manual_seed(dim)) * 6
    return angles.cos().to(device), angles.sin().to(device)


def made_synthesis(
    size: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, *, seed: int = 0
) -> Synthesis:
    _, count, _, heads, dim = size
    generator = torch.Generator().manual_seed(dim + seed)
    matrix = torch.randn((heads, 2 * dim, count), generator=generator) / count**0.5
    means = torch.randn((heads, 2 * dim), generator=generator)
    return Synthesis.of(matrix.to(device), means.to(device), dtype)


def analysed(
    operations: LatentOps, size: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, *, turns: bool = True
) -> tuple[Tensor, Tensor]:
    """The numbers of a group of two layers, and what was found. Around the entries lies NaN."""
    tokens, count, _, heads, dim = size
    found, places, matrices, means = torch.zeros(2, device=device), [], [], []
    turn = made_turn(tokens, dim, device) if turns else None
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        states = torch.randn((2, heads, tokens + 9, dim), generator=generator).to(device, dtype)
        states[:, :, :4] = states[:, :, 4 + tokens :] = torch.nan
        places.append(states[:, :, 4 : 4 + tokens])
        matrix = torch.randn((heads, 2 * dim, count), generator=generator) / (heads * dim) ** 0.5
        matrices.append(matrix.to(device))
        means.append(torch.randn((heads, 2 * dim), generator=generator).to(device))
    own = Analysis.of(matrices, means, dtype)
    layers = [AnalysedLayer(one, place[0], place[1], found) for one, place in zip(own, places, strict=True)]
    return operations.analyse(layers, turn=turn), found


def restored(
    operations: LatentOps, size: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, *, turns: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """What lies in two layers' regions of keys and of values afterwards, and what was found; the rest is NaN."""
    tokens, count, chains, heads, dim = size
    tables = made_tables(count, chains, device)
    units = operations.units(*made_codes(tokens, tables, device), tables, operand_dtype(dtype))
    states = torch.full((2, 2, heads, tokens + 9, dim), torch.nan, dtype=dtype, device=device)
    found = torch.zeros((2, 2), device=device)
    turn = made_turn(tokens, dim, device) if turns else None
    own = slice(4, 4 + tokens)
    layers = [
        MadeLayer(made_synthesis(size, dtype, device, seed=layer), keys[:, own], values[:, own], found[layer])
        for layer, (keys, values) in enumerate(states)
    ]
    operations.entries(units, layers, turn=turn)
    assert states[..., own, :].isfinite().all()
    assert states[..., :4, :].isnan().all() and states[..., own.stop :, :].isnan().all()
    keys, values = states[..., own, :].unbind(1)
    return keys, values, found


@pytest.mark.parametrize("size", SIZES)
def test_the_numbers_of_a_code_are_those_that_a_decoder_describes(size: tuple[int, int, int, int, int]) -> None:
    tokens, count, chains, _, _ = size
    tables = made_tables(count, chains, "cpu")
    low, high = made_codes(tokens, tables, "cpu")

    found = PLAIN.units(low, high, tables, torch.float32)

    assert torch.equal(found[:, :count], units_one_by_one(low, high, tables))
    assert not found[:, count:].any()


@pytest.mark.parametrize("size", SIZES)
def test_the_numbers_of_entries_are_their_deviations_times_the_matrix(size: tuple[int, int, int, int, int]) -> None:
    """And a rotation of the keys, to where they stand, is taken back before."""
    tokens, count, _, heads, dim = size
    generator = torch.Generator().manual_seed(1)
    unrotated, values = torch.randn((2, heads, tokens, dim), generator=generator)
    matrix = torch.randn((heads, 2 * dim, count), generator=generator)
    means = torch.randn((heads, 2 * dim), generator=generator)
    both = torch.cat((unrotated, values), dim=-1) - means[:, None]
    expected = (both.transpose(0, 1).flatten(1).double() @ matrix.flatten(0, 1).double()).float()
    turn = made_turn(tokens, dim, "cpu")
    lower, upper = unrotated.chunk(2, dim=-1)
    cos, sin = turn
    rotated = torch.cat((lower * cos - upper * sin, upper * cos + lower * sin), dim=-1)
    found = torch.zeros(2)

    (analysis,) = Analysis.of([matrix], [means], torch.float32)
    units = PLAIN.analyse([AnalysedLayer(analysis, rotated, values, found)], turn=turn)

    torch.testing.assert_close(units[:, :count], expected, atol=1e-3, rtol=1e-4)
    assert not units[:, count:].any()
    assert found.isfinite().all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_numbers_made_in_16_bits_are_precise_at_any_scale_of_the_matrix(scale: float) -> None:
    tokens, count, heads, dim = 40, 30, 2, 32
    generator = torch.Generator().manual_seed(1)
    entries = torch.randn((2, heads, tokens, dim), generator=generator).bfloat16()
    matrix = scale * torch.randn((heads, 2 * dim, count), generator=generator)
    matrix[:, :dim] *= 1e-3  # of keys; of values it is the larger one
    matrix[..., : count // 2] *= 1e-4
    means = torch.randn((heads, 2 * dim), generator=generator)
    deviations = torch.cat(entries.double().unbind(), dim=-1) - means[:, None]
    expected = torch.einsum("htd,hdc->tc", deviations, matrix.double())
    found = torch.zeros(2)

    (analysis,) = Analysis.of([matrix], [means], torch.bfloat16)
    units = PLAIN.analyse([AnalysedLayer(analysis, entries[0], entries[1], found)], turn=None)[:, :count]

    assert ((units - expected).abs().amax(0) < 2e-3 * expected.abs().amax(0)).all()
    assert found.isfinite().all()


def test_an_entry_that_is_not_finite_is_found() -> None:
    means = torch.zeros(1, 64)
    means[0, 40] = torch.inf
    synthesis = Synthesis.of(torch.ones(1, 64, 64), means, torch.float32)
    layer = MadeLayer(synthesis, torch.empty(1, 3, 32), torch.empty(1, 3, 32), torch.zeros(2))

    PLAIN.entries(torch.ones(3, 64), [layer], turn=None)

    assert layer.found.isnan().tolist() == [False, True]


TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def by_triton() -> tuple[LatentOps, str]:
    """And the device that it runs on."""
    from inference_engine.kernels.triton.latents import latents

    return latents, "cuda" if torch.cuda.is_available() else "cpu"


def compare_codes() -> None:
    operations, device = by_triton()
    for size in SIZES:
        tables = made_tables(size[1], size[2], device)
        codes = made_codes(size[0], tables, device)
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(operations.units(*codes, tables, dtype), PLAIN.units(*codes, tables, dtype)), size
    # Codes of two and of three bytes, of which one, or none, begins in one half and ends in the other.
    for most_bits, behind in [(9, 0), *((16, behind) for behind in (0, 8, 16))]:
        tables = made_tables(29, 3, device, most_bits)
        codes = made_codes(2, tables, device, behind)
        numbers = operations.units(*codes, tables, torch.float32)
        assert torch.equal(numbers, PLAIN.units(*codes, tables, torch.float32)), (most_bits, behind)


def compare_restored() -> None:
    _compare_sizes(restored)


def compare_analysed() -> None:
    _compare_sizes(analysed)


def _compare_sizes(operation: Callable[..., Sequence[Tensor]]) -> None:
    operations, device = by_triton()
    for number, size in enumerate(SIZES):
        for kind, (dtype, tolerance) in enumerate(TOLERANCES.items()):
            # Interpreted, sizes take turns: each dtype is rotated, and is not.
            for turns in (True, False) if device == "cuda" else ((number + kind) % 2 == 0,):
                found = operation(operations, size, dtype, device, turns=turns)
                expected = operation(PLAIN, size, dtype, device, turns=turns)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def compare_parts() -> None:
    """The bits of an entry, and of a number, do not depend on how many are computed at once."""
    operations, device = by_triton()
    on_gpu = device == "cuda"
    tokens, count, heads, dim = 1500 if on_gpu else 90, 100, 2, 64
    tables, size = made_tables(count, 2, device), (tokens, count, 2, heads, dim)
    cos, sin = made_turn(tokens, dim, device)
    bounds = [(0, 1), (1, 77), (77, tokens)] if not on_gpu else [(0, 1), (1, 256), (256, 512), (512, tokens)]
    for dtype in (torch.float32, torch.bfloat16) if on_gpu else (torch.float32,):
        units = operations.units(*made_codes(tokens, tables, device), tables, operand_dtype(dtype))
        synthesis = made_synthesis(size, dtype, device)
        matrix = torch.randn((heads, 2 * dim, count), generator=torch.Generator().manual_seed(1)).to(device)
        (analysis,) = Analysis.of([matrix], [synthesis.means], dtype)
        results = []
        for parts in ([(0, tokens)], bounds):
            entries = torch.empty((heads, tokens, 2, dim), dtype=dtype, device=device).permute(2, 0, 1, 3)
            numbers, found = torch.zeros((tokens, padded(count)), device=device), torch.zeros(2, device=device)
            for first, end in parts:
                own = slice(first, end)
                pair, turn = (entries[0][:, own], entries[1][:, own]), (cos[own], sin[own])
                operations.entries(units[own], [MadeLayer(synthesis, *pair, found)], turn=turn)
                analysed = AnalysedLayer(analysis, *pair, found)
                numbers[own] = operations.analyse([analysed], turn=turn)
            results.append((entries, numbers))
        # Interpreted, a product is numpy's, whose sums depend on where in a tile a token stands.
        atol, rtol = (0.0, 0.0) if on_gpu else (2e-1, 2e-2)
        torch.testing.assert_close(results[0], results[1], atol=atol, rtol=rtol)


def compare_broken() -> None:
    operations, device = by_triton()
    units, matrix = torch.ones((5, 64), device=device), torch.ones((1, 128, 64), device=device)
    for place, broken in ((3, [True, False]), (70, [False, True])):
        means = torch.zeros((1, 128), device=device)
        means[0, place] = torch.inf
        entries, found = torch.empty((2, 1, 5, 64), device=device), torch.zeros(2, device=device)
        synthesis = Synthesis.of(matrix, means, torch.float32)
        operations.entries(units, [MadeLayer(synthesis, entries[0], entries[1], found)], turn=None)
        assert found.isnan().tolist() == broken
        again, (back,) = torch.zeros(2, device=device), Analysis.of([matrix], [torch.zeros_like(means)], torch.float32)
        operations.analyse([AnalysedLayer(back, entries[0], entries[1], again)], turn=None)
        assert again.isnan().tolist() == broken
    # What the entries' dtype cannot hold is not finite either.
    halves, found = torch.empty((2, 1, 5, 64), dtype=torch.float16, device=device), torch.zeros(2, device=device)
    wide = Synthesis.of(matrix, torch.full((1, 128), 1e6, device=device), torch.float16)
    operations.entries(units.half(), [MadeLayer(wide, halves[0], halves[1], found)], turn=None)
    assert found.isnan().all()
    # Nor is a deviation that is too large to be multiplied in 16 bits.
    large, found = torch.zeros((2, 1, 5, 64), dtype=torch.bfloat16, device=device), torch.zeros(2, device=device)
    large[0, 0, 4, 63] = 1e8
    (back,) = Analysis.of([matrix], [torch.zeros(1, 128, device=device)], torch.bfloat16)
    operations.analyse([AnalysedLayer(back, large[0], large[1], found)], turn=None)
    assert found.isnan().tolist() == [True, False]


@pytest.mark.parametrize("compare", [compare_codes, compare_restored, compare_analysed, compare_parts, compare_broken])
def test_triton_computes_the_same(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
