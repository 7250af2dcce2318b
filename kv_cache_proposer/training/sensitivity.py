"""How much the model's own predictions change with each restored row: importances measured by gradient.

Every row is attended to twice: exactly by queries that find it in the sink or window, and with a perturbation δ, which
is zero, by queries further on. For next tokens y drawn from the model's own predictions, g = ∂ Σ log p(y) / ∂δ has mean
zero, and the mean of g gᵀ is the Fisher information: KL(exact ‖ restored) ≈ ½ δᵀ E[g gᵀ] δ for small δ. We keep it per
layer, K or V, and KV head. It knows which heads look far back, and which layers matter, as no query or weight tells.
δ is added before rotation, for K, as the latent's own error is.
Source: labels must be drawn from the model, not taken from the text, for it to be the Fisher information (Kunstner et
al., Limitations of the empirical Fisher approximation, arXiv 1905.12558).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from inference_engine.errors import ModelError
from kv_cache_proposer.f_theta.errors import LatentError
from kv_cache_proposer.f_theta.importance import Importances
from kv_cache_proposer.training.capture import attention_modules

ATTENTION = "kakeya_perturbed"

Advance = Callable[[int], None]  # called with the tokens done since the last call


@dataclass(frozen=True, slots=True)
class _Perturbed:
    """One forward: what queries see exactly, and each covered layer's δ of K and V as it turns up."""

    sink: int
    window: int
    layers: frozenset[int]
    deltas: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def measure_sensitivity(
    model: PreTrainedModel,
    batches: Iterable[Tensor],
    *,
    layers: Sequence[int],
    sink: int,
    window: int,
    seed: int = 0,
    advance: Advance | None = None,
) -> Importances:
    """Importances of the layers' rows over token ids, each batch [sequences, T] with T > sink + window.

    sink, window: rows outside them count as restored. On the model's device, float64. Sequences go one by one; the
    backward costs twice the forward and holds every layer's T × T scores some six times, so take short ones: on SmolLM2
    fourteen of 512 tokens did, with the model in float32. The model comes back as it was.
    """
    covered = frozenset(layers)
    sums: dict[int, Tensor] = {}
    rows = 0
    generator = torch.Generator(model.device).manual_seed(seed)
    with _perturbing(model, layers):
        for tokens in (sequence for batch in batches for sequence in batch.to(model.device)):
            if len(tokens) <= sink + window:
                raise LatentError(f"a sequence of {len(tokens)} tokens has no row outside sink {sink}, window {window}")
            perturbed = _Perturbed(sink, window, covered)
            for layer, gradients in _gradients(model, tokens, perturbed, generator).items():
                found = torch.stack([_moment(gradient) for gradient in gradients])
                sums[layer] = sums[layer] + found if layer in sums else found
            rows += len(tokens) - sink - window
            if advance is not None:
                advance(len(tokens))
    if not rows:
        raise LatentError("there is no text to measure sensitivity on; give at least one batch of token ids")
    return {layer: sums[layer] / rows for layer in layers}


def _gradients(
    model: PreTrainedModel, tokens: Tensor, perturbed: _Perturbed, generator: torch.Generator
) -> dict[int, tuple[Tensor, Tensor]]:
    """∂ Σ log p(y) / ∂δ by layer, of K and of V, each [1, Hkv, T, D]; tokens [T]."""
    with torch.enable_grad():
        logits: Tensor = model(input_ids=tokens[None], use_cache=False, perturbed=perturbed).logits
        # Earlier positions see no restored row.
        scores = logits[0, perturbed.sink + perturbed.window :].float().log_softmax(-1)
        drawn = torch.multinomial(scores.detach().exp(), 1, generator=generator)
        leaves = [delta for deltas in perturbed.deltas.values() for delta in deltas]
        gradients = torch.autograd.grad(scores.gather(1, drawn).sum(), leaves)
    return {layer: (gradients[2 * i], gradients[2 * i + 1]) for i, layer in enumerate(perturbed.deltas)}


def _moment(gradient: Tensor) -> Tensor:
    """Σ g gᵀ over rows: [1, Hkv, T, D] → [Hkv, D, D] float64."""
    rows = gradient[0].float()
    return (rows.transpose(1, 2) @ rows).double()


@contextmanager
def _perturbing(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[None]:
    attentions = attention_modules(model)
    if missing := [layer for layer in layers if layer not in attentions]:
        raise ModelError(f"{type(model).__name__} has no attention with q_proj, k_proj and v_proj in layers {missing}")
    before = model.config.get_text_config()._attn_implementation
    handles = [attention.register_forward_pre_hook(_note_angles, with_kwargs=True) for attention in attentions.values()]
    try:
        model.set_attn_implementation(ATTENTION)
        yield
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)


def _note_angles(module: nn.Module, _inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """The angles the layer rotates with come to the module, but not to its attention function."""
    perturbed: _Perturbed = keywords["perturbed"]
    layer: Any = module.layer_idx
    if keywords.get("position_embeddings") is None:
        raise ModelError(f"layer {layer}: {type(module).__name__} is not given its rotation angles by keyword")
    perturbed.angles[layer] = keywords["position_embeddings"]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    perturbed: _Perturbed,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, T, D], key and value [B, Hkv, T, D], rotated; returns ([B, T, Hq, D], None)."""
    if attention_mask is not None or dropout or softcap is not None or others.get("s_aux") is not None:
        raise ModelError(
            f"{type(module).__name__} gives attention a mask, dropout, soft-capping or sinks; none can be honoured here"
        )
    layer: Any = module.layer_idx
    heads_per_row = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    position = torch.arange(query.shape[2], device=query.device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)

    def spread(rows: Tensor) -> Tensor:
        return rows.float().repeat_interleave(heads_per_row, dim=1)

    queries = query.float() * scale
    scores = queries @ spread(key).transpose(-1, -2)
    if layer not in perturbed.layers:
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights @ spread(value)).to(query.dtype).transpose(1, 2), None
    exact = (position[None, :] < perturbed.sink) | (distance < perturbed.window)
    deltas = (torch.zeros_like(key, requires_grad=True), torch.zeros_like(value, requires_grad=True))
    perturbed.deltas[layer] = deltas
    far_keys = key.detach() + _rotate(module, deltas[0], perturbed.angles[layer])
    far_values = value.detach() + deltas[1]
    far_scores = queries @ spread(far_keys).transpose(-1, -2)
    weights = torch.where(exact, scores, far_scores).masked_fill(~visible, -torch.inf).softmax(-1)
    out = (weights * exact) @ spread(value) + (weights * ~exact) @ spread(far_values)
    return out.to(query.dtype).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attend)


def _rotate(module: nn.Module, rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    function = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if function is None:
        raise ModelError(f"{type(module).__name__} does not rotate queries and keys in a way we know")
    rotated: Tensor = function(rows, rows, *angles)[1]
    return rotated
