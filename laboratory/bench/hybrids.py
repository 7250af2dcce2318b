"""Prefill and decode of a hybrid model on the native backend and by torch's modules, beside transformers.

A few layers of Qwen3.5-0.8B's sizes with random weights: three of four keep a recurrent state. Rounds are those of
`decode.py`: transformers' `generate` with its cache, then ours, at each length. Both of ours load what was saved of the
same model.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from inference_engine.compose import admit, open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.kv.parts.recurrent import RecurrentStates
from laboratory.bench.decode import SEED, measure, values_of
from laboratory.bench.experiments import Save
from laboratory.bench.shared import check_rounds, device_name, named
from laboratory.evaluation import record

# What runs it, and what it does with the weights: they are stored in float32.
CONTENDERS = {"native": ("native", "auto"), "native int4": ("native", "int4"), "torch": ("torch", "auto")}


def config_of(layers: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=2**15,
        tie_word_embeddings=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 8000], metavar="N")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="a multiple of 4")
    parser.add_argument("--tokens", type=int, default=16, metavar="N", help="that are decoded in a round")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        own = Qwen3_5ForCausalLM._from_config(config_of(arguments.layers), attn_implementation="sdpa")
    own = own.eval().requires_grad_(requires_grad=False)
    engines: dict[str, Engine] = {}
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        own.save_pretrained(Path(folder, "model"))
        settings = ModelConfig(model=f"{folder}/model", cache_dir=f"{folder}/cache", device="cpu")
        admitted = admit(settings)
        for name, (backend, weights) in CONTENDERS.items():
            forward = open_backend(replace(settings, backend=backend, weights=weights), admitted)
            geometry = forward.geometry(page_tokens=16, segment_tokens=256)
            states = RecurrentStates.bytes_of(geometry)
            values[f"bytes of states, {name}"] = record.exact(states, "bytes")
            limit = 2 * (max(arguments.lengths) + arguments.tokens + 256)
            config = EngineConfig(kv_bytes=limit * geometry.entry_bytes + 2 * states, share_prefixes="off")
            engines[name] = stack.enter_context(Engine(forward, config))
        cells = measure(own, engines, arguments.lengths, arguments.rounds, arguments.tokens)
    for length, cell in cells.items():
        for word, attribute in (("decode", "token_seconds"), ("prefill", "first_seconds")):
            for name in ("native", "native int4"):
                ratio = cell.ratios("torch", name, attribute)
                values[f"{word} speed, {name} ÷ torch, at {length}"] = record.summarize(ratio, "ratio")
    return {
        "experiment": named("hybrids", argparse.Namespace(device="cpu", dtype="float32")),
        "what": "A model of Qwen3.5-0.8B's sizes, of few layers: a token and a prompt, natively and by modules.",
        "config": {
            "device": device_name("cpu"),
            "layers": arguments.layers,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
        },
        "seeds": [SEED],
        "values": {**values_of(cells, arguments.tokens), **values},
        "headlines": [f"decode speed, native ÷ torch, at {max(arguments.lengths)}"],
        "baseline": "transformers generate(), its DynamicCache and sdpa attention, same process, same weights",
    }
