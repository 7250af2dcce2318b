"""How far predictions move when distant entries are restored ones: KL to the model's own, without an engine.

All of a sequence runs at once (`distant.py`), so many methods of restoring are compared in minutes. What the engine
makes of them, with entries leaving and later ones computed from restored ones, is `kakeya evaluate fidelity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference_engine.kv.context import TokenCodec
from kv_cache_proposer.f_theta.codec_errors import LatentError
from laboratory.training.capture import LayerStates, recording
from laboratory.training.distant import Distant, Rotate, seeing

# Tokens [T] and their entries, to the entries that replace them when seen from afar: keys and values [T, Hkv, D] by
# layer.
Restore = Callable[[Tensor, Sequence[LayerStates]], tuple[Sequence[Tensor], Sequence[Tensor]]]
Advance = Callable[[int], None]  # called with the tokens done since the last call


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """KL(exact ‖ restored) in nats over `tokens` positions."""

    mean: float
    p99: float
    tokens: int


def through(codec: TokenCodec) -> Restore:
    """Entries as the codec restores them."""
    return lambda _tokens, states: codec.decode(
        codec.encode([one.keys for one in states], [one.values for one in states])
    )


def nothing(_tokens: Tensor, states: Sequence[LayerStates]) -> tuple[list[Tensor], list[Tensor]]:
    """Entries that are their mean over the sequence: what is left when nothing of a token is kept."""

    def mean(part: Tensor) -> Tensor:
        return part.mean(0).expand_as(part)

    return [mean(one.keys) for one in states], [mean(one.values) for one in states]


@torch.no_grad()
def measure_divergence(
    model: PreTrainedModel,
    sequences: Iterable[Tensor],
    variants: Mapping[str, Restore],
    *,
    layers: Sequence[int],
    sink: int,
    window: int,
    advance: Advance | None = None,
) -> dict[str, Divergence]:
    """By name of each method of restoring, over token ids [T] with T > sink + window.

    Earlier positions do not count.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in variants}
    for tokens in sequences:
        if len(tokens) <= sink + window:
            raise LatentError(f"a sequence of {len(tokens)} tokens has no entry outside sink {sink}, window {window}")
        ids = tokens[None].to(model.device)
        with recording(model, layers=layers) as take:
            exact = log_probabilities(model(input_ids=ids, use_cache=False).logits, sink + window)
            states = take()
        for name, restore in variants.items():
            keys, values = restore(ids[0], states)
            with seeing(model, layers) as forward:
                ours = log_probabilities(
                    forward(ids, restored(layers, keys, values, sink=sink, window=window)), sink + window
                )
            found[name].append(divergences(exact, ours))
        if advance is not None:
            advance(len(tokens))
    if not any(found.values()):
        raise LatentError("there is no text to measure on; give at least one sequence of token ids")
    return {name: _pooled(parts) for name, parts in found.items()}


def restored(
    layers: Sequence[int], keys: Sequence[Tensor], values: Sequence[Tensor], *, sink: int, window: int
) -> Distant:
    """Unrotated entries [T, Hkv, D] of each of `layers`, to be seen from afar by a forward of that sequence alone."""
    entries = dict(zip(layers, zip(keys, values, strict=True), strict=True))

    def far(layer: int, _keys: Tensor, _values: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        own_keys, own_values = (part.transpose(0, 1)[None] for part in entries[layer])
        return rotate(own_keys.float()), own_values

    return Distant(sink, window, frozenset(layers), far)


def log_probabilities(logits: Tensor, first: int) -> Tensor:
    """float32 [T − first, V] of the only sequence, from position `first` on."""
    return logits[0, first:].float().log_softmax(-1)


def divergences(exact: Tensor, ours: Tensor) -> Tensor:
    """KL of each position, from log-probabilities [n, V]."""
    return (exact.exp() * (exact - ours)).sum(-1)


def _pooled(parts: Sequence[Tensor]) -> Divergence:
    all_divergences = torch.cat(list(parts)).double()
    return Divergence(
        mean=float(all_divergences.mean()),
        p99=float(all_divergences.quantile(0.99)),
        tokens=len(all_divergences),
    )
