"""First token after a restart: K/V read from a file against K/V computed from the history.

A session talks and the engine stops in order, which copies its K/V into a file. Two engines in turn then open the same
folder, one that reads files and one that does not; each appends some ids and generates one token. What the system keeps
of the file in memory is given up first.

On a GPU (`--device cuda`) a prefill may be faster than the disk. What `hibernate=auto` does there is in the record:
an engine that has measured both, by a prefill as long as the session, opens the folder last.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from inference_engine.compose import DLMRestoredVerifier, open_parts
from inference_engine.config import EngineConfig
from inference_engine.session.sqlite_journal import COPIES
from inference_engine.types import Finished, GenerateParams, TokenCommitted
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config
from laboratory.evaluation import record

APPENDED = 16
APPENDING, WARMING, TALKING = 1, (2, 3), 4  # seeds, the last one of the first round
STRATEGIES = ("full", "full:codec=lloyd4")


def first_token(parts: DLMRestoredVerifier, settings: dict[str, Any], session: str) -> tuple[float, int]:
    """Seconds from the call to the first token, in an engine that just started, and how many tokens had K/V then."""
    with parts.engine(EngineConfig(**settings)) as engine:
        engine.recall(session)
        engine.append(session, ids(APPENDED, seed=APPENDING))
        began, seconds, cached = time.perf_counter(), 0.0, 0
        for event in engine.generate(session, GenerateParams(max_tokens=1)):
            if isinstance(event, TokenCommitted):
                seconds = time.perf_counter() - began
            if isinstance(event, Finished):
                cached = event.cached_tokens
        return seconds, cached


def reads_file(parts: DLMRestoredVerifier, settings: dict[str, Any], session: str, length: int) -> bool:
    """Does an engine that has computed a session of so many tokens read the file of the other one?"""
    with parts.engine(EngineConfig(**{**settings, "hibernate": "auto"})) as engine:
        for seed in WARMING:  # the first one may be slow
            other = engine.create_session().session_id
            engine.append(other, ids(length, seed=seed))
            list(engine.generate(other, GenerateParams(max_tokens=1)))
            engine.close_session(other)
        engine.recall(session)
        engine.append(session, ids(APPENDED, seed=APPENDING))
        end = list(engine.generate(session, GenerateParams(max_tokens=1)))[-1]
        assert isinstance(end, Finished)
        return end.cached_tokens > 0


def ids(count: int, *, seed: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(20, 120, count)]


def forget_files(folder: Path) -> int:
    """Bytes of the files in `folder`, which the next reader has to read from the disk."""
    total = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            total += os.fstat(file.fileno()).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model", "device", "threads")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 7900], metavar="N")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="SPEC")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments)
    parts = open_parts(config)
    values: dict[str, dict[str, Any]] = {}
    for strategy in arguments.strategies:
        for length in arguments.lengths:
            times: dict[str, list[float]] = {"file": [], "prefill": []}
            nbytes, read = 0, 0
            for number in range(arguments.rounds):
                with TemporaryDirectory() as folder:
                    settings: dict[str, Any] = {"state_dir": folder, "strategy": strategy, "hibernate": "always"}
                    settings |= {"kv_bytes": 2**30, "durability": "process", "share_prefixes": "off"}
                    with parts.engine(EngineConfig(**settings)) as engine:
                        session = engine.create_session().session_id
                        engine.append(session, ids(length, seed=TALKING + number))
                        list(engine.generate(session, GenerateParams(max_tokens=1)))
                    nbytes = forget_files(Path(folder) / COPIES)
                    seconds, cached = first_token(parts, settings, session)
                    assert cached >= length - 1, f"{cached} of {length} tokens came from the file"
                    times["file"].append(seconds)
                    seconds, cached = first_token(parts, {**settings, "hibernate": "never"}, session)
                    assert not cached, f"{cached} tokens were not prefilled"
                    times["prefill"].append(seconds)
                    forget_files(Path(folder) / COPIES)
                    read += reads_file(parts, settings, session, length)
            where = f"{strategy} at {length:,}"
            ratios = [one / other for one, other in zip(times["file"], times["prefill"], strict=True)]
            values[f"first token, file ÷ prefill, {where}"] = record.summarize(ratios, "ratio")
            for name, seconds_of in times.items():
                values[f"first token, {name}, {where}"] = record.summarize(seconds_of, "seconds")
            values[f"bytes of the file ÷ tokens, {where}"] = record.exact(nbytes / length, "bytes")
            values[f"rounds in which auto reads the file, {where}"] = record.exact(read, "rounds")
            ratio = values[f"first token, file ÷ prefill, {where}"]
            print(
                f"{where}: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), auto reads it in {read}",
                flush=True,
            )
    return {
        "experiment": f"hibernation_{Path(config.model).name}",
        "config": {
            "model": Path(config.model).name,
            "rounds": arguments.rounds,
            "appended_tokens": APPENDED,
            "threads": config.threads,
            "device": parts.forward.facts.device,
        },
        "seeds": [APPENDING, *WARMING, *range(TALKING, TALKING + arguments.rounds)],
        "values": values,
        "baseline": "the same session in the same folder, by an engine that reads no files (hibernate=never)",
    }
