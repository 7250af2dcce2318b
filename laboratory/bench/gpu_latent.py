"""Sessions that are restored from a latent, on a GPU: prefill through it, waking, and decoding while it is read.

Three engines over one model take turns: sessions of `full`; of `restored` from a latent by the device's own operations;
and the same by plain torch, as a device without such operations runs it. The models have shapes of real ones and random
weights, and their latent has random bases with a spectrum that falls: times depend on shapes and rates alone. The
record is written anew after every length.

With `--device cpu --dtype float32 --shapes tiny` everything runs by the references: a trial of this script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.context import KVContext, NoCoder
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies import parse_strategy
from laboratory.bench.experiments import Save
from laboratory.bench.shared import LeftOut, add_made, check_rounds, device_name, named, release
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, made_codec, made_forward
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
    geometry = own.geometry(page_tokens=16, segment_tokens=arguments.segment_tokens)
    codec = made_codec(name, geometry, device)
    counts = [coder.levels.count for coder in codec.coders]
    print(f"{name}: {codec.bytes_per_token} bytes a token, numbers of each group {counts}", flush=True)
    kv_bytes = arguments.kv_bytes or int(_KV_SHARE * own.free_bytes())
    settings = EngineConfig(
        kv_bytes=kv_bytes,
        max_batch=4,
        max_append_tokens=1 << 17,
        segment_tokens=arguments.segment_tokens,
        share_prefixes="off",
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


def payload_of(values: dict[str, Any], left_out: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "experiment": named("latent", arguments),
        "config": {
            "shapes": arguments.shapes,
            "weights": "random, made in memory; bases of the latent, too",
            "device": device_name(arguments.device),
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
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_made(parser, rounds=3, tokens=16)
    parser.add_argument("--modes", nargs="+", choices=("hold", "stream"), default=["hold"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768], metavar="N")
    parser.add_argument(
        "--segment-tokens", type=int, default=256, metavar="N", help="entries leave the window so many at once"
    )


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    values: dict[str, Any] = {}
    left_out = LeftOut(arguments.seconds)
    generator = torch.Generator().manual_seed(SEED)
    for shape in arguments.shapes:
        with all_engines(shape, arguments) as engines:
            vocabulary = engines[FULL].info().facts.vocab_size
            for length in sorted(arguments.lengths):
                for mode in arguments.modes:
                    where = f"{shape}, {mode}, {length}"
                    prompt = torch.randint(5, vocabulary - 5, (length,), generator=generator).tolist()
                    if left_out.is_late(where):
                        continue
                    try:
                        values |= values_of(where, length, measure(engines, mode, prompt, arguments))
                    except (InvalidArgument, NoCapacity) as refusal:
                        left_out.refuse(where, refusal)
                        continue
                    print(f"{left_out.passed:.0f} s  {where}", flush=True)
                    save(payload_of(values, left_out, arguments))
        del engines
        release(arguments.device)
    return payload_of(values, left_out, arguments)
