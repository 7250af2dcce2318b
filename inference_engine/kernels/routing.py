"""Routers of mixtures of experts: from a token's logits to its experts and their weights, on torch.

softmax    weights over all experts                                     Mixtral, arXiv 2401.04088; Qwen-MoE
sigmoid    each expert by itself; a bias decides about the choice, not   DeepSeek-V3, arXiv 2412.19437; GLM-4.5
           the weight; experts of the best groups alone are compared
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_engine.errors import ConfigError

if TYPE_CHECKING:  # lists of operations hold routers, and are read without torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """How `chosen` experts of each token are found.

    scores: "softmax" of all logits or "sigmoid" of each. sums_to_one: are the weights of the chosen ones divided by
    their sum? factor: what they are multiplied by then. groups: experts that follow each other are compared within the
    `chosen_groups` whose two best scores have the largest sums.
    """

    chosen: int
    scores: str = "softmax"
    sums_to_one: bool = False
    factor: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    def check(self, experts: int) -> None:
        """Raise ConfigError unless so many experts can be routed to."""
        left = experts // max(self.groups, 1) * self.chosen_groups
        if not (1 <= self.chosen_groups <= self.groups and experts % self.groups == 0 and 1 <= self.chosen <= left):
            groups = "" if self.groups == 1 else f", in {self.chosen_groups} of {self.groups} groups"
            raise ConfigError(f"{self.chosen} of {experts} experts are chosen{groups}")
        if self.scores not in ("softmax", "sigmoid"):
            raise ConfigError(f"experts are scored by {self.scores!r}, not by softmax or sigmoid")

    @property
    def is_softmax_alone(self) -> bool:
        return self.scores == "softmax" and self.groups == self.chosen_groups and self.factor == 1.0

    def choose(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token, int64, the best first, and their weights, float32: [N, chosen] each.

        logits [N, E]. bias: [E], added to scores before they are compared. Of equal scores the first comes first. Of a
        token with a logit that is not a number no weight is one. Nothing waits for the device.
        """
        ranks = logits.float()
        scores = ranks.softmax(dim=-1) if self.scores == "softmax" else ranks.sigmoid()
        if bias is not None or self.groups > self.chosen_groups:
            ranks = scores if bias is None else scores + bias.float()
        if self.groups > self.chosen_groups:
            by_group = ranks.view(len(ranks), self.groups, -1)
            best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(dim=-1)
            kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen_groups]
            left_out = best.new_ones(best.shape).scatter(1, kept, 0.0).bool()
            ranks = by_group.masked_fill(left_out[..., None], float("-inf")).flatten(1)
        ids = ranks.sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
        weights = scores.gather(1, ids)
        if self.sums_to_one:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids, weights if self.factor == 1.0 else weights * self.factor
