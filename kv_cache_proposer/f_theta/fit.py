"""Fits a codec to statistics of a text and importances of its KV entries, in closed form."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kv_cache_proposer.f_theta.basis import Basis, fit_basis, fit_leading
from kv_cache_proposer.f_theta.codec import LatentCodec, code
from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.group_layout import Group
from kv_cache_proposer.f_theta.importance import Importances, regularised
from kv_cache_proposer.f_theta.statistics import Statistics

# Components that are looked for, for each byte of a token. In SmolLM2's groups 0.8 and 0.9 of them get bits.
COMPONENTS_PER_BYTE = 3
NARROW = 1024  # a group of so many numbers is decomposed as a whole in a second


def fit(
    statistics: Statistics,
    importances: Importances,
    *,
    bytes_per_token: int,
    shrinkage: float = 0.1,
    precision: str = "float16",
    kernels: str = "auto",
    is_rough: bool = False,
) -> LatentCodec:
    """A codec on the statistics' device, for `bytes_per_token` and, through `LatentCodec.at`, for any fewer.

    importances: of every covered layer, from `importance` or `training.sensitivity`. shrinkage: see `regularised`.
    precision: what components are held in, one of PRECISIONS; what they lose is in the codec from the start, so a
    stored codec is the one that was measured. kernels: as for an
    engine. is_rough: look only for as many components as get bits, and find the last of them nearly
    (`leading.py`), where groups are wide and that is enough.

    The eigenvectors of one group of W numbers take some 9 W³ operations and 5 W² numbers of memory.
    """
    if missing := [shape.layer for shape in statistics.shapes if shape.layer not in importances]:
        raise LatentError(f"layers {missing} are in the statistics but have no importances")
    device = statistics.mean(0).device
    weighed = regularised(
        {shape.layer: importances[shape.layer].double().to(device) for shape in statistics.shapes}, shrinkage
    )

    def parts() -> Iterator[tuple[Group, Tensor, Tensor, list[Tensor]]]:
        for index, group in enumerate(statistics.groups):
            own = [weighed[shape.layer] for shape in group.shapes]
            yield group, statistics.mean(index), statistics.covariance(index), own

    def coded(bases: list[Basis]) -> LatentCodec:
        return code(bases, bytes_per_token, kernels=kernels)

    codec = None
    if is_rough:
        count = components_sought(bytes_per_token, len(statistics.groups))
        found = [fit_leading(*part, count) if _is_wide(part[0], count) else fit_basis(*part) for part in parts()]
        bases = [one for one in found if one is not None]
        if len(bases) == len(found):
            codec = coded(bases)
            if any(_is_cut_off(part.basis, one) for part, one in zip(codec.coders, bases, strict=True)):
                codec = None
    if codec is None:
        codec = coded([fit_basis(*part) for part in parts()])
    rounded = [part.basis.at_precision(precision) for part in codec.coders]
    return coded(rounded)


def components_sought(bytes_per_token: int, groups: int) -> int:
    """How many components of each group a rough decomposition looks for."""
    return COMPONENTS_PER_BYTE * bytes_per_token // groups


def _is_wide(group: Group, count: int) -> bool:
    return group.width > max(count, NARROW)


def _is_cut_off(used: Basis, found: Basis) -> bool:
    """Did all that were found get bits, and might more get some?"""
    return used.components.count == found.components.count < found.group.width
