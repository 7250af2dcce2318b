"""The model spec of an executor of lists, as values: sizes, layers, RoPE tables, shapes; nothing of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_engine.kernels.states import CHUNK, ROOM, StateLayer
from inference_engine.kv.geometry import UNROTATED, LayerGeometry, OpenChunk, Recurrent, StateTensor
from inference_engine.models.families import ListConfig
from inference_engine.models.operations import StepList


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryTable:
    """A RoPE table: the angle per position of each pair of numbers, float32, and the factor of cos and sin.

    still: how many numbers of a stored key lie before those that are rotated; then angles behind theirs are 0.
    is_adjacent: a pair is of two numbers beside each other, as of complex numbers; else half a rotation apart.
    """

    angles: tuple[float, ...]
    factor: float
    still: int = 0
    is_adjacent: bool = False

    @property
    def frequencies(self) -> NDArray[np.float32]:
        """[turned / 2]"""
        return np.array(self.angles, np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model as its list of operations is made from.

    layers, reads, short_positions, is_endless: as Geometry has them. rotaries: the tables that layers rotate their
    keys with; SHORT_ROTARY is one of them where there are short positions. parameters: shapes by transformers' names,
    in the text model and beside it.
    """

    config: ListConfig
    layers: tuple[LayerGeometry, ...]
    reads: tuple[int | None, ...]
    trained_positions: int
    rotaries: Mapping[str, RotaryTable]
    parameters: Mapping[str, tuple[int, ...]]
    short_positions: int | None = None
    is_endless: bool = True

    def rotate(self, keys: Tensor, shifts: Tensor, name: str) -> Tensor:
        """Implements Rotate: float32 keys [H, n, D] that are rotated already, moved by `shifts` [n] positions.

        The trial compares with the model's own rotation. Angles past the trained positions are computed in float64.
        """
        if name == UNROTATED:
            return keys
        table = self.rotaries[name]
        if table.still:
            first, keys = keys[..., : table.still], keys[..., table.still :]
            return torch.cat((first, self._rotate(keys, shifts, table)), dim=-1)
        return self._rotate(keys, shifts, table)

    def _rotate(self, keys: Tensor, shifts: Tensor, table: RotaryTable) -> Tensor:
        angles = torch.tensor(table.angles[: keys.shape[-1] // 2], dtype=torch.float32)
        distances = shifts.abs()
        turns = distances[:, None].float() * angles
        cos, sin = turns.cos(), turns.sin()
        if bool((far := distances >= self.trained_positions).any()):
            exact = distances[:, None].double() * angles.double()
            cos = torch.where(far[:, None], exact.cos().float(), cos)
            sin = torch.where(far[:, None], exact.sin().float(), sin)
        sin = torch.where((shifts < 0)[:, None], -sin, sin)
        own, rest = keys[..., : 2 * cos.shape[1]], keys[..., 2 * cos.shape[1] :]
        if table.is_adjacent:
            first, second = own[..., ::2], own[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)
            first, second = own.chunk(2, dim=-1)
            turned = own * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def recurrent_of(steps: StepList, layers: int, *, is_numbered: bool = False) -> tuple[Recurrent | None, ...]:
    """By layer of the model, of so many, what it keeps of the history; () if no layer does."""
    chunk = OpenChunk(CHUNK, ROOM, is_numbered=is_numbered)
    found = {one.layer: Recurrent((StateTensor((one.numbers(ROOM),), "float32", 4),), chunk) for one in steps.states}
    return tuple(found.get(number) for number in range(layers)) if found else ()


def state_layers(steps: StepList) -> tuple[StateLayer, ...]:
    """Of each of its states, where in the memory of a session it begins: by layer, one behind the other."""
    found: list[StateLayer] = []
    offset = 0
    for one in steps.states:
        found.append(
            StateLayer(
                channels=one.channels,
                taps=one.taps,
                key_heads=one.key_heads,
                value_heads=one.value_heads,
                key_dim=one.key_dim,
                value_dim=one.value_dim,
                offset=offset,
            )
        )
        offset += one.numbers(ROOM)
    return tuple(found)
