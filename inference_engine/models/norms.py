"""Fused root mean square norms: one operation each, in place of the model's own, which are half a dozen small ones.

A decode step of a small model on a GPU is mostly such operations. As with rotation (`models/seam.py`), modules of this
model are replaced and nothing is patched; a module is replaced only if the outputs agree.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SAMPLES_EACH = 8
# The fused norm rounds once, the model's own up to three times, and they sum in different orders.
_MOST_ROUNDINGS = 2.0


class FusedNorm(nn.Module):
    """`x / rms(x) · weight`, or `· (1 + weight)`; in float32, and rounded at the end. Holds the weight it was given."""

    _factor: Tensor | None

    def __init__(self, weight: nn.Parameter, eps: float, *, adds_one: bool) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.register_buffer("_factor", 1.0 + weight.detach().float() if adds_one else None, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        """states [..., n]; returns as many, of their dtype."""
        shape = self.weight.shape
        if self._factor is None:
            return F.rms_norm(states, shape, self.weight, self.eps)
        # 1 + weight does not fit into the dtype of the weight.
        return F.rms_norm(states.float(), shape, self._factor, self.eps).to(states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, adds_one={self._factor is not None}"


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Replace each norm of `model` by an equal FusedNorm, within rounding; returns how many were replaced.

    The weights stay the same tensors under the same names.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__.endswith("RMSNorm")
    ]
    count = 0
    for parent, name, child in places:
        if (fused := _equal(child)) is not None:
            setattr(parent, name, fused)
            count += 1
    return count


def _equal(norm: nn.Module) -> FusedNorm | None:
    """A FusedNorm with the outputs of `norm`, which may be of an unknown class; None if there is none."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(norm.forward).parameters) != 1 or set(norm.state_dict()) != {"weight"}:
        return None
    states = _samples(weight, eps)
    expected = norm(states)
    for adds_one in (False, True):
        fused = FusedNorm(weight, eps, adds_one=adds_one).train(norm.training)
        if _is_equal(fused(states), expected):
            return fused
    return None


def _samples(weight: Tensor, eps: float) -> Tensor:
    """[3 · samples, n], not centred: vectors of usual size, small ones for which `eps` matters, and large ones."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(3, _SAMPLES_EACH, len(weight), generator=generator) + 0.5
    sizes = torch.tensor([1.0, max(eps, 1e-12) ** 0.5, 100.0])
    return (samples * sizes[:, None, None]).flatten(0, 1).to(weight.device, weight.dtype)


def _is_equal(found: Tensor, expected: Tensor) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    rounding = max(_MOST_ROUNDINGS * torch.finfo(expected.dtype).eps, 1e-6)
    wide = expected.float()
    return bool(((found.float() - wide).abs() <= rounding * wide.abs()).all())
