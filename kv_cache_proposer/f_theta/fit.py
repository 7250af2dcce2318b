"""From statistics of a text to a codec, in closed form."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.basis import Basis, fit_basis
from kv_cache_proposer.f_theta.codec import LatentCodec, code
from kv_cache_proposer.f_theta.errors import LatentError
from kv_cache_proposer.f_theta.rows import LayerShape
from kv_cache_proposer.f_theta.statistics import Statistics


def fit(
    statistics: Statistics,
    output_projections: Mapping[int, Tensor],
    *,
    bytes_per_token: int,
    precision: str = "float16",
) -> LatentCodec:
    """A codec on the statistics' device, for `bytes_per_token` and, through `LatentCodec.at`, for any fewer.

    output_projections: Wo [hidden, Hq · D] of every covered layer. precision: what components are held in, one of
    PRECISIONS; what they lose is in the codec from the start, so a stored codec is the one that was measured.

    The eigenvectors of one group of W numbers take some 9 W³ operations and 5 W² numbers of memory.
    """
    bases: list[Basis] = []
    for index, group in enumerate(statistics.groups):
        importances = [
            torch.stack((statistics.query_moment(shape.layer), _value_moment(shape, output_projections)))
            for shape in group.shapes
        ]
        basis = fit_basis(group, statistics.mean(index), statistics.covariance(index), importances)
        bases.append(basis)
    codec = code(bases, bytes_per_token)
    return code([part.basis.at_precision(precision) for part in codec.coders], bytes_per_token)


def _value_moment(shape: LayerShape, output_projections: Mapping[int, Tensor]) -> Tensor:
    """Σ over the group's query heads of Woᵀ Wo, [Hkv, D, D] float64: the squared length of what a value adds."""
    if shape.layer not in output_projections:
        raise LatentError(f"layer {shape.layer} is in the statistics but its output projection was not given")
    projection = output_projections[shape.layer].double()
    heads = projection.view(len(projection), shape.kv_heads, -1, shape.head_dim)  # [hidden, Hkv, group, D]
    return torch.einsum("ohgd,ohge->hde", heads, heads)
