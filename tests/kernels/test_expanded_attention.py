"""Latent attention with keys and values of all heads equals attention over compressed ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference_engine.kernels import expanded_attention
from inference_engine.kernels.attention import attend
from inference_engine.kernels.expanded_attention import attend_expanded, is_cheaper

HEADS, RANK, ROPE, OWN, VALUE = 5, 24, 6, 10, 7


def absorbed(queries: Tensor, entries: Tensor, halves: Tensor, mask: Tensor | None) -> Tensor:
    own = torch.einsum("thd,hdr->thr", queries[..., :OWN], halves[:, :OWN])
    whole = torch.cat((own, queries[..., OWN:]), dim=-1)
    out = attend(whole, entries[None], entries[None, :, :RANK], mask, scaling=0.3)
    return torch.einsum("thr,hvr->thv", out, halves[:, OWN:])


@pytest.mark.parametrize("limits", [(2**23, 2**20), (700, 200)], ids=["at once", "in pieces"])
@pytest.mark.parametrize(("count", "before"), [(13, 0), (7, 30), (1, 19)])
def test_expanded_attention_is_attention_over_compressed_entries(
    count: int, before: int, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded_attention, "MOST_NUMBERS", limits[0])
    monkeypatch.setattr(expanded_attention, "MOST_SCORES", limits[1])
    torch.manual_seed(count)
    entries = torch.randn(before + count + 3, RANK + ROPE)  # some slots are empty
    queries, halves = torch.randn(count, HEADS, OWN + ROPE), torch.randn(HEADS, OWN + VALUE, RANK)
    places = torch.arange(len(entries))
    hidden = places > before + torch.arange(count)[:, None]
    hidden |= (places > 2) & (places < before // 2)  # a window behind a sink
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    for each in (mask, None):
        ours = attend_expanded(queries, entries[:, :RANK], entries[:, RANK:], halves, each, scaling=0.3)
        torch.testing.assert_close(ours, absorbed(queries, entries, halves, each), atol=1e-4, rtol=1e-4)


def test_it_is_taken_where_it_takes_fewer_multiplications() -> None:
    """Counted, for DeepSeek V2's and V3's sizes."""
    rank, rope, own, value = 512, 64, 128, 128
    for count in (1, 2, 64, 170, 172, 1000):
        for before in (0, 1, 100, 50_000):
            entries = before + count
            pairs = sum(before + index + 1 for index in range(count))
            as_stored = count * rank * (own + value) + pairs * (2 * rank + rope)
            by_heads = entries * rank * (own + value) + pairs * (own + rope + value)
            assert is_cheaper(count, entries, rank=rank, own=own, value=value) == (by_heads < as_stored)
    assert not is_cheaper(170, 10**6, rank=rank, own=own, value=value)
    assert is_cheaper(172, 10**6, rank=rank, own=own, value=value)
