"""Attention without a mask is attention under the mask that lets each query see all up to its own position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.attention import attend, attend_causal

States = tuple[Tensor, Tensor, Tensor]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}
HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 24), (4, 2, 128), (2, 1, 256)]
# So many queries at the end of so many positions: all of them, some, one, more than a kernel's tile.
COUNTS = [(1, 1), (5, 5), (130, 130), (1, 40), (7, 40), (33, 300)]


def states(heads: tuple[int, int, int], tokens: int, count: int, dtype: torch.dtype, device: str) -> States:
    """Queries as a projection leaves them, keys and values as they lie in regions: longer than what is read."""
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(tokens + count)
    shapes = ((tokens, query_heads * dim), (kv_heads, count + 3, dim), (kv_heads, count + 3, dim))
    queries, keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return queries.view(tokens, query_heads, dim), keys[:, :count], values[:, :count]


def causal_mask(tokens: int, count: int, dtype: torch.dtype, device: str) -> Tensor:
    positions = torch.arange(count, device=device)
    later = positions > positions[count - tokens :, None]
    return torch.zeros(tokens, count, dtype=dtype, device=device).masked_fill_(later, float("-inf"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_no_mask_gives_what_a_causal_mask_gives(heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    for tokens, count in COUNTS:
        given = states(heads, tokens, count, dtype, device)
        queries, keys, values = (one.float() for one in given)
        mask = causal_mask(tokens, count, torch.float32, device)
        expected = attend(queries, keys, values, mask, scaling=heads[2] ** -0.5)

        out = attend_causal(*given, scaling=heads[2] ** -0.5)

        assert out.dtype == dtype
        assert out.shape == expected.shape
        worst = (out.float() - expected).abs().max().item()
        assert worst < TOLERANCES[dtype], (tokens, count, worst)


@pytest.mark.parametrize("device", DEVICES)
def test_values_of_another_size_than_keys_are_read_without_a_mask_too(device: str) -> None:
    """As in latent attention: many heads read one, in several pieces of queries."""
    for tokens, count in ((1, 40), (7, 7), (60, 900)):
        queries, keys, _ = states((32, 1, 24), tokens, count, torch.float32, device)
        values = keys[..., :16]
        expected = attend(queries, keys, values, causal_mask(tokens, count, torch.float32, device), scaling=0.2)

        out = attend_causal(queries, keys, values, scaling=0.2)

        assert out.shape == (tokens, 32, 16)
        assert (out - expected).abs().max().item() < TOLERANCES[torch.float32], (tokens, count)


@pytest.mark.parametrize("device", DEVICES)
def test_caps_and_sinks_of_heads_count_without_a_mask_too(device: str) -> None:
    queries, keys, values = states((4, 2, 16), 6, 20, torch.float32, device)
    mask = causal_mask(6, 20, torch.float32, device)
    sinks = torch.linspace(-1.0, 1.0, 4, device=device)
    for softcap, head_sinks in ((3.0, None), (None, sinks)):
        expected = attend(queries, keys, values, mask, scaling=0.25, softcap=softcap, head_sinks=head_sinks)

        out = attend_causal(queries, keys, values, scaling=0.25, softcap=softcap, head_sinks=head_sinks)

        assert torch.allclose(out, expected, atol=1e-6)
