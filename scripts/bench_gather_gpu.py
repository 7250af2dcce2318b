"""The kernels of `gather` on a GPU: checked against their references, then timed stage by stage beside dense attention.

    python scripts/bench_gather_gpu.py [--out FOLDER]     prints a table, and writes gather.json into the folder

Each operation of a timed graph has entries of its own, as many as fit, so that nothing is read from the cache of the
operation before it. A stage is timed in a graph of its own, so stages add up to more than the whole: there, a kernel is
started while the one before it ends. On a machine without a GPU the script only checks a few small sizes; it must be
started with TRITON_INTERPRET=1 there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inference_engine.kernels import ragged_attention as fields
from inference_engine.kernels.bounds import bounds_scores
from inference_engine.kernels.gather import always_read, gather_attend
from inference_engine.kernels.topk import topk_by_sorting
from inference_engine.kernels.triton import gather, topk
from inference_engine.kernels.triton.ragged_attention import attend_ragged
from inference_engine.kv.layout import BlockSelector
from tests.kernels.test_ragged_attention import device_of_kernels

HAS_GPU = torch.cuda.is_available()
KV_HEADS, GROUP, HEAD_DIM, BLOCK, COPIES = (4, 7, 128, 128, 28) if HAS_GPU else (2, 3, 24, 8, 2)
SINK, LOCAL = BLOCK, 5 * BLOCK  # entries; the query's own block is the last of the local ones
MOST_BLOCKS = 8192 if HAS_GPU else 64
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
DEVICE = device_of_kernels()
SCALING = HEAD_DIM**-0.5
CASES = (
    [(1, 8192), (1, 32768), (1, 131072), (1, 1 << 20), (8, 131072), (8, 1 << 20)] if HAS_GPU else [(1, 333), (2, 450)]
)
KEPT = 32 if HAS_GPU else 3
# Query heads, KV heads, head size, sessions and length where every entry is read.
READ_ALL = [
    *((28, 4, 128, 1, 1024), (28, 4, 128, 1, 8192), (28, 4, 128, 16, 1024), (28, 4, 128, 16, 8192)),
    *((28, 4, 128, 64, 1024), (9, 3, 64, 1, 8192), (9, 3, 64, 16, 8192)),
]
if not HAS_GPU:
    READ_ALL = [(4, 2, 24, 2, 50)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """`copies` operations over entries of their own: of each session of a step, so many entries."""

    sessions: int
    length: int
    kept: int
    region: int
    starts: Tensor  # [copies, sessions]
    regions: Tensor  # [copies, sessions, FIELDS]
    queries: Tensor  # [sessions, Hq, D]

    @property
    def copies(self) -> int:
        return len(self.starts)

    def entries(self, states: Tensor, copy: int, session: int) -> Tensor:
        """[Hkv, region, D]"""
        first = int(self.starts[copy, session])
        return states[first : first + KV_HEADS * self.region].view(KV_HEADS, self.region, HEAD_DIM)


def made_case(keys: Tensor, values: Tensor, sessions: int, length: int, kept: int) -> Case:
    """Regions in the buffers, one behind the other, with bounds behind the entries of each head."""
    whole = length // BLOCK
    region = -(-length // BLOCK) * BLOCK + whole
    copies = min(COPIES, len(keys) // (sessions * KV_HEADS * region))
    starts = torch.arange(copies * sessions).view(copies, sessions) * KV_HEADS * region
    selector = BlockSelector(block=BLOCK, sink=SINK, window=LOCAL - BLOCK, count=kept)
    line = torch.zeros(fields.FIELDS, dtype=torch.int64)
    line[fields.HEAD_SLOTS], line[fields.COUNT], line[fields.SINK] = region, length, selector.sink_tokens
    line[fields.LAST] = line[fields.UPTO] = length - 1
    line[fields.BLOCK], line[fields.KEPT], line[fields.BOUNDS] = BLOCK, kept, region - whole
    line[fields.LOCAL] = int(selector.local_starts(torch.tensor([length - 1]).numpy())[0])
    regions = line.repeat(copies, sessions, 1)
    regions[..., fields.START] = starts
    case = Case(
        sessions=sessions,
        length=length,
        kept=kept,
        region=region,
        starts=starts,
        regions=regions.to(DEVICE),
        queries=torch.randn(sessions, KV_HEADS * GROUP, HEAD_DIM, device=DEVICE).to(DTYPE),
    )
    for copy in range(copies):
        for session in range(sessions):
            own, other = case.entries(keys, copy, session), case.entries(values, copy, session)
            blocks = own[:, : whole * BLOCK].view(KV_HEADS, whole, BLOCK, HEAD_DIM)
            torch.amin(blocks, 2, out=own[:, region - whole :])
            torch.amax(blocks, 2, out=other[:, region - whole :])
    return case


class Stages:
    """The stages of one operation, each by itself, and the whole."""

    def __init__(self, case: Case, keys: Tensor, values: Tensor) -> None:
        self.case, self.buffers = case, (keys, values)
        self.out = torch.full_like(case.queries, float("nan"))
        self.scores = self.score(0)
        self.listed = self.select(0)

    def score(self, copy: int) -> gather.Scores:
        case = self.case
        return gather.score_blocks(
            case.queries, *self.buffers, case.regions[copy], scaling=SCALING, kv_heads=KV_HEADS, blocks=MOST_BLOCKS
        )

    def select(self, copy: int) -> Tensor:
        return gather.select_blocks(self.scores, self.case.regions[copy])

    def read(self, copy: int) -> None:
        case = self.case
        gather.attend_listed(case.queries, *self.buffers, case.regions[copy], self.listed, self.out, scaling=SCALING)

    def whole(self, copy: int) -> Tensor:
        case = self.case
        return attend_ragged(
            case.queries, *self.buffers, case.regions[copy], kv_heads=KV_HEADS, scaling=SCALING, blocks=MOST_BLOCKS
        )


def checked(case: Case, keys: Tensor, values: Tensor) -> dict[str, float]:
    """The first copy against the references: largest differences. Raises AssertionError."""
    stages = Stages(case, keys, values)
    out, positions = stages.whole(0), torch.tensor([case.length - 1]).numpy()
    worst_score = worst_out = 0.0
    for session in range(case.sessions):
        own, other = case.entries(keys, 0, session), case.entries(values, 0, session)
        line = case.regions[0, session].tolist()
        first, end = SINK // BLOCK, line[fields.LOCAL] // BLOCK
        query = case.queries[session : session + 1]
        chosen = torch.arange(first, end, device=DEVICE).expand(KV_HEADS, -1)
        if case.kept < end - first:
            low, high = own[:, line[fields.BOUNDS] :][:, first:end], other[:, line[fields.BOUNDS] :][:, first:end]
            scores = stages.scores.values[session, :, first:end]
            expected = bounds_scores(query, low, high, SCALING)[0]
            worst_score = max(worst_score, float((scores - expected).abs().max() / expected.abs().max()))
            chosen = first + topk_by_sorting(scores, case.kept)
        listed = stages.listed[session, :, : chosen.shape[1]].long()
        assert torch.equal(listed, chosen), f"session {session} of {case}: other blocks are listed"
        always = always_read(positions, positions * 0 + line[fields.LOCAL], sink=SINK, device=DEVICE)
        given = (query.float(), own[:, : case.length], other[:, : case.length])
        attended, _ = gather_attend(*given, chosen[None], always, block=BLOCK, scaling=SCALING)
        worst_out = max(worst_out, float((out[session] - attended[0]).abs().max() / attended.abs().max()))
    assert worst_score < 1e-5 and worst_out < 1e-2, (case, worst_score, worst_out)
    again = stages.whole(0)
    assert torch.equal(out, again), f"{case}: a second run differs"
    alone = attend_ragged(
        case.queries[-1:], keys, values, case.regions[0, -1:], kv_heads=KV_HEADS, scaling=SCALING, blocks=MOST_BLOCKS
    )
    assert torch.equal(out[-1:], alone), f"{case}: beside others a session gets other bits"
    return {"score": worst_score, "out": worst_out}


def microseconds(run: Callable[[int], Any], copies: int) -> float:
    """Median time of `run` of one copy, in a graph over all copies."""
    new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    stream = new_stream()
    with torch.cuda.stream(stream):
        run(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for copy in range(copies):
                run(copy)
        graph.replay()
        times: list[float] = []
        for _ in range(15):
            begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * float(statistics.median(times)) / copies


def dense(case: Case, keys: Tensor, values: Tensor, copy: int) -> Tensor:
    shape = (case.sessions, KV_HEADS, case.length, HEAD_DIM)
    strides = (KV_HEADS * case.region * HEAD_DIM, case.region * HEAD_DIM, HEAD_DIM, 1)
    first = int(case.starts[copy, 0]) * HEAD_DIM
    queries = case.queries.view(case.sessions, KV_HEADS, GROUP, HEAD_DIM)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys.as_strided(shape, strides, first), values.as_strided(shape, strides, first)
        )


def swept(case: Case, keys: Tensor, values: Tensor) -> dict[str, float]:
    """The time of a stage with other tiles."""
    found = {}
    for rows, warps, stages in ((32, 4, 1), (32, 4, 2), (64, 4, 1), (64, 8, 1)):
        with patch.object(gather, "_SCORE", gather.Tile(rows, 2**15, warps, stages)):
            run = Stages(case, keys, values).score
            found[f"score {rows} rows {warps} warps {stages} stages"] = microseconds(run, case.copies)
    for programs in (256, 1024):
        with patch.object(gather, "_SCORING_PROGRAMS", programs):
            found[f"score, {programs} programs"] = microseconds(Stages(case, keys, values).score, case.copies)
    for rows, warps, stages, parts in (
        *((32, 2, 1, 160), (32, 4, 1, 160), (64, 4, 1, 80), (64, 4, 1, 128), (64, 8, 1, 80)),
        *((64, 4, 1, 40), (64, 4, 2, 40), (128, 8, 1, 40), (128, 4, 1, 40)),
    ):
        tile = gather.Tile(rows, 2**15, warps, stages)
        with patch.object(gather, "_READ", tile), patch.object(gather, "_PARTS", parts):
            read = Stages(case, keys, values).read
            found[f"read {rows} rows {warps} warps {stages} stages {parts} parts"] = microseconds(read, case.copies)
    for columns in (32, 128):
        with patch.object(gather, "_MERGED", columns):
            found[f"read, {columns} columns merged"] = microseconds(Stages(case, keys, values).read, case.copies)
    for warps in (4, 8, 16):
        with patch.object(gather, "_SELECT_WARPS", warps):
            found[f"select {warps} warps"] = microseconds(Stages(case, keys, values).select, case.copies)
    return found


def read_all(
    keys: Tensor, values: Tensor, query_heads: int, kv_heads: int, head_dim: int, sessions: int, length: int
) -> dict[str, float]:
    """Attention to all entries, by the operation and by the one that also reads lists, with other tiles and parts."""
    keys, values = keys.view(-1, head_dim), values.view(-1, head_dim)
    copies = min(COPIES, len(keys) // (sessions * kv_heads * length))
    regions = torch.zeros(copies, sessions, fields.FIELDS, dtype=torch.int64)
    regions[..., fields.START] = torch.arange(copies * sessions).view(copies, sessions) * kv_heads * length
    regions[..., fields.HEAD_SLOTS] = regions[..., fields.COUNT] = length
    regions[..., fields.LAST] = regions[..., fields.UPTO] = length - 1
    regions = regions.to(DEVICE)
    queries = torch.randn(sessions, query_heads, head_dim, device=DEVICE).to(DTYPE)
    listed = torch.zeros(sessions, kv_heads, 1, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(queries, float("nan"))
    scaling = head_dim**-0.5

    def run_operation(copy: int) -> Tensor:
        return attend_ragged(queries, keys, values, regions[copy], kv_heads=kv_heads, scaling=scaling)

    def run_listed(copy: int) -> None:
        gather.attend_listed(queries, keys, values, regions[copy], listed, out, scaling=scaling)

    run_listed(0)
    own = queries.view(sessions, kv_heads, -1, head_dim)
    shape = (sessions, kv_heads, length, head_dim)
    expected = torch.nn.functional.scaled_dot_product_attention(
        own, keys[: sessions * kv_heads * length].view(shape), values[: sessions * kv_heads * length].view(shape)
    ).view_as(out)
    for found in (out, run_operation(0)):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-2
    if not HAS_GPU:
        return {}
    row = {"operation": microseconds(run_operation, copies)}
    for rows, warps, stages, parts in (
        (64, 4, 1, 80),
        (64, 4, 1, 128),
        (64, 4, 2, 128),
        (128, 8, 1, 64),
        (128, 8, 2, 64),
    ):
        tile = gather.Tile(rows, 2**15, warps, stages)
        with patch.object(gather, "_READ", tile), patch.object(gather, "_PARTS", parts):
            row[f"{rows} rows {warps} warps {stages} stages {parts} parts"] = microseconds(run_listed, copies)
    return row


def scores_of(kind: str, count: int) -> Tensor:
    scores = torch.randn(count, device=DEVICE)
    if kind == "equal ones":
        scores = (scores * 4).round()
    elif kind == "mostly minus infinity":
        scores[torch.rand(count, device=DEVICE) < 0.9] = float("-inf")
    elif kind == "ascending":
        scores = scores.sort().values
    elif kind == "one value":
        scores = torch.zeros_like(scores)
    elif kind == "not finite":
        scores[::97], scores[::89], scores[::83] = float("nan"), float("inf"), -float("nan")
    elif kind == "wide":
        scores = scores.exp2().square().exp() * scores.sign()
    return scores


def topk_row(count: int, kept: int) -> dict[str, Any]:
    """Top-K of one row: checked against the definition, then timed beside torch.topk."""
    kinds = ("normal", "equal ones", "mostly minus infinity", "ascending", "one value", "not finite", "wide")
    row: dict[str, Any] = {}
    for kind in kinds:
        scores = scores_of(kind, count)[None]
        assert torch.equal(topk.largest(scores, kept), topk_by_sorting(scores, kept)), (kind, count)
        some = torch.rand(1, count, device=DEVICE) < 0.3
        found = topk.largest(scores, kept, candidates=some)
        assert torch.equal(found, topk_by_sorting(scores, kept, candidates=some)), (kind, count, "candidates")
        if HAS_GPU:
            row[kind] = microseconds(partial(_largest_of, [scores] * 8, kept), 8)
    if HAS_GPU:
        rows = list(torch.randn(COPIES, 1, count, device=DEVICE))
        row["ours"] = microseconds(partial(_largest_of, rows, kept), COPIES)
        row["torch.topk"] = microseconds(lambda copy: rows[copy].topk(kept, sorted=False), COPIES)
    return row


def _largest_of(rows: Sequence[Tensor], kept: int, copy: int) -> Tensor:
    return topk.largest(rows[copy], kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for gather.json")
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(0)
    vectors = 6_000
    if HAS_GPU:
        vectors = int(min(0.8 * torch.cuda.mem_get_info()[0], 2**36) / (2 * 2 * HEAD_DIM))
    keys, values = (torch.empty(vectors, HEAD_DIM, device=DEVICE, dtype=DTYPE).normal_() for _ in range(2))
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if HAS_GPU else "cpu, interpreted", "cases": {}}
    with torch.inference_mode():
        for sessions, length in CASES:
            name = f"{sessions} x {length}"
            if HAS_GPU and sessions * KV_HEADS * length * 1.01 > vectors:
                print(f"{name}: does not fit", flush=True)
                continue
            case = made_case(keys, values, sessions, length, KEPT)
            row: dict[str, Any] = {"copies": case.copies, "worst": checked(case, keys, values)}
            results["cases"][name] = row
            if HAS_GPU:
                stages = Stages(case, keys, values)
                for stage in ("whole", "score", "select", "read"):
                    row[stage] = microseconds(getattr(stages, stage), case.copies)
                with patch.object(gather, "chained", lambda _device: {"CHAINED": False}):
                    row["whole, unchained"] = microseconds(stages.whole, case.copies)
                row["dense"] = microseconds(partial(dense, case, keys, values), case.copies)
                if (sessions, length) in ((1, 131072), (1, 1 << 20), (8, 131072)):
                    row["sweep"] = swept(case, keys, values)
            print(name, json.dumps(row), f"{time.perf_counter() - began:.0f} s", flush=True)
        results["all"] = {}
        for shape in READ_ALL:
            results["all"][str(shape)] = row = read_all(keys, values, *shape)
            print("all", shape, json.dumps(row), f"{time.perf_counter() - began:.0f} s", flush=True)
        results["topk"] = {}
        for count, kept in [(8192, 2048), (131072, 2048), (1 << 20, 2048)] if HAS_GPU else [(500, 40)]:
            results["topk"][f"{kept} of {count}"] = row = topk_row(count, kept)
            print("topk", count, json.dumps(row), f"{time.perf_counter() - began:.0f} s", flush=True)
    results["seconds"] = time.perf_counter() - began
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gather.json").write_text(json.dumps(results, indent=1))
    if HAS_GPU:
        print(f"\n{'us':>12} {'whole':>8} {'unchained':>10} {'score':>7} {'select':>7} {'read':>7} {'dense':>8}")
        for name, row in results["cases"].items():
            times = [row[key] for key in ("whole", "whole, unchained", "score", "select", "read", "dense")]
            print(f"{name:>12} " + " ".join(f"{each:9.2f}" for each in times))


if __name__ == "__main__":
    main()
