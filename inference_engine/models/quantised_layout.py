"""How the matrices of a checkpoint are quantised, as the `quantization_config` of its config.json says.

    quant_method         numbers                                          tensors of a matrix
    fp8                  8-bit floats, a scale for each block of 128·128  weight, weight_scale_inv
    fbgemm_fp8           8-bit floats, a scale for each output            weight, weight_scale
    compressed-tensors   8-bit floats, scales by either or for all        weight, weight_scale
    gptq                 4 bits in groups of inputs                       qweight, qzeros, scales, g_idx
    awq                  4 bits in groups of inputs                       qweight, qzeros, scales

Which matrices are quantised the tensors say. How activations are to be quantised, if the configuration says it, is not
followed: they are multiplied as they are. MLX's layout is another (`grouped.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference_engine.errors import ModelError

KEY = "quantization_config"
_GROUPS = (32, 64, 128)  # inputs of a group of 4-bit codes
_WIDTHS = (32, 64, 128)  # inputs of a block of 8-bit floats
_WHOLE = -1  # a group of all inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantisedLayout:
    """method: fp8, gptq or awq. block: outputs and inputs with one scale, of fp8; None: of an output, or of a matrix.
    group: inputs of a group of 4-bit codes, -1: all. zero_offset: what is added to stored zeros. is_ordered: inputs may
    be in an order of their own, by GPTQ's desc_act; g_idx says whether they are."""

    method: str
    block: tuple[int, int] | None = None
    group: int = _WHOLE
    zero_offset: int = 0
    is_ordered: bool = False

    def __str__(self) -> str:
        if self.method != "fp8":
            return f"{self.method} (int4)"
        return "fp8" if self.block is None else f"fp8 in blocks of {self.block[0]}·{self.block[1]}"


def layout_in(config: Mapping[str, Any]) -> QuantisedLayout | None:
    """The layout that a configuration names; None if it names none. Raises ModelError for one that is not read."""
    found = config.get(KEY)
    if found is None:
        return None
    if not isinstance(found, dict) or config.get("quantization") is not None:
        raise _unread("the layout is not known")
    method = found.get("quant_method")
    readers = {
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm,
        "compressed-tensors": _compressed,
        "gptq": _gptq,
        "awq": _awq,
    }
    if method not in readers:
        raise _unread(f"quant_method is {method!r}")
    return readers[method](found)


def _fp8(found: Mapping[str, Any]) -> QuantisedLayout:
    if found.get("fmt", "e4m3") != "e4m3":
        raise _unread(f"fp8 of the kind {found['fmt']!r}; e4m3 is read")
    size = found.get("weight_block_size")
    return QuantisedLayout(method="fp8", block=None if size is None else _block(size))


def _fbgemm(_found: Mapping[str, Any]) -> QuantisedLayout:
    return QuantisedLayout(method="fp8")


def _compressed(found: Mapping[str, Any]) -> QuantisedLayout:
    if found.get("transform_config"):
        raise _unread("compressed-tensors with a transform_config, which rotates what a matrix is multiplied with")
    groups, sparsity = found.get("config_groups"), found.get("sparsity_config") or {"format": "dense"}
    parts = list(groups.values()) if isinstance(groups, dict) else []
    weights = [one["weights"] for one in parts if isinstance(one, dict) and isinstance(one.get("weights"), dict)]
    is_dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    if found.get("format") != "float-quantized" or not is_dense or len(parts) != 1 or len(weights) != 1:
        raise _unread(f"compressed-tensors of the format {found.get('format')!r}; one group of float-quantized is read")
    (own,) = weights
    strategy = own.get("strategy")
    if (own.get("num_bits"), own.get("type"), own.get("symmetric", True)) != (8, "float", True):
        raise _unread(f"compressed-tensors with {own.get('num_bits')} bits of the type {own.get('type')!r}")
    if strategy not in ("tensor", "channel", "block"):
        raise _unread(f"compressed-tensors with a scale for each {strategy}; tensor, channel and block are read")
    return QuantisedLayout(method="fp8", block=_block(own.get("block_structure")) if strategy == "block" else None)


def _block(size: Any) -> tuple[int, int]:
    is_pair = isinstance(size, (list, tuple)) and len(size) == 2 and all(type(one) is int for one in size)
    if not is_pair or size[0] < 1 or size[1] not in _WIDTHS:
        raise _unread(f"fp8 in blocks of {size!r}; blocks of {', '.join(map(str, _WIDTHS))} inputs are read")
    return size[0], size[1]


def _gptq(found: Mapping[str, Any]) -> QuantisedLayout:
    if found.get("dynamic"):
        raise _unread("gptq with settings of its own for some matrices (dynamic)")
    kind = found.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise _unread(f"gptq of the format {kind!r}; gptq and gptq_v2 are read")
    offset = 1 if kind == "gptq" else 0
    return QuantisedLayout(
        method="gptq", group=_group("gptq", found), zero_offset=offset, is_ordered=bool(found.get("desc_act"))
    )


def _awq(found: Mapping[str, Any]) -> QuantisedLayout:
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unread(f"awq of the version {version!r}; gemm is read")
    return QuantisedLayout(method="awq", group=_group("awq", found))


def _group(method: str, found: Mapping[str, Any]) -> int:
    bits, group = found.get("bits", found.get("w_bit")), found.get("group_size", found.get("q_group_size"))
    if bits != 4 or group not in (*_GROUPS, _WHOLE):
        raise _unread(
            f"{method} with {bits!r} bits in groups of {group!r}; 4 bits in groups of {', '.join(map(str, _GROUPS))} "
            "are read"
        )
    return int(group)


def _unread(what: str) -> ModelError:
    return ModelError(
        f"config.json: {KEY}: {what}: such quantised checkpoints are not supported; use one in fp8 (by channel or in "
        "blocks), GPTQ or AWQ of 4 bits, or the model's unquantised weights"
    )
