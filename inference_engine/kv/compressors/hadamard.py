"""The Hadamard rotation: spreads a vector's energy evenly over its elements, so that one scale serves all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def rotate(columns: Tensor) -> Tensor:
    """[D, N] -> H · columns, H with elements ±1 in Sylvester's order. Twice gives D · columns.

    Sums and differences of halves: log2(D) steps, each element by element, so that a column's result does not depend
    on its neighbours. Integers stay integers.
    """
    head_dim, count = columns.shape
    assert is_power_of_two(head_dim), head_dim
    span = 1
    while span < head_dim:
        pairs = columns.reshape(head_dim // (2 * span), 2, span * count)
        first, second = pairs[:, 0], pairs[:, 1]
        columns = torch.stack((first + second, first - second), dim=1).view(head_dim, count)
        span *= 2
    return columns
