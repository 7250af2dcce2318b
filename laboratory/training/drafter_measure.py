"""How far a drafter gets on texts it never saw, as if the model said them again with its help.

In a text of the model's own a draft is kept where it equals the text: that is what the engine does with it. So the walk
from block to block can be replayed, and no token needs to be generated. Draft tokens are greedy here: a text does not
show the noise that it was drawn with.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.dflash.draft_tokens import choose_draft_tokens
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import TargetWords
from laboratory.training.drafter_blocks import Blocks, Texts, blocks_at
from laboratory.training.drafter_taps import read_taps

_ANCHORS = 128


def acceptance_length(
    model: PreTrainedModel, network: DFlashNetwork, words: TargetWords, texts: Iterable[Texts]
) -> float:
    """Tokens that a verifying forward gives on average, with every draft as long as the drafter goes: 1 is none right.

    Only the model's own words count, and only blocks that lie within them.
    """
    steps = given = 0
    for given_batch in texts:
        batch = given_batch.to(next(network.parameters()).device)
        accepted = _accepted(model, network, words, batch).tolist()
        answers = batch.answers.tolist()
        for index, marks in enumerate(answers):
            place = 0
            while place + network.config.block_size < len(marks):
                if all(marks[place + 1 : place + network.config.block_size]):
                    steps += 1
                    given += accepted[index][place] + 1
                    place += accepted[index][place] + 1
                else:
                    place += 1
    return given / steps if steps else 1.0


def _accepted(model: PreTrainedModel, network: DFlashNetwork, words: TargetWords, texts: Texts) -> Tensor:
    """How many draft tokens would be right from each position on: [N, T]."""
    count, length = texts.token_ids.shape
    device = texts.token_ids.device
    found = torch.zeros((count, length), dtype=torch.long, device=device)
    with torch.no_grad():
        taps, _ = read_taps(model, texts.token_ids, network.config.tap_layers)
        for first in range(0, length, _ANCHORS):
            anchors = torch.arange(first, min(first + _ANCHORS, length), device=device).expand(count, -1)
            blocks = blocks_at(texts, anchors, block_size=network.config.block_size)
            states = draft_states(network, words, texts, blocks, taps)
            draft_tokens = choose_draft_tokens(network, words, states)
            found[:, first : first + anchors.shape[1]] = (draft_tokens == blocks.targets).long().cumprod(-1).sum(-1)
    return found


def draft_states(network: DFlashNetwork, words: TargetWords, texts: Texts, blocks: Blocks, taps: Tensor) -> Tensor:
    """What `choose_draft_tokens` and the target's head turn into draft tokens: [N, A, B − 1, hidden].

    taps: [N, T, taps, hidden].
    """
    config = network.config
    count, length = texts.token_ids.shape
    positions = torch.arange(length, device=texts.token_ids.device).expand(count, -1)
    embedded = words.embed(blocks.token_ids(texts, config.mask_token_id), config.embedding_scale)
    mask = blocks.mask(length, config.context_window)
    states: Tensor = network(embedded, blocks.positions(), network.context(taps, positions), mask)
    return states.view(count, -1, config.block_size, config.hidden)[:, :, 1:]
