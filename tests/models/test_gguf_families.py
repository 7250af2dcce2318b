"""GGUF files of families beside the dense ones: read as llama.cpp's converter writes them, on torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from inference_engine.backends.native.trial import try_list
from inference_engine.backends.twin import TOLERANCE, Twin, TwinSizes, text_generator
from inference_engine.errors import ModelError
from inference_engine.models import find_model, load_model, remarks
from tests.admissions import traits_of
from tests.further import further
from tests.models.gguf_layouts import MORE_FAMILIES
from tests.models.gguf_tensors import Tensor, without_dimensions_of_1
from tests.models.llama_cpp_logits import CHANGES, EVERY, KEPT
from tests.models.tiny_folder import logits
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.tiny_native import library

FIRST = ("qwen35", "granitehybrid", "gemma4 with experts", "deepseek2", "lfm2moe")
NOT_KEPT = ("nemotron_h",)  # llama.cpp's logits were not made yet
# Relative to the largest logit: what was added to a number, or the logarithm of a decay, is rounded.
ROUNDING = 1e-5
# The same to llama.cpp, whose kernels sum otherwise; for GELU it has a table of numbers in 16 bits.
BESIDE_LLAMA, WITH_ITS_TABLE = 1e-4, 1e-3

Tensors = dict[str, Tensor]


def loaded(path: Path, cache: Path) -> torch.Tensor:
    return logits(load_model(str(path), cache=cache).model)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", [name if name in FIRST else further(name) for name in MORE_FAMILIES])
def test_a_file_is_the_model_it_was_made_of_and_the_one_that_llama_cpp_runs(
    family: str, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    model = tiny_model(family)
    write_gguf(model, path)
    found = loaded(path, cache)
    assert difference(found, logits(model)) < ROUNDING
    if family in CHANGES:
        write_gguf(tiny_model(family, **CHANGES[family]), path)
        found = loaded(path, cache)
    if family in NOT_KEPT:
        return
    theirs = torch.tensor(json.loads(KEPT.read_text())[family])
    near = WITH_ITS_TABLE if family.startswith("gemma") else BESIDE_LLAMA
    assert difference(found[0, -1, ::EVERY], theirs) < near


@pytest.mark.parametrize("family", ["qwen35", further("qwen35moe"), further("qwen3next")])
def test_rounding_is_far_from_what_a_hybrid_is_refused_for(family: str) -> None:
    """Other processors, and other addresses of memory, round otherwise: nothing is served by luck of it."""
    config, kind = text_generator(tiny_model(family).config)
    traits = traits_of(config, kind)
    for seed in range(6):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            by_modules = Twin(kind, config, traits, TwinSizes()).difference_of_chunks()
        by_list = try_list(library(), kind, config, traits, seed=seed)
        assert max(by_modules, by_list) < TOLERANCE / 4, seed


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen35moe", "Q8_0"), ("gpt-oss", "MXFP4"), *(further(name, "Q8_0") for name in MORE_FAMILIES)],
)
def test_a_file_in_blocks_is_that_of_their_numbers(family: str, kind: str, tmp_path: Path, cache: Path) -> None:
    model, encoding = tiny_model(family), GGMLQuantizationType[kind]

    def rounded(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim > 1 and tensor.shape[-1] >= 32:
                tensors[name] = dequantize(quantize(tensor, encoding), encoding)

    write_gguf(model, tmp_path / "blocks.gguf", kind)
    write_gguf(model, tmp_path / "numbers.gguf", tensors=rounded)
    found = loaded(tmp_path / "blocks.gguf", cache)
    torch.testing.assert_close(found, loaded(tmp_path / "numbers.gguf", cache), rtol=0, atol=0)
    assert difference(found, logits(model)) > ROUNDING


@pytest.mark.parametrize("family", ["deepseek2", further("lfm2moe"), further("gpt-oss"), further("gemma4")])
def test_in_bfloat16_a_file_has_the_numbers_of_its_folder(family: str, tmp_path: Path, cache: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "folder")
    write_gguf(model, tmp_path / "tiny.gguf")
    wanted, found = (
        load_model(str(tmp_path / name), cache=cache, dtype="bfloat16").model.state_dict()
        for name in ("folder", "tiny.gguf")
    )
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


# -- as other converters write them -----------------------------------------------------------------------------------


def each_layer(change: Callable[[Tensors, str], Any]) -> Callable[[Tensors], None]:
    def all_layers(tensors: Tensors) -> None:
        for start in sorted({name[: name.index(".", 4) + 1] for name in tensors if name.startswith("blk.")}):
            change(tensors, start)

    return all_layers


def one_projection(tensors: Tensors, start: str) -> None:
    """Of each key head: query, key, two values, two gates."""
    if f"{start}attn_gate.weight" in tensors:
        mixed, gates = tensors.pop(f"{start}attn_qkv.weight"), tensors.pop(f"{start}attn_gate.weight")
        parts = [mixed[:64], mixed[64:128], mixed[128:], gates]
        rows = [part.reshape(2, -1, 64) for part in parts]
        tensors[f"{start}ssm_in.weight"] = np.concatenate(rows, axis=1).reshape(-1, 64)


def one_latent_matrix(tensors: Tensors, start: str) -> None:
    keys, values = tensors.pop(f"{start}attn_k_b.weight"), tensors.pop(f"{start}attn_v_b.weight")
    tensors[f"{start}attn_kv_b.weight"] = np.concatenate((keys.swapaxes(1, 2), values), axis=1).reshape(-1, 32)


def both_ways(tensors: Tensors, start: str) -> None:
    apart = {name: tensors[name] for name in (f"{start}attn_k_b.weight", f"{start}attn_v_b.weight")}
    one_latent_matrix(tensors, start)
    tensors |= apart


def gates_and_ups_apart(tensors: Tensors, start: str) -> None:
    both = tensors.pop(f"{start}ffn_gate_up_exps.weight")
    tensors[f"{start}ffn_gate_exps.weight"], tensors[f"{start}ffn_up_exps.weight"] = np.split(both, 2, axis=1)


def gates_above_ups(tensors: Tensors, start: str) -> None:
    parts = [tensors.pop(f"{start}ffn_{name}_exps.weight") for name in ("gate", "up")]
    tensors[f"{start}ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)


def with_a_later_layer(tensors: Tensors) -> None:
    last = max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    for name in [name for name in tensors if name.startswith(f"blk.{last}.")]:
        tensors[name.replace(f"blk.{last}.", f"blk.{last + 1}.")] = tensors[name]
    tensors[f"blk.{last + 1}.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)


LATENT = {"key_length": 48, "value_length": 16, "head_count_kv": 4, "key_length_mla": None, "value_length_mla": None}
LAYOUTS: Mapping[str, tuple[str, Callable[[Tensors], Any] | None, Mapping[str, Any]]] = {
    "one projection of queries, keys, values and gates": ("qwen3next", each_layer(one_projection), {}),
    "keys and values of a latent by one matrix": (
        "deepseek2",
        each_layer(one_latent_matrix),
        {f"deepseek2.attention.{name}": value for name, value in LATENT.items()},
    ),
    "keys and values of a latent by one matrix, and by two": ("deepseek2", each_layer(both_ways), {}),
    "gates and ups of experts apart": ("gemma4 with experts", each_layer(gates_and_ups_apart), {}),
    "gates and ups of experts in one tensor": ("qwen35moe", each_layer(gates_above_ups), {}),
    "no dimensions of 1": ("granitehybrid", without_dimensions_of_1, {}),
    "a shared expert's gate as a vector": ("qwen2moe", without_dimensions_of_1, {}),
    "a layer that predicts later tokens": (
        "qwen35",
        with_a_later_layer,
        {
            "qwen35.block_count": 4,
            "qwen35.nextn_predict_layers": 1,
            "qwen35.attention.recurrent_layers": [True, True, False, False],
        },
    ),
    "which layers have a state, by an interval": (
        "qwen35",
        None,
        {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 3},
    ),
    "sizes of experts by those of all": (
        "qwen2moe",
        None,
        {"qwen2moe.expert_feed_forward_length": None, "qwen2moe.feed_forward_length": 64},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_other_converters_write_is_the_same_model(name: str, tmp_path: Path, cache: Path) -> None:
    family, change, values = LAYOUTS[name]
    model = tiny_model(family)
    write_gguf(model, tmp_path / "tiny.gguf", tensors=change, values=values)
    assert difference(loaded(tmp_path / "tiny.gguf", cache), logits(model)) < ROUNDING
    said = "layers that predict later tokens, with 12 tensors, are not loaded"
    assert (said in remarks(find_model(str(tmp_path / "tiny.gguf"), cache=cache))) == ("later" in name)


def test_queries_without_a_rank(tmp_path: Path, cache: Path) -> None:
    model = tiny_model("deepseek2 of V2", q_lora_rank=None)
    write_gguf(model, tmp_path / "tiny.gguf")
    assert difference(loaded(tmp_path / "tiny.gguf", cache), logits(model)) < ROUNDING


# -- refused ----------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def cut(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name][:64]})


def with_one_more(name: str, size: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.setdefault(name, np.ones(size, np.float32))


REFUSED: list[tuple[str, Mapping[str, Any], Callable[[Tensors], Any] | None, str]] = [
    ("qwen35", {"ssm.group_count": 3}, None, "4 value heads for 3 key heads"),
    ("qwen35", {"ssm.state_size": None}, None, r"qwen35\.ssm\.state_size is None"),
    ("qwen35", {"attention.recurrent_layers": [True]}, None, "recurrent_layers is of 1 layers, the model has 3"),
    ("qwen35", {"nextn_predict_layers": 3}, None, r"nextn_predict_layers is 3 of the 3 layers"),
    ("qwen35", {}, without("blk.0.ssm_a"), r"no tensor model\.layers\.0\.linear_attn\.A_log"),
    ("qwen35", {"ssm.group_count": 4}, None, "linear_attn"),
    ("qwen35", {}, lambda tensors: tensors["blk.0.ssm_a"].fill(1), r"ssm_a \(4,\): a decay that is not negative"),
    ("qwen3next", {"ssm.state_size": 16}, None, r"conv1d\.weight has the shape \(256, 1, 4\)"),
    ("qwen3next", {}, cut("blk.0.attn_gate.weight"), "an order of 384 for 320 rows"),
    ("qwen3next", {}, without("blk.0.attn_gate.weight"), r"blk\.0\.attn_qkv\.weight: not what .* and attn_gate"),
    ("qwen3next", {"expert_group_count": 2}, None, "expert_group_count is 2; experts in groups"),
    ("granitehybrid", {"expert_shared_feed_forward_length": 0}, None, "only mixtures with an expert for all"),
    ("granitehybrid", {"attention.head_count_kv": [1, 2, 0]}, None, r"head_count_kv has the values \[1, 2\]"),
    ("granitehybrid", {"rope.dimension_count": 8}, None, "8 of the 16 numbers of a head are rotated"),
    ("falcon-h1", {}, with_one_more("blk.0.ssm_norm.weight", 128), "ssm_norm"),
    ("nemotron_h", {"feed_forward_length": [96, 96, 96, 0]}, None, "layer 2 has heads and a product"),
    ("nemotron_h", {"feed_forward_length": [0, 96, 0, 48]}, None, r"feed_forward_length has the values \[48, 96\]"),
    ("nemotron_h", {"attention.head_count_kv": None}, None, r"no nemotron_h\.attention\.head_count_kv"),
    ("lfm2", {"attention.sliding_window": 4}, None, "such models with windows"),
    ("lfm2moe", {"expert_gating_func": 1}, None, "expert_gating_func is 1; of this architecture 2 can"),
    ("gemma4", {"attention.sliding_window_pattern": None}, None, "must say of each layer"),
    ("gemma4", {"attention.value_length_swa": 8}, None, "keys of 16 numbers and values of 8"),
    ("gemma4", {"attention.head_count_kv": [1, 2, 2, 1]}, None, "for layers of one kind"),
    ("gemma4", {"feed_forward_length": [96, 64, 96, 96]}, None, r"feed_forward_length has the values \[64, 96\]"),
    ("gemma4", {}, lambda tensors: tensors["rope_freqs.weight"].fill(3), "in a way that is not known"),
    ("deepseek2", {"rope.scaling.yarn_log_multiplier": None}, None, "converted by a later llama"),
    ("deepseek2", {"expert_gating_func": 1}, None, "transformers has no such DeepSeek"),
    ("deepseek2", {"expert_gating_func": 3}, None, "expert_gating_func is 3"),
    ("deepseek2", {"expert_group_used_count": 3}, None, "3 of 2 groups"),
    ("deepseek2", {"attention.temperature_scale": 0.1}, None, "attention scaled by position"),
    ("deepseek2", {}, without("blk.1.attn_v_b.weight"), r"blk\.1\.attn_k_b\.weight: not what"),
    ("deepseek2", {"attention.kv_lora_rank": 16}, None, "kv_"),
    ("minicpm3", {}, with_one_more("rope_factors_long.weight", 8), "rope_factors_long"),
    ("mixtral", {"expert_count": 0}, None, r"the tensor blk\.0\.ffn_gate_inp\.weight"),
    ("gpt-oss", {}, with_one_more("blk.0.ssm_a", 4), r"blk\.0\.ssm_a of the shape \(4,\) is not one"),
]


@pytest.mark.hostile
def test_files_that_cannot_be_served_are_refused_by_name(
    subtests: pytest.Subtests, tmp_path: Path, cache: Path
) -> None:
    models = {family: tiny_model(family) for family, *_ in REFUSED}
    for number, (family, values, change, reason) in enumerate(REFUSED):
        path = tmp_path / f"{number}.gguf"
        start = "llama" if family == "mixtral" else family
        own = {f"{start}.{name}": value for name, value in values.items()}
        with subtests.test(family=family, reason=reason):
            write_gguf(models[family], path, values=own, tensors=change)
            with pytest.raises(ModelError, match=reason) as caught:
                load_model(str(path), cache=cache)
            assert str(path) in str(caught.value)
