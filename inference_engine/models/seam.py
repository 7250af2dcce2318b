"""The seam into transformers: a registered attention function, and a replacement of the model's rotary module (RoPE).

The model code is transformers' own and is not patched. Every attention layer of a model loaded with
`attn_implementation=ATTENTION` calls `_attend`, which finds the step's plan at its module (some families do not pass
keywords down to attention). The model's rotary module is replaced by one that gives each token the angles of its own
absolute position, from a table that never changes; the model applies them with its own function. (In some rotary kinds
transformers' own module depends on the longest sequence of a batch, so other sessions would change the logits.)

How a layer rotates its keys, and whether it has a sliding window, is not read from its configuration but tested on a
small twin (`models/layer_traits.py`).
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inference_engine.errors import ModelError
from inference_engine.kernels.expanded_attention import OwnQueries
from inference_engine.kv.geometry import (
    IMMOVABLE,
    ONE_ROTARY,
    SHORT_ROTARY,
    UNROTATED,
    Beside,
    KeepsNothing,
    LayerGeometry,
    LayerSpec,
    LayerTraits,
    ReadsLayer,
    StoredLayers,
)
from inference_engine.models.indexer import index_dim, take_indexers
from inference_engine.models.keyed_values import KeyedValues, keyed_layers
from inference_engine.models.latent_attention import (
    NO_MASK,
    Chooser,
    EntryForm,
    NoMask,
    absorb_projections,
    entry_form,
    is_latent,
)
from inference_engine.models.layer_types import (
    DYNAMIC,
    LONGROPE,
    check_config,
    has_attention,
    has_state,
    has_table_per_type,
    layer_types,
)
from inference_engine.models.mixers import WITHOUT_EFFECT, SessionMixer, is_mixer, take_mixers, unhonoured

ATTENTION = "kakeya"

ROTARY_MODULES = ("rotary_emb", "pos_emb")
_MOST_TURNS = 16  # cached pairs of cosines and sines, each for at most a chunk of entries


class AttentionPlan(Protocol):
    """What the seam needs of a step's plan (`kv/plan.py`)."""

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
        *,
        scaling: float,
        softcap: float | None,
        head_sinks: Tensor | None,
        own: OwnQueries | None,
    ) -> Tensor:
        """layer: a stored one. keys, values: None where an earlier layer of the model has written them. own: as
        `kv/plan.py` has it."""


class _Now(threading.local):
    """The step that runs on this thread: several engines may run one model.

    Every layer that keeps something and the model's rotary module hold a reference to it.
    """

    plan: AttentionPlan | None = None
    is_beyond_trained: bool = False  # is any token past the trained positions?


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """An attention layer of the model: its number, and the stored layer that it reads, and writes if it `keeps` it.

    form: what its entries hold of what it gives attention.
    """

    now: _Now
    number: int
    stored: int
    keeps: bool
    geometry: LayerGeometry
    form: EntryForm | None


def form_of(attention: nn.Module) -> EntryForm | None:
    """What the entries of an attention layer hold; None: what it gives, as of one that no seam has taken over."""
    place: _Place | None = attention.__dict__.get("_kakeya_place")
    return None if place is None else place.form


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | NoMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Chooser | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query, key, value [1, H, N, D], query and key rotated; returns ([1, N, Hq, D], None)."""
    if (attention_mask is not None and attention_mask is not NO_MASK) or dropout:
        raise ModelError(f"{type(module).__name__} passes an attention mask or dropout; neither can be honoured")
    for name, given in others.items():  # without a call: it is looked at in every layer of every step
        if given is not None and given is not False and name not in WITHOUT_EFFECT:
            raise unhonoured(module, name, given, "attention")
    place = cast("_Place", module._kakeya_place)
    layer, geometry, plan = place.number, place.geometry, place.now.plan
    assert plan is not None, "a forward runs within Seam.attending"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if indices is not None and not geometry.is_indexed:
        raise unhonoured(module, "indices", indices, "attention")
    if place.form is not None:
        query, key, value = place.form.stored(query, key, value)
    heads, kv_heads = query.shape[1], key.shape[1]
    if value.shape[-1] != geometry.value_dim:
        raise ModelError(
            f"{type(module).__name__} has keys of {key.shape[-1]} and values of {value.shape[-1]} numbers a head; only "
            "layers where both are equal can be served yet"
        )
    if (heads, kv_heads, key.shape[-1]) != (geometry.query_heads, geometry.kv_heads, geometry.head_dim):
        raise ModelError(
            f"layer {layer} has {heads} query heads and {kv_heads} KV heads of {key.shape[-1]} numbers; the model's "
            f"configuration says {geometry.query_heads}, {geometry.kv_heads} and {geometry.head_dim}"
        )
    if sliding_window != geometry.native_window:
        raise ModelError(
            f"layer {layer} asks for a window of {sliding_window}, its geometry says {geometry.native_window}"
        )
    out = plan.attend(
        place.stored,
        query,
        key if place.keeps else None,
        value if place.keeps else None,
        scaling=scaling,
        softcap=softcap,
        head_sinks=s_aux,
        own=None if place.form is None else place.form.own(query, indices),
    )
    return out if place.form is None else place.form.output(out), None


AttentionInterface.register(ATTENTION, _attend)


class TokenRotary(nn.Module):
    """Replaces the model's rotary module, and gives each token the angles of its own position.

    Past the trained positions the angle is computed in float64, so that endless sessions keep exact distances: in
    float32 the fastest angle is off by 0.06 at a million positions.

    transformers' module of LongRoPE takes the table of the longest sequence of a batch, which would change the keys of
    its neighbours, and of a session that grows. Here are two modules, one for each table; ~position asks for the short.
    """

    def __init__(self, original: nn.Module, trained_positions: int, now: _Now) -> None:
        super().__init__()
        self.original = original
        self.short: nn.Module | None = None
        if getattr(original, "rope_type", None) == LONGROPE:
            self.original, self.short = _tables_of(original)
        self.trained_positions = trained_positions
        self.layer_types = getattr(original, "layer_types", None)  # some models ask
        self._now = now
        self._is_complex = False

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x gives dtype and device; position_ids [1, N]. Returns cos and sin, [1, N, d].

        Where the module that it replaces returns complex numbers, it does, too: `parts` has both as cos and sin.
        """
        parts = self._of_table if self.short is None else self.parts
        cos, sin = parts(x, position_ids, layer_type or ONE_ROTARY)
        return torch.complex(cos, sin) if self._is_complex else (cos, sin)

    def parts(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, [1, N, d]."""
        name = layer_type or ONE_ROTARY
        cos, sin = self._of_table(x, position_ids, name)
        if self.short is None or name != ONE_ROTARY:
            return cos, sin
        is_short = (position_ids < 0)[..., None]
        short_cos, short_sin = self._of_table(x, ~position_ids, SHORT_ROTARY)
        return torch.where(is_short, short_cos, cos), torch.where(is_short, short_sin, sin)

    def _of_table(self, x: Tensor, position_ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
        cos, sin = self._own(x, position_ids, name)
        if not self._now.is_beyond_trained:
            return cos, sin
        position_ids = position_ids.view(-1, *position_ids.shape[-2:])[0]  # where text and pictures have their own
        frequencies, factor = self.frequencies(name)
        order = self._frequency_order(x, name, cos.shape[-1], len(frequencies))
        angle = position_ids[..., None].double() * frequencies.double()[order]
        far = (position_ids >= self.trained_positions)[..., None]
        return (
            torch.where(far, (angle.cos() * factor).to(cos.dtype), cos),
            torch.where(far, (angle.sin() * factor).to(sin.dtype), sin),
        )

    def frequencies(self, name: str) -> tuple[Tensor, float]:
        """The angle per position of each pair of numbers, float32 [d / 2], and the factor of cos and sin."""
        prefix = "" if name in (ONE_ROTARY, SHORT_ROTARY) else f"{name}_"
        module = self.short if name == SHORT_ROTARY else self.original
        return getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")

    def scale(self, name: str, device: torch.device) -> float:
        """The factor of cos and sin: the cosine of position 0."""
        first = torch.zeros((1, 1), dtype=torch.long, device=device)
        return float(self._own(torch.zeros((), device=device), first, name)[0][0, 0, 0])

    def _own(self, x: Tensor, position_ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
        arguments = (x, position_ids) if name in (ONE_ROTARY, SHORT_ROTARY) else (x, position_ids, name)
        module: Any = self.short if name == SHORT_ROTARY else self.original
        found: Tensor | tuple[Tensor, Tensor] = module(*arguments)
        self._is_complex = isinstance(found, Tensor)
        return (found.real, found.imag) if isinstance(found, Tensor) else found

    def _frequency_order(self, x: Tensor, name: str, width: int, count: int) -> Tensor:
        """The index of the frequency at each place of the width, read from the module's own sine of position 1."""
        if width == count:
            return torch.arange(count, device=x.device)
        assert width == 2 * count, (width, count)
        one = torch.ones((1, 1), dtype=torch.long, device=x.device)
        sine = self._own(x.float(), one, name)[1][0, 0]
        order = torch.arange(count, device=x.device)
        return order.repeat(2) if torch.equal(sine[:count], sine[count:]) else order.repeat_interleave(2)


class Seam:
    """One model taken over: its layers' geometry and its rotation. Raises ModelError for an unsupported model.

    layers, reads, states: as Geometry has them.
    """

    def __init__(self, model: PreTrainedModel, traits: Sequence[LayerTraits] | None = None) -> None:
        """traits: of each layer, from `find_traits`; None: take them from the configuration."""
        config: PretrainedConfig = model.config.get_text_config()
        self.model = model
        self.dtype: torch.dtype = model.dtype
        self.trained_positions: int = config.max_position_embeddings
        check_config(config)
        kinds = layer_types(config)
        parameters = getattr(config, "rope_parameters", None) or {}
        rotation = parameters.get("rope_type")
        # As Geometry has them.
        self.short_positions: int | None = None
        if rotation == LONGROPE:
            self.short_positions = parameters["original_max_position_embeddings"]
        self.is_endless = rotation != DYNAMIC
        self._now = _Now()
        attentions = _attention_modules(model, kinds)
        absorb_projections(model)
        take_indexers(model)
        self._blocks = _blocks(model, kinds, attentions)
        mixers = take_mixers(model, config, [number for number, kind in enumerate(kinds) if has_state(kind)], self._now)
        self.has_softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        # Logits that join the softmax of a head, one for each (gpt-oss).
        self.has_head_sinks = any(getattr(each, "sinks", None) is not None for each in attentions.values())
        # Without a rotary module, layers with a state know the order of tokens, and attention does not.
        self._rotary = _replace_rotary(model, self.trained_positions, self._now, is_needed=not mixers)
        keyed = {} if self._rotary is None else keyed_layers(config, attentions, self._rotary)
        specs = _read_layers(config, attentions, mixers, traits, keyed)
        stored = StoredLayers.of(specs)
        self.layers, self.reads, self.states = stored.layers, stored.reads, stored.states
        for number, attention in attentions.items():
            spec, read = specs[number], self.reads[number]
            assert read is not None
            attention.__dict__["_kakeya_place"] = _Place(
                now=self._now,
                number=number,
                stored=read,
                keeps=not isinstance(spec.attention if isinstance(spec, Beside) else spec, ReadsLayer),
                geometry=self.layers[read],
                form=keyed.get(number) or entry_form(attention),
            )
        self._apply = rotation_function(next(iter(attentions.values())))
        if self._rotary is None and traits is not None and any(each.rotary != UNROTATED for each in self.layers):
            raise ModelError(
                f"{type(model).__name__} changes its keys by their positions, and no rotary module is found in it"
            )
        self._rotary_scales: dict[str, float] = {}
        self._turns: dict[Hashable, tuple[Tensor, Tensor]] = {}
        # By table: how many numbers of a key come before those that it turns, and which of its angles these have, if
        # not all.
        self._still = {layer.rotary: layer.shared_dim for layer in self.layers if layer.shared_dim}
        self._still |= {SHORT_ROTARY: self._still[ONE_ROTARY]} if ONE_ROTARY in self._still else {}
        self._turned = {
            self.layers[read].rotary: form.turned
            for number, form in keyed.items()
            if (read := self.reads[number]) is not None
        }

    @contextmanager
    def attending(self, plan: AttentionPlan, positions: NDArray[np.int64]) -> Iterator[None]:
        """Within, a forward of the model attends by `plan`. positions: [N], absolute."""
        self._now.is_beyond_trained = bool(positions.max() >= self.trained_positions)
        self._now.plan = plan
        try:
            yield
        finally:
            self._now.plan = None

    def tapped(self, layers: Sequence[int]) -> AbstractContextManager[list[Tensor]]:
        """Within, a forward appends the hidden states [1, N, hidden] after each of `layers` (ascending) to the list."""
        return tapped([self._blocks[layer] for layer in layers])

    @property
    def is_beyond_trained(self) -> bool:
        """Does the step that is attending have a token past the trained positions?"""
        return self._now.is_beyond_trained

    @property
    def can_rotate(self) -> bool:
        """Does the model have a function to rotate keys with?"""
        return self._apply is not None and self._rotary is not None

    def rotate(self, keys: Tensor, shifts: Tensor, name: str) -> Tensor:
        """Rotated keys [H, n, D], moved by `shifts` [n] positions (negative: back).

        shifts: on the host, so that it need not wait for the device. name: the layer's `rotary`.
        """
        if name == UNROTATED:
            return keys
        assert name != IMMOVABLE and self._apply is not None, "a strategy that moves keys has to be refused"
        cos, sin = self._turn(keys, shifts.abs(), name)
        if bool((shifts <= 0).all()):
            sin = -sin
        elif bool((shifts < 0).any()):
            sin = torch.where((shifts < 0)[None, :, None].to(sin.device), -sin, sin)
        turned, first = cos.shape[-1], self.still_numbers(name)
        if first:
            return torch.cat((keys[..., :first], self._apply(keys[None, ..., first:], cos, sin)[0]), dim=-1)
        if self._turns_part_of_heads and turned < keys.shape[-1]:
            part = self._apply(keys[None, ..., :turned], cos, sin)[0]
            return torch.cat((part, keys[..., turned:]), dim=-1)
        return self._apply(keys[None], cos, sin)[0]

    def turns(self, like: Tensor, positions: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """The cosines and sines [N, d] that tokens at `positions` [N] are rotated by, in the dtype of `like`."""
        cos, sin = self._table.parts(like, positions[None], _layer_type(name))
        return cos[0], sin[0]

    def turns_to(self, positions: range, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """The cosines and sines, float32 [n, d], by which `rotate` moves keys from position 0 to these."""
        like = torch.empty(0, device=device)
        by = torch.arange(positions.start, positions.stop, device=device)
        cos, sin = self._moving(like, by, name, is_beyond_trained=positions.stop > self.trained_positions)
        return cos[0], sin[0]

    def rotary_frequencies(self, name: str) -> tuple[NDArray[np.float32], float]:
        """A rotation table: the angle per position of each pair of numbers [d / 2], and the factor of cos and sin."""
        frequencies, factor = self._table.frequencies(name)
        return frequencies.float().cpu().numpy(), float(factor)

    def still_numbers(self, name: str) -> int:
        """How many numbers of a stored key lie before those that a rotation table turns."""
        return self._still.get(name, 0)

    @cached_property
    def _turns_part_of_heads(self) -> bool:
        """If only a part of each head is rotated: does the model split heads before it calls its function?

        Other families pass whole heads to a function that rotates its part.
        """
        name = next(layer.rotary for layer in self.layers if layer.rotary not in (UNROTATED, IMMOVABLE))
        head_dim = max(layer.head_dim for layer in self.layers if layer.rotary == name)
        head = torch.zeros((1, 1, 1, head_dim), dtype=self.dtype, device=self._rotary_device(name))
        cos, sin = self._turn(head[0], torch.ones(1, dtype=torch.long), name)
        assert self._apply is not None
        try:
            return self._apply(head, cos, sin).shape != head.shape
        except RuntimeError:  # sizes that do not fit
            return True

    def _turn(self, like: Tensor, shifts: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these shifts, none of them negative. Cached: all layers rotate by the same shifts."""
        wanted = (name, like.dtype, like.device, shifts.numpy().tobytes())
        found = self._turns.pop(wanted, None)
        if found is None:
            by = shifts.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else shifts
            found = self._moving(like, by, name, is_beyond_trained=bool(shifts.max() >= self.trained_positions))
            if len(self._turns) >= _MOST_TURNS:
                self._turns.pop(next(iter(self._turns)), None)
        self._turns[wanted] = found  # least recently used first
        return found

    def _moving(self, like: Tensor, by: Tensor, name: str, *, is_beyond_trained: bool) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [1, n, d], of shifts [n], none of them negative."""
        self._now.is_beyond_trained = is_beyond_trained
        cos, sin = self._table.parts(like, by[None], _layer_type(name))
        if (turned := self._turned.get(name)) is not None:
            cos, sin = cos[..., turned], sin[..., turned]
        if (scale := self._rotary_scale(name)) != 1.0:
            cos, sin = cos / scale, sin / scale
        return cos, sin

    def _rotary_device(self, name: str) -> torch.device:
        """Where the table is: the weights may be elsewhere, or nowhere."""
        return self._table.frequencies(name)[0].device

    @property
    def _table(self) -> TokenRotary:
        assert self._rotary is not None, "a model without a table has layers that are UNROTATED"
        return self._rotary

    def _rotary_scale(self, name: str) -> float:
        """The factor of cos and sin in some rotary kinds (yarn): keys that were rotated once already have it."""
        if name not in self._rotary_scales:
            self._rotary_scales[name] = self._table.scale(name, self._rotary_device(name))
        return self._rotary_scales[name]


def _layer_type(rotary: str) -> str | None:
    """The argument with which the model's rotary module returns this table."""
    return None if rotary == ONE_ROTARY else rotary


def _attention_modules(model: PreTrainedModel, kinds: Sequence[str]) -> dict[int, nn.Module]:
    """By layer of the model, those that have one."""
    found = {
        module.layer_idx: module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and any(hasattr(module, name) for name in ("q_proj", "q_b_proj", "qkv_proj", "query_key_value"))
        and not is_mixer(module)
    }
    wanted = [number for number, kind in enumerate(kinds) if has_attention(kind)]
    name = type(model).__name__
    if others := [number for number in sorted(found) if number not in wanted]:
        raise ModelError(
            f"{name} has attention in layer {others[0]}, which is of type {kinds[others[0]]} by its configuration; it "
            "cannot be served"
        )
    if len(found) < len(wanted):
        raise ModelError(
            f"{name} has {len(wanted)} layers with attention, and attention of a kind that can be taken over in "
            f"{len(found)} of them; only models all of whose attention is of such a kind can be served"
        )
    return {number: found[number] for number in wanted}


def _blocks(model: PreTrainedModel, kinds: Sequence[str], attentions: Mapping[int, nn.Module]) -> list[nn.Module]:
    """The layers of the model: the list of modules in which those with attention are."""
    owners = parents_of(model, list(attentions.values()))
    for candidate in model.modules():
        if isinstance(candidate, nn.ModuleList) and len(candidate) == len(kinds):
            blocks = list(candidate)
            if all(blocks[number] is owner for number, owner in zip(attentions, owners, strict=True)):
                return blocks
    return owners  # as many as there are layers, or no list of them is known


@contextmanager
def tapped(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Within, a forward on this thread appends the output of each of these layers, [B, N, hidden], to the list."""
    states: list[Tensor] = []
    own_thread = threading.get_ident()

    def keep(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        if threading.get_ident() == own_thread:
            states.append(output if isinstance(output, Tensor) else output[0])

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def parents_of(model: PreTrainedModel, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The parent module of each of `modules`; for attention modules, the layer."""
    found = {child: parent for parent in model.modules() for child in parent.children()}
    return [found[module] for module in modules]


def _read_layers(
    config: PretrainedConfig,
    attentions: Mapping[int, nn.Module],
    mixers: Mapping[int, SessionMixer],
    traits: Sequence[LayerTraits] | None,
    keyed: Mapping[int, KeyedValues],
) -> list[LayerSpec]:
    """What each layer of the model keeps, or reads. traits: None if none are known yet; then each keeps its own."""
    types = layer_types(config)
    if traits is not None and len(traits) != len(types):
        raise ModelError(f"{len(traits)} layers were tried out, the model has {len(types)}")
    specs: list[LayerSpec] = []
    for number, kind in enumerate(types):
        mixer = mixers.get(number)
        if (attention := attentions.get(number)) is None:
            specs.append(KeepsNothing() if mixer is None else mixer.keeps)
            continue
        shared = keyed[number].shared if number in keyed else 0
        spec = _read_attention(config, number, kind, attention, None if traits is None else traits[number], shared)
        specs.append(spec if mixer is None else Beside(spec, mixer.keeps))
    return specs


def _read_attention(
    config: PretrainedConfig, number: int, kind: str, attention: nn.Module, trait: LayerTraits | None, shared: int
) -> LayerGeometry | ReadsLayer:
    own = config.per_layer_config[number]
    window = _native_window(own, attention, kind)
    rotary = kind if has_table_per_type(config) else ONE_ROTARY
    if trait is not None:
        if trait.reads is not None:
            return ReadsLayer(trait.reads)
        window = (window or own.sliding_window) if trait.is_windowed else None
        rotary = trait.rotary
    return _kept(own, attention, window, rotary, shared)


def _kept(
    config: PretrainedConfig, attention: nn.Module, window: int | None, rotary: str, shared: int
) -> LayerGeometry:
    """config: of this layer. shared: how many numbers of a key are its value's, too."""
    heads: int = config.num_attention_heads
    if is_latent(attention):
        rank: int = config.kv_lora_rank
        return LayerGeometry(
            query_heads=heads,
            kv_heads=1,
            head_dim=rank + config.qk_rope_head_dim + (index := index_dim(attention)),
            value_dim=rank,
            shared_dim=rank,
            native_window=window,
            rotary=IMMOVABLE if index else rotary,  # both parts would have to be moved, each in its way
            is_indexed=getattr(config, "index_topk", None) is not None,
        )
    return LayerGeometry(
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        shared_dim=shared,
        native_window=window,
        rotary=rotary,
    )


def _native_window(config: PretrainedConfig, attention: nn.Module, layer_type: str) -> int | None:
    if hasattr(attention, "sliding_window"):
        return cast("int | None", attention.sliding_window)
    sliding = layer_type == "sliding_attention" or getattr(config, "layer_types", None) is None
    return getattr(config, "sliding_window", None) if sliding else None


def rotation_function(attention: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """What rotates keys [1, H, n, D] by cosines and sines, with the model's function; None if it has none.

    Then its keys cannot be moved. The function rotates queries and keys together, or either alone.
    """
    module = sys.modules[type(attention).__module__]
    by_complex: Any = getattr(module, "apply_rotary_emb", None)
    if by_complex is not None and [*inspect.signature(by_complex).parameters][2:] == ["freqs_cis"]:
        return lambda keys, cos, sin: by_complex(keys, keys, torch.complex(cos, sin))[1]
    function: Any = getattr(module, "apply_rotary_pos_emb", None)
    if function is None:
        return None
    if [*inspect.signature(function).parameters][1] == "cos":
        return cast("Callable[[Tensor, Tensor, Tensor], Tensor]", function)

    def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        found: Tensor = function(keys[:, :0], keys, cos, sin)[1]
        return found

    return rotate


def _tables_of(rotary: nn.Module) -> tuple[nn.Module, nn.Module]:
    """LongRoPE's module as two that stay as they are: for long histories, and for short ones."""
    config: Any = rotary.config
    short = config.rope_parameters["original_max_position_embeddings"]
    tables = []
    for length in (short + 1, short):
        table: Any = copy.copy(rotary)
        table._buffers = dict(rotary._buffers)
        table.rope_type = "default"  # it is not to look for the longest sequence
        frequencies = ROPE_INIT_FUNCTIONS[LONGROPE](config, table.inv_freq.device, seq_len=length)[0]
        table.inv_freq = table.original_inv_freq = frequencies
        tables.append(table)
    return tables[0], tables[1]


def rotary_modules(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a model has them: what owns each, and its name there."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in ROTARY_MODULES and child is not None
    ]


def _replace_rotary(
    model: PreTrainedModel, trained_positions: int, now: _Now, *, is_needed: bool
) -> TokenRotary | None:
    """None: the model has none."""
    places = rotary_modules(model)
    if not places and not is_needed:
        return None
    if not places:
        raise ModelError(
            f"{type(model).__name__} has no rotary module to rotate queries and keys with. "
            "Models with learned positions or with biases by distance cannot be served"
        )
    if len(places) > 1:
        raise ModelError(f"{type(model).__name__} has {len(places)} rotary modules; exactly one can be taken over")
    parent, name = places[0]
    rotary = TokenRotary(getattr(parent, name), trained_positions, now)
    setattr(parent, name, rotary)
    return rotary
