"""From a name, a folder or a GGUF file to a model in memory: checked first, mapped rather than copied, ready for
inference.

Only safetensors and GGUF are read, only built-in architectures are built, nothing is downloaded and no code of the
folder runs. No tokenizer is loaded: the runtime never sees text.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_engine.config import did_you_mean, forbid_model_hub, hub_cache, in_full
from inference_engine.errors import BackendError, ModelError
from inference_engine.models.checksums import sha256_of
from inference_engine.models.fetch import check_fetched, convert_for_torch, model_folder, pinned_as
from inference_engine.models.folder import (
    CONFIG,
    GGUF,
    GGUF_MAGIC,
    GGUF_SUFFIX,
    INDEX,
    UNFIT,
    asks_for_code,
    check_configuration,
    check_names,
    check_weights,
    describe_ignored,
    gguf_in,
    gguf_parts,
    grouping_of,
    layout_of,
    name_of_gguf,
    read_json,
    refused_as,
    weight_files,
    weights_read,
    without_code,
)
from inference_engine.models.hub import hub_model, name_of_snapshot, snapshot
from inference_engine.models.manifest import Manifest, check_manifest, has_manifest, is_ours
from inference_engine.models.registry import is_known, known_model, known_names
from inference_engine.models.safetensors_header import check_safetensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from inference_engine.models.checkpoint import Checkpoint, SafetensorsCheckpoint

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16")

# What torch takes for a number, and what it does of masks and counters, which are none.
_FLOATS = ("F32", "F16", "BF16", "F64", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_WHOLE = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
_EXPERTS = ".experts."

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedModel:
    """A transformers model in evaluation mode, with its facts.

    trained_positions: the context length it was trained for. weights_sha256: digest of the weights (for shards, of the
    list of their digests), if the folder has a manifest.
    """

    model: PreTrainedModel
    model_id: str
    folder: Path
    trained_positions: int
    vocab_size: int
    dtype: str
    device: str
    weights_sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """A model whose file names and configuration were checked, but not its weights.

    gguf: its GGUF file, of a split one the first; None without. only_gguf: that is all of it, and lies in `folder`
    beside whatever else; else it has the same numbers as the folder's safetensors. ignored: names of files that are
    never opened; code and other weights first.
    """

    model_id: str
    folder: Path
    gguf: Path | None = None
    only_gguf: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def stored(self) -> Path:
        """What `open_checkpoint` reads: the GGUF file, or else the folder of safetensors."""
        return self.gguf or self.folder

    @property
    def weights(self) -> tuple[Path, ...]:
        """Every file that weights are read from. Raises ModelError if one of the folder's is missing."""
        files = () if self.only_gguf else tuple(self.folder / name for name in weight_files(self.folder))
        return files if self.gguf is None else (*files, *gguf_parts(self.gguf))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedFolder(FoundModel):
    """A model that passed every check. manifest: None for one that came without."""

    manifest: Manifest | None


def find_model(name_or_path: str, *, cache: Path) -> FoundModel:
    """Find a model and check its files and configuration, without reading weights. Raises ModelError.

    A known name comes before a folder of that name, and a folder before a name of the hub, which is looked up in the
    hub's cache on this machine.
    """
    try:
        folder = _locate(name_or_path, cache)
        if (gguf := _only_gguf(folder)) is not None:
            from inference_engine.models.gguf_model import check_gguf

            check_gguf(gguf)
            name = name_of_gguf(gguf).strip(".") or "model"
            if is_ours(folder):
                name = check_manifest(folder, cache=cache, thorough=False, reads_weights=False).model
            elif folder.is_dir():
                name = name_of_snapshot(folder.resolve()) or name
            where = gguf.parent.resolve()
            # Files of a split model find each other by their names, which what they link to need not have.
            stored = gguf.resolve() if len(gguf_parts(gguf)) == 1 else where / gguf.name
            return FoundModel(model_id=name, folder=where, gguf=stored, only_gguf=True)
        ignored = check_names(folder)
        gguf = None
        if has_manifest(folder):
            manifest = check_manifest(folder, cache=cache, thorough=False, reads_weights=False)
            gguf = folder.resolve() / GGUF if GGUF in manifest.files else None
        check_configuration(folder)
        folder = folder.resolve()
    except OSError as error:
        raise ModelError(f"{name_or_path}: cannot be read: {error}") from error
    return FoundModel(model_id=name_of_snapshot(folder) or folder.name, folder=folder, gguf=gguf, ignored=ignored)


def check_model(name_or_path: str, *, cache: Path, thorough: bool = False) -> CheckedFolder:
    """Find a model and check its folder, weights too, without building anything. Raises ModelError.

    thorough: hash the weights even if size and times are those of the last hashing.
    """
    try:
        manifest = (
            check_fetched(known_model(name_or_path), cache, thorough=thorough) if is_known(name_or_path) else None
        )
        found = find_model(name_or_path, cache=cache)
        if manifest is None and is_ours(located := _locate(name_or_path, cache)):
            manifest = check_manifest(located, cache=cache, thorough=thorough)
        if found.only_gguf:
            from inference_engine.models.open_checkpoint import open_checkpoint

            open_checkpoint(found.stored)
        else:
            check_weights(found.folder)
    except OSError as error:
        raise ModelError(f"{name_or_path}: cannot be read: {error}") from error
    return CheckedFolder(
        model_id=manifest.model if manifest else found.model_id,
        folder=found.folder,
        gguf=found.gguf,
        only_gguf=found.only_gguf,
        ignored=found.ignored,
        manifest=manifest,
    )


def read_config(found: FoundModel) -> PretrainedConfig:
    """The configuration as an object of a built-in class of transformers. Raises ModelError."""
    forbid_model_hub()
    if found.only_gguf:
        from inference_engine.models.gguf_model import read_gguf_config

        return read_gguf_config(found.stored)
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from inference_engine.models.configuration import configuration_of

    path = found.folder / CONFIG
    content = configuration_of(found.folder).content
    if content["model_type"] not in CONFIG_MAPPING:
        code = " without the code that it brings, which is never run" if asks_for_code(content) else ""
        raise ModelError(
            f"{path}: transformers {transformers.__version__} has no model of type {content['model_type']!r}{code}"
        )
    own, built_in = asks_for_code(content).get("AutoModelForCausalLM"), _classes(content["model_type"])
    if own is not None and built_in and own not in built_in:
        raise ModelError(
            f"{path}: the model has a class {own} of its own, in code that is never run; what is built in for its type "
            f"{content['model_type']!r} is {built_in[0]}, which may not be the same model"
        )
    readable = f"that transformers {transformers.__version__} can read"
    with (
        refused_as(f"{path}: not a configuration of the type {content['model_type']!r} {readable}"),
        _alone(content, found.folder, ()) as folder,
        _without_its_warnings(),
    ):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text: Any = config.get_text_config()
    if isinstance(text, dict):
        raise ModelError(
            f"{path}: text_config, and the type {content['model_type']!r} has no such part, so transformers would not "
            "read it; put what is in it in its place"
        )
    types, window = getattr(text, "layer_types", None) or (), getattr(text, "sliding_window", None)
    if "sliding_attention" in types and not window:
        unused = ", since use_sliding_window is false" if getattr(text, "use_sliding_window", True) is False else ""
        raise ModelError(
            f"{path}: layer_types has layers of sliding_attention, and sliding_window is {window}{unused}; one of them "
            "is wrong, get the file again"
        )
    return config


@contextmanager
def _without_its_warnings() -> Iterator[None]:
    """What transformers finds odd in a configuration or in tensors is refused or remarked on here, once and by name."""
    from transformers.utils import logging as its_logging

    level = its_logging.get_verbosity()
    its_logging.set_verbosity_error()
    try:
        yield
    finally:
        its_logging.set_verbosity(level)


def log_remarks(found: FoundModel) -> None:
    """What an operator should know of a model's files that are about to be served."""
    ignored = describe_ignored(found.ignored)
    for line in (*([ignored] if ignored else []), *remarks(found)):
        logger.info("%s: %s", found.model_id, line)


def remarks(found: FoundModel) -> tuple[str, ...]:
    """What its files say one way here and another there, and what was decided; keys that are not known."""
    from inference_engine.models.configuration import configuration_of

    return (*configuration_of(found.stored if found.only_gguf else found.folder).notes, *_without_field(found))


def _without_field(found: FoundModel) -> tuple[str, ...]:
    """Names keys that are no field of transformers' class, of families that have no table of their own."""
    from inference_engine.models.configuration import configuration_of
    from inference_engine.models.families import FAMILIES
    from inference_engine.models.file_keys import CONFIG_KEYS, in_a_line, unlisted

    if found.only_gguf or (content := configuration_of(found.folder).content)["model_type"] in FAMILIES:
        return ()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[content["model_type"]]
    known = {*CONFIG_KEYS, *inspect.signature(kind).parameters, *kind.attribute_map, *kind.sub_configs}
    unknown = unlisted(content, dict.fromkeys(known, ("", "")))
    return (f"{CONFIG}: keys that are not known: {in_a_line(unknown)}",) if unknown else ()


def sizes(config: PretrainedConfig, folder: Path) -> tuple[int, int]:
    """The trained positions and the vocabulary size of a configuration. Raises ModelError if either is missing."""
    text = config.get_text_config()
    return _positive(text, "max_position_embeddings", folder), _positive(text, "vocab_size", folder)


def load_model(
    name_or_path: str,
    *,
    cache: Path,
    device: str = "cpu",
    dtype: str = "float32",
    attention: str = "eager",
    unpacks_groups: bool = False,
) -> LoadedModel:
    """Check a model's files and load it.

    attention: the name of an attention function registered in transformers. On the CPU, in the dtype of the files, the
    weights are memory-mapped; in another dtype or on another device they are copied, and from a GGUF file always.
    unpacks_groups: weights in MLX's layout are made to numbers, as calibrating needs them; without it they are refused.

    A known model that has not been converted yet is, if it is named (`convert_for_torch`). Where that cannot be done,
    because the cache is read only for example, its GGUF file is unpacked, to the same numbers.

    Raises ModelError if the folder is missing, unsafe, damaged or does not fit its configuration, BackendError if the
    device is missing.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if is_known(name_or_path):
        try:
            convert_for_torch(name_or_path, cache)
        except ModelError as error:  # if it cannot be read either, that is said below
            logger.warning("weights of %s are unpacked in memory, for no file can be mapped: %s", name_or_path, error)
    checked = check_model(name_or_path, cache=cache)
    config = read_config(checked)
    trained_positions, vocab_size = sizes(config, checked.folder)
    is_grouped = not checked.only_gguf and grouping_of(checked.folder) is not None
    if is_grouped and not unpacks_groups:
        raise ModelError(
            f"{checked.folder}: its matrices are quantised in MLX's layout, which MLX alone runs: serve it with "
            "--device mlx; what runs on torch needs the model's unquantised weights or a GGUF file"
        )

    import torch
    from transformers.utils import logging as library_logging

    _check_device(device)
    library_logging.disable_progress_bar()
    log_remarks(checked)
    if checked.only_gguf or is_grouped:
        from inference_engine.models.open_checkpoint import open_checkpoint
        from inference_engine.models.unpacked import load_unpacked

        stored = open_checkpoint(checked.stored if checked.only_gguf else checked.folder)
        model = load_unpacked(stored, config, getattr(torch, dtype), attention)
    elif (layout := layout_of(checked.folder)) is not None:
        from inference_engine.models.quantised_model import load_quantised

        model = load_quantised(checked.folder, layout, config, getattr(torch, dtype), attention)
    else:
        model = _from_pretrained(checked.folder, config, getattr(torch, dtype), attention)
    return loaded(
        model, checked, trained_positions=trained_positions, vocab_size=vocab_size, dtype=dtype, device=device
    )


def loaded(
    model: PreTrainedModel, checked: CheckedFolder, *, trained_positions: int, vocab_size: int, dtype: str, device: str
) -> LoadedModel:
    """The model, read from `checked`, for inference on `device`."""
    model.requires_grad_(requires_grad=False)
    if device != "cpu":
        model.to(device)
    return LoadedModel(
        model=model.eval(),
        model_id=checked.model_id,
        folder=checked.folder,
        trained_positions=trained_positions,
        vocab_size=vocab_size,
        dtype=dtype,
        device=device,
        weights_sha256=weights_digest(checked) if checked.manifest else None,
    )


def tokenizer_folder(name_or_path: str, cache: Path) -> Path:
    """A checked folder to load the model's tokenizer from, for clients that have text. Raises ModelError.

    A GGUF file has one, which is made into a folder of the cache when it is asked for first; one that lies beside it in
    a folder that was named comes before.
    """
    checked = check_model(name_or_path, cache=cache)
    if (folder := own_tokenizer(checked, name_or_path, cache)) is not None:
        return folder
    if checked.only_gguf:
        from inference_engine.models.gguf_model import gguf_tokenizer_folder

        return gguf_tokenizer_folder(checked.stored, cache)
    raise ModelError(f"{checked.folder}: holds no tokenizer ({', '.join(_TOKENIZERS)})")


def own_tokenizer(found: FoundModel, name_or_path: str, cache: Path) -> Path | None:
    """The model's folder if it holds the tokenizer; None if there is none, or a GGUF file alone was named."""
    has_tokenizer = any((found.folder / name).is_file() for name in _TOKENIZERS)
    is_its = has_tokenizer and (not found.only_gguf or _locate(name_or_path, cache).is_dir())
    return found.folder if is_its else None


def _locate(name_or_path: str, cache: Path) -> Path:
    if is_known(name_or_path):
        folder = model_folder(name_or_path, cache)
        if not folder.is_dir():
            raise ModelError(f"{name_or_path} is not fetched yet; get it with: kakeya models fetch {name_or_path}")
        return folder
    folder = in_full(name_or_path)
    if folder.exists():
        return folder
    if (named := hub_model(name_or_path)) is not None:
        return snapshot(named, hub_cache())
    raise ModelError(
        f"{name_or_path}: neither a known model ({', '.join(known_names())}), nor a folder, nor a GGUF file, nor a "
        f"name of the hub (org/name){did_you_mean(name_or_path, known_names())}"
    )


def _only_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a folder has and no safetensors; None for other models.

    A file is one by its name or by its first bytes: some programs keep them under names of their own.
    """
    if not path.is_file():
        return gguf_in(path)
    if path.name.lower().endswith(GGUF_SUFFIX):
        return gguf_parts(path)[0]
    with path.open("rb") as file:
        return path if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC else None


def _classes(model_type: str) -> tuple[str, ...]:
    """Names of transformers' classes that generate text with a model of this type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


@contextmanager
def _alone(content: Mapping[str, Any], folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """A temporary folder to load from: the configuration without references to code, the index without what else it
    says, and links to the other `names`."""
    config = json.dumps(without_code(content))
    with ExitStack() as stack:
        try:
            alone = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kakeya-")))
            (alone / CONFIG).write_text(config, encoding="utf-8")
            for name in names:
                if name == INDEX:
                    # transformers does not load without `metadata`, of which it needs nothing.
                    shards = {"metadata": {}, "weight_map": read_json(folder / INDEX)["weight_map"]}
                    (alone / INDEX).write_text(json.dumps(shards), encoding="utf-8")
                else:
                    (alone / name).symlink_to(folder / name)
        except OSError as error:
            raise ModelError(
                f"{folder} is loaded through a temporary folder of links, which cannot be made "
                f"({error.strerror or error}); name a place for it with TMPDIR"
            ) from error
        yield alone


def check_tensors(folder: Path, config: PretrainedConfig) -> None:
    """Raise ModelError unless transformers would load these safetensors with this configuration. Reads no weights."""
    import torch

    from inference_engine.models.places import generator_of

    own, kind = generator_of(config)
    tensors = {
        name: torch.empty(each["shape"], device="meta")
        for file in weight_files(folder)
        for name, each in check_safetensors(folder / file).items()
    }

    def load(_: Path, given: Mapping[str, Any]) -> Any:
        return kind.from_pretrained(None, config=own, state_dict=tensors, device_map="meta", **given)

    _fitting(folder, config, load)


def _from_pretrained(folder: Path, config: PretrainedConfig, dtype: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    def load(alone: Path, given: Mapping[str, Any]) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            alone,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            **given,
        )

    return _fitting(folder, config, load)


def _fitting(folder: Path, config: PretrainedConfig, load: Callable[[Path, Mapping[str, Any]], Any]) -> Any:
    """The model that `load` makes of a folder that is safe to open, with more arguments. Raises ModelError."""
    from inference_engine.models.checkpoint import BESIDE_OTHERS, SafetensorsCheckpoint, text_name
    from inference_engine.models.configuration import configuration_of
    from inference_engine.models.places import generator_of

    files = SafetensorsCheckpoint(folder)  # raises if two tensors are one of the model; transformers takes either
    configuration = configuration_of(folder)
    weights = weights_read(folder)
    _check_places(files, config)
    types = {name: files.stored(name).encoding for name in files.names() if not name.startswith(configuration.left_out)}
    others = {name: kind for name, kind in types.items() if kind not in _FLOATS}
    _refuse_types(files, [name for name, kind in others.items() if kind not in _WHOLE])
    given: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True}  # refused below, by name
    if "text_config" not in generator_of(config)[1].config_class.sub_configs:  # a class of text alone
        given["key_mapping"] = {f"^{re.escape(root)}": own for root, own in BESIDE_OTHERS}
    with (
        refused_as(f"{folder}: {UNFIT}"),
        _alone(configuration.content, folder, weights) as alone,
        _without_its_warnings(),
    ):
        model, info = load(alone, given)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = {key[0] if isinstance(key, tuple) else key: str(key) for key in info[kind]}
        if keys := sorted(said for name, said in names.items() if not name.startswith(configuration.left_out)):
            raise ModelError(
                f"{folder}: the weights do not fit config.json: {len(keys)} {kind.replace('_', ' ')}, "
                f"first {keys[0]}; the files are of different models or versions"
            )
    floating = {text_name(name) for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    _refuse_types(files, [name for name in others if name in floating or _EXPERTS in name])
    return model


def _refuse_types(files: SafetensorsCheckpoint, names: Sequence[str]) -> None:
    """Raise ModelError if there is any name. transformers takes codes of numbers for numbers, or says nothing."""
    for name in names:
        raise ModelError(
            f"{files.path}: {name} is stored as {files.stored(name).encoding}, which no number of a model is; "
            f"{', '.join(_FLOATS)} can be read: use the model's unquantised weights"
        )


def _check_places(files: Checkpoint, config: PretrainedConfig) -> None:
    """Of a family with a list of operations. transformers would leave out some tensors unsaid, and name none of
    others."""
    import torch

    from inference_engine.models.families import FAMILIES
    from inference_engine.models.places import check_places, generator_of, reads_of, shapes_of

    if (text := config.get_text_config()).model_type in FAMILIES:
        with refused_as(f"{files.path}: {UNFIT}"), torch.device("meta"):
            own, kind = generator_of(config)
            shapes = shapes_of(kind(copy.deepcopy(own)))
        check_places(files, shapes, reads_of(text))


def _positive(config: Any, name: str, folder: Path) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder}: config.json: {name} is {value!r}, must be a positive integer")
    return value


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = "torch, which runs this, does not know it" if device == "mlx" else str(error).splitlines()[0]
        raise BackendError(f"device {device!r} cannot be used here: {reason}; start with --device cpu") from error


def weights_digest(checked: CheckedFolder) -> str:
    """SHA-256 of the weights (for shards and parts, of the list of their digests): from the manifest, or computed now.

    Of safetensors where there is a GGUF file of the same numbers, too: trained codecs and drafters name it. That of a
    known model is in the registry, so it is the same before the file is converted.
    """
    if checked.manifest and (known := pinned_as(checked.manifest)) is not None:
        return known.weights_sha256
    if checked.only_gguf:
        digests = [sha256_of(path) for path in gguf_parts(checked.stored)]
    else:
        digests = [
            checked.manifest.files[name].sha256 if checked.manifest else sha256_of(checked.folder / name)
            for name in weight_files(checked.folder)
        ]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
