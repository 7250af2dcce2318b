"""Start of a server that calibrates what its strategy needs, against the next start, which finds it in the cache.

    python -m scripts.bench_first_use               writes results/first_use_<model>/<date>-<machine>/

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

import psutil

from inference_engine.config import ModelConfig, resolve
from inference_engine.models import check_model
from laboratory.evaluation import record
from scripts.bench_start import started

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Start of a server that calibrates at first use, against the next one."
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--strategy", default=STRATEGY)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = resolve(ModelConfig, {"model": arguments.model, "threads": arguments.threads})
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
    path = record.write_record(
        f"first_use_{model.model_id}",
        {
            "command": record.command_line(),
            "config": {
                "model": model.model_id,
                "strategy": arguments.strategy,
                "threads": config.threads,
                "rounds": arguments.rounds,
            },
            "seeds": [0],
            "values": {what: record.summarize(rounds, unit) for (what, unit), rounds in samples.items()},
            "baseline": "the same server, started again: what was calibrated is in the cache",
        },
    )
    for (what, unit), rounds in samples.items():
        print(f"{what}: {', '.join(f'{one:.1f}' for one in rounds)} {unit}")
    print(path.relative_to(record.ROOT))


if __name__ == "__main__":
    main()
