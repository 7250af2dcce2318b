"""One rank's part of a model: 1/N of its heads, of the numbers inside its layers, and of its vocabulary.

    q k v · gate up · head     rows of the matrix: each rank computes some of the outputs
    o · down                   columns: each rank computes a part of every output, and the parts are added up
    embedding                  the first rank's; the others look up a zero and get the states by the same sum

Each rank has a model of the same family, only narrower: what plans its steps cannot tell it from a small one.
Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.twin import text_generator
from inference_engine.errors import BackendError, ModelError
from inference_engine.kernels.quantised import QuantisedMatrix, joined
from inference_engine.models.checkpoint import Checkpoint, SafetensorsCheckpoint, text_name
from inference_engine.models.families import check_family
from inference_engine.models.families.list_writer import EMBEDDING, HEAD
from inference_engine.models.folder import grouping_of, layout_of
from inference_engine.models.layer_types import layer_types
from inference_engine.models.loader import LoadedModel, check_model, loaded, log_remarks, read_config, sizes
from inference_engine.models.open_checkpoint import open_checkpoint
from inference_engine.models.operations import NoStepListError
from inference_engine.models.places import check_places, reads_of, shapes_of
from inference_engine.models.quantised_layout import QuantisedLayout
from inference_engine.models.quantised_linear import QuantisedLinear
from inference_engine.models.quantised_model import parts_of, read_matrix

logger = logging.getLogger(__name__)

# Fields of a configuration that a rank has its share of.
_SHARED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
)
OF_COLUMNS = ("o_proj", "down_proj")
_SPLIT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "lm_head", *OF_COLUMNS)
_ENCODINGS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def narrowed(config: PretrainedConfig, ranks: int) -> PretrainedConfig:
    """The configuration of one rank's model. Raises BackendError for sizes that `ranks` does not divide."""
    own: Any = copy.deepcopy(config)
    own.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _SHARED:
        size = getattr(config, name, None)
        if not isinstance(size, int) or not size:
            continue
        if size % ranks:
            fits = [count for count in range(1, ranks) if size % count == 0][-1]
            raise BackendError(
                f"tensor_parallel={ranks} does not divide {name}, which is {size}: start with {fits}, or another model"
            )
        setattr(own, name, size // ranks)
    own.tie_word_embeddings, own.pad_token_id = False, None
    return own


def load_part(
    name_or_path: str, *, cache: Path, device: str, dtype: str, attention: str, rank: int, ranks: int
) -> LoadedModel:
    """Rank number `rank`'s part of a model; of the files it reads nothing else. Its vocab_size is the whole model's.

    Raises ModelError as `load_model` does, and BackendError for what cannot be split.
    """
    checked = check_model(name_or_path, cache=cache)
    config = read_config(checked)
    trained_positions, vocab_size = sizes(config, checked.folder)
    layout = None if checked.only_gguf else layout_of(checked.folder)
    if not checked.only_gguf and grouping_of(checked.folder) is not None:
        raise BackendError(
            f"{checked.folder}: matrices in MLX's layout are not split between ranks; start with the model's "
            "unquantised weights, a checkpoint in fp8, GPTQ or AWQ, or a GGUF file"
        )
    if rank == 0:
        log_remarks(checked)
    checkpoint = open_checkpoint(checked.stored) if layout is None else SafetensorsCheckpoint(checked.folder)
    model = _made_part(checkpoint, layout, config, dtype, attention, rank, ranks)
    return loaded(
        model, checked, trained_positions=trained_positions, vocab_size=vocab_size, dtype=dtype, device=device
    )


def _check_is_split(config: PretrainedConfig, ranks: int) -> None:
    """By the configuration alone. Raises BackendError."""
    why = ""
    try:
        check_family(config)
    except NoStepListError as error:
        why = str(error)
    if others := set(layer_types(config)) - {"full_attention", "sliding_attention"}:
        why = f"its layers of other kinds than attention ({', '.join(sorted(others))}) are not split yet"
    if why:
        raise BackendError(f"tensor_parallel={ranks}: {why}; start with tensor_parallel=1")


def _made_part(
    checkpoint: Checkpoint,
    layout: QuantisedLayout | None,
    config: PretrainedConfig,
    dtype_name: str,
    attention: str,
    rank: int,
    ranks: int,
) -> PreTrainedModel:
    """layout: of the matrices that are stored quantised, and stay so."""
    own, kind = text_generator(config)
    _check_is_split(own, ranks)
    narrow, dtype = narrowed(own, ranks), getattr(torch, dtype_name)
    try:
        with torch.device("meta"):
            whole, part = kind(copy.deepcopy(own)), kind(copy.deepcopy(narrow))
        shapes = {text_name(name): tuple(each.shape) for name, each in whole.state_dict().items()}
        head = HEAD if HEAD in checkpoint else EMBEDDING
        share = _Share(rank, ranks, [own.num_attention_heads, *2 * [own.num_key_value_heads]], narrow.head_dim)
        quantised: dict[str, str] = {}
        if layout is None:
            check_places(checkpoint, shapes_of(whole), reads_of(own))
        else:
            assert isinstance(checkpoint, SafetensorsCheckpoint)
            _, quantised = parts_of(checkpoint, layout, own)
        numbers: dict[str, Tensor] = {}
        for name, each in part.state_dict().items():
            stored, wanted = text_name(name), tuple(each.shape)
            if name.removesuffix(".weight") in quantised:
                numbers[name] = torch.zeros((), dtype=dtype).expand(wanted)  # which take no memory
            elif stored == EMBEDDING:
                numbers[name] = torch.zeros(wanted, dtype=dtype)
            elif stored == HEAD:
                numbers[name] = share.of(_numbers(checkpoint, head, shapes[HEAD]), HEAD, wanted).to(dtype)
            else:
                found = _parameter(checkpoint, stored, shapes[stored], wanted, share)
                is_added = stored.endswith(".bias") and stored.split(".")[-2] in OF_COLUMNS
                numbers[name] = torch.zeros_like(found) if is_added and rank else found
                if each.dtype == torch.get_default_dtype():
                    numbers[name] = numbers[name].to(dtype)
        model: PreTrainedModel = kind.from_pretrained(
            None, config=narrow, state_dict=numbers, dtype=dtype, attn_implementation=attention
        )
        for name, stem in quantised.items():
            assert layout is not None and isinstance(checkpoint, SafetensorsCheckpoint)
            linear: Any = model.get_submodule(name)
            matrix = read_matrix(checkpoint, layout, stem, *shapes[text_name(f"{name}.weight")])
            own_matrix = share.of_matrix(matrix, name, tuple(linear.weight.shape))
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, QuantisedLinear(own_matrix, linear.bias, dtype))
        embedded = _numbers(checkpoint, EMBEDDING, shapes[EMBEDDING]) if rank == 0 else torch.zeros(1, own.hidden_size)
        module: Any = model.get_input_embeddings()
        module.weight = torch.nn.Parameter(embedded.to(dtype, copy=True), requires_grad=False)
        module.num_embeddings = len(embedded)
    except (ModelError, BackendError):
        raise
    except Exception as error:
        logger.debug("%s cannot be loaded in parts", checkpoint.path, exc_info=True)
        raise ModelError(
            f"{checkpoint.path}: transformers cannot load a part of these weights with this configuration (log level "
            "DEBUG has the details)"
        ) from error
    return model


def _parameter(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], wanted: tuple[int, ...], share: _Share
) -> Tensor:
    if name in checkpoint or ".experts." not in name:
        return share.of(_numbers(checkpoint, name, shape), name, wanted)
    experts, outputs, inputs = shape
    layer, _, kind = name.rpartition(".")
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    found = []
    for expert in range(experts):
        for one in kinds:
            stored = f"{layer}.{expert}.{one}.weight"
            matrix = _numbers(checkpoint, stored, (outputs // len(kinds), inputs))
            found.append(share.of(matrix, stored, (wanted[1] // len(kinds), wanted[2])))
    return torch.cat(found).reshape(wanted)


def _numbers(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor as it is stored: a view of the file where numbers are, so that only what is used of it is read."""
    stored = checkpoint.tensor(name, shape)
    if stored.encoding not in _ENCODINGS or stored.row_order is not None or stored.added:
        return torch.from_numpy(checkpoint.numbers(name, shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the file is not written to
        return torch.from_numpy(stored.data).view(getattr(torch, _ENCODINGS[stored.encoding])).view(shape)


@dataclass(frozen=True, slots=True)
class _Share:
    """What rank number `rank` has. heads: of queries, keys and values, of `head_dim` numbers each."""

    rank: int
    ranks: int
    heads: Sequence[int]
    head_dim: int

    def of(self, whole: Tensor, name: str, wanted: Sequence[int]) -> Tensor:
        """Of `wanted` shape: its share of the dimension in which that is narrower; all of a tensor that is not."""
        if tuple(whole.shape) == tuple(wanted):
            return whole
        module = self._module(name)
        dim = next(dim for dim, (have, want) in enumerate(zip(whole.shape, wanted, strict=True)) if have != want)
        parts = torch.split(whole, self._outputs(module, whole.shape[dim]), dim=dim)
        return torch.cat([part.chunk(self.ranks, dim=dim)[self.rank] for part in parts], dim=dim)

    def of_matrix(self, whole: QuantisedMatrix, name: str, wanted: tuple[int, int]) -> QuantisedMatrix:
        """The same of a quantised one. Raises BackendError for groups of inputs of which ranks would have parts."""
        if whole.shape == wanted:
            return whole
        module, (outputs, inputs) = self._module(name), wanted
        if module in OF_COLUMNS:
            if whole.has_groups and inputs % whole.group:
                raise BackendError(
                    f"tensor_parallel={self.ranks}: each rank has {inputs} inputs of {name}, and {whole.group} share a "
                    f"scale in its file ({whole.format}): start with fewer ranks, or the model's unquantised weights"
                )
            return whole.columns(self.rank * inputs, inputs)
        first, found = 0, []
        for size in self._outputs(module, len(whole)):
            found.append(whole.rows(first + self.rank * (size // self.ranks), size // self.ranks))
            first += size
        made = joined(found)
        assert made is not None and len(made) == outputs
        return made

    def _module(self, name: str) -> str:
        """Raises BackendError for one that is not split."""
        last = name.rsplit(".", maxsplit=1)[-1]
        module = last if last in _SPLIT else name.split(".")[-2]
        if module not in _SPLIT:
            raise BackendError(
                f"tensor_parallel={self.ranks}: {name} is of all heads together, which is not split between ranks yet; "
                "start with tensor_parallel=1"
            )
        return module

    def _outputs(self, module: str, size: int) -> list[int]:
        """How many outputs each of the matrices has that are stored as one."""
        if module == "gate_up_proj":
            return [size // 2] * 2
        if module == "qkv_proj":
            return [count * self.head_dim for count in self.heads]
        return [size]
