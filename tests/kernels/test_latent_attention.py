"""Kernels of latent attention give what their references give, whatever a step's sessions are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inference_engine.kernels.fused import PLAIN, LatentHeads, RopeTable, RowNorm
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kernels.reads import AttentionCall
from tests.further import interpreted
from tests.kernels.own_process import run_with_triton
from tests.kernels.test_fused import device_of_kernels, is_close, moved, numbers
from tests.kernels.test_ragged_attention import case, chunks, forks

# Heads, numbers of a key, those of a value.
SHAPES = ((4, 24, 16), (20, 50, 40))
LARGE = ((16, 576, 512), (128, 576, 512))


def compare_attention() -> None:
    from inference_engine.kernels.triton.ragged_attention import attend_ragged as kernel

    device = device_of_kernels()
    is_quick = device.type == "cuda"
    for heads, width, rank in (*SHAPES, *LARGE) if is_quick else SHAPES:
        for dtype, most in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2)) if is_quick else ((torch.float32, 2e-5),):
            for build in (case, chunks, forks):
                queries, keys, _, lines, _ = build((heads, 1, width), dtype)
                count = len(lines)
                some = [slice(None), slice(0, 1), slice(count - 9, count)] if is_quick else [slice(0, count, 7)]
                for part in some:
                    asked, own = queries[part].contiguous(), lines[part].contiguous()
                    given = [each.to(device) for each in (asked, keys, own)]
                    of_kernel, expected = (
                        attention(
                            AttentionCall(each[0], each[1], each[1][:, :rank], each[2], kv_heads=1, scaling=width**-0.5)
                        ).cpu()
                        for attention, each in ((kernel, given), (attend_ragged, [asked, keys, own]))
                    )
                    worst = float((of_kernel.float() - expected.float()).abs().max())
                    assert worst < most, (heads, width, dtype, build.__name__, part, worst)


def compare_heads() -> None:
    from inference_engine.kernels.triton.fused import open_fused

    device, kernels = device_of_kernels(), open_fused()
    for count, heads, own, rank, rotated, value in (
        (1, 3, 12, 24, 8, 20),
        (3, 2, 48, 64, 16, 16),
        (9, 2, 16, 40, 4, 8),
    ):
        halves = numbers(heads, own + value, rank, seed=1) * rank**-0.5
        norm = RowNorm(weights=numbers(rank, seed=2), epsilon=1e-5)
        angles, rows = numbers(12, rotated // 2, seed=3), torch.arange(count - 1, -1, -1)
        together = numbers(count, heads * (own + rotated) + rank + rotated, seed=4)
        for pairs, keeps in ((True, True), (True, False), (False, False)):
            found = []
            for by, to in ((PLAIN, torch.device("cpu")), (kernels, device)):
                layer = LatentHeads(halves=halves.to(to), own=own, norm=moved(norm, to), pairs=pairs, keeps_pairs=keeps)
                turn = RopeTable(cos=angles.cos().to(to), sin=angles.sin().to(to), rows=rows.to(to))
                entries = torch.full((20, rank + rotated), 7.0, device=to)
                queries, latent = together.to(to).tensor_split([heads * (own + rotated)], dim=-1)
                asked = by.place_latent(queries, latent, entries, rows.to(to) + 5, layer, turn)
                absorbed = by.head_products(asked[..., :own], layer.halves[:, :own])
                output = by.head_products(absorbed, layer.halves[:, own:].mT)
                found.append((asked, entries, absorbed, output))
            for expected, got in zip(*found, strict=True):
                assert is_close(got, expected), (count, pairs, keeps)


@pytest.mark.parametrize("compare", [interpreted(compare_attention), compare_heads])
def test_the_kernels_give_what_the_references_give(compare: Callable[[], None]) -> None:
    run_with_triton(compare)
