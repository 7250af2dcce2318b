"""Chooses a block's draft tokens from the hidden states of its places.

without a chain   each place's best id, independent of its neighbours
with one          from place to place, the best after the draft token before it

       place 1   place 2   place 3         the likeliest few ids of each place alone, every pair of neighbours
         a ─┬───── b         c             scored at once; then the best path from the first place on
         ·  └───── d ─────── e

The best id is the likeliest where the target is greedy. Where it samples, it is the one with the largest sum of score
and noise: the noise that the target will draw with, so that both choose the same id more often than the likeliest is
drawn. What else shapes the target's samples (top_k, penalties, …) is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_engine.kernels.gumbel_noise import noise
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import TargetWords

# Ids of a place that a path may use: noise raises ids that a greedy path never reaches. The number of scored pairs
# grows with the square.
LIKELIEST = 16


@dataclass(frozen=True, slots=True)
class TargetDraws:
    """The noise that the target will draw the places of some blocks with.

    keys: [..., G] of the noise. temperatures: [...] of the blocks, float64; 0 adds nothing at all.
    """

    keys: Tensor
    temperatures: Tensor

    def noise(self, ids: Tensor) -> Tensor:
        """What is added to the scores of `ids` [..., G, K]."""
        return (noise(self.keys[..., None], ids) * self.temperatures[..., None, None]).float()


def choose_draft_tokens(
    network: DFlashNetwork, words: TargetWords, states: Tensor, draws: TargetDraws | None = None
) -> Tensor:
    """Ids [..., G] of the places whose states are [..., G, hidden]. Does not synchronise with the device.

    draws: for as many places; None where the target is greedy everywhere.
    """
    choices = words.choices(states)
    chain = network.chain if states.shape[-2] > 1 else None
    if chain is None and draws is None:
        return choices.best()
    likeliest, places = choices.scores.topk(min(LIKELIEST, choices.scores.shape[-1]), dim=-1)  # [..., G, K]
    ids = choices.named(places)
    if chain is None:
        assert draws is not None
        # Ties go to the first id, which topk does not guarantee.
        return torch.where(draws.temperatures[..., None] == 0, choices.best(), best_alone(ids, likeliest, draws))
    before = words.embed(ids[..., :-1, :], network.config.embedding_scale)
    after = chain(states[..., 1:, None, :], before)  # [..., G − 1, K, hidden]
    return best_path(ids, likeliest[..., 0, :], words.scores(after, ids[..., 1:, :]), draws)


def best_alone(ids: Tensor, scores: Tensor, draws: TargetDraws) -> Tensor:
    """Of each place's `ids` [..., G, K] the best, whatever its neighbours are: [..., G]."""
    return ids.gather(-1, (scores + draws.noise(ids)).argmax(-1, keepdim=True))[..., 0]


def best_path(ids: Tensor, first: Tensor, onward: Tensor, draws: TargetDraws | None) -> Tensor:
    """From place to place the best of `ids` [..., G, K] after the one before it: [..., G].

    first: scores [..., K] of the first place's; onward: [..., G − 1, K, K], of each pair of neighbours.
    """
    if draws is not None:
        added = draws.noise(ids)
        first, onward = first + added[..., 0, :], onward + added[..., 1:, None, :]
    steps = onward.argmax(-1)  # [..., G − 1, K], from each id to a place among the next
    path = [first.argmax(-1, keepdim=True)]
    for place in range(steps.shape[-2]):
        path.append(steps[..., place, :].gather(-1, path[-1]))
    return ids.gather(-1, torch.stack(path, dim=-2))[..., 0]
