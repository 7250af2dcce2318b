"""Prefill and decode steps of one session at growing lengths: strategies that read part of a history beside the one
that reads all.

    python -m scripts.bench_long_steps          writes results/long_steps_cuda_bfloat16/<date>-<machine>/

The model has the shape of a real one and random weights, made in memory, and components of its keys are calibrated on
random ids: times are measured, and nothing about answers. One engine records its steps and launches them ahead. At each
length every strategy has sessions with the same history; they take turns in every round, and ratios are taken within a
round. A first prefill is not counted. The record is written anew after every length: a run that is cut off keeps what
it has.

With `--device cpu --dtype float32 --shape tiny` everything runs by the references: a trial of this script, no
measurement of anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from inference_engine.config import ModelConfig, configure_threads_environment, forbid_model_hub

configure_threads_environment()
forbid_model_hub()

import torch

from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kv.strategies import parse_strategy
from inference_engine.types import Mode
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, SHAPES, made_codec, made_forward
from laboratory.evaluation.sessions import opened, turned
from laboratory.evaluation.timing import decode_milliseconds, in_turns, prefill_rate, start
from laboratory.training.made_target import components_of_random_ids

STRATEGIES = ("full", "gather:scorer=bounds", "gather:scorer=components")


def opened_engine(arguments: argparse.Namespace, stack: ExitStack) -> Engine:
    config = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain")
    forward = made_forward(arguments.shape, config)
    components = components_of_random_ids(forward)
    kv_bytes = arguments.kv_bytes or int(0.8 * forward.free_bytes())
    settings = EngineConfig(kv_bytes=kv_bytes, max_batch=4, overlap="on", segment_tokens=arguments.segment_tokens)
    latent = None
    if any(name.startswith("restored") for name in arguments.strategies):
        geometry = forward.geometry(mode=Mode.BATCHED, page_tokens=16, segment_tokens=arguments.segment_tokens)
        latent = made_codec(arguments.shape, geometry, torch.device(arguments.device))
    return stack.enter_context(Engine(forward, settings, components=components, latent=latent))


def measure(
    engine: Engine, length: int, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, int], dict[str, list[float]]]:
    """Milliseconds of a step in each round, the most bytes held, and tokens a second of the prefill, by strategy.

    Raises InvalidArgument or NoCapacity for what does not fit.
    """
    generator = torch.Generator().manual_seed(SEED)
    prompt = torch.randint(5, engine.info().facts.vocab_size - 5, (length,), generator=generator).tolist()
    held: dict[str, int] = {}
    prefilled: dict[str, list[float]] = {name: [] for name in arguments.strategies}
    with ExitStack() as stack:
        limit = 8 + length + 2 + (arguments.rounds + 1) * arguments.tokens
        sessions: dict[str, str] = {}
        for number in range(arguments.prefills + 1):
            is_last = number == arguments.prefills
            for name in turned(arguments.strategies, number):
                with ExitStack() as others:
                    kept = stack if is_last else others
                    session = kept.enter_context(opened(engine, parse_strategy(name), limit))
                    rate = prefill_rate(engine, session, prompt)
                    if number:  # before, kernels are compiled, and steps recorded
                        prefilled[name].append(rate)
                    if is_last:
                        sessions[name] = session
        for name in arguments.strategies:
            (watch,) = start(engine, [sessions[name]], tokens=4)
            watch.wait()
            held[name] = watch.kv_peak_bytes
            rates = ", ".join(f"{rate:.0f}" for rate in prefilled[name])
            print(f"{name} at {length}: {held[name]} bytes, prefill {rates} tokens a second", flush=True)
        sides = {
            name: partial(decode_milliseconds, engine, [sessions[name]], arguments.tokens)
            for name in arguments.strategies
        }
        return in_turns(sides, arguments.rounds), held, prefilled


def values_of(
    cells: dict[int, dict[str, list[float]]],
    held: dict[int, dict[str, int]],
    prefilled: dict[int, dict[str, list[float]]],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    shortest = min(cells)
    for length, cell in cells.items():
        baseline = next(iter(cell))
        for name, samples in cell.items():
            values[f"most bytes while it decodes, {name}, at {length}"] = record.exact(held[length][name], "bytes")
            rates = prefilled[length]
            values[f"prefill, {name}, at {length}"] = record.summarize(rates[name], "tokens a second")
            if name != baseline:
                shares = [ours / theirs for ours, theirs in zip(rates[name], rates[baseline], strict=True)]
                values[f"prefill, {name} ÷ {baseline}, at {length}"] = record.summarize(shares, "ratio")
                share = held[length][name] / held[length][baseline]
                values[f"bytes, {name} ÷ {baseline}, at {length}"] = record.exact(share, "ratio")
            values[f"decode step, {name}, at {length}"] = record.summarize(samples, "ms")
            if name != baseline:
                ratios = [ours / theirs for ours, theirs in zip(samples, cell[baseline], strict=True)]
                values[f"time of a step, {name} ÷ {baseline}, at {length}"] = record.summarize(ratios, "ratio")
            if length != shortest:
                ratio = statistics.median(samples) / statistics.median(cells[shortest][name])
                values[f"time of a step, {name}, at {length} ÷ at {shortest}"] = record.exact(ratio, "ratio")
    return values


def write(
    cells: dict[int, dict[str, list[float]]],
    held: dict[int, dict[str, int]],
    prefilled: dict[int, dict[str, list[float]]],
    left_out: dict[str, str],
    arguments: argparse.Namespace,
) -> Path:
    on_gpu = arguments.device != "cpu"
    return record.write_record(
        f"long_steps_{arguments.device.partition(':')[0]}_{arguments.dtype}",
        {
            "command": record.command_line(without=("--results", "--commit")),
            "commit": arguments.commit,
            "machine": record.describe_machine(("torch", "transformers", "triton", "fa3-fwd")),
            "config": {
                "shape": arguments.shape,
                "weights": "random, made in memory; components calibrated on random ids",
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "dtype": arguments.dtype,
                "rounds": arguments.rounds,
                "prefills": arguments.prefills,
                "tokens": arguments.tokens,
                "segment_tokens": arguments.segment_tokens,
                "strategies": arguments.strategies,
            },
            "seeds": [SEED],
            "values": values_of(cells, held, prefilled),
            "tables": {
                "ms of a step": [
                    {"length": length, **{name: round(statistics.median(each), 4) for name, each in cell.items()}}
                    for length, cell in cells.items()
                ]
            },
            "left_out": left_out,
            "baseline": f"{arguments.strategies[0]}, in the same engine, in turns",
        },
        **({"results_dir": arguments.results} if arguments.results else {}),
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decode steps of one session at growing lengths.")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="the first is the baseline")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 130_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefills", type=int, default=2, help="of each strategy, at each length")
    parser.add_argument("--tokens", type=int, default=32, help="that each session decodes in a round")
    parser.add_argument("--segment-tokens", type=int, default=256, help="entries leave a window so many at once")
    parser.add_argument("--seconds", type=float, default=1200.0, help="no length begins after so many")
    parser.add_argument("--kv-bytes", type=int, default=0, help="0: as much as fits")
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--commit", default=record.commit(), help="what runs, where there is no repository to ask")
    arguments = parser.parse_args()
    arguments.lengths.sort()
    if min(arguments.rounds, arguments.prefills) < 1 or arguments.tokens < 4:
        parser.error("at least one prefill and one round of 4 tokens are needed")
    return arguments


def main() -> None:
    arguments, began = parsed(), time.monotonic()
    cells: dict[int, dict[str, list[float]]] = {}
    held: dict[int, dict[str, int]] = {}
    prefilled: dict[int, dict[str, list[float]]] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        engine = opened_engine(arguments, stack)
        for length in arguments.lengths:
            if time.monotonic() - began > arguments.seconds:
                left_out[f"at {length}"] = f"{arguments.seconds:g} seconds were over"
                continue
            try:
                cells[length], held[length], prefilled[length] = measure(engine, length, arguments)
            except (InvalidArgument, NoCapacity) as refusal:
                left_out[f"at {length}"] = str(refusal)
                continue
            for name, value in values_of(cells, held, prefilled).items():
                if name.endswith(f"at {length}") or f"at {length} ÷" in name:
                    print(f"{name}: {value['median']:.4g} ({value['low']:.4g} to {value['high']:.4g})", flush=True)
            path = write(cells, held, prefilled, left_out, arguments)
    for where, why in left_out.items():
        print(f"left out: {where}: {why}")
    if not cells:
        raise SystemExit("nothing was measured")
    path = write(cells, held, prefilled, left_out, arguments)  # with all that was left out
    print(path if arguments.results else path.relative_to(record.ROOT))


if __name__ == "__main__":
    main()
