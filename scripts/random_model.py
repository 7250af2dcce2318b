"""A model of a real one's shape with random weights, as a folder: for bytes and speed of the backends that read files.

    python scripts/random_model.py gemma3-270m FOLDER
    kakeya evaluate ladder --model FOLDER --trained 0 --lengths 64000 100000 --strategies sink_window gather

On torch no folder is needed: `kakeya evaluate ladder --random gemma3-270m` makes such a model in memory.
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
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from laboratory.evaluation.made_models import SHAPES

_END = "<|end|>"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("folder", type=Path, help="to be made; its last part names the model in records")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    write_model(SHAPES[arguments.shape](), arguments.folder, seed=arguments.seed)


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
