"""What several benchmarks share: their arguments, names of devices, memory that is given back, time that is over."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence

import torch

from inference_engine.config import ModelConfig, resolve
from inference_engine.errors import ConfigError
from inference_engine.types import ModelFacts
from laboratory.evaluation.made_models import SHAPES

MODEL = ("model", "device", "dtype", "linear")


def add_model(parser: argparse.ArgumentParser, *names: str) -> None:
    """Settings of a model, as the server has them: MODEL, or those that are named."""
    for name in names or MODEL:
        kind = int if name == "threads" else str
        parser.add_argument(f"--{name}", type=kind, metavar=name.upper(), help="as for `kakeya serve`")


def model_config(arguments: argparse.Namespace, **others: object) -> ModelConfig:
    """What `add_model` was given. others: settings beside it."""
    given = {name: getattr(arguments, name) for name in (*MODEL, "threads") if hasattr(arguments, name)}
    return resolve(ModelConfig, {**given, **others})


def add_made(
    parser: argparse.ArgumentParser,
    *,
    shapes: Sequence[str] = ("qwen2.5-7b", "smollm2-135m"),
    is_one: bool = False,
    seconds: float = 600.0,
    rounds: int = 5,
    tokens: int = 32,
    kv_bytes: int = 0,
) -> None:
    """Models that have shapes of real ones and random weights, and where and how often they run. is_one: one model."""
    if is_one:
        parser.add_argument("--shape", choices=list(SHAPES), default=shapes[0])
    else:
        parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(shapes))
    add_device(parser, seconds=seconds, rounds=rounds)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=tokens, metavar="N", help="that each session decodes in a round")
    parser.add_argument(
        "--kv-bytes", type=int, default=kv_bytes, metavar="N", help="of each engine; 0: as much as fits"
    )


def add_device(parser: argparse.ArgumentParser, *, seconds: float, rounds: int) -> None:
    parser.add_argument("--device", default="cuda", help="cpu: by the references, a trial that measures nothing")
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N")
    parser.add_argument("--seconds", type=float, default=seconds, metavar="S", help="nothing begins after so many")


def check_rounds(arguments: argparse.Namespace) -> None:
    if arguments.rounds < 1 or arguments.tokens < 4:
        raise ConfigError("at least one round of 4 --tokens is needed")


def named(what: str, on: argparse.Namespace | ModelConfig, facts: ModelFacts | None = None) -> str:
    """The record's name: of what, on what device, in which numbers; facts: of a model that may compute natively."""
    numerics = "" if facts is None else facts.numerics.partition(",")[0]
    return f"{what}_{on.device.partition(':')[0]}_{numerics if numerics in ('exact', 'int8') else on.dtype}"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def release(device: str) -> None:
    """What closed engines had is the device's again: how much there is decides how large a KV pool is."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


class LeftOut(dict[str, str]):
    """What is not measured, and why. seconds: from now on, after which nothing begins."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), seconds

    @property
    def passed(self) -> float:
        return time.monotonic() - self._began

    def is_late(self, where: str) -> bool:
        """Is there no time for it? Then it is left out."""
        if self.passed > self._seconds:
            self[where] = f"{self._seconds:g} seconds were over"
        return where in self

    def refuse(self, where: str, error: BaseException) -> None:
        self[where] = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"


def ratios(values: Mapping[str, list[float]], over: str, under: str) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(values[over], values[under], strict=True)]
