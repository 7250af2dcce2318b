"""Where the history repeats itself for long, what followed is proposed; elsewhere the network is asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inference_engine.decode.draft import Wanted
from kv_cache_proposer.hybrid import HybridDrafter
from kv_cache_proposer.ngram import NgramDrafter
from tests.laws.drafters import Knowing, Remembering

COPIES = NgramDrafter(min_ngram=3, longest=6)
NETWORK_SAYS = [7] * 100


def wanted(*histories: Sequence[int], limit: int = 4) -> list[Wanted]:
    return [Wanted(None, np.array(ids, dtype=np.uint32), limit) for ids in histories]


def test_a_long_copy_is_gone_on_with_and_a_short_one_is_left_to_the_network() -> None:
    network = Knowing(text=NETWORK_SAYS)
    drafts = HybridDrafter(network, COPIES).propose(
        wanted([1, 2, 3, 4, 5, 6, 1, 2, 3], [1, 2, 9, 4, 5, 6, 8, 1, 2], [5, 6, 7, 8, 5, 6, 7])
    )
    assert [draft.tolist() for draft in drafts] == [[4, 5, 6, 1], [7] * 4, [8, 5, 6, 7]]
    assert network.limits == [4]


def test_what_is_known_of_copies_is_kept_apart_by_their_length_and_from_the_network() -> None:
    network = Knowing(text=NETWORK_SAYS)
    hybrid = HybridDrafter(network, NgramDrafter(min_ngram=2, max_ngram=4, longest=6))
    repeated, short, longest = [1, 2, 3, 9, 9, 1, 2, 3], [5, 1, 2, 9, 9, 1, 2], [1, 2, 3, 4, 9, 1, 2, 3, 4]
    methods = [hybrid.method(np.array(ids, dtype=np.uint32)) for ids in (repeated, short, longest, [1, 2, 3, 4])]
    assert [method and method.name for method in methods] == ["long copy", "short copy", "longest copy", network.name]
    assert [method and method.longest for method in methods] == [6, 6, 6, network.longest]


def test_what_the_network_wants_to_see_and_to_remember_it_gets() -> None:
    network = Remembering(tap_layers=(1, 2))
    assert HybridDrafter(network).tap_layers == (1, 2)
