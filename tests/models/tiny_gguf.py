"""Tiny random models of every family that is read from GGUF, and GGUF files of them as llama.cpp's converter writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quantize

from inference_engine.models.encodings import BY_NAME
from tests.models.gguf_layouts import MORE_FAMILIES, SMALL, architecture_of, fill, values_of
from tests.models.gguf_tensors import converted
from tests.models.tiny_folder import byte_tokens

_GEMMA = {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
FAMILIES: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(
        **SMALL, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 50_000.0}
    ),
    "llama with biases": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **_GEMMA),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 6},
        **_GEMMA,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def tiny_model(family: str, **changes: Any) -> Any:
    """With noise on every parameter: norms of one and biases of zero would hide what is read wrongly.

    changes: of its configuration.
    """
    config = {**FAMILIES, **MORE_FAMILIES}[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(11)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        if family in MORE_FAMILIES:
            fill(model)
        else:
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


# Where a block has its scale, and its minimum's, in 16 bits.
_SCALES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_blocks(
    encoding: str, rows: int, inputs: int, seed: int = 3, *, odd_scales: bool = False, spread: float = 0.0
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[rows, bytes] of random codes: every pattern of bits is a block, if its scale is finite.

    odd_scales: of any kind that is finite, zeros and those below the normal ones among them. spread: the standard
    deviation of the numbers, if it is not 0.
    """
    rng, kind = np.random.default_rng(seed), BY_NAME[encoding]
    blocks = rng.integers(0, 256, (rows, inputs // kind.numbers, kind.size_bytes), np.uint8)
    if encoding == "MXFP4":
        blocks[..., 0] = rng.integers(0, 253 if odd_scales else 12, blocks.shape[:2]) + (0 if odd_scales else 113)
    if encoding == "NVFP4":
        blocks[..., :4] %= 0x7F  # what a byte of all ones stands for is not a number
    if encoding == "IQ1_M":
        blocks[..., 48 + 1 :: 2] &= 0x2F  # the bits of its scale are spread over four words
    for at in _SCALES_AT.get(encoding, ()):
        scales = rng.normal(size=blocks.shape[:2]).astype(np.float16)
        if odd_scales:
            which = rng.integers(0, 5, scales.shape)
            scales[which == 0] = 0
            scales[which == 1] = np.float16(6e-8) * rng.integers(-9, 9, int((which == 1).sum()))
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if spread and encoding in _SCALES_AT:
        found = dequantize(blocks.reshape(rows, -1), GGMLQuantizationType[encoding]).std()
        for at in _SCALES_AT[encoding]:
            scales = blocks[..., at : at + 2].copy().view(np.float16) * np.float16(spread / found)
            blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    model: Any,
    path: Path,
    encoding: str | Callable[[str], str] = "F32",
    *,
    pre: str = "smollm",
    factors: np.ndarray[Any, Any] | None = None,
    spelled: Mapping[int, tuple[str, int]] = MappingProxyType({}),
    ids: Mapping[str, int] = MappingProxyType({}),
    values: Mapping[str, Any] = MappingProxyType({}),
    tensors: Callable[[dict[str, Any]], Any] | None = None,
    most_tensors: int = 0,
) -> None:
    """The model as llama.cpp's converter writes it, matrices in `encoding`, with a byte-level tokenizer.

    encoding: of all matrices, or of each by its name. Blocks that the gguf package does not write are random ones.
    factors: the divisor of each frequency of the rotation. spelled: other texts and types of tokens, by id. ids: more
    keys `tokenizer.ggml.<name>_token_id`, or others than bos 0, eos 1 and padding 1. values: other values of keys; None
    leaves one out. tensors: changes them. most_tensors: of each of several files; 0 for one file.
    """
    config = model.config
    family = architecture_of(config)
    writer = GGUFWriter(path, family, split_max_tensors=most_tensors)
    _write_values(writer, config)
    _write_tokenizer(writer, config.vocab_size, pre, spelled, ids)
    for key, value in values.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            _add(writer, key, value)
    found: dict[str, Any] = converted(model)
    if tensors is not None:
        tensors(found)
    for name, tensor in found.items():
        is_small = tensor.ndim == 1 or tensor.shape[-1] < 32  # convolutions, too
        stored = "F32" if is_small else encoding if isinstance(encoding, str) else encoding(name)
        if stored != "F32":
            kind = GGMLQuantizationType[stored]
            writer.add_tensor(name, _in_blocks(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_blocks(tensor: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    try:
        return quantize(tensor, kind)
    except NotImplementedError:
        *rows, inputs = tensor.shape
        seed = int(np.abs(tensor).sum() * 1000)
        blocks = random_blocks(kind.name, int(np.prod(rows)), inputs, seed, spread=float(tensor.std()))
        return blocks.reshape(*rows, -1)


def _write_values(writer: GGUFWriter, config: Any) -> None:
    kind = config.model_type
    rope = getattr(
        config, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}
    )  # what does not rotate has none
    rope = rope.get("full_attention", rope)
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.to_dict()["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon,
        "rope.freq_base": rope["rope_theta"],
    }
    if kind in ("llama", "mistral"):
        values["rope.dimension_count"] = config.hidden_size // config.num_attention_heads
    elif kind in ("qwen3", "qwen3_moe", "gemma2", "gemma3_text"):
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "qwen3_moe":
        values |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if kind.startswith("gemma"):
        values["attention.sliding_window"] = config.sliding_window
    if kind == "gemma2":
        values |= {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    for name, value in {**values, **values_of(config)}.items():
        if value is not None:
            _add(writer, f"{writer.arch}.{name}", value)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    own = GGUFValueType.get_type(value)
    writer.add_key_value(
        key,
        value,
        GGUFValueType.UINT32 if own is GGUFValueType.INT32 else own,
        **({"sub_type": GGUFValueType.get_type(value[0])} if own is GGUFValueType.ARRAY else {}),
    )


def _write_tokenizer(
    writer: GGUFWriter, size: int, pre: str, spelled: Mapping[int, tuple[str, int]], ids: Mapping[str, int]
) -> None:
    line_break = byte_tokens()[ord("\n")]
    tokens = ["<|start|>", "<|end|>", *byte_tokens(), line_break * 2]
    types = [3, 3, *[1] * (len(tokens) - 2)]
    assert size == len(tokens)
    for at, (text, kind) in spelled.items():
        tokens[at], types[at] = text, kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{line_break} {line_break}"])
    for name, at in {"bos": 0, "eos": 1, "padding": 1, **ids}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", at)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
