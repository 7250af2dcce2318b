"""The configuration of a GGUF file, as transformers' config.json would say it.

transformers' own reader of these keys takes rotation as plain where the file has factors for long texts, a window of
every Gemma as its default, and reads with gguf.GGUFReader (see gguf_header.py). Here a file that says something the
configuration cannot say is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from inference_engine.errors import ModelError
from inference_engine.models.file_keys import ARCHITECTURE_KEYS, HONOURED, in_a_line, unlisted_in_gguf
from inference_engine.models.gguf_header import GgufHeader
from inference_engine.models.gguf_vocabulary import named_end_ids, named_id

_DEFAULT_THETA = 10_000.0
# Of YaRN, with the values that the rotation has without them.
_NOT_READ: Mapping[str, float] = MappingProxyType(
    {
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }
)
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
# llama.cpp's numbers for what the files do not say: layers of the models whose attention is scaled by the hidden size.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
# Llama 3's own; the file has only the factors that they give.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """What config.json would hold. Raises ModelError for an architecture that is not read, and for missing values."""
    architecture = header.text("general.architecture") or ""
    if architecture not in _FAMILIES:
        raise ModelError(
            f"{header.path}: general.architecture is {architecture!r}, which cannot be served from GGUF; "
            f"{', '.join(_FAMILIES)} can, others from a folder of safetensors"
        )
    if (kind := header.text("general.type")) not in (None, "model"):
        raise ModelError(f"{header.path}: general.type is {kind!r}, and not 'model'; name the file of a whole model")
    if header.values.get(f"{architecture}.attention.causal", True) is not True:
        raise ModelError(
            f"{header.path}: {architecture}.attention.causal is false; tokens that attend to later ones are not served"
        )
    keys = _Keys(header, architecture)
    keys.config = _common(keys)
    config = {**keys.config, **_FAMILIES[architecture](keys)}
    # What the file does not say is the class's default, but for caps: none is one of their values.
    return {name: value for name, value in config.items() if value is not None or name.endswith("_softcapping")}


def gguf_notes(header: GgufHeader) -> tuple[str, ...]:
    """What a file says that llama.cpp would read otherwise, or that its tensors contradict; for the log."""
    architecture, notes = header.text("general.architecture") or "", []
    window = header.values.get(f"{architecture}.attention.sliding_window")
    if architecture == "llama" and window:
        notes.append(
            f"llama.attention.sliding_window is {window}: each token sees that many, as in a Mistral model of "
            "safetensors; llama.cpp ignores the key"
        )
    pattern = f"{architecture}.attention.sliding_window_pattern"
    if isinstance(header.values.get(pattern), np.ndarray):
        notes.append(
            f"{pattern} has a value for each layer, which is followed; llama.cpp takes every sixth layer to be full"
        )
    for name, default in _NOT_READ.items():
        if (value := header.values.get(f"{architecture}.{name}", default)) != default:
            notes.append(f"{architecture}.{name} is {value}, and is not read, as by llama.cpp")
    rows, said = header.tensors["token_embd.weight"].shape[0], header.values.get(f"{architecture}.vocab_size")
    if said is not None and said != rows:
        notes.append(f"token_embd.weight has {rows} rows, which is the vocabulary; {architecture}.vocab_size is {said}")
    if unknown := unlisted_in_gguf([*header.values, *header.string_arrays], architecture):
        notes.append(f"keys that are not known, and are not read: {in_a_line(unknown)}")
    return tuple(notes)


class _Keys:
    """Values of a file under the name of its architecture. config: what the families have in common."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture
        self.config: Mapping[str, Any] = {}

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number. Raises ModelError if it is missing and there is no default."""
        key = self.key(name)
        value = self.header.values.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) and np.all(value == value[0]):
            found: int | None = int(value[0])  # the same in every layer
        else:
            found = self.header.number(key)
        found = default if found is None else found
        if found is None or not 1 <= found < 2**31:
            raise ModelError(f"{self.header.path}: {key} is {found}, expected a positive number; get the file again")
        return found

    def optional(self, name: str) -> int | None:
        return self.header.number(self.key(name))

    def real(self, name: str, default: float | None = None) -> float | None:
        found = self.header.real(self.key(name))
        return default if found is None else found

    def text(self, name: str) -> str | None:
        return self.header.text(self.key(name))

    def key(self, name: str) -> str:
        assert ARCHITECTURE_KEYS[name][0] == HONOURED, "what is read is in the table of keys"
        return f"{self.architecture}.{name}"

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def has_bias(self, *names: str) -> bool:
        """Has one of these matrices a bias in any layer?"""
        ends = tuple(f".{name}.bias" for name in names)
        return any(tensor.startswith("blk.") and tensor.endswith(ends) for tensor in self.header.tensors)


def _common(keys: _Keys) -> dict[str, Any]:
    header, heads, hidden = keys.header, keys.size("attention.head_count"), keys.size("embedding_length")
    words = header.tensors.get("token_embd.weight")
    if words is None or len(words.shape) != 2:
        raise ModelError(
            f"{header.path}: no matrix token_embd.weight, so the vocabulary is unknown; get the file again"
        )
    head_dim = keys.size("attention.key_length", keys.size("rope.dimension_count", max(1, hidden // heads)))
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{header.path}: keys of {head_dim} numbers and values of {keys.size('attention.value_length')}; only "
            "models with equal ones can be served"
        )
    if keys.size("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"{header.path}: {keys.size('rope.dimension_count')} of the {head_dim} numbers of a head are rotated; only "
            "models that rotate all of them can be served from GGUF"
        )
    epsilon = keys.real("attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise ModelError(f"{header.path}: no {keys.key('attention.layer_norm_rms_epsilon')}; get the file again")
    ends = named_end_ids(header)
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length", keys.optional("expert_feed_forward_length")),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": epsilon,
        "max_position_embeddings": keys.size("context_length"),
        "vocab_size": words.shape[0],
        "rope_parameters": _rotation(keys, head_dim),
        "tie_word_embeddings": not keys.has("output.weight"),
        "bos_token_id": named_id(header, "bos_token"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": named_id(header, "pad_token"),
    }


def _rotation(keys: _Keys, head_dim: int) -> dict[str, Any]:
    theta = keys.real("rope.freq_base", _DEFAULT_THETA)
    kind = keys.text("rope.scaling.type") or "linear"  # llama.cpp's default, which a factor alone has
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear"))
    start = f"{keys.architecture}."
    own = [key.removeprefix(start) for key in keys.header.values if key.startswith(f"{start}rope.scaling.")]
    if other := sorted(name for name in own if name not in ARCHITECTURE_KEYS):
        raise ModelError(
            f"{keys.header.path}: {start}{other[0]}: rotation scaled in this way cannot be served from GGUF; a folder "
            "of safetensors can"
        )
    is_scaled = kind != "none" and factor not in (None, 0.0, 1.0)
    if keys.has("rope_freqs.weight"):
        if is_scaled:
            raise ModelError(
                f"{keys.header.path}: rope_freqs.weight and {keys.key('rope.scaling.factor')} both scale the rotation; "
                "only one of them can be served from GGUF"
            )
        return {"rope_theta": theta, **_llama3(keys, theta or _DEFAULT_THETA, head_dim)}
    stretch = keys.real("rope.scaling.attn_factor", 1.0)
    if stretch != 1.0 and not (is_scaled and kind == "yarn"):
        raise ModelError(
            f"{keys.header.path}: {start}rope.scaling.attn_factor is {stretch} without YaRN, which cannot be served "
            "from GGUF; a folder of safetensors can"
        )
    if not is_scaled:
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        positions = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
        yarn = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        if stretch is not None and stretch != 1.0:  # what llama.cpp multiplies YaRN's own with
            yarn["attention_factor"] = stretch * (0.1 * math.log(factor or 1.0) + 1.0)
        return {**yarn, "original_max_position_embeddings": positions}
    raise ModelError(
        f"{keys.header.path}: {keys.key('rope.scaling.type')} is {kind!r}; only none, linear and yarn can be served "
        "from GGUF"
    )


def _llama3(keys: _Keys, theta: float, head_dim: int) -> dict[str, Any]:
    """The rotation of which the file has only the divisor of each frequency."""
    header, tensor = keys.header, keys.header.tensors["rope_freqs.weight"]
    refusal = ModelError(
        f"{header.path}: rope_freqs.weight is not what Llama 3 scales its rotation by; it cannot be served from GGUF, "
        "a folder of safetensors can"
    )
    if tensor.encoding.name != "F32" or tensor.shape != (head_dim // 2,):
        raise refusal
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        found = np.frombuffer(file.read(tensor.size_bytes), "<f4").astype(np.float64)
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


def _llama(keys: _Keys) -> dict[str, Any]:
    if keys.optional("expert_count"):
        raise ModelError(
            f"{keys.header.path}: a llama with {keys.optional('expert_count')} experts cannot be served from GGUF; a "
            "folder of safetensors can"
        )
    if window := keys.optional("attention.sliding_window"):
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": keys.has_bias(*_ATTENTION),
        "mlp_bias": keys.has_bias("ffn_gate", "ffn_up", "ffn_down"),
    }


def _qwen2(_keys: _Keys) -> dict[str, Any]:
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": keys.has_bias(*_ATTENTION),
    }


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,  # in every file of this kind, and what llama.cpp computes
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": keys.size("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, 2),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _scalar(keys.config, _GEMMA2_27B_LAYERS),
    }


def _gemma3(keys: _Keys) -> dict[str, Any]:
    near = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", _DEFAULT_THETA)}
    far = dict(keys.config["rope_parameters"])
    window = keys.optional("attention.sliding_window")
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": window or None,
        "layer_types": _layer_types(keys, 6) if window else ["full_attention"] * _layers(keys),
        "rope_parameters": {"full_attention": far, "sliding_attention": near},
        "attn_logit_softcapping": keys.real("attn_logit_softcapping") or None,
        "final_logit_softcapping": keys.real("final_logit_softcapping") or None,
        "query_pre_attn_scalar": _scalar(keys.config, _GEMMA3_27B_LAYERS),
    }


def _layer_types(keys: _Keys, default: int) -> list[str]:
    """Every so many layers one sees everything, the last of them; or what the file says of each layer."""
    key, layers = keys.key("attention.sliding_window_pattern"), keys.config["num_hidden_layers"]
    found = keys.header.values.get(key)
    if isinstance(found, np.ndarray):
        if len(found) != layers:
            raise ModelError(f"{keys.header.path}: {key} is of {len(found)} layers, the model has {layers}")
        return ["sliding_attention" if slides else "full_attention" for slides in found]
    every = keys.size("attention.sliding_window_pattern", default)
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(_layers(keys))]


def _layers(keys: _Keys) -> int:
    """The number of layers, before anything is listed for each. Raises ModelError if the file cannot have so many."""
    layers: int = keys.config["num_hidden_layers"]
    if layers > len(keys.header.tensors):
        raise ModelError(
            f"{keys.header.path}: {layers} layers, and {len(keys.header.tensors)} tensors; get the file again"
        )
    return layers


def _scalar(config: Mapping[str, Any], layers_of_27b: int) -> int:
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


_FAMILIES: Mapping[str, Callable[[_Keys], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3_moe,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
    }
)
