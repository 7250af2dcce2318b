"""What the benchmarks on a GPU share: this device's own limits, measured first, and times of operations in graphs.

On a machine without a GPU everything runs on the CPU and is timed by the clock: a trial of the benchmarks, no
measurement of anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laboratory.evaluation import record
from laboratory.evaluation.sessions import turned

_EMPTY_KERNELS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What the device reaches in this process. Bytes and operations a second; of kernels in a graph, microseconds.

    copied_bytes counts what is read and what is written.
    """

    read_bytes: float
    copied_bytes: float
    products: float  # floating-point operations of a matrix product in bfloat16
    kernel_us: float  # between two kernels of a graph that do nothing but follow each other

    @property
    def bandwidth(self) -> float:
        """The larger of both: floors by bytes are divided by it."""
        return max(self.read_bytes, self.copied_bytes)

    def values(self) -> dict[str, Any]:
        """Values of a record."""
        return {
            "ceiling, bytes read": record.exact(self.read_bytes / 1e12, "TB a second"),
            "ceiling, bytes copied": record.exact(self.copied_bytes / 1e12, "TB a second"),
            "ceiling, matrix product": record.exact(self.products / 1e12, "TFLOP a second"),
            "ceiling, kernels in a graph that follow each other": record.exact(self.kernel_us, "µs a kernel"),
        }


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes about 9 GB of a GPU's memory for a second."""
    is_gpu = device.type == "cuda"
    # As whole numbers: a sum of floats may be computed in two passes.
    source = torch.zeros(2**30 if is_gpu else 2**16, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    side = 8192 if is_gpu else 64
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product, one = torch.empty_like(left), torch.zeros(1, device=device)

    def follow(_copy: int) -> None:
        one.add_(1)

    timed = {
        "read": Timed(lambda _copy: source.max(), 4, device),
        "copy": Timed(lambda _copy: target.copy_(source), 4, device),
        "product": Timed(lambda _copy: torch.mm(left, right, out=product), 4, device),
        "kernels": Timed(follow, _EMPTY_KERNELS, device),
    }
    found = {name: min(samples) for name, samples in in_turns(timed, rounds=7).items()}
    return Ceilings(
        read_bytes=1e6 * source.nbytes / found["read"],
        copied_bytes=2e6 * source.nbytes / found["copy"],
        products=2e6 * side**3 / found["product"],
        kernel_us=found["kernels"],
    )


class Timed:
    """`run` of copies 0 … copies-1, recorded as one graph; every call of this replays it and returns µs a copy."""

    def __init__(self, run: Callable[[int], Any], copies: int, device: torch.device) -> None:
        self._run, self._copies, self._is_gpu = run, copies, device.type == "cuda"
        if self._is_gpu:
            self._stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run(0)
                self._stream.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self._stream):
                    self._all()
        self()

    def __call__(self) -> float:
        if not self._is_gpu:
            began = time.perf_counter()
            self._all()
            return 1e6 * (time.perf_counter() - began) / self._copies
        with torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            return 1e3 * float(begin.elapsed_time(end)) / self._copies

    def _all(self) -> None:
        for copy in range(self._copies):
            self._run(copy)


def in_turns(timed: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Samples of each, taken in turns: no side of a comparison always comes first. A sample is a median of three."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds):
        for name in turned(list(timed), number):
            found[name].append(statistics.median(timed[name]() for _ in range(3)))
    return found
