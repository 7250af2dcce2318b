"""GGUF to safetensors in float32, which torch maps: once, in a process of its own.

    python -m inference_engine.models.conversion FILE.gguf FOLDER --parameters N

The quantised weights are dequantised to float32, which is exact; a 16-bit type would not be. A separate process frees
its memory at the end, and the process with the progress bar does not import torch.

transformers' reader marks the model as quantised and refuses to save it, which is undone here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from inference_engine.config import configure_threads_environment, forbid_model_hub
from inference_engine.errors import ModelError

_SAMPLE_TOKENS = 24


def convert(gguf: Path, folder: Path, *, parameters: int) -> None:
    """Write weights and configuration into `folder`, then read them back and compare.

    `gguf` must lie in a folder of its own: transformers looks at its neighbours. Raises ModelError if the model is not
    the one described, or does not read back equal.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _forget_quantisation(model)
    model.save_pretrained(folder)
    # Weights are written for the owner alone; a cache may be shared, or filled by root when a container is built.
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)

    if (actual := model.num_parameters()) != parameters:
        raise ModelError(f"{gguf.name}: expected {parameters} parameters, got {actual}")
    same: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.inference_mode():
        batch = torch.arange(_SAMPLE_TOKENS)[None] * 7 % model.config.get_text_config().vocab_size
        if not torch.equal(same(batch).logits, model(batch).logits):
            raise ModelError(f"{gguf.name}: the converted weights do not give the logits they gave before")


def _forget_quantisation(model: Any) -> None:
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=int, required=True)
    args = parser.parse_args()
    configure_threads_environment()
    forbid_model_hub()
    try:
        convert(args.gguf, args.folder, parameters=args.parameters)
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
