"""Decode steps with the list of operations against steps by torch's modules, on a GPU: one model, four engines.

The models have shapes of real ones and random weights, made in memory: nothing is downloaded. The engines read the same
weights, attend with the same kernel and record their steps, so that the list is all that differs between the first two;
the third launches its steps ahead (`overlap`), and so does the fourth, whose tokens depend on nothing else in their
step (`determinism=batch-invariant`). They take turns in every round, and ratios are taken within a round. The
record is written anew after every cell: a run that is cut off keeps what it has. Cells that do not fit into memory or
time are named in it.

With `--device cpu --dtype float32 --shapes tiny` everything runs by the references, without kernels: a trial of this
script, no measurement of anything.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from inference_engine.backends.base import Forward, Result, Step
from inference_engine.backends.op_list_executor import OpListExecutor
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import BackendError, InvalidArgument, NoCapacity
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, TokenCommitted
from laboratory.bench.experiments import Save
from laboratory.bench.shared import LeftOut, add_made, check_rounds, device_name, named, release
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, made_forward
from laboratory.evaluation.sessions import append_all, opened
from laboratory.evaluation.timing import decode_milliseconds, in_turns, prefill_rates

MODULES, LISTED, AHEAD, INVARIANT = "torch's modules", "listed", "listed, ahead", "invariant, ahead"
COMPARED = ((LISTED, MODULES), (AHEAD, LISTED), (INVARIANT, AHEAD))
SHARE_OF_MEMORY = 0.2  # of what is free beside the weights, for the K and V of each engine


class WatchedForward:
    """A Forward that notes of every step when it began, when it was on its way to the device, and when it ended."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.steps: list[tuple[float, float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, step: Step) -> Result:
        began, launched = time.perf_counter(), []

        def on_computed() -> None:
            launched.append(time.perf_counter())
            step.on_computed()

        result = self._forward.run(replace(step, on_computed=on_computed))
        self.steps.append((began, launched[0], time.perf_counter()))
        return result

    def take(self) -> dict[str, float]:
        """Of the steps since the last call of this, but the first: medians in ms; together they are a step."""
        steps, self.steps = self.steps[1:], []
        nexts = [later[0] - earlier[2] for earlier, later in pairwise(steps)]
        return {
            "launching": 1e3 * statistics.median(launched - began for began, launched, _ in steps),
            "waiting": 1e3 * statistics.median(ended - launched for _, launched, ended in steps),
            "between steps": 1e3 * statistics.median(nexts),
        }


@dataclass(slots=True)
class Cell:
    """What one strategy, length and number of sessions gave: samples by engine."""

    step_ms: dict[str, list[float]] = field(default_factory=dict)
    prefill: dict[str, list[float]] = field(default_factory=dict)  # tokens a second, of each session
    host: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    first: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # token and logprob, of each session
    alike: dict[str, int] = field(default_factory=dict)  # tokens of a session that are, to the bit, those of a lone one


@contextmanager
def all_engines(
    name: str, arguments: argparse.Namespace
) -> Iterator[tuple[dict[str, Engine], dict[str, WatchedForward]]]:
    """One model, opened as the product does, and two more forwards over its weights: without the list, and invariant.

    Steps that are launched ahead are not watched.
    """
    device = torch.device(arguments.device)
    config = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain")
    listed = made_forward(name, config)
    # As on a GPU, wherever this runs.
    ops = replace(open_ops("auto", device), attends_together=True)
    if listed.listed is None:
        raise BackendError(f"steps of the shape {name} are not listed on {device}: there is nothing to compare")
    facts = replace(listed.facts, numerics="torch")
    modules = TorchForward(listed.seam, facts, device, ops=ops, records_graphs=listed.records_graphs)
    invariant = TorchForward(
        listed.seam,
        replace(listed.facts, numerics="invariant"),
        device,
        ops=replace(ops, attend_ragged=ops.attend_invariant),
        records_graphs=listed.records_graphs,
        listed=OpListExecutor(listed.seam, ops.open_invariant()),
    )
    kv_bytes = arguments.kv_bytes or int(SHARE_OF_MEMORY * listed.free_bytes())
    settings = EngineConfig(kv_bytes=kv_bytes, max_batch=max(arguments.sessions), overlap="off", share_prefixes="off")
    watched = {MODULES: WatchedForward(modules), LISTED: WatchedForward(listed)}
    with ExitStack() as stack:
        engines = {each: stack.enter_context(Engine(forward, settings)) for each, forward in watched.items()}
        for each, forward in ((AHEAD, listed), (INVARIANT, invariant)):
            engines[each] = stack.enter_context(Engine(forward, replace(settings, overlap="on")))
        yield engines, watched


def next_tokens(engine: Engine, sessions: Sequence[str], tokens: int) -> list[list[tuple[int, float]]]:
    """The next tokens of each session and their logprobs."""
    running = [engine.generate(each, GenerateParams(max_tokens=tokens, logprobs=True)) for each in sessions]
    return [
        [(event.token_id, event.logprob or 0.0) for event in each if isinstance(event, TokenCommitted)]
        for each in running
    ]


def alike_beside_others(engine: Engine, strategy: KVStrategy, prompts: Sequence[list[int]], tokens: int) -> int:
    """How many of the first session's tokens are the same alone and beside the others, with the same logprob."""
    found = []
    for some in (prompts[:1], prompts):
        with ExitStack() as stack:
            sessions = [stack.enter_context(opened(engine, strategy, len(some[0]) + tokens + 1)) for _ in some]
            for session, prompt in zip(sessions, some, strict=True):
                append_all(engine, session, prompt)
            found.append(next_tokens(engine, sessions, tokens)[0])
    return sum(alone == beside for alone, beside in zip(*found, strict=True))


def measure(
    engines: dict[str, Engine], watched: dict[str, WatchedForward], strategy: str, prompts: Sequence[list[int]],
    arguments: argparse.Namespace,
) -> Cell:  # fmt: skip
    """Raises InvalidArgument or NoCapacity for what does not fit."""
    cell, names = Cell(), list(engines)
    chosen, limit = parse_strategy(strategy), len(prompts[0]) + 2 + (arguments.rounds + 1) * arguments.tokens
    with ExitStack() as stack:
        sessions = {
            name: [stack.enter_context(opened(engine, chosen, limit)) for _ in prompts]
            for name, engine in engines.items()
        }
        cell.prefill = prefill_rates(engines, sessions, prompts)
        cell.first = {
            name: [one for one, *_ in next_tokens(engine, sessions[name], 1)] for name, engine in engines.items()
        }

        def take(name: str) -> float:
            if name in watched:
                watched[name].steps.clear()
            milliseconds = decode_milliseconds(engines[name], sessions[name], arguments.tokens)
            if name in watched:
                cell.host.setdefault(name, []).append(watched[name].take())
            return milliseconds

        cell.step_ms = in_turns({name: partial(take, name) for name in names}, arguments.rounds)
        for of_rounds in cell.host.values():
            del of_rounds[0]  # warmed up
    if len(prompts) == max(arguments.sessions) and len(prompts[0]) == min(arguments.lengths):
        cell.alike = {
            name: alike_beside_others(engine, chosen, prompts, arguments.tokens) for name, engine in engines.items()
        }
    return cell


def values_of(cells: dict[str, Cell]) -> dict[str, Any]:
    """Values of a record, by the name of the cell."""
    values: dict[str, Any] = {}
    for where, cell in cells.items():
        for over, under in COMPARED:
            ratios = [ours / theirs for ours, theirs in zip(cell.step_ms[over], cell.step_ms[under], strict=True)]
            values[f"time of a step, {over} ÷ {under}, {where}"] = record.summarize(ratios, "ratio")
        for name in (INVARIANT, AHEAD, LISTED, MODULES):
            values[f"decode step, {name}, {where}"] = record.summarize(cell.step_ms[name], "ms")
            if name in cell.prefill:
                values[f"prefill, {name}, {where}"] = record.summarize(cell.prefill[name], "tokens a second")
        for name, count in cell.alike.items():
            values[f"tokens as of a lone session, to the bit, {name}, {where}"] = record.exact(count, "tokens")
        pairs = list(zip(cell.first[LISTED], cell.first[MODULES], strict=True))
        largest = max(abs(ours[1] - theirs[1]) for ours, theirs in pairs)
        values[f"first token's logprob, largest difference, {where}"] = record.exact(largest, "nats")
        same = sum(ours[0] == theirs[0] for ours, theirs in pairs)
        values[f"first tokens equal, of {len(pairs)}, {where}"] = record.exact(same, "tokens")
    return values


def tables_of(cells: dict[str, Cell]) -> dict[str, list[dict[str, Any]]]:
    """Medians in ms: of a step, and how it passes on the host. On a CPU, launching is computing."""
    whole, parts = [], []
    for where, cell in cells.items():
        medians = {name: round(statistics.median(each), 4) for name, each in cell.step_ms.items()}
        values = values_of({where: cell})
        ratios = {f"{a} ÷ {b}": values[f"time of a step, {a} ÷ {b}, {where}"]["median"] for a, b in COMPARED}
        whole.append({"cell": where, **medians, **{name: round(ratio, 4) for name, ratio in ratios.items()}})
        for name, rounds in cell.host.items():
            of_part = {part: round(statistics.median(one[part] for one in rounds), 4) for part in rounds[0]}
            parts.append({"cell": where, "engine": name, **of_part})
    return {"ms of a step": whole, "ms of a step, by what the host does": parts}


def payload_of(cells: dict[str, Cell], left_out: dict[str, str], arguments: argparse.Namespace) -> dict[str, Any]:
    what = "listed" if arguments.strategies == ["full"] else "listed_strategies"
    return {
        "experiment": named(what, arguments),
        "config": {
            "shapes": arguments.shapes,
            "weights": "random, made in memory",
            "device": device_name(arguments.device),
            "dtype": arguments.dtype,
            "rounds": arguments.rounds,
            "tokens": arguments.tokens,
            "strategies": arguments.strategies,
        },
        "seeds": [SEED],
        "values": values_of(cells),
        "tables": tables_of(cells),
        "left_out": left_out,
        "baseline": "torch's modules over the same weights in the same process, in turns; attention kernel and "
        "recorded steps as beside them",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_made(parser, seconds=1200.0)
    parser.add_argument("--strategies", nargs="+", default=["full"], metavar="SPEC")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768], metavar="N")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N")


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    cells: dict[str, Cell] = {}
    left_out = LeftOut(arguments.seconds)
    generator = torch.Generator().manual_seed(SEED)
    # What is short comes first: a run that is cut off has something of everything.
    sizes = sorted(((n, count) for n in arguments.lengths for count in arguments.sessions), key=lambda s: s[0] * s[1])
    for shape in arguments.shapes:
        with all_engines(shape, arguments) as (engines, watched):
            vocabulary = engines[LISTED].info().facts.vocab_size
            warm_up = torch.randint(5, vocabulary - 5, (1, min(arguments.lengths)), generator=generator).tolist()
            measure(engines, watched, "full", warm_up, arguments)
            for strategy in arguments.strategies:
                for length, count in sizes:
                    where = f"{shape}, {strategy}, {count} at {length}"
                    if left_out.is_late(where):
                        continue
                    prompts = torch.randint(5, vocabulary - 5, (count, length), generator=generator).tolist()
                    try:
                        cells[where] = measure(engines, watched, strategy, prompts, arguments)
                    except (InvalidArgument, NoCapacity) as refusal:
                        left_out.refuse(where, refusal)
                        continue
                    print(tables_of({where: cells[where]}), flush=True)
                    save(payload_of(cells, left_out, arguments))
        del engines, watched
        release(arguments.device)
    return payload_of(cells, left_out, arguments)
