"""Sums over a text equal what the whole text says."""

import torch

from tests.kv_cache_proposer.correlated import make_entries, make_statistics


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
