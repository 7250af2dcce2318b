"""From the states of a block's places to its guesses.

without a chain   each place's likeliest id, whatever its neighbours say
with one          from place to place, the likeliest after the guess before it

       place 1   place 2   place 3         each place's likeliest few ids as it knows them alone, every pair of
         a ─┬───── b         c             neighbours scored at once; then the best way from the first one on
         ·  └───── d ─────── e
"""

from __future__ import annotations

import torch
from torch import Tensor

from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import TargetWords

_LIKELIEST = 8  # of a place, that a way may go through


def guess(network: DFlashNetwork, words: TargetWords, states: Tensor) -> Tensor:
    """Ids [..., G] of the places whose states are [..., G, hidden]. Nothing waits for the device."""
    scores = words.head(states)
    chain = network.chain
    if chain is None or states.shape[-2] == 1:
        return scores.argmax(-1)
    ids = scores.topk(min(_LIKELIEST, scores.shape[-1]), dim=-1).indices  # [..., G, K]
    before = words.embed(ids[..., :-1, :], network.config.embedding_scale)
    after = chain(states[..., 1:, None, :], before)  # [..., G − 1, K, hidden]
    onward = words.scores(after, ids[..., 1:, :]).argmax(-1)  # [..., G − 1, K], from each id to a place among the next
    way = [torch.zeros_like(ids[..., 0, :1])]
    for place in range(onward.shape[-2]):
        way.append(onward[..., place, :].gather(-1, way[-1]))
    return ids.gather(-1, torch.stack(way, dim=-2))[..., 0]
