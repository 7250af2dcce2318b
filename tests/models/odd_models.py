"""Folders and files of tiny models that are odd in one way each, and the model that each of them is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.gguf_layouts import SMALL
from tests.models.gguf_tensors import without_dimensions_of_1
from tests.models.test_quantised_checkpoints import GPTQ, in_gptq
from tests.models.tiny_gguf import tiny_model, write_gguf

Tensors = dict[str, Tensor]
Config = dict[str, Any]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ALL = ("torch", "native", "mlx")


@dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """make: writes it into a new folder, and returns the model that it is, or None: the one that transformers loads.

    name: what is given to the runtime, in the folder. served_by: the others refuse it, with a message like `refusal`.
    note: what the log has of it.
    """

    make: Callable[[Path], Any]
    name: str = "."
    served_by: tuple[str, ...] = ALL
    refusal: str = ""
    note: str = ""


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def saved(
    folder: Path, family: str, change: Callable[[Tensors], Any] | None = None, config: Config | None = None
) -> Any:
    """A folder of a tiny model, its tensors and its configuration changed; a value of None removes a key."""
    model = tiny_model(family)
    model.save_pretrained(folder)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
        )
    if config:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | config
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return model


def folder_of(
    family: str, change: Callable[[Tensors], Any] | None = None, config: Config | None = None, **more: Any
) -> Odd:
    def make(folder: Path) -> None:
        saved(folder, family, change, config)

    return Odd(make=make, **more)


def sharded(folder: Path, family: str = "llama", *, change: Callable[[Config], Any] | None = None) -> Any:
    """Two shards and their index, changed."""
    model = saved(folder, family)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"model-0000{number + 1}-of-00002.safetensors": names[number::2] for number in range(2)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
    index: Config = {
        "metadata": {"total_size": sum(one.nbytes for one in tensors.values())},
        "weight_map": {name: file for file, own in files.items() for name in own},
    }
    if change is not None:
        change(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def with_another_file(folder: Path) -> None:
    own = sharded(folder).state_dict()
    save_file({name: noise(*one.shape) for name, one in own.items()}, folder / "model.safetensors", {"format": "pt"})


def with_a_leftover_index(folder: Path) -> None:
    saved(folder, "llama")
    index = {"metadata": {}, "weight_map": {EMBEDDING: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def a_tensor_twice(folder: Path) -> None:
    sharded(folder)
    for path in folder.glob("model-*.safetensors"):
        save_file(load_file(path) | {EMBEDDING: noise(259, 64)}, path, {"format": "pt"})


def swapped(index: Config) -> None:
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {
        name: files[1 - files.index(file)] if "layers.1" in name else file for name, file in index["weight_map"].items()
    }
    index["metadata"]["total_size"] = 7


def without_its_root(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def beside_others(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)


def within_others(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)


def as_a_part(family: str, change: Callable[[Tensors], Any], served_by: tuple[str, ...] = ALL) -> Odd:
    return Odd(make=lambda folder: saved(folder, family, change), served_by=served_by, refusal="no kernel")


def in_text_config(
    folder: Path, family: str, kind: str, change: Callable[[Tensors], Any] | None = None, **more: Any
) -> Any:
    model = saved(folder, family, change)
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, "text_config": json.loads(path.read_text()), **more}))
    return model


def overlapping(folder: Path) -> None:
    saved(folder, "llama")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    places = sorted(one["data_offsets"] for name, one in header.items() if name != "__metadata__")
    places[1][:] = places[0]
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[start:])


def stored_as(dtype: str, name: str, family: str = "llama", *, bits: int, **more: Any) -> Odd:
    """A tensor of zeros, as so many bits of this type."""

    def make(folder: Path) -> None:
        saved(folder, family)
        path = folder / "model.safetensors"
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header, written, body = json.loads(content[8:start]), {}, b""
        for own, one in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [-1])):
            if own == "__metadata__":
                continue
            first, end = one["data_offsets"]
            data = content[start + first : start + end]
            if own == name:
                data, one["dtype"] = bytes(math.prod(one["shape"]) * bits // 8), dtype
            written[own] = {**one, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
        said = json.dumps({"__metadata__": {"format": "pt"}, **written}).encode()
        path.write_bytes(len(said).to_bytes(8, "little") + said + body)

    return Odd(make=make, **more)


def mixed(tensors: Tensors) -> None:
    types = (torch.float32, torch.bfloat16, torch.float16)
    for number, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].to(types[number % 3])


def in_gptq_order(folder: Path, *, order: Callable[[Tensor], Tensor], desc_act: bool = True, bits: int = 4) -> Any:
    """A GPTQ checkpoint whose settings say that its inputs are in an order of their own."""
    model = saved(folder, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            own, numbers = in_gptq(name, tensors.pop(f"{name}.weight"))
            own[f"{name}.g_idx"] = order(own[f"{name}.g_idx"])
            tensors |= own
            module.weight.data = numbers
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    quantised = {"quantization_config": {**GPTQ, "desc_act": desc_act, "bits": bits}}
    path.write_text(json.dumps(json.loads(path.read_text()) | quantised))
    return model


def quantised_and_not(folder: Path) -> None:
    in_gptq_order(folder, order=lambda own: own)
    path, stem = folder / "model.safetensors", "model.layers.0.self_attn.q_proj"
    save_file(load_file(path) | {f"{stem}.weight": noise(64, 64)}, path, {"format": "pt"})


def gguf_of(
    family: str | Callable[[], Any],
    *,
    file: str = "tiny.gguf",
    named: str = "",
    values: Mapping[str, Any] = MappingProxyType({}),
    change: Callable[[Any], Any] | None = None,
    tensors: Callable[[dict[str, Any]], Any] | None = None,
    after: Callable[[Path], Any] | None = None,
    most_tensors: int = 0,
    encoding: str | Callable[[str], str] = "F32",
    **more: Any,
) -> Odd:
    """values, tensors: changes to the file. change: the same to the model. after: to the folder."""

    def make(folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        model = tiny_model(family) if isinstance(family, str) else family()
        if change is not None:
            model = change(model) or model
        write_gguf(model, folder / file, encoding, values=values, tensors=tensors, most_tensors=most_tensors)
        if after is not None:
            after(folder)
        return model.eval()

    return Odd(make=make, name=named or file, **more)


def keys_that_none_reads(tensors: dict[str, Any]) -> None:
    for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
        tensors[f"blk.6.{name}"] = tensors[f"blk.2.{name}"]


def with_noise(name: str, tensors: dict[str, Any]) -> None:
    numbers = noise(32, 64)
    tensors[name] = numbers if isinstance(next(iter(tensors.values())), Tensor) else numbers.numpy()


def reshaped(name: str, shape: tuple[int, ...], tensors: dict[str, Any]) -> None:
    tensors[name] = tensors[name].reshape(shape)


def without(name: str, tensors: Tensors) -> None:
    del tensors[name]


def one_more_expert(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if "_exps." in name]:
        tensors[name] = np.concatenate((tensors[name], tensors[name][:1]))


def configured(kind: str, **changes: Any) -> Callable[[], Any]:
    """A model of this class with noise on every parameter."""

    def make() -> Any:
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
        config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(11)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval()

    return make


def folder_from(make: Callable[[], Any], config: Config | None = None, **more: Any) -> Odd:
    def write(folder: Path) -> None:
        make().save_pretrained(folder)
        if config:
            path = folder / "config.json"
            content = json.loads(path.read_text()) | config
            path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return Odd(make=write, **more)


def without_output_biases(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()
        for name in ("gate", "up", "down"):
            getattr(layer.mlp, f"{name}_proj").bias.data.zero_()


def only_some_biases(model: Any) -> None:
    without_output_biases(model)
    model.model.layers[0].self_attn.k_proj.bias.data.zero_()
    model.model.layers[1].mlp.up_proj.bias.data.normal_()


def without_key_biases(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.zero_()


def zero_biases_left_out(tensors: dict[str, Any]) -> None:
    for name in [name for name, one in tensors.items() if name.endswith(".bias") and not one.any()]:
        del tensors[name]


GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
NORM = "blk.0.attn_norm.weight"
SPLIT = "tiny-00001-of-00005.gguf"
# Tensors that no layer reads, by family, and how a refusal names them.
EXTRA = (
    ("llama", "model.strange.weight", r"model\.strange\.weight"),
    ("llama", "lm_head.bias", r"lm_head\.bias"),
    ("qwen3", "v_head.summary.weight", r"v_head\.summary\.weight"),
    ("mixtral", "model.layers.0.block_sparse_moe.experts.4.w1.weight", r"experts\.4\."),
    ("qwen35", "model.layers.0.linear_attn.strange", r"linear_attn\.strange"),
    ("falcon-h1", "model.layers.1.mamba.E", r"mamba\.E"),
    ("gemma4 with inputs by layer", "model.strange_per_layer.weight", r"strange_per_layer"),
    ("deepseek2", "strange.weight", r"strange\.weight"),
    ("gpt-oss", "model.layers.0.self_attn.strange", r"self_attn\.strange"),
    ("glm4moe", "model.layers.46.eh_proj.weight", r"layers\.46\.eh_proj"),  # of another model than this one of 2 layers
)
LACKING = (
    ("qwen35", "model.layers.0.linear_attn.A_log"),
    ("falcon-h1", "model.layers.1.mamba.D"),
    ("gemma4", "model.layers.0.layer_scalar"),
    ("deepseek2", "model.layers.0.self_attn.kv_a_layernorm.weight"),
    ("gpt-oss", "model.layers.1.self_attn.sinks"),
)


def folder_that_sees(change: Callable[[Tensors], Any]) -> Odd:
    def make(folder: Path) -> Any:
        text = {**SMALL, **GEMMA, "sliding_window": 32}
        sees = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.Gemma3Config(
            text_config=text, vision_config={**sees, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
        )
        config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            model = transformers.Gemma3ForConditionalGeneration(config).eval()
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return model

    return Odd(make=make, note="served as a model of text: vision_config")


def for_long_texts(folder: Path) -> Any:
    """A session may be longer than the first length, so it has the factors of long texts from its first token on."""
    folder.mkdir()
    long = [1.0, 2.0, 4.0, 8.0]

    def of(short: list[float]) -> Any:
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "attention_factor": 1.2}
        rope |= {"original_max_position_embeddings": 64, "short_factor": short, "long_factor": long}
        return configured("Phi3", original_max_position_embeddings=64, rope_parameters=rope)()

    write_gguf(of([1.0, 1.1, 1.3, 1.7]), folder / "tiny.gguf")
    return of(long)


ODD: Mapping[str, Odd] = {
    # -- the head
    "tied, the same head": folder_of("llama", lambda own: own.update({HEAD: own[EMBEDDING].clone()})),
    "tied, the same head in another type": folder_of(
        "llama",
        lambda own: own.update({EMBEDDING: own[EMBEDDING].bfloat16().float(), HEAD: own[EMBEDDING].bfloat16()}),
    ),
    "tied, another head": folder_of(
        "llama", lambda own: own.update({HEAD: noise(259, 64)}), note="the head of the file is used"
    ),
    "tied, a head that differs in one number": folder_of(
        "llama", lambda own: own.update({HEAD: own[EMBEDDING].clone().index_fill_(0, torch.tensor([258]), 2.0)})
    ),
    "tied by default, another head": folder_of("gemma2", lambda own: own.update({HEAD: noise(259, 64)})),
    "tied, another head of another shape": folder_of(
        "llama", lambda own: own.update({HEAD: noise(300, 64)}), served_by=(), refusal=r"lm_head\.weight"
    ),
    "not tied, no head": folder_of(
        "llama", None, {"tie_word_embeddings": False}, served_by=(), refusal=r"lm_head\.weight"
    ),
    "nothing about ties, no head": folder_of(
        "llama", None, {"tie_word_embeddings": None}, served_by=(), refusal=r"lm_head\.weight"
    ),
    "not tied, the same head": folder_of(
        "llama", lambda own: own.update({HEAD: own[EMBEDDING].clone()}), {"tie_word_embeddings": False}
    ),
    "tied, a head and no embedding": folder_of(
        "llama",
        lambda own: own.update({HEAD: own.pop(EMBEDDING)}),
        served_by=("torch",),
        refusal=r"no tensor model\.embed_tokens\.weight",
    ),
    # -- tensors
    "names of a model without its head": folder_of("llama", without_its_root),
    "names of a model without its head, and a head": folder_of("qwen2", without_its_root),
    # transformers alone does not read them, but for classes that have other parts.
    "names of a part of another model": as_a_part("llama", beside_others),
    "names within a part of another model": as_a_part("qwen2", within_others),
    "names of a part of another model, experts": as_a_part("mixtral", beside_others),
    "names of a part of another model, latent": as_a_part("deepseek2", beside_others, served_by=("torch", "mlx")),
    "a layer of both names": folder_of(
        "llama",
        lambda own: own.update({"layers.1.mlp.up_proj.weight": noise(96, 64)}),
        served_by=(),
        refusal=r"layers\.1\.mlp\.up_proj",
    ),
    "types mixed": folder_of("qwen3", mixed),
    **{
        f"{name} in {dtype}": stored_as(
            dtype, name, family, bits=bits, served_by=(), refusal=rf"{re.escape(name)} is stored as '?{dtype}"
        )
        for dtype, bits, family, name in (
            ("F4", 4, "llama", "model.norm.weight"),
            ("F8_E8M0", 8, "qwen2", "model.layers.0.mlp.up_proj.weight"),
            ("I32", 32, "llama", "model.layers.1.self_attn.q_proj.weight"),
            ("C64", 64, "qwen3", "model.embed_tokens.weight"),
            ("strange", 16, "llama", "model.norm.weight"),
        )
    },
    "experts in I8": stored_as(
        "I8", "model.layers.0.mlp.experts.1.up_proj.weight", "qwen3moe", bits=8, served_by=(), refusal="stored as I8"
    ),
    "numbers in F64": stored_as(
        "F64", "model.layers.0.mlp.up_proj.weight", bits=64, served_by=("torch",), refusal="F64"
    ),
    "a tensor too many": folder_of(
        "llama",
        lambda own: own.update({"model.layers.7.mlp.up_proj.weight": noise(96, 64)}),
        served_by=(),
        refusal=r"layers\.7\.mlp\.up_proj",
    ),
    **{
        f"{name}, in a folder of {family}": folder_of(
            family,
            partial(with_noise, name),
            served_by=(),
            refusal=f"{said}|no kernel|no list",
        )
        for family, name, said in EXTRA
    },
    **{
        f"{family} without {name}": folder_of(
            family, partial(without, name), served_by=(), refusal=f"{re.escape(name)}|no kernel|no list"
        )
        for family, name in LACKING
    },
    "a layer that predicts later tokens, behind the last": folder_of(
        "glm4moe",
        lambda own: own.update({"model.layers.2.eh_proj.weight": noise(64, 128)}),
        {"num_nextn_predict_layers": 1},
        note=r"with 1 tensors \(model\.layers\.2\.\*\), are not loaded",
    ),
    "a tensor of another type too many": folder_of(
        "llama",
        lambda own: own.update({"model.layers.0.self_attn.bias": torch.ones(4, 4, dtype=torch.bool)}),
        served_by=(),
        refusal=r"self_attn\.bias",
    ),
    "two tensors in one place": Odd(make=overlapping, served_by=(), refusal="is at bytes 0 to"),
    "frequencies of an old checkpoint": folder_of(
        "llama", lambda own: own.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    ),
    "a bias of one product": folder_of(
        "llama",
        lambda own: own.update({"model.layers.0.self_attn.q_proj.bias": noise(64)}),
        served_by=(),
        refusal=r"q_proj\.bias",
    ),
    "biases": folder_of("llama with biases"),
    "heads of an unusual size": folder_from(configured("Llama", head_dim=48)),
    # -- the configuration
    "all of it in a text_config": Odd(
        make=lambda folder: in_text_config(folder, "llama", "llama"), served_by=(), refusal="text_config, and the type"
    ),
    "the text of a model that sees": Odd(
        make=lambda folder: in_text_config(folder, "qwen35", "qwen3_5", within_others, vision_config={"depth": 1}),
        note="served as a model of text",
    ),
    "rotation by nothing": folder_of(
        "llama",
        None,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        served_by=(),
        refusal="rope_theta is 0",
    ),
    "no positions": folder_of(
        "llama", None, {"max_position_embeddings": 0}, served_by=(), refusal="max_position_embeddings is 0"
    ),
    "a vocabulary of another size": folder_of(
        "llama", None, {"vocab_size": 300}, served_by=(), refusal=r"embed_tokens\.weight"
    ),
    "an inner size that the tensors lack": folder_of(
        "llama", None, {"intermediate_size": 64}, served_by=(), refusal=r"mlp\.(down|gate|up)_proj"
    ),
    "more K/V heads than the tensors have": folder_of(
        "qwen3", None, {"num_key_value_heads": 4}, served_by=(), refusal=r"(k|v)_proj"
    ),
    "heads that the tensors lack": folder_of("qwen3", None, {"head_dim": 16}, served_by=(), refusal=r"self_attn\."),
    "fewer layers than the tensors have": folder_of(
        "qwen2", None, {"num_hidden_layers": 1, "layer_types": None}, served_by=(), refusal=r"layers\.1\."
    ),
    "layers with a window that is not said": folder_of(
        "qwen3",
        None,
        {"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]},
        served_by=(),
        refusal=r"sliding_window is None",
    ),
    "layers with a window that is not used": folder_of(
        "qwen2",
        None,
        {"sliding_window": 3, "use_sliding_window": False, "layer_types": ["sliding_attention", "full_attention"]},
        served_by=(),
        refusal=r"use_sliding_window is false",
    ),
    "another type than the tensors have": folder_of("qwen2", None, {"torch_dtype": "float16", "dtype": "float16"}),
    "legacy rotation, linear": folder_of(
        "llama", None, {"rope_parameters": None, "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    ),
    "yarn": folder_from(configured("Qwen2", rope_parameters=YARN)),
    "legacy yarn": folder_of(
        "qwen2",
        None,
        {
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
    ),
    "rotation as Llama 3 has it": folder_of(
        "llama",
        None,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "quantised, by the configuration alone": Odd(
        make=lambda folder: saved(folder, "qwen2", None, {"quantization_config": GPTQ}),
        served_by=("torch",),
        refusal="gptq",
        note="no tensor is stored in",
    ),
    **{
        f"{key} of {value}": folder_of(family, None, {key: value}, served_by=(), refusal=key)
        for family, key, value in (
            ("llama", "rms_norm_eps", -1.0),
            ("llama", "vocab_size", 259.5),
            ("gemma2", "attn_logit_softcapping", 0.0),
            ("gemma2", "query_pre_attn_scalar", -1),
            ("granitehybrid", "logits_scaling", 0.0),
        )
    },
    **{
        f"a rotation with a {key} of {value}, {kind}": folder_of(
            "qwen2", None, {"rope_parameters": {**YARN, "rope_type": kind, key: value}}, served_by=(), refusal=key
        )
        for kind, key, value in (("yarn", "factor", -4.0), ("linear", "factor", 0.0), ("yarn", "attention_factor", 0.0))
    },
    # -- what sees
    "Gemma 3 that sees": folder_that_sees(dict),
    "Gemma 3 that sees no more": folder_that_sees(
        lambda own: [own.pop(name) for name in list(own) if "language_model" not in name and name != HEAD]
    ),
    "Gemma 3 that sees otherwise": folder_that_sees(
        lambda own: own.update(
            {
                "model.vision_tower.strange": noise(3),
                "model.multi_modal_projector.mm_soft_emb_norm.weight": noise(7),
            }
        )
    ),
    # -- shards
    "shards": Odd(make=lambda folder: sharded(folder) and None),
    "shards in other places than the index says": Odd(
        make=lambda folder: sharded(folder, change=swapped) and None, note="tensors are in another shard than"
    ),
    "shards of an index without metadata": Odd(
        make=lambda folder: sharded(folder, change=lambda index: index.pop("metadata"))
    ),
    "shards beside another file": Odd(make=with_another_file, served_by=(), refusal="two sets of weights"),
    "a file beside an index without shards": Odd(make=with_a_leftover_index, note=r"index\.json is not read"),
    "a tensor in two shards": Odd(make=a_tensor_twice, served_by=(), refusal=r"embed_tokens\.weight is in"),
    "an index with a tensor that no shard has": Odd(
        make=lambda folder: sharded(
            folder,
            change=lambda index: index["weight_map"].update(
                {"model.layers.1.mlp.up_proj.bias": "model-00001-of-00002.safetensors"}
            ),
        ),
        served_by=(),
        refusal=r"up_proj\.bias",
    ),
    # -- GPTQ
    "desc_act, inputs in the order of groups": Odd(
        make=lambda folder: in_gptq_order(folder, order=lambda own: own), served_by=("torch",), refusal="gptq"
    ),
    "desc_act, inputs in an order of their own": Odd(
        make=lambda folder: in_gptq_order(folder, order=lambda own: own.flip(0)), served_by=(), refusal="g_idx|gptq"
    ),
    "no desc_act, inputs in an order of their own": Odd(
        make=lambda folder: in_gptq_order(folder, order=lambda own: own.flip(0), desc_act=False),
        served_by=(),
        refusal="g_idx|gptq",
    ),
    "a matrix that is quantised and is not": Odd(
        make=quantised_and_not, served_by=(), refusal=r"q_proj\.qweight and .*q_proj\.weight are both there|gptq"
    ),
    # -- GGUF
    "GGUF": gguf_of("llama"),
    "GGUF, split": gguf_of("llama", file="tiny.gguf", named=SPLIT, most_tensors=4),
    "GGUF, split, another part named": gguf_of("llama", named="tiny-00003-of-00005.gguf", most_tensors=4),
    "GGUF, split, the folder named": gguf_of("llama", named=".", most_tensors=4),
    "GGUF, split, a part missing": gguf_of(
        "llama",
        named=SPLIT,
        most_tensors=4,
        after=lambda folder: (folder / "tiny-00004-of-00005.gguf").unlink(),
        served_by=(),
        refusal=r"tiny-00004-of-00005\.gguf: missing",
    ),
    "GGUF, split, two parts exchanged": gguf_of(
        "llama",
        named=SPLIT,
        most_tensors=4,
        after=lambda folder: [
            (folder / one).rename(folder / other)
            for one, other in (
                ("tiny-00002-of-00005.gguf", "x"),
                ("tiny-00003-of-00005.gguf", "tiny-00002-of-00005.gguf"),
                ("x", "tiny-00003-of-00005.gguf"),
            )
        ],
        served_by=(),
        refusal=r"tiny-00002-of-00005\.gguf: split\.no and split\.count are 2 and 5",
    ),
    "GGUF with a head": gguf_of("qwen2"),
    "GGUF, yarn without its first length": gguf_of(
        configured("Qwen2", rope_parameters=YARN),
        values={"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0},
    ),
    "GGUF, rotation of Phi-3 for long texts": Odd(make=for_long_texts, name="tiny.gguf"),
    "GGUF, rotation of Phi-3, factors of short texts alone": gguf_of(
        "phi3",
        tensors=lambda own: own.update({"rope_factors_short.weight": np.ones(4, np.float32)}),
        served_by=(),
        refusal="rope_factors_short.weight and rope_factors_long.weight are not 4 numbers",
    ),
    "GGUF, Phi-3 with another scaling": gguf_of(
        "phi3",
        values={"phi3.rope.scaling.type": "linear", "phi3.rope.scaling.factor": 2.0},
        served_by=(),
        refusal="scaled as linear",
    ),
    "GGUF, Phi-3 with half a pair rotated": gguf_of(
        "phi3", values={"phi3.rope.dimension_count": 7}, served_by=(), refusal="rotated in pairs"
    ),
    "GGUF, values of layers where one is wanted": gguf_of(
        "llama",
        values={
            "llama.attention.sliding_window": [0, 0],
            "llama.vocab_size": [259, 300],
            "llama.rope.scaling.yarn_beta_fast": [32.0, 3.0],
        },
        note="vocab_size is",
    ),
    "GGUF, Phi-3 with queries apart, too": gguf_of(
        "phi3", tensors=partial(with_noise, "blk.0.attn_q.weight"), served_by=(), refusal=r"blk\.0\.attn_q\.weight"
    ),
    "GGUF, a window of Phi-3": gguf_of(
        configured("Phi3", sliding_window=4), note="as in a Phi-3 model of safetensors; llama.cpp ignores the key"
    ),
    "GGUF, yarn with a first length of 0": gguf_of(
        configured("Qwen2", rope_parameters=YARN),
        values={
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 0,
        },
    ),
    "GGUF, K/V heads one by one": gguf_of("qwen2", values={"qwen2.attention.head_count_kv": [2, 2]}),
    "GGUF, K/V heads of one layer": gguf_of(
        "qwen2",
        values={"qwen2.attention.head_count_kv": [2]},
        served_by=(),
        refusal=r"head_count_kv is of 1 layers, the model has 2",
    ),
    "GGUF, a scaling that is not known, without a factor": gguf_of(
        "llama", values={"llama.rope.scaling.type": "strange"}, served_by=(), refusal=r"scaling\.type is 'strange'"
    ),
    "GGUF, layers with different K/V heads": gguf_of(
        "qwen2",
        values={"qwen2.attention.head_count_kv": [2, 4]},
        served_by=(),
        refusal=r"head_count_kv is 2 in some layers and 4 in others",
    ),
    "GGUF, a factor without a type": gguf_of(
        configured("Qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        values={"qwen2.rope.scaling.type": None, "qwen2.rope.scaling.factor": 4.0},
    ),
    "GGUF, the old name of a factor": gguf_of(
        configured("Qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        values={"qwen2.rope.scaling.type": None, "qwen2.rope.scaling.factor": None, "qwen2.rope.scale_linear": 4.0},
    ),
    "GGUF, a factor below 0": gguf_of(
        "qwen2",
        values={"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": -4.0},
        served_by=(),
        refusal="factor is -4",
    ),
    "GGUF, a factor that is not used": gguf_of(
        configured("Qwen2"), values={"qwen2.rope.scaling.type": "none", "qwen2.rope.scaling.factor": 4.0}
    ),
    "GGUF, Gemma 3 without a window": gguf_of(
        configured("Gemma3Text", **GEMMA),
        values={"gemma3.attention.sliding_window": None, "gemma3.rope.freq_base": None},
    ),
    "GGUF, Gemma 3 with a window of 0": gguf_of(
        configured("Gemma3Text", **GEMMA), values={"gemma3.attention.sliding_window": 0}
    ),
    "GGUF, biases of q, k and v": gguf_of(
        "llama with biases", change=without_output_biases, tensors=zero_biases_left_out
    ),
    "GGUF, other biases": gguf_of("llama with biases", change=only_some_biases, tensors=zero_biases_left_out),
    "GGUF, YaRN with a factor of attention": gguf_of(
        # As llama.cpp multiplies them: 0.1 ln 4 + 1 is YaRN's own.
        configured("Qwen2", rope_parameters={**YARN, "attention_factor": 1.3 * (0.1 * math.log(4.0) + 1.0)}),
        values={
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.attn_factor": 1.3,
            "qwen2.rope.scaling.yarn_beta_fast": 32.0,
        },
    ),
    "GGUF, Qwen 2 without biases of k": gguf_of("qwen2", change=without_key_biases, tensors=zero_biases_left_out),
    "GGUF, experts alone": gguf_of("qwen3moe", values={"qwen3moe.feed_forward_length": None}),
    "GGUF, recurrent states": gguf_of("qwen35"),
    "GGUF, one vector for all heads": gguf_of("deepseek2", served_by=("torch", "mlx"), refusal="AttendLatent"),
    "GGUF, Gemma 4": gguf_of("gemma4 with experts"),
    "GGUF, keys and values of layers that read others'": gguf_of(
        "gemma4 with inputs by layer", tensors=keys_that_none_reads
    ),
    "GGUF, the rounding of YaRN's bounds": gguf_of("gpt-oss", served_by=("torch",), refusal="gpt_oss", note="bounds"),
    "GGUF, the gate of a shared expert as a vector": gguf_of("qwen2moe", tensors=without_dimensions_of_1),
    "GGUF, caps of 0": gguf_of(
        configured(
            "Gemma2",
            head_dim=16,
            query_pre_attn_scalar=16,
            tie_word_embeddings=True,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
        values={"gemma2.attn_logit_softcapping": 0.0, "gemma2.final_logit_softcapping": 0.0},
    ),
    "GGUF, layers with a window one by one": gguf_of(
        configured("Gemma3Text", **{**GEMMA, "layer_types": ["full_attention", "sliding_attention"]}, sliding_window=4),
        values={"gemma3.attention.sliding_window_pattern": [False, True]},
    ),
    "GGUF, a window of Mistral": gguf_of(
        configured("Mistral", sliding_window=4),
        values={"llama.attention.sliding_window": 4},
        note="llama.cpp ignores the key",
    ),
    "GGUF, names of chat templates that are not there": gguf_of(
        "llama",
        values={"tokenizer.chat_templates": ["rag", "tools"], "tokenizer.chat_template.rag": "{{ messages }}"},
        note="templates that are not there: tools$",
    ),
    "GGUF, a causal that is neither true nor false": gguf_of(
        "llama", values={"llama.attention.causal": 1}, served_by=(), refusal=r"attention\.causal is 1, and not True"
    ),
    "GGUF, another size of the vocabulary": gguf_of(
        "llama", values={"llama.vocab_size": 300}, note=r"llama\.vocab_size is 300"
    ),
    "GGUF, more layers than tensors": gguf_of(
        "qwen2", values={"qwen2.block_count": 3}, served_by=(), refusal=r"layers\.2\."
    ),
    "GGUF, fewer layers than tensors": gguf_of(
        "qwen2", values={"qwen2.block_count": 1}, served_by=(), refusal=r"layers\.1\."
    ),
    **{
        f"GGUF of {family}, another tensor {name}": gguf_of(
            family,
            tensors=partial(with_noise, name),
            served_by=(),
            refusal=re.escape(name),
        )
        for family, name in (("llama", "strange.weight"), ("qwen35", "blk.0.ssm_strange.weight"), ("gemma4", "blk.0.x"))
    },
    **{
        f"GGUF of {family}, one more expert": gguf_of(
            family, tensors=one_more_expert, served_by=(), refusal=r"expert.*|no kernel"
        )
        for family in ("qwen3moe", "gemma4 with experts")
    },
    "GGUF, other heads than the tensors": gguf_of(
        "qwen2", values={"qwen2.attention.head_count_kv": 4}, served_by=(), refusal=r"(k|v)_proj"
    ),
}
# They say little more than others.
REPEATED = (
    "tied, a head that differs in one number",
    "tied, another head of another shape",
    "nothing about ties, no head",
    "not tied, the same head",
    "a bias of one product",
    "names of a model without its head, and a head",
    "biases",
    "layers with a window that is not used",
    "an inner size that the tensors lack",
    "more K/V heads than the tensors have",
    "fewer layers than the tensors have",
    "another type than the tensors have",
    "legacy yarn",
    "rotation as Llama 3 has it",
    "shards",
    "no desc_act, inputs in an order of their own",
    "GGUF, split, another part named",
    "GGUF, one vector for all heads",
    "GGUF, the rounding of YaRN's bounds",
    "GGUF with a head",
    "GGUF, the old name of a factor",
    "GGUF, K/V heads one by one",
    "GGUF, a factor that is not used",
    "GGUF, Gemma 3 with a window of 0",
    "GGUF, fewer layers than tensors",
    "GGUF, experts alone",
    "GGUF, Phi-3 with another scaling",
    "GGUF, a window of Phi-3",
    "GGUF, other heads than the tensors",
)
