"""Memory granted as histories grow, against memory reserved at creation: how many sessions fit, and what a token costs.

Two engines over one model in one process. Each has room for one session of the model's whole length and a half. First,
default sessions of a short history are opened until one is refused, and the process's memory is looked at. Then both
prefill and decode the same histories in turns; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inference_engine.backends.base import Forward
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import NoCapacity
from inference_engine.types import GenerateParams
from laboratory.bench.decode import run_in
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config
from laboratory.evaluation import record

SEED = 1
GROWTHS = ("guaranteed", "best_effort")


@dataclass(frozen=True, slots=True)
class Fitting:
    """Sessions that were open at once, what one was granted, and what the process's memory grew by for each."""

    sessions: int
    reserved_bytes: int
    bound_bytes: int
    resident_bytes: float


def open_engine(forward: Forward, growth: str) -> Engine:
    with Engine(forward, EngineConfig(growth="guaranteed", kv_bytes=2**40 // 64)) as roomy:
        whole = roomy.create_session().bound.peak_bytes
    return Engine(forward, EngineConfig(growth=growth, kv_bytes=whole * 3 // 2, share_prefixes="off"))


def fill(engine: Engine, tokens: int) -> Fitting:
    """Open default sessions with a history of so many tokens, K/V computed, until one is refused."""
    vocabulary = engine.info().facts.vocab_size
    history = torch.randint(10, vocabulary - 10, (tokens,), generator=torch.Generator().manual_seed(SEED)).tolist()
    opened: list[str] = []
    before, resident = 0, 0
    try:
        while True:
            session = engine.create_session().session_id
            opened.append(session)
            engine.append(session, history)
            list(engine.generate(session, GenerateParams(max_tokens=1)))
            if len(opened) == 1:  # what the first one takes is the model's working memory, too
                before = _resident_bytes()
            resident = _resident_bytes()
    except NoCapacity:
        if engine.session_info(opened[-1]).history_length == 0:  # its creation fitted, its tokens did not
            engine.close_session(opened.pop())
    facts = engine.session_info(opened[0])
    for session in opened:
        engine.close_session(session)
    return Fitting(
        sessions=len(opened),
        reserved_bytes=facts.reserved_bytes,
        bound_bytes=facts.bound.sustained_bytes,
        resident_bytes=(resident - before) / max(1, len(opened) - 1),
    )


def measure(engines: dict[str, Engine], lengths: list[int], rounds: int, count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = next(iter(engines.values())).info().facts.vocab_size
    values: dict[str, Any] = {}
    for length in lengths:
        first, later, equal = [], [], []
        for number in range(rounds + 1):  # the first round warms up and is not kept
            history = torch.randint(10, vocabulary - 10, (length,), generator=generator).tolist()
            order = GROWTHS if number % 2 else GROWTHS[::-1]
            seen = {
                growth: run_in(engines[growth], engines[growth].create_session().session_id, history, count)
                for growth in order
            }
            if number:
                first.append(seen["best_effort"].first_seconds / seen["guaranteed"].first_seconds)
                later.append(seen["best_effort"].token_seconds / seen["guaranteed"].token_seconds)
                equal.append(float(seen["best_effort"].tokens == seen["guaranteed"].tokens))
        values[f"first token, best effort ÷ guaranteed, at {length}"] = record.summarize(first, "ratio")
        values[f"token, best effort ÷ guaranteed, at {length}"] = record.summarize(later, "ratio")
        values[f"equal token sequences, at {length}"] = record.summarize(equal, "share")
        print(f"at {length}: done", flush=True)
    return values


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model", "dtype")
    parser.add_argument("--short", type=int, default=200, metavar="N", help="tokens of each session that is counted")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--tokens", type=int, default=32, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments, device="cpu")
    forward = open_backend(config)
    engines = {growth: open_engine(forward, growth) for growth in GROWTHS}
    values: dict[str, Any] = {}
    for growth, engine in engines.items():
        fitting = fill(engine, arguments.short)
        word = growth.replace("_", " ")
        values |= {
            f"default sessions of {arguments.short} tokens at once, {word}": record.exact(fitting.sessions, "sessions"),
            f"reserved for one, {word}": record.exact(fitting.reserved_bytes, "bytes"),
            f"most that one may hold, {word}": record.exact(fitting.bound_bytes, "bytes"),
        }
        if fitting.sessions > 1:
            values[f"memory of the process for each, {word}"] = record.exact(round(fitting.resident_bytes), "bytes")
    values |= measure(engines, arguments.lengths, arguments.rounds, arguments.tokens)
    capacity = engines["guaranteed"].info().kv_capacity_bytes
    for engine in engines.values():
        engine.close()
    return {
        "experiment": f"growth_cpu_{config.dtype}",
        "config": {
            "model": forward.facts.model_id,
            "dtype": config.dtype,
            "threads": torch.get_num_threads(),
            "kv_bytes": capacity,
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
        },
        "seeds": [SEED],
        "values": values,
        "baseline": "the same engine with growth=guaranteed, same process, same weights",
    }
