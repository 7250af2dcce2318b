"""Linear layers over matrices in fewer bits, for whatever of a model runs as torch's modules.

The list's executor reads the codes themselves (`backends/op_list_executor.py`). The module makes the numbers for each
product and forgets them: calibration, drafters that share layers, and families without a list pay for that in time, not
in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference_engine.kernels.quantised import QuantisedMatrix, quantise


class QuantisedLinear(nn.Module):
    """In place of one nn.Linear; inference only."""

    bias: nn.Parameter | None
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, matrix: QuantisedMatrix, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        """dtype: of the numbers that are multiplied."""
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.group = matrix.group
        self.dtype = dtype
        self.register_parameter("bias", bias)
        for name in ("codes", "scales", "zeros"):
            self.register_buffer(name, getattr(matrix, name), persistent=False)

    @property
    def matrix(self) -> QuantisedMatrix:
        return QuantisedMatrix(
            codes=self.codes, scales=self.scales, zeros=self.zeros, inputs=self.in_features, group=self.group
        )

    @matrix.setter
    def matrix(self, matrix: QuantisedMatrix) -> None:
        """The same numbers, elsewhere."""
        self.codes, self.scales, self.zeros = matrix.codes, matrix.scales, matrix.zeros

    def forward(self, states: Tensor) -> Tensor:
        """states [..., in_features]; returns [..., out_features]."""
        return F.linear(states, self.matrix.unpacked(self.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.matrix.format}"


@torch.no_grad()
def quantise_linears(
    model: nn.Module,
    format_name: str,
    *,
    head: nn.Module | None,
    largest: Callable[[str, Tensor], Tensor | None] = lambda *_: None,
) -> int:
    """Quantise the matrix of every nn.Linear of `model` but its head; returns how many there were.

    largest: as `quantise` has it, of a matrix by its module's name.

    The head stays as it is: it is a twentieth of a large model, and an error of it is an error of the logits.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                weight = child.weight.detach()
                matrix = quantise(weight, format_name, largest(name, weight))
                setattr(parent, name, QuantisedLinear(matrix, child.bias, child.weight.dtype))
                count += 1
    return count


def formats_of(model: nn.Module) -> str:
    """The formats of its quantised matrices, such as `fp8` or `int4/128`; "" if it has none."""
    found = {child.matrix.format for child in model.modules() if isinstance(child, QuantisedLinear)}
    return " + ".join(sorted(found))
