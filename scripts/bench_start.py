"""Start of a server on a warm cache against a bare import and `from_pretrained` of the same model.

    python scripts/bench_start.py                   writes results/start/<date>-<machine>/

Both are processes of their own, started by turns. Ours is over when the server is ready to take calls: model checked,
loaded, admitted, packed, K/V reserved, port open.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from inference_engine.config import ModelConfig, child_environment, resolve
from inference_engine.models import check_model
from laboratory.evaluation import record

_BARE = """
import sys, torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True)
print("ready", flush=True)
"""
_READY_SECONDS = 120


def seconds_until_ready(command: list[str], words: str) -> float:
    """From starting a process until it prints a line with `words`; the process is ended then."""
    environment = child_environment(HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE")
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if words in line:
                seconds = time.perf_counter() - began
                process.terminate()
                process.wait(timeout=_READY_SECONDS)
                return seconds
    raise RuntimeError(f"{' '.join(command[:4])} ended with {process.returncode} before it was ready")


def main() -> None:
    parser = argparse.ArgumentParser(description="Start of a server against a bare from_pretrained.")
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    config = resolve(ModelConfig, {"model": arguments.model})
    folder = check_model(config.model, cache=config.cache_path).folder
    bare = [sys.executable, "-c", _BARE, str(folder)]
    ours = [
        sys.executable,
        "-m",
        "inference_engine.cli.main",
        "serve",
        "--model",
        config.model,
        "--bind",
        "127.0.0.1:0",
    ]
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for number in range(arguments.rounds + 1):  # the first round warms the file cache and is not kept
        pair = {"bare": seconds_until_ready(bare, "ready"), "ours": seconds_until_ready(ours, "127.0.0.1:")}
        if number:
            for name, seconds in pair.items():
                times[name].append(seconds)
    values = {
        "start, ours ÷ bare": record.summarize(
            [one / other for one, other in zip(times["ours"], times["bare"], strict=True)], "ratio"
        ),
        **{f"start, {name}": record.summarize(seconds, "seconds") for name, seconds in times.items()},
    }
    path = record.write_record(
        "start",
        {
            "command": record.command_line(),
            "config": {"model": config.model, "rounds": arguments.rounds, "linear": config.linear},
            "seeds": [],
            "values": values,
            "baseline": "import torch, transformers; AutoModelForCausalLM.from_pretrained of the same folder, float32",
        },
    )
    for name, value in values.items():
        print(f"{name}: {value['median']:.2f} ({value['low']:.2f} to {value['high']:.2f}) {value['unit']}")
    print(path.relative_to(record.ROOT))


if __name__ == "__main__":
    main()
