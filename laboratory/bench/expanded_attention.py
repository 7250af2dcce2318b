"""Attention of one latent layer of DeepSeek V2 Lite's sizes, absorbed and expanded, in turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inference_engine.kernels.attention import attend
from inference_engine.kernels.expanded_attention import WholeEntries
from inference_engine.models.latent_attention import HeadHalves, LatentQueries
from laboratory.bench.decode import SEED
from laboratory.bench.experiments import Save
from laboratory.bench.shared import device_name, named
from laboratory.evaluation import record

HEADS, RANK, ROPE, OWN, VALUE = 16, 512, 64, 128, 128
SCALING = (OWN + ROPE) ** -0.5
# Tokens of a step, and entries before them: prompts, and a segment behind a history.
STEPS = ((256, 0), (1024, 0), (256, 1792), (256, 3840))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    if arguments.rounds < 1:
        raise SystemExit(f"--rounds must be at least 1, got {arguments.rounds}")
    generator = torch.Generator(arguments.device).manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, device=arguments.device)
        return made.to(getattr(torch, arguments.dtype))

    halves = HeadHalves(random(HEADS * (OWN + VALUE), RANK) * RANK**-0.5, heads=HEADS, key=OWN, value=VALUE)
    values: dict[str, Any] = {}
    with torch.inference_mode():
        for count, before in STEPS:
            queries = LatentQueries(random(HEADS, count, OWN + ROPE), halves)
            keys = random(1, before + count, RANK + ROPE)
            later = torch.ones(count, before + count, dtype=torch.bool, device=arguments.device).triu_(before + 1)
            mask = torch.zeros_like(later, dtype=keys.dtype).masked_fill_(later, float("-inf"))
            entries = WholeEntries(keys, keys[..., :RANK], mask)
            pairs = [
                (_seconds(_absorbed, queries, entries), _seconds(_expanded, queries, entries))
                for _ in range(arguments.rounds + 1)
            ][1:]  # the first warms up
            difference = _absorbed(queries, entries).float() - _expanded(queries, entries).float()
            step = f"{count} tokens behind {before}"
            values[f"speed, expanded ÷ absorbed, {step}"] = record.summarize([one / two for one, two in pairs], "ratio")
            values[f"largest difference, {step}"] = record.exact(float(difference.abs().max()), "of values of size 1")
    return {
        "experiment": named("expanded_attention", arguments),
        "what": "One layer of DeepSeek V2 Lite's sizes: for a step, keys and values of all heads are made, or not.",
        "config": {
            "device": device_name(arguments.device),
            "dtype": arguments.dtype,
            "heads": HEADS,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
        },
        "seeds": [SEED],
        "values": values,
        "headlines": ["speed, expanded ÷ absorbed, 1024 tokens behind 0"],
        "baseline": "absorbed attention over the same entries, same process, in turns",
    }


def _absorbed(queries: LatentQueries, entries: WholeEntries) -> Tensor:
    absorbed = queries.absorbed(slice(None))
    return queries.output(attend(absorbed, entries.keys, entries.values, entries.mask, scaling=SCALING))


def _expanded(queries: LatentQueries, entries: WholeEntries) -> Tensor:
    out = queries.expanded(slice(None), entries, scaling=SCALING)
    assert out is not None, "absorbed takes fewer multiplications"
    return out


def _seconds(attend: Callable[[LatentQueries, WholeEntries], Tensor], *step: Any) -> float:
    began = time.perf_counter()
    out = attend(*step)
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
