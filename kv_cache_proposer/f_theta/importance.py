"""How much an error in K or V matters: per layer, for K and V of each KV head, a matrix M; an error δ costs δᵀ M δ.

Two methods give them. `laboratory/training/sensitivity.py` measures them: the curvature of KL(exact ‖ restored) in each
head's entries, all layers in one unit. `from_projections` needs no gradient: for K the squared error of the scores,
E[(q·δk)²]; for V that of what leaves the layer, |Wo δv|². Those of different layers cannot be compared, so each is
scaled to its entries' variance: no head loses its bits to one of larger values. On SmolLM2 the measured ones lose a
third less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.group_layout import LayerShape
from kv_cache_proposer.f_theta.statistics import Statistics

# By layer of the model: [2 (K, V), Hkv, D, D], symmetric, float64.
Importances = Mapping[int, Tensor]

# The least variance a head is scaled by, as a share of the layer's largest.
_VARIANCE_FLOOR = 1e-6
# Of the mean importance of all heads: what each head has at least.
_HEAD_FLOOR = 1e-6


def from_projections(statistics: Statistics, output_projections: Mapping[int, Tensor]) -> Importances:
    """From the queries of the text and the model's output projections Wo [hidden, Hq · D], one for every layer."""
    tiny = torch.finfo(torch.float32).tiny
    found: dict[int, Tensor] = {}
    for index, group in enumerate(statistics.groups):
        variances = statistics.covariance(index).diagonal()
        for shape, start in zip(group.shapes, group.offsets, strict=True):
            moments = torch.stack((statistics.query_moment(shape.layer), _value_moment(shape, output_projections)))
            own = variances[start : start + shape.width].view(2, shape.kv_heads, shape.head_dim).mean(-1)
            own = own.clamp_min(own.max() * _VARIANCE_FLOOR).clamp_min(tiny)
            found[shape.layer] = moments / (_size(moments).clamp_min(tiny) * own)[..., None, None]
    return found


def unweighted(shapes: Sequence[LayerShape]) -> Importances:
    """An error costs its square, wherever it is: what coding by plain principal components assumes."""
    found: dict[int, Tensor] = {}
    for shape in shapes:
        identity = torch.eye(shape.head_dim, dtype=torch.float64)
        found[shape.layer] = identity.expand(2, shape.kv_heads, -1, -1)
    return found


def regularised(importances: Importances, shrinkage: float) -> Importances:
    """Scaled to a mean of 1 over all layers, and pulled towards the identity, so that they can be inverted.

    shrinkage: how much of each head's mean importance is added in every direction. Raises LatentError for matrices that
    are not finite, or all zero.
    """
    total = torch.stack([_size(matrices).mean() for matrices in importances.values()]).mean()
    if not bool(torch.isfinite(total)) or not bool(total > 0):
        raise LatentError(f"importances have a mean of {float(total)}; they must be finite, and some above 0")
    found: dict[int, Tensor] = {}
    for layer, matrices in importances.items():
        scaled = matrices / total
        identity = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
        found[layer] = scaled + (shrinkage * _size(scaled) + _HEAD_FLOOR)[..., None, None] * identity
    return found


def _size(matrices: Tensor) -> Tensor:
    """Mean of the diagonals."""
    return matrices.diagonal(dim1=-2, dim2=-1).mean(-1)


def _value_moment(shape: LayerShape, output_projections: Mapping[int, Tensor]) -> Tensor:
    """Σ over the group's query heads of Woᵀ Wo, [Hkv, D, D] float64: the squared length of what a value adds."""
    if shape.layer not in output_projections:
        raise LatentError(f"layer {shape.layer} is in the statistics but its output projection was not given")
    projection = output_projections[shape.layer].double()
    heads = projection.view(len(projection), shape.kv_heads, -1, shape.head_dim)  # [hidden, Hkv, group, D]
    return torch.einsum("ohgd,ohge->hde", heads, heads)
