"""Sessions that are restored from a latent, on a GPU: prefill through it, waking, and decoding while it is read.

    python -m scripts.bench_latent_gpu                writes results/latent_<device>_<dtype>/<date>-<machine>/

Three engines over one model take turns: sessions of `full`; of `restored` from a latent by the device's own operations;
and the same by plain torch, as a device without such operations runs it. The models have shapes of real ones and random
weights, and their latent has random bases with a spectrum that falls: times depend on shapes and rates alone. The
record is written anew after every length.

With `--device cpu --dtype float32 --shapes tiny` everything runs by the references: a trial of this script.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from inference_engine.config import ModelConfig, configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import torch

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.context import KVContext, NoCoder
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.types import Mode
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, SHAPES, made_codec, made_forward
from laboratory.evaluation.sessions import turned
from laboratory.evaluation.timing import Run, run

FULL, KERNELS, PLAIN = "full", "latent, own kernels", "latent, plain torch"
_KV_SHARE = 0.25  # of the free memory, for each engine


class PlainForward(TorchForward):
    """Restores with torch's operations, as where a device has none of its own."""

    def open(self, geometry: Geometry, capacity_bytes: int, **others: Any) -> KVContext:
        return replace(super().open(geometry, capacity_bytes, **others), coder=NoCoder())


@contextmanager
def all_engines(name: str, arguments: argparse.Namespace) -> Iterator[dict[str, Engine]]:
    device = torch.device(arguments.device)
    config = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain")
    own = made_forward(name, config)
    ops = replace(open_ops("auto", device), attends_together=True)
    plain = PlainForward(own.seam, own.facts, device, ops=ops, records_graphs=own.records_graphs, listed=own.listed)
    geometry = own.geometry(mode=Mode.BATCHED, page_tokens=16, segment_tokens=arguments.segment_tokens)
    codec = made_codec(name, geometry, device)
    counts = [coder.levels.count for coder in codec.coders]
    print(f"{name}: {codec.bytes_per_token} bytes a token, numbers of each group {counts}", flush=True)
    kv_bytes = arguments.kv_bytes or int(_KV_SHARE * own.free_bytes())
    settings = EngineConfig(
        kv_bytes=kv_bytes, max_batch=4, max_append_tokens=1 << 17, segment_tokens=arguments.segment_tokens
    )
    with ExitStack() as stack:
        yield {
            each: stack.enter_context(Engine(forward, settings, latent=codec))
            for each, forward in ((FULL, own), (KERNELS, own), (PLAIN, plain))
        }


def strategy_of(name: str, mode: str) -> str:
    return "full" if name == FULL else f"restored:source=latent,mode={mode},window=1024"


def measure(
    engines: dict[str, Engine], mode: str, prompt: Sequence[int], arguments: argparse.Namespace
) -> dict[str, list[Run]]:
    """The runs of each engine, the first not counted."""
    runs: dict[str, list[Run]] = {}
    names = list(engines)
    for number in range(arguments.rounds + 1):
        for name in turned(names, number):
            one = run(engines[name], parse_strategy(strategy_of(name, mode)), [list(prompt)], arguments.tokens)
            if number:
                runs.setdefault(name, []).append(one)
    return runs


def values_of(where: str, length: int, runs: dict[str, list[Run]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, own in runs.items():
        speeds = [length / one.prefill_seconds for one in own]
        values[f"prefill, {name}, {where}"] = record.summarize(speeds, "tokens a second")
        values[f"first token after a pause, {name}, {where}"] = record.summarize(
            [1e3 * one.resume_seconds for one in own], "ms"
        )
        values[f"decode step, {name}, {where}"] = record.summarize([1e3 * one.token_seconds for one in own], "ms")
        if name == FULL:
            continue
        pairs = list(zip(own, runs[FULL], strict=True))
        values[f"prefill, {name} ÷ full, {where}"] = record.summarize(
            [full.prefill_seconds / one.prefill_seconds for one, full in pairs], "ratio"
        )
        values[f"decode, {name} ÷ full, {where}"] = record.summarize(
            [full.token_seconds / one.token_seconds for one, full in pairs], "ratio"
        )
        values[f"first token after a pause, {name} ÷ a prefill, {where}"] = record.summarize(
            [one.resume_seconds / full.prefill_seconds for one, full in pairs], "ratio"
        )
        values[f"bytes while it pauses, {name} ÷ full, {where}"] = record.summarize(
            [one.kv_bytes / full.kv_bytes for one, full in pairs], "ratio"
        )
        values[f"bytes at most, {name} ÷ full, {where}"] = record.summarize(
            [one.kv_peak_bytes / full.kv_peak_bytes for one, full in pairs], "ratio"
        )
    return values


def write(values: dict[str, Any], left_out: dict[str, str], arguments: argparse.Namespace) -> Path:
    on_gpu = arguments.device != "cpu"
    return record.write_record(
        f"latent_{arguments.device.partition(':')[0]}_{arguments.dtype}",
        {
            "command": record.command_line(without=("--results", "--commit")),
            "commit": arguments.commit,
            "machine": record.describe_machine(("torch", "transformers", "triton", "fa3-fwd")),
            "config": {
                "shapes": arguments.shapes,
                "weights": "random, made in memory; bases of the latent, too",
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "dtype": arguments.dtype,
                "bytes": "a twentieth of bfloat16's",
                "segment_tokens": arguments.segment_tokens,
                "rounds": arguments.rounds,
                "tokens": arguments.tokens,
            },
            "seeds": [SEED],
            "values": values,
            "left_out": left_out,
            "baseline": "full, and the same latents by plain torch, in the same process, in turns",
        },
        **({"results_dir": arguments.results} if arguments.results else {}),
    )


def profiled(engines: dict[str, Engine], mode: str, prompt: Sequence[int], arguments: argparse.Namespace) -> None:
    """Print where the device's and the host's time goes in one run of the latent's own operations."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(engines[KERNELS], parse_strategy(strategy_of(KERNELS, mode)), [list(prompt)], arguments.tokens)
    table = profile.key_averages()
    print(table.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60))
    print(table.table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=60))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sessions that are restored from a latent, on a GPU.")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen2.5-7b", "smollm2-135m"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--modes", nargs="+", choices=("hold", "stream"), default=["hold"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768])
    parser.add_argument("--segment-tokens", type=int, default=256, help="entries leave the window so many at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600.0, help="no length begins after so many")
    parser.add_argument("--kv-bytes", type=int, default=0, help="of each engine; 0: as much as fits")
    parser.add_argument("--profile", action="store_true", help="print where time goes; write no record")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--commit", default=record.commit(), help="what runs, where there is no repository to ask")
    return parser.parse_args()


def main() -> None:
    arguments, began = parsed(), time.monotonic()
    values: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    generator = torch.Generator().manual_seed(SEED)
    for shape in arguments.shapes:
        with all_engines(shape, arguments) as engines:
            vocabulary = engines[FULL].info().facts.vocab_size
            for length in sorted(arguments.lengths):
                for mode in arguments.modes:
                    where = f"{shape}, {mode}, {length}"
                    prompt = torch.randint(5, vocabulary - 5, (length,), generator=generator).tolist()
                    if time.monotonic() - began > arguments.seconds:
                        left_out[where] = f"{arguments.seconds:g} seconds were over"
                        continue
                    try:
                        if arguments.profile:
                            for _ in range(2):
                                run(engines[KERNELS], parse_strategy(strategy_of(KERNELS, mode)), [prompt], 4)
                            profiled(engines, mode, prompt, arguments)
                            continue
                        fresh = values_of(where, length, measure(engines, mode, prompt, arguments))
                    except (InvalidArgument, NoCapacity) as refusal:
                        left_out[where] = str(refusal)
                        continue
                    values |= fresh
                    for name, value in fresh.items():
                        print(f"{name}: {value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g})", flush=True)
                    write(values, left_out, arguments)
        del engines
        gc.collect()
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
    for where, why in left_out.items():
        print(f"left out: {where}: {why}")
    if not arguments.profile:
        print(write(values, left_out, arguments))


if __name__ == "__main__":
    main()
