"""What a model folder may contain: looked at before anything in it is opened, parsed or run.

A folder from somewhere else may try to run code (modules named by `auto_map`, pickles, adapters that point elsewhere),
to read outside itself (links) or to hang its reader (pipes). All of it is refused by name, whether or not the loader
would have touched it: a folder that is clean needs no argument about what transformers reads.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from inference_engine.errors import ModelError
from inference_engine.models.safetensors_header import check_safetensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# A configuration is kilobytes, an index of shards a few megabytes.
MAX_JSON_BYTES = 2**26

_CODE = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
_OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack")

_REFUSED_KEYS = {
    "auto_map": "it asks for code from the folder or a hub, which is never run; use a model of a built-in architecture",
    "quantization_config": "quantised checkpoints are not supported; use the model's unquantised weights",
    "compression_config": "quantised checkpoints are not supported; use the model's unquantised weights",
    "transformers_weights": f"weights are read from {WEIGHTS} or its shards only; rename the file and remove the key",
}
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")

# transformers would take the folder for a checkpoint of a distributed training run.
_DISTRIBUTED = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def list_files(folder: Path) -> tuple[str, ...]:
    """Names of all files, relative to `folder` and with slashes, sorted. Opens none of them.

    Raises ModelError for what is neither a file nor a folder, for links that are dangling or lead out, and for
    subfolders that cannot be read.
    """
    root = folder.resolve()
    names = []
    for parent, subfolders, files in os.walk(root, onerror=_raise_unreadable):
        for name in (*subfolders, *files):
            _check_link(Path(parent, name), root)
        for name in files:
            path = Path(parent, name)
            if not stat.S_ISREG(path.stat().st_mode):
                raise ModelError(f"{path}: a model folder holds plain files only; remove it")
            names.append(path.relative_to(root).as_posix())
    return tuple(sorted(names))


def check_names(folder: Path) -> None:
    """Refuse a folder for the names and kinds of its files: code, pickles, foreign formats, links out.

    Raises ModelError that names the file and the way out.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: no {CONFIG}; a model folder is one that transformers' save_pretrained wrote")
    for name in list_files(folder):
        path = folder / name
        lowered = name.lower()
        if lowered.endswith(_CODE):
            raise ModelError(f"{path}: code in a model folder is never run; use a built-in architecture, or remove it")
        if lowered.endswith(_PICKLES):
            raise ModelError(f"{path}: this format can run code when it is opened; keep {WEIGHTS} only, remove it")
        if lowered.endswith(_OTHER_WEIGHTS):
            raise ModelError(f"{path}: weights are loaded from safetensors only; convert it, or remove it")
        if Path(lowered).name == "adapter_config.json":
            raise ModelError(f"{path}: adapters are not supported; merge it into the model's weights, or remove it")
        if _DISTRIBUTED.fullmatch(Path(lowered).name):
            raise ModelError(f"{path}: checkpoints of distributed training are not supported; save it as {WEIGHTS}")


def check_content(folder: Path) -> None:
    """Refuse a folder for what its configuration asks for, or for weights that are not whole safetensors files.

    Reads configurations and headers of weights, not the weights. Comes after `check_names`. Raises ModelError.
    """
    for path in sorted(folder.glob("*config.json")):
        content = read_json(path)
        for key, value in _walk(content):
            if key in _REFUSED_KEYS and value is not None:
                raise ModelError(f"{path}: {key}: {_REFUSED_KEYS[key]}")
    config = read_json(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / CONFIG}: no model_type, so nobody can say what the weights mean")
    headers = {path.name: check_safetensors(path) for path in sorted(folder.glob("*.safetensors"))}
    tensors = sum(len(headers[name]) for name in weight_files(folder))
    for key, value in _walk(config):
        if key in _LAYER_COUNTS and isinstance(value, int) and value > tensors:
            # Building the model comes before filling it: an absurd count would hang there.
            raise ModelError(f"{folder / CONFIG}: {key} is {value}, but the weights hold {tensors} tensors")


def weight_files(folder: Path) -> tuple[str, ...]:
    """The files that hold the weights: one, or the shards of the index. Raises ModelError if any is missing."""
    if (folder / WEIGHTS).is_file():
        return (WEIGHTS,)
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(f"{folder}: no {WEIGHTS} and no {INDEX}; weights are loaded from safetensors only")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map")
    shards = set(weight_map.values())
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: {shard!r} is not the name of a safetensors file beside it")
        if not (folder / shard).is_file():
            raise ModelError(f"{folder / shard}: this shard is listed in {INDEX} but missing; copy the folder again")
    return tuple(sorted(shards))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of reasonable size. Raises ModelError for anything else."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} such a file may have")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _check_link(path: Path, root: Path) -> None:
    if not path.is_symlink():
        return
    way_out = "copy the folder with its links followed (cp -rL)"
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path}: a link that leads nowhere; {way_out}") from error
    if not target.is_relative_to(root):
        raise ModelError(f"{path}: a link that leads out of the folder, to {target}; {way_out}")


def _raise_unreadable(error: OSError) -> NoReturn:
    raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _walk(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key at every depth, with its value. A stack, not recursion: depth is the author's choice, not ours."""
    stack: list[Any] = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield from item.items()
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
