"""Codes chosen by the library are, to the bit, those of plain torch: at every level of instructions."""

from __future__ import annotations

import pytest
import torch

from inference_engine.backends.native.entry_coder import NativeChoice
from inference_engine.kernels.trellis import STEPS, choose, make_levels
from tests.tiny_native import library

# Vectors and numbers: one lane or many, chains of equal length or not.
SIZES = [(1, 1), (3, 5), (16, STEPS), (17, STEPS + 1), (33, 700), (300, 37)]


@pytest.mark.parametrize(("vectors", "count"), SIZES)
def test_codes_are_those_of_the_reference(vectors: int, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    widths = sorted(torch.randint(1, 9, (count,), generator=draw).tolist(), reverse=True)
    tables = {width: torch.randn(2 ** (width + 1), generator=draw).sort().values for width in set(widths)}
    levels = make_levels([tables[width] for width in widths], torch.rand(count, generator=draw) + 0.1)
    numbers = 2 * torch.randn(vectors, count, generator=draw)
    # Numbers that lie between two levels, and on one.
    numbers[0, 0] = (tables[widths[0]][0] + tables[widths[0]][4 % len(tables[widths[0]])]) / 2
    numbers[-1, -1] = tables[widths[-1]][1]
    expected = choose(numbers, levels)

    for level in library().levels():
        for threads in (1, 3):
            with library().open_threads(threads) as opened:
                found = NativeChoice(library().kernels(level), opened)(numbers, levels)
            assert torch.equal(found, expected), (level, threads)
