"""Sums over a text equal what the whole text says."""

import pytest
import torch

from kv_cache_proposer.f_theta.errors import LatentError
from kv_cache_proposer.f_theta.layout import LayerShape, make_groups
from kv_cache_proposer.f_theta.statistics import Statistics
from tests.kv_cache_proposer.correlated import SHAPES, make_entries, make_statistics


def test_sums_over_chunks_are_the_covariance_of_the_whole() -> None:
    entries = make_entries(1001)
    statistics = make_statistics(entries, chunk=97)
    joined = torch.cat(
        [t.flatten(1) for pair in zip(entries.keys, entries.values, strict=True) for t in pair], dim=1
    ).double()
    start = 0
    for index, group in enumerate(statistics.groups):
        own = joined[:, start : start + group.width]
        start += group.width
        torch.testing.assert_close(statistics.mean(index), own.mean(0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(statistics.covariance(index), torch.cov(own.T, correction=0), atol=1e-3, rtol=1e-4)


def test_queries_count_for_the_kv_head_they_read() -> None:
    entries = make_entries(300)
    moment = make_statistics(entries).query_moment(3)
    for head in range(3):
        own = entries.queries[2][:, 3 * head : 3 * head + 3].double()
        torch.testing.assert_close(moment[head], torch.einsum("ngd,nge->de", own, own) / 300, atol=1e-4, rtol=1e-4)


def test_queries_that_were_not_given_are_missed_and_nothing_else() -> None:
    entries = make_entries(300)
    given, without = make_statistics(entries), Statistics(SHAPES, group_layers=2)
    without.add(entries.keys, entries.values)
    torch.testing.assert_close(without.covariance(1), given.covariance(1), atol=1e-3, rtol=1e-4)
    with pytest.raises(LatentError, match="queries were given for 0 of 300 tokens"):
        without.query_moment(3)


def test_groups_cover_all_layers_in_order_and_differ_by_one_at_most() -> None:
    shapes = [LayerShape(layer=layer, kv_heads=1, head_dim=2) for layer in range(0, 34, 2)]
    groups = make_groups(shapes, 5)
    assert [shape for group in groups for shape in group.shapes] == shapes
    assert sorted({len(group.shapes) for group in groups}) == [4, 5]


def test_statistics_without_tokens_are_refused() -> None:
    with pytest.raises(LatentError, match="no token"):
        Statistics(SHAPES, group_layers=2).covariance(0)
