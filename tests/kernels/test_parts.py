"""Attention over entries in several places is attention over them laid end to end."""

from __future__ import annotations

from itertools import product

import torch

from inference_engine.kernels.attention import attend
from inference_engine.kernels.segmented_attention import AttentionSegment, attend_parts
from tests.further import each_pair

ERRORS = {torch.float32: 2e-6, torch.float64: 1e-14}


def case(
    tokens: int, sizes: list[int], *, kv_heads: int = 2, group: int = 3, dim: int = 8, dtype: torch.dtype
) -> tuple[torch.Tensor, list[AttentionSegment]]:
    generator = torch.Generator().manual_seed(tokens + sum(sizes))
    queries = torch.randn(tokens, kv_heads * group, dim, generator=generator, dtype=dtype)
    parts = []
    for size in sizes:
        keys, values = (torch.randn(kv_heads, size, dim, generator=generator, dtype=dtype) for _ in range(2))
        parts.append(AttentionSegment(keys, values))
    hidden = torch.zeros(tokens, sizes[-1], dtype=dtype).masked_fill_(
        torch.rand(tokens, sizes[-1], generator=generator) < 0.4, -torch.inf
    )
    hidden[:, 0] = 0.0
    parts[-1] = AttentionSegment(parts[-1].keys, parts[-1].values, hidden)
    return queries, parts


@each_pair(dtype=ERRORS, tokens=[1, 5, 33], sizes=[[7], [1, 1], [40, 9], [17, 3, 5, 21]])
def test_parts_are_read_as_if_they_lay_end_to_end(tokens: int, sizes: list[int], dtype: torch.dtype) -> None:
    queries, parts = case(tokens, sizes, dtype=dtype)
    keys, values = (torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("keys", "values"))
    last = parts[-1].mask
    assert last is not None
    mask = torch.cat([torch.zeros(tokens, sum(sizes[:-1]), dtype=dtype), last], dim=1)
    options = list(product((None, 1.5), (None, torch.linspace(-1.0, 1.0, queries.shape[1]))))
    # With options `attend` computes in float32.
    for softcap, sinks in options if dtype is torch.float32 else options[:1]:
        expected = attend(queries, keys, values, mask, scaling=0.35, softcap=softcap, head_sinks=sinks)
        out = attend_parts(queries, parts, scaling=0.35, softcap=softcap, head_sinks=sinks)
        torch.testing.assert_close(out, expected, atol=ERRORS[dtype], rtol=0)
