"""Draft tokens from a shortlist are those of the whole head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference_engine import compose
from inference_engine.config import ModelConfig
from inference_engine.kernels.gumbel_noise import key
from kv_cache_proposer.dflash import beside_target
from kv_cache_proposer.dflash.draft_tokens import TargetDraws, choose_draft_tokens
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.shortlist import SHORTLIST, Shortlist, can_shortlist
from kv_cache_proposer.dflash.target import TargetWords, words_of
from tests.further import each_pair
from tests.kv_cache_proposer.drafter_cases import chained_network, tiny_network
from tests.tiny import tiny_forward, tiny_model

pytestmark = pytest.mark.skipif(
    not can_shortlist(words_of(tiny_model())), reason="oneDNN has no int8 kernels for this machine"
)

HIDDEN, IDS, PLACES = 64, 5000, 7
EACH_NETWORK = pytest.mark.parametrize("network", [tiny_network(), chained_network()], ids=["plain", "chained"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(ids: int = IDS) -> TargetWords:
    """A vocabulary that differs from id to id in size, as real ones do."""
    vectors = random(ids, HIDDEN, seed=1) * (0.5 + torch.rand(ids, 1, generator=torch.Generator().manual_seed(2)))
    return TargetWords(vectors, lambda states: states @ vectors.T, vectors)


def shortened(whole: TargetWords) -> TargetWords:
    assert whole.head_weight is not None
    return replace(whole, shortlist=Shortlist(whole.head_weight))


def draws(blocks: int, temperature: float) -> TargetDraws:
    keys = [[key(seed, 100 * seed + place) for place in range(PLACES)] for seed in range(blocks)]
    return TargetDraws(torch.tensor(keys), torch.full((blocks,), temperature, dtype=torch.float64))


@each_pair(make=[tiny_network, chained_network], temperature=[None, 0.0, 0.7], blocks=[1, 3, 40])
def test_draft_tokens_are_those_of_the_whole_head(
    make: Callable[[], DFlashNetwork], temperature: float | None, blocks: int
) -> None:
    whole, states = words(), random(blocks, PLACES, HIDDEN, seed=blocks)
    drawn = None if temperature is None else draws(blocks, temperature)
    assert torch.equal(
        choose_draft_tokens(make(), shortened(whole), states, drawn),
        choose_draft_tokens(make(), whole, states, drawn),
    )


def test_few_numbers_that_are_far_larger_than_the_others_change_no_draft_token() -> None:
    """As hidden states have them: they alone decide the scale that all are rounded by."""
    states = random(40, PLACES, HIDDEN)
    states[..., 3] *= 8
    whole = words()
    assert torch.equal(
        choose_draft_tokens(tiny_network(), shortened(whole), states),
        choose_draft_tokens(tiny_network(), whole, states),
    )


@pytest.mark.parametrize("ids", [3, SHORTLIST - 1, SHORTLIST, SHORTLIST + 1])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_vocabulary_may_be_smaller_than_the_shortlist(ids: int, temperature: float) -> None:
    whole, states, drawn = words(ids), random(5, PLACES, HIDDEN), draws(5, temperature)
    short = shortened(whole)
    assert short.choices(states).scores.shape[-1] == min(ids, SHORTLIST)
    assert torch.equal(
        choose_draft_tokens(tiny_network(), short, states, drawn),
        choose_draft_tokens(tiny_network(), whole, states, drawn),
    )


def test_a_place_has_its_shortlist_whatever_its_neighbours() -> None:
    likeliest, states = Shortlist(words().embeddings), random(9, PLACES, HIDDEN)
    states[3] *= 1e4
    together = likeliest(states)
    assert together.shape == (9, PLACES, SHORTLIST)
    for place, alone in enumerate(states):
        assert torch.equal(likeliest(alone), together[place])


@pytest.mark.parametrize(("linear", "is_copied"), [("auto", True), ("packed", True), ("plain", False)])
def test_the_head_is_copied_unless_linear_layers_stay_as_they_come(
    linear: str, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[Tensor] = []

    def copy(head_weight: Tensor) -> Shortlist:
        copied.append(head_weight)
        return Shortlist(head_weight)

    monkeypatch.setattr(beside_target, "Shortlist", copy)
    compose._drafter(tiny_network(), ModelConfig(linear=linear), tiny_forward())
    assert bool(copied) == is_copied
