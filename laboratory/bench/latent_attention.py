"""Prefill and decode of a model with latent attention beside transformers, which expands the history in every step.

A few layers of DeepSeek V2 Lite's sizes with random weights, dense, as experts say nothing of attention; products with
weights are torch's on both sides. Rounds are those of `decode.py`: transformers' `generate` with its DynamicCache and
sdpa attention, then ours, at each length.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedModel

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.backends.twin import admit_config
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.kernels.ops import open_ops
from inference_engine.models import LoadedModel
from inference_engine.models.seam import ATTENTION
from laboratory.bench.decode import SEED, measure, values_of
from laboratory.bench.experiments import Save
from laboratory.bench.shared import check_rounds, device_name, named
from laboratory.evaluation import record


def config_of(layers: int, heads: int) -> DeepseekV2Config:
    return DeepseekV2Config(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=10_944,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=layers,
        num_experts_per_tok=6,
        max_position_embeddings=2**15,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )


def made(config: DeepseekV2Config, settings: ModelConfig) -> tuple[PreTrainedModel, TorchForward]:
    """The same random weights, as transformers runs them and as we do."""
    with torch.random.fork_rng(), torch.device(settings.device):
        torch.manual_seed(SEED)
        own = DeepseekV2ForCausalLM._from_config(
            config, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        )
    own = own.eval().requires_grad_(requires_grad=False)
    taken = copy.deepcopy(own)
    taken.set_attn_implementation(ATTENTION)
    loaded = LoadedModel(
        model=taken,
        model_id="deepseek-v2-lite",
        folder=Path(),
        trained_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        dtype=settings.dtype,
        device=settings.device,
        weights_sha256=None,
    )
    ops = open_ops(settings.kernels, torch.device(settings.device))
    return own, serve_loaded(loaded, settings, admit_config(copy.deepcopy(config)), ops=ops)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096], metavar="N")
    parser.add_argument("--layers", type=int, default=2, metavar="N")
    parser.add_argument("--heads", type=int, default=16, metavar="N")
    parser.add_argument("--tokens", type=int, default=8, metavar="N", help="that are decoded in a round")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    settings = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain")
    config = config_of(arguments.layers, arguments.heads)
    own, forward = made(config, settings)
    entry_bytes = forward.geometry(page_tokens=16, segment_tokens=256).entry_bytes
    limit = 2 * (max(arguments.lengths) + arguments.tokens + 256)
    with Engine(forward, EngineConfig(kv_bytes=limit * entry_bytes, share_prefixes="off")) as engine:
        cells = measure(own, {"ours": engine}, arguments.lengths, arguments.rounds, arguments.tokens)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    expanded = arguments.layers * arguments.heads * width * forward.compute_dtype.itemsize
    return {
        "experiment": named("latent_attention", arguments),
        "what": "Whole models of DeepSeek V2 Lite's sizes, of few layers and without experts: a token and a prompt.",
        "config": {
            "device": device_name(arguments.device),
            "dtype": arguments.dtype,
            "layers": arguments.layers,
            "heads": arguments.heads,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
        },
        "seeds": [SEED],
        "values": {
            **values_of(cells, arguments.tokens),
            "bytes of a token": record.exact(entry_bytes, "bytes"),
            "bytes of a token ÷ of its expanded K and V": record.exact(entry_bytes / expanded, "ratio"),
        },
        "headlines": [f"decode speed, ours ÷ transformers, at {max(arguments.lengths)}"],
        "baseline": "transformers generate(), its DynamicCache and sdpa attention, same process, same weights",
    }
