"""How much the model's own predictions change with each restored entry: importances measured by gradient.

Every entry is attended to twice: exactly by queries that find it in the sink or window, and with a perturbation δ,
which is zero, by queries further on. For next tokens y drawn from the model's own predictions, g = ∂ Σ log p(y) / ∂δ
has mean zero, and the mean of g gᵀ is the Fisher information: KL(exact ‖ restored) ≈ ½ δᵀ E[g gᵀ] δ for small δ. We
keep it per layer, K or V, and KV head. It measures which heads attend far back and which layers matter, which
neither queries nor weights show. δ is added before rotation, for K, as the latent's own error is.
Source: labels must be drawn from the model, not taken from the text, for it to be the Fisher information (Kunstner et
al., Limitations of the empirical Fisher approximation, arXiv 1905.12558).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.f_theta.codec_errors import LatentError
from kv_cache_proposer.f_theta.importance import Importances
from laboratory.training.distant import Distant, Rotate, seeing

Advance = Callable[[int], None]  # called with the tokens done since the last call


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
    """Importances of the layers' KV entries over token ids, each batch [sequences, T] with T > sink + window.

    sink, window: entries outside them count as restored. On the model's device, float64. Sequences go one by one, and
    on a GPU the scores of all layers are held meanwhile, so take short ones: on SmolLM2 fourteen of 512 tokens did. The
    model comes back as it was.
    """
    sums: dict[int, Tensor] = {}
    positions = 0
    generator = torch.Generator(model.device).manual_seed(seed)
    with seeing(model, layers) as forward:
        for tokens in (sequence for batch in batches for sequence in batch.to(model.device)):
            if len(tokens) <= sink + window:
                raise LatentError(
                    f"a sequence of {len(tokens)} tokens has no entry outside sink {sink}, window {window}"
                )
            for layer, gradients in _gradients(forward, tokens, layers, sink, window, generator).items():
                found = torch.stack([_moment(gradient) for gradient in gradients])
                sums[layer] = sums[layer] + found if layer in sums else found
            positions += len(tokens) - sink - window
            if advance is not None:
                advance(len(tokens))
    if not positions:
        raise LatentError("there is no text to measure sensitivity on; give at least one batch of token ids")
    return {layer: sums[layer] / positions for layer in layers}


def _gradients(
    forward: Callable[[Tensor, Distant], Tensor],
    tokens: Tensor,
    layers: Sequence[int],
    sink: int,
    window: int,
    generator: torch.Generator,
) -> dict[int, tuple[Tensor, Tensor]]:
    """∂ Σ log p(y) / ∂δ by layer, of K and of V, each [1, Hkv, T, D]; tokens [T]."""
    deltas: dict[int, tuple[Tensor, Tensor]] = {}

    def perturbed(layer: int, keys: Tensor, values: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        deltas[layer] = (torch.zeros_like(keys, requires_grad=True), torch.zeros_like(values, requires_grad=True))
        return keys.detach() + rotate(deltas[layer][0]), values.detach() + deltas[layer][1]

    with torch.enable_grad():
        logits = forward(tokens[None], Distant(sink, window, frozenset(layers), perturbed))
        leaves = [delta for pair in deltas.values() for delta in pair]
        gradients = torch.autograd.grad(logits, leaves, _slopes(logits.detach(), sink + window, generator))
    return {layer: (gradients[2 * i], gradients[2 * i + 1]) for i, layer in enumerate(deltas)}


def _slopes(logits: Tensor, first: int, generator: torch.Generator) -> Tensor:
    """∂ Σ log p(y) / ∂ logits [1, T, V], each y drawn from the model's predictions at a position from `first` on.

    Earlier positions see no restored entry. A slope is 1 for the y that was drawn, less the probability of each.
    """
    probabilities = logits[0, first:].float().softmax(-1)
    sums = probabilities.cumsum(-1)
    drawn = torch.rand((len(sums), 1), generator=generator, device=sums.device) * sums[:, -1:]
    labels = torch.searchsorted(sums, drawn)
    slopes = torch.zeros_like(logits)
    slopes[0, first:] = -probabilities
    slopes[0, first:].scatter_add_(1, labels, torch.ones_like(drawn).to(slopes.dtype))
    return slopes


def _moment(gradient: Tensor) -> Tensor:
    """Σ g gᵀ over positions: [1, Hkv, T, D] → [Hkv, D, D] float64."""
    vectors = gradient[0].float()
    return (vectors.transpose(1, 2) @ vectors).double()
