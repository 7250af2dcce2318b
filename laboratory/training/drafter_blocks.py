"""Blocks to train a drafter on: many in one text, each as it would be drafted there.

    text        t0 t1 t2 t3 t4 t5 t6 t7 t8 …
    block at 3           [t3 M  M  M ]              sees t0 t1 t2 and itself; learns t4 t5 t6
    block at 5                 [t5 M  M  M ]        sees t0 … t4 and itself; learns t6 t7 t8

Anchors are drawn where the model's own words follow: nothing else is ever drafted. What comes after the first id of a
block that is not the model's own word is not learnt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch: token ids [N, T], padded; answers [N, T], which of them are the model's own words."""

    token_ids: Tensor
    answers: Tensor

    def to(self, device: torch.device) -> Texts:
        """Without waiting for a GPU to finish what it has to do: it reads pinned memory when its turn comes."""
        if device.type != "cuda":
            return Texts(self.token_ids.to(device), self.answers.to(device))
        moved = (part.pin_memory().to(device, non_blocking=True) for part in (self.token_ids, self.answers))
        return Texts(*moved)


@dataclass(frozen=True, slots=True)
class Blocks:
    """anchors [N, A]: where each block begins. targets, is_learnt [N, A, B−1]: what should be drafted, and whether."""

    anchors: Tensor
    targets: Tensor
    is_learnt: Tensor

    @property
    def block_size(self) -> int:
        return self.targets.shape[2] + 1

    def positions(self) -> Tensor:
        """[N, A · B]."""
        offsets = torch.arange(self.block_size, device=self.anchors.device)
        return (self.anchors[..., None] + offsets).flatten(1)

    def token_ids(self, texts: Texts, mask_token_id: int) -> Tensor:
        """[N, A · B]: the anchor's id, then masks."""
        ids = torch.full((*self.anchors.shape, self.block_size), mask_token_id, device=self.anchors.device)
        ids[..., 0] = texts.token_ids.gather(1, self.anchors)
        return ids.flatten(1)

    def mask(self, length: int, window: int) -> Tensor:
        """[N, 1, A · B, length + A · B]: the window before the anchor, then the block itself."""
        distance = self.anchors[..., None] - torch.arange(length, device=self.anchors.device)
        before = ((distance >= 1) & (distance <= window)).repeat_interleave(self.block_size, dim=1)
        return torch.cat([before, self._own_mask()], dim=2)[:, None]

    def _own_mask(self) -> Tensor:
        count, size = self.anchors.shape[1], self.block_size
        block = torch.arange(count * size, device=self.anchors.device) // size
        return (block[:, None] == block).expand(len(self.anchors), -1, -1)


def draw_blocks(texts: Texts, *, count: int, block_size: int, generator: torch.Generator | None) -> Blocks:
    """`count` blocks in each text, at different anchors; those beyond the ones a text has learn nothing.

    generator: on the texts' device; None takes the first anchors there are.
    """
    candidates = texts.answers[:, 1:]
    noise = torch.rand(candidates.shape, generator=generator, device=candidates.device) if generator else None
    order = torch.arange(candidates.shape[1], 0, -1, device=candidates.device) if noise is None else noise + 1e-6
    anchors = (candidates * order).topk(min(count, candidates.shape[1]), dim=1).indices
    return blocks_at(texts, anchors, block_size=block_size)


def blocks_at(texts: Texts, anchors: Tensor, *, block_size: int) -> Blocks:
    """Blocks at given anchors [N, A]."""
    length = texts.token_ids.shape[1]
    places = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    flat = places.clamp(max=length - 1).flatten(1)
    targets = texts.token_ids.gather(1, flat).view(places.shape)
    is_answer = texts.answers.gather(1, flat).view(places.shape) & (places < length)
    return Blocks(anchors, targets, is_answer.long().cumprod(-1).bool())
