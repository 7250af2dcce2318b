"""A GGUF file as transformers knows a model: its configuration and its tokenizer. Its numbers: `unpacked.py`.

transformers' own loader of GGUF is not used: it trusts the file's counts and offsets (gguf_header.py), and leaves out
part of the configuration (gguf_config.py). A tokenizer (gguf_tokenizer.py) is made once, in a process of its own, and
kept in

    <cache>/tokenizers/<SHA-256 of the file>/
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from inference_engine.config import (
    NO_CACHE,
    child_environment,
    configure_threads_environment,
    forbid_model_hub,
    why_no_cache,
)
from inference_engine.errors import ModelError
from inference_engine.models import gguf_tokenizer, gguf_vocabulary
from inference_engine.models.checksums import sha256_of
from inference_engine.models.folder import MAX_LAYERS, refused_as
from inference_engine.models.gguf_config import gguf_config
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.gguf_tokenizer import write_tokenizer
from inference_engine.models.gguf_vocabulary import REMEDY
from inference_engine.models.manifest import digest_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

# An import of transformers takes most of it; a vocabulary of 262,144 tokens without its merges takes 20 seconds.
MAX_TOKENIZER_SECONDS = 120.0

MADE_WITH = "made_with.json"


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
    with refused_as(f"{path}: not a configuration that {kind.__name__} can be made of"):
        config: PretrainedConfig = kind(**content)
    return config


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def gguf_tokenizer_folder(path: Path, cache: Path) -> Path:
    """A folder with the tokenizer of a GGUF file, made if the cache has none made like now. Raises ModelError."""
    if cache == NO_CACHE:
        raise ModelError(
            f"the tokenizer of {path.name} is made into a folder, and there is no cache folder, because "
            f"{why_no_cache()}; name one with --cache-dir"
        )
    folder = cache / "tokenizers" / digest_of(path, cache=cache)
    if _is_made_like_now(folder):
        return folder
    read_gguf(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".~", dir=folder.parent) as work:
            made = Path(work) / "tokenizer"
            make_tokenizer_folder(path, made)
            if not _is_made_like_now(folder):  # another process may have been faster
                if folder.is_dir():
                    folder.rename(Path(work) / "older")
                made.rename(folder)
    except OSError as error:
        if not _is_made_like_now(folder):
            raise ModelError(f"the tokenizer of {path.name} cannot be put into {folder.parent}: {error}") from error
    return folder


def _is_made_like_now(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MADE_WITH).read_text(encoding="utf-8")) == _made_with())
    except (OSError, ValueError):
        return False


def _made_with() -> dict[str, str]:
    """What a tokenizer's content follows from, beside the file."""
    libraries = {name: importlib.metadata.version(name) for name in ("tokenizers", "transformers")}
    files = (Path(gguf_tokenizer.__file__), Path(gguf_vocabulary.__file__))
    makers = {file.stem: sha256_of(file) for file in files}
    return {**makers, **libraries}


def make_tokenizer_folder(path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file into the new folder `folder`, in a process of its own. Raises ModelError."""
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
            f"{REMEDY}"
        ) from error
    if child.returncode != 0:
        said = (child.stderr.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        if not said.startswith(str(path)):
            said = f"{path}: its tokenizer cannot be made (exit status {child.returncode}): {said}; {REMEDY}"
        raise ModelError(said)


def make_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file into the new folder `folder`. Raises ModelError."""
    header = read_gguf(path)
    try:
        write_tokenizer(header, folder)
    except ModelError:
        raise
    except Exception as error:
        # Any exception of the libraries means that the tokenizer is damaged.
        logger.debug("%s has no tokenizer that can be read", path, exc_info=True)
        raise ModelError(f"{path}: its tokenizer cannot be read ({type(error).__name__}: {error}); {REMEDY}") from error
    (folder / MADE_WITH).write_text(json.dumps(_made_with()), encoding="utf-8")


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
