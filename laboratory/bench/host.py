"""What a decode step takes on the host beside its native calls: choosing, planning, sampling, committing, reporting.

Wall time, and processor time of the engine's thread, which other processes disturb less. The forward is called on that
thread, too, and is taken off both; what ranks ids for sampling is not. Frames of gRPC are in `server_overhead`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from inference_engine.backends.native.forward import NativeForward
from inference_engine.backends.native.program import Program
from inference_engine.compose import find_drafter, open_backend
from inference_engine.config import EngineConfig, ModelConfig, resolve
from inference_engine.engine import Engine
from inference_engine.models import tokenizer_folder
from inference_engine.native.library import NativeStep
from inference_engine.types import GenerateParams, Sampling, TokenCommitted
from laboratory.bench.experiments import Save
from laboratory.evaluation import record
from laboratory.evaluation.models import load_tokenizer

LENGTH, STEPS, APART = 128, 64, 5  # the first and last steps of several sessions are not of all of them
SESSIONS = (1, 8)
TEXT = "docs/architecture.md"  # what is likely next decides how many ids sampling looks at
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=1)}
DRAFTERS = ("none", "ngram")
SHARE = "beside the call ÷ step"


class Watched(Program):
    """A program that notes its native calls: wall and processor seconds of the thread that makes them."""

    def __init__(self, program: Program) -> None:
        vars(self).update(vars(program))
        self._opened = program  # closes what both have
        self.wall = self.processor = 0.0
        self.calls = 0

    def run(self, step: NativeStep, first: int = 0, end: int | None = None) -> None:
        wall, processor = time.perf_counter(), time.thread_time()
        super().run(step, first, end)
        self.calls += 1
        self.wall += time.perf_counter() - wall
        self.processor += time.thread_time() - processor


def steps(engine: Engine, watched: Watched, text: Sequence[int], sessions: int, sampling: Sampling) -> dict[str, float]:
    """Median milliseconds of a step of all sessions: whole, and without its native calls, also as a share of it."""
    rows: dict[int, tuple[float, float, float, float]] = {}

    def note(event: object) -> None:
        if isinstance(event, TokenCommitted):  # with drafts, a step gives several: the first of them
            rows.setdefault(watched.calls, (time.perf_counter(), time.thread_time(), watched.wall, watched.processor))

    opened = [engine.create_session().session_id for _ in range(sessions)]
    for number, session in enumerate(opened):
        engine.append(session, text[number * LENGTH : (number + 1) * LENGTH])
        list(engine.generate(session, GenerateParams(max_tokens=1)))
    params = GenerateParams(max_tokens=STEPS + 2 * APART, sampling=sampling)
    running = [
        engine.generate(session, params, listener=note if not number else None) for number, session in enumerate(opened)
    ]
    for events in running:
        list(events)
    for session in opened:
        engine.close_session(session)
    each = np.diff(np.array(list(rows.values())), axis=0)[APART:-APART] * 1000
    wall, processor, call, own = each.T
    return {
        "step": float(np.median(wall)),
        "beside the call": float(np.median(wall - call)),
        "beside the call, processor time": float(np.median(processor - own)),
        SHARE: float(np.median((wall - call) / wall)),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = resolve(ModelConfig, {"threads": arguments.threads, "backend": "native"})
    opened = cast(NativeForward, open_backend(config))
    watched = Watched(opened.program)
    forward = NativeForward(opened.spec, opened.facts, watched)
    tokenizer = load_tokenizer(tokenizer_folder(config.model, config.cache_path))
    text = list(tokenizer.encode((record.ROOT / TEXT).read_text(encoding="utf-8")[:20_000]))
    engines = {
        name: Engine(
            forward,
            EngineConfig(kv_bytes=2**30, share_prefixes="off"),
            drafter=None if name == "none" else find_drafter(resolve(ModelConfig, {"drafter": name}), forward),
        )
        for name in DRAFTERS
    }
    found: dict[tuple[str, ...], list[float]] = {}
    for number in range(1 + arguments.rounds):
        for drafter, engine in engines.items():
            for sessions in SESSIONS:
                for kind, sampling in SAMPLINGS.items():
                    for what, sample in steps(engine, watched, text, sessions, sampling).items():
                        if number:
                            plural = "session" if sessions == 1 else "sessions"
                            cell = (what, f"{sessions} {plural}", kind, f"drafter {drafter}")
                            found.setdefault(cell, []).append(sample)
    for engine in engines.values():
        engine.close()
    values = {
        ", ".join(cell): record.summarize(samples, "ratio" if cell[0] == SHARE else "ms")
        for cell, samples in sorted(found.items(), key=lambda one: one[0][0] == "step")
    }
    return {
        "experiment": "host_cpu",
        "what": "Milliseconds of a decode step beside its native call.",
        "config": {
            "model": config.model,
            "numerics": forward.facts.numerics,
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "history": f"{LENGTH} tokens of {TEXT}",
            "steps": STEPS,
        },
        "seeds": [1],
        "values": values,
        "baseline": "the whole step, of which the native call is the rest",
    }
