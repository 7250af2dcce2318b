"""Every key of a model's files does what its table says: honoured, it changes the model or is refused; else nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from inference_engine.errors import ModelError
from inference_engine.models import check_model, find_model, load_model, read_config, remarks, sizes
from inference_engine.models.families import FAMILIES
from inference_engine.models.file_keys import (
    ARCHITECTURE_KEYS,
    CONFIG_KEYS,
    GGUF_KEYS,
    HONOURED,
    NO_EFFECT,
    QUANTIZATION_KEYS,
    REFUSED,
    ROPE_KEYS,
    Keys,
    unlisted,
)
from inference_engine.models.layer_types import check_config
from inference_engine.models.quantised_layout import layout_in
from inference_engine.models.tokenizer_ids import file_end_ids, read_tokenizer_ids
from tests.further import further_test
from tests.models.odd_models import configured, in_gptq_order, saved
from tests.models.test_quantised_checkpoints import AWQ, BLOCKS, COMPRESSED, GPTQ
from tests.models.tiny_folder import logits
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.tiny_folder import tiny_tokenizer

Changes = Mapping[str, Any]


def outcome(path: Path, cache: Path) -> tuple[Any, ...] | str:
    """What a model is: its logits, its trained positions, the ends of its turns; or what refuses it."""
    try:
        checked = check_model(str(path), cache=cache)
        check_config(read_config(checked).get_text_config())  # as admission does
        model = load_model(str(path), cache=cache)
        ends = file_end_ids(checked, None if checked.only_gguf else checked.folder)
        return logits(model.model).tolist(), sizes(read_config(checked), checked.folder), ends
    except ModelError as error:
        return str(error)


def effects(keys: Keys, *which: str) -> Iterator[str]:
    return (name for name, (effect, _) in keys.items() if effect in which)


# -- GGUF -------------------------------------------------------------------------------------------------------------

_WINDOW = {"attention.sliding_window": 3}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
# By key: of which family, what else the file has, and another value of the key.
ARCHITECTURE_CHANGES: Mapping[str, tuple[str, Changes, Any]] = {
    "context_length": ("llama", {}, 64),
    "embedding_length": ("llama", {}, 32),
    "block_count": ("llama", {}, 1),
    "feed_forward_length": ("llama", {}, 64),
    "attention.head_count": ("llama", {}, 2),
    "attention.head_count_kv": ("llama", {}, 4),
    "attention.key_length": ("llama", {}, 8),
    "attention.value_length": ("llama", {}, 8),
    "attention.layer_norm_rms_epsilon": ("llama", {}, 0.1),
    "attention.sliding_window": ("llama", {}, 3),
    "attention.causal": ("llama", {}, False),
    "rope.dimension_count": ("llama", {}, 8),
    "rope.freq_base": ("llama", {}, 100.0),
    "rope.freq_base_swa": ("gemma3", {}, 100.0),
    "rope.scaling.type": ("llama", {"rope.scaling.factor": 4.0}, "none"),
    "rope.scaling.factor": ("llama", {}, 4.0),
    "rope.scale_linear": ("llama", {}, 4.0),
    "rope.scaling.original_context_length": ("llama", _YARN, 16),
    "rope.scaling.attn_factor": ("llama", _YARN, 1.5),
    "rope.scaling.*": ("llama", {}, 2.0),
    "attention.sliding_window_pattern": ("gemma2", _WINDOW, 1),
    "attn_logit_softcapping": ("gemma2", {}, 0.1),
    "final_logit_softcapping": ("gemma2", {}, 0.1),
    "expert_count": ("qwen3moe", {}, 5),
    "expert_used_count": ("qwen3moe", {}, 1),
    "expert_feed_forward_length": ("qwen3moe", {}, 16),
    "expert_shared_feed_forward_length": ("qwen2moe", {}, 32),
    "expert_shared_count": ("glm4moe", {}, 1),
    "leading_dense_block_count": ("glm4moe", {}, 0),
    "expert_group_count": ("glm4moe", {}, 2),
    "expert_group_used_count": ("deepseek2", {}, 2),
    "expert_gating_func": ("glm4moe", {}, 1),
    "expert_weights_norm": ("glm4moe", {}, False),
    "expert_weights_scale": ("glm4moe", {}, 3.0),
    "nextn_predict_layers": ("glm4moe", {}, 1),
    "ssm.conv_kernel": ("qwen35", {}, 3),
    "ssm.state_size": ("qwen35", {}, 16),
    "ssm.group_count": ("qwen35", {}, 1),
    "ssm.time_step_rank": ("qwen35", {}, 2),
    "ssm.inner_size": ("qwen35", {}, 64),
    "attention.recurrent_layers": ("qwen35", {}, [True, False, False]),
    "full_attention_interval": ("qwen35", {"attention.recurrent_layers": None, "full_attention_interval": 3}, 2),
    "shortconv.l_cache": ("lfm2", {}, 4),
    "attention.scale": ("granitehybrid", {}, 0.4),
    "embedding_scale": ("granitehybrid", {}, 1.0),
    "residual_scale": ("granitehybrid", {}, 1.0),
    "logit_scale": ("granitehybrid", {}, 1.0),
    "rope.scaling.finetuned": ("granitehybrid", {}, True),
    "attention.q_lora_rank": ("deepseek2", {}, 16),
    "attention.kv_lora_rank": ("deepseek2", {}, 16),
    "attention.key_length_mla": ("deepseek2", {}, 40),
    "attention.value_length_mla": ("deepseek2", {}, 8),
    "rope.scaling.yarn_log_multiplier": ("deepseek2", {}, 0.05),
    "attention.key_length_swa": ("gemma4", {}, 8),
    "attention.value_length_swa": ("gemma4", {}, 8),
    "rope.dimension_count_swa": ("gemma4", {}, 8),
    "attention.shared_kv_layers": ("gemma4", {}, 1),
    "embedding_length_per_layer_input": ("gemma4", {}, 8),
    "attention.temperature_scale": ("llama", {}, 0.1),
    "attention.temperature_length": ("llama", {}, 8),
}


def gguf(path: Path, family: str, values: Changes) -> Path:
    write_gguf(tiny_model(family), path, values={f"{family}.{name}": value for name, value in values.items()})
    return path


def test_every_key_of_an_architecture_changes_the_model_or_is_refused(tmp_path: Path, cache: Path) -> None:
    assert set(ARCHITECTURE_CHANGES) == set(effects(ARCHITECTURE_KEYS, HONOURED, REFUSED))
    known: dict[str, Any] = {}
    for key, (family, others, value) in ARCHITECTURE_CHANGES.items():
        kept = json.dumps([family, dict(others)])
        if kept not in known:
            known[kept] = outcome(gguf(tmp_path / "before.gguf", family, others), cache)
        before = known[kept]
        assert not isinstance(before, str), (key, before)
        name = key.replace("*", "of_tomorrow")
        after = outcome(gguf(tmp_path / "after.gguf", family, {**others, name: value}), cache)
        assert after != before, key
        if ARCHITECTURE_KEYS[key][0] == REFUSED:
            assert isinstance(after, str) and name in after


def test_keys_of_gguf_without_effect_change_nothing_and_others_are_named(tmp_path: Path, cache: Path) -> None:
    plain = outcome(gguf(tmp_path / "plain.gguf", "llama", {}), cache)
    odd = tmp_path / "odd.gguf"
    values: dict[str, Any] = {f"llama.{name}": 7 for name in effects(ARCHITECTURE_KEYS, NO_EFFECT)}
    values |= {name.replace("*", "odd"): 7 for name in effects(GGUF_KEYS, NO_EFFECT)}
    values["llama.rope.scaling.yarn_beta_fast"] = 3.0
    write_gguf(tiny_model("llama"), odd, values=values)
    assert outcome(odd, cache) == plain
    said = "llama.rope.scaling.yarn_beta_fast is 3.0, and is not read, as by llama.cpp"
    assert said in remarks(find_model(str(odd), cache=cache))
    assert not any("not known" in line for line in remarks(find_model(str(odd), cache=cache)))

    write_gguf(tiny_model("llama"), odd, values={"llama.of_tomorrow": 1, "tomorrow": 2, "llama.rope.of_tomorrow": "x"})
    assert outcome(odd, cache) == plain
    said = "keys that are not known, and are not read: tomorrow, llama.of_tomorrow, llama.rope.of_tomorrow"
    assert said in remarks(find_model(str(odd), cache=cache))


def test_keys_of_a_whole_gguf_file_are_honoured_or_refused(tmp_path: Path, cache: Path) -> None:
    for key, value, reason in (
        ("general.architecture", "mamba", "general.architecture is 'mamba'"),
        ("general.alignment", 64, "ends at byte|starts at|tensor"),
        ("general.type", "adapter", "general.type is 'adapter'"),
    ):
        write_gguf(tiny_model("llama"), tmp_path / "odd.gguf", values={key: value})
        said = outcome(tmp_path / "odd.gguf", cache)
        if key != "general.alignment":  # the writer follows it
            assert isinstance(said, str) and reason in said
    honoured = set(effects(GGUF_KEYS, HONOURED, REFUSED))
    assert honoured == {"general.architecture", "general.alignment", "general.type", *SPLIT_KEYS}


SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")  # test_gguf_model.py changes each


# -- folders ----------------------------------------------------------------------------------------------------------

_BARE = {"layer_types": None}
_SLIDING = {**_BARE, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
_OLD_ROPE = {"rope_parameters": None}
_THETA = {"rope_type": "default", "rope_theta": 5e4}
CONFIG_CHANGES: Mapping[str, tuple[str, Changes, Any]] = {
    "per_layer_config": ("gemma4", {}, {"1": {"head_dim": 8}}),
    "model_type": ("llama", {}, "qwen2"),
    "vocab_size": ("llama", {}, 300),
    "hidden_size": ("llama", {}, 32),
    "intermediate_size": ("llama", {}, 64),
    "num_hidden_layers": ("llama", {}, 1),
    "num_attention_heads": ("llama", {}, 8),
    "num_key_value_heads": ("llama", {}, 4),
    "head_dim": ("llama", {}, 8),
    "hidden_act": ("llama", {}, "gelu"),
    "hidden_activation": ("gemma2", {}, "silu"),
    **{
        f"linear_{name}": ("qwen3_next", {}, value)
        for name, value in {
            "num_key_heads": 1,
            "num_value_heads": 4,
            "key_head_dim": 8,
            "value_head_dim": 8,
            "conv_kernel_dim": 3,
        }.items()
    },
    "linear_allow_neg_eigval": ("olmo_hybrid", {}, False),
    "norm_eps": ("lfm2", {}, 0.1),
    "num_dense_layers": ("lfm2_moe", {}, 2),
    "use_expert_bias": ("lfm2_moe", {}, False),
    "conv_L_cache": ("lfm2", {}, 4),
    **{
        key: ("falcon_h1", {}, value)
        for key, value in {
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "ssm_multipliers": [2.0, 1.0, 1.0, 1.0, 1.0],
            "mlp_multipliers": [2.0, 1.0],
            **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), 2.0),
            **dict.fromkeys(("lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 2.0),
        }.items()
    },
    "mamba_norm_before_gate": ("falcon_h1 with a norm", {}, False),
    **{
        key: ("nemotron_h", {}, value)
        for key, value in {
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 3,
            "mamba_hidden_act": "gelu",
            "use_conv_bias": False,
            "use_bias": True,
            "time_step_min": 5.0,
            "layer_norm_epsilon": 0.5,
            "mlp_hidden_act": "gelu",
            "moe_shared_expert_intermediate_size": 8,
            "moe_latent_size": 16,
            "layers_block_type": ["mamba", "attention", "mlp", "mlp"],
        }.items()
    },
    "attn_layer_indices": ("bamba", {}, [0]),
    **{
        key: ("gemma4_text", {}, value)
        for key, value in {
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "top_k_experts": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 8,
        }.items()
    },
    "conv_bias": ("lfm2", {}, True),
    "full_attn_idxs": ("lfm2", {"layer_types": None, "full_attn_idxs": [1]}, [0, 1]),
    "block_auto_adjust_ff_dim": ("lfm2", {}, False),
    "block_ffn_dim_multiplier": ("lfm2", {}, 2.0),
    "block_multiple_of": ("lfm2", {}, 256),
    **{
        name: ("granitemoehybrid", {}, value)
        for name, value in {
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": [0.0, 0.01],
            "embedding_multiplier": 2.0,
            "attention_multiplier": 2.0,
            "residual_multiplier": 2.0,
            "logits_scaling": 2.0,
            "position_embedding_type": "nope",
            "shared_intermediate_size": 48,
        }.items()
    },
    "full_attention_interval": ("qwen3_next", {"layer_types": None, "full_attention_interval": 2}, 1),
    "rms_norm_eps": ("llama", {}, 0.1),
    "max_position_embeddings": ("llama", {}, 64),
    "rope_parameters": ("llama", {}, {**_THETA, "rope_theta": 100.0}),
    "rope_theta": ("llama", _OLD_ROPE, 100.0),
    "rope_scaling": ("llama", _OLD_ROPE, {"type": "linear", "factor": 4.0}),
    "partial_rotary_factor": ("glm4_moe", {"rope_parameters": None}, 1.0),
    "rope_local_base_freq": ("gemma3", {**_OLD_ROPE, "rope_theta": 5e4}, 100.0),
    "original_max_position_embeddings": (
        "llama",
        {**_OLD_ROPE, "rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        16,
    ),
    "sliding_window": ("gemma2", {}, 3),
    "sliding_window_pattern": ("gemma3", {**_BARE, "sliding_window": 3}, 2),
    "use_sliding_window": ("qwen2", _SLIDING, False),
    "max_window_layers": ("qwen2", _SLIDING, 2),
    "layer_types": ("gemma2", {"sliding_window": 3}, ["full_attention"] * 2),
    "attn_logit_softcapping": ("gemma2", {}, 0.1),
    "final_logit_softcapping": ("gemma2", {}, 0.1),
    "query_pre_attn_scalar": ("gemma2", {}, 1),
    "attention_bias": ("llama", {}, True),
    "mlp_bias": ("llama", {}, True),
    "tie_word_embeddings": ("llama", {}, False),
    "eos_token_id": ("llama", {}, [1, 7]),
    "num_local_experts": ("qwen3moe", {}, 5),
    "num_experts": ("qwen3moe", {"num_local_experts": None, "num_experts": 4}, 5),
    "num_experts_per_tok": ("qwen3moe", {}, 1),
    "moe_intermediate_size": ("qwen3moe", {}, 16),
    "norm_topk_prob": ("qwen3moe", {}, False),
    "decoder_sparse_step": ("qwen3moe", {}, 2),
    "mlp_only_layers": ("qwen3moe", {}, [0]),
    "quantization_config": ("llama", {}, {"quant_method": "bitsandbytes"}),
    "quantization": ("llama", {}, {"bits": 4, "group_size": 5}),
    "use_bidirectional_attention": ("gemma3", {}, True),
    "is_encoder_decoder": ("llama", {}, True),
    "compression_config": ("llama", {}, {"format": "dense"}),
    "transformers_weights": ("llama", {}, "other.safetensors"),
    "configuration_files": ("llama", {}, ["config.4.0.0.json"]),
    "n_routed_experts": ("glm4_moe", {}, 5),
    "n_shared_experts": ("glm4_moe", {}, 2),
    "n_group": ("glm4_moe", {}, 2),
    "topk_group": ("glm4_moe", {"n_group": 2, "topk_group": 2}, 1),
    "routed_scaling_factor": ("glm4_moe", {}, 2.0),
    "topk_method": ("deepseek_v2", {"n_group": 2, "topk_method": "greedy"}, "group_limited_greedy"),
    "first_k_dense_replace": ("glm4_moe", {}, 0),
    "mlp_layer_types": ("glm_moe_dsa", {}, ["sparse", "sparse"]),
    "use_qk_norm": ("glm4_moe", {}, True),
    "kv_lora_rank": ("deepseek_v3", {}, 8),
    "q_lora_rank": ("deepseek_v3", {}, 8),
    "qk_nope_head_dim": ("deepseek_v3", {}, 8),
    "qk_rope_head_dim": ("deepseek_v3", {}, 4),
    "v_head_dim": ("deepseek_v3", {}, 8),
    "rope_interleave": ("deepseek_v3", {}, False),
    "index_topk": ("deepseek_v32", {}, 2),
    "index_n_heads": ("deepseek_v32", {}, 4),
    "index_head_dim": ("deepseek_v32", {}, 24),
    "indexer_types": ("glm_moe_dsa", {}, ["full", "full"]),
    "index_topk_pattern": ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FS"}, "FF"),
    "index_topk_freq": ("glm_moe_dsa", {"indexer_types": None, "index_skip_topk_offset": 1, "index_topk_freq": 2}, 1),
    "index_skip_topk_offset": (
        "glm_moe_dsa",
        {"indexer_types": None, "index_skip_topk_offset": 1, "index_topk_freq": 2},
        2,
    ),
    "shared_expert_intermediate_size": ("qwen2_moe", {}, 8),
    "qkv_bias": ("qwen2_moe", {}, False),
    "no_rope_layers": ("smollm3", {}, [1, 1]),
    "no_rope_layer_interval": ("smollm3", {"no_rope_layers": None}, 1),
}


_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_INDEX = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 16}
# Families of which there are no GGUF files here.
OTHERS = {
    "smollm3": configured("SmolLM3", no_rope_layers=[0, 1]),
    "glm4_moe": configured(
        "Glm4Moe", n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16
    ),
    "deepseek_v2": configured("DeepseekV2", **_LATENT),
    "deepseek_v3": configured("DeepseekV3", **_LATENT),
    "deepseek_v32": configured("DeepseekV32", **_LATENT, **_INDEX),
    "glm_moe_dsa": configured("GlmMoeDsa", **_LATENT, **_INDEX, indexer_types=["full", "shared"]),
    "qwen3_next": configured(
        "Qwen3Next",
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "olmo_hybrid": configured(
        "OlmoHybrid",
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2_moe": configured(
        "Lfm2Moe",
        layer_types=["conv", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
    ),
    "bamba": configured("Bamba", **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": configured("FalconH1", **_MAMBA, mamba_d_ssm=128),
    "falcon_h1 with a norm": configured("FalconH1", **_MAMBA, mamba_d_ssm=128, mamba_rms_norm=True),
    "nemotron_h": configured(
        "NemotronH",
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        head_dim=16,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "gemma4_text": configured(
        "Gemma4Text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        head_dim=16,
        global_head_dim=32,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=259,
    ),
    "lfm2": configured("Lfm2", block_multiple_of=16, layer_types=["conv", "full_attention"]),
    "granitemoehybrid": configured(
        "GraniteMoeHybrid",
        num_local_experts=0,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        shared_intermediate_size=32,
        position_embedding_type="rope",
        layer_types=["linear_attention", "full_attention"],
    ),
    "qwen2_moe": configured(
        "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
}


def folder(path: Path, family: str, changes: Changes) -> Path:
    if family not in OTHERS:
        saved(path, family, config=dict(changes))
        return path
    OTHERS[family]().save_pretrained(path)
    edit(path, changes)
    return path


def edit(path: Path, changes: Changes, *, name: str = "config.json") -> None:
    content = json.loads((path / name).read_text()) if (path / name).exists() else {}
    left = {key: value for key, value in {**content, **changes}.items() if value is not None}
    (path / name).write_text(json.dumps(left))


@further_test
def test_every_key_of_a_configuration_changes_the_model_or_is_refused(tmp_path: Path, cache: Path) -> None:
    named = {"text_config"}  # of models that see, too, in tests/backends
    assert set(CONFIG_CHANGES) == set(effects(CONFIG_KEYS, HONOURED, REFUSED)) - named
    known: dict[str, Any] = {}
    for key, (family, others, value) in CONFIG_CHANGES.items():
        kept = json.dumps([family, dict(others)])
        if kept not in known:
            known[kept] = outcome(folder(tmp_path / f"before-{len(known)}", family, others), cache)
        before = known[kept]
        assert not isinstance(before, str), (key, before)
        after = outcome(folder(tmp_path / key, family, {**others, key: value}), cache)
        assert after != before, key
        if CONFIG_KEYS[key][0] == REFUSED:
            assert isinstance(after, str), key


def test_keys_of_a_configuration_without_effect_change_nothing_and_others_are_named(
    tmp_path: Path, cache: Path
) -> None:
    path = folder(tmp_path / "model", "llama", {})
    plain = outcome(path, cache)
    odd: dict[str, Any] = {
        "auto_map": {"AutoConfig": "a.B"},
        "dtype": "float16",
        "torch_dtype": "float16",
        "id2label": {"0": "a"},
    }
    odd |= {"label2id": {"a": 0}, "initializer_range": 0.5, "attention_dropout": 0.5, "problem_type": "regression"}
    odd |= {"architectures": ["LlamaForSequenceClassification"], "cache_implementation": "static"}
    odd |= dict.fromkeys(("_name_or_path", "name_or_path", "transformers_version"), "odd")
    odd |= dict.fromkeys(("attn_implementation", "_attn_implementation", "experts_implementation"), "sdpa")
    odd |= dict.fromkeys(("use_cache", "output_hidden_states", "output_attentions", "return_dict"), True)
    for name in effects(CONFIG_KEYS, NO_EFFECT):
        edit(path, {name: odd.get(name, 2)})
        assert outcome(path, cache) == plain, name
    assert remarks(find_model(str(path), cache=cache)) == ()
    edit(path, {"of_tomorrow": 1, "rope_parameters": {**_THETA, "of_tomorrow": 2}})
    assert outcome(path, cache) == plain
    assert remarks(find_model(str(path), cache=cache)) == (
        "config.json: keys that are not known: of_tomorrow",
        "config.json: rope_parameters: keys that are not known: of_tomorrow",
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3"])
def test_a_folder_that_transformers_wrote_has_no_key_that_is_not_known(
    family: str, tmp_path: Path, cache: Path
) -> None:
    saved(tmp_path / "model", family)
    assert remarks(find_model(str(tmp_path / "model"), cache=cache)) == ()


def test_an_index_of_the_one_file_of_weights_is_nothing_odd(tmp_path: Path, cache: Path) -> None:
    """As mlx-lm writes it."""
    saved(path := tmp_path / "model", "llama")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert remarks(find_model(str(path), cache=cache)) == ()


def test_ends_of_a_turn_are_read_where_only_special_tokens_map_has_them(tmp_path: Path, cache: Path) -> None:
    saved(path := tmp_path / "model", "llama", None, {"eos_token_id": None})
    (path / "generation_config.json").unlink()
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    end = config.pop("eos_token")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    found = find_model(str(path), cache=cache)
    assert file_end_ids(found, path) == ()
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": end}}))
    assert file_end_ids(found, path) == (tokenizer.eos_token_id,)
    other = next(text for text, at in tokenizer.get_vocab().items() if at != tokenizer.eos_token_id)
    both = (tokenizer.eos_token_id, tokenizer.get_vocab()[other])
    for own, called in ([], end), (["added_tokens_decoder"], other):  # which of them templates call so
        (path / "tokenizer_config.json").write_text(
            json.dumps({**config, **{key: {} for key in own}, "eos_token": other})
        )
        assert set(file_end_ids(found, path)) == {*both}
        ids = read_tokenizer_ids(path)
        assert ids is not None and ids.named["eos_token"] == tokenizer.get_vocab()[called]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_every_field_of_transformers_class(family: str) -> None:
    kind: Any = CONFIG_MAPPING[family]
    assert not unlisted([*(field.name for field in fields(kind)), *kind.attribute_map.values()], CONFIG_KEYS)


def test_keys_of_a_rotation_change_it(tmp_path: Path, cache: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 32}
    llama3 = {**yarn, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    long = {**yarn, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    scaled = {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}
    changes: dict[str, tuple[Changes, Any]] = {
        "rope_type": (yarn, "linear"),
        "type": ({"rope_theta": 5e4, "factor": 4.0}, "linear"),
        "rope_theta": (_THETA, 100.0),
        "factor": (yarn, 8.0),
        "original_max_position_embeddings": (yarn, 16),
        "attention_factor": (yarn, 2.0),
        "beta_fast": ({**yarn, "original_max_position_embeddings": 4096}, 3),
        "beta_slow": ({**yarn, "original_max_position_embeddings": 4096}, 8),
        "mscale": (scaled, 3.0),
        "mscale_all_dim": (scaled, 3.0),
        "truncate": (yarn, False),
        "low_freq_factor": (llama3, 2.0),
        "high_freq_factor": (llama3, 8.0),
        "long_factor": ({**long, "original_max_position_embeddings": 2}, [3.0] * 8),
        "short_factor": ({**long, "original_max_position_embeddings": 128}, [3.0] * 8),
    }
    by_kind = {"full_attention", "sliding_attention", "partial_rotary_factor"}  # of other families
    assert set(changes) | by_kind == set(effects(ROPE_KEYS, HONOURED, REFUSED))
    path = folder(tmp_path / "model", "llama", {})
    for key, (others, value) in changes.items():
        edit(path, {"rope_parameters": dict(others)})
        before = outcome(path, cache)
        edit(path, {"rope_parameters": {**others, key: value}})
        assert outcome(path, cache) != before, key


def test_the_layout_of_quantised_matrices_is_what_its_keys_say(tmp_path: Path, cache: Path) -> None:
    changes: dict[str, tuple[Changes, Any]] = {
        "quant_method": (GPTQ, "awq"),
        "bits": (GPTQ, 8),
        "w_bit": ({**AWQ, "bits": None}, 4),
        "group_size": (GPTQ, 64),
        "q_group_size": ({**AWQ, "group_size": None}, 64),
        "checkpoint_format": (GPTQ, "gptq_v2"),
        "version": (AWQ, "gemv"),
        "fmt": (BLOCKS, "e5m2"),
        "weight_block_size": (BLOCKS, [24, 64]),
        "format": (COMPRESSED, "pack-quantized"),
        "config_groups": (COMPRESSED, {}),
        "dynamic": (GPTQ, {"-:a": {}}),
        "sparsity_config": (COMPRESSED, {"format": "sparse-24"}),
        "transform_config": (COMPRESSED, {"config_groups": {"R1": {}}}),
        "desc_act": (GPTQ, True),
    }
    assert set(changes) == set(effects(QUANTIZATION_KEYS, HONOURED, REFUSED))
    for key, (others, value) in changes.items():
        assert _layout(others) != (after := _layout({**others, key: value})), key
        if QUANTIZATION_KEYS[key][0] == REFUSED:
            assert isinstance(after, str)
    in_gptq_order(path := tmp_path / "model", order=lambda own: own)
    plain = outcome(path, cache)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    without = dict.fromkeys(effects(QUANTIZATION_KEYS, NO_EFFECT), "odd")
    edit(path, {"quantization_config": {**config, **without, "of_tomorrow": 1}})
    assert outcome(path, cache) == plain
    assert "config.json: quantization_config: keys that are not known: of_tomorrow" in remarks(
        find_model(str(path), cache=cache)
    )


def _layout(found: Changes) -> str:
    try:
        return repr(layout_in({"quantization_config": {key: one for key, one in found.items() if one is not None}}))
    except ModelError as error:
        return str(error)
