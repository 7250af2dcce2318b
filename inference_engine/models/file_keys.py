"""The keys of model files, and what becomes of each: honoured, refused by name, or without effect.

What reads a key asks these tables for it, so a key that is read is in them. A key that a file has and they have not is
named in the log of a start, by `kakeya doctor` and `kakeya models show`. docs/reference/model_files.md is made of them.

A key that is absent has the default of the format's reference reader: llama.cpp for GGUF, transformers for folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

HONOURED, REFUSED, NO_EFFECT = "honoured", "refused", "no effect"
Keys = Mapping[str, tuple[str, str]]  # what becomes of it, and how

_MOST_NAMED = 6
_TRAINING = "training"
_MODULES = "how transformers' modules compute"
_KV_HEADS = (
    "KV heads; absent: as many as query heads. `granitehybrid`, `lfm2`, `lfm2moe`, `qwen35`, `qwen35moe`, `qwen3next`: "
    "a layer with 0 has no attention"
)
_ROTATED = (
    "the numbers of a head that are rotated; absent: all. `glm4moe`, `phi3`, `qwen3next`, `qwen35`, `qwen35moe`: or a "
    "part; `deepseek2`, `minicpm3`: required; `nemotron_h`: no effect; others refuse a part"
)
_WINDOWS = (
    "`gemma2`: absent 4,096; `gemma3`: absent or 0 none; `gemma4`, `gpt-oss`: required; `llama`: as Mistral's, "
    "`phi3`: as Phi-3's, llama.cpp ignores both; `lfm2`, `lfm2moe`: refused; others: none"
)
_INNER_OF_EXPERTS = (
    "`qwen2moe`, `qwen3moe`, `qwen35moe`, `qwen3next`: absent, `feed_forward_length` by `expert_used_count`; other "
    "mixtures: required; `llama`, `granitehybrid`: no effect, experts have `feed_forward_length`"
)
_SCORES = (
    "1, softmax, or 2, sigmoid. `deepseek2`: absent 1, but for the sizes of GLM-4.7-Flash; `glm4moe`: absent 2; "
    "`lfm2moe`: 2, required; others: no effect"
)
_NOT_IN_LLAMA_CPP = "llama.cpp does not read it for these models; the log names a value that is not YaRN's own"
_OTHER_MODELS = "llama.cpp reads it for other models"
_DECIDED = "the tensors decide"
_ABOUT = "about the file"
_DEFAULTS_OF_SAMPLING = "sampling is what a request says"


def _keys(*rows: tuple[str, str, str]) -> Keys:
    """Rows of names, separated by blanks, what becomes of them, and how."""
    return MappingProxyType({name: (effect, how) for names, effect, how in rows for name in names.split()})


# -- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_KEYS = _keys(
    (
        "general.architecture",
        HONOURED,
        "those of [GGUF files](../gguf.md); others are refused",
    ),
    ("general.alignment", HONOURED, "where tensors begin; absent: 32"),
    ("general.type", REFUSED, "adapters, projectors and matrices of importance; absent or `model` is a model"),
    ("split.no split.count", HONOURED, "compared with the names of the files; absent: one file"),
    ("split.tensors.count", HONOURED, "compared with the tensors of all files"),
    ("general.quantization_version general.file_type", NO_EFFECT, "each tensor has its own type"),
    ("general.sampling.*", NO_EFFECT, _DEFAULTS_OF_SAMPLING),
    ("general.*", NO_EFFECT, "names, authors, licences and sources"),
    ("quantize.imatrix.*", NO_EFFECT, _ABOUT),
)

# Below the name of the architecture.
ARCHITECTURE_KEYS = _keys(
    ("context_length", HONOURED, "the trained positions; required"),
    ("embedding_length block_count", HONOURED, "sizes, which the tensors must have; required"),
    (
        "feed_forward_length",
        HONOURED,
        "likewise; not required where experts have a size of their own; `gemma4`: or a value for each layer",
    ),
    ("attention.head_count", HONOURED, "query heads; required"),
    ("attention.head_count_kv", HONOURED, _KV_HEADS),
    ("attention.key_length", HONOURED, "numbers of a head; absent: `embedding_length` by heads"),
    ("attention.value_length", HONOURED, "must equal the former, which is its default"),
    ("attention.layer_norm_rms_epsilon", HONOURED, "required"),
    ("rope.dimension_count", HONOURED, _ROTATED),
    ("rope.dimension_sections", NO_EFFECT, "a token of text has one position, whatever pictures have"),
    ("rope.freq_base", HONOURED, "absent: 10,000"),
    ("rope.freq_base_swa", HONOURED, "`gemma3`, `gemma4`: of layers with a window; absent: 10,000"),
    (
        "attention.key_length_swa attention.value_length_swa rope.dimension_count_swa",
        HONOURED,
        "`gemma4`: of layers with a window, all alike; the first is required",
    ),
    (
        "rope.scaling.type",
        HONOURED,
        "`none`, `linear` or `yarn`, `longrope` of `phi3`; absent: `linear`, if there is a factor",
    ),
    ("rope.scaling.factor", HONOURED, "absent or 0: 1"),
    ("rope.scale_linear", HONOURED, "the old name, read where the former is not there"),
    ("rope.scaling.original_context_length", HONOURED, "of YaRN and `phi3`; absent or 0: `context_length`"),
    ("rope.scaling.attn_factor", HONOURED, "what YaRN's factor of attention is multiplied with, `phi3`'s; absent: 1"),
    ("rope.scaling.*", REFUSED, "other scalings of the rotation"),
    ("rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor", NO_EFFECT, _NOT_IN_LLAMA_CPP),
    ("rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow", NO_EFFECT, _NOT_IN_LLAMA_CPP),
    (
        "rope.scaling.yarn_log_multiplier",
        HONOURED,
        "`deepseek2`: a tenth of what scales attention with YaRN, required there; others: no effect",
    ),
    ("rope.scaling.alpha", NO_EFFECT, _OTHER_MODELS),
    ("attention.sliding_window", HONOURED, _WINDOWS),
    (
        "attention.sliding_window_pattern",
        HONOURED,
        "`gemma2`, `gpt-oss`: absent 2; `gemma3`: absent 6, or a value for each layer, which `gemma4` requires",
    ),
    ("attn_logit_softcapping", HONOURED, "`gemma2`: absent 50; `gemma3`: absent none; 0: none; others: no effect"),
    (
        "final_logit_softcapping",
        HONOURED,
        "`gemma2`: absent 30; `gemma3`, `gemma4`: absent none; 0: none; others: no effect",
    ),
    (
        "expert_count expert_used_count",
        HONOURED,
        "mixtures: required; absent or 0: `llama`, `gemma4` and `granitehybrid` are dense",
    ),
    ("expert_feed_forward_length", HONOURED, _INNER_OF_EXPERTS),
    (
        "expert_shared_feed_forward_length",
        HONOURED,
        "`qwen2moe`, `qwen35moe`, `qwen3next`: absent, `feed_forward_length`; `granitehybrid`: required of mixtures",
    ),
    ("expert_shared_count", HONOURED, "`glm4moe`, `deepseek2`: required"),
    ("leading_dense_block_count", HONOURED, "`glm4moe`, `deepseek2`, `lfm2moe`: layers without experts; absent: 0"),
    (
        "expert_group_count expert_group_used_count",
        HONOURED,
        "`glm4moe`, `deepseek2`: absent, no groups; other mixtures with groups are refused",
    ),
    ("expert_gating_func", HONOURED, _SCORES),
    ("expert_weights_norm", HONOURED, "`glm4moe`, `deepseek2`: absent false; others: no effect, each has its own way"),
    ("expert_weights_scale", HONOURED, "`glm4moe`, `deepseek2`: absent or 0: 1; others: no effect"),
    ("nextn_predict_layers", HONOURED, "how many of the layers predict later tokens, and are not loaded; absent: 0"),
    (
        "ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size",
        HONOURED,
        "layers with a recurrent state: sizes, which the tensors must have; required",
    ),
    ("attention.recurrent_layers", HONOURED, "`qwen35`, `qwen35moe`, `qwen3next`: which layers have a recurrent state"),
    (
        "full_attention_interval",
        HONOURED,
        "the same, where the former is not there: every so many have none; absent: 4",
    ),
    ("shortconv.l_cache", HONOURED, "`lfm2`, `lfm2moe`: inputs of a short convolution; required"),
    (
        "attention.scale embedding_scale residual_scale logit_scale",
        HONOURED,
        "`granitehybrid`: absent or 0: 1, of attention the inverse root of a head's size; others: no effect",
    ),
    (
        "attention.q_lora_rank attention.kv_lora_rank",
        HONOURED,
        "`deepseek2`, `minicpm3`: sizes, which the tensors must have; absent, queries have no rank",
    ),
    (
        "attention.key_length_mla attention.value_length_mla",
        HONOURED,
        "`deepseek2`: numbers of a head; absent: `attention.key_length` and `attention.value_length`, in older files",
    ),
    ("attention.shared_kv_layers", HONOURED, "`gemma4`: the last layers, which read the K and V of others; absent: 0"),
    ("embedding_length_per_layer_input", HONOURED, "`gemma4`: of E2B and E4B; absent or 0: none"),
    ("attention.temperature_scale attention.temperature_length", REFUSED, "attention scaled by position; 0: none"),
    ("attention.causal", REFUSED, "false: attention to later tokens; absent: true"),
    ("rope.scaling.finetuned", HONOURED, "`granitehybrid`: false: no rotation; absent: true; others: no effect"),
    ("vocab_size", NO_EFFECT, "the rows of the embedding decide"),
    ("tensor_data_layout", NO_EFFECT, "llama.cpp's own note of its converter"),
    ("pooling_type", NO_EFFECT, "for embeddings of texts"),
)

_ID = "this token of the tokenizer has this id; absent or 2³²−1 means none"
_END = f"{_ID}; it ends a turn"
_END_OF_FILLING = f"{_END}, as in llama.cpp"
_FILL = "no token is filled in between a prefix and a suffix"
_NO_UNIGRAM = "of Unigram tokenizers, which are refused by `tokenizer.ggml.model`"
_NO_WORDPIECE = "of WordPiece tokenizers, which are refused by `tokenizer.ggml.model`"
# A tokenizer is not made of a header with any other key `tokenizer.ggml.*`; it is refused, by name.
TOKENIZER_KEYS: Keys = MappingProxyType(
    {
        "tokenizer.ggml.model": (
            HONOURED,
            "`gpt2` (byte-level BPE), `llama` (SentencePiece) or `gemma4` (with merges); others are refused",
        ),
        "tokenizer.ggml.pre": (HONOURED, "how byte-level BPE splits text before merges; a name not known is refused"),
        "tokenizer.ggml.tokens": (HONOURED, "the texts; two equal ones are refused, an empty one is `[EMPTY_<id>]`"),
        "tokenizer.ggml.token_type": (HONOURED, "normal, unknown, control, user defined, unused, byte; absent: normal"),
        "tokenizer.ggml.scores": (HONOURED, "the order of merges of SentencePiece, but for Gemma's, where ids are"),
        "tokenizer.ggml.merges": (HONOURED, "the merges in their order; of SentencePiece, absent: by scores"),
        "tokenizer.ggml.bos_token_id": (HONOURED, f"{_ID}, but for SentencePiece 1"),
        "tokenizer.ggml.eos_token_id": (HONOURED, f"{_END}, but for SentencePiece 2"),
        "tokenizer.ggml.eot_token_id": (
            HONOURED,
            f"{_END}; so do texts such as `<|im_end|>`, by llama.cpp's list, and the chat template's end of a turn",
        ),
        "tokenizer.ggml.eom_token_id": (HONOURED, _END),
        "tokenizer.ggml.eos_token_ids": (HONOURED, "these tokens end a turn, too; in Ollama's files"),
        "tokenizer.ggml.unknown_token_id": (HONOURED, f"{_ID}, but for SentencePiece 0"),
        "tokenizer.ggml.padding_token_id": (HONOURED, _ID),
        "tokenizer.ggml.seperator_token_id": (HONOURED, _ID),
        "tokenizer.ggml.cls_token_id": (HONOURED, _ID),
        "tokenizer.ggml.mask_token_id": (HONOURED, _ID),
        "tokenizer.ggml.fim_pre_token_id": (NO_EFFECT, _FILL),
        "tokenizer.ggml.fim_suf_token_id": (NO_EFFECT, _FILL),
        "tokenizer.ggml.fim_mid_token_id": (NO_EFFECT, _FILL),
        "tokenizer.ggml.fim_pad_token_id": (HONOURED, _END_OF_FILLING),
        "tokenizer.ggml.fim_rep_token_id": (HONOURED, _END_OF_FILLING),
        "tokenizer.ggml.fim_sep_token_id": (HONOURED, _END_OF_FILLING),
        "tokenizer.ggml.prefix_token_id": (NO_EFFECT, _FILL),
        "tokenizer.ggml.suffix_token_id": (NO_EFFECT, _FILL),
        "tokenizer.ggml.middle_token_id": (NO_EFFECT, _FILL),
        "tokenizer.ggml.add_bos_token": (
            HONOURED,
            "bos before a text that is no chat; absent: true for SentencePiece, Llama 3, Tekken; `gemma4`: always true",
        ),
        "tokenizer.ggml.add_eos_token": (HONOURED, "eos after a text that is no chat; absent: false"),
        "tokenizer.ggml.add_sep_token": (NO_EFFECT, "between two texts, and one at a time is encoded"),
        **dict.fromkeys(
            (f"tokenizer.ggml.add_{name}_token" for name in ("unknown", "padding", "cls", "mask")),
            (NO_EFFECT, "nor does llama.cpp add one; in Ollama's files"),
        ),
        "tokenizer.ggml.add_space_prefix": (
            HONOURED,
            "SentencePiece's space before a text and after every special token; absent: true. No effect on BPE",
        ),
        "tokenizer.ggml.remove_extra_whitespaces": (NO_EFFECT, _NO_UNIGRAM),
        "tokenizer.ggml.precompiled_charsmap": (NO_EFFECT, _NO_UNIGRAM),
        "tokenizer.ggml.normalizer.lowercase": (NO_EFFECT, _NO_WORDPIECE),
        "tokenizer.ggml.normalizer.strip_accents": (NO_EFFECT, _NO_WORDPIECE),
        "tokenizer.ggml.token_type_count": (NO_EFFECT, _NO_WORDPIECE),
        "tokenizer.ggml.suppress_tokens": (REFUSED, "ids that are never sampled; a model has no such list here"),
        "tokenizer.chat_template": (HONOURED, "the chat template"),
        "tokenizer.chat_template.NAME": (HONOURED, "a chat template of this name; letters, digits, `_` and `-`"),
        "tokenizer.chat_templates": (NO_EFFECT, "the names of the former; the log names those that are not there"),
        "tokenizer.huggingface.json": (NO_EFFECT, "what the other keys say, once more"),
        "tokenizer.rwkv.world": (NO_EFFECT, "of RWKV, which is refused by `general.architecture`"),
    }
)


# -- folders ----------------------------------------------------------------------------------------------------------

_ROPE = "the rotation; absent: the default of the class"
CONFIG_KEYS = _keys(
    ("model_type", HONOURED, "the class of transformers; required"),
    ("text_config", HONOURED, "the text model of one that sees, too"),
    ("vocab_size hidden_size intermediate_size num_hidden_layers", HONOURED, "sizes, which the tensors must have"),
    ("num_attention_heads num_key_value_heads head_dim", HONOURED, "sizes, which the tensors must have"),
    ("num_local_experts", HONOURED, "mixtures of experts"),
    ("num_experts", HONOURED, "the old name, read where the former is not there"),
    ("num_experts_per_tok moe_intermediate_size norm_topk_prob", HONOURED, "mixtures of experts"),
    ("n_routed_experts n_shared_experts shared_expert_intermediate_size", HONOURED, "mixtures of experts"),
    ("n_group topk_group topk_method routed_scaling_factor", HONOURED, "how experts are chosen and weighed"),
    (
        "decoder_sparse_step mlp_only_layers first_k_dense_replace mlp_layer_types",
        HONOURED,
        "which layers have experts",
    ),
    (
        "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
        HONOURED,
        "latent attention: sizes, which the tensors must have",
    ),
    ("rope_interleave", HONOURED, "latent attention: in which order numbers are rotated in pairs"),
    ("index_topk index_n_heads index_head_dim", HONOURED, "latent attention to tokens that an indexer chooses"),
    ("indexer_types", HONOURED, "which layers have an indexer; others read what the one before has chosen"),
    ("index_topk_pattern index_topk_freq index_skip_topk_offset", HONOURED, "the same, where it is not there"),
    ("hidden_act hidden_activation", HONOURED, "the activation of the feed-forward layers"),
    ("rms_norm_eps", HONOURED, "of every norm"),
    ("max_position_embeddings", HONOURED, "the trained positions"),
    ("rope_parameters", HONOURED, _ROPE),
    ("rope_theta rope_scaling", HONOURED, "the old names, read where `rope_parameters` does not say it"),
    ("partial_rotary_factor", HONOURED, "the same, the part of a head that is rotated"),
    ("rope_local_base_freq", HONOURED, "the same, of Gemma's layers with a window"),
    ("original_max_position_embeddings", HONOURED, "the same, of `yarn`, `llama3` and `longrope`"),
    ("sliding_window use_sliding_window max_window_layers layer_types", HONOURED, "windows of layers"),
    ("per_layer_config", HONOURED, "what single layers have otherwise, as transformers writes it"),
    ("sliding_window_pattern", HONOURED, "Gemma's old name, read where `layer_types` is not there"),
    ("no_rope_layers no_rope_layer_interval", HONOURED, "layers without rotation"),
    ("attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar", HONOURED, "of Gemma"),
    ("attention_bias mlp_bias qkv_bias use_qk_norm", HONOURED, "biases and norms, which the tensors must have"),
    ("tie_word_embeddings", HONOURED, "another head in the file is used all the same, and the log says so"),
    ("eos_token_id", HONOURED, "one end of a turn, or several"),
    ("quantization_config", HONOURED, "see below"),
    (
        "quantization",
        HONOURED,
        "MLX's layout: `bits` and `group_size` of all matrices and of single ones; `mode` affine",
    ),
    ("use_bidirectional_attention", REFUSED, "attention to later tokens"),
    ("is_encoder_decoder", REFUSED, "an encoder beside a decoder"),
    ("compression_config", REFUSED, "other quantised checkpoints"),
    ("transformers_weights", REFUSED, "weights under another name"),
    ("configuration_files", REFUSED, "other configurations"),
    ("architectures", NO_EFFECT, "but where transformers has several classes of that type that generate text"),
    ("auto_map", NO_EFFECT, "code of the folder is never run; below another key it is refused"),
    ("attn_implementation _attn_implementation experts_implementation", NO_EFFECT, "attention is the runtime's own"),
    ("dtype torch_dtype", NO_EFFECT, "each tensor has its own type"),
    ("bos_token_id pad_token_id", NO_EFFECT, "the tokenizer's, which clients have"),
    ("attention_dropout initializer_range output_router_logits router_aux_loss_coef", NO_EFFECT, _TRAINING),
    ("pretraining_tp router_jitter_noise embd_pdrop resid_pdrop", NO_EFFECT, _TRAINING),
    ("linear_num_key_heads linear_num_value_heads linear_conv_kernel_dim", HONOURED, "layers with a recurrent state"),
    ("linear_key_head_dim linear_value_head_dim linear_allow_neg_eigval", HONOURED, "the same"),
    ("linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor", NO_EFFECT, _TRAINING),
    ("linear_key_head_dim linear_value_head_dim", HONOURED, "the same"),
    ("norm_eps", HONOURED, "of every norm, of LFM2"),
    ("conv_L_cache conv_bias", HONOURED, "LFM2's layers with a short convolution"),
    ("full_attn_idxs", HONOURED, "the same: which layers have none, where `layer_types` is not there"),
    ("num_dense_layers use_expert_bias", HONOURED, "LFM2's mixtures: layers before the first with experts; the bias"),
    ("block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of", HONOURED, "LFM2's feed-forward layers"),
    ("mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups mamba_d_conv", HONOURED, "layers with a state space"),
    ("mamba_expand mamba_conv_bias mamba_proj_bias time_step_limit", HONOURED, "the same"),
    ("mamba_chunk_size chunk_size", NO_EFFECT, "how many tokens of a prefill are computed together"),
    ("mamba_d_ssm mamba_rms_norm mamba_norm_before_gate projectors_bias", HONOURED, "Falcon-H1's state space"),
    ("attention_in_multiplier attention_out_multiplier key_multiplier", HONOURED, "factors of Falcon-H1"),
    ("lm_head_multiplier mlp_multipliers", HONOURED, "the same"),
    ("ssm_in_multiplier ssm_out_multiplier ssm_multipliers", HONOURED, "the same"),
    ("mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel", HONOURED, "Nemotron-H's state space"),
    ("mamba_hidden_act use_conv_bias use_bias time_step_min layer_norm_epsilon", HONOURED, "the same"),
    ("mlp_hidden_act moe_shared_expert_intermediate_size moe_latent_size", HONOURED, "Nemotron-H's other layers"),
    ("attn_layer_indices layers_block_type", HONOURED, "which layers have attention; the latter is `layer_types`"),
    (
        "attention_k_eq_v num_kv_shared_layers",
        HONOURED,
        "Gemma 4: values made of keys, layers that read others' entries",
    ),
    ("use_double_wide_mlp enable_moe_block top_k_experts", HONOURED, "Gemma 4's feed-forward layers"),
    ("hidden_size_per_layer_input vocab_size_per_layer_input", HONOURED, "Gemma 4's inputs of layers"),
    ("expand time_step_max time_step_floor hidden_dropout rescale_prenorm_residual", NO_EFFECT, _TRAINING),
    ("z_loss_coefficient", NO_EFFECT, _TRAINING),
    (
        "num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype moe_shared_expert_overlap residual_in_fp32",
        NO_EFFECT,
        _MODULES,
    ),
    ("embedding_multiplier attention_multiplier residual_multiplier logits_scaling", HONOURED, "of Granite"),
    ("position_embedding_type shared_intermediate_size", HONOURED, "of Granite"),
    ("full_attention_interval", HONOURED, "the same: which layers have none, where `layer_types` is not there"),
    ("num_mtp_layers num_nextn_predict_layers", NO_EFFECT, "layers that predict later tokens are not run"),
    ("mtp_num_hidden_layers mtp_use_dedicated_embeddings mtp_layers_block_type", NO_EFFECT, "the same"),
    ("use_cache cache_implementation", NO_EFFECT, "K and V are the runtime's own"),
    ("chunk_size_feed_forward output_hidden_states output_attentions return_dict", NO_EFFECT, "of transformers' calls"),
    ("qk_head_dim", NO_EFFECT, "the sum of `qk_nope_head_dim` and `qk_rope_head_dim`"),
    ("id2label label2id problem_type", NO_EFFECT, "of other kinds of models"),
    ("transformers_version _name_or_path name_or_path", NO_EFFECT, _ABOUT),
    ("_sliding_window_pattern is_llama_config rope_interleaved use_mrope", NO_EFFECT, "transformers does not read it"),
    ("transformers.js_config unsloth_version unsloth_fixed", NO_EFFECT, "of other runtimes and tools"),
)

# In `rope_parameters` or `rope_scaling`, once or for each kind of layer.
ROPE_KEYS = _keys(
    ("rope_type", HONOURED, "`default`, `linear`, `yarn`, `llama3`, `longrope`; `dynamic` up to the trained length"),
    ("type", HONOURED, "the old name of the former"),
    ("rope_theta", HONOURED, "absent: the default of the class"),
    ("factor", HONOURED, "of all but `default`"),
    ("original_max_position_embeddings", HONOURED, "of `yarn`, `llama3`, `longrope`; absent: the trained positions"),
    ("attention_factor", HONOURED, "of `yarn` and `longrope`"),
    ("beta_fast beta_slow mscale mscale_all_dim truncate", HONOURED, "of `yarn`"),
    ("low_freq_factor high_freq_factor", HONOURED, "of `llama3`"),
    ("partial_rotary_factor", HONOURED, "the part of a head that is rotated"),
    ("short_factor long_factor", HONOURED, "of `longrope`; a session's limit says which"),
    ("full_attention sliding_attention", HONOURED, "these keys again, for layers of a kind"),
    ("mrope_section mrope_interleaved", NO_EFFECT, "a token of text has one position, whatever pictures have"),
    ("finetuned", NO_EFFECT, _TRAINING),
)

QUANTIZATION_KEYS = _keys(
    ("quant_method", HONOURED, "`fp8`, `fbgemm_fp8`, `compressed-tensors`, `gptq` or `awq`; others are refused"),
    ("bits w_bit", HONOURED, "4"),
    ("group_size q_group_size", HONOURED, "32, 64, 128, or -1: all inputs"),
    ("checkpoint_format", HONOURED, "GPTQ: `gptq` or `gptq_v2`; absent: `gptq`"),
    ("version", HONOURED, "AWQ: `gemm`"),
    ("fmt", HONOURED, "fp8: `e4m3`"),
    ("weight_block_size", HONOURED, "fp8: of one scale; absent: an output, or the matrix"),
    ("format config_groups", HONOURED, "compressed-tensors: one group of `float-quantized` matrices"),
    ("dynamic", REFUSED, "GPTQ: settings of their own for some matrices"),
    ("sparsity_config", REFUSED, "compressed-tensors: other formats than `dense`"),
    ("transform_config", REFUSED, "compressed-tensors: matrices that are rotated"),
    ("desc_act", HONOURED, "GPTQ: `g_idx` decides; inputs in another order than that of groups are refused"),
    ("modules_to_not_convert modules_to_convert ignore ignored_layers lm_head", NO_EFFECT, _DECIDED),
    ("zero_point sym", NO_EFFECT, _DECIDED),
    (
        "activation_scheme activation_scale_ub kv_cache_scheme",
        NO_EFFECT,
        "neither activations nor K and V are quantised",
    ),
    ("static_groups true_sequential damp_percent damp_auto_increment mse", NO_EFFECT, "of what quantised it"),
    ("dataset tokenizer batch_size model_seqlen block_name_to_quantize", NO_EFFECT, "of what quantised it"),
    ("module_name_preceding_first_block modules_in_block_to_quantize", NO_EFFECT, "of what quantised it"),
    ("quantizer meta pack_dtype quantization_status global_compression_ratio", NO_EFFECT, "of what quantised it"),
    ("model_name_or_path model_file_base_name", NO_EFFECT, _ABOUT),
    ("use_cuda_fp16 use_exllama exllama_config max_input_length cache_block_outputs", NO_EFFECT, "of other runtimes"),
    ("backend do_fuse fuse_max_seq_len modules_to_fuse pad_token_id", NO_EFFECT, "of other runtimes"),
)

INDEX_KEYS = _keys(
    ("weight_map", HONOURED, "names the shards; which of them has a tensor, the shards say"),
    ("metadata", NO_EFFECT, "a `total_size` that the shards do not have is named in the log"),
)

GENERATION_KEYS = _keys(
    ("eos_token_id", HONOURED, "one end of a turn, or several, with those of the other files"),
    ("*", NO_EFFECT, f"{_DEFAULTS_OF_SAMPLING}; ids of other tokens are the tokenizer's"),
)

TOKENIZER_CONFIG_KEYS = _keys(
    (
        "bos_token eos_token eot_token eom_token pad_token",
        HONOURED,
        "compared with the model's rows; without `added_tokens_decoder` special_tokens_map.json's. Ends are both's",
    ),
    ("auto_map", NO_EFFECT, "code of the folder is never run"),
    ("model_max_length", NO_EFFECT, "the length of a session is the model's"),
    ("*", HONOURED, "by transformers' class of tokenizers, for clients with text; the runtime has ids"),
)


def unlisted(given: Iterable[str], keys: Keys) -> list[str]:
    """Those of `given` that a table lacks, sorted. A key of it that ends with `*` stands for all that begin like it."""
    starts = tuple(key.removesuffix("*") for key in keys if key.endswith("*"))
    return sorted(key for key in given if key not in keys and not (starts and key.startswith(starts)))


def in_a_line(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}"


def unlisted_in_gguf(given: Iterable[str], architecture: str) -> list[str]:
    """Keys of a header that neither the tables here nor that of the tokenizer has."""
    own = f"{architecture}."
    names = [key for key in given if key not in TOKENIZER_KEYS and not _TEMPLATE.fullmatch(key)]
    below = unlisted((key.removeprefix(own) for key in names if key.startswith(own)), ARCHITECTURE_KEYS)
    return [*unlisted((key for key in names if not key.startswith(own)), GGUF_KEYS), *(own + key for key in below)]


_TEMPLATE = re.compile(r"tokenizer\.chat_template\.[\w-]+", re.ASCII)
