"""Cross-entropy over the vocabulary without holding it: a slice of tokens at a time, gradients at once.

    gradient of a token's hidden state = weight · (p − share · q − (1 − share) · onehot) @ head
        p @ head − share · (q @ head) − (1 − share) · head[target]

The head is frozen, so all that is wanted of its backward is the gradient of the hidden states, which is known as soon
as a slice's probabilities are. Nothing of size [R, V] outlives its slice, and on a GPU moving such things is what
takes the time, not multiplying them: they are written in the head's dtype, once as scores and once as probabilities
(whose sums are float32), and the three terms meet as [R, hidden].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SLICE_BYTES = 2**29


def head_loss(
    states: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    teacher: Tensor | None = None,
    teacher_share: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Σ weights · cross-entropy of states [R, hidden] @ headᵀ [hidden, V], and whether the best id of each is its
    target.

    targets, weights [R]. teacher [R, hidden]: the target's own hidden states; their distribution takes the place of the
    given id by `teacher_share`.
    """
    if teacher is None or not teacher_share:
        teacher, teacher_share = states.new_empty(0), 0.0
    loss, is_right = _HeadLoss.apply(states, head, targets, weights, teacher, teacher_share)  # type: ignore[no-untyped-call]
    return loss, is_right


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, targets: Tensor, weights: Tensor, teacher: Tensor, share: float
    ) -> tuple[Tensor, Tensor]:
        gradients = torch.empty_like(states)
        is_right = torch.empty_like(targets, dtype=torch.bool)
        loss = torch.zeros((), device=states.device)
        step = max(1, _SLICE_BYTES // (head.element_size() * len(head)))
        for first in range(0, len(states), step):
            own = slice(first, first + step)
            state, target, weight = states[own].to(head.dtype), targets[own, None], weights[own, None]
            logits = state @ head.T
            best, place = logits.max(-1, keepdim=True)
            is_right[own] = place[:, 0] == targets[own]
            chances = logits.softmax(-1)
            # The likeliest has a chance of at least 1 / V: its logarithm is never lost to rounding.
            total = best.float() - chances.gather(1, place).float().log()
            token_loss = (1 - share) * (total - logits.gather(1, target).float())
            gradient = (chances @ head).float() - (1 - share) * head[targets[own]].float()
            if share:
                wanted = ((teacher[own].to(head.dtype) @ head.T).softmax(-1) @ head).float()
                token_loss += share * (total - (wanted * state.float()).sum(-1, keepdim=True))
                gradient -= share * wanted
            gradients[own] = (gradient * weight).to(states.dtype)
            loss += (token_loss * weight).sum()
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(is_right)
        return loss, is_right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * grads[0], None, None, None, None, None
