"""Made GGUF files, to be measured: random blocks in the layers of a mixture of experts, or of a hybrid model.

    python -m laboratory.bench.made_models mixture build/made-8-of-128-Q4_0.gguf
    kakeya bench cpu --files build/made-8-of-128-Q4_0.gguf

No such model is published in a package index. What a step costs depends on sizes, not on numbers, but for which experts
are chosen; random routers choose evenly.

mixture: Qwen3-MoE's layers, 8 of 128 experts. Layers are half as wide as Qwen3-30B-A3B's, experts have a third of the
inner size, so that torch has room for the numbers of ten layers.
hybrid: Qwen3.5-0.8B's sizes, all 24 layers and the whole vocabulary: three of four layers keep a recurrent state.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

EXPERTS, CHOSEN, INNER = 128, 8, 256  # of the mixture
KEY_HEADS, VALUE_HEADS, STATE, TAPS = 16, 16, 128, 4  # of the hybrid's recurrent layers
ATTENDS_EVERY = 4
POSITIONS = 16_384
_BLOCK, _BLOCK_BYTES = 32, 18
_MEAN_SQUARE = 21.5  # of codes from −8 to 7


class _File:
    """Matrices in Q4_0, all else in float32; memory holds all until `close`. A product's outputs are as large as its
    inputs.
    """

    def __init__(self, path: Path, architecture: str, vocabulary: int, values: Mapping[str, Any]) -> None:
        self.rng = np.random.default_rng(1)
        self._writer = writer = GGUFWriter(path, architecture)
        for name, value in values.items():
            writer.add_uint32(f"{architecture}.{name}", value)
        writer.add_context_length(POSITIONS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([f"t{token}" for token in range(vocabulary)])
        writer.add_token_types([1] * vocabulary)
        writer.add_token_merges(["t 0"])
        writer.add_eos_token_id(vocabulary - 1)

    @property
    def keys(self) -> GGUFWriter:
        return self._writer

    def matrix(self, name: str, *shape: int) -> None:
        """[..., outputs, inputs]: any bits are codes; the scale is that of numbers of variance 1 ÷ inputs."""
        *rows, inputs = shape
        blocks: NDArray[Any] = self.rng.integers(0, 256, (*rows, inputs // _BLOCK, _BLOCK_BYTES), np.uint8)
        blocks[..., :2] = np.array([(inputs * _MEAN_SQUARE) ** -0.5], np.float16).view(np.uint8)
        self._writer.add_tensor(f"{name}.weight", blocks.reshape(*rows, -1), raw_dtype=GGMLQuantizationType.Q4_0)

    def numbers(self, name: str, values: NDArray[Any]) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))

    def ones(self, name: str, size: int) -> None:
        self.numbers(f"{name}.weight", np.ones(size))

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def write_mixture(path: Path, *, layers: int = 10, hidden: int = 1024, vocabulary: int = 32_768) -> None:
    heads, kv_heads, head = 16, 4, 64
    values = {
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": INNER * CHOSEN,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "expert_count": EXPERTS,
        "expert_used_count": CHOSEN,
        "expert_feed_forward_length": INNER,
    }
    file = _File(path, "qwen3moe", vocabulary, values)
    file.keys.add_rope_freq_base(1e6)
    file.matrix("token_embd", vocabulary, hidden)
    file.matrix("output", vocabulary, hidden)
    file.ones("output_norm", hidden)
    for layer in range(layers):
        own = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            file.ones(f"{own}{name}", hidden)
        for name in ("attn_q_norm", "attn_k_norm"):
            file.ones(f"{own}{name}", head)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            file.matrix(f"{own}attn_{name}", count * head, hidden)
        file.matrix(f"{own}attn_output", hidden, heads * head)
        file.numbers(f"{own}ffn_gate_inp.weight", file.rng.normal(size=(EXPERTS, hidden)) * hidden**-0.5)
        for name in ("gate", "up"):
            file.matrix(f"{own}ffn_{name}_exps", EXPERTS, INNER, hidden)
        file.matrix(f"{own}ffn_down_exps", EXPERTS, hidden, INNER)
    file.close()


def write_hybrid(path: Path, *, layers: int = 24, hidden: int = 1024, vocabulary: int = 248_320) -> None:
    """The embedding is the output's matrix, too, as the model's own is."""
    heads, kv_heads, head, inner = 8, 2, 256, hidden * 7 // 2
    values = {
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head // 4,
        "full_attention_interval": ATTENDS_EVERY,
        "ssm.conv_kernel": TAPS,
        "ssm.state_size": STATE,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUE_HEADS * STATE,
    }
    file = _File(path, "qwen35", vocabulary, values)
    file.keys.add_rope_freq_base(1e7)
    file.keys.add_rope_dimension_sections([11, 11, 10, 0])
    file.matrix("token_embd", vocabulary, hidden)
    file.ones("output_norm", hidden)
    for layer in range(layers):
        own = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm"):
            file.ones(f"{own}{name}", hidden)
        if (layer + 1) % ATTENDS_EVERY:
            _recurrent(file, own, hidden)
        else:
            for name in ("attn_q_norm", "attn_k_norm"):
                file.ones(f"{own}{name}", head)
            file.matrix(f"{own}attn_q", 2 * heads * head, hidden)  # the output's gate with it
            for name in ("k", "v"):
                file.matrix(f"{own}attn_{name}", kv_heads * head, hidden)
            file.matrix(f"{own}attn_output", hidden, heads * head)
        for name in ("gate", "up"):
            file.matrix(f"{own}ffn_{name}", inner, hidden)
        file.matrix(f"{own}ffn_down", hidden, inner)
    file.close()


def _recurrent(file: _File, own: str, hidden: int) -> None:
    """A gated delta rule; decay and step as transformers starts them."""
    values = VALUE_HEADS * STATE
    channels = 2 * KEY_HEADS * STATE + values
    file.matrix(f"{own}attn_qkv", channels, hidden)
    file.matrix(f"{own}attn_gate", values, hidden)
    for name in ("alpha", "beta"):
        file.matrix(f"{own}ssm_{name}", VALUE_HEADS, hidden)
    file.numbers(f"{own}ssm_conv1d.weight", file.rng.normal(size=(channels, TAPS)) * TAPS**-0.5)
    file.numbers(f"{own}ssm_dt.bias", np.ones(VALUE_HEADS))
    file.numbers(f"{own}ssm_a", -file.rng.uniform(0.01, 16, VALUE_HEADS))
    file.ones(f"{own}ssm_norm", STATE)
    file.matrix(f"{own}ssm_out", hidden, values)


MODELS: Mapping[str, Callable[[Path], None]] = {"mixture": write_mixture, "hybrid": write_hybrid}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    MODELS[arguments.model](arguments.file)


if __name__ == "__main__":
    main()
