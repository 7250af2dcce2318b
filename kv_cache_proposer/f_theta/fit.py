"""Fits a codec to statistics of a text and importances of its KV entries, in closed form."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.basis import fit_basis
from kv_cache_proposer.f_theta.codec import LatentCodec, code
from kv_cache_proposer.f_theta.controls import first_layer_basis, random_basis
from kv_cache_proposer.f_theta.errors import LatentError
from kv_cache_proposer.f_theta.importance import Importances, regularised
from kv_cache_proposer.f_theta.statistics import Statistics

# Below this part of the largest variance a decomposition in float32 says nothing of a component. At five times as much
# it errs by some hundredths of the component's variance.
_LEAST_OF_FLOAT32 = 1e-7

# `fitted` is the one to use; the others show what it is worth (`controls.py`).
BASES = {"fitted": fit_basis, "random": random_basis, "first-layer": first_layer_basis}


def fit(
    statistics: Statistics,
    importances: Importances,
    *,
    bytes_per_token: int,
    shrinkage: float = 0.1,
    precision: str = "float16",
    basis: str = "fitted",
    bits: str = "variance",
    quantiser: str = "trellis",
    kernels: str = "auto",
    is_rough: bool = False,
) -> LatentCodec:
    """A codec on the statistics' device, for `bytes_per_token` and, through `LatentCodec.at`, for any fewer.

    importances: of every covered layer, from `importance` or `training.sensitivity`. shrinkage: see `regularised`.
    precision: what components are held in, one of PRECISIONS; what they lose is in the codec from the start, so a
    stored codec is the one that was measured. basis, bits, quantiser: one of BASES, of BITS and of QUANTISERS.
    kernels: as for an engine. is_rough: decompose in float32, in little more than half of the time, where that is as
    good: where no component that gets bits is too small for it.

    The eigenvectors of one group of W numbers take some 9 W³ operations and 5 W² numbers of memory.
    """
    if missing := [shape.layer for shape in statistics.shapes if shape.layer not in importances]:
        raise LatentError(f"layers {missing} are in the statistics but have no importances")
    device = statistics.mean(0).device
    weighed = regularised(
        {shape.layer: importances[shape.layer].double().to(device) for shape in statistics.shapes}, shrinkage
    )
    if basis == "first-layer" and (len(statistics.groups) > 1 or statistics.shapes[0].layer != 0):
        raise LatentError(
            f"a code of the first layer alone needs all layers in one group and layer 0 among them, got "
            f"{len(statistics.groups)} groups from layer {statistics.shapes[0].layer}"
        )

    def coded(dtype: torch.dtype) -> LatentCodec:
        make = partial(fit_basis, dtype=dtype) if basis == "fitted" else BASES[basis]
        bases = [
            make(
                group,
                statistics.mean(index),
                statistics.covariance(index),
                [weighed[shape.layer] for shape in group.shapes],
            )
            for index, group in enumerate(statistics.groups)
        ]
        return code(bases, bytes_per_token, bits=bits, quantiser=quantiser, kernels=kernels)

    codec = coded(torch.float32 if is_rough else torch.float64)
    if is_rough and any(_is_beyond_float32(part.basis.deviations) for part in codec.coders):
        codec = coded(torch.float64)
    rounded = [part.basis.at_precision(precision) for part in codec.coders]
    return code(rounded, bytes_per_token, bits=bits, quantiser=quantiser, kernels=kernels)


def _is_beyond_float32(deviations: Tensor) -> bool:
    variances = deviations.double().square()
    return bool(variances.min() < _LEAST_OF_FLOAT32 * variances.max())
