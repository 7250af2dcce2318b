"""What an architecture of GGUF files is: the configuration that its keys say, and transformers' names of its tensors.

An architecture's file has both. What llama.cpp's converter changes in a tensor is undone in one of two ways. Where rows
or columns lie in another order or one was added, blocks stay as they are for executors that compute with them: see
`MovedBlocks`, and `heads` and `plus_one` of `TensorLayout`. Everything else is `Made` of numbers.

Sources: convert_hf_to_gguf.py and conversion/, gguf-py/gguf/tensor_mapping.py and src/models/ of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.models.gguf_architectures.header_keys import Keys

Numbers = NDArray[np.float32]
Config = Mapping[str, Any]

OUTSIDE: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
ATTENTION: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }
)
GATED: Mapping[str, str] = MappingProxyType(
    {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
)
IN_LAYER: Mapping[str, str] = MappingProxyType({**ATTENTION, **GATED, "ffn_norm": "post_attention_layernorm"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A tensor made of the numbers of `parts`, tensors of the file in the same layer.

    make: is given them in that order, and raises ValueError for shapes that do not fit each other.
    """

    parts: tuple[str, ...]
    make: Callable[..., Numbers]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MovedBlocks:
    """Matrices below each other. rows, columns: of each its place in the file; None: as there."""

    parts: tuple[str, ...]
    rows: NDArray[np.int64] | None = None
    columns: NDArray[np.int64] | None = None

    def make(self, *parts: Numbers) -> Numbers:
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        found = found if self.rows is None else found[_within(self.rows, found.shape[0])]
        return found if self.columns is None else found[:, _within(self.columns, found.shape[1])]


def _within(order: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    if len(order) != size:
        raise ValueError(f"an order of {len(order)} for {size} rows or columns")
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """The tensors of one configuration.

    names: of a layer, without `.weight` and `.bias`, or with them where transformers' name has other ends. outside: of
    no layer. made: by transformers' names in a layer; of several ways, the one whose parts are there. experts: what
    names the experts of a layer, whose matrices become one tensor each. heads: the modules whose rows lie as rotation
    in pairs takes them, and how many heads each has. plus_one: are norms stored with 1 added? configured: tensors that
    the configuration has.
    """

    names: Mapping[str, str] = field(default_factory=lambda: IN_LAYER)
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    made: Mapping[str, tuple[Made | MovedBlocks, ...]] = field(default_factory=dict)
    experts: str = ""
    heads: Mapping[str, int] = field(default_factory=dict)
    plus_one: bool = False
    configured: tuple[str, ...] = ()


def plain(_config: Config) -> TensorLayout:
    return TensorLayout()


def in_pairs(config: Config) -> Mapping[str, int]:
    """`TensorLayout.heads` of files of the Llama kind."""
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """config: as transformers' config.json has it, of the file's keys. layout: of that configuration."""

    config: Callable[[Keys], dict[str, Any]]
    layout: Callable[[Config], TensorLayout] = plain


# -- what converters do, undone ---------------------------------------------------------------------------------------


def same(numbers: Numbers) -> Numbers:
    return numbers


def log_of_decay(numbers: Numbers) -> Numbers:
    """A_log, of −exp(A_log). Raises ValueError for others than negative numbers."""
    if not (numbers < 0).all():
        raise ValueError("a decay that is not negative")
    found: Numbers = np.log(-numbers)
    return found


def of_one_input(taps: Numbers) -> Numbers:
    """Of a convolution of each channel for itself: [channels, 1, taps]."""
    return taps.reshape(len(taps), 1, -1)


def joined(*parts: Numbers) -> Numbers:
    """Rows below each other: of matrices [..., outputs, inputs], of vectors the numbers behind each other."""
    return np.concatenate(parts, axis=-2 if parts[0].ndim > 1 else 0)


def changed(change: Callable[[Numbers], Numbers], part: str) -> tuple[Made, ...]:
    return (Made(parts=(part,), make=change),)
