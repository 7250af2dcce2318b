"""The keys of a GGUF file's architecture, and what all configurations have in common.

The default of an absent key is llama.cpp's: src/models/ and src/llama-model.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from inference_engine.errors import ModelError
from inference_engine.models.file_keys import ARCHITECTURE_KEYS, HONOURED
from inference_engine.models.gguf_header import GgufHeader
from inference_engine.models.gguf_vocabulary import named_end_ids, named_id

DEFAULT_THETA = 10_000.0
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of what makes scores of a router's logits
# Llama 3's own; the file has only the factors that they give.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192


class Keys:
    """Values of a file under the name of its architecture."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number. Raises ModelError if it is missing and there is no default."""
        found = self.optional(name)
        found = default if found is None else found
        if found is None or not 1 <= found < 2**31:
            raise self.refusal(f"{self.key(name)} is {found}, expected a positive number below 2³¹; get the file again")
        return found

    def optional(self, name: str) -> int | None:
        """A whole number, or one that is the same in every layer; None if there is none."""
        key = self.key(name)
        value = self.header.values.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value):
            whole, later = (self.header.number(self.key(own)) or 0 for own in ("block_count", "nextn_predict_layers"))
            if len(value) not in (whole, whole - later):
                raise self.refusal(f"{key} is of {len(value)} layers, the model has {whole}; get the file again")
            if np.any(value != value[0]):
                raise self.refusal(
                    f"{key} is {value.min()} in some layers and {value.max()} in others; of this architecture only "
                    "models with layers of one size can be served from GGUF"
                )
            return int(value[0])
        return self.header.number(key)

    def real(self, name: str, default: float | None = None) -> float | None:
        found = self.header.real(self.key(name))
        return default if found is None else found

    def factor(self, name: str, default: float = 1.0) -> float:
        """A number that something is multiplied with; 0 means the default, as to llama.cpp."""
        return self.real(name) or default

    def text(self, name: str) -> str | None:
        return self.header.text(self.key(name))

    def flag(self, name: str, default: bool) -> bool:
        value = self.header.values.get(self.key(name), default)
        if isinstance(value, bool):
            return value
        raise self.refusal(f"{self.key(name)} is {value!r}, expected true or false; get the file again")

    def of_layers(self, name: str) -> list[int] | None:
        """A whole number, or truth, for each layer, those that predict later tokens left out; None if there is none.

        Raises ModelError for an array of another length.
        """
        value = self.header.values.get(self.key(name))
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            return [self.optional(name) or 0] * self.layers
        whole = self.size("block_count")
        if value.dtype.kind not in "iub" or len(value) not in (self.layers, whole):
            raise self.refusal(f"{self.key(name)} is of {len(value)} layers, the model has {self.layers}")
        return [int(one) for one in value[: self.layers]]

    def key(self, name: str) -> str:
        assert ARCHITECTURE_KEYS[name][0] == HONOURED, "what is read is in the table of keys"
        return f"{self.architecture}.{name}"

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def has_in_layer(self, *names: str) -> bool:
        """Has any layer one of these tensors?"""
        ends = tuple(f".{name}" for name in names)
        return any(tensor.startswith("blk.") and tensor.endswith(ends) for tensor in self.header.tensors)

    def has_bias(self, *names: str) -> bool:
        """Has one of these matrices a bias in any layer?"""
        return self.has_in_layer(*(f"{name}.bias" for name in names))

    def refusal(self, what: str) -> ModelError:
        return ModelError(f"{self.header.path}: {what}")

    @cached_property
    def layers(self) -> int:
        """Layers of the model; behind them a file may have some that predict later tokens.

        Raises ModelError if the file cannot have so many.
        """
        if (layers := self._layers_said()) > len(self.header.tensors):
            raise self.refusal(f"{layers} layers, and {len(self.header.tensors)} tensors; get the file again")
        return layers

    def _layers_said(self) -> int:
        whole, later = self.size("block_count"), self.optional("nextn_predict_layers") or 0
        if not 0 <= later < whole:
            raise self.refusal(
                f"{self.key('nextn_predict_layers')} is {later} of the {whole} layers; get the file again"
            )
        return whole - later

    # -- what configurations have in common ---------------------------------------------------------------------------

    def sizes(self) -> dict[str, Any]:
        """What every configuration has, but for attention."""
        header = self.header
        words = header.tensors.get("token_embd.weight")
        if words is None or len(words.shape) != 2:
            raise self.refusal("no matrix token_embd.weight, so the vocabulary is unknown; get the file again")
        epsilon = self.real("attention.layer_norm_rms_epsilon")
        if epsilon is None:
            raise self.refusal(f"no {self.key('attention.layer_norm_rms_epsilon')}; get the file again")
        ends = named_end_ids(header)
        return {
            "hidden_size": self.size("embedding_length"),
            "num_hidden_layers": self._layers_said(),
            "num_attention_heads": self.size("attention.head_count"),
            "rms_norm_eps": epsilon,
            "max_position_embeddings": self.size("context_length"),
            "vocab_size": words.shape[0],
            "tie_word_embeddings": not self.has("output.weight"),
            "bos_token_id": named_id(header, "bos_token"),
            "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": named_id(header, "pad_token"),
        }

    def common(self, *, rotates: bool = True, rotates_part: bool = False, hybrid: bool = False) -> dict[str, Any]:
        """Of models whose layers with attention all have the same heads.

        rotates: does any layer? rotates_part: there are models that rotate a part of each head. hybrid: layers without
        KV heads have no attention, and those without inner numbers no product.
        """
        sizes = self.sizes()
        heads = sizes["num_attention_heads"]
        dim = self.head_dim(sizes)
        return {
            **sizes,
            "intermediate_size": self._of_some("feed_forward_length")
            if hybrid and "feed_forward_length" in self
            else self.size("feed_forward_length", self.optional("expert_feed_forward_length")),
            "num_key_value_heads": self._of_some("attention.head_count_kv", heads)
            if hybrid
            else self.size("attention.head_count_kv", heads),
            "head_dim": dim,
            **({"rope_parameters": self.rotation_of(dim, rotates_part)} if rotates else {}),
        }

    def rotation_of(self, dim: int, rotates_part: bool) -> dict[str, Any]:
        """dim: the numbers of a head."""
        rotated = self.size("rope.dimension_count", dim)
        if rotated > dim or (rotated != dim and not rotates_part):
            raise self.refusal(
                f"{rotated} of the {dim} numbers of a head are rotated; only models that rotate all of them can be "
                "served from GGUF"
            )
        if rotated % 2:
            raise self.refusal(f"{self.key('rope.dimension_count')} is {rotated}; numbers are rotated in pairs")
        rotation = self.rotation(rotated)
        if rotated != dim:
            rotation["partial_rotary_factor"] = rotated / dim
        return rotation

    def head_dim(self, sizes: dict[str, Any]) -> int:
        """Numbers of a head, of keys as of values."""
        dim = self.size("attention.key_length", max(1, sizes["hidden_size"] // sizes["num_attention_heads"]))
        if self.size("attention.value_length", dim) != dim:
            raise self.refusal(
                f"keys of {dim} numbers and values of {self.size('attention.value_length')}; only models with equal "
                "ones can be served"
            )
        return dim

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.header.values

    def _of_some(self, name: str, default: int = 0) -> int:
        found = {count for count in self.of_layers(name) or [default] if count}
        if len(found) != 1 or min(found) < 0:
            raise self.refusal(
                f"{self.key(name)} has the values {sorted(found)}; one is wanted for the layers that have it, 0 for "
                "the others"
            )
        return found.pop()

    def experts(self) -> dict[str, Any]:
        """How many there are, and how many a token has. Raises ModelError for groups of experts."""
        groups = self.optional("expert_group_count") or 1
        if groups > 1:
            raise self.refusal(
                f"{self.key('expert_group_count')} is {groups}; experts in groups cannot be served of this architecture"
            )
        return {"count": self.size("expert_count"), "used": self.size("expert_used_count")}

    def scores(self, default: int, *known: int) -> int:
        """What makes scores of a router's logits; 0, or none, is the default."""
        found = self.optional("expert_gating_func") or default
        if found not in known:
            raise self.refusal(
                f"{self.key('expert_gating_func')} is {found}; of this architecture {' and '.join(map(str, known))} "
                "can be served"
            )
        return found

    def rotation(self, rotated: int) -> dict[str, Any]:
        """rotated: the numbers of a head that are."""
        theta = self.real("rope.freq_base", DEFAULT_THETA)
        kind = self.text("rope.scaling.type") or "linear"  # llama.cpp's default, which a factor alone has
        factor = self.real("rope.scaling.factor", self.real("rope.scale_linear"))
        start = f"{self.architecture}."
        own = [key.removeprefix(start) for key in self.header.values if key.startswith(f"{start}rope.scaling.")]
        if other := sorted(name for name in own if name not in ARCHITECTURE_KEYS):
            raise self.refusal(
                f"{start}{other[0]}: rotation scaled in this way cannot be served from GGUF; a folder of safetensors "
                "can"
            )
        if kind not in ("none", "linear", "yarn"):
            raise self.refusal(
                f"{self.key('rope.scaling.type')} is {kind!r}; only none, linear and yarn can be served from GGUF"
            )
        is_scaled = kind != "none" and factor not in (None, 0.0, 1.0)
        if self.has("rope_freqs.weight"):
            if is_scaled:
                raise self.refusal(
                    f"rope_freqs.weight and {self.key('rope.scaling.factor')} both scale the rotation; only one of "
                    "them can be served from GGUF"
                )
            return {"rope_theta": theta, **self._llama3(theta or DEFAULT_THETA, rotated)}
        stretch = self.real("rope.scaling.attn_factor", 1.0)
        if stretch != 1.0 and not (is_scaled and kind == "yarn"):
            raise self.refusal(
                f"{start}rope.scaling.attn_factor is {stretch} without YaRN, which cannot be served from GGUF; a "
                "folder of safetensors can"
            )
        if not is_scaled:
            return {"rope_type": "default", "rope_theta": theta}
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        is_said = self.optional("rope.scaling.original_context_length")  # not 0, which is none, as in llama.cpp
        positions = self.size("rope.scaling.original_context_length" if is_said else "context_length")
        yarn = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        if stretch is not None and stretch != 1.0:  # what llama.cpp multiplies YaRN's own with
            yarn["attention_factor"] = stretch * (0.1 * math.log(factor or 1.0) + 1.0)
        return {**yarn, "original_max_position_embeddings": positions}

    def _llama3(self, theta: float, rotated: int) -> dict[str, Any]:
        """The rotation of which the file has only the divisor of each frequency."""
        refusal = self.refusal(
            "rope_freqs.weight is not what Llama 3 scales its rotation by; it cannot be served from GGUF, a folder of "
            "safetensors can"
        )
        found = self.divisors(rotated // 2)
        if found is None:
            raise refusal
        factor = float(np.max(found))
        if not np.isfinite(factor) or factor < 1.0:
            raise refusal
        frequencies = theta ** (-np.arange(len(found)) / len(found))
        turns = _LLAMA3_POSITIONS * frequencies / (2 * np.pi)
        smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
        if not np.allclose(found, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0.0):
            raise refusal
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_POSITIONS,
        }

    def divisors(self, count: int, name: str = "rope_freqs.weight") -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """Of the frequencies of rotation, if there are `count` numbers in float32 of this name."""
        tensor = self.header.tensors.get(name)
        if tensor is None or tensor.encoding.name != "F32" or tensor.shape != (count,):
            return None
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            return np.frombuffer(file.read(tensor.size_bytes), "<f4").astype(np.float64)

    def layer_types(self, default: int) -> list[str]:
        """Every so many layers one sees everything, the last of them; or what the file says of each layer."""
        if isinstance(self.header.values.get(self.key("attention.sliding_window_pattern")), np.ndarray):
            return sliding(self.of_layers("attention.sliding_window_pattern") or [])
        every = self.size("attention.sliding_window_pattern", default)
        return sliding([int((layer + 1) % every != 0) for layer in range(self.layers)])


def sliding(layers: Sequence[int]) -> list[str]:
    return [SLIDING if slides else FULL for slides in layers]
