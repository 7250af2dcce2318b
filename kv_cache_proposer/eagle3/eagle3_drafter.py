"""EAGLE-3 as the engine sees it: committed tokens become entries, and a draft is one pass of the layer for each token.

    observe   hidden states of all sessions' tokens, and the tokens after them ── K and V, into each ring buffer
              of the last token, which has none after it yet, the fused state alone is carried
    propose   the carried state and the token that was just sampled ── token, state ── token, state ── …

All sessions are drafted for in one batch, on torch. Entries of draft tokens are not kept: once a draft is verified, its
accepted tokens have the target's own hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_engine.backends.base import EmbeddingAndHead
from inference_engine.backends.native.program import Program
from inference_engine.backends.packed_linear import can_pack, pack_linears
from inference_engine.decode.draft import CommittedTokens, DraftMethod, TokenIds, Wanted
from inference_engine.errors import NotNative
from inference_engine.models.seam import Seam
from kv_cache_proposer.dflash.draft_tokens import LIKELIEST, TargetDraws, best_alone
from kv_cache_proposer.dflash.drafter import RingDrafter, noise_of, padded_entries, ring_of
from kv_cache_proposer.dflash.drafter_memory import RingShape, write_entries, write_index
from kv_cache_proposer.dflash.network import additive
from kv_cache_proposer.drafter_errors import DrafterError
from kv_cache_proposer.eagle3.eagle3_network import Eagle3Network

_NO_DRAFT: TokenIds = np.zeros(0, dtype=np.uint32)


class Eagle3Drafter(RingDrafter):
    """Implements Drafter: one network for all sessions."""

    def __init__(self, network: Eagle3Network, embeddings: Tensor, *, target_hidden: int) -> None:
        """network: on the target's device, in its dtype. embeddings: the target's, [V, …], as the weights are.

        Raises DrafterError for a target it does not fit.
        """
        config = network.config
        ring = RingShape(
            layers=1,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.context_window,
            carried=config.hidden,
        )
        method = DraftMethod("eagle3", longest=config.longest, needs_entries=True)
        super().__init__("eagle3", method, ring, config.tap_layers, reads=config.target_hidden, hidden=target_hidden)
        if len(embeddings) != config.vocabulary:
            raise DrafterError(f"the drafter was made for {config.vocabulary} ids, the target has {len(embeddings)}")
        own = network.embed_tokens
        if own is not None and not (own.weight.shape == embeddings.shape and torch.equal(own.weight, embeddings)):
            embeddings = own.weight
        network.embed_tokens = None  # one copy of it is enough
        if embeddings.shape[1] != config.hidden:
            raise DrafterError(
                f"the drafter reads embeddings of {config.hidden} numbers and has none of its own, the target's have "
                f"{embeddings.shape[1]}"
            )
        self._network = network.eval().requires_grad_(requires_grad=False)
        self._embeddings = embeddings

    @torch.inference_mode()
    def observe(self, seen: Sequence[CommittedTokens]) -> None:
        seen = [one for one in seen if len(one.token_ids)]
        if not seen:
            return
        taps = [one.taps for one in seen if one.taps is not None]
        assert len(taps) == len(seen), "taps were asked for"
        fused = torch.split(self._network.fuse(torch.cat(taps)), [len(one) for one in taps])
        memories, slots, after, states, positions = [], [], [], [], []
        for one, own in zip(seen, fused, strict=True):
            memory, first, next_ids, known = ring_of(one.memory), one.first, one.token_ids[1:], own[:-1]
            if memory.carried_at == first - 1:
                first, next_ids = first - 1, one.token_ids
                known = torch.cat([memory.carried().to(own.dtype)[None], known])
            memory.carry(first + len(next_ids), own[-1])
            if len(next_ids):
                places, at = memory.hold(first, len(next_ids))
                memories.append(memory)
                slots.append(at)
                after.append(next_ids[places].astype(np.int64))
                states.append(known[int(places[0]) :])
                positions.append(first + places)
        if memories:
            keys, values = self._network.entries(
                self._embed(torch.from_numpy(np.concatenate(after)))[None],
                torch.cat(states)[None],
                torch.from_numpy(np.concatenate(positions)).to(self._embeddings.device)[None],
            )
            write_entries(memories[0], write_index(memories, slots), keys, values)

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        drafts = [_NO_DRAFT] * len(wanted)
        # Nothing is drafted for a history whose last positions were not observed.
        ready = [
            place for place, one in enumerate(wanted) if ring_of(one.memory).carried_at == len(one.history) - 2 >= 0
        ]
        if ready:
            for place, draft in zip(ready, self._drafts([wanted[place] for place in ready]), strict=True):
                drafts[place] = draft
        return drafts

    def _drafts(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        limits = [min(one.limit, self.longest) for one in wanted]
        count, device = max(limits), self._embeddings.device
        memories = [ring_of(one.memory) for one in wanted]
        first = [len(one.history) - 2 for one in wanted]
        (keys, values), visible, _ = padded_entries(memories, first, count)
        context, dtype = (keys[0], values[0]), self._network.norm.weight.dtype
        mask = additive(torch.from_numpy(visible).to(device)[:, None, None], dtype)
        seen = mask.shape[-1] - count
        draws = None
        draw_keys, temperatures = noise_of(wanted, count)
        if temperatures.any():
            draws = TargetDraws(torch.from_numpy(draw_keys).to(device), torch.from_numpy(temperatures).to(device))
        states = torch.stack([memory.carried() for memory in memories]).to(dtype)[:, None]
        positions = torch.tensor(first, device=device)[:, None]
        ids = torch.tensor([[int(one.history[-1])] for one in wanted])
        chosen = []
        for step in range(count):
            scores, states, context = self._network(
                self._embed(ids), states, positions + step, context, mask[..., : seen + step + 1]
            )
            own = None if draws is None else TargetDraws(draws.keys[:, step : step + 1], draws.temperatures)
            ids = self._choose(scores, own)
            chosen.append(ids)
        found = torch.cat(chosen, dim=1).cpu().numpy()
        return [draft[:limit].astype(np.uint32) for draft, limit in zip(found, limits, strict=True)]

    def _choose(self, scores: Tensor, draws: TargetDraws | None) -> Tensor:
        """The best id [N, 1] by scores [N, 1, draft_vocabulary] and the target's noise; of equal ones the first."""
        ids = self._network.draft_ids
        best = ids[scores.argmax(-1)]
        if draws is None:
            return best
        likeliest, places = scores.float().topk(min(LIKELIEST, scores.shape[-1]), dim=-1)
        return torch.where(draws.temperatures[:, None] == 0, best, best_alone(ids[places], likeliest, draws))

    def _embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids.to(self._embeddings.device), self._embeddings)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Eagle3BesideTarget:
    """Implements Borrower: the drafter of `network`, which is taken over.

    is_packed: may its weights be laid out for oneDNN? target_hidden: numbers of a hidden state of the target's.
    """

    network: Eagle3Network
    is_packed: bool
    target_hidden: int

    def of_program(self, program: Program) -> Eagle3Drafter:
        raise NotNative("EAGLE-3 drafters run on torch")

    def of_modules(self, seam: Seam) -> Eagle3Drafter:
        return self._drafter(seam.model.get_input_embeddings().weight.detach())

    def of_matrices(self, words: EmbeddingAndHead) -> Eagle3Drafter:
        return self._drafter(words.embedding)

    def _drafter(self, embeddings: Tensor) -> Eagle3Drafter:
        drafter = Eagle3Drafter(self.network, embeddings, target_hidden=self.target_hidden)
        if self.is_packed and can_pack(self.network):
            pack_linears(self.network)
        return drafter
