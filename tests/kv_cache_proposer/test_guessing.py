"""What a block's states become: each place's likeliest id, or the best way from place to place."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kv_cache_proposer.dflash.guessing import guess
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import words_of
from tests.kv_cache_proposer.drafter_cases import chained_network, tiny_network
from tests.tiny import tiny_model

WORDS = words_of(tiny_model())
PLACES = 7


def states(seed: int = 0, *, count: int = 5) -> Tensor:
    shape = (count, PLACES, tiny_network().config.hidden)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(network: DFlashNetwork, places: Tensor) -> list[int]:
    """Guess after guess, each among the eight that its place finds likeliest by itself."""
    assert network.chain is not None
    found: list[int] = []
    for state in places:
        few = WORDS.head(state).topk(8).indices
        told = network.chain(state, WORDS.embeddings[found[-1]]) if found else state
        scores = WORDS.head(told)[few]
        found.append(int(few[scores.argmax()]))
    return found


def test_without_a_chain_every_place_says_its_likeliest_id() -> None:
    assert torch.equal(guess(tiny_network(), WORDS, states()), WORDS.head(states()).argmax(-1))


def test_a_chain_that_has_learnt_nothing_changes_no_guess() -> None:
    assert torch.equal(guess(tiny_network(chain=8), WORDS, states()), WORDS.head(states()).argmax(-1))


def test_with_a_chain_each_guess_knows_the_one_before_it() -> None:
    network = chained_network()
    found = guess(network, WORDS, states())
    assert found.tolist() == [by_hand(network, places) for places in states()]
    assert not torch.equal(found, WORDS.head(states()).argmax(-1))


def test_a_block_of_one_guess_needs_no_chain() -> None:
    one = states()[:, :1]
    assert torch.equal(guess(chained_network(), WORDS, one), WORDS.head(one).argmax(-1))


def test_a_head_that_is_no_matrix_gives_the_same_guesses() -> None:
    network, laid_out = chained_network(), replace(WORDS, head_rows=None)
    assert torch.equal(guess(network, laid_out, states()), guess(network, WORDS, states()))
