"""Sums over GPUs within a recorded graph: ours, NCCL's and the one-shot sum of torch's symmetric memory, in turns.

python -m laboratory.bench.rank_sums FOLDER RANK RANKS ROUNDS      one process a GPU; the first one prints JSON
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inference_engine.backends.ranks.group import join_group

WIDTH, IN_A_GRAPH = 3584, 56  # of a model of 7 billion weights: numbers of a token, and sums of a step
ROWS = (1, 8, 64, 256, 1024, 4096)
_SECONDS = 60


def time_sums(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """µs of a sum, by bytes and by what adds up. Each rank is a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "laboratory.bench.rank_sums", folder]
        others = [
            subprocess.Popen([*command, str(rank), str(ranks), str(rounds)], stdout=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            first, _ = others[0].communicate(timeout=_SECONDS)
        finally:
            for other in others:
                other.kill()
                other.wait()
    if others[0].returncode:
        raise RuntimeError(f"sums cannot be timed: status {others[0].returncode}")
    found: list[dict[str, Any]] = json.loads(first)
    return found


def main(folder: str, rank: int, ranks: int, rounds: int) -> None:
    import torch.distributed._symmetric_memory as symmetric

    device = torch.device("cuda", rank)
    group = join_group(Path(folder) / "group", rank, ranks, device, torch.bfloat16)
    world = dist.group.WORLD
    assert world is not None
    name, rows = world.group_name, []
    for count in ROWS:
        states = torch.randn(count, WIDTH, device=device, dtype=torch.bfloat16) * 0.01
        shared = symmetric.empty(count, WIDTH, device=device, dtype=torch.bfloat16)
        symmetric.rendezvous(shared, world)
        sides: dict[str, Callable[[], object]] = {
            group.name: partial(group.sum, states),
            "NCCL": partial(dist.all_reduce, states),
            "torch one-shot": partial(torch.ops.symm_mem.one_shot_all_reduce, shared, "sum", name),
        }
        graphs = {side: _recorded(run, device) for side, run in sides.items()}
        samples: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds + 1):
            for side, graph in graphs.items():
                samples[side].append(_microseconds(graph, device))
        rows.append(
            {"rows": count, "bytes": states.nbytes}
            | {side: [round(each, 2) for each in found[1:]] for side, found in samples.items()}
        )
    if rank == 0:
        medians = [{**row, **{k: statistics.median(v) for k, v in row.items() if isinstance(v, list)}} for row in rows]
        print(json.dumps(medians))
    dist.barrier()


def _recorded(run: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    make: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    stream = make(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize(device)
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_A_GRAPH):
            run()
    return graph


def _microseconds(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    dist.barrier()
    torch.cuda.synchronize(device)
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    began, ended = event(enable_timing=True), event(enable_timing=True)
    began.record()
    for _ in range(5):
        graph.replay()
    ended.record()
    torch.cuda.synchronize(device)
    return float(began.elapsed_time(ended)) * 1e3 / IN_A_GRAPH / 5


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
