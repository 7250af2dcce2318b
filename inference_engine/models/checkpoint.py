"""Weights as their files hold them: mapped, never copied, by the names that transformers gives the tensors.

    safetensors    one file or shards, F32, F16, BF16; in MLX's layout, also 2 to 8 bits (grouped.py)
    GGUF           the same, and blocks of quantised numbers; see gguf_header.py

What llama.cpp's converter changes is undone when a tensor is read (`gguf_architectures`). For executors that compute
with blocks these stay as they are:

- In files of the Llama kind the outputs of a head's queries and keys lie as its rotation takes them, in pairs;
  transformers rotates halves. `row_order` names the stored row of each output.
- Gemma's norms are stored with 1 added; `as_float32` subtracts it.
- The experts of a layer are one tensor; here each has the name that it has in safetensors.

Anything else is made of the numbers of one tensor or several.

Tied embeddings have no `lm_head.weight`, or the same numbers again; `configuration.py` looks.
"""

from __future__ import annotations

import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import ModelError
from inference_engine.models.encodings import BY_NAME, Encoding
from inference_engine.models.folder import weight_files
from inference_engine.models.gguf_architectures import ARCHITECTURES, Made, MovedBlocks
from inference_engine.models.gguf_config import gguf_config, later_tensors
from inference_engine.models.gguf_header import GgufHeader, GgufTensor
from inference_engine.models.safetensors_header import check_safetensors

logger = logging.getLogger(__name__)

# A mixture of 94 layers and 128 experts has 36,000.
MAX_NAMES = 2**19
MLX_EXPERTS = ".mlp.switch_mlp."  # all experts of a layer, in MLX's layout

# Of a number that the native backend holds as a byte, with a scale of 4 bytes for 16.
_PAIR_BYTES = 1.25

_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredTensor:
    """One tensor as its file holds it.

    shape: (outputs, inputs), or (n,). encoding: F32, F16, BF16, or llama.cpp's name of a block: Q4_0, Q4_1, Q8_0, Q4_K,
    Q6_K and others. data: its bytes, a view of the mapped file; rows of a matrix lie one after another. row_order: the
    stored row of each output, column_order the stored column of each input, None if it is the same. added: what the
    file holds more than the number itself.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    encoding: str
    data: NDArray[np.uint8]
    row_order: NDArray[np.int64] | None = None
    added: float = 0.0
    column_order: NDArray[np.int64] | None = None

    def as_float32(self) -> NDArray[np.float32]:
        """A copy of the numbers, in transformers' order. Raises ModelError for blocks that have no dimension for rows.

        For norms and biases, and for a reference: a matrix takes four bytes a number.
        """
        found = self._stored().reshape(self.shape)
        if self.row_order is not None:
            found = found[self.row_order]
        if self.column_order is not None:
            found = found[:, self.column_order]
        return found - np.float32(self.added) if self.added else found

    def rows(self, start: int, end: int) -> NDArray[np.float32]:
        """The numbers of some rows of a matrix of floating-point numbers, in the order of the file."""
        size = self.data.nbytes // self.shape[0]
        part = replace(
            self, data=self.data[start * size : end * size], shape=(len(range(self.shape[0])[start:end]), -1)
        )
        return part._stored().reshape(part.shape)

    def _stored(self) -> NDArray[np.float32]:
        match self.encoding:
            case "F32":
                return self.data.view("<f4").astype(np.float32)
            case "F16":
                return self.data.view("<f2").astype(np.float32)
            case "BF16":
                return (self.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        if len(self.shape) == 1:
            raise ModelError(
                f"{self.path}: {self.name} is stored in blocks ({self.encoding}); norms and biases are read as F32, "
                "F16 or BF16 only: get a file that has them so"
            )
        return unpacked(self.encoding, self.data.reshape(math.prod(self.shape[:-1]), -1))


def unpacked(encoding: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers of rows [outputs, bytes] of llama.cpp's blocks, [outputs, inputs], by the gguf package."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold infinite scales
        numbers: NDArray[np.float32] = dequantize(blocks, GGMLQuantizationType[encoding])
    return numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The tensors of a checkpoint that are stored alike."""

    tensors: int
    numbers: int
    stored_bytes: int


class Checkpoint(ABC):
    """The tensors of a model. Its views stay valid as long as one of them is held."""

    path: Path

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Every tensor, under the name that transformers gives it."""

    @abstractmethod
    def _find(self, name: str) -> StoredTensor | None: ...

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Raises ModelError if there is none of this name, or, with `shape`, if it has another."""
        found = self._find(name)
        if found is None:
            raise ModelError(f"{self.path}: no tensor {name}; the weights do not fit the configuration")
        if shape is not None and found.shape != shape:
            raise ModelError(
                f"{self.path}: {name} has the shape {found.shape}, the configuration asks for {shape}; the weights do "
                "not fit it"
            )
        return found

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises as `tensor` does, and reads no numbers."""
        self.tensor(name, shape)

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A copy of a tensor's numbers, whatever they are stored as. Raises as `tensor` does."""
        return self.tensor(name, shape).as_float32()

    def sources(self) -> Iterator[StoredTensor]:
        """What all tensors are read from. Raises as `tensor` does."""
        return (self.tensor(name) for name in self.names())

    def shares(self) -> dict[str, Share]:
        """Its tensors by encoding, the most frequent first. Raises as `tensor` does."""
        found: dict[str, list[StoredTensor]] = {}
        for tensor in self.sources():
            found.setdefault(tensor.encoding, []).append(tensor)
        return {
            encoding: Share(
                tensors=len(alike),
                numbers=sum(math.prod(tensor.shape) for tensor in alike),
                stored_bytes=sum(tensor.data.nbytes for tensor in alike),
            )
            for encoding, alike in sorted(found.items(), key=lambda item: -len(item[1]))
        }

    def unpacking(self, executor: str, dtype: str = "float32", number_bytes: int = 4) -> str:
        """Which blocks `executor` (native, torch, mlx) makes something else of, and what memory that takes.

        native makes bytes and scales of those that no tile has the bits of, the others numbers of `dtype`. "" if all
        are read as they are stored, or what they become takes no more.
        """
        is_native = executor == "native"
        made = {
            encoding: share
            for encoding, share in self.shares().items()
            if (kind := BY_NAME.get(encoding)) is not None and (kind.levels if is_native else not kind.is_float)
        }
        stored = sum(share.stored_bytes for share in made.values())
        numbers = sum(share.numbers for share in made.values()) * (_PAIR_BYTES if is_native else number_bytes)
        if numbers <= stored:
            return ""
        return (
            f"{sum(share.tensors for share in made.values())} tensors in {', '.join(made)} are "
            f"{'held as bytes' if is_native else f'unpacked to {dtype}'}: "
            f"{numbers / 1e6:,.1f} MB of memory for {stored / 1e6:,.1f} MB of the file"
        )

    def warn_of_unpacking(self, executor: str, dtype: str = "float32", number_bytes: int = 4) -> None:
        """Log what `unpacking` says, if anything."""
        if unpacking := self.unpacking(executor, dtype, number_bytes):
            logger.warning("%s: %s", self.path.name, unpacking)


def _mapped(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file that is not empty. They are read from the disk when they are looked at."""
    return np.asarray(np.memmap(path, np.uint8, "r"))


# -- safetensors ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _FileSpan:
    """A tensor's bytes in a file: `rows` says which part of the first dimension, None: all of it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


# Where checkpoints have the text model beside others, and how a text model alone has it.
BESIDE_OTHERS = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_ROOTS = (
    ("model.", "model."),
    *BESIDE_OTHERS,
    ("backbone.", "model."),
    # As a model without its head is saved: transformers reads it for one with a head, too.
    *((f"{part}.", f"model.{part}.") for part in ("embed_tokens", "layers", "norm")),
)
_MIXTRAL = re.compile(r"\.block_sparse_moe\.(?:(?P<expert>experts\.\d+)\.(?P<part>w[123])\.)?")
# LFM2's mixtures.
_FEED_FORWARD = re.compile(
    r"\.feed_forward\.(?P<what>gate\.|expert_bias|experts\.)(?:(?P<expert>\d+)\.(?P<part>w[123])\.)?"
)
_MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Of OLMo Hybrid's state layers, and of Granite's experts, as files and as transformers' model have them.
_RENAMED = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".mlp.gate.weight",
    ".block_sparse_moe.router.weight": ".mlp.gate.weight",
}
_EXPERTS = re.compile(r"(?P<layer>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors of a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._maps: dict[str, NDArray[np.uint8]] = {}
        self._places: dict[str, _FileSpan] = {}
        found: dict[str, _FileSpan] = {}
        for file in weight_files(folder):
            found |= _places(folder, file)
            self._maps[file] = _mapped(folder / file)
        self._files = {name: place.file for name, place in found.items()}
        self._total_bytes = sum(place.end - place.start for place in found.values())
        for name, place in found.items():
            self._add(text_name(name), place)

    @property
    def files(self) -> Mapping[str, str]:
        """The file of each tensor, by its name there."""
        return self._files

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def names(self) -> Sequence[str]:
        return tuple(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def stored(self, name: str) -> StoredTensor:
        """A tensor of any type, as the file says that it is: only of F32, F16 and BF16 are the bytes counted."""
        place = self._places[name]
        data = self._maps[place.file][place.start : place.end]
        return StoredTensor(name=name, path=self.path / place.file, shape=place.shape, encoding=place.dtype, data=data)

    def _find(self, name: str) -> StoredTensor | None:
        if name not in self._places:
            return None
        found = self.stored(name)
        if found.encoding not in _FLOATS:
            raise ModelError(
                f"{found.path}: {name} is stored as {found.encoding}; {', '.join(_FLOATS)} can be read: use the "
                "model's unquantised weights"
            )
        return found

    def _add(self, name: str, place: _FileSpan) -> None:
        """All experts of a layer in one tensor become tensors of each, as most checkpoints have them."""
        match = _EXPERTS.fullmatch(name)
        if match is None or len(place.shape) != 3:
            if name in self._places:
                raise ModelError(f"{self.path}: two tensors are {name}; copy the folder again")
            self._places[name] = place
            return
        experts, outputs, inputs = place.shape
        halves = ("gate_proj", "up_proj") if match["kind"] == "gate_up_proj" else ("down_proj",)
        rows = outputs // len(halves)
        if outputs % len(halves) or experts * len(halves) + len(self._places) > MAX_NAMES:
            raise ModelError(f"{self.path / place.file}: {name} has the shape {place.shape}, which experts cannot have")
        size = (place.end - place.start) // max(1, experts * len(halves))
        for index in range(experts * len(halves)):
            start = place.start + index * size
            part = replace(place, shape=(rows, inputs), start=start, end=start + size)
            expert, half = divmod(index, len(halves))
            self._places[f"{match['layer']}.{expert}.{halves[half]}.weight"] = part


def text_name(name: str) -> str:
    """The name that a tensor of the text model has if there is only that: without what leads to it among others.

    Experts of Mixtral, Granite and LFM2 and norms of OLMo Hybrid are named as those of other families.
    """
    for theirs, others in _RENAMED.items():
        name = name.replace(theirs, others)
    if (found := _FEED_FORWARD.search(name)) is not None:
        part = f"{found['expert']}.{_MIXTRAL_PARTS[found['part']]}." if found["expert"] else ""
        name = f"{name[: found.start()]}.mlp.{found['what']}{part}{name[found.end() :]}"
    if (found := _MIXTRAL.search(name)) is not None:
        part = f"{found['expert']}.{_MIXTRAL_PARTS[found['part']]}." if found["expert"] else ""
        name = f"{name[: found.start()]}.mlp.{part}{name[found.end() :]}"
    for root, own in sorted(_ROOTS, key=lambda root: -len(root[0])):
        if name.startswith(root):
            return own + name.removeprefix(root)
    return name


def _places(folder: Path, file: str) -> dict[str, _FileSpan]:
    path = folder / file
    tensors = check_safetensors(path)
    with path.open("rb") as opened:
        first = 8 + int.from_bytes(opened.read(8), "little")
    return {
        name: _FileSpan(
            file=file,
            dtype=tensor["dtype"],
            shape=tuple(tensor["shape"]),
            start=first + tensor["data_offsets"][0],
            end=first + tensor["data_offsets"][1],
        )
        for name, tensor in tensors.items()
    }


# -- GGUF -------------------------------------------------------------------------------------------------------------

# What an expert's matrices of one layer are called, where each is a tensor of its own.
_OF_EXPERTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ffn_gate_exps": ("gate_proj",),
        "ffn_up_exps": ("up_proj",),
        "ffn_down_exps": ("down_proj",),
        "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    }
)
# Those whose `attention_bias` is of the outputs, too.
_BIASED_OUTPUTS = ("llama", "qwen3", "gpt_oss", "granitemoehybrid", "falcon_h1")
# Read with the configuration (gguf_config.py).
_IGNORED = ("rope_freqs.weight",)
_LAYER = re.compile(r"blk\.(\d{1,4})\.([\w.]+)", re.ASCII)
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """part: which of so many of equal size along the first dimensions."""

    tensor: GgufTensor
    part: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Recipe:
    parts: tuple[GgufTensor, ...]
    way: Made | MovedBlocks


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file, or of all files of a split one."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises ModelError for an architecture that is not read, and for tensors that it does not have."""
        self.path = header.path
        config = gguf_config(header)
        self._model_type: str = config["model_type"]
        architecture = header.text("general.architecture") or ""
        self._layout = ARCHITECTURES[architecture].layout(config)
        ignored = {*_IGNORED, *self._layout.configured, *later_tensors(header, architecture)}
        self._maps = {part: _mapped(part) for part in header.parts}
        self._tensors: dict[str, _Stored] = {}
        self._made: dict[str, _Recipe] = {}
        self._part_names = {part for ways in self._layout.made.values() for way in ways for part in way.parts}
        parts: dict[int, dict[str, GgufTensor]] = {}
        for tensor in header.tensors.values():
            if tensor.start + tensor.size_bytes > len(self._maps[tensor.path]):
                raise ModelError(f"{tensor.path}: truncated while it was read; get the file again")
            if tensor.name not in ignored:
                self._add(tensor, parts)
        self._make(parts)
        self._last: StoredTensor | None = None  # for it is asked for again
        self._zeros: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        if config.get("attention_bias") or config.get("qkv_bias") or self._model_type == "qwen2":
            names = "qkvo" if self._model_type in _BIASED_OUTPUTS else "qkv"
            self._complete(f"self_attn.{name}_proj" for name in names)
        if config.get("mlp_bias"):
            self._complete(f"mlp.{name}_proj" for name in ("gate", "up", "down"))

    def names(self) -> Sequence[str]:
        return (*self._tensors, *self._zeros, *self._made)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self._zeros or name in self._made

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """As it was asked for last, without a shape: converters leave out dimensions of 1, and add some."""
        found = super().tensor(name)
        own = self._shapes.get(name) if shape is None else shape
        if own is not None and _squeezed(found.shape) == _squeezed(own):
            found = replace(found, shape=own)
            self._shapes[name] = own
        return found if shape is None or found.shape == shape else super().tensor(name, shape)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if (recipe := self._made.get(name)) is None:
            self.tensor(name, shape)
        elif (found := sum(math.prod(part.shape) for part in recipe.parts)) != math.prod(shape):
            raise ModelError(
                f"{self.path}: {name} is made of {found} numbers, the configuration asks for the shape {shape}; the "
                "weights do not fit it"
            )

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if (recipe := self._made.get(name)) is None:
            return super().numbers(name, shape)
        found = self._numbers_of(name, recipe)
        if _squeezed(found.shape) != _squeezed(shape):
            raise ModelError(
                f"{self.path}: {name} has the shape {found.shape}, the configuration asks for {shape}; the weights do "
                "not fit it"
            )
        return np.ascontiguousarray(found.reshape(shape), np.float32)

    def _numbers_of(self, name: str, recipe: _Recipe) -> NDArray[np.float32]:
        parts = [self._stored(part.name, _Stored(tensor=part)).as_float32() for part in recipe.parts]
        try:
            return recipe.way.make(*parts)
        except (ValueError, IndexError) as error:
            shapes = ", ".join(f"{part.name} {part.shape}" for part in recipe.parts)
            raise ModelError(f"{self.path}: {name} cannot be made of {shapes}: {error}; get the file again") from error

    def sources(self) -> Iterator[StoredTensor]:
        yield from (self.tensor(name) for name in (*self._tensors, *self._zeros))
        for name, recipe in self._made.items():
            for part in recipe.parts:
                yield self._stored(name, _Stored(tensor=part))

    def _complete(self, modules: Iterable[str]) -> None:
        """A bias of zeros for each of these matrices without one. llama.cpp adds those that a file has; transformers
        has all of them, or none."""
        ends = tuple(f".{module}.weight" for module in modules)
        for name, stored in self._tensors.items():
            if name.endswith(ends) and (bias := f"{name.removesuffix('weight')}bias") not in self._tensors:
                self._zeros[bias] = stored.tensor.shape[0]

    def _add(self, tensor: GgufTensor, parts: dict[int, dict[str, GgufTensor]]) -> None:
        """parts: of layers, where what other tensors are made of is put."""
        layout, name = self._layout, None
        if (in_layer := _LAYER.fullmatch(tensor.name)) is not None:
            layer, inside = int(in_layer[1]), in_layer[2]
            what, _, end = inside.rpartition(".")
            place = f"model.layers.{layer}."
            if inside in self._part_names:
                if parts.setdefault(layer, {}).setdefault(inside, tensor) is not tensor:
                    raise ModelError(f"{self.path}: two tensors are {inside} of layer {layer}; get the file again")
                return
            if what in _OF_EXPERTS and layout.experts and len(tensor.shape) == 3:
                if 2 * tensor.shape[0] + len(self._tensors) > MAX_NAMES:
                    raise ModelError(f"{self.path}: more than {MAX_NAMES} tensors, which are not read")
                kinds = _OF_EXPERTS[what]
                for number in range(count := tensor.shape[0] * len(kinds)):
                    expert, kind = divmod(number, len(kinds))
                    own = f"{place}{layout.experts}.{expert}.{kinds[kind]}.{end}"
                    if own in self._tensors:
                        raise ModelError(f"{self.path}: two tensors are {own}; get the file again")
                    self._tensors[own] = _Stored(tensor=tensor, part=(number, count))
                return
            if inside in layout.names:
                name = place + layout.names[inside]
            elif what in layout.names and end in ("weight", "bias"):
                name = f"{place}{layout.names[what]}.{end}"
        elif (outside := _OUTSIDE.fullmatch(tensor.name)) is not None and outside[1] in layout.outside:
            name = f"{layout.outside[outside[1]]}.{outside[2]}"
        if name is None or len(tensor.shape) > 2:
            raise ModelError(
                f"{self.path}: the tensor {tensor.name} of the shape {tensor.shape} is not one of a {self._model_type} "
                "model; it cannot be served from GGUF"
            )
        if name in self._tensors:
            raise ModelError(f"{self.path}: two tensors are {name}; get the file again")
        self._tensors[name] = _Stored(tensor=tensor)

    def _make(self, parts: dict[int, dict[str, GgufTensor]]) -> None:
        """What is made of parts, in each layer that has any of them. Raises ModelError if it has not all."""
        for layer, own in parts.items():
            for name, ways in self._layout.made.items():
                there = own.keys() & {part for way in ways for part in way.parts}
                whole = [way for way in ways if own.keys() >= {*way.parts}]
                if unused := there - {part for way in whole for part in way.parts}:
                    known = ", ".join(f"blk.{layer}.{part}" for part in sorted(unused))
                    raise ModelError(
                        f"{self.path}: {known}: not what model.layers.{layer}.{name} is made of, which is "
                        f"{' or '.join(' and '.join(way.parts) for way in ways)}; get the file again"
                    )
                if not there:
                    continue
                recipe = _Recipe(parts=tuple(own[part] for part in whole[0].parts), way=whole[0])
                self._made[f"model.layers.{layer}.{name}"] = recipe

    def _find(self, name: str) -> StoredTensor | None:
        if (rows := self._zeros.get(name)) is not None:
            return StoredTensor(
                name=name, path=self.path, shape=(rows,), encoding="F32", data=np.zeros(4 * rows, np.uint8)
            )
        if (recipe := self._made.get(name)) is not None:
            return self._moved(name, recipe)
        return None if (stored := self._tensors.get(name)) is None else self._stored(name, stored)

    def _stored(self, name: str, stored: _Stored) -> StoredTensor:
        tensor = stored.tensor
        data, shape = self._maps[tensor.path][tensor.start : tensor.start + tensor.size_bytes], tensor.shape
        if stored.part is not None:
            number, count = stored.part
            size = tensor.size_bytes // count
            data, shape = data[number * size :][:size], (shape[0] * shape[1] // count, *shape[2:])
        is_own = name in self._tensors
        return StoredTensor(
            name=name,
            path=tensor.path,
            shape=shape,
            encoding=tensor.encoding.name,
            data=data,
            row_order=self._row_order(name, max(shape) if 1 in shape else shape[0]) if is_own else None,
            added=1.0 if is_own and self._layout.plus_one and name.endswith("norm.weight") else 0.0,
        )

    def _moved(self, name: str, recipe: _Recipe) -> StoredTensor:
        """In blocks, else the numbers. Where columns leave their blocks, these stay, and the order is said."""
        tensors = [self._stored(part.name, _Stored(tensor=part)) for part in recipe.parts]
        first, way = tensors[0], recipe.way
        if isinstance(way, MovedBlocks) and len({(one.encoding, one.shape[1:]) for one in tensors}) == 1:
            rows, columns = sum(one.shape[0] for one in tensors), math.prod(first.shape[1:])
            data = first.data if len(tensors) == 1 else np.concatenate([one.data for one in tensors])
            kind, order = BY_NAME[first.encoding], None
            if way.columns is not None and len(way.columns) == columns:
                order = _block_order(way.columns, kind)
            if order is not None:
                data = np.ascontiguousarray(data.reshape(rows, -1, kind.size_bytes)[:, order]).reshape(-1)
            if all(own is None or len(own) == size for own, size in ((way.rows, rows), (way.columns, columns))):
                left = way.columns if order is None else None
                return replace(
                    first, name=name, shape=(rows, columns), data=data, row_order=way.rows, column_order=left
                )
        if self._last is None or self._last.name != name:
            found = self._numbers_of(name, recipe)
            data = np.ascontiguousarray(found, np.float32).reshape(-1).view(np.uint8)
            self._last = replace(first, name=name, shape=found.shape, encoding="F32", data=data)
        return self._last

    def _row_order(self, name: str, rows: int) -> NDArray[np.int64] | None:
        """llama.cpp's converter makes rows of [heads, 2, D/2] to [heads, D/2, 2]."""
        heads = self._layout.heads.get(name.split(".")[-2]) if name.count(".") else None
        if heads is None:
            return None
        if rows % (2 * heads):
            raise ModelError(f"{self.path}: {name} has {rows} outputs, which are not {heads} heads of an even size")
        return np.arange(rows, dtype=np.int64).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _block_order(columns: NDArray[np.int64], encoding: Encoding) -> NDArray[np.int64] | None:
    """Which block each one of a row is; None where columns leave their blocks."""
    if len(columns) % encoding.numbers:
        return None
    blocks = columns.reshape(-1, encoding.numbers)
    if (blocks[:, :1] % encoding.numbers).any() or (blocks != blocks[:, :1] + np.arange(encoding.numbers)).any():
        return None
    order: NDArray[np.int64] = blocks[:, 0] // encoding.numbers
    return order


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
