"""Runs a transformers model with other KV entries at a distance: restored ones, or ones that carry a gradient.

    query at i reads   ■ ■ ■ ■ | □ □ □ □ □ □ | ■ ■ ■ ■ ■        ■ exactly   □ as `far` gives them
                        sink                    window

In the engine an entry is replaced when it leaves the window, and later entries are computed from it; here all of a
sequence runs at once and `far` is known beforehand. The two agree closely, for restoration hardly moves later entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from inference_engine.backends.twin import admit_config
from inference_engine.errors import ModelError
from inference_engine.kv.geometry import IMMOVABLE, UNROTATED
from inference_engine.models.keyed_values import KeyedValues
from inference_engine.models.seam import rotation_function
from laboratory.training.capture import attention_modules, entry_forms

ATTENTION = "kakeya_distant"

# Queries that attend together: what none of them reads is not computed.
BLOCK_TOKENS = 128
# Those whose gradients are the same again, to the bit: on a GPU, the plain one.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

# What the layers of a model do to their keys, by its class and configuration. A twin is run for it, which takes long.
_ROTARIES: dict[tuple[type[PreTrainedModel], str], tuple[str, ...]] = {}

Rotate = Callable[[Tensor], Tensor]
# Of a layer, its keys (rotated) and values [B, Hkv, T, D], and what rotates [B, Hkv, T, D]: the entries seen from afar.
Far = Callable[[int, Tensor, Tensor, Rotate], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Distant:
    """One forward: what queries see exactly, and where other entries of `layers` come from.

    unrotated: those of them that do not rotate their keys; forms: what entries of a layer are, where they are not what
    attention is given; both filled in when the forward runs.
    """

    sink: int
    window: int
    layers: frozenset[int]
    far: Far
    unrotated: frozenset[int] = frozenset()
    forms: Mapping[int, KeyedValues] = field(default_factory=dict)
    angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@contextmanager
def seeing(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[Callable[[Tensor, Distant], Tensor]]:
    """Gives `forward(tokens [B, T], distant) -> logits [B, T, V]`. The model comes back as it was."""
    attentions = attention_modules(model)
    if missing := [layer for layer in layers if layer not in attentions]:
        raise ModelError(f"{type(model).__name__} has no attention with q_proj, k_proj and v_proj in layers {missing}")
    kind = type(model), model.config.to_json_string()
    if kind not in _ROTARIES:
        _ROTARIES[kind] = tuple(trait.rotary for trait in admit_config(model.config, type(model)).traits)
    rotaries = _ROTARIES[kind]
    if fixed := [layer for layer in layers if rotaries[layer] == IMMOVABLE]:
        raise ModelError(
            f"{type(model).__name__} changes its keys after rotation in layers {fixed}: entries cannot be written there"
        )
    unrotated = frozenset(layer for layer in layers if rotaries[layer] == UNROTATED)
    forms = entry_forms(model)
    before = model.config.get_text_config()._attn_implementation
    handles = [attention.register_forward_pre_hook(_note_angles, with_kwargs=True) for attention in attentions.values()]

    def forward(tokens: Tensor, distant: Distant) -> Tensor:
        distant = replace(distant, unrotated=unrotated, forms=forms, angles={})
        logits: Tensor = model(input_ids=tokens, use_cache=False, distant=distant).logits
        return logits

    try:
        model.set_attn_implementation(ATTENTION)
        yield forward
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)


def _note_angles(module: nn.Module, _inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """The angles the layer rotates with come to the module, but not to its attention function."""
    distant: Distant = keywords["distant"]
    layer: Any = module.layer_idx
    if keywords.get("position_embeddings") is None:
        raise ModelError(f"layer {layer}: {type(module).__name__} is not given its rotation angles by keyword")
    distant.angles[layer] = keywords["position_embeddings"]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    distant: Distant,
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
    form = distant.forms.get(layer)
    if form is not None:
        query, key, value = form.stored(query, key, value)

    def rotate(states: Tensor) -> Tensor:
        if layer in distant.unrotated:
            return states
        if form is None:
            return _rotate(module, states, distant.angles[layer])
        cos, sin = (part[..., form.turned] for part in distant.angles[layer])
        own = _rotate(module, states[..., form.shared :], (cos, sin))
        return torch.cat((states[..., : form.shared], own), dim=-1)

    length, window = query.shape[2], distant.window
    if layer in distant.layers:
        far_keys, far_values = distant.far(layer, key, value, rotate)
    else:
        far_keys, far_values, window = key, value, length
    # Query heads that read the same KV head are neighbours: [B, Hkv, group, T, D].
    queries = query.float().view(len(query), key.shape[1], -1, *query.shape[2:])
    blocks = [
        _attend_block(
            queries[:, :, :, first : first + BLOCK_TOKENS],
            (key, value),
            (far_keys, far_values),
            _Read(first=first, last=min(first + BLOCK_TOKENS, length), sink=distant.sink, window=window),
            sliding_window,
            scaling,
        )
        for first in range(0, length, BLOCK_TOKENS)
    ]
    out = torch.cat(blocks, dim=3).flatten(1, 2).to(query.dtype).transpose(1, 2)
    return out if form is None else form.output(out), None


def _attend_block(
    queries: Tensor,
    exact: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    read: _Read,
    sliding_window: int | None,
    scaling: float | None,
) -> Tensor:
    """queries [B, Hkv, group, n, D]; keys and values, exact ones and far ones, [B, Hkv, T, D]. As queries."""
    keys, values = (read.entries(*pair) for pair in zip(exact, far, strict=True))
    mask = read.mask(sliding_window, queries.device).repeat(queries.shape[2], 1)
    with sdpa_kernel(_KERNELS):
        out = F.scaled_dot_product_attention(queries.flatten(2, 3), keys, values, attn_mask=mask, scale=scaling)
    return out.view(queries.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """What queries `first` … `last` − 1 of a sequence read: of exact entries the sink, and what is in the window of
    one of them; of far ones those that are not in the window of all.
    """

    first: int
    last: int
    sink: int
    window: int

    def entries(self, exact: Tensor, far: Tensor) -> Tensor:
        """[B, Hkv, T, D] each, as float32 [B, Hkv, n, D]."""
        parts = (exact[:, :, : self._sunk], exact[:, :, self._near : self.last], far[:, :, self.sink : self._stop])
        return torch.cat([part.float() for part in parts], dim=2)

    def mask(self, sliding_window: int | None, device: torch.device) -> Tensor:
        """[queries, n]: who reads which."""
        parts = ((0, self._sunk), (self._near, self.last), (self.sink, self._stop))
        places = torch.cat([torch.arange(*part, device=device) for part in parts])
        is_far = torch.arange(len(places), device=device) >= len(places) - (self._stop - self.sink)
        distance = torch.arange(self.first, self.last, device=device)[:, None] - places
        is_exact = (places < self.sink) | (distance < self.window)
        visible = (distance >= 0) & (is_exact != is_far)
        return visible if sliding_window is None else visible & (distance < sliding_window)

    @property
    def _near(self) -> int:
        """Where the window of the first query begins."""
        return max(0, self.first - self.window + 1)

    @property
    def _sunk(self) -> int:
        """How many entries of the sink are before it."""
        return min(self.sink, self._near)

    @property
    def _stop(self) -> int:
        """Where the window of the last query begins, and far entries end."""
        return max(self.sink, self.last - self.window)


AttentionInterface.register(ATTENTION, _attend)


def _rotate(module: nn.Module, states: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    function = rotation_function(module)
    if function is None:
        raise ModelError(f"{type(module).__name__} rotates queries and keys by an unknown function")
    try:
        return function(states, *angles)
    except RuntimeError:  # sizes that do not fit: the model cuts heads apart before it calls its function
        turned = angles[0].shape[-1]
        return torch.cat((function(states[..., :turned], *angles), states[..., turned:]), dim=-1)
