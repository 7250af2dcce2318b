"""A checkpoint whose matrices are quantised (`quantised_layout.py`) as a model on torch that keeps them so."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from inference_engine.errors import ModelError
from inference_engine.kernels.quantised import GROUP, QuantisedMatrix, pack_codes
from inference_engine.models.checkpoint import SafetensorsCheckpoint, StoredTensor, text_name
from inference_engine.models.families.list_writer import EMBEDDING, HEAD
from inference_engine.models.folder import UNFIT, refused_as
from inference_engine.models.places import generator_of, no_place, unplaced
from inference_engine.models.quantised_layout import QuantisedLayout
from inference_engine.models.quantised_linear import QuantisedLinear

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}
_FLOATS = ("F32", "F16", "BF16")
_PACKED = 8  # codes of 4 bits in a word of 32
# The output whose code is the i-th of a word, in AWQ's layout.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8_SCALES = ("weight_scale_inv", "weight_scale")
# Of activations, and of K and V: neither is quantised.
_WITHOUT_EFFECT = (".input_scale", ".output_scale", ".k_scale", ".v_scale")


def load_quantised(
    folder: Path, layout: QuantisedLayout, config: PretrainedConfig, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """The model, with a QuantisedLinear for each quantised matrix. Raises ModelError for tensors that do not fit."""
    files = SafetensorsCheckpoint(folder)
    config, kind = generator_of(config)
    with refused_as(f"{folder}: {UNFIT}"):
        shapes, quantised = parts_of(files, layout, config)
        # A matrix that is quantised has no numbers of its own until then, and takes no memory.
        numbers = {
            name: torch.zeros((), dtype=dtype).expand(shape)
            if name.removesuffix(".weight") in quantised
            else _floats(files, text_name(name), shape).to(dtype)
            for name, shape in shapes.items()
        }
        model: PreTrainedModel = kind.from_pretrained(
            None, config=config, state_dict=numbers, dtype=dtype, attn_implementation=attention
        )
        for name, stem in quantised.items():
            module = model.get_submodule(name)
            assert isinstance(module, nn.Linear)
            matrix = read_matrix(files, layout, stem, module.out_features, module.in_features)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, QuantisedLinear(matrix, module.bias, dtype))
    return model


def _is_quantised(files: SafetensorsCheckpoint, layout: QuantisedLayout, stem: str) -> bool:
    if layout.method == "fp8":
        return f"{stem}.weight" in files and files.stored(f"{stem}.weight").encoding == "F8_E4M3"
    return f"{stem}.qweight" in files


def _check_names(files: SafetensorsCheckpoint, layout: QuantisedLayout, parameters: set[str], stems: set[str]) -> None:
    """Raise ModelError unless every tensor has a place, and each matrix one set of numbers."""
    one_of = _FP8_SCALES if layout.method == "fp8" else ("qweight", "weight")
    for stem in sorted(stems):
        if len(found := [f"{stem}.{suffix}" for suffix in one_of if f"{stem}.{suffix}" in files]) > 1:
            raise ModelError(f"{files.path}: {' and '.join(found)} are both there, of one matrix; get the files again")
    suffixes = ("weight", *_FP8_SCALES) if layout.method == "fp8" else ("qweight", "qzeros", "scales", "g_idx")
    known = {text_name(name) for name in parameters} | {f"{stem}.{suffix}" for stem in stems for suffix in suffixes}
    known.add(HEAD)  # of tied embeddings, with the same numbers
    if found := [name for name in unplaced(files, known) if not name.endswith(_WITHOUT_EFFECT)]:
        raise ModelError(f"{no_place(files, found)}; only linear layers are read in {layout}")


def read_matrix(
    files: SafetensorsCheckpoint, layout: QuantisedLayout, stem: str, outputs: int, inputs: int
) -> QuantisedMatrix:
    """The matrix [outputs, inputs] whose tensors' names begin so. Raises ModelError for tensors that do not fit."""
    if layout.method == "fp8":
        return _read_fp8(files, layout, stem, outputs, inputs)
    if outputs % _PACKED or inputs % _PACKED:
        raise ModelError(f"{files.path}: {stem}: shape [{outputs}, {inputs}] must be multiples of {_PACKED}")
    group = inputs if layout.group < 0 else layout.group
    groups = -(-inputs // group)
    words, zeros, scales = (_tensor(files, *one) for one in _packed(layout, stem, outputs, inputs))
    codes, zeros = _codes(words), _codes(zeros)
    if layout.method == "gptq":
        codes = codes.permute(0, 2, 1).reshape(inputs, outputs)
        _check_order(files, layout, stem, inputs, group)
    else:
        order = torch.tensor(_AWQ_ORDER).argsort()
        codes, zeros = codes[:, :, order].reshape(inputs, outputs), zeros[:, :, order]
    scales = scales.T.contiguous()
    middles = (zeros.reshape(groups, outputs) + layout.zero_offset).T.to(torch.uint8).contiguous()
    if layout.group < 0:  # as many groups as are read, with the same scale
        group, groups = GROUP, -(-inputs // GROUP)
        scales, middles = (part.expand(-1, groups).contiguous() for part in (scales, middles))
    return QuantisedMatrix(codes=pack_codes(codes.T, group), scales=scales, zeros=middles, inputs=inputs, group=group)


def _packed(
    layout: QuantisedLayout, stem: str, outputs: int, inputs: int
) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """Names, types and shapes of a matrix's codes, zeros and scales, of 4 bits."""
    groups = 1 if layout.group < 0 else -(-inputs // layout.group)
    words = (inputs // _PACKED, outputs) if layout.method == "gptq" else (inputs, outputs // _PACKED)
    yield f"{stem}.qweight", ("I32",), words
    yield f"{stem}.qzeros", ("I32",), (groups, outputs // _PACKED)
    yield f"{stem}.scales", _FLOATS, (groups, outputs)


def _read_fp8(
    files: SafetensorsCheckpoint, layout: QuantisedLayout, stem: str, outputs: int, inputs: int
) -> QuantisedMatrix:
    codes = _tensor(files, f"{stem}.weight", ("F8_E4M3",), (outputs, inputs))
    # Kernels do not tell it from a number. 0x7f and 0xff are the only codes of it.
    if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ModelError(f"{files.path}: {stem}.weight has numbers that are NaN; fetch the checkpoint again")
    found = _tensor(files, *_scale(files, layout, stem, outputs, inputs))
    if layout.block is not None:
        rows, columns = layout.block
        scales = found.repeat_interleave(rows, dim=0)[:outputs].contiguous()
        return QuantisedMatrix(codes=codes, scales=scales, zeros=None, inputs=inputs, group=columns)
    found = found.float()
    scales = found.reshape(-1, 1).expand(outputs, 1).contiguous()
    return QuantisedMatrix(codes=codes, scales=scales, zeros=None, inputs=inputs, group=inputs)


def _scale(
    files: SafetensorsCheckpoint, layout: QuantisedLayout, stem: str, outputs: int, inputs: int
) -> tuple[str, tuple[str, ...], tuple[int, ...]]:
    """The name, the types and the shape of the scales of a matrix in fp8. Raises ModelError if there are others."""
    name = next((f"{stem}.{suffix}" for suffix in _FP8_SCALES if f"{stem}.{suffix}" in files), f"{stem}.weight_scale")
    if layout.block is not None:
        rows, columns = layout.block
        return name, _FLOATS, (-(-outputs // rows), -(-inputs // columns))
    shape = _found(files, name, _FLOATS, None).shape
    if int(np.prod(shape)) not in (1, outputs):
        raise ModelError(
            f"{files.path}: {name} has the shape {shape}; a scale, or one for each of {outputs} outputs, is read"
        )
    return name, _FLOATS, shape


def _codes(words: Tensor) -> Tensor:
    """The eight codes of each word, the lowest bits first: [..., 8]."""
    return (words[..., None] >> torch.arange(0, 4 * _PACKED, 4, dtype=torch.int32)) & 15


def check_quantised(folder: Path, layout: QuantisedLayout, config: PretrainedConfig) -> None:
    """Raise ModelError for tensors that `load_quantised` would not take, by headers and orders of inputs alone."""
    files = SafetensorsCheckpoint(folder)
    with refused_as(f"{folder}: {UNFIT}"):
        shapes, quantised = parts_of(files, layout, config)
        for name, shape in shapes.items():
            if name.removesuffix(".weight") not in quantised:
                _found(files, _named(files, text_name(name)), _FLOATS, shape)
        for name, stem in quantised.items():
            outputs, inputs = shapes[f"{name}.weight"]
            if layout.method == "fp8":
                _found(files, f"{stem}.weight", ("F8_E4M3",), (outputs, inputs))
                _found(files, *_scale(files, layout, stem, outputs, inputs))
                continue
            for one in _packed(layout, stem, outputs, inputs):
                _found(files, *one)
            if layout.method == "gptq":
                _check_order(files, layout, stem, inputs, inputs if layout.group < 0 else layout.group)


def parts_of(
    files: SafetensorsCheckpoint, layout: QuantisedLayout, config: PretrainedConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of all parameters, and of the quantised matrices how names of their tensors begin, by module.

    Raises ModelError for tensors that have no place.
    """
    own, kind = generator_of(config)
    with torch.device("meta"):
        empty = kind(copy.deepcopy(own))
    shapes = {name: tuple(part.shape) for name, part in empty.named_parameters()}
    linears = [name for name, module in empty.named_modules() if type(module) is nn.Linear]
    stems = {name: text_name(f"{name}.weight").removesuffix(".weight") for name in linears}
    quantised = {name: stem for name, stem in stems.items() if _is_quantised(files, layout, stem)}
    _check_names(files, layout, set(shapes), set(quantised.values()))
    return shapes, quantised


def _check_order(files: SafetensorsCheckpoint, layout: QuantisedLayout, stem: str, inputs: int, group: int) -> None:
    """Raise ModelError for inputs that are grouped in another order than their own, or may be."""
    name = f"{stem}.g_idx"
    if name in files or layout.is_ordered:
        found = _tensor(files, name, ("I32",), (inputs,))
        if not torch.equal(found, torch.arange(inputs, dtype=torch.int32) // group):
            raise ModelError(
                f"{files.path}: {name}: inputs are not in groups of {group} (group_size) one after another, but "
                "in an order of their own (desc_act), which is not read; use a checkpoint without it, or the model's "
                "unquantised weights"
            )


def _floats(files: SafetensorsCheckpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    return _tensor(files, _named(files, name), _FLOATS, shape)


def _named(files: SafetensorsCheckpoint, name: str) -> str:
    return EMBEDDING if name == HEAD and name not in files else name  # tied


def _tensor(
    files: SafetensorsCheckpoint, name: str, encodings: tuple[str, ...], shape: tuple[int, ...] | None
) -> Tensor:
    """A copy. Raises ModelError unless it is there, of one of these types, and of this shape if one is given."""
    stored = _found(files, name, encodings, shape)
    return torch.from_numpy(stored.data.copy()).view(_TYPES[stored.encoding]).reshape(stored.shape)


def _found(
    files: SafetensorsCheckpoint, name: str, encodings: tuple[str, ...], shape: tuple[int, ...] | None
) -> StoredTensor:
    """As `_tensor`, without reading it."""
    if name not in files:
        raise ModelError(f"{files.path}: no tensor {name}; the weights do not fit the configuration")
    stored = files.stored(name)
    if stored.encoding not in encodings or (shape is not None and stored.shape != shape):
        wanted = "" if shape is None else f" of the shape {shape}"
        raise ModelError(
            f"{stored.path}: {name} is {stored.encoding} of the shape {stored.shape}, the configuration asks for "
            f"{' or '.join(encodings)}{wanted}; the weights do not fit it"
        )
    if stored.data.nbytes != int(np.prod(stored.shape)) * _TYPES[stored.encoding].itemsize:
        raise ModelError(f"{stored.path}: {name}: {stored.data.nbytes} bytes cannot hold {stored.shape}; copy it again")
    return stored
