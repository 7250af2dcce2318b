"""Start of a server that calibrates what its strategy needs, against the next start, which finds it in the cache.

In each round a cache of its own is filled by three servers: one that needs nothing calibrated, so that the model is
admitted and its files are in memory; one that needs it, and makes it; and one that finds it. The calibration is what
the second takes more than the third. Its memory is that of the server and the process that calibrates, asked for again
and again: a short peak may be missed, and pages that both map count twice.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from inference_engine.models import check_model
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config
from laboratory.bench.start import started
from laboratory.evaluation import record

STRATEGY = "restored:source=latent"
ASKED_SECONDS = 0.05


@contextmanager
def watched_children() -> Iterator[list[int]]:
    """The most bytes that this process's children, and theirs, had resident at once."""
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(ASKED_SECONDS):
            most[0] = max(most[0], sum(_resident(child) for child in psutil.Process().children(recursive=True)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model", "threads")
    parser.add_argument("--strategy", default=STRATEGY, metavar="SPEC")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments)
    model = check_model(config.model, cache=config.cache_path)
    samples: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        with TemporaryDirectory() as cache:
            serve = [
                *(sys.executable, "-m", "inference_engine.cli.main", "serve", "--model", str(model.folder)),
                *("--bind", "127.0.0.1:0", "--cache-dir", cache, "--threads", str(config.threads)),
            ]
            with started([*serve, "--strategy", "full", "--calibrate", "never"], "127.0.0.1:"):
                pass
            asking = [*serve, "--strategy", arguments.strategy]
            with watched_children() as most, started(asking, "127.0.0.1:") as first:
                took = first.process.cpu_times()
            with started(asking, "127.0.0.1:") as later:
                pass
        for what, unit, sample in (
            ("start, calibrated at first use", "seconds", first.seconds),
            ("start, calibrated before", "seconds", later.seconds),
            ("calibration", "seconds", first.seconds - later.seconds),
            ("processor time of the process that calibrates", "seconds", took.children_user + took.children_system),
            ("most resident meanwhile, with the server", "GB", most[0] / 1e9),
        ):
            samples.setdefault((what, unit), []).append(sample)
    return {
        "experiment": f"first_use_{model.model_id}",
        "config": {
            "model": model.model_id,
            "strategy": arguments.strategy,
            "threads": config.threads,
            "rounds": arguments.rounds,
        },
        "seeds": [0],
        "values": {what: record.summarize(rounds, unit) for (what, unit), rounds in samples.items()},
        "baseline": "the same server, started again: what was calibrated is in the cache",
    }
