"""One model over several GPUs beside the same one over one: steps, prefills, sums, and whether tokens are the same.

Models have shapes of real ones and random weights, written to a temporary folder, which both sides load. The sides take
turns in every round. Tokens are compared greedy and sampled, in float32, where they are promised to be the same, and in
`--dtype`, where a sum in another order may draw another token: then the share is said up to where each first differs.
With `--device cpu --dtype float32 --shapes tiny` everything runs over gloo: a trial that measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from inference_engine.backends.ranks.loading import open_ranks
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import open_torch
from inference_engine.compose import admit
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies import parse_strategy
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from laboratory.bench.experiments import Save
from laboratory.bench.gpu_steps import FULL, groups_of
from laboratory.bench.rank_sums import time_sums
from laboratory.bench.shared import LeftOut, add_made, check_rounds, device_name, named, release
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, made_model
from laboratory.evaluation.sessions import append_all, opened
from laboratory.evaluation.timing import decode_milliseconds, in_turns, prefill_rate

COMPARED = ("float32", "llama-3.2-1b", "tiny")  # the dtype in which tokens are promised to be the same, and shapes


@contextmanager
def both(shape: str, dtype: str, arguments: argparse.Namespace) -> Iterator[dict[str, Engine]]:
    """Engines over the same weights, by how many GPUs they have."""
    with tempfile.TemporaryDirectory() as folder:
        made = made_model(shape, arguments.device, dtype, positions=arguments.longest)
        made.model.save_pretrained(folder)
        del made
        release(arguments.device)
        forwards: list[TorchForward] = []
        engines: dict[str, Engine] = {}
        try:
            for ranks in (1, arguments.tensor_parallel):
                config = ModelConfig(
                    model=folder,
                    cache_dir=str(Path(folder) / "cache"),
                    device=arguments.device,
                    dtype=dtype,
                    backend="torch",
                    linear="plain",
                    tensor_parallel=ranks,
                )
                forward = (open_torch if ranks == 1 else open_ranks)(config, admit(config))
                forwards.append(forward)
                engines[f"{ranks} of {arguments.device}"] = Engine(forward, _settings(arguments))
            arguments.adds_by = forwards[-1].followers.group.name
            yield engines
        finally:
            for engine in engines.values():
                engine.close()
            for forward in forwards:
                forward.followers.close()
    release(arguments.device)


def _settings(arguments: argparse.Namespace) -> EngineConfig:
    sessions = max(group.sessions for group in arguments.groups)
    return EngineConfig(
        kv_bytes=arguments.kv_bytes,
        max_batch=sessions,
        max_running=2 * sessions + 1,
        max_first_token_seconds=0,
        share_prefixes="off",
        stall_seconds=120,
    )


def compare_tokens(engines: Mapping[str, Engine], count: int) -> dict[str, Any]:
    """Tokens of the same prompts, greedy and sampled: how many there are, and how many are the same until the first
    that is not."""
    generator = torch.Generator().manual_seed(SEED)
    found: list[list[list[int]]] = []
    vocabulary = next(iter(engines.values())).info().facts.vocab_size
    prompts = torch.randint(5, vocabulary - 5, (4, 200), generator=generator).tolist()
    for engine in engines.values():
        own = []
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
            sessions = [engine.create_session(limit_tokens=200 + count + 2).session_id for _ in prompts]
            for session, prompt in zip(sessions, prompts, strict=True):
                append_all(engine, session, prompt)
            asked = GenerateParams(max_tokens=count, sampling=sampling)
            running = [engine.generate(session, asked) for session in sessions]
            own += [[event.token_id for event in one if isinstance(event, TokenCommitted)] for one in running]
            for session in sessions:
                engine.close_session(session)
        found.append(own)
    same = sum(
        next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(*found, strict=True)
    )
    return {"tokens": sum(map(len, found[0])), "the same": same}


def compare_exactly(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens in the identity in which they are promised to be the same."""
    dtype, shape, small = COMPARED
    shape = small if arguments.device == "cpu" else shape
    with both(shape, dtype, arguments) as engines:
        return {"shape": shape, "dtype": dtype, **compare_tokens(engines, 64)}


def measure(
    engines: Mapping[str, Engine], shape: str, arguments: argparse.Namespace, values: dict[str, Any]
) -> list[dict[str, Any]]:
    rows, generator = [], torch.Generator().manual_seed(SEED)
    vocabulary = next(iter(engines.values())).info().facts.vocab_size
    full = parse_strategy(FULL)

    def ids(count: int, length: int) -> list[list[int]]:
        return torch.randint(5, vocabulary - 5, (count, length), generator=generator).tolist()

    def take(what: str, unit: str, samples: Mapping[str, list[float]], *, larger_is_better: bool) -> None:
        one, several = samples
        for side in samples:
            values[f"{what}, {shape}, {side}"] = record.summarize(samples[side], unit)
        pairs = zip(samples[one], samples[several], strict=True)
        ratios = [b / a if larger_is_better else a / b for a, b in pairs]
        values[f"{what}, {shape}, {several} ÷ {one}"] = record.summarize(ratios, "ratio of speeds")
        row = {"what": what, "unit": unit, **{side: round(statistics.median(samples[side]), 4) for side in samples}}
        rows.append({**row, "times as fast": round(statistics.median(ratios), 3)})
        print(rows[-1], flush=True)

    for group in arguments.groups:
        prompts, limit = ids(group.sessions, group.length), group.length + 2 + (arguments.rounds + 1) * arguments.tokens
        opened_by: dict[str, list[str]] = {}
        for side, engine in engines.items():
            made = [engine.create_session(strategy=full, limit_tokens=limit).session_id for _ in prompts]
            for session, prompt in zip(made, prompts, strict=True):
                prefill_rate(engine, session, prompt)
            opened_by[side] = made
        sides = {
            side: partial(decode_milliseconds, engine, opened_by[side], arguments.tokens)
            for side, engine in engines.items()
        }
        take(f"decode step, {group}", "ms", in_turns(sides, arguments.rounds), larger_is_better=False)
        for side, engine in engines.items():
            for session in opened_by[side]:
                engine.close_session(session)
    for length in arguments.prefill:

        def rate(engine: Engine, length: int = length) -> float:
            with opened(engine, full, length + 2) as session:
                return prefill_rate(engine, session, ids(1, length)[0])

        sides = {side: partial(rate, engine) for side, engine in engines.items()}
        take(f"prefill of {length}", "tokens a second", in_turns(sides, arguments.rounds), larger_is_better=True)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_made(parser, shapes=("qwen2.5-7b",), kv_bytes=2**33, seconds=400.0)
    parser.add_argument("--tensor-parallel", type=int, default=2, metavar="N", help="GPUs of the model that is split")
    parser.add_argument("--cells", nargs="*", default=["1x1024", "64x512"], metavar="SESSIONSxLENGTH")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192], metavar="TOKENS")


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    arguments.groups = groups_of(arguments.cells)
    arguments.longest = max([*(group.length for group in arguments.groups), *arguments.prefill]) + 4096
    arguments.adds_by = ""
    left_out, values = LeftOut(arguments.seconds), dict[str, Any]()
    sums: list[dict[str, Any]] = []
    tokens: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []

    def payload() -> dict[str, Any]:
        return {
            "experiment": named("ranks", arguments),
            "config": {
                "weights": "random, written to a folder",
                "device": device_name(arguments.device),
                "dtype": arguments.dtype,
                "GPUs": arguments.tensor_parallel,
                "they add up by": arguments.adds_by,
                "rounds": arguments.rounds,
                "tokens": arguments.tokens,
            },
            "seeds": [SEED],
            "values": values,
            "headlines": [name for name in values if "÷" in name],
            "tables": {"steps and prefills": steps, "tokens": tokens, "µs of a sum in a graph": sums},
            "left_out": left_out,
            "baseline": "the same weights on one GPU, in turns; of sums, NCCL and torch's one-shot in the same graphs",
        }

    for shape in arguments.shapes:
        if left_out.is_late(shape):
            continue
        with both(shape, arguments.dtype, arguments) as engines:
            steps += [{"shape": shape, **row} for row in measure(engines, shape, arguments, values)]
            save(payload())
            tokens.append({"shape": shape, "dtype": arguments.dtype, **compare_tokens(engines, 64)})
            print(tokens[-1], flush=True)
        save(payload())
    if arguments.device != "cpu" and not left_out.is_late("sums"):
        sums += time_sums(arguments.tensor_parallel, arguments.rounds)
        print(*sums, sep="\n", flush=True)
        save(payload())
    if not left_out.is_late(f"tokens in {COMPARED[0]}"):
        with get_context("spawn").Pool(1) as pool:  # a process has ranks of one model
            tokens.append(pool.apply(compare_exactly, (arguments,)))
        print(tokens[-1], flush=True)
    return payload()
