"""Linear layers with their weight packed once for oneDNN: the same logits, faster.

For a float32 product on the CPU torch calls a library that reads the weight in its plain layout and, for a few vectors,
with one thread. oneDNN stores the weight in the layout of its kernels. Products of few vectors gain most: a handful of
sessions decoding together, the last layer of a single one, and fixed-shape mode, whose padding costs almost nothing
here.

The packed copy replaces the weight, so the pages of a mapped file are read only once, at the start.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EXACT_VECTORS = 8
_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Replaces one nn.Linear; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.register_buffer("bias", linear.bias, persistent=False)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, states: Tensor) -> Tensor:
        """states [..., in_features]; returns [..., out_features]."""
        vectors = states.numel() // self.in_features
        padding = kernel_vectors(vectors) - vectors
        if not padding:
            return self._product(states)
        padded = F.pad(states.reshape(vectors, self.in_features), (0, 0, 0, padding))
        return self._product(padded)[:vectors].view(*states.shape[:-1], self.out_features)

    def _product(self, states: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def kernel_vectors(vectors: int) -> int:
    """The number of vectors that a product over `vectors` is padded to.

    oneDNN compiles a kernel for every number of vectors and keeps it. Prompts have all lengths: without padding, memory
    would grow by megabytes with each new one.
    """
    if vectors <= _EXACT_VECTORS:
        return vectors
    step = 16 if vectors <= 128 else 64
    return -(-vectors // step) * step


def can_pack(model: nn.Module) -> bool:
    """Whether oneDNN takes the model's weights: on a CPU, in a type that this CPU has instructions for."""
    weight = next(model.parameters())
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and weight.device.type == "cpu" and weight.dtype in _DTYPES and takes(weight.dtype)


@cache
def takes(dtype: torch.dtype) -> bool:
    """Does oneDNN take this dtype? Tested: bfloat16 needs AVX-512 or AVX-NE-CONVERT, and only packing shows it."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Replace every nn.Linear of `model` by a PackedLinear; returns how many there were."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in places:
        setattr(parent, name, PackedLinear(child))
    return len(places)
