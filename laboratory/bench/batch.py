"""Many sessions decoding at the same time: tokens a second together against one after another.

In each round every method runs with every number of sessions, and the same sessions run one after another beside
it, so a slow minute of the machine hits all. The share of the step's time outside the model is what of the wall clock
the device did not spend in the forward: planning, sampling, committing, sending to clients.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from inference_engine.backends.base import Forward, Result, Step
from inference_engine.compose import open_backend
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.kv.strategies import parse_strategy
from inference_engine.types import Finished, GenerateParams, TokenCommitted
from laboratory.bench.experiments import Save
from laboratory.bench.shared import add_model, device_name, model_config, named
from laboratory.evaluation import record

SEED = 1
MOST_ALONE = 8  # sessions that also run one after another; more would say the same
# What may be switched off on a GPU, and so is compared there.
METHODS_ON_GPU = {"graphs": {}, "kernels": {"graphs": "off"}, "plain": {"kernels": "plain", "graphs": "off"}}


class TimedForward:
    """A Forward that knows how long the device was busy in it."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._spans: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, step: Step) -> Result:
        began = self._now()

        def on_computed() -> None:
            self._spans.append((began, self._now()))
            step.on_computed()

        return self._forward.run(replace(step, on_computed=on_computed))

    def _now(self) -> Any:
        """A moment of the device, which it notes when it gets there; of this thread, where that is the device."""
        if self._forward.device.type != "cuda":
            return time.perf_counter()
        new_event: Callable[..., Any] = torch.cuda.Event
        moment = new_event(enable_timing=True)
        moment.record()
        return moment

    def take_seconds(self) -> float:
        """Seconds inside since the last call of this."""
        if self._forward.device.type == "cuda":
            torch.cuda.synchronize()
            seconds = sum(began.elapsed_time(ended) for began, ended in self._spans) / 1000
        else:
            seconds = sum(ended - began for began, ended in self._spans)
        self._spans.clear()
        return float(seconds)


@dataclass(slots=True)
class Cell:
    """The rounds of one method and number of sessions."""

    together: list[float] = field(default_factory=list)  # tokens a second
    alone: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)  # share of the wall clock
    differing: list[float] = field(default_factory=list)  # share of tokens that are not those of the session alone


def prepare(engine: Engine, histories: Sequence[list[int]], strategies: Sequence[str], limit: int) -> list[str]:
    """Sessions whose history is prefilled: only its last token is still to run."""
    sessions = []
    for index, history in enumerate(histories):
        strategy = parse_strategy(strategies[index % len(strategies)])
        session = engine.create_session(strategy=strategy, limit_tokens=limit, guaranteed=True).session_id
        engine.append(session, history)
        for _ in engine.generate(session, GenerateParams(max_tokens=1, drafting=False)):
            pass
        sessions.append(session)
    return sessions


def decode(engine: Engine, sessions: Sequence[str], tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds that all sessions together take for `tokens` each, and what they gave."""
    params = GenerateParams(max_tokens=tokens, drafting=False)
    began = time.perf_counter()
    running = [engine.generate(session, params) for session in sessions]
    given: list[tuple[int, ...]] = []
    for generation in running:
        events = list(generation)
        assert isinstance(events[-1], Finished)
        given.append(tuple(event.token_id for event in events if isinstance(event, TokenCommitted)))
    return time.perf_counter() - began, given


def measure(
    engine: Engine,
    timed: TimedForward,
    cell: Cell,
    histories: Sequence[list[int]],
    strategies: Sequence[str],
    tokens: int,
) -> None:
    limit = len(histories[0]) + tokens + 2
    ours = prepare(engine, histories, strategies, limit)
    timed.take_seconds()
    seconds, together = decode(engine, ours, tokens)
    inside = timed.take_seconds()
    for session in ours:
        engine.close_session(session)
    one_by_one, alone = 0.0, []
    for session in prepare(engine, histories[:MOST_ALONE], strategies, limit):
        spent, given = decode(engine, [session], tokens)
        one_by_one += spent
        alone += given
        engine.close_session(session)
    cell.together.append(len(together) * tokens / seconds)
    cell.alone.append(len(alone) * tokens / one_by_one)
    cell.outside.append(max(0.0, 1 - inside / seconds))
    pairs = zip(together[: len(alone)], alone, strict=True)
    wrong = sum(a != b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    cell.differing.append(wrong / (len(alone) * tokens))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32, 64], metavar="N")
    parser.add_argument("--strategies", nargs="+", default=["full"], help="assigned to the sessions in turn")
    parser.add_argument(
        "--methods", nargs="+", choices=list(METHODS_ON_GPU), default=list(METHODS_ON_GPU), help="on a GPU"
    )
    parser.add_argument("--length", type=int, default=512, metavar="N")
    parser.add_argument("--tokens", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--kv-bytes", type=int, default=2**32, metavar="N")


def main(arguments: argparse.Namespace, _save: Save) -> dict[str, Any]:
    config = model_config(arguments)
    on_cpu = config.device == "cpu"
    methods = {"batched": {}} if on_cpu else {method: METHODS_ON_GPU[method] for method in arguments.methods}
    engines: dict[str, tuple[Engine, TimedForward]] = {}
    for method, more in methods.items():
        timed = TimedForward(open_backend(model_config(arguments, **more)))
        settings = EngineConfig(kv_bytes=arguments.kv_bytes, max_batch=max(arguments.sessions), share_prefixes="off")
        engines[method] = Engine(timed, settings), timed
    cells = {(method, count): Cell() for count in arguments.sessions for method in engines}
    generator = torch.Generator().manual_seed(SEED)
    facts = next(iter(engines.values()))[0].info().facts
    for number in range(arguments.rounds + 1):  # the first warms up and is not kept
        for (method, count), cell in cells.items():
            shape = (count, arguments.length)
            histories = torch.randint(10, facts.vocab_size - 10, shape, generator=generator).tolist()
            kept = cell if number else Cell()
            measure(*engines[method], kept, histories, arguments.strategies, arguments.tokens)
        print(f"round {number} of {arguments.rounds}", flush=True)
    values: dict[str, Any] = {}
    for (method, count), cell in cells.items():
        where = f"{method}, {count} sessions"
        ratios = [a / b for a, b in zip(cell.together, cell.alone, strict=True)]
        values[f"tokens a second, together ÷ one after another, {where}"] = record.summarize(ratios, "ratio")
        values[f"share of the time outside the model, {where}"] = record.summarize(cell.outside, "share")
        values[f"tokens that differ from those of the session alone, {where}"] = record.summarize(
            cell.differing, "share"
        )
        if not on_cpu:
            values[f"tokens a second, {where}"] = record.summarize(cell.together, "tokens a second")
            if method != "plain" and "plain" in methods:
                pairs = zip(cell.together, cells["plain", count].together, strict=True)
                values[f"tokens a second, {method} ÷ plain, {count} sessions"] = record.summarize(
                    [a / b for a, b in pairs], "ratio"
                )
    for engine, _ in engines.values():
        engine.close()
    return {
        "experiment": named("batch", config, facts),
        "config": {
            "model": facts.model_id,
            "device": device_name(config.device),
            "dtype": config.dtype,
            "linear": config.linear,
            "numerics": facts.numerics,
            "threads": torch.get_num_threads(),
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
            "length": arguments.length,
            "strategies": arguments.strategies,
        },
        "seeds": [SEED],
        "values": values,
        "baseline": "the same sessions, histories and engine, one after another, in the same round",
    }
