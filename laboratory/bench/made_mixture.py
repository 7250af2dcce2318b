"""A made GGUF file of a mixture of experts, to be measured: random blocks in the layers of Qwen3-MoE, 8 of 128 experts.

    python -m laboratory.bench.made_mixture build/made-8-of-128-Q4_0.gguf
    kakeya bench cpu --files build/made-8-of-128-Q4_0.gguf

No mixture is published in a package index. What a step costs depends on sizes, not on numbers, but for which experts
are chosen; random routers choose evenly. Layers are half as wide as Qwen3-30B-A3B's, experts have a third of the inner
size, so that torch has room for the numbers of ten layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD = 10, 1024, 16, 4, 64
EXPERTS, CHOSEN, INNER = 128, 8, 256
VOCABULARY, POSITIONS = 32_768, 16_384
_BLOCK, _BLOCK_BYTES = 32, 18
_MEAN_SQUARE = 21.5  # of codes from −8 to 7


def write_mixture(path: Path, *, layers: int = LAYERS, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> None:
    """Matrices in Q4_0, routers and norms in float32. A product's outputs are of the size of its inputs."""
    rng = np.random.default_rng(1)
    writer = GGUFWriter(path, "qwen3moe")
    for name, value in {
        "context_length": POSITIONS,
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": INNER * CHOSEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "expert_count": EXPERTS,
        "expert_used_count": CHOSEN,
        "expert_feed_forward_length": INNER,
    }.items():
        writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token}" for token in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(vocabulary - 1)

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", _blocks(rng, *shape), raw_dtype=GGMLQuantizationType.Q4_0)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", vocabulary, hidden)
    matrix("output", vocabulary, hidden)
    ones("output_norm", hidden)
    for layer in range(layers):
        own = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            ones(f"{own}{name}", hidden)
        for name in ("attn_q_norm", "attn_k_norm"):
            ones(f"{own}{name}", HEAD)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{own}attn_{name}", heads * HEAD, hidden)
        matrix(f"{own}attn_output", hidden, HEADS * HEAD)
        router = rng.normal(size=(EXPERTS, hidden)) * hidden**-0.5
        writer.add_tensor(f"{own}ffn_gate_inp.weight", router.astype(np.float32))
        for name in ("gate", "up"):
            matrix(f"{own}ffn_{name}_exps", EXPERTS, INNER, hidden)
        matrix(f"{own}ffn_down_exps", EXPERTS, hidden, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    """[..., outputs, bytes]: any bits are codes; the scale is that of numbers of variance 1 ÷ inputs."""
    *rows, inputs = shape
    blocks: NDArray[Any] = rng.integers(0, 256, (*rows, inputs // _BLOCK, _BLOCK_BYTES), np.uint8)
    blocks[..., :2] = np.array([(inputs * _MEAN_SQUARE) ** -0.5], np.float16).view(np.uint8)
    return blocks.reshape(*rows, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mixture(path)


if __name__ == "__main__":
    main()
