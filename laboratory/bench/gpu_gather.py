"""The kernels of `gather` on a GPU: checked against their references, then timed stage by stage beside dense attention.

A step's queries choose blocks by bounds, or tokens by components, or read everything. Each operation of a timed graph
has entries of its own, as many as fit, so that nothing is read from the cache of the operation before it; the graphs
take turns. A stage is timed in a graph of its own, so stages add up to more than the whole: there, a kernel is started
while the one before it ends. On a machine without a GPU the script only checks a few small sizes; it must be started
with TRITON_INTERPRET=1 there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from inference_engine.kernels import reads as fields
from inference_engine.kernels.bounds import bounds_scores
from inference_engine.kernels.components import (
    IndexShape,
    KeyComponents,
    component_scores,
    token_weights,
    unpack,
)
from inference_engine.kernels.gather import always_read, gather_attend
from inference_engine.kernels.latents import CodeTables, Synthesis
from inference_engine.kernels.reads import AttentionCall, BlockRead, StagedRead, TokenRead
from inference_engine.kernels.topk import topk_by_sorting
from inference_engine.kernels.triton import block_selection, components, few_queries, gather, index_tiles, topk
from inference_engine.kernels.triton.ragged_attention import attend_ragged
from inference_engine.kv.parts.block_index import BlockSelector
from inference_engine.kv.parts.component_index import TokenSelector
from laboratory.bench.experiments import Save
from laboratory.bench.shared import device_name
from laboratory.evaluation import record

HAS_GPU = torch.cuda.is_available()
KV_HEADS, GROUP, HEAD_DIM, BLOCK, COPIES = (4, 7, 128, 128, 28) if HAS_GPU else (2, 3, 24, 8, 2)
SINK, LOCAL = BLOCK, 5 * BLOCK  # entries; the query's own block is the last of the local ones
MOST_BLOCKS = 8192 if HAS_GPU else 64
BLOCKS = BlockRead(blocks=MOST_BLOCKS)
READS = (StagedRead(BLOCKS, upto=1024, tokens=2**20),)
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SCALING = HEAD_DIM**-0.5
CASES = (
    [(1, 8192), (1, 32768), (1, 131072), (1, 1 << 20), (8, 131072), (8, 1 << 20)] if HAS_GPU else [(1, 333), (2, 450)]
)
KEPT = 32 if HAS_GPU else 3
# As `gather` chooses by default.
SHAPE = IndexShape(rank=16, bits=3, run=4) if HAS_GPU else IndexShape(rank=5, bits=3, run=1)
WINDOW, KEPT_TOKENS = (512, 512) if HAS_GPU else (40, 20)
MOST_TOKENS = 131072  # of a history whose choice is compared with the reference's
ROUNDS = 15
# Of chosen tokens that are restored from a latent at a twentieth of the bytes, as of four layers together.
CODES, CHAINS, RING = (1344, 64, 2176) if HAS_GPU else (40, 5, 120)  # of a token; slots behind the sink
STAGES = ("score", "weigh", "gather", "choose", "restore", "read", "merge")  # of a choice by components, in their order
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
    local = int(selector.local_starts(torch.tensor([length - 1]).numpy())[0])
    BLOCKS.fill(line.numpy(), kept=kept, local=local, block=BLOCK, bounds=region - whole)
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

    def score(self, copy: int) -> block_selection.Scores:
        return block_selection.score_blocks(self.call(copy), MOST_BLOCKS)

    def select(self, copy: int) -> Tensor:
        return block_selection.select_blocks(self.scores, self.case.regions[copy])

    def read(self, copy: int) -> None:
        gather.attend_listed(self.call(copy), self.out, self.listed)

    def whole(self, copy: int) -> Tensor:
        return attend_ragged(self.call(copy))

    def call(self, copy: int) -> AttentionCall:
        case = self.case
        return AttentionCall(
            case.queries, *self.buffers, case.regions[copy], kv_heads=KV_HEADS, scaling=SCALING, reads=READS
        )


def checked(case: Case, keys: Tensor, values: Tensor) -> dict[str, float]:
    """The first copy against the references: largest differences. Raises AssertionError."""
    stages = Stages(case, keys, values)
    out, positions = stages.whole(0), torch.tensor([case.length - 1]).numpy()
    worst_score = worst_out = 0.0
    for session in range(case.sessions):
        own, other = case.entries(keys, 0, session), case.entries(values, 0, session)
        line = case.regions[0, session].tolist()
        first, end = SINK // BLOCK, line[BLOCKS.word("LOCAL")] // BLOCK
        query = case.queries[session : session + 1]
        chosen = torch.arange(first, end, device=DEVICE).expand(KV_HEADS, -1)
        if case.kept < end - first:
            low, high = (
                own[:, line[BLOCKS.word("BOUNDS")] :][:, first:end],
                other[:, line[BLOCKS.word("BOUNDS")] :][:, first:end],
            )
            scores = stages.scores.values[session, :, first:end]
            expected = bounds_scores(query, low, high, SCALING)[0]
            worst_score = max(worst_score, float((scores - expected).abs().max() / expected.abs().max()))
            chosen = first + topk_by_sorting(scores, case.kept)
        listed = stages.listed[session, :, : chosen.shape[1]].long()
        assert torch.equal(listed, chosen), f"session {session} of {case}: other blocks are listed"
        always = always_read(positions, positions * 0 + line[BLOCKS.word("LOCAL")], sink=SINK, device=DEVICE)
        given = (query.float(), own[:, : case.length], other[:, : case.length])
        attended, _ = gather_attend(*given, chosen[None], always, block=BLOCK, scaling=SCALING)
        worst_out = max(worst_out, float((out[session] - attended[0]).abs().max() / attended.abs().max()))
    assert worst_score < 1e-5 and worst_out < 1e-2, (case, worst_score, worst_out)
    again = stages.whole(0)
    assert torch.equal(out, again), f"{case}: a second run differs"
    alone = attend_ragged(stages.call(0).of(slice(-1, None)))
    assert torch.allclose(out[-1:], alone, atol=1e-2), f"{case}: beside others a session gets another result"
    return {"score": worst_score, "out": worst_out}


class Chosen:
    """An operation whose queries choose tokens, and its stages; over the entries of a case."""

    def __init__(self, case: Case, keys: Tensor, values: Tensor) -> None:
        self.case, self.buffers = case, (keys, values)
        # A recorded step is made for the longest history that the model was trained for.
        self.record, self.most = TokenRead(shape=SHAPE), max(case.length, 131072)
        generator = torch.Generator().manual_seed(2)
        basis = torch.linalg.qr(torch.randn(KV_HEADS, HEAD_DIM, HEAD_DIM, generator=generator)).Q[..., : SHAPE.rank]
        mean = torch.randn(KV_HEADS, HEAD_DIM, generator=generator) / 4
        self.components = KeyComponents(mean=mean, basis=basis, deviations=torch.ones(KV_HEADS, SHAPE.rank))
        indexes = index_tiles.key_indexes
        self.frequencies = 1e6 ** -(torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2))
        self.alive: list[Any] = [
            indexes.rows(self.components, SHAPE, HEAD_DIM, DEVICE),
            indexes.turns(self.frequencies, HEAD_DIM, SHAPE, self.most, DEVICE),
        ]
        selector = TokenSelector(shape=SHAPE, sink=SINK, window=WINDOW, count=KEPT_TOKENS)
        self.tiles = case.length // SHAPE.tile
        self.numbers: list[Tensor] = []
        self.halves: list[list[tuple[Tensor, Tensor]]] = []
        lines = case.regions.cpu().clone()
        table = []
        for copy in range(case.copies):
            self.halves.append([])
            for session in range(case.sessions):
                size = (-(-self.tiles // 2), KV_HEADS, SHAPE.tile_bytes)
                halves = (
                    torch.zeros(size, dtype=torch.uint8).to(DEVICE),
                    torch.zeros(size, dtype=torch.uint8).to(DEVICE),
                )
                numbers = indexes.numbers(halves, *self.alive[:2])
                self.halves[-1].append(halves)
                self.numbers.append(numbers)
                lines[copy, session, TokenRead.word("INDEX")] = numbers.data_ptr()
                table.append([numbers.data_ptr(), int(case.starts[copy, session])])
        self.local = int(selector.local_starts(torch.tensor([case.length - 1]).numpy())[0])
        lines[..., fields.SINK] = SINK
        self.record.fill(lines.numpy(), kept=KEPT_TOKENS, local=self.local, shape=SHAPE.number)
        self.regions = lines.to(DEVICE)
        self.table = torch.tensor(table, device=DEVICE)
        self.write(0, self.tiles)
        self.stages = self.made(0)
        for stage in STAGES[:-1]:
            getattr(self.stages, stage)()
        self.out = torch.full_like(case.queries, float("nan"))

    def restore(self) -> None:
        """From now on entries that left a ring buffer are restored: those of all copies from codes that they share."""
        case, generator = self.case, torch.Generator().manual_seed(3)
        widths = torch.full((CODES,), 2, dtype=torch.int32)
        levels, scales = torch.randn(8, generator=generator), torch.rand(256, generator=generator) + 0.5
        tables = CodeTables.of(
            widths, torch.zeros(CODES, dtype=torch.int32, device=DEVICE), levels, scales, chains=CHAINS, first_byte=0
        )
        half = -(-(1 + CODES // 4) // 2)
        codes = torch.randint(0, 256, (2, case.length, half), dtype=torch.uint8, device=DEVICE)
        found = torch.zeros(2, device=DEVICE)
        size = (KV_HEADS, 2 * HEAD_DIM, CODES)
        for copy in range(case.copies):
            matrix = torch.randn(size, generator=generator).to(DEVICE) / CODES**0.5
            synthesis = Synthesis.of(matrix, torch.zeros(size[:2], device=DEVICE), DTYPE)
            indexes = index_tiles.key_indexes
            archive = indexes.archive((codes[0], codes[1]), SINK, tables, synthesis, found)
            for session in range(case.sessions):
                indexes.name_archive(self.numbers[copy * case.sessions + session], archive)
            self.alive.append((codes, tables, synthesis, archive, found))
        self.regions[..., fields.RING], self.regions[..., fields.COUNT] = RING, SINK + RING
        self.regions[..., fields.FLOOR] = case.length - RING + WINDOW // 2
        self.record = replace(self.record, restored=KEPT_TOKENS, numbers=tables.padded)
        self.stages = self.made(0)
        self.out.fill_(float("nan"))

    def made(self, copy: int) -> components.Choosing:
        return components.Choosing(self.call(copy), self.record, self.most, serves_all=True)

    def call(self, copy: int) -> AttentionCall:
        options: dict[str, Any] = {"kv_heads": KV_HEADS, "scaling": SCALING, "reads": self.reads}
        return AttentionCall(self.case.queries, *self.buffers, self.regions[copy], **options)

    def write(self, first: int, end: int) -> None:
        """Tiles of all copies and sessions: what as many layers write at once."""
        index_tiles.key_indexes.write_tiles(
            self.buffers[0], self.table, kv_heads=KV_HEADS, region=self.case.region, first=first, end=end, shape=SHAPE
        )

    def up_to(self, name: str, copy: int) -> None:
        """The stages to this one: each adds to what the ones before have made, so none runs by itself."""
        self.stages.given = (self.case.queries, *self.buffers, self.regions[copy])
        for each in STAGES[: STAGES.index(name) + 1]:
            if each == "merge":
                self.stages.merge(self.out)
            else:
                getattr(self.stages, each)()

    @property
    def reads(self) -> tuple[StagedRead, ...]:
        return (StagedRead(self.record, upto=self.case.sessions, tokens=self.most),)

    def whole(self, copy: int) -> Tensor:
        return attend_ragged(self.call(copy))

    def rotate(self, vectors: Tensor, shifts: Tensor) -> Tensor:
        angles = (shifts[:, None].double() * self.frequencies).to(DEVICE)
        cosines, sines = angles.cos().float(), angles.sin().float()
        left, right = vectors.chunk(2, dim=-1)
        return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)

    def checked(self) -> dict[str, float]:
        """The first copy against the references. Raises AssertionError."""
        case, out = self.case, self.whole(0)
        found = {"weight": 0.0, "chosen otherwise": 0.0, "out": 0.0}
        positions = torch.tensor([case.length - 1]).numpy()
        always = always_read(positions, positions * 0 + self.local, sink=SINK, device=DEVICE)
        for session in range(case.sessions):
            own, other = case.entries(self.buffers[0], 0, session), case.entries(self.buffers[1], 0, session)
            # In order, weights that are not below zero are the bits of their numbers.
            weights = self.stages.orders[session, :, : self.local].clone().view(torch.float32)
            places = torch.arange(self.local, device=DEVICE)
            candidates = (places >= SINK).expand(KV_HEADS, -1)
            chosen = topk_by_sorting(weights, KEPT_TOKENS, candidates=candidates)
            kept = chosen.shape[1]
            assert torch.equal(self.stages.chosen[session, :, :kept].long(), chosen.sort().values), f"session {session}"
            given = (case.queries[session : session + 1].float(), own[:, : case.length], other[:, : case.length])
            attended, _ = gather_attend(*given, chosen[None], always, block=1, scaling=SCALING)
            worst = float((out[session] - attended[0]).abs().max() / attended.abs().max())
            found["out"] = max(found["out"], worst)
            if case.length > MOST_TOKENS:
                continue
            expected = self.reference(session, given[0], own, always)
            theirs = topk_by_sorting(expected, KEPT_TOKENS, candidates=candidates)
            differs = weights[:, SINK:] / expected[:, SINK:].clamp(min=1e-30) - 1
            found["weight"] = max(
                found["weight"], float(differs.abs().quantile(0.99)) if differs.numel() < 2**24 else 0.0
            )
            same = sum(len(set(ours.tolist()) & set(its.tolist())) for ours, its in zip(chosen, theirs, strict=True))
            found["chosen otherwise"] = max(found["chosen otherwise"], 1 - same / theirs.numel())
        assert found["out"] < 1e-2 and found["chosen otherwise"] < 0.05, (case.sessions, case.length, found)
        again = self.whole(0)
        assert torch.equal(out, again), "a second run differs"
        alone = attend_ragged(self.call(0).of(slice(-1, None)))
        assert torch.equal(out[-1:], alone), "beside others a session gets other bits"
        return found

    def reference(self, session: int, query: Tensor, keys: Tensor, always: Any) -> Tensor:
        """Weights [Hkv, N] of one session's tokens before the window."""
        tiles = self.local // SHAPE.tile
        stored = keys.new_empty(tiles, KV_HEADS, SHAPE.tile_bytes, dtype=torch.uint8)
        for number, half in enumerate(self.halves[0][session]):
            stored[number::2] = half[: len(stored[number::2])]
        words = stored.view(torch.int32).view(tiles, KV_HEADS, SHAPE.words, -1)
        codes = unpack(words, SHAPE).transpose(0, 1).flatten(1, 2)
        rows = self.components.rows(SHAPE).to(DEVICE)
        scores = component_scores(query, codes, rows, SHAPE, self.rotate, SCALING)
        near = always.positions[0]
        grouped = query.view(KV_HEADS, GROUP, HEAD_DIM)
        lse = (grouped @ keys[:, near].float().mT * SCALING).logsumexp(-1).view(1, -1)
        candidates = torch.arange(self.local, device=DEVICE)[None] >= SINK
        return token_weights(scores, candidates, lse, KV_HEADS)[0]


def in_turns(runs: dict[str, Callable[[int], Any]], copies: int) -> dict[str, list[float]]:
    """Times of one operation of each, in microseconds: a graph over all copies for each, replayed in turns."""
    new_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    stream = new_stream()
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.cuda.stream(stream):
        graphs = {}
        for name, run in runs.items():
            run(0)
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                for copy in range(copies):
                    run(copy)
            graphs[name].replay()
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                begin, end = new_event(enable_timing=True), new_event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(1e3 * begin.elapsed_time(end) / copies)
    return times


def microseconds(run: Callable[[int], Any], copies: int) -> float:
    """Median time of `run` of one copy, in a graph over all copies."""
    return statistics.median(in_turns({"": run}, copies)[""])


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
        with patch.object(block_selection, "_SCORE", block_selection.SelectionTile(rows, 2**15, warps, stages)):
            run = Stages(case, keys, values).score
            found[f"score {rows} rows {warps} warps {stages} stages"] = microseconds(run, case.copies)
    for programs in (256, 1024):
        with patch.object(block_selection, "_SCORING_PROGRAMS", programs):
            found[f"score, {programs} programs"] = microseconds(Stages(case, keys, values).score, case.copies)
    by_parts = case.sessions <= gather._FEW  # else by runs
    for rows, warps, stages, count in (
        ((32, 2, 1, 160), (64, 4, 1, 80), (64, 2, 2, 40), (128, 4, 1, 40))
        if by_parts
        else ((32, 4, 4, 256), (64, 4, 3, 256), (64, 8, 4, 256), (64, 4, 4, 128), (128, 4, 3, 256))
    ):
        module, tiles, counts = (gather, "_READ", "_PARTS") if by_parts else (few_queries, "_TILE", "_PROGRAMS")
        tile = block_selection.SelectionTile(rows, 2**15, warps, stages)
        with patch.object(module, tiles, tile), patch.object(module, counts, count):
            read = Stages(case, keys, values).read
            said = f"read {rows} rows {warps} warps {stages} stages {count} {'parts' if by_parts else 'programs'}"
            found[said] = microseconds(read, case.copies)
    for columns in (64, 128):
        module, name = (gather, "_MERGED") if by_parts else (few_queries, "_MERGED_OF_MANY")
        with patch.object(module, name, columns):
            found[f"read, {columns} columns merged"] = microseconds(Stages(case, keys, values).read, case.copies)
    for warps in (4, 8, 16):
        with patch.object(block_selection, "_SELECT_WARPS", warps):
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

    def call(copy: int) -> AttentionCall:
        return AttentionCall(queries, keys, values, regions[copy], kv_heads=kv_heads, scaling=scaling)

    def run_operation(copy: int) -> Tensor:
        return attend_ragged(call(copy))

    def run_listed(copy: int) -> None:
        gather.attend_listed(call(copy), out, listed)

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
        tile = block_selection.SelectionTile(rows, 2**15, warps, stages)
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


def swept_choice(chosen: Chosen) -> dict[str, float]:
    """The time of stages with other tiles and numbers of warps and parts."""
    found, copies = {}, chosen.case.copies
    for chunk, warps, registers, parts in (
        *((64, 4, None, 128), (64, 4, 128, 128), (64, 2, None, 128), (64, 2, 168, 128)),
        *((32, 2, None, 128), (32, 2, 128, 256), (128, 4, None, 128)),
    ):
        with (
            patch.object(index_tiles, "CHUNK", chunk),
            patch.object(components, "_SCORE_WARPS", warps),
            patch.object(components, "_SCORE_REGISTERS", registers),
            patch.object(components, "_PARTS", parts),
        ):
            other = Chosen(chosen.case, *chosen.buffers)
            name = f"score, {chunk} tokens {warps} warps {registers} registers {parts} parts"
            found[name] = microseconds(partial(other.up_to, "score"), copies)
            print(name, found[name], flush=True)
    for name, numbers, stage in (("_WEIGHED", (512, 2048), "weigh"), ("_GATHERED", (1024,), "gather")):
        for number in numbers:
            with patch.object(components, name, number):
                other = Chosen(chosen.case, *chosen.buffers)
                found[f"to {stage}, {name} {number}"] = microseconds(partial(other.up_to, stage), copies)
                print(stage, name, number, found[f"to {stage}, {name} {number}"], flush=True)
    return found


def of_case(case: Case, keys: Tensor, values: Tensor, *, tries: Sequence[str]) -> dict[str, Any]:
    """Checked, and on a GPU timed: by name, samples in microseconds; other things are no lists."""
    found: dict[str, Any] = {"copies": case.copies, "bounds, differences": checked(case, keys, values)}
    chosen = Chosen(case, keys, values)
    found["components, differences"] = chosen.checked()
    if not HAS_GPU:
        return found
    stages = Stages(case, keys, values)
    runs: dict[str, Callable[[int], Any]] = {
        "bounds": stages.whole,
        "components": chosen.whole,
        "dense": partial(dense, case, keys, values),
    }
    found |= in_turns(runs, case.copies)
    runs = {f"bounds, {name}": getattr(stages, name) for name in ("score", "select", "read")}
    runs |= {f"components, to {name}": partial(chosen.up_to, name) for name in STAGES}
    found |= in_turns(runs, case.copies)
    if "bounds" in tries:
        with patch.object(gather, "chained", lambda _device: {"CHAINED": False}):
            found["bounds, unchained"] = microseconds(stages.whole, case.copies)
        with patch.object(components, "chained", lambda _device: {"CHAINED": False}):
            found["components, unchained"] = microseconds(chosen.whole, case.copies)
        if "bounds" in tries and (case.sessions, case.length) in ((1, 131072), (8, 131072)):
            found["bounds, tries"] = swept(case, keys, values)
        if "components" in tries and (case.sessions, case.length) == (1, 131072):
            found["components, tries"] = swept_choice(chosen)
    chosen.restore()
    assert chosen.whole(0).isfinite().all(), "a restored entry is not finite"
    runs = {"components, restored": chosen.whole}
    runs |= {f"components, restored, to {name}": partial(chosen.up_to, name) for name in ("choose", "restore")}
    found |= in_turns(runs, case.copies)
    # A tile is written once in so many steps: of as many layers as there are copies.
    last = chosen.tiles - 1
    writing = in_turns({"": lambda _copy: chosen.write(last, last + 1)}, 1)[""]
    found["components, a tile written"] = [each / case.copies for each in writing]
    return found


def payload_of(cells: dict[str, dict[str, Any]], left_out: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for where, cell in cells.items():
        for name, samples in cell.items():
            if isinstance(samples, list):
                values[f"{name}, {where}"] = record.summarize(samples, "us")
        for name in ("bounds", "components"):
            ratios = [ours / theirs for ours, theirs in zip(cell[name], cell["dense"], strict=True)]
            values[f"time, {name} ÷ dense, {where}"] = record.summarize(ratios, "ratio")
        otherwise = cell["components, differences"]["chosen otherwise"]
        values[f"tokens chosen otherwise than by the reference, {where}"] = record.exact(otherwise, "share")
    return {
        "experiment": f"gather_{DEVICE.type}_bfloat16",
        "config": {
            "device": device_name(DEVICE.type),
            "KV heads, group, head size": [KV_HEADS, GROUP, HEAD_DIM],
            "sink": SINK,
            "bounds": f"{KEPT} blocks of {BLOCK}, window {LOCAL}",
            "components": f"{KEPT_TOKENS} tokens by {SHAPE}, window {WINDOW}",
            "operations in a graph": {where: cell["copies"] for where, cell in cells.items()},
            "rounds": ROUNDS,
        },
        "seeds": [0, 2],
        "values": values,
        "tables": {
            "us of one operation": [
                {"sessions x tokens": where}
                | {name: round(statistics.median(part), 2) for name, part in cell.items() if isinstance(part, list)}
                for where, cell in cells.items()
            ]
        },
        "left_out": left_out,
        "baseline": "attention to all entries by torch's fused operation, in turns",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tries", nargs="+", choices=("bounds", "components"), default=(), help="print times with other tiles, too"
    )
    parser.add_argument("--cases", nargs="+", metavar="SESSIONSxTOKENS", default=[f"{a}x{b}" for a, b in CASES])


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    began = time.perf_counter()
    torch.manual_seed(0)
    vectors = 6_000
    if HAS_GPU:
        vectors = int(min(0.8 * torch.cuda.mem_get_info()[0], 2**36) / (2 * 2 * HEAD_DIM))
    keys, values = (torch.empty(vectors, HEAD_DIM, device=DEVICE, dtype=DTYPE).normal_() for _ in range(2))
    cells: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    with torch.inference_mode():
        for asked in arguments.cases:
            sessions, length = (int(number) for number in asked.split("x"))
            name = f"{sessions} x {length}"
            if HAS_GPU and sessions * KV_HEADS * length * 1.01 > vectors:
                left_out[name] = "it does not fit into the memory"
                continue
            cells[name] = found = of_case(
                made_case(keys, values, sessions, length, KEPT), keys, values, tries=arguments.tries
            )
            shown = {key: statistics.median(part) if isinstance(part, list) else part for key, part in found.items()}
            print(name, json.dumps(shown), f"{time.perf_counter() - began:.0f} s", flush=True)
            save(payload_of(cells, left_out))
        if "bounds" in arguments.tries or not HAS_GPU:
            for shape in READ_ALL:
                print("all", shape, json.dumps(read_all(keys, values, *shape)), flush=True)
            for count, kept in [(8192, 2048), (131072, 2048), (1 << 20, 2048)] if HAS_GPU else [(500, 40)]:
                print("topk", count, json.dumps(topk_row(count, kept)), flush=True)
    return payload_of(cells, left_out)
