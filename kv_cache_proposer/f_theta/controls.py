"""Control bases: each must do worse than the fitted one at the same bytes, bits and coding.

random        an orthonormal basis drawn at random: no energy is concentrated in few components
first-layer   the code reads the first layer's entries alone. They are a function of the token's embedding and hold
              nothing of its context: the knowledge of a drafter that is not conditioned on the target
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache_proposer.f_theta.basis import Basis, WeightedSpace
from kv_cache_proposer.f_theta.layout import Group

# Of the largest variance of the first layer's components: what is added to each before it is divided by.
_RIDGE = 1e-6


def random_basis(group: Group, mean: Tensor, covariance: Tensor, importances: Sequence[Tensor]) -> Basis:
    """As `fit_basis`; the same for the same size of group."""
    space = WeightedSpace(group, importances)
    weighted = space.covariance(covariance)
    drawn = torch.randn(group.width, group.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    components = torch.linalg.qr(drawn.to(weighted.device)).Q
    variances = ((weighted @ components) * components).sum(0)
    order = variances.argsort(descending=True)
    return space.basis(mean, components[:, order], variances[order])


def first_layer_basis(group: Group, mean: Tensor, covariance: Tensor, importances: Sequence[Tensor]) -> Basis:
    """As `fit_basis`: principal components of the first layer's weighted vectors, and ridge regression on them."""
    space = WeightedSpace(group, importances)
    weighted = space.covariance(covariance)
    width = group.shapes[0].width
    eigenvalues, eigenvectors = torch.linalg.eigh(weighted[:width, :width])
    variances, own = eigenvalues.flip(0), eigenvectors.flip(1)
    analysis = torch.zeros(group.width, width, dtype=weighted.dtype, device=weighted.device)
    analysis[:width] = own
    components = weighted[:, :width] @ own / (variances + _RIDGE * variances[0])
    # What a component removes of the error in all layers decides how many bits it gets, so its coefficient is scaled to
    # that.
    sizes = components.norm(dim=0)
    variances = variances * sizes.square()
    order = variances.argsort(descending=True)
    return space.basis(mean, (components / sizes)[:, order], variances[order], analysis=(analysis * sizes)[:, order])
