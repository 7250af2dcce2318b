"""What a block's states become: each place's best id, or the best path from place to place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference_engine.kernels.gumbel_noise import key, noise, noise_of_all
from kv_cache_proposer.dflash.draft_tokens import TargetDraws, choose_draft_tokens
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import words_of
from tests.kv_cache_proposer.drafter_cases import chained_network, tiny_network
from tests.tiny import VOCABULARY, tiny_model

WORDS = words_of(tiny_model())
PLACES = 7
EACH_NETWORK = pytest.mark.parametrize("network", [tiny_network(), chained_network()], ids=["plain", "chained"])


def states(seed: int = 0, *, count: int = 5) -> Tensor:
    shape = (count, PLACES, tiny_network().config.hidden)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draws(*temperatures: float) -> TargetDraws:
    """A seed and a history for each block."""
    keys = [[key(seed, 100 * seed + place) for place in range(PLACES)] for seed in range(len(temperatures))]
    return TargetDraws(torch.tensor(keys), torch.tensor(temperatures, dtype=torch.float64))


def by_hand(network: DFlashNetwork, places: Tensor, keys: Tensor, temperature: float) -> list[int]:
    """Draft token after draft token, each among the sixteen that its place finds likeliest by itself."""
    found: list[int] = []
    for state, place_key in zip(places, keys, strict=True):
        few = WORDS.head(state).topk(16).indices
        reported = network.chain(state, WORDS.embeddings[found[-1]]) if found and network.chain else state
        scores = WORDS.head(reported)[few] + temperature * noise(place_key, few)
        found.append(int(few[scores.argmax()]))
    return found


def test_a_chain_that_has_learnt_nothing_changes_no_draft_token() -> None:
    assert torch.equal(choose_draft_tokens(tiny_network(chain=8), WORDS, states()), WORDS.head(states()).argmax(-1))


def test_with_a_chain_each_draft_token_knows_the_one_before_it() -> None:
    network, greedy = chained_network(), draws(0, 0, 0, 0, 0)
    found = choose_draft_tokens(network, WORDS, states())
    assert found.tolist() == [
        by_hand(network, places, keys, 0.0) for places, keys in zip(states(), greedy.keys, strict=True)
    ]
    assert not torch.equal(found, WORDS.head(states()).argmax(-1))


# -- where the target samples -----------------------------------------------------------------------------------------


@EACH_NETWORK
def test_a_draft_token_has_the_largest_score_and_noise_together(network: DFlashNetwork) -> None:
    temperatures = (0.7, 0.1, 1.0, 2.0, 0.3)
    drawn = draws(*temperatures)
    found = choose_draft_tokens(network, WORDS, states(), drawn)
    assert found.tolist() == [by_hand(network, *one) for one in zip(states(), drawn.keys, temperatures, strict=True)]
    assert not torch.equal(found, choose_draft_tokens(network, WORDS, states()))


@EACH_NETWORK
@pytest.mark.parametrize("places", [1, PLACES])
def test_beside_others_that_sample_a_greedy_draft_token_stays_what_it_was(network: DFlashNetwork, places: int) -> None:
    drawn = draws(0, 0.7, 0, 1.5, 0)
    mixed = choose_draft_tokens(network, WORDS, states()[:, :places], replace(drawn, keys=drawn.keys[:, :places]))
    greedy = choose_draft_tokens(network, WORDS, states()[:, :places])
    assert torch.equal(mixed[::2], greedy[::2])
    assert not torch.equal(mixed, greedy)


@pytest.mark.parametrize("wrong_by", [0.0, 0.25, 1.0])
def test_with_the_targets_noise_draft_tokens_are_right_more_often_than_the_likeliest(wrong_by: float) -> None:
    """Against what a target draws whose logits are the drafter's, or apart from them by so much."""
    blocks = states(count=300)
    logits = WORDS.head(blocks)
    logits = 4 * logits / logits.std()
    target = logits + wrong_by * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    drafter, drawn = replace(WORDS, head=lambda _: logits), draws(*[1.0] * len(blocks))
    sampled = (target + noise_of_all(drawn.keys.flatten(), VOCABULARY).view(target.shape)).argmax(-1)
    coupled, likeliest = (choose_draft_tokens(tiny_network(), drafter, blocks, one) == sampled for one in (drawn, None))
    apart = (logits.softmax(-1) - target.softmax(-1)).abs().sum(-1) / 2
    promised = ((1 - apart) / (1 + apart)).mean()
    few = logits.topk(16).indices
    looked_at = (few == sampled[..., None]).any(-1)
    assert coupled.double().mean() > max(likeliest.double().mean() + 0.2, promised - 0.05)
    if not wrong_by:
        assert torch.equal(coupled, looked_at)
