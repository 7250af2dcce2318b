"""What drawing tokens takes beside transformers' filters and `torch.multinomial`, which know no seed and no position.

Each draws a token from every vector of the same logits, with the same filter, turn by turn; a ratio is of one round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inference_engine.kernels.filters import draw
from inference_engine.kernels.gumbel_noise import NoiseOfAll, key
from inference_engine.kernels.ops import open_ops
from inference_engine.types import Sampling
from laboratory.bench.experiments import Save
from laboratory.bench.shared import device_name
from laboratory.evaluation import record
from laboratory.evaluation.sessions import turned

SEED = 1
SPREAD = 4.0  # standard deviation of the logits, about that of a small model's
UNFILTERED = "no filter"
FILTERS = {
    UNFILTERED: Sampling(temperature=0.7, seed=SEED),
    "top_k 50": Sampling(temperature=0.7, top_k=50, seed=SEED),
    "top_p 0.95": Sampling(temperature=0.7, top_p=0.95, seed=SEED),
    "min_p 0.05": Sampling(temperature=0.7, min_p=0.05, seed=SEED),
}
BASELINE, INVERTED = "transformers", "the distribution inverted"

Draw = Callable[[], Tensor]


def keyed(logits: Tensor, sampling: Sampling, noise_of_all: NoiseOfAll) -> Draw:
    samplings = [sampling] * len(logits)
    return lambda: draw(logits, samplings, [key(SEED, position) for position in range(len(logits))], noise_of_all)


def anywhere(logits: Tensor, sampling: Sampling) -> Draw:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    nothing = torch.zeros((len(logits), 0), dtype=torch.long, device=logits.device)
    return lambda: torch.multinomial(warpers(nothing, logits).softmax(dim=-1), 1)[:, 0]


def inverted(logits: Tensor, sampling: Sampling) -> Draw:
    """At one number for each vector, as exactly as noise is added: ADR 0008 says why not so."""
    numbers = torch.rand((len(logits), 1), dtype=torch.float64, device=logits.device)

    def drawn() -> Tensor:
        sums = logits.double().div_(sampling.temperature).softmax(dim=-1).cumsum_(dim=-1)
        return torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0]

    return drawn


def seconds_of(one: Draw, times: int, device: torch.device) -> float:
    """Of one draw: host and device, to the last token."""
    began = time.perf_counter()
    for _ in range(times):
        one()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """Microseconds of each method of drawing, and the engine's as multiples of the baseline's."""
    methods = {"kakeya": open_ops("auto", device).noise_of_all}
    if device.type == "cuda":
        methods["kakeya, plain torch"] = open_ops("plain", device).noise_of_all
    values: dict[str, dict[str, Any]] = {}
    for rows in arguments.rows:
        numbers = torch.randn(rows, arguments.vocab, generator=torch.Generator().manual_seed(SEED))
        logits = (numbers * SPREAD).to(device)
        for name, sampling in FILTERS.items():
            draws = {method: keyed(logits, sampling, noise_of_all) for method, noise_of_all in methods.items()}
            draws[BASELINE] = anywhere(logits, sampling)
            if name == UNFILTERED:
                draws[INVERTED] = inverted(logits, sampling)
            samples: dict[str, list[float]] = {method: [] for method in draws}
            for number in range(arguments.rounds + 1):  # the first round warms up
                for method in turned(list(draws), number):
                    seconds = seconds_of(draws[method], arguments.times, device)
                    if number:
                        samples[method].append(seconds)
            cell = f"{name}, {rows} rows"
            for method, taken in samples.items():
                values[f"{method}, {cell}"] = record.summarize([1e6 * one for one in taken], "µs")
                if method != BASELINE:
                    ratios = [one / other for one, other in zip(taken, samples[BASELINE], strict=True)]
                    values[f"{method} ÷ {BASELINE}, {cell}"] = record.summarize(ratios, "ratio")
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--vocab", type=int, default=49_152, metavar="N")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], metavar="N", help="drawn from at once")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--times", type=int, default=20, metavar="N", help="each draws in a round")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    with torch.inference_mode():
        values = measure(arguments, device)
    return {
        "experiment": f"draw_{device.type}",
        "config": {
            "device": device_name(arguments.device),
            "threads": arguments.threads,
            "vocab": arguments.vocab,
            "logits": f"normal, standard deviation {SPREAD:g}",
            "rounds": arguments.rounds,
            "draws_a_round": arguments.times,
        },
        "seeds": [SEED],
        "values": values,
        "headlines": [name for name in values if "÷" in name],
        "baseline": "transformers' logits warpers, softmax, torch.multinomial, on the same logits",
    }
