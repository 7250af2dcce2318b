"""Start of a server on a warm cache against a bare import and `from_pretrained` of the same model: time and memory.

All are processes of their own, started by turns. Ours is over when the server is ready to take calls: model checked,
loaded, admitted, packed, K/V reserved, port open. Its memory is then what an idle server holds. Where the cache has a
latent codec, a server that may use it is started as well, and what its first session with one takes is measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from inference_engine.cli.serve import ready_target
from inference_engine.compose import find_latent
from inference_engine.config import child_environment
from inference_engine.models import check_model, convert_for_torch, is_known
from kakeya import Client, Restored
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, model_config, ratios
from laboratory.evaluation import record

_BARE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True)
print("ready", flush=True)
sys.stdin.read()
"""
_READY_SECONDS = 120
_SETTLED_SECONDS = 0.5  # after it is ready
BARE, OURS, WITH_LATENT = "bare", "ours", "ours, a latent codec in the cache"
LATENT = Restored(source="latent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A process that is ready. line: what it said. seconds: from its start until then."""

    process: psutil.Process
    line: str
    seconds: float

    @property
    def resident(self) -> float:
        """MB, pages of mapped files among them."""
        return float(self.process.memory_info().rss) / 1e6

    @property
    def most(self) -> float:
        """MB, the most that it ever had resident; 0 where the system does not say."""
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
        return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


@contextmanager
def started(command: Sequence[str], words: str) -> Iterator[Started]:
    """A process, from when it prints a line with `words`; it is ended then."""
    environment = child_environment(HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE")
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if words in line:
                seconds = time.perf_counter() - began
                time.sleep(_SETTLED_SECONDS)
                try:
                    yield Started(process=psutil.Process(process.pid), line=line, seconds=seconds)
                finally:
                    process.terminate()
                    process.wait(timeout=_READY_SECONDS)
                return
    raise RuntimeError(f"{' '.join(command[:4])} ended with {process.returncode} before it was ready")


def first_sessions(server: Started) -> dict[str, float]:
    """Milliseconds in which the first and a second session with a latent are created, and MB of the server after."""
    target = ready_target(server.line)
    assert target is not None
    took = []
    with Client(target) as client:
        client.create_session().close()  # the connection is open
        for _ in range(2):
            began = time.perf_counter()
            with client.create_session(LATENT, eos_token_ids=()):
                took.append((time.perf_counter() - began) * 1000)
        return {
            "create the first session with a latent": took[0],
            "create another": took[1],
            "resident with the latent in use": server.resident,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "model")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments)
    if is_known(config.model):
        convert_for_torch(config.model, config.cache_path)
    folder = check_model(config.model, cache=config.cache_path).folder
    serve = [
        *(sys.executable, "-m", "inference_engine.cli.main", "serve", "--model", config.model),
        *("--bind", "127.0.0.1:0", "--drafter", "ngram", "--share-prefixes", "off"),
    ]
    commands = {
        BARE: ([sys.executable, "-c", _BARE, str(folder)], "ready"),
        OURS: ([*serve, "--latent", "none"], "127.0.0.1:"),
    }
    if has_latent := find_latent(config) is not None:
        commands[WITH_LATENT] = (serve, "127.0.0.1:")
    samples: dict[str, dict[str, list[float]]] = {}
    for number in range(arguments.rounds + 1):  # the first round warms the file cache and is not kept
        for name, (command, words) in commands.items():
            with started(command, words) as process:
                found = {
                    f"start, {name}": ("seconds", process.seconds),
                    f"resident, {name}": ("MB", process.resident),
                    f"most resident until then, {name}": ("MB", process.most),
                }
                if name == WITH_LATENT:
                    for what, sample in first_sessions(process).items():
                        found[what] = ("MB" if what.startswith("resident") else "ms", sample)
            for what, (unit, sample) in found.items():
                if number:
                    samples.setdefault(unit, {}).setdefault(what, []).append(sample)
    values = {
        f"{what}, ours ÷ bare": record.summarize(ratios(samples[unit], f"{what}, {OURS}", f"{what}, {BARE}"), "ratio")
        for what, unit in (("start", "seconds"), ("resident", "MB"))
    }
    values |= {what: record.summarize(rounds, unit) for unit, each in samples.items() for what, rounds in each.items()}
    return {
        "experiment": "start",
        "config": {
            "model": config.model,
            "rounds": arguments.rounds,
            "linear": config.linear,
            "drafter": "ngram, which has no weights",
            "latent codec": "calibrated before" if has_latent else "none in the cache; `kakeya train latent`",
        },
        "seeds": [],
        "values": values,
        "baseline": "import torch, transformers; AutoModelForCausalLM.from_pretrained of the same folder, float32",
    }
