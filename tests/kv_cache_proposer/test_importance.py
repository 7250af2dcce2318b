"""A basis counts error where it matters: as queries and output projections say, or as given."""

import pytest
import torch

from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.fit import fit
from kv_cache_proposer.f_theta.importance import Importances, from_projections
from tests.kv_cache_proposer.correlated import SHAPES, Entries, make_entries, make_projections, make_statistics


def projected(entries: Entries) -> Importances:
    return from_projections(make_statistics(entries), make_projections())


def test_a_direction_that_no_query_takes_may_be_lost() -> None:
    entries = make_entries(2000)
    blind = make_entries(2000)
    for queries in blind.queries:
        queries[:, :, 0] = 0.0
    rare = make_entries(300, seed=5)
    errors = []
    for given in (entries, blind):
        codec = fit(make_statistics(entries), projected(given), bytes_per_token=14)
        keys, _ = codec.decode(codec.encode(rare.keys, rare.values))
        lost = [(a - b).square().sum(0) for a, b in zip(rare.keys, keys, strict=True)]
        errors.append(sum(float(part[:, 1:].sum()) for part in lost) / sum(float(part[:, 0].sum()) for part in lost))
    seen_by_all, unseen_first = errors
    assert unseen_first < seen_by_all


def test_a_head_that_matters_more_loses_less() -> None:
    statistics, entries = make_statistics(), make_entries(300, seed=5)
    lost = []
    for factor in (1.0, 100.0):
        importances = {layer: matrices.clone() for layer, matrices in projected(make_entries(2000)).items()}
        importances[3][1, 2] *= factor  # V of head 2
        codec = fit(statistics, importances, bytes_per_token=12)
        _, values = codec.decode(codec.encode(entries.keys, entries.values))
        lost.append(float((values[2][:, 2] - entries.values[2][:, 2]).square().sum()))
    assert lost[1] < lost[0] / 2


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_importances_that_say_nothing_are_refused(value: float) -> None:
    flat = {shape.layer: value * torch.eye(shape.head_dim).expand(2, shape.kv_heads, -1, -1) for shape in SHAPES}
    with pytest.raises(LatentError, match="importances"):
        fit(make_statistics(), flat, bytes_per_token=20)
