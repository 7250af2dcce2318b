"""The ladder of a model with random weights: bytes and times of each strategy beside full, length by length.

    one length:  prefill   full  a  b      full  a  b       the first not counted if there are more; the last stay open
                 round 0   full  a  b                       not counted: kernels are compiled, graphs are recorded
                 round 1   a  b  full      round 2   b  full  a

Nothing such a model says means anything, so nothing is asked. A history is prefilled far fewer times than it is decoded
from: at 100,000 tokens a prefill takes as long as a thousand steps. In each round every session has been idle while the
others ran; the time to its first token and that of its further ones are taken apart, and ratios within a round.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Bound
from laboratory.evaluation import record
from laboratory.evaluation.made_models import MadeTarget
from laboratory.evaluation.sessions import append_all, opened, turned
from laboratory.evaluation.timing import start, step_seconds

logger = logging.getLogger(__name__)

_FULL = str(Full())


@dataclass(kw_only=True, slots=True)
class Cell:
    """What one strategy gave at one length; a sample for each counted prefill, and for each counted round.

    first_token_seconds: of a Generate on a session that was idle. idle_bytes, most_bytes: of K/V, between Generates and
    at any token.
    """

    prefill_rates: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    idle_bytes: int = 0
    most_bytes: int = 0
    bound: Bound | None = None


Cells = dict[tuple[int, str], Cell]


def main(arguments: argparse.Namespace, target: MadeTarget, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Measure and return the record's payload.

    save: called with what there is whenever a length is done. Interrupted, it returns that. Raises InvalidArgument for
    what has no meaning here.
    """
    if arguments.published or arguments.trained is not None:
        raise InvalidArgument("random", "measures no recall and no KL: leave --published and --trained out")
    strategies = {str(one): one for one in (Full(), *arguments.strategies)}
    found: Cells = {}
    left_out: dict[str, str] = {}
    lengths = sorted(set(arguments.lengths))
    for length in lengths:
        try:
            cells, refused = measure(target, strategies, length, arguments)
        except KeyboardInterrupt:
            if not found:
                raise
            logger.warning("interrupted at %d tokens: the record has the lengths before", length)
            left_out |= {f"all at {one}": "ended before it" for one in lengths if one >= length}
            break
        found |= cells
        left_out |= refused
        save(_reported(arguments, target, found, left_out))
    return _reported(arguments, target, found, left_out)


def measure(
    target: MadeTarget, strategies: Mapping[str, KVStrategy], length: int, arguments: argparse.Namespace
) -> tuple[Cells, dict[str, str]]:
    """Cells of one length, and why some strategies have none."""
    engine, tokens = target.engine, arguments.tokens
    ids = target.ids(length, arguments.seed)
    limit = length + 1 + (arguments.rounds + 1) * tokens
    cells: dict[str, Cell] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        sessions: dict[str, tuple[str, ExitStack]] = {}
        for number in range(arguments.prefills):
            for name in turned(list(strategies), number):
                where = f"{name}, at {length}"
                if where in left_out:
                    continue
                if name in sessions:
                    sessions.pop(name)[1].close()
                own = stack.enter_context(ExitStack())
                try:
                    session = own.enter_context(opened(engine, strategies[name], limit))
                except (InvalidArgument, NoCapacity) as refusal:
                    logger.info("left out: %s: %s", where, refusal.message)
                    left_out[where] = refusal.message
                    cells.pop(name, None)
                    continue
                sessions[name] = session, own
                cell = cells.setdefault(name, Cell())
                rate = _prefilled(engine, session, ids, cell)
                logger.info("prefill %d of %d, %s: %.0f tokens a second", number + 1, arguments.prefills, where, rate)
                if number or arguments.prefills == 1:
                    cell.prefill_rates.append(rate)
        for number in range(arguments.rounds + 1):
            for name in turned(list(cells), number):
                _decoded(engine, sessions[name][0], tokens, cells[name], is_counted=number > 0)
                logger.info("round %d of %d, %s, at %d", number, arguments.rounds, name, length)
        for name, cell in cells.items():
            logger.info(
                "%s, at %d: %.2f ms a token, first token %.1f ms, %d bytes idle, %d at most",
                name, length, 1e3 * statistics.median(cell.step_seconds),
                1e3 * statistics.median(cell.first_token_seconds), cell.idle_bytes, cell.most_bytes,
            )  # fmt: skip
    return {(length, name): cell for name, cell in cells.items()}, left_out


def _prefilled(engine: Engine, session: str, ids: Sequence[int], cell: Cell) -> float:
    """Append ids and compute them, with one token generated; tokens a second."""
    append_all(engine, session, ids)
    (watch,) = start(engine, [session], tokens=1)
    ending = watch.wait()
    cell.most_bytes = max(cell.most_bytes, watch.kv_peak_bytes)
    return ending.prefilled_tokens / ending.prefill_seconds


def _decoded(engine: Engine, session: str, tokens: int, cell: Cell, *, is_counted: bool) -> None:
    """One Generate; bytes are read, which takes time, in the round that is not counted, and after it."""
    began = perf_counter()
    (watch,) = start(engine, [session], tokens=tokens, reads_bytes=not is_counted)
    watch.wait()
    if is_counted:
        cell.first_token_seconds.append(watch.token_times[0] - began)
        cell.step_seconds.append(step_seconds([watch.token_times]))
    else:
        info = engine.session_info(session)
        cell.idle_bytes, cell.bound = info.kv_live_bytes, info.bound
        cell.most_bytes = max(cell.most_bytes, watch.kv_peak_bytes, cell.idle_bytes)


def values(found: Cells) -> dict[str, dict[str, Any]]:
    """What a record says of the cells; ratios to full are of the same round, those of speed above 1 where it gains."""
    reported: dict[str, dict[str, Any]] = {}
    for (length, name), cell in found.items():
        where = f"{name}, at {length}"
        reported[f"prefill, {where}"] = record.summarize(cell.prefill_rates, "tokens/s")
        reported[f"first token of a later Generate, {where}"] = record.summarize(cell.first_token_seconds, "s")
        reported[f"decode step, {where}"] = record.summarize([1e3 * one for one in cell.step_seconds], "ms")
        reported[f"K/V between Generates, {where}"] = record.exact(cell.idle_bytes, "bytes")
        reported[f"K/V at most, {where}"] = record.exact(cell.most_bytes, "bytes")
        assert cell.bound is not None
        reported[f"bound, sustained, {where}"] = record.exact(cell.bound.sustained_bytes, "bytes")
        reported[f"bound, peak, {where}"] = record.exact(cell.bound.peak_bytes, "bytes")
        full = found.get((length, _FULL))
        if full is None or full is cell:
            continue
        for what, below, above in (
            ("prefill", full.prefill_rates, cell.prefill_rates),
            ("decode", cell.step_seconds, full.step_seconds),
        ):
            ratios = [over / under for under, over in zip(below, above, strict=True)]
            reported[f"{what} speed ÷ full, {where}"] = record.summarize(ratios, "ratio")
        for what, share in (
            ("K/V between Generates", cell.idle_bytes / full.idle_bytes),
            ("K/V at most", cell.most_bytes / full.most_bytes),
        ):
            reported[f"{what} ÷ full, {where}"] = record.exact(share, "ratio")
    return reported


def _reported(
    arguments: argparse.Namespace, target: MadeTarget, found: Cells, left_out: Mapping[str, str]
) -> dict[str, Any]:
    rows = [
        {
            "length": length,
            "strategy": name,
            "weights": "random",
            "bytes": cell.idle_bytes,
            "bytes at most": cell.most_bytes,
            "prefill tokens/s": statistics.median(cell.prefill_rates),
            "first token seconds": statistics.median(cell.first_token_seconds),
            "ms of a step": 1e3 * statistics.median(cell.step_seconds),
            "tokens/s": 1 / statistics.median(cell.step_seconds),
        }
        for (length, name), cell in found.items()
    ]
    return {
        "what": "Bytes, prefill, first token and decode of each strategy beside full, length by length. Weights are "
        "random: there is no recall and no KL.",
        "config": {
            **target.describe(),
            "strategies": [_FULL, *map(str, arguments.strategies)],
            "lengths": list(dict.fromkeys(length for length, _ in found)),
            "ids": "random",
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
            "prefills": f"{arguments.prefills} of each strategy and length"
            + (", the first not counted" if arguments.prefills > 1 else ""),
        },
        "seeds": [arguments.seed],
        "values": values(found),
        "baseline": "full, on the same ids, in the same rounds",
        "tables": {
            "ladder": rows,
            "left out": [{"cell": cell, "reason": reason} for cell, reason in left_out.items()],
        },
    }
