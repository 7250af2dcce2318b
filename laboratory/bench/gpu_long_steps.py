"""Prefill and decode steps at growing lengths: strategies that read part of a history beside the one that reads all.

The model has the shape of a real one and random weights, made in memory, and components of its keys are calibrated on
random ids: times are measured, and nothing about answers. One engine records its steps and launches them ahead. At each
length every strategy has sessions with the same history; they take turns in every round, and ratios are taken within a
round. A first prefill is not counted. The record is written anew after every length: a run that is cut off keeps what
it has.

With `--sessions` so many sessions of each strategy decode at once, each with a history of its own. Of the first
strategy, the baseline, there are then as many as fit into the bytes of the others, by their bounds. Where the sessions
of all strategies do not fit beside each other, one strategy is measured after the other, and the record says so.

Histories above `--attended` tokens are written without attending and without restoring: the entries are others than
those of a real prefill, steps over them take the same time, and the prefill is no measurement. Lengths beyond the
model's own are more positions of the same model.

With `--device cpu --dtype float32 --shape tiny` everything runs by the references: a trial of this script, no
measurement of anything.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, InvalidArgument, KakeyaError, NoCapacity, OutOfMemory
from inference_engine.kv.strategies import parse_strategy
from laboratory.bench.experiments import Save
from laboratory.bench.shared import LeftOut, add_made, check_rounds, device_name, named
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, made_codec, made_forward
from laboratory.evaluation.sessions import append_all, opened, turned
from laboratory.evaluation.timing import decode_milliseconds, in_turns, prefill_rate, start, unattended
from laboratory.training.made_target import components_of_random_ids

STRATEGIES = ("full", "gather:scorer=bounds", "gather:scorer=components")
REFUSALS = (InvalidArgument, NoCapacity, OutOfMemory, torch.OutOfMemoryError)


def tokens_of(length: int, arguments: argparse.Namespace) -> int:
    """How many tokens a session of that length gets in all."""
    return 8 + length + 2 + int((arguments.rounds + 1) * arguments.tokens)


def opened_engine(arguments: argparse.Namespace, stack: ExitStack) -> Engine:
    config = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain")
    longest = tokens_of(max(arguments.lengths), arguments)
    # A power of two, as models have: operations have room for so many positions.
    forward = made_forward(arguments.shape, config, positions=1 << (longest - 1).bit_length())
    components = components_of_random_ids(forward)
    most = max(arguments.sessions, arguments.baseline_sessions)
    settings = EngineConfig(
        kv_bytes=arguments.kv_bytes or int(0.8 * forward.free_bytes()),
        max_batch=max(4, most),
        max_running=max(128, 2 * most + 1),
        max_sessions=max(1024, 4 * most),
        overlap="on",
        share_prefixes="off",
        default_limit_tokens=longest,
        segment_tokens=arguments.segment_tokens,
        # Sessions wait for each other's prefills.
        session_evictable_seconds=3600.0,
        session_idle_ttl_seconds=7200.0,
        stall_seconds=600.0,
    )
    latent = None
    if any(name.startswith("restored") for name in arguments.strategies):
        geometry = forward.geometry(page_tokens=16, segment_tokens=arguments.segment_tokens)
        latent = made_codec(arguments.shape, geometry, torch.device(arguments.device))
    return stack.enter_context(Engine(forward, settings, components=components, latent=latent))


@dataclass(kw_only=True, slots=True)
class Cell:
    """One strategy at one length. bound_bytes, held_bytes: of one session, the most it may hold, and the most it held
    while it decoded. prefill: tokens a second, of one session by itself; none where nothing was attended to.
    """

    sessions: int
    bound_bytes: int = 0
    held_bytes: int = 0
    prefill: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


@dataclass(kw_only=True, slots=True)
class Cells:
    """Of all strategies at one length. in_turns: did they take turns, or did one come after the other?"""

    by_strategy: dict[str, Cell]
    in_turns: bool


def bounds_of(engine: Engine, length: int, arguments: argparse.Namespace, left_out: LeftOut) -> dict[str, int]:
    """The most bytes of one session of each strategy. Those that do not fit are left out; raises if none fits."""
    bounds: dict[str, int] = {}
    refusal: Exception | None = None
    for name in arguments.strategies:
        try:
            with opened(engine, parse_strategy(name), tokens_of(length, arguments)) as session:
                bounds[name] = engine.session_info(session).bound.peak_bytes
        except REFUSALS as error:
            refusal = error
            left_out.refuse(f"{name}, at {length}", error)
    if not bounds and refusal is not None:
        raise refusal
    return bounds


def counts_of(bounds: dict[str, int], arguments: argparse.Namespace) -> dict[str, int]:
    """How many sessions of each strategy are measured at once."""
    counts = dict.fromkeys(bounds, arguments.sessions)
    baseline, *others = bounds
    if baseline == arguments.strategies[0] and others and arguments.sessions > 1:
        most = arguments.sessions * max(bounds[name] for name in others) // bounds[baseline]
        counts[baseline] = arguments.baseline_sessions or min(max(1, most), arguments.sessions)
    return counts


def measure(engine: Engine, length: int, arguments: argparse.Namespace, left_out: LeftOut) -> Cells:
    """What does not fit even by itself is left out. Raises one of REFUSALS if nothing fits."""
    counts = counts_of(bounds_of(engine, length, arguments, left_out), arguments)
    try:
        with ExitStack() as stack:
            for name, count in counts.items():
                for _ in range(count):
                    stack.enter_context(opened(engine, parse_strategy(name), tokens_of(length, arguments)))
    except NoCapacity:
        print(f"at {length}: sessions of all strategies do not fit beside each other", flush=True)
    else:
        return Cells(by_strategy=measure_beside(engine, length, counts, arguments), in_turns=True)
    found: dict[str, Cell] = {}
    refusal: Exception | None = None
    for name, count in counts.items():
        try:
            found |= measure_beside(engine, length, {name: count}, arguments)
        except REFUSALS as error:
            refusal = error
            left_out.refuse(f"{name}, at {length}", error)
    if not found and refusal is not None:
        raise refusal
    return Cells(by_strategy=found, in_turns=False)


def prefill_together(engine: Engine, histories: Sequence[tuple[str, list[int]]]) -> None:
    """Histories of sessions; short segments of several share a step."""
    for session, prompt in histories:
        append_all(engine, session, prompt)
    for watch in start(engine, [session for session, _ in histories], tokens=1, reads_bytes=False):
        watch.wait()


def measure_beside(
    engine: Engine, length: int, counts: dict[str, int], arguments: argparse.Namespace
) -> dict[str, Cell]:
    """Cells of so many sessions of each strategy, in turns."""
    generator = torch.Generator().manual_seed(SEED)
    size = (max(counts.values()), length)
    prompts = torch.randint(5, engine.info().facts.vocab_size - 5, size, generator=generator).tolist()
    cells = {name: Cell(sessions=count) for name, count in counts.items()}
    sessions: dict[str, list[str]] = {name: [] for name in counts}
    limit = tokens_of(length, arguments)
    is_attended = length <= arguments.attended
    with ExitStack() as stack:
        # Of the first prefill no rate is kept: kernels are compiled, and steps recorded.
        for number in range(arguments.prefills if is_attended else 0):
            for name in turned(list(counts), number):
                with opened(engine, parse_strategy(name), limit) as session:
                    rate = prefill_rate(engine, session, prompts[0])
                if number:
                    cells[name].prefill.append(rate)
        for name in turned(list(counts), arguments.prefills):
            strategy = parse_strategy(name)
            sessions[name] = [stack.enter_context(opened(engine, strategy, limit)) for _ in range(counts[name])]
            rest = list(zip(sessions[name], prompts, strict=False))
            if is_attended:
                (session, prompt), *rest = rest
                cells[name].prefill.append(prefill_rate(engine, session, prompt))
            with ExitStack() if is_attended else unattended():
                prefill_together(engine, rest)
        for name, cell in cells.items():
            watches = start(engine, sessions[name], tokens=4)
            for watch in watches:
                watch.wait()
            cell.held_bytes = max(watch.kv_peak_bytes for watch in watches)
            cell.bound_bytes = engine.session_info(sessions[name][0]).bound.peak_bytes
            rates = ", ".join(f"{rate:.0f}" for rate in cell.prefill) or "without attending"
            print(
                f"{name} at {length}: {cell.sessions} x {cell.held_bytes} bytes of at most {cell.bound_bytes}, "
                f"prefill {rates}",
                flush=True,
            )
        sides = {
            name: partial(decode_milliseconds, engine, of_strategy, arguments.tokens)
            for name, of_strategy in sessions.items()
        }
        for name, samples in in_turns(sides, arguments.rounds).items():
            cells[name].step_ms = samples
    return cells


def where_of(length: int, *sessions: int) -> str:
    """Where a value was measured; sessions: of its side, and of the baseline's if it is a ratio."""
    if max(sessions) == 1:
        return f"at {length}"
    return f"{' ÷ '.join(map(str, sessions))} sessions at {length}"


def ratios_of(cells: Cells, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Of samples of the same rounds, or of the medians where there are no such."""
    if cells.in_turns:
        return record.summarize([one / other for one, other in zip(ours, theirs, strict=True)], "ratio")
    return record.exact(statistics.median(ours) / statistics.median(theirs), "ratio")


def values_of(measured: dict[int, Cells], baseline: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    shortest = min(measured)
    for length, cells in measured.items():
        base = cells.by_strategy.get(baseline)
        for name, cell in cells.by_strategy.items():
            here = f"{name}, {where_of(length, cell.sessions)}"
            values[f"most bytes that a session may hold, {here}"] = record.exact(cell.bound_bytes, "bytes")
            values[f"most bytes while it decodes, {here}"] = record.exact(cell.held_bytes, "bytes")
            if cell.prefill:
                values[f"prefill, {here}"] = record.summarize(cell.prefill, "tokens a second")
            values[f"decode step, {here}"] = record.summarize(cell.step_ms, "ms")
            if base is not None and name != baseline:
                beside = f"{name} ÷ {baseline}, {where_of(length, cell.sessions, base.sessions)}"
                if cell.prefill and base.prefill:
                    values[f"prefill, {beside}"] = ratios_of(cells, cell.prefill, base.prefill)
                values[f"bytes, {beside}"] = record.exact(cell.held_bytes / base.held_bytes, "ratio")
                if max(cell.sessions, base.sessions) > 1:
                    held, theirs = cell.sessions * cell.held_bytes, base.sessions * base.held_bytes
                    values[f"bytes of all sessions, {beside}"] = record.exact(held / theirs, "ratio")
                values[f"time of a step, {beside}"] = ratios_of(cells, cell.step_ms, base.step_ms)
            if length != shortest and (short := measured[shortest].by_strategy.get(name)) is not None:
                values[f"time of a step, {here} ÷ at {shortest}"] = record.exact(
                    cell.median_ms / short.median_ms, "ratio"
                )
    return values


def rows_of(measured: dict[int, Cells], baseline: str) -> list[dict[str, Any]]:
    rows = []
    for length, cells in measured.items():
        base = cells.by_strategy.get(baseline)
        for name, cell in cells.by_strategy.items():
            row: dict[str, Any] = {"length": length, "strategy": name, "sessions": cell.sessions}
            row |= {"ms of a step": round(cell.median_ms, 4)}
            row |= {"tokens a second": round(1e3 * cell.sessions / cell.median_ms, 1)}
            row |= {"bytes of a session, bound": cell.bound_bytes, "bytes of a session, held": cell.held_bytes}
            row |= {"bytes of all, held": cell.sessions * cell.held_bytes, "in turns": cells.in_turns}
            if base is not None and name != baseline:
                theirs = base.sessions * base.held_bytes
                row |= {f"time of a step ÷ {baseline}": round(cell.median_ms / base.median_ms, 4)}
                row |= {f"bytes of a session ÷ {baseline}": round(cell.held_bytes / base.held_bytes, 4)}
                row |= {f"bytes of all ÷ {baseline}": round(cell.sessions * cell.held_bytes / theirs, 4)}
            rows.append(row)
    return rows


def payload_of(
    measured: dict[int, Cells], left_out: LeftOut, engine: Engine, arguments: argparse.Namespace
) -> dict[str, Any]:
    baseline = arguments.strategies[0]
    beside = "in turns" if all(cells.in_turns for cells in measured.values()) else "in turns where all fit together"
    return {
        "experiment": named("long_steps", arguments),
        "config": {
            "shape": arguments.shape,
            "weights": "random, made in memory; components calibrated on random ids",
            "device": device_name(arguments.device),
            "dtype": arguments.dtype,
            "rounds": arguments.rounds,
            "prefills": arguments.prefills,
            "tokens": arguments.tokens,
            "segment_tokens": arguments.segment_tokens,
            "strategies": arguments.strategies,
            "positions": engine.info().facts.trained_positions,
            "longest history that a prefill attends to": arguments.attended,
            "kv_bytes": engine.config.kv_bytes,
        },
        "seeds": [SEED],
        "values": values_of(measured, baseline),
        "tables": {"steps": rows_of(measured, baseline)},
        "left_out": left_out,
        "baseline": f"{baseline}, in the same engine, {beside}",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_made(parser, is_one=True, seconds=1200.0)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="SPEC", help="first the baseline")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 130_000], metavar="N")
    parser.add_argument("--sessions", type=int, default=1, metavar="N", help="of each strategy, decoding at once")
    parser.add_argument(
        "--baseline-sessions", type=int, default=0, metavar="N", help="0: as many as fit into the others' bytes"
    )
    parser.add_argument(
        "--attended", type=int, default=2**17, metavar="N", help="longest history that a prefill attends to"
    )
    parser.add_argument(
        "--prefills", type=int, default=2, metavar="N", help="of each strategy, at each length that is attended to"
    )
    parser.add_argument(
        "--segment-tokens", type=int, default=256, metavar="N", help="entries leave a window so many at once"
    )


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    arguments.lengths.sort()
    if min(arguments.prefills, arguments.sessions) < 1:
        raise ConfigError("at least one session and one prefill are needed")
    if arguments.baseline_sessions and arguments.sessions == 1:
        raise ConfigError("--baseline-sessions has a meaning with --sessions alone")
    measured: dict[int, Cells] = {}
    left_out = LeftOut(arguments.seconds)
    with ExitStack() as stack:
        engine = opened_engine(arguments, stack)
        for length in arguments.lengths:
            if left_out.is_late(f"at {length}"):
                continue
            try:
                measured[length] = measure(engine, length, arguments, left_out)
            except REFUSALS as refusal:
                left_out.refuse(f"at {length}", refusal)
                continue
            for row in rows_of({length: measured[length]}, arguments.strategies[0]):
                print(f"{left_out.passed:.0f} s  {row}", flush=True)
            save(payload_of(measured, left_out, engine, arguments))
        if not measured:
            raise KakeyaError("nothing was measured: " + "; ".join(left_out.values()))
        return payload_of(measured, left_out, engine, arguments)
