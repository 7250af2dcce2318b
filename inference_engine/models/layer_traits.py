"""How each layer of a model treats its keys, found by test: one token at two positions, through a small twin.

    K(p + s) = K(p)                 the layer does not rotate: its keys are the same at every position
    K(p + s) = rotate(K(p), s)      the layer rotates as `Seam.rotate` does: its keys can be moved
    anything else                   keys cannot be moved, and strategies that move keys are refused

A layer that gives attention the very keys that an earlier one gave reads the entries of that layer.

A layer without attention is UNROTATED: it has no keys.

In this test each token attends only to itself, and layers with a recurrent state give zeros. Attention then returns its
own value, at any position, so equal tokens enter every layer with equal states, and a difference between their keys
comes from the position. Some families change keys after rotation (a norm with weights), or rotate in some layers only;
their configurations do not say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from inference_engine.errors import ModelError
from inference_engine.kv.geometry import IMMOVABLE, UNROTATED, LayerTraits
from inference_engine.kv.views import Mixer
from inference_engine.models.seam import Seam, form_of

TRIAL = "kakeya_trial"

_TOKENS = 6
# Relative to the largest number in a layer's keys: float32, rotated once more.
_TOLERANCE = 1e-4


class AttentionInputs:
    """The inputs of attention by layer: queries and keys [H, N, D], and the window. reads: as LayerTraits has it."""

    def __init__(self) -> None:
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}
        self.reads: dict[int, int | None] = {}
        self._given: dict[int, tuple[int, Tensor]] = {}  # by identity, which layer gave it first

    def note(self, layer: int, query: Tensor, key: Tensor, window: int | None, given: Tensor) -> None:
        """query, key: [1, H, N, D], as entries hold them. given: the very key that attention was called with."""
        first, _ = self._given.setdefault(id(given), (layer, given))  # which is kept, so that its id stays its own
        self.queries[layer], self.keys[layer], self.windows[layer] = query[0], key[0], window
        self.reads[layer] = None if first == layer else first


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_positional: Any,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query, key, value [1, H, N, D]; returns each token's own value, ([1, N, Hq, D], None)."""
    layer: Any = module.layer_idx
    seen: AttentionInputs = module.__dict__["_kakeya_seen"]
    form, given = form_of(module), key
    if form is not None:
        query, key, value = form.stored(query, key, value)
    many = None if form is None else form.own(query, others.get("indices"))
    if many is not None:
        query = many.absorbed(slice(None)).transpose(0, 1)[None]
    seen.note(layer, query, key, sliding_window, given)
    own = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous()
    if many is not None:
        own = many.output(own[0])[None]
    return own if form is None else form.output(own), None


AttentionInterface.register(TRIAL, _attend)


@contextmanager
def watched(model: nn.Module) -> Iterator[AttentionInputs]:
    """Within, a forward of a model with the attention TRIAL records the inputs of each layer's attention."""
    seen = AttentionInputs()
    for module in model.modules():
        module.__dict__["_kakeya_seen"] = seen
    try:
        yield seen
    finally:
        for module in model.modules():
            del module.__dict__["_kakeya_seen"]


def find_traits(seam: Seam) -> tuple[LayerTraits, ...]:
    """Test every layer of a small model in float32, loaded with `attn_implementation=TRIAL`.

    Raises ModelError if any layer does not call the registered attention function.
    """
    model = seam.model
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(1, vocabulary, (_TOKENS,))
    half = seam.trained_positions // 2
    before, shifts = torch.randint(0, half, (_TOKENS,)), torch.randint(1, half, (_TOKENS,))
    positions = torch.cat([before, before + shifts])
    with torch.inference_mode(), watched(model) as seen, seam.attending(_NoStates(), positions.numpy()):
        model(input_ids=torch.cat([tokens, tokens])[None], position_ids=positions[None], use_cache=False)
    attending = [number for number, read in enumerate(seam.reads) if read is not None]
    if missing := sorted(set(attending) - set(seen.keys)):
        raise ModelError(
            f"{type(model).__name__} does not attend through the function that transformers lets us register, in "
            f"{len(missing)} of its {len(attending)} layers; it cannot be served"
        )
    return tuple(
        LayerTraits(rotary=UNROTATED, is_windowed=False)
        if read is None
        else LayerTraits(
            rotary=_rotary(seam, seam.layers[read].rotary, shifts, seen.queries[number], seen.keys[number]),
            is_windowed=seen.windows[number] is not None,
            reads=seen.reads[number],
        )
        for number, read in enumerate(seam.reads)
    )


class _NoStates:
    """The plan of the test: TRIAL attends without one."""

    def attend(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("the model has another attention")

    def mix(self, _layer: int, _mixer: Mixer, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden)


def _rotary(seam: Seam, declared: str, shifts: Tensor, queries: Tensor, keys: Tensor) -> str:
    """queries, keys [H, 2 · tokens, D]: at their first positions, then `shifts` positions later."""
    pairs = [states.float().chunk(2, dim=1) for states in (queries, keys)]
    if all(_near(before, after) for before, after in pairs):
        return UNROTATED
    if (
        seam.can_rotate
        and declared != IMMOVABLE
        and all(_near(seam.rotate(before, shifts, declared), after) for before, after in pairs)
    ):
        return declared
    return IMMOVABLE


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
