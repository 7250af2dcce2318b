"""Prefill and decode against transformers' own `generate` with its cache, in one process and interleaved.

Each round runs, at each history length, transformers, then ours in batched mode, then ours in fixed-shape mode; ratios
are taken within a round, so a slow minute of the machine hits all three. Greedy tokens are compared too: a fast wrong
answer is no answer. Unless the native backend computes, a profile says what decodes and prefills spend their time on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from inference_engine.backends.base import Forward
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.decode.verifier import Block, Verifier
from inference_engine.engine import Engine
from inference_engine.errors import BackendError
from inference_engine.kernels.sampler import Sampler
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.models import load_model
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, device_name, model_config, named
from laboratory.evaluation import record

SEED = 1
_LINEAR = ("aten::mm", "aten::addmm", "linear", "gemm", "gemv", "cublas", "cutlass", "nvjet")
_ATTENTION = ("scaled_dot_product", "attention", "attend", "fmha", "flash")


@dataclass(frozen=True, slots=True)
class Run:
    """One Generate: seconds to the first token, seconds a token after it, and what came out."""

    first_seconds: float
    token_seconds: float
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Cell:
    """All rounds of one history length, by contestant."""

    runs: dict[str, list[Run]] = field(default_factory=dict)

    def add(self, name: str, run: Run) -> None:
        self.runs.setdefault(name, []).append(run)

    def ratios(self, over: str, under: str, attribute: str) -> list[float]:
        pairs = zip(self.runs[over], self.runs[under], strict=True)
        return [getattr(one, attribute) / getattr(other, attribute) for one, other in pairs]


class _Stamps(BaseStreamer):  # type: ignore[misc]
    """Notes when each token came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def run_transformers(model: PreTrainedModel, history: list[int], count: int) -> Run:
    stamps = _Stamps()
    ids = torch.tensor([history], device=model.device)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            streamer=stamps,
            pad_token_id=0,
        )
    times = stamps.times[1:]
    return Run(times[0] - began, (times[-1] - times[0]) / (count - 1), tuple(out[0, len(history) :].tolist()))


def run_ours(engine: Engine, history: list[int], count: int) -> Run:
    session = engine.create_session(limit_tokens=len(history) + count, guaranteed=True).session_id
    return run_in(engine, session, history, count)


def run_in(engine: Engine, session: str, history: list[int], count: int) -> Run:
    """In a session without tokens, which is closed then."""
    engine.append(session, history)
    times, tokens = [], []
    began = time.perf_counter()
    for event in engine.generate(session, GenerateParams(max_tokens=count)):
        if isinstance(event, TokenCommitted):
            times.append(time.perf_counter())
            tokens.append(event.token_id)
    engine.close_session(session)
    return Run(times[0] - began, (times[-1] - times[0]) / (count - 1), tuple(tokens))


def shares_of_time(forward: Forward, history: list[int], count: int) -> dict[str, dict[str, float]]:
    """Where the wall time of decode steps and of prefills goes: linear layers, attention, other operations, the host.

    The steps run on this thread: a profile sees no other. On a GPU, operations count with their time on the device.
    """
    on_cpu = forward.device.type == "cpu"
    geometry = forward.geometry(page_tokens=16, segment_tokens=256)
    limit = len(history) + count + 2
    context = forward.open(geometry, Full().bound(geometry, limit).peak_bytes)
    verifier, kv = Verifier(forward, context), SessionKV(Full(), context, limit)
    sampler = Sampler.start(Sampling(), 0, None, forward.facts.vocab_size, forward.device)

    def step(token_ids: list[int], *, samples: bool = True) -> None:
        ids = np.array(token_ids, dtype=np.uint32)
        verifier.run([Block(kv=kv, token_ids=ids, sampler=sampler if samples else None)])
        kv.commit(kv.length + kv.staged)

    def steps(token_ids: list[int]) -> None:
        """As the engine cuts them."""
        most = context.most_tokens_at_once or len(token_ids)
        for first in range(0, len(token_ids), most):
            step(token_ids[first : first + most], samples=first + most >= len(token_ids))

    steps(history)
    step(history[:1])
    activities = [ProfilerActivity.CPU, *([] if on_cpu else [ProfilerActivity.CUDA])]
    shares = {}
    for name, texts in (("token", [[token_id] for token_id in history[:count]]), ("prefill", [history])):
        with profile(activities=activities, acc_events=True) as profiled:
            began = time.perf_counter()
            for token_ids in texts:
                steps(token_ids)
            wall = time.perf_counter() - began
        shares[name] = _shares(profiled, wall, on_cpu=on_cpu)
        kv.forget()
    return shares


def _shares(profiled: profile, wall: float, *, on_cpu: bool) -> dict[str, float]:
    spent = {"linear": 0.0, "attention": 0.0, "other operations": 0.0}
    for event in profiled.key_averages():
        seconds = (event.self_cpu_time_total if on_cpu else event.self_device_time_total) / 1e6
        if any(word in event.key for word in _ATTENTION):
            spent["attention"] += seconds
        elif any(word in event.key for word in _LINEAR):
            spent["linear"] += seconds
        else:
            spent["other operations"] += seconds
    spent["host and waiting"] = max(0.0, wall - sum(spent.values()))
    return {name: round(seconds / sum(spent.values()), 3) for name, seconds in spent.items()}


def open_engines(forward: Forward, config: ModelConfig, kv_bytes: int) -> dict[str, Engine]:
    settings = EngineConfig(kv_bytes=kv_bytes, share_prefixes="off")
    engines = {"batched": Engine(forward, settings)}
    try:
        engines["fixed-shape"] = Engine(open_backend(replace(config, determinism="batch-invariant")), settings)
    except BackendError as refusal:
        print(f"batch-invariant steps are left out: {refusal}")
    return engines


def measure(
    model: PreTrainedModel, engines: dict[str, Engine], lengths: Sequence[int], rounds: int, count: int
) -> dict[int, Cell]:
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = model.config.get_text_config().vocab_size
    cells = {length: Cell() for length in lengths}
    for number in range(rounds + 1):  # the first round warms up and is not kept
        for length, cell in cells.items():
            history = torch.randint(10, vocabulary - 10, (length,), generator=generator).tolist()
            runs = {"transformers": run_transformers(model, history, count)}
            runs |= {name: run_ours(engine, history, count) for name, engine in engines.items()}
            if number:
                for name, run in runs.items():
                    cell.add(name, run)
        print(f"round {number} of {rounds}", flush=True)
    return cells


def values_of(cells: dict[int, Cell], count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for length, cell in cells.items():
        for name in cell.runs:
            if name != "transformers":
                for word, attribute in (("decode", "token_seconds"), ("prefill", "first_seconds")):
                    ratio = cell.ratios("transformers", name, attribute)
                    values[f"{word} speed, {name} ÷ transformers, at {length}"] = record.summarize(ratio, "ratio")
                same = [
                    sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)) / count
                    for ours, theirs in zip(cell.runs[name], cell.runs["transformers"], strict=True)
                ]
                values[f"greedy tokens equal, {name}, at {length}"] = record.summarize(same, "share")
            for word, attribute in (("token", "token_seconds"), ("first token", "first_seconds")):
                seconds = [getattr(run, attribute) for run in cell.runs[name]]
                values[f"{word}, {name}, at {length}"] = record.summarize(seconds, "seconds")
        if "fixed-shape" in cell.runs:
            price = cell.ratios("fixed-shape", "batched", "token_seconds")
            values[f"token time, fixed-shape ÷ batched, at {length}"] = record.summarize(price, "ratio")
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--tokens", type=int, default=32, metavar="N")
    parser.add_argument("--kv-bytes", type=int, default=2**30, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments)
    forward = open_backend(config)
    theirs = load_model(
        config.model, cache=config.cache_path, device=config.torch_device, dtype=config.dtype, attention="sdpa"
    )
    engines = open_engines(forward, config, arguments.kv_bytes)
    cells = measure(theirs.model, engines, arguments.lengths, arguments.rounds, arguments.tokens)
    is_native = forward.facts.numerics.startswith(("exact", "int8"))
    spent = {
        length: shares_of_time(forward, list(range(10, 10 + length)), 16)
        for length in arguments.lengths
        if not is_native
    }
    shares = {
        f"shares_of_a_{word}": {f"at {length}": one[word] for length, one in spent.items()}
        for word in ("token", "prefill")
        if not is_native
    }
    for engine in engines.values():
        engine.close()
    beside = "transformers generate(){}, its DynamicCache and sdpa attention, same process{}"
    return {
        "experiment": named("decode", config, forward.facts),
        "config": {
            "model": theirs.model_id,
            "weights_sha256": theirs.weights_sha256,
            "device": device_name(config.device),
            "dtype": config.dtype,
            "linear": config.linear,
            "numerics": forward.facts.numerics,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
        },
        "seeds": [SEED],
        "values": values_of(cells, arguments.tokens),
        "baseline": beside.format(*(" in float32", "") if is_native else ("", ", same weights")),
        **shares,
    }
