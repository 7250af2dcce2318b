"""A model of a real one's shape with random weights, as a folder: for bytes and speed at lengths that no text needs.

    python scripts/random_model.py gemma3-270m FOLDER
    kakeya evaluate ladder --model FOLDER --trained 0 --lengths 64000 100000 --strategies sink_window gather

Nothing that it says means anything, and how far its choices are from full attention neither. Its tokenizer knows single
characters. The weights are the same for the same shape and seed.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from pathlib import Path

from inference_engine.config import configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

_GEMMA_LAYERS = [*["sliding_attention"] * 5, "full_attention"] * 3
SHAPES: dict[str, PretrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
    "gemma3-270m": Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32_768, sliding_window=512,
        layer_types=_GEMMA_LAYERS, query_pre_attn_scalar=256, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=131_072, rope_theta=1_000_000.0, tie_word_embeddings=False,
    ),
}  # fmt: skip
_END = "<|end|>"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("folder", type=Path, help="to be made; its last part names the model in records")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    write_model(SHAPES[arguments.shape], arguments.folder, seed=arguments.seed)


def write_model(config: PretrainedConfig, folder: Path, *, seed: int = 0) -> None:
    """bfloat16 weights, as transformers initialises them, and a tokenizer of characters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    characters = {character: index for index, character in enumerate(sorted({*string.printable} - {*"\r\x0b\x0c"}))}
    tokenizer = Tokenizer(models.BPE(vocab=characters, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([_END])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END).save_pretrained(folder)


if __name__ == "__main__":
    main()
