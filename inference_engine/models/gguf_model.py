"""A GGUF file as transformers knows a model: its configuration and its tokenizer. Its numbers: `unpacked.py`.

transformers' own loader of GGUF is not used: it trusts the file's counts and offsets (gguf_header.py), and leaves out
part of the configuration (gguf_config.py). Its tokenizer is: it is made once, in a process of its own, and kept in

    <cache>/tokenizers/<SHA-256 of the file>/
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.config import child_environment, configure_threads_environment, forbid_model_hub
from inference_engine.errors import ModelError
from inference_engine.models.folder import MAX_LAYERS
from inference_engine.models.gguf_config import gguf_config
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.manifest import digest_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# An import of transformers takes most of it; a vocabulary of 262,144 tokens without its merges takes 20 seconds.
MAX_TOKENIZER_SECONDS = 120.0

# The ways to split text of byte-level tokenizers, by llama.cpp's names, that transformers' reader does not tell apart.
# Those of the second kind take every digit alone, then split as the first do.
_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def check_gguf(path: Path) -> None:
    """Raises ModelError for a file whose configuration or tensors cannot be served. Reads no weights."""
    header = read_gguf(path)
    layers = gguf_config(header)["num_hidden_layers"]
    if layers > min(MAX_LAYERS, len(header.tensors)):
        raise ModelError(
            f"{path}: {layers} layers; at most {MAX_LAYERS} can be served, and the file holds {len(header.tensors)} "
            "tensors"
        )


def read_gguf_config(path: Path) -> PretrainedConfig:
    """The configuration as an object of transformers. Raises ModelError."""
    check_gguf(path)
    content = gguf_config(read_gguf(path))
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[content.pop("model_type")]
    try:
        config: PretrainedConfig = kind(**content)
    except Exception as error:
        # Any exception of the library means that the values are invalid.
        logger.debug("%s has no valid configuration", path, exc_info=True)
        raise ModelError(
            f"{path}: not a configuration that {kind.__name__} can be made of (log level DEBUG has the details)"
        ) from error
    return config


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def gguf_tokenizer_folder(path: Path, cache: Path) -> Path:
    """A folder with the tokenizer of a GGUF file, made if it is not in the cache yet. Raises ModelError."""
    folder = cache / "tokenizers" / digest_of(path, cache=cache)
    if folder.is_dir():
        return folder
    read_gguf(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".~", dir=folder.parent) as work:
            made = Path(work) / "tokenizer"
            _make_in_child(path, made)
            if not folder.is_dir():  # another process may have been faster
                made.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise ModelError(f"the tokenizer of {path.name} cannot be put into {folder.parent}: {error}") from error
    return folder


def _make_in_child(path: Path, folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "inference_engine.models.gguf_model", str(path), str(folder)]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=child_environment(),
            timeout=MAX_TOKENIZER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"{path}: its tokenizer cannot be used: the limit of {MAX_TOKENIZER_SECONDS:g} s is too short to make it; "
            f"{_REMEDY}"
        ) from error
    if child.returncode != 0:
        said = (child.stderr.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        if not said.startswith(str(path)):
            said = f"{path}: its tokenizer cannot be made (exit status {child.returncode}): {said}; {_REMEDY}"
        raise ModelError(said)


_REMEDY = (
    "put the file into a folder of its own beside the model's tokenizer.json and tokenizer_config.json, and name the "
    "folder"
)


def make_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file into the new folder `folder`. Raises ModelError."""
    header = read_gguf(path)
    kind, pre = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre")
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{path}: its tokenizer is of the kind {kind!r}, which cannot be read; {_REMEDY}")
    if kind == "gpt2" and pre not in {*_AS_GPT2, *_DIGITS_ALONE, *GGUF_PRE_TOKENIZER_SPLITS}:
        raise ModelError(f"{path}: its tokenizer splits text as {pre!r}, which is not known; {_REMEDY}")
    try:
        architecture, content, settings = get_gguf_tokenizer(str(path))
        backend, _ = convert_gguf_tokenizer(architecture, content)
        if kind == "gpt2" and pre in _DIGITS_ALONE:
            split_digits(backend)
        tokenizer: Any = TokenizersBackend(tokenizer_object=backend, **settings)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # Any exception of the library means that the tokenizer is damaged.
        logger.debug("%s has no tokenizer that can be read", path, exc_info=True)
        raise ModelError(
            f"{path}: its tokenizer cannot be read ({type(error).__name__}: {error}); {_REMEDY}"
        ) from error


def split_digits(tokenizer: Any) -> None:
    """Let a byte-level tokenizer of the tokenizers library take every digit alone first."""
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    configure_threads_environment()
    forbid_model_hub()
    try:
        make_tokenizer(args.gguf, args.folder)
    except ModelError as error:
        shutil.rmtree(args.folder, ignore_errors=True)
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
