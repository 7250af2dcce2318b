"""A basis counts error where it matters: as queries and output projections say, or as given."""

import pytest
import torch

from kv_cache_proposer.f_theta.errors import LatentError
from kv_cache_proposer.f_theta.fit import fit
from kv_cache_proposer.f_theta.importance import Importances, from_projections, regularised
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


def test_the_unit_of_importances_does_not_matter() -> None:
    statistics, entries = make_statistics(), make_entries(50)
    importances = projected(entries)
    small = {layer: 2.0**-40 * matrices for layer, matrices in importances.items()}
    codecs = [fit(statistics, given, bytes_per_token=20) for given in (importances, small)]
    assert torch.equal(*(codec.encode(entries.keys, entries.values) for codec in codecs))


def test_importances_that_are_singular_can_still_be_inverted() -> None:
    flat = {shape.layer: torch.zeros(2, shape.kv_heads, shape.head_dim, shape.head_dim).double() for shape in SHAPES}
    flat[0][0, 0, 0, 0] = 3.0
    for matrices in regularised(flat, 0.1).values():
        assert bool((torch.linalg.eigvalsh(matrices) > 0).all())


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_importances_that_say_nothing_are_refused(value: float) -> None:
    flat = {shape.layer: value * torch.eye(shape.head_dim).expand(2, shape.kv_heads, -1, -1) for shape in SHAPES}
    with pytest.raises(LatentError, match="importances"):
        fit(make_statistics(), flat, bytes_per_token=20)


def test_a_missing_output_projection_is_named() -> None:
    projections = make_projections()
    del projections[4]
    with pytest.raises(LatentError, match="layer 4"):
        from_projections(make_statistics(), projections)


def test_a_layer_without_importances_is_named() -> None:
    importances = dict(projected(make_entries(100)))
    del importances[5]
    with pytest.raises(LatentError, match=r"\[5\]"):
        fit(make_statistics(), importances, bytes_per_token=20)


def test_a_head_that_never_varies_does_not_spoil_the_others() -> None:
    entries = make_entries(2000)
    for parts in (entries.keys, entries.values):
        parts[1][:, 0] = 1.5
    codec = fit(make_statistics(entries), projected(entries), bytes_per_token=24)
    keys, values = codec.decode(codec.encode(entries.keys, entries.values))
    assert all(bool(torch.isfinite(part).all()) for part in (*keys, *values))
    torch.testing.assert_close(keys[1][:, 0], entries.keys[1][:, 0], atol=1e-2, rtol=0)
