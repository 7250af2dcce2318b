"""Block bounds: never below a score of the block, and as tight as two vectors can be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.bounds import block_bounds, bounds_scores

SCALING = 0.37
# Sums of D float32 products in another order.
ROUNDING = 1e-5

each_group = pytest.mark.parametrize("group", [1, 3, 4])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each_group
def test_no_key_of_a_block_scores_above_its_bound(group: int, subtests: pytest.Subtests) -> None:
    for block in (1, 16, 64, 128):
        with subtests.test(str(block)):
            queries, keys = draw(5, 2 * group, 24, seed=1), draw(2, 3 * block, 24, seed=2)
            bound = bounds_scores(queries, *block_bounds(keys, block), SCALING)
            exact = torch.einsum("thd,hsd->ths", queries, keys.repeat_interleave(group, dim=0)) * SCALING
            best = exact.view(5, 2, group, 3, block).amax(dim=(2, 4))  # of the block's keys and the group's heads
            assert bound.shape == best.shape == (5, 2, 3)
            assert (bound >= best - ROUNDING).all()
            if block == 1:
                torch.testing.assert_close(bound, best, rtol=ROUNDING, atol=ROUNDING)


@each_group
def test_it_is_the_formula_for_every_head_with_repeated_keys_and_the_best_head_of_a_group(group: int) -> None:
    queries, keys = draw(7, 3 * group, 20, seed=3), draw(3, 5 * 16, 20, seed=4)
    low, high = block_bounds(keys, 16)
    low_of_head, high_of_head = (bound.repeat_interleave(group, dim=0) for bound in (low, high))
    per_channel = torch.maximum(
        queries[:, :, None] * low_of_head[None],
        queries[:, :, None] * high_of_head[None],
    )
    per_head = per_channel.sum(-1) * SCALING  # [T, Hq, B]
    expected = torch.stack([per_head[:, head * group : (head + 1) * group].amax(1) for head in range(3)], dim=1)
    torch.testing.assert_close(bounds_scores(queries, low, high, SCALING), expected, rtol=ROUNDING, atol=ROUNDING)
