"""The first token of a short turn: over gRPC, as an agent waits for it, and in the engine alone.

A server in a process of its own serves the model with its defaults, as the demo does; the same turn runs in an engine
of this process, with as many threads. They take turns and both are idle otherwise. A turn begins when its ids are sent
and ends with its first token; each session has talked before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from inference_engine.cli.serve import ready_target
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.models import tokenizer_folder
from inference_engine.types import GenerateParams, TokenCommitted
from kakeya import Client
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config, ratios
from laboratory.bench.start import started
from laboratory.evaluation import record
from laboratory.evaluation.models import load_tokenizer
from laboratory.evaluation.sessions import turned

TEXT, HISTORY, APPENDED, ANSWERED = "docs/architecture.md", 128, 18, 8  # tokens
GRPC, ALONE = "over gRPC", "in the engine"
NUMERICS = {"exact": "auto", "int8": "int8"}  # the first is the default


def in_server(client: Client) -> Callable[[Sequence[int]], float]:
    """Runs a turn of one session of the server; seconds until its first token."""
    session = client.create_session(eos_token_ids=())

    def turn(token_ids: Sequence[int]) -> float:
        began, seconds = time.perf_counter(), 0.0
        session.append(token_ids)
        for _ in session.generate(max_tokens=ANSWERED, stop_token_ids=[]):
            seconds = seconds or time.perf_counter() - began
        return seconds

    return turn


def in_engine(engine: Engine) -> Callable[[Sequence[int]], float]:
    session = engine.create_session().session_id

    def turn(token_ids: Sequence[int]) -> float:
        began, seconds = time.perf_counter(), 0.0
        engine.append(session, token_ids)
        for event in engine.generate(session, GenerateParams(max_tokens=ANSWERED)):
            if isinstance(event, TokenCommitted):
                seconds = seconds or time.perf_counter() - began
        return seconds

    return turn


def measured(config: ModelConfig, ids: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Milliseconds until the first token, by side and round."""
    samples: dict[str, list[float]] = {GRPC: [], ALONE: []}
    serve = [
        sys.executable,
        "-m",
        "inference_engine.cli.main",
        "serve",
        "--model",
        config.model,
        "--share-prefixes",
        "off",
    ]
    with (
        started([*serve, "--bind", "127.0.0.1:0", "--numerics", config.numerics], "127.0.0.1:") as server,
        Engine(open_backend(config), EngineConfig(kv_bytes=2**30, share_prefixes="off")) as engine,
    ):
        target = ready_target(server.line)
        assert target is not None
        with Client(target) as client:
            turns = {GRPC: in_server(client), ALONE: in_engine(engine)}
            for turn in turns.values():
                turn(ids[:HISTORY])
            for number in range(rounds):
                first = HISTORY + number * APPENDED
                for name in turned(list(turns), number):
                    samples[name].append(1e3 * turns[name](ids[first : first + APPENDED]))
    return samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model")
    parser.add_argument("--rounds", type=int, default=41, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments)
    tokenizer = load_tokenizer(tokenizer_folder(config.model, config.cache_path))
    ids = list(tokenizer.encode((record.ROOT / TEXT).read_text(encoding="utf-8")[:20_000]))
    values = {}
    for numerics, setting in NUMERICS.items():
        samples = measured(model_config(arguments, numerics=setting), ids, arguments.rounds)
        values[f"{numerics}, {GRPC} ÷ {ALONE}"] = record.summarize(ratios(samples, GRPC, ALONE), "ratio")
        for name, times in samples.items():
            values[f"{numerics}, first token of {APPENDED}, {name}"] = record.summarize(times, "ms")
    return {
        "experiment": "first_token_cpu",
        "config": {
            "model": config.model,
            "drafter": "the server's default; none in the engine",
            "history": f"{HISTORY} tokens of {TEXT}, and {APPENDED + ANSWERED} more in each round",
            "rounds": arguments.rounds,
        },
        "seeds": [],
        "values": values,
        "baseline": "the same turn in an engine of the measuring process",
    }
