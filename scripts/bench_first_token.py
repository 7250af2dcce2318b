"""The first token of a short turn: over gRPC, as an agent waits for it, and in the engine alone.

    python scripts/bench_first_token.py             writes results/first_token_cpu/<date>-<machine>/

A server in a process of its own serves the model with its defaults, as the demo does; the same turn runs in an engine
of this process, with as many threads. They take turns and both are idle otherwise. A turn begins when its ids are sent
and ends with its first token; each session has talked before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from inference_engine.config import EngineConfig, ModelConfig, configure_threads_environment, forbid_model_hub, resolve

configure_threads_environment()
forbid_model_hub()

from inference_engine.cli.serve import ready_target
from inference_engine.compose import open_backend
from inference_engine.engine import Engine
from inference_engine.models import tokenizer_folder
from inference_engine.types import GenerateParams, TokenCommitted
from kakeya import Client
from laboratory.evaluation import record
from laboratory.evaluation.models import load_tokenizer
from laboratory.evaluation.sessions import turned

sys.path.insert(0, str(record.ROOT))

from scripts.bench_start import started

TEXT, HISTORY, APPENDED, ANSWERED = "docs/architecture.md", 128, 18, 8  # tokens
GRPC, ALONE = "over gRPC", "in the engine"
NUMERICS = ("exact", "int8")  # the first is the default


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
    serve = [sys.executable, "-m", "inference_engine.cli.main", "serve", "--model", config.model]
    with (
        started([*serve, "--bind", "127.0.0.1:0", "--numerics", config.numerics], "127.0.0.1:") as server,
        Engine(open_backend(config), EngineConfig(kv_bytes=2**30)) as engine,
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


def main() -> None:
    parser = argparse.ArgumentParser(description="The first token of a short turn, over gRPC and in the engine alone.")
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=41)
    arguments = parser.parse_args()
    config = resolve(ModelConfig, {"model": arguments.model})
    commit = record.running_commit(None)
    tokenizer = load_tokenizer(tokenizer_folder(config.model, config.cache_path))
    ids = list(tokenizer.encode((record.ROOT / TEXT).read_text(encoding="utf-8")[:20_000]))
    values = {}
    for numerics in NUMERICS:
        own = resolve(ModelConfig, {"model": arguments.model, "numerics": numerics})
        samples = measured(own, ids, arguments.rounds)
        pairs = zip(samples[GRPC], samples[ALONE], strict=True)
        values[f"{numerics}, {GRPC} ÷ {ALONE}"] = record.summarize([one / other for one, other in pairs], "ratio")
        for name, times in samples.items():
            values[f"{numerics}, first token of {APPENDED}, {name}"] = record.summarize(times, "ms")
    path = record.write_record(
        "first_token_cpu",
        {
            "command": record.command_line(),
            "commit": commit,
            "config": {
                "model": config.model,
                "drafter": "the server's default; none in the engine",
                "history": f"{HISTORY} tokens of {TEXT}, and {APPENDED + ANSWERED} more in each round",
                "rounds": arguments.rounds,
            },
            "seeds": [],
            "values": values,
            "baseline": "the same turn in an engine of the measuring process",
        },
    )
    for name, value in values.items():
        print(f"{name}: {value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f}) {value['unit']}")
    print(path.relative_to(record.ROOT))


if __name__ == "__main__":
    main()
