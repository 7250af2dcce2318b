"""How far a drafter gets on texts it never saw, as if the model said them again with its help.

In a text of the model's own a draft is kept where it equals the text: that is what the engine does with it. So the walk
from block to block can be replayed, and no token needs to be generated. Draft tokens are greedy here: a text does not
show the noise that it was drawn with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.dflash.draft_tokens import choose_draft_tokens
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import TargetWords
from laboratory.training.drafter_blocks import Blocks, Texts, blocks_at
from laboratory.training.drafter_taps import ReadTaps, read_taps

_ANCHORS = 128


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens that a block sees from `nearest` to `furthest` places before it, and what stands for their taps."""

    read: ReadTaps
    nearest: int
    furthest: int


def acceptance_length(
    model: PreTrainedModel,
    network: DFlashNetwork,
    words: TargetWords,
    texts: Iterable[Texts],
    contexts: Sequence[Context] = (),
) -> float:
    """Tokens that a verifying forward gives on average, with every draft as long as the drafter goes: 1 is none right.

    Only the model's own words count, and only blocks that lie within them. contexts: by default the taps of the
    network's window.
    """
    contexts = contexts or (Context(read_taps, 1, network.config.context_window),)
    steps = given = 0
    for given_batch in texts:
        batch = given_batch.to(next(network.parameters()).device)
        accepted = _accepted(model, network, words, batch, contexts).tolist()
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


def _accepted(
    model: PreTrainedModel,
    network: DFlashNetwork,
    words: TargetWords,
    texts: Texts,
    contexts: Sequence[Context],
) -> Tensor:
    """How many draft tokens would be right from each position on: [N, T]."""
    count, length = texts.token_ids.shape
    device = texts.token_ids.device
    found = torch.zeros((count, length), dtype=torch.long, device=device)
    with torch.no_grad():
        read = {one: one.read(model, texts.token_ids, network.config.tap_layers)[0] for one in contexts}
        for first in range(0, length, _ANCHORS):
            anchors = torch.arange(first, min(first + _ANCHORS, length), device=device).expand(count, -1)
            blocks = blocks_at(texts, anchors, block_size=network.config.block_size)
            states = states_from(network, words, texts, blocks, read)
            draft_tokens = choose_draft_tokens(network, words, states)
            found[:, first : first + anchors.shape[1]] = (draft_tokens == blocks.targets).long().cumprod(-1).sum(-1)
    return found


def draft_states(network: DFlashNetwork, words: TargetWords, texts: Texts, blocks: Blocks, taps: Tensor) -> Tensor:
    """What `choose_draft_tokens` and the target's head turn into draft tokens: [N, A, B − 1, hidden]."""
    return states_from(network, words, texts, blocks, {Context(read_taps, 1, network.config.context_window): taps})


def states_from(
    network: DFlashNetwork, words: TargetWords, texts: Texts, blocks: Blocks, contexts: Mapping[Context, Tensor]
) -> Tensor:
    """As `draft_states`, with the taps [N, T, taps, hidden] of each context."""
    config = network.config
    count, length = texts.token_ids.shape
    positions = torch.arange(length, device=texts.token_ids.device).expand(count, -1)
    embedded = words.embed(blocks.token_ids(texts, config.mask_token_id), config.embedding_scale)
    mask = blocks.mask_of(length, [(one.nearest, one.furthest) for one in contexts])
    entries = [network.context(taps, positions) for taps in contexts.values()]
    joined = [
        (torch.cat([keys for keys, _ in of_layer], dim=2), torch.cat([values for _, values in of_layer], dim=2))
        for of_layer in zip(*entries, strict=True)
    ]
    states: Tensor = network(embedded, blocks.positions(), joined, mask)
    return states.view(count, -1, config.block_size, config.hidden)[:, :, 1:]
