"""Checks of a model folder, before any file in it is opened.

    read       config.json, model.safetensors or the shards of its index; a tokenizer's files, by clients with text
               or, without these, one GGUF file, which has all of it
    ignored    the rest, never opened: code, pickles, other formats of the same weights, pictures, files of git and the
               hub. They are listed in the log and by doctor
    refused    files without which it would be another model (adapters, quantised weights but those of MLX's layout),
               links out, pipes

transformers never opens the folder itself: it loads from a temporary one with only the files that are read
(`loader.py`), so safety does not depend on which files transformers looks for.

Links may lead elsewhere in the folder. In a snapshot of the hub's cache they may also lead into the blobs beside it:

    models--org--name/snapshots/<commit>/model.safetensors -> ../../blobs/<hash> (-> ../../blobs/<ab>/<hash>)
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from inference_engine.errors import ModelError
from inference_engine.models.quantised_layout import QuantisedLayout, layout_in
from inference_engine.models.safetensors_header import check_safetensors

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GGUF_MAGIC = b"GGUF"  # the first bytes of a GGUF file
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF = "model.gguf"
GGUF_SUFFIX = ".gguf"
# As llama.cpp names the files of a split model.
_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.ASCII | re.IGNORECASE)
CHAT_TEMPLATE = "chat_template.jinja"
CONFIGURATION_FILES = (CONFIG, "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    "tekken.json",
)
_MORE_TEMPLATES = "additional_chat_templates/"
_OURS = ("manifest.json",)

_MOST_SAID = 240
_OF_CLASSES, _OF_TYPES = re.compile(r"\b\w+(?:Error|Exception): "), re.compile(r"got \w+ \(value: (.{,80}?)\)")
UNFIT = "transformers cannot load these weights with this configuration"

# A configuration is kilobytes, an index of shards a few megabytes.
MAX_JSON_BYTES = 2**26
# The deepest published models have 126. The admission test builds a small model of the same depth.
MAX_LAYERS = 1024
# The largest published models have a few hundred.
MAX_SHARDS = 4096
_SHARD = re.compile(r"[A-Za-z0-9_][\w.+ -]{0,200}\.safetensors", re.ASCII)

_CODE = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib")
_OTHER_WEIGHTS = (
    *(".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"),
    *(".gguf", ".h5", ".msgpack", ".onnx", ".safetensors"),
)
_MOST_LISTED = 6

_SHARED_BLOB = re.compile("[0-9a-f]{64}")
_SHARED_BLOBS_MARKER = ".huggingface-shared-blobs"

_REFUSED_KEYS = {
    "quantization_config": "quantised checkpoints are not supported; use the model's unquantised weights",
    "compression_config": "quantised checkpoints are not supported; use the model's unquantised weights",
    "transformers_weights": f"weights are read from {WEIGHTS} or its shards only; rename the file and remove the key",
    "configuration_files": f"it leads to other configurations; make the one that fits {CONFIG}, and remove the key",
}
_CODE_KEY = "auto_map"
# Of MLX's layout.
_GROUPS = (32, 64, 128)
_BITS = (2, 3, 4, 5, 6, 8)
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")

# transformers would take the folder for a checkpoint of a distributed training run.
_DISTRIBUTED = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def list_files(folder: Path) -> tuple[str, ...]:
    """Names of all files, relative to `folder` and with slashes, sorted. Opens none of them.

    Raises ModelError for anything but files and folders, for links that are dangling or lead out, and for subfolders
    that cannot be read.
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


def check_names(folder: Path) -> tuple[str, ...]:
    """Refuse a folder for the names and kinds of its files. Returns the names of the ignored files, code and other
    weights first.

    Raises ModelError that names the file and the remedy.
    """
    if folder.is_file():
        raise ModelError(f"{folder}: a file, and no GGUF file; name one, or the folder of a model")
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: no {CONFIG}; a model folder is one that transformers' save_pretrained wrote")
    names = list_files(folder)
    for name in names:
        path = folder / name
        if name.lower() == "adapter_config.json":
            raise ModelError(f"{path}: adapters are not supported; merge it into the model's weights, or remove it")
        if _DISTRIBUTED.fullmatch(name.lower()):
            raise ModelError(f"{path}: checkpoints of distributed training are not supported; save it as {WEIGHTS}")
    try:
        weights = weights_read(folder)
    except ModelError:  # raised again where they are read
        weights = (INDEX,)
    kept = (GGUF,) if (folder / _OURS[0]).is_file() else ()  # beside safetensors of the same numbers, by `fetch`
    read = {*CONFIGURATION_FILES, *TOKENIZER_FILES, *_OURS, *weights, *kept}
    ignored = [name for name in names if name not in read and not name.startswith(_MORE_TEMPLATES)]
    return tuple(sorted(ignored, key=lambda name: (not _may_be_missed(name), name)))


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` is a file of, by their names alone: itself, or all parts in their order."""
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if match is None or count < 2 or not 1 <= int(match["number"]) <= count:
        return (path,)
    return tuple(
        path.with_name(f"{match['name']}-{number:05}-of-{match['count']}{match['suffix']}")
        for number in range(1, count + 1)
    )


def name_of_gguf(path: Path) -> str:
    """The name of a file without what says that it is GGUF, and which part."""
    match = _PART.fullmatch(path.name)
    return match["name"] if match and len(gguf_parts(path)) > 1 else path.stem


def has_safetensors(folder: Path) -> bool:
    """Whether a folder seems to have weights in that format, of one file or of shards."""
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no safetensors, of a split one the first; None if it has those, or neither.

    Raises ModelError if there are several, and as `list_files` does.
    """
    if not folder.is_dir() or has_safetensors(folder):
        return None
    # Looked for here alone first: a folder of anything else, such as a home folder, is not searched through.
    names = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(GGUF_SUFFIX))
    if not names:
        return None
    names = [name for name in list_files(folder) if name in names]
    models = list(dict.fromkeys(gguf_parts(folder / name)[0].name for name in names))
    if len(models) > 1:
        listed = ", ".join(models[:_MOST_LISTED])
        raise ModelError(f"{folder}: {len(models)} GGUF files ({listed}); name the one to serve, with its folder")
    return folder / models[0] if models else None


def describe_ignored(names: Sequence[str]) -> str:
    """One line for the log about ignored code and weights among `names` of `check_names`; "" if there are none."""
    missed = [name for name in names if _may_be_missed(name)]
    if not missed:
        return ""
    more = f" and {len(missed) - _MOST_LISTED} more" if len(missed) > _MOST_LISTED else ""
    return f"code and other formats are ignored: {', '.join(missed[:_MOST_LISTED])}{more}"


def check_configuration(folder: Path) -> None:
    """Refuse a folder for its configuration. Reads no weights. Comes after `check_names`.

    Raises ModelError that names the file, the key and the remedy.
    """
    for path in sorted(folder.glob("*config.json")):
        content = read_json(path)
        if path.name == CONFIG and (grouping_in(content) is not None or layout_in(content) is not None):
            content = without_grouping(content)
        # At the top level it names code for classes that may also be built in; the code is never run.
        nested = [value for key, value in content.items() if key != _CODE_KEY]
        for key, value in (*content.items(), *_walk(nested)):
            if key in _REFUSED_KEYS and value is not None:
                raise ModelError(f"{path}: {key}: {_REFUSED_KEYS[key]}")
        if any(key == _CODE_KEY and value is not None for key, value in _walk(nested)):
            raise ModelError(
                f"{path}: {_CODE_KEY} of a part of the model: it asks for code from the folder or a hub, which is "
                "never run; use a model of a built-in architecture"
            )
    config = read_json(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder / CONFIG}: no model_type, so it is unknown what the weights mean")
    for key, value in _counts_of_layers(config):
        if value > MAX_LAYERS:
            raise ModelError(
                f"{folder / CONFIG}: {key} is {value}, more than the {MAX_LAYERS} layers that can be served"
            )


def grouping_in(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How matrices are quantised in MLX's layout (`grouped.py`), as the configuration says; None: it is another layout.

    mlx-lm writes it twice, the second time under the key that transformers has for others. Raises ModelError for kinds
    that are not read.
    """
    found = config.get("quantization")
    if found is None or config.get("quantization_config") not in (None, found):
        return None
    own = [found, *(value for value in found.values() if isinstance(value, dict))] if isinstance(found, dict) else [{}]
    for each in own:
        mode, group, bits = each.get("mode", "affine"), each.get("group_size"), each.get("bits")
        if mode != "affine" or group not in _GROUPS or bits not in _BITS:
            raise ModelError(
                f"{CONFIG}: quantization: mode {mode!r} with {bits!r} bits in groups of {group!r} is not read; affine "
                f"with {', '.join(map(str, _BITS))} bits in groups of {', '.join(map(str, _GROUPS))} is"
            )
    quantization: Mapping[str, Any] = found
    return quantization


def grouping_of(folder: Path) -> Mapping[str, Any] | None:
    """`grouping_in` the configuration of a folder; None without one."""
    path = folder / CONFIG
    return grouping_in(read_json(path)) if path.is_file() else None


def layout_of(folder: Path) -> QuantisedLayout | None:
    """`layout_in` the configuration of a folder; None without one."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    content = read_json(path)
    return None if grouping_in(content) is not None else layout_in(content)


def without_grouping(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}


def asks_for_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Classes of custom code in a configuration, by their auto class, such as AutoModelForCausalLM."""
    asked = config.get(_CODE_KEY)
    if not isinstance(asked, dict):
        return {}
    return {str(use): name.rpartition(".")[2] for use, name in asked.items() if isinstance(name, str)}


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without references to code or attention functions, and without what says how matrices are
    quantised."""
    if grouping_in(config) is not None or layout_in(config) is not None:
        config = without_grouping(config)
    left_out = (_CODE_KEY, "attn_implementation", "_attn_implementation", "experts_implementation")
    return {key: value for key, value in config.items() if key not in left_out}


def check_weights(folder: Path) -> None:
    """Refuse weights that are not whole safetensors files, each tensor in one of them. Reads their headers. Comes after
    `check_configuration`."""
    _check_one_set(folder)
    files = weight_files(folder)
    places: dict[str, str] = {}
    for file in files:
        for name in check_safetensors(folder / file):
            if (other := places.setdefault(name, file)) != file:
                raise ModelError(
                    f"{folder}: {name} is in {other} and in {file}; the shards are of different models or versions, "
                    "copy the folder again"
                )
    if files != (WEIGHTS,):
        missing = sorted(set(read_json(folder / INDEX)["weight_map"]) - set(places))
        if missing:
            raise ModelError(
                f"{folder}: {missing[0]} is listed in {INDEX}, and no shard has it; the shards are of another model or "
                "version, copy the folder again"
            )
    for key, value in _counts_of_layers(read_json(folder / CONFIG)):
        if value > len(places):
            raise ModelError(f"{folder / CONFIG}: {key} is {value}, but the weights hold {len(places)} tensors")


def _check_one_set(folder: Path) -> None:
    """Raise ModelError for one file of weights beside all shards of another set.

    transformers takes the one file. It may be left of an older version, and so may the shards.
    """
    if not (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return
    shards = shards_listed(folder / INDEX)
    if shards != (WEIGHTS,) and all((folder / shard).is_file() for shard in shards):
        raise ModelError(
            f"{folder}: two sets of weights: {WEIGHTS}, and the {len(shards)} shards of {INDEX}; remove one of them, "
            f"the shards together with {INDEX}"
        )


def weight_files(folder: Path) -> tuple[str, ...]:
    """The files that hold the weights: one, or the shards of the index. Raises ModelError if any is missing."""
    if (folder / WEIGHTS).is_file():
        return (WEIGHTS,)
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(
            f"{folder}: no {WEIGHTS} and no {INDEX}{_others(folder)}; weights are loaded from safetensors only"
        )
    shards = shards_listed(index)
    for shard in shards:
        if not (folder / shard).is_file():
            raise ModelError(f"{folder / shard}: this shard is listed in {INDEX} but missing; copy the folder again")
    return shards


def shards_listed(index: Path) -> tuple[str, ...]:
    """The names of the shards in an index, sorted. Raises ModelError for an invalid file name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise ModelError(f"{index}: {shard!r} is not the name of a safetensors file beside it")
    shards = tuple(sorted(set(weight_map.values())))
    if len(shards) > MAX_SHARDS:
        raise ModelError(f"{index}: {len(shards)} shards, more than the {MAX_SHARDS} that are read")
    return shards


def weights_read(folder: Path) -> tuple[str, ...]:
    """The files of `weight_files`, and the index if there are shards."""
    names = weight_files(folder)
    return names if names == (WEIGHTS,) else (INDEX, *names)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of reasonable size. Raises ModelError for anything else."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} such a file may have")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}; get the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}; get the file again")
    return content


@contextmanager
def refused_as(says: str) -> Iterator[None]:
    """Any error of a library in here means that a file is not valid: it becomes a ModelError that says so, and why.

    A ModelError stays as it is. Details are in the log.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        logger.debug("%s", says, exc_info=True)
        raise ModelError(f"{says}{reason_of(error)} (log level DEBUG has the details)") from error


def reason_of(error: Exception) -> str:
    """What a library says of a field or a value of a file, with a colon before it; "" of what is about its own code.

    In a line, and characters that a terminal would obey are escaped: it may quote the file.
    """
    said = repr(" ".join(str(error).split()))[1:-1]
    if not isinstance(error, KeyError) and "alidation error" not in said:
        return ""
    said = _OF_CLASSES.sub("", _OF_TYPES.sub(r"got \1", said))
    return f": {said if len(said) <= _MOST_SAID else f'{said[:_MOST_SAID]}…'}"


def _may_be_missed(name: str) -> bool:
    return name.lower().endswith((*_CODE, *_OTHER_WEIGHTS)) and not name.startswith(".")


def _others(folder: Path) -> str:
    """Weights in other formats at the top, for a refusal."""
    found = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(_OTHER_WEIGHTS))
    return f" ({', '.join(found[:3])} cannot be used; let save_pretrained write the model again)" if found else ""


def _counts_of_layers(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(key, value) for key, value in _walk(config) if key in _LAYER_COUNTS and isinstance(value, int)]


def _check_link(path: Path, root: Path) -> None:
    if not path.is_symlink():
        return
    remedy = "copy the folder with its links followed (cp -rL)"
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path}: a link that leads nowhere; {remedy}") from error
    if not target.is_relative_to(root) and not _is_blob_of(root, target) and not _is_shared_blob(root, path, target):
        raise ModelError(f"{path}: a link that leads out of the folder, to {target}; {remedy}")


def _is_blob_of(root: Path, target: Path) -> bool:
    """Is `target` a file among the blobs of the cache entry that `root` is a snapshot of? Both without links."""
    entry = root.parent.parent
    is_snapshot = root.parent.name == "snapshots" and entry.name.startswith("models--")
    return is_snapshot and target.parent == entry / "blobs" and target.is_file()


def _is_shared_blob(root: Path, path: Path, target: Path) -> bool:
    """Does `path` lead, through a blob of its own cache entry, to a file in the store that cache entries share?

    huggingface_hub keeps it at `<cache>/blobs/<two digits>/<hash>`, and marks the folder as its own.
    """
    entry = root.parent.parent
    store = entry.parent / "blobs"
    first = Path(os.path.normpath(path.parent / path.readlink()))
    is_snapshot = root.parent.name == "snapshots" and entry.name.startswith("models--")
    return (
        is_snapshot
        and first.parent == entry / "blobs"
        and _SHARED_BLOB.fullmatch(target.name) is not None
        and target.parent == store / target.name[:2]
        and (store / _SHARED_BLOBS_MARKER).is_file()
        and target.is_file()
    )


def _raise_unreadable(error: OSError) -> NoReturn:
    raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _walk(content: Mapping[str, Any] | Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every key at every depth, with its value. A stack, not recursion: files may be nested arbitrarily deep."""
    stack: list[Any] = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield from item.items()
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
