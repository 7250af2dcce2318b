r"""GGUF to a transformers folder: float32 safetensors and a tokenizer, once, in a process of its own.

    python -m inference_engine.models.convert FILE.gguf FOLDER --parameters N [--chat-template] [--split-digits]

The quantised weights are dequantised to float32, which is exact; a 16-bit type would not be. A separate process frees
its memory at the end, and the process with the progress bar does not import torch.

Two errors of transformers' reader are corrected here:
- It marks the model as quantised, and refuses to save it.
- It gives every byte-pair tokenizer GPT-2's pre-tokenizer. SmolLM2's splits off every digit first: without that, white
  space before a digit is split differently ("\n\n2" becomes three tokens instead of two).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from inference_engine.config import configure_threads_environment, forbid_model_hub
from inference_engine.errors import ModelError

_SAMPLE = "On 3 May\n\n2 of 1024 users said: “naïve”,  日本語 🙂\n\tx = y[0]\n"


def convert(gguf: Path, folder: Path, *, parameters: int, has_chat_template: bool, splits_digits: bool) -> None:
    """Write the model and its tokenizer into `folder`, then read both back and compare.

    `gguf` must lie in a folder of its own: transformers looks at its neighbours. Raises ModelError if the model is not
    the one described, or does not read back equal.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _forget_quantisation(model)
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if splits_digits:
        _split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder)
    # Weights are written for the owner alone; a cache may be shared, or filled by root when a container is built.
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)

    if (actual := model.num_parameters()) != parameters:
        raise ModelError(f"{gguf.name}: expected {parameters} parameters, got {actual}")
    if bool(tokenizer.chat_template) != has_chat_template:
        raise ModelError(f"{gguf.name}: expected {'a' if has_chat_template else 'no'} chat template, got the opposite")
    ids = tokenizer(_SAMPLE, add_special_tokens=False).input_ids
    same_tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if same_tokenizer(_SAMPLE, add_special_tokens=False).input_ids != ids or same_tokenizer.decode(ids) != _SAMPLE:
        raise ModelError(f"{gguf.name}: the converted tokenizer does not read back as it was")
    same: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.inference_mode():
        batch = torch.tensor([ids])
        if not torch.equal(same(batch).logits, model(batch).logits):
            raise ModelError(f"{gguf.name}: the converted weights do not give the logits they gave before")


def _split_digits(tokenizer: Any) -> None:
    """Let a byte-level tokenizer of the tokenizers library take every digit alone first."""
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _forget_quantisation(model: Any) -> None:
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--chat-template", action="store_true")
    parser.add_argument("--split-digits", action="store_true")
    args = parser.parse_args()
    configure_threads_environment()
    forbid_model_hub()
    try:
        convert(
            args.gguf,
            args.folder,
            parameters=args.parameters,
            has_chat_template=args.chat_template,
            splits_digits=args.split_digits,
        )
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
