"""Checkpoints in MLX's layout: matrices of 2 to 8 bits in groups, as mlx-lm converts and publishes them.

    config.json    "quantization": {"group_size": 64, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}, …}
    X.weight       U32 [outputs, inputs · bits / 32], the lowest bits first
    X.scales       [outputs, inputs / group_size]         a number is scale · level + offset of its group
    X.biases       [outputs, inputs / group_size]         the offsets; X.bias is what is added to a product

A matrix is quantised if it has scales. Experts of a layer are one tensor, `mlp.switch_mlp`. The keys are in mlx-lm's
`utils.py` and `models/switch_layers.py`. What serves these files (`backends/mlx`) multiplies them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import ModelError
from inference_engine.models.checkpoint import MAX_NAMES, Checkpoint, SafetensorsCheckpoint, StoredTensor, text_name
from inference_engine.models.folder import CONFIG, grouping_of

_WORD = 32
_EXPERTS = re.compile(r"(?P<mlp>.*\.mlp)\.switch_mlp\.(?P<kind>gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """A matrix as its file holds it: words [..., outputs, words of a row], scales and offsets [..., outputs, groups].

    With experts, all of a layer come first in the shapes.
    """

    words: NDArray[np.uint32]
    scales: StoredTensor
    offsets: StoredTensor
    group: int
    bits: int

    def as_float32(self) -> NDArray[np.float32]:
        """[..., outputs, inputs]: scale · level + offset, four bytes a number. For what runs on torch."""
        stream = np.unpackbits(np.ascontiguousarray(self.words).view(np.uint8), axis=-1, bitorder="little")
        levels = stream.reshape(*self.scales.shape, self.group, self.bits) @ (1 << np.arange(self.bits, dtype=np.uint8))
        scales, offsets = (part.as_float32()[..., None] for part in (self.scales, self.offsets))
        numbers = levels.astype(np.float32) * scales + offsets
        found: NDArray[np.float32] = numbers.reshape(*self.scales.shape[:-1], -1)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorPart:
    """Where a matrix is: in the tensors of this stem, and which part of the first dimension; None: all of it."""

    stem: str
    expert: int | None = None


class GroupedCheckpoint(Checkpoint):
    """The tensors under transformers' names, with the shapes that they have there. `matrix` gives what is in groups."""

    def __init__(self, files: SafetensorsCheckpoint) -> None:
        """Raises ModelError for tensors that do not fit each other or the configuration."""
        self.path = files.path
        self._files = files
        quantization = grouping_of(files.path) or {}
        self._default = quantization.get("group_size", 0), quantization.get("bits", 0)
        self._own = {
            text_name(f"{module}.weight").removesuffix(".weight"): (value["group_size"], value["bits"])
            for module, value in quantization.items()
            if isinstance(value, dict)
        }
        names = set(self._files.names())
        self._places: dict[str, _TensorPart] = {}
        for name in self._files.names():
            stem, _, last = name.rpartition(".")
            if last in ("scales", "biases") and f"{stem}.weight" in names:
                continue
            if (match := _EXPERTS.fullmatch(name)) is None:
                self._places[name] = _TensorPart(stem=stem)
                continue
            shape = self._files.stored(name).shape
            if len(shape) != 3:
                raise ModelError(f"{self.path}: {name} has the shape {shape}, which experts cannot have")
            experts = shape[0]
            if experts + len(self._places) > MAX_NAMES:
                raise ModelError(f"{self.path}: more than {MAX_NAMES} tensors, which are not read")
            for expert in range(experts):
                self._places[f"{match['mlp']}.experts.{expert}.{match['kind']}.weight"] = _TensorPart(
                    stem=stem, expert=expert
                )

    def names(self) -> Sequence[str]:
        return tuple(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def matrix(self, name: str) -> Grouped | None:
        """A matrix in groups; None for one of floating-point numbers. Raises ModelError."""
        place = self._places[name]
        found = self._grouped(place.stem)
        return found if found is None or place.expert is None else _part(found, place.expert)

    def experts(self, names: Sequence[str]) -> Grouped | None:
        """The matrices of all experts of a layer as they lie in one tensor; None if they do not, or not in groups."""
        places = [self._places[name] for name in names]
        stem = places[0].stem
        if [(place.stem, place.expert) for place in places] != [(stem, expert) for expert in range(len(places))]:
            return None
        found = self._grouped(stem)
        if found is not None and len(found.words) != len(names):
            raise ModelError(f"{self.path}: {stem} has {len(found.words)} experts, the model has {len(names)}")
        return found

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        self.tensor(name, shape)
        grouped = self.matrix(name) if name.endswith(".weight") else None
        return super().numbers(name, shape) if grouped is None else grouped.as_float32()

    def _find(self, name: str) -> StoredTensor | None:
        if (place := self._places.get(name)) is None:
            return None
        grouped = self.matrix(name) if name.endswith(".weight") else None
        if grouped is not None:
            rows, words = grouped.words.shape
            shape = rows, words * _WORD // grouped.bits
            data = np.ascontiguousarray(grouped.words).view(np.uint8).reshape(-1)
            return StoredTensor(name=name, path=self.path, shape=shape, encoding=f"{grouped.bits} bits", data=data)
        if place.expert is None:
            return self._files.tensor(name)
        return part_of(self._files.tensor(f"{place.stem}.weight"), place.expert)

    def _grouped(self, stem: str) -> Grouped | None:
        if f"{stem}.scales" not in self._files:
            return None
        stored = self._files.stored(f"{stem}.weight")
        if not self._default[1]:
            raise ModelError(f"{self.path}: {stem} has scales, and {CONFIG} says nothing of quantization")
        if len(stored.shape) not in (2, 3):
            raise ModelError(f"{self.path}: {stem}.weight has the shape {stored.shape}, which no matrix has")
        scales, offsets = (self._files.tensor(f"{stem}.{name}") for name in ("scales", "biases"))
        group, bits = self._own.get(stem, self._default)
        *lead, words = stored.shape
        inputs = words * _WORD // bits
        wanted = (*lead, inputs // group)
        if stored.encoding != "U32" or words * _WORD % bits or inputs % group:
            raise ModelError(
                f"{self.path}: {stem}.weight is {stored.encoding} of the shape {stored.shape}, which cannot be "
                f"{bits} bits in groups of {group}; copy the folder again"
            )
        if stored.data.nbytes != 4 * int(np.prod(stored.shape)) or scales.shape != wanted or offsets.shape != wanted:
            raise ModelError(
                f"{self.path}: {stem} has scales {scales.shape} and biases {offsets.shape} where {wanted} are wanted; "
                "copy the folder again"
            )
        return Grouped(
            words=stored.data.view("<u4").reshape(stored.shape), scales=scales, offsets=offsets, group=group, bits=bits
        )


def _part(grouped: Grouped, index: int) -> Grouped:
    return Grouped(
        words=grouped.words[index],
        scales=part_of(grouped.scales, index),
        offsets=part_of(grouped.offsets, index),
        group=grouped.group,
        bits=grouped.bits,
    )


def part_of(tensor: StoredTensor, index: int) -> StoredTensor:
    """One of the matrices of a tensor that has several behind one another."""
    count, *shape = tensor.shape
    size = tensor.data.nbytes // count
    data = tensor.data[index * size : (index + 1) * size]
    return StoredTensor(name=tensor.name, path=tensor.path, shape=tuple(shape), encoding=tensor.encoding, data=data)
