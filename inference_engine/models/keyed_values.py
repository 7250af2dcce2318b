"""Values that are made of the projection of their keys, as in Gemma 4's global layers: what both are is stored once.

    projection p [D]     value = p / rms(p)     key = value · weight, a part of it turned

    entry     value's turned numbers | the others, which are the key's, too | the key's turned numbers
    numbers          64 + 64         |               384                    |       64 + 64           of a head of 512

A key's still numbers are the value's times the weight of the norm of keys, so a query takes that weight instead. Then
key and value share them, and an entry of a head of which a quarter is turned has 0.625 of the numbers of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from inference_engine.models.layer_types import has_table_per_type, layer_types


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyedValues:
    """Implements EntryForm, for tensors [..., D] of any layout.

    norm: of keys; its weight is what they differ by from values. turned, still: the numbers of a head that are rotated,
    and the others, ascending. scale: what rotation multiplies those by.
    """

    norm: nn.Module
    turned: Tensor
    still: Tensor
    scale: float
    _restored: Tensor = field(init=False)  # where each number of a value lies in the stored one

    def __post_init__(self) -> None:
        object.__setattr__(self, "_restored", torch.cat((self.turned, self.still)).argsort())

    @property
    def shared(self) -> int:
        """How many numbers of a stored key are its value's."""
        return len(self.still)

    def stored(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(query), self.key(key, value), self.value(value)

    def own(self, query: Tensor, chooser: object) -> None:
        return None

    def query(self, query: Tensor) -> Tensor:
        weight: Tensor = self.norm.weight  # type: ignore[assignment]
        if self.scale != 1.0:
            weight = weight * self.scale
        return torch.cat((query[..., self.still] * weight[self.still], query[..., self.turned]), dim=-1)

    def key(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat((value[..., self.still], key[..., self.turned]), dim=-1)

    def value(self, value: Tensor) -> Tensor:
        return torch.cat((value[..., self.turned], value[..., self.still]), dim=-1)

    def output(self, out: Tensor) -> Tensor:
        return out[..., self._restored]


def keyed_layers(
    config: PretrainedConfig, attentions: Mapping[int, nn.Module], rotary: nn.Module
) -> dict[int, KeyedValues]:
    """By layer of the model, those whose values are made of keys, and those that read the entries of such a layer.

    config: of the text model; attentions: its layers with attention. rotary: its rotary module, or what replaces it.
    """
    kinds, sharing = layer_types(config), getattr(config, "kv_sharing_modes", None) or ()
    found: dict[int, KeyedValues] = {}
    for number, attention in attentions.items():
        source = attention
        if number < len(sharing) and sharing[number] == "reuse":
            stores = (at for at in range(number) if sharing[at] == "store" and kinds[at] == kinds[number])
            source = attentions[max(stores, default=number)]
        form = keyed_values(source, rotary, kinds[number] if has_table_per_type(config) else None)
        if form is not None:
            found[number] = form
    return found


def keyed_values(attention: nn.Module, rotary: nn.Module, kind: str | None) -> KeyedValues | None:
    """Of an attention layer; None where values have a projection of their own, or where all of a key is rotated.

    kind: how `rotary` knows the layer's table; None if there is one for all.
    That this is what the layer computes is seen when its model is tried out (`backends/twin.py`).
    """
    norm, value_norm = (getattr(attention, f"{name}_norm", None) for name in "kv")
    if getattr(attention, "v_proj", norm) is not None or norm is None or value_norm is None:
        return None
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or getattr(value_norm, "weight", None) is not None:
        return None
    table = next(rotary.buffers(), weight)  # a model without weights has a table
    one = torch.ones((1, 1), dtype=torch.long, device=table.device)
    like = torch.zeros((), device=table.device)
    cos, sin = rotary(like, one) if kind is None else rotary(like, one, kind)
    if cos.shape[-1] != len(weight):
        return None  # heads are cut apart before they are rotated
    is_turned = sin[0, 0] != 0
    if bool(is_turned.all()) or not bool(is_turned.any()):
        return None
    turned, still = is_turned.nonzero()[:, 0], (~is_turned).nonzero()[:, 0]
    return KeyedValues(norm=norm, turned=turned, still=still, scale=float(cos[0, 0, still[0]]))
