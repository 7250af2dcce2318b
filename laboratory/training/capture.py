"""Unrotated queries, keys and values of every layer of a transformers model, read by hooks while it runs over tokens.

    q_proj k_proj v_proj            the projections; what they give is already per head, only flat
                                    (values may come from k_proj, too)
    q_norm k_norm v_norm            where a model has them, their output counts: it is what the model rotates
    (or q_layernorm …)              q_proj may give a gate of the output, too, behind each head's query

States are given as sessions store them: where values are made of keys, in the order of their entries, and queries as
they read those (`models/keyed_values.py`).

Nothing of the model changes, and the hooks are gone afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from inference_engine.errors import ModelError
from inference_engine.kv.archives.finite import FiniteCheck
from inference_engine.models.keyed_values import KeyedValues, keyed_layers
from inference_engine.models.layer_traits import TRIAL, watched
from inference_engine.models.mixers import is_mixer
from inference_engine.models.seam import rotary_modules

_KINDS = ("q", "k", "v")
_KEYS_TOLERANCE = 0.02  # of the largest number: keys in bfloat16, scaled once


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What one layer computed for N tokens: queries [N, Hq, D], keys and values [N, Hkv, D], none of them rotated."""

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor


def capture(model: nn.Module, batches: Iterable[Tensor], *, layers: Sequence[int]) -> Iterator[list[LayerStates]]:
    """Run the model over each batch of token ids [sequences, T] and yield its states, one item for each of `layers`.

    layers: stored ones, as `Geometry.layers` numbers them: those with attention, in their order.
    Only its body runs, for logits are not needed. N is sequences × T, sequence after sequence. The states stay on the
    model's device, in its dtype. Raises ModelError for a model whose attention has no q_proj, k_proj and v_proj,
    NonFiniteEntries for one that overflows.
    """
    body = getattr(model, "base_model", model)
    device = next(model.parameters()).device
    with recording(model, layers=layers) as take:
        for tokens in batches:
            with torch.no_grad():
                body(input_ids=tokens.to(device), use_cache=False)
            yield take()


@contextmanager
def recording(
    model: nn.Module, *, layers: Sequence[int], as_stored: bool = True
) -> Iterator[Callable[[], list[LayerStates]]]:
    """Gives `take`, which returns the states of the model's last forward, and forgets them.

    as_stored: else as the model has them. It raises NonFiniteEntries. Raises ModelError as `capture` does.
    """
    attentions = _stored_attentions(model)
    if missing := [layer for layer in layers if layer not in attentions]:
        raise ModelError(f"{type(model).__name__} has no attention with q_proj, k_proj and v_proj in layers {missing}")
    recorders = [_Recorder(layer, attentions[layer]) for layer in layers]
    forms = entry_forms(model) if as_stored else {}
    own = [forms.get(_number(attentions[layer])) for layer in layers]

    def take() -> list[LayerStates]:
        states = [recorder.take() for recorder in recorders]
        _require_finite(states)
        return [one if form is None else _stored(one, form) for one, form in zip(states, own, strict=True)]

    try:
        yield take
    finally:
        for recorder in recorders:
            recorder.remove()


def require_stored_keys(model: PreTrainedModel, *, layers: Sequence[int]) -> None:
    """Raise ModelError unless `capture` sees keys as sessions store them, but for rotation.

    At position 0 rotation does nothing but scale, so the keys that reach attention there are those captured.
    """
    before = model.config.get_text_config()._attn_implementation
    token = torch.ones((1, 1), dtype=torch.long)
    try:
        model.set_attn_implementation(TRIAL)
        with watched(model) as seen:
            with recording(model, layers=layers, as_stored=False) as take, torch.no_grad():
                model.base_model(input_ids=token.to(model.device), use_cache=False)
            states = take()
    finally:
        model.set_attn_implementation(before)
    by_stored = [seen.keys[number] for number in sorted(seen.keys)]
    for one in states:
        stored, captured = by_stored[one.layer].transpose(0, 1).float(), one.keys.float()
        scale = stored.norm() / captured.norm().clamp_min(1e-12)
        if not bool((stored - scale * captured).abs().max() <= _KEYS_TOLERANCE * stored.abs().max()):
            raise ModelError(
                f"{type(model).__name__} changes the keys of layer {one.layer} between k_proj and attention where "
                "calibration does not see it; a latent for it cannot be calibrated"
            )


def entry_forms(model: nn.Module) -> dict[int, KeyedValues]:
    """By layer of the model, what its entries are, where they are not the keys and values that attention is given."""
    if not isinstance(model, PreTrainedModel):
        return {}
    places = rotary_modules(model)
    if not places:
        return {}
    owner, name = places[0]
    return keyed_layers(model.config.get_text_config(), attention_modules(model), owner.get_submodule(name))


def _stored(states: LayerStates, form: KeyedValues) -> LayerStates:
    keys, values = form.key(states.keys, states.values), form.value(states.values)
    return LayerStates(states.layer, form.query(states.queries), keys, values)


def _number(attention: nn.Module) -> int:
    number: Any = attention.layer_idx
    return int(number)


def _require_finite(states: Sequence[LayerStates]) -> None:
    finite = FiniteCheck()
    for one in states:
        finite.ask([one.layer], one.keys[None], one.values[None], come_back=False)
    finite.send()
    finite.require()


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The model's attention modules by layer: those that know their layer and have the three projections."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if (
            isinstance(layer, int)
            and not is_mixer(module)
            and all(_projection(module, kind) is not None for kind in _KINDS)
        ):
            found[layer] = module
    return found


def _stored_attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The same, numbered as stored layers: others, that keep a recurrent state, do not count."""
    found = attention_modules(model)
    return dict(enumerate(found[number] for number in sorted(found)))


def _projection(attention: nn.Module, kind: str) -> nn.Module | None:
    """Where `v_proj` is None, values come from the projection of the keys, as in Gemma 4's global layers."""
    own = getattr(attention, f"{kind}_proj", None)
    if kind == "v" and own is None and hasattr(attention, "v_proj"):
        own = getattr(attention, "k_proj", None)
    return own if isinstance(own, nn.Module) else None


def output_projections(model: nn.Module, *, layers: Sequence[int]) -> dict[int, Tensor]:
    """Each layer's Wo [hidden, Hq · D], of values as they are stored. Raises ModelError where there is none."""
    attentions, forms = _stored_attentions(model), entry_forms(model)
    found: dict[int, Tensor] = {}
    for layer in layers:
        attention = attentions.get(layer)
        projection = getattr(attention, "o_proj", None) or getattr(attention, "out_proj", None)
        if not isinstance(projection, nn.Linear):
            raise ModelError(f"{type(model).__name__}: layer {layer} has no linear o_proj to weigh values by")
        weight = projection.weight.detach()
        if attention is not None and (form := forms.get(_number(attention))) is not None:
            weight = form.value(weight.view(len(weight), -1, len(form.turned) + len(form.still))).flatten(1)
        found[layer] = weight
    return found


class _Recorder:
    """Hooks on one attention module. `take` returns the output of the last forward and forgets it."""

    def __init__(self, layer: int, attention: nn.Module) -> None:
        self._layer = layer
        self._head_dim = int(getattr(attention, "head_dim", 0))
        if self._head_dim < 1:
            raise ModelError(f"layer {layer}: {type(attention).__name__} does not say its head_dim")
        self._states: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for kind in _KINDS:
            projection = _projection(attention, kind)
            assert projection is not None
            self._handles.append(projection.register_forward_hook(self._projected(kind)))
            norm = getattr(attention, f"{kind}_norm", None) or getattr(attention, f"{kind}_layernorm", None)
            if isinstance(norm, nn.Module):
                self._handles.append(norm.register_forward_hook(self._normed(kind)))

    def take(self) -> LayerStates:
        if missing := [kind for kind in _KINDS if kind not in self._states]:
            raise ModelError(f"layer {self._layer} computed no {', '.join(missing)} of its own; it cannot be captured")
        states = LayerStates(self._layer, *(self._states[kind] for kind in _KINDS))
        self._states = {}
        return states

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _projected(self, kind: str) -> Any:
        def hook(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._states[kind] = output.reshape(-1, output.shape[-1] // self._head_dim, self._head_dim)

        return hook

    def _normed(self, kind: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # Norms are called on [B, T, H · D], on [B, T, H, D] or, in Gemma, on [B, H, T, D]. What went into the norm
            # came out of the projection, so it decides; shapes alone do not when T equals H.
            projected, before = self._states[kind], inputs[0]
            if (gated := projected.numel() // before.numel()) > 1:
                projected = projected.view(len(projected), -1, gated, self._head_dim)[:, :, 0]
            is_heads_first = before.ndim == 4 and not torch.equal(before.reshape(projected.shape), projected)
            states = output.transpose(1, 2) if is_heads_first else output
            self._states[kind] = states.reshape(projected.shape)

        return hook
