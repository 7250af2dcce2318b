"""Cost: seconds and bytes of each strategy at each length, beside `full` in the same run.

    round 1   full  a  b      round 2   a  b  full      round 3   b  full  a          all of them at every length

A strategy's speed is told as a ratio within a round, so what the machine does meanwhile happens to both sides. Every
session is prefilled first, by a Generate of one token; decoding is timed in a second Generate, of all sessions of the
batch at once, from the moment each of them has its first token until the first of them has its last.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from inference_engine.engine import Engine
from inference_engine.errors import BackendError, InvalidArgument, NoCapacity
from inference_engine.evaluation import record, traffic
from inference_engine.evaluation.arguments import geometry_of, require_at_least, strategy_argument
from inference_engine.evaluation.haystack import KINDS, digest, filler
from inference_engine.evaluation.models import Target
from inference_engine.kv.geometry import Geometry
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Bound, Event, Failed, Finished, GenerateParams, TokenCommitted

logger = logging.getLogger(__name__)

_TEXT_BEYOND = 20_000  # ids of text beyond the longest history, so that histories differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One session, or `batch` equal ones at once.

    first_token_seconds: of a session's first Generate, prefill included, the others being idle. resume_seconds: to the
    first token of a later Generate, the slowest of the batch. token_seconds: of one step that gives every session its
    next token. kv_bytes: of one session, between Generates. kv_peak_bytes: of one session, the most that was seen at
    any token. transient_bytes: the most the device's allocator held beyond what it held before, in the decoding
    Generate (None: this device has no such count); arenas are allocated before and are no part of it.
    """

    prefill_seconds: float
    first_token_seconds: float
    resume_seconds: float
    token_seconds: float
    kv_bytes: int
    kv_peak_bytes: int
    transient_bytes: int | None
    bound: Bound
    attended_positions: int
    evicted_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Where runs belong. The length is what was appended before decoding began."""

    strategy: str
    length: int
    batch: int

    def __str__(self) -> str:
        return f"{self.strategy}, at {self.length}" + (f", batch {self.batch}" if self.batch > 1 else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategies", nargs="+", type=strategy_argument, default=[], metavar="SPEC",
        help="what to measure beside full, which always runs",
    )  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], metavar="N", help="ids of history")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], metavar="N", help="sessions that decode at once")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measured, after one that is not")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="that each session decodes")
    parser.add_argument("--kind", choices=KINDS, default="prose", help="of text in the histories")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")


def main(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Measure and return the record's payload. Raises InvalidArgument for numbers that are too small."""
    require_at_least(arguments, lengths=1, batches=1, rounds=1, tokens=2)
    rounds, tokens = (1, min(8, arguments.tokens)) if arguments.quick else (arguments.rounds, arguments.tokens)
    found, left_out = measure(
        target.engine,
        arguments.strategies,
        filler(target.tokenizer, arguments.kind, max(arguments.lengths) + _TEXT_BEYOND, arguments.seed),
        lengths=arguments.lengths,
        batches=arguments.batches,
        rounds=rounds,
        tokens=tokens,
    )
    by_name = {str(one): one for one in (Full(), *arguments.strategies)}
    return {
        "what": "Seconds and bytes of each strategy beside full, in turns. A speed ÷ full above 1 is a gain.",
        "config": {
            **target.describe(),
            "threads": torch.get_num_threads(),
            "weight_bytes": traffic.weight_bytes(target.model, target.forward.compute_dtype.itemsize),
            "strategies": list(by_name),
            "lengths": arguments.lengths,
            "batches": arguments.batches,
            "rounds": rounds,
            "tokens": tokens,
            "kind": arguments.kind,
            "texts_sha256": digest(arguments.kind),
        },
        "seeds": [arguments.seed],
        "values": values(found),
        "baseline": "full, in the same rounds",
        "tables": {
            "cost": with_traffic(rows(found), by_name, geometry_of(target), tokens),
            "left out": [{"cell": cell, "reason": reason} for cell, reason in left_out.items()],
        },
    }


def draw(payload: Mapping[str, Any], folder: Path) -> None:
    """Decode speed and bytes between Generates over length, a line for each strategy, at the smallest batch."""
    lines = payload["tables"]["cost"]
    batch = min(line["batch"] for line in lines)
    here = [line for line in lines if line["batch"] == batch]
    for name, y_label, unit, read in (
        ("decode", "tokens/s", "of all sessions", lambda line: line["batch"] / line["token_seconds"]),
        ("kv_bytes", "MiB of K/V", "of a session between Generates", lambda line: line["kv_bytes"] / 2**20),
    ):
        record.plot_lines(
            folder / f"{name}.png",
            title=f"{y_label} {unit}, batch {batch}",
            x_label="history, tokens",
            y_label=y_label,
            lines={
                own: _course([line for line in here if line["strategy"] == own], read)
                for own in dict.fromkeys(line["strategy"] for line in here)
            },
        )


def _course(
    lines: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], float]
) -> tuple[list[float], list[float]]:
    return [line["length"] for line in lines], [read(line) for line in lines]


class _Watch:
    """A Generate's listener: when its tokens came, and the most K/V bytes its session held at any event.

    At its first token it holds the engine up until `all_asked` is set: a batch decodes together from the beginning.
    """

    def __init__(self, engine: Engine, session_id: str, all_asked: threading.Event) -> None:
        self._engine = engine
        self._session_id = session_id
        self._all_asked = all_asked
        self._ended = threading.Event()
        self.token_times: list[float] = []
        self.kv_peak_bytes = 0
        self.ending: Finished | Failed | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenCommitted):
            self.token_times.append(time.perf_counter())
            self._all_asked.wait()
        if isinstance(event, Finished | Failed):
            self.ending = event
            self._ended.set()
        else:
            live = self._engine.session_info(self._session_id).kv_live_bytes
            self.kv_peak_bytes = max(self.kv_peak_bytes, live)

    def wait(self) -> Finished:
        """Until the Generate has ended; raises what it failed with."""
        self._ended.wait()
        if isinstance(self.ending, Failed):
            raise self.ending.error
        assert self.ending is not None
        return self.ending


# -- one run ---------------------------------------------------------------------------------------------------------


def run(engine: Engine, strategy: KVStrategy, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    """Prefill a session for each prompt, then let all of them decode `tokens` tokens at once.

    Raises InvalidArgument or NoCapacity if the engine cannot hold such sessions, with none left open.
    """
    if tokens < 2:
        raise ValueError(f"speed is measured between tokens: at least 2 are needed, got {tokens}")
    sessions: list[str] = []
    try:
        for prompt in prompts:
            limit = len(prompt) + 1 + tokens
            sessions.append(engine.create_session(strategy=strategy, limit_tokens=limit).session_id)
        return _run(engine, sessions, prompts, tokens)
    finally:
        for session in sessions:
            engine.close_session(session)


def _run(engine: Engine, sessions: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    prefill_seconds, first_token_seconds = [], []
    peak = 0
    for session, prompt in zip(sessions, prompts, strict=True):
        most = engine.config.max_append_tokens
        for start in range(0, len(prompt), most):
            engine.append(session, prompt[start : start + most])
        began = time.perf_counter()
        (watch,) = _generate(engine, [session], tokens=1)
        prefill_seconds.append(watch.wait().prefill_seconds)
        first_token_seconds.append(watch.token_times[0] - began)
        peak = max(peak, watch.kv_peak_bytes)

    allocator = _Allocator(engine)
    began = time.perf_counter()
    watches = _generate(engine, sessions, tokens=tokens)
    endings = [watch.wait() for watch in watches]
    infos = [engine.session_info(session) for session in sessions]
    return Run(
        prefill_seconds=sum(prefill_seconds) / len(sessions),
        first_token_seconds=sum(first_token_seconds) / len(sessions),
        resume_seconds=max(watch.token_times[0] for watch in watches) - began,
        token_seconds=_token_seconds([watch.token_times for watch in watches]),
        kv_bytes=max(info.kv_live_bytes for info in infos),
        kv_peak_bytes=max(peak, *(watch.kv_peak_bytes for watch in watches)),
        transient_bytes=allocator.grown_bytes(),
        bound=infos[0].bound,
        attended_positions=endings[0].attended_positions,
        evicted_positions=endings[0].evicted_positions,
    )


def _generate(engine: Engine, sessions: Sequence[str], *, tokens: int) -> list[_Watch]:
    """Start a Generate on each session."""
    all_asked = threading.Event()
    try:
        watches = [_Watch(engine, session, all_asked) for session in sessions]
        for session, watch in zip(sessions, watches, strict=True):
            engine.generate(session, GenerateParams(max_tokens=tokens), listener=watch)
    finally:
        all_asked.set()
    return watches


def _token_seconds(times: Sequence[Sequence[float]]) -> float:
    """Seconds that each session waits for a token while all of them decode."""
    began, ended = max(stamps[0] for stamps in times), min(stamps[-1] for stamps in times)
    steps = [sum(began < stamp <= ended for stamp in stamps) for stamps in times]
    if not min(steps):
        raise BackendError(f"{len(times)} sessions never decoded together: more tokens than {len(times[0])} are needed")
    return (ended - began) * len(times) / sum(steps)


class _Allocator:
    """How far the device's allocator went beyond where it stood when this was made."""

    def __init__(self, engine: Engine) -> None:
        device = torch.device(engine.info().facts.device)
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def grown_bytes(self) -> int | None:
        if self._device is None:
            return None
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before


# -- many runs -------------------------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    strategies: Sequence[KVStrategy],
    token_ids: Sequence[int],
    *,
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    rounds: int,
    tokens: int,
) -> tuple[dict[Cell, list[Run]], dict[str, str]]:
    """Runs by cell, one for each round, and why some cells have none. `full` is always measured.

    Sessions of a batch begin at different places of `token_ids`, which is read round and round. One round more is run
    at first and not kept.
    """
    by_name = {str(strategy): strategy for strategy in (Full(), *strategies)}
    found: dict[Cell, list[Run]] = {}
    left_out: dict[str, str] = {}
    for number in range(rounds + 1):
        for length in lengths:
            for batch in batches:
                prompts = [_circular(token_ids, (number * batch + index) * 997, length) for index in range(batch)]
                for name in _turned(list(by_name), number):
                    cell = Cell(strategy=name, length=length, batch=batch)
                    if str(cell) in left_out:
                        continue
                    try:
                        result = run(engine, by_name[name], prompts, tokens)
                    except (InvalidArgument, NoCapacity) as refusal:
                        left_out[str(cell)] = refusal.message
                        continue
                    logger.info("round %d of %d, %s: %.2f ms a token", number, rounds, cell, 1e3 * result.token_seconds)
                    if number:
                        found.setdefault(cell, []).append(result)
    return found, left_out


def _circular(token_ids: Sequence[int], start: int, count: int) -> list[int]:
    return [token_ids[(start + place) % len(token_ids)] for place in range(count)]


def _turned(names: list[str], number: int) -> list[str]:
    """Neither side of a comparison always comes first."""
    number %= len(names)
    return names[number:] + names[:number]


def values(found: dict[Cell, list[Run]]) -> dict[str, dict[str, Any]]:
    """What a record says of the cells: medians with quartiles, and ratios to full within a round (above 1: better)."""
    told: dict[str, dict[str, Any]] = {}
    for cell, runs in found.items():
        told[f"decode, {cell}"] = record.summarize([cell.batch / one.token_seconds for one in runs], "tokens/s")
        told[f"prefill, {cell}"] = record.summarize([cell.length / one.prefill_seconds for one in runs], "tokens/s")
        told[f"first token, {cell}"] = record.summarize([one.first_token_seconds for one in runs], "s")
        told[f"first token of a later Generate, {cell}"] = record.summarize([one.resume_seconds for one in runs], "s")
        told[f"K/V between Generates, {cell}"] = record.exact(max(one.kv_bytes for one in runs), "bytes")
        told[f"K/V at most, {cell}"] = record.exact(max(one.kv_peak_bytes for one in runs), "bytes")
        told[f"bound, sustained, {cell}"] = record.exact(runs[0].bound.sustained_bytes, "bytes")
        told[f"bound, peak, {cell}"] = record.exact(runs[0].bound.peak_bytes, "bytes")
        if transient := [one.transient_bytes for one in runs if one.transient_bytes is not None]:
            told[f"allocated while decoding, {cell}"] = record.summarize(transient, "bytes")
        full = found.get(Cell(strategy=str(Full()), length=cell.length, batch=cell.batch))
        if full is None or full is runs:
            continue
        pairs = list(zip(full, runs, strict=True))
        for word, attribute in (("decode", "token_seconds"), ("prefill", "prefill_seconds")):
            ratios = [getattr(other, attribute) / getattr(one, attribute) for other, one in pairs]
            told[f"{word} speed ÷ full, {cell}"] = record.summarize(ratios, "ratio")
        bytes_ratio = max(one.kv_bytes for one in runs) / max(one.kv_bytes for one in full)
        told[f"K/V between Generates ÷ full, {cell}"] = record.exact(bytes_ratio, "ratio")
    return told


def rows(found: dict[Cell, list[Run]]) -> list[dict[str, Any]]:
    """A line for each cell: medians of the times, the most of the bytes."""
    lines = []
    for cell, runs in found.items():
        line: dict[str, Any] = {"strategy": cell.strategy, "length": cell.length, "batch": cell.batch}
        for spec in fields(Run):
            taken = [getattr(one, spec.name) for one in runs]
            if spec.name == "bound":
                line |= {"bound_sustained_bytes": taken[0].sustained_bytes, "bound_peak_bytes": taken[0].peak_bytes}
            elif spec.name.endswith("_seconds"):
                line[spec.name] = record.summarize(taken, "s")["median"]
            else:
                line[spec.name] = None if None in taken else max(taken)
        lines.append(line)
    return lines


def with_traffic(
    lines: Sequence[Mapping[str, Any]], strategies: Mapping[str, KVStrategy], geometry: Geometry, tokens: int
) -> list[dict[str, Any]]:
    """The lines with what the traffic model wants to know: bytes that a decoded token reads, on average, and whether
    it has to find them."""
    told = []
    for line in lines:
        one, first = strategies[line["strategy"]], line["length"] + 2
        read = [traffic.bytes_read(one, geometry, length) for length in range(first, first + tokens - 1)]
        told.append(
            {**line, "bytes_read": sum(read) / len(read), "finds": traffic.finds(one, geometry, first + tokens - 2)}
        )
    return told
