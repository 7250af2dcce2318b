"""Decode steps and prefills of real shapes on a GPU, through the engine, beside transformers' compiled step.

The models have shapes of real ones and random weights, made in memory: nothing is downloaded. What the device reaches
in this process is measured first: bandwidth, a matrix product, kernels that follow each other. A decode step is given
in ms, as a multiple of its floor (weights and entries that it reads, over the bandwidth), and beside two baselines of
the same rounds: the strategy that reads everything, and transformers with a static cache under torch.compile, where
there is one session. Greedy steps and steps sampled at temperature 1 take turns. The floor of a prefill is its
arithmetic over the matrix product's.

Attention of the compiled baseline is both of transformers': torch's operation, which with a mask walks through a
history in one program a head, and plain products, of which the compiler makes kernels.

With `--modules` the engine's path for families without a list takes part, too: transformers' own layers in a recorded
step, as they are, and compiled around attention, which stays what it is. With `--invariant` so do steps whose tokens
depend on nothing else in them (`determinism=batch-invariant`).

A turn is the time from the append of some new tokens, in sessions that have their histories, to the first token of the
last one's answer: of each cell of few sessions, with as many new tokens in each as `--turns` says.

A cell is SESSIONSxLENGTH or SESSIONSxLENGTH/STRATEGY. Cells of the same sessions and length take turns in every round.
Components of keys and a latent are made where a strategy needs them: from random ids, and of random bases. Where there
are components, `gather` chooses by them unless its scorer is named.
Histories above `--attended` tokens are written without attending in the prefill, which would take most of an hour of
arithmetic: the entries are others than those of a real prefill, and steps over them take the same time.

The record is written anew after every group of cells: a run that is cut off keeps what it has. With
`--device cpu --dtype float32 --shapes tiny` everything runs by the references: a trial of this script, no measurement
of anything.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, StaticCache

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.torch_loading import serve_loaded
from inference_engine.backends.twin import admit_config
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, InvalidArgument, KakeyaError, NoCapacity
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.geometry import LayerGeometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.tiered import Tiered
from inference_engine.kv.strategy import KVStrategy
from inference_engine.models import LoadedModel
from inference_engine.models.seam import ATTENTION
from inference_engine.types import Sampling
from laboratory.bench.experiments import Save
from laboratory.bench.shared import LeftOut, add_made, check_rounds, device_name, named, release
from laboratory.evaluation import record
from laboratory.evaluation.made_models import SEED, SHAPES, made_model
from laboratory.evaluation.on_gpu import Ceilings, measure_ceilings
from laboratory.evaluation.sessions import opened
from laboratory.evaluation.timing import (
    GREEDY,
    decode_milliseconds,
    host_seconds,
    in_turns,
    prefill_rate,
    turn_milliseconds,
    unattended,
)
from laboratory.training.made_target import calibrated

# By transformers' name of its attention.
COMPILED = {"sdpa": "transformers, compiled", "eager": "transformers, compiled, attention too"}
MODULES, COMPILED_MODULES = "full by torch's modules", "full by torch's modules, compiled"
INVARIANT = "full, batch-invariant"
FULL = "full"
WARM = Sampling(temperature=1.0, seed=SEED)  # of the steps that are sampled
MOST_AT_ONCE = 8  # sessions whose turns are timed
FAILURES = (KakeyaError, RuntimeError)  # what does not fit; the second are a device's and a compiler's
CELLS = (
    *("1x1024", "1x8192", "1x8192/sink_window:window=1024", "1x8192/gather"),
    *("64x512", "1x32768", "1x32768/gather", "16x8192", "64x8192", "1x130000", "1x130000/gather"),
)


@dataclass(frozen=True, order=True, slots=True)
class Group:
    sessions: int
    length: int

    def __str__(self) -> str:
        return f"{self.sessions} x {self.length}"


@dataclass(slots=True)
class Cell:
    """Samples of one strategy in a group, sampled_ms of steps at a temperature. read: entries that a step reads in each
    session, at the end. bound_bytes: the most that a session may hold.

    host_ms: what the host does for a step that is launched ahead, while it does not wait for the device.
    """

    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)  # tokens a second, of each session
    sampled_ms: list[float] = field(default_factory=list)
    turn_ms: dict[int, list[float]] = field(default_factory=dict)  # to the first token, by the number of new ones
    read: int = 0
    bound_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Of a layer: bytes of an entry, entries that a query sees at most, operations for each pair of both."""

    entry_bytes: int
    window: int
    pair_products: float

    @classmethod
    def of(cls, layer: LayerGeometry, config: Any, itemsize: int) -> Attention:
        is_latent = layer.entry.value_in_key  # a prefill multiplies keys and values of all heads
        numbers = config.qk_head_dim + config.v_head_dim if is_latent else layer.head_dim + layer.value_dim
        return cls(
            entry_bytes=layer.entry_bytes(itemsize),
            window=layer.native_window or sys.maxsize,
            pair_products=2.0 * layer.query_heads * numbers,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a shape's steps cost at least.

    weight_bytes: read in each step. expert_bytes: of all experts, of which each token reads the share `chosen`.
    attentions: of layers that keep entries.
    """

    weight_bytes: int
    attentions: tuple[Attention, ...]
    token_products: float  # of a prefill, floating-point operations of the layers for each token
    expert_bytes: int = 0
    chosen: float = 0.0
    state_bytes: int = 0  # of a session

    @classmethod
    def of(cls, model: Any, itemsize: int) -> Costs:
        config = model.config
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        embedded = model.get_input_embeddings().weight.numel()
        experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
        counts = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
        chosen = counts / config.num_experts if experts else 0.0
        read = sum(each.numel() for each in model.parameters()) - experts - (0 if tied else embedded)
        return cls(
            weight_bytes=read * itemsize,
            attentions=(),
            # A prefill needs one row of logits, not one for each token.
            token_products=2.0 * (read - embedded + chosen * experts),
            expert_bytes=experts * itemsize,
            chosen=chosen,
        )

    def step_ms(self, sessions: int, attended: int, ceilings: Ceilings) -> float:
        # Tokens that choose independently share some of their experts.
        experts = self.expert_bytes * (1 - (1 - self.chosen) ** sessions)
        read = sum(min(attended, each.window) * each.entry_bytes for each in self.attentions) + self.state_bytes
        return 1e3 * (self.weight_bytes + experts + sessions * read) / ceilings.bandwidth

    def prefill_seconds(self, tokens: int, ceilings: Ceilings) -> float:
        pairs = 0.0
        for each in self.attentions:
            seen = min(tokens, each.window)
            pairs += each.pair_products * (tokens * seen - seen * (seen - 1) / 2)
        return (tokens * self.token_products + pairs) / ceilings.products


class CompiledStep:
    """Greedy steps of transformers over a static cache of one session, under torch.compile with recorded graphs."""

    def __init__(self, model: Any, attention: str, length: int, steps: int, *, is_compiled: bool) -> None:
        self._device, self._model, self._attention = model.device, model, attention
        model.set_attn_implementation(attention)
        self._cache = StaticCache(config=model.config, max_cache_len=length + steps + 1)
        ids = torch.randint(5, model.config.vocab_size - 5, (1, length), device=self._device)
        with torch.no_grad():
            for first in range(0, length, 4096):
                part = ids[:, first : first + 4096]
                positions = torch.arange(first, first + part.shape[1], device=self._device)
                self._token = self._next(part, positions)
        self._position = torch.tensor([length], device=self._device)
        self._step = torch.compile(self._next, mode="reduce-overhead") if is_compiled else self._next

    def _next(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self._model(
            ids, position_ids=positions[None], cache_position=positions, past_key_values=self._cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        chosen: Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    def milliseconds(self, steps: int) -> float:
        """Of one step, over so many."""
        self._model.set_attn_implementation(self._attention)
        self._wait()
        began = time.perf_counter()
        with torch.no_grad():
            for _ in range(steps):
                self._token = self._step(self._token, self._position).clone()
                self._position = self._position + 1
        self._wait()
        return 1e3 * (time.perf_counter() - began) / steps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def step_milliseconds(
    engine: Engine, sessions: Sequence[str], tokens: int, host: list[float], sampling: Sampling = GREEDY
) -> float:
    """As `decode_milliseconds`. host: gets milliseconds of the host, if steps are launched ahead."""
    with host_seconds() as found:
        whole = decode_milliseconds(engine, sessions, tokens, sampling)
    if found:
        host.append(1e3 * statistics.median(found))
    return whole


def entries_read(strategy: KVStrategy, attended: int) -> int:
    """Entries whose bytes a step reads: of `gather` and `tiered` those of the budget, and a bound for each block."""
    if not isinstance(strategy, Gather | Tiered) or strategy.budget is None:
        return attended
    bounds = attended // strategy.block if strategy.block else 0
    return min(attended, strategy.budget + bounds)


def measure(
    engine: Engine, group: Group, strategies: Sequence[str], compiled: Mapping[str, Callable[[], CompiledStep]],
    arguments: argparse.Namespace, others: Mapping[str, Engine] | None = None,
) -> dict[str, Cell]:  # fmt: skip
    """Cells by strategy, of compiled steps, and of other engines, which read everything, by their names.

    Raises InvalidArgument or NoCapacity for what does not fit.
    """
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = engine.info().facts.vocab_size
    prompts = torch.randint(5, vocabulary - 5, (group.sessions, group.length), generator=generator).tolist()
    turns = arguments.turns if group.sessions <= MOST_AT_ONCE else []
    limit = group.length + 2 + (arguments.rounds + 1) * (2 * arguments.tokens + sum(turns) + len(turns))
    served = [(name, engine, name) for name in strategies]
    served += [(name, other, FULL) for name, other in (others or {}).items()]
    cells = {name: Cell() for name, _, _ in served}
    with ExitStack() as stack:
        sessions = {
            name: [stack.enter_context(opened(by, parse_strategy(strategy), limit)) for _ in prompts]
            for name, by, strategy in served
        }
        for name, by, _ in served:
            for session, prompt in zip(sessions[name], prompts, strict=True):
                is_attended = group.length <= arguments.attended
                with ExitStack() if is_attended else unattended():
                    rate = prefill_rate(by, session, prompt)
                if is_attended:
                    cells[name].prefill.append(rate)
        hosts: dict[str, list[float]] = {name: [] for name, _, _ in served}
        sides = {
            name: partial(step_milliseconds, by, sessions[name], arguments.tokens, hosts[name])
            for name, by, _ in served
        }
        sampled = {f"{name}, sampled": cells[name] for name, _, _ in served}
        for name, by, _ in served:
            drawn = partial(step_milliseconds, by, sessions[name], arguments.tokens, [], WARM)
            sides[f"{name}, sampled"] = drawn
        for name, make in compiled.items():
            beside, cells[name] = make(), Cell(read=group.length)
            beside.milliseconds(4)  # compiles
            sides[name] = partial(beside.milliseconds, arguments.tokens)
        for name, samples in in_turns(sides, arguments.rounds).items():
            if name in sampled:
                sampled[name].sampled_ms = samples
            else:
                cells[name].step_ms = samples
        for name, by, _ in served:
            cells[name].host_ms = hosts[name][1:]  # without the first round, which warms up
            info = by.session_info(sessions[name][0])
            cells[name].read = entries_read(info.strategy, info.history_length - 1 - info.evicted_tokens)
            cells[name].bound_bytes = info.bound.peak_bytes
        for new in turns:
            ids = torch.randint(5, vocabulary - 5, (new,), generator=generator).tolist()
            asked = {name: partial(turn_milliseconds, by, sessions[name], ids) for name, by, _ in served}
            for name, samples in in_turns(asked, arguments.rounds).items():
                cells[name].turn_ms[new] = samples
    return cells


class Outcome:
    """All that was measured so far."""

    def __init__(self, ceilings: Ceilings, arguments: argparse.Namespace) -> None:
        self._ceilings, self._arguments = ceilings, arguments
        self._values = ceilings.values()
        self._steps: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []
        self._prefills: list[dict[str, Any]] = []
        self.left_out = LeftOut(arguments.seconds)

    @property
    def is_empty(self) -> bool:
        return not self._steps and not self._prefills

    def take(self, shape: str, costs: Costs, group: Group, cells: dict[str, Cell]) -> None:
        for name, cell in cells.items():
            where = f"{shape}, {name}, {group}"
            self._values[f"decode step, {where}"] = record.summarize(cell.step_ms, "ms")
            median = statistics.median(cell.step_ms)
            floor = costs.step_ms(group.sessions, cell.read, self._ceilings)
            row = {"shape": shape, "strategy": name, "sessions": group.sessions, "length": group.length}
            row |= {"ms": round(median, 4), "tokens a second": round(1e3 * group.sessions / median, 1)}
            if cell.bound_bytes:
                self._values[f"most bytes that a session may hold, {where}"] = record.exact(cell.bound_bytes, "bytes")
            if cell.host_ms:
                self._values[f"host time of a step, {where}"] = record.summarize(cell.host_ms, "ms")
                row["host ms"] = round(statistics.median(cell.host_ms), 4)
            if cell.sampled_ms:
                pairs = zip(cell.sampled_ms, cell.step_ms, strict=True)
                ratio = record.summarize([sampled / greedy for sampled, greedy in pairs], "ratio")
                self._values[f"time of a step, sampled ÷ greedy, {where}"] = ratio
                row["sampled ÷ greedy"] = round(ratio["median"], 3)
            row |= {"entries read": cell.read, "floor ms": round(floor, 4), "floor ÷ ms": round(floor / median, 3)}
            for baseline in (FULL, *COMPILED.values()):
                if baseline in cells and baseline != name:
                    pairs = zip(cell.step_ms, cells[baseline].step_ms, strict=True)
                    summary = record.summarize([ours / theirs for ours, theirs in pairs], "ratio")
                    self._values[f"time of a step, {shape}, {name} ÷ {baseline}, {group}"] = summary
                    row[f"÷ {baseline}"] = round(summary["median"], 3)
            self._steps.append(row)
            print(row, flush=True)
            self._take_turns(shape, group, name, cells)
            if cell.prefill:
                self.take_prefill(shape, costs, f"{name}, {group}", group.length, cell.prefill)

    def _take_turns(self, shape: str, group: Group, name: str, cells: Mapping[str, Cell]) -> None:
        for new, samples in cells[name].turn_ms.items():
            step_ms = statistics.median(cells[name].step_ms)
            summary = record.summarize(samples, "ms")
            self._values[f"turn of {new} new tokens, {shape}, {name}, {group}"] = summary
            row = {"shape": shape, "strategy": name, "sessions": group.sessions, "length": group.length, "new": new}
            row |= {"ms": round(summary["median"], 2), "÷ a decode step": round(summary["median"] / step_ms, 2)}
            if name != FULL and FULL in cells:
                pairs = zip(samples, cells[FULL].turn_ms[new], strict=True)
                ratio = record.summarize([ours / theirs for ours, theirs in pairs], "ratio")
                self._values[f"turn of {new} new tokens, {shape}, {name} ÷ {FULL}, {group}"] = ratio
                row[f"÷ {FULL}"] = round(ratio["median"], 3)
            self._turns.append(row)
            print(row, flush=True)

    def take_prefill(self, shape: str, costs: Costs, where: str, length: int, samples: Sequence[float]) -> None:
        self._values[f"prefill, {shape}, {where}"] = record.summarize(samples, "tokens a second")
        median = statistics.median(samples)
        share = median * costs.prefill_seconds(length, self._ceilings) / length
        row = {
            "shape": shape,
            "cell": where,
            "tokens a second": round(median, 1),
            "share of the products' rate": round(share, 3),
        }
        self._prefills.append(row)
        print(row, flush=True)

    def payload(self) -> dict[str, Any]:
        arguments = self._arguments
        return {
            "experiment": named("steps", arguments),
            "config": {
                "weights": "random, made in memory",
                "device": device_name(arguments.device),
                "dtype": arguments.dtype,
                "rounds": arguments.rounds,
                "tokens": arguments.tokens,
                "longest history that a prefill attends to": arguments.attended,
            },
            "seeds": [SEED],
            "values": self._values,
            "headlines": [name for name in self._values if "÷" in name] or list(self._values),
            "tables": {"decode steps": self._steps, "turns": self._turns, "prefills": self._prefills},
            "left_out": self.left_out,
            "baseline": "transformers with a static cache under torch.compile(mode='reduce-overhead') in the same "
            "rounds, random weights of the same shape; and the strategy that reads everything",
        }


def made_baseline(shape: str, arguments: argparse.Namespace) -> Any:
    """A model of its own: the engine rearranges the weights that it takes over."""
    with torch.random.fork_rng(), torch.device(arguments.device):
        torch.manual_seed(SEED)
        dtype = getattr(torch, arguments.dtype)
        model = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype, attn_implementation="sdpa")
    return model.to(arguments.device).eval().requires_grad_(requires_grad=False)


def made(shape: str, arguments: argparse.Namespace) -> LoadedModel:
    longest = max((group.length for group in arguments.groups), default=0) + 4096
    return made_model(shape, arguments.device, arguments.dtype, positions=longest)


def served(loaded: LoadedModel, shape: str, arguments: argparse.Namespace, **options: Any) -> TorchForward:
    config = ModelConfig(device=arguments.device, dtype=arguments.dtype, linear="plain", **options)
    # As on a GPU, wherever this runs: otherwise there would be no list on a CPU.
    ops = replace(open_ops("auto", torch.device(arguments.device)), attends_together=True)
    return serve_loaded(loaded, config, admit_config(SHAPES[shape]()), ops=ops)


def opened_forward(shape: str, arguments: argparse.Namespace) -> tuple[TorchForward, Costs]:
    loaded, itemsize = made(shape, arguments), getattr(torch, arguments.dtype).itemsize
    costs = Costs.of(loaded.model, itemsize)
    forward = served(loaded, shape, arguments)
    geometry = forward.geometry(page_tokens=16, segment_tokens=256)
    own = forward.seam.model.config
    attentions = tuple(Attention.of(layer, own, itemsize) for layer in geometry.layers)
    state_bytes = sum(state.nbytes for state in geometry.state_layers.values())
    return forward, replace(costs, attentions=attentions, state_bytes=state_bytes)


def opened_modules(shape: str, arguments: argparse.Namespace, *, compiles: bool) -> TorchForward:
    """Steps of transformers' layers. compiles: each by torch.compile, which leaves attention to the engine."""
    # A compiler fuses norms by itself. With plain kernels long chunks have plain attention, too: steps are compared.
    forward = served(made(shape, arguments), shape, arguments, kernels="plain" if compiles else "auto")
    forward.listed = None
    if compiles:
        for layer in forward.seam.model.get_decoder().layers:
            layer.compile()
    return forward


def opened_invariant(shape: str, arguments: argparse.Namespace) -> TorchForward:
    return served(made(shape, arguments), shape, arguments, determinism="batch-invariant")


def other_engines(shape: str, arguments: argparse.Namespace, outcome: Outcome, stack: ExitStack) -> dict[str, Engine]:
    """Engines that are asked for beside the first, by what they do. One that cannot be had is left out, with the
    reason."""
    found: dict[str, Engine] = {}
    asked: dict[str, Callable[[], TorchForward]] = {}
    if arguments.invariant:
        asked[INVARIANT] = partial(opened_invariant, shape, arguments)
    if arguments.modules:
        by_itself = torch.compiler.disable(AttentionInterface()[ATTENTION])  # type: ignore[no-untyped-call]
        AttentionInterface.register(ATTENTION, by_itself)
        asked[MODULES] = partial(opened_modules, shape, arguments, compiles=False)
        asked[COMPILED_MODULES] = partial(opened_modules, shape, arguments, compiles=True)
    for name, make in asked.items():
        began = time.monotonic()
        try:
            forward = make()
            engine = stack.enter_context(Engine(forward, settings(forward, arguments)))
            shortest = min(group.length for group in arguments.groups)
            measure(engine, Group(1, min(512, shortest)), [FULL], {}, arguments)
        except FAILURES as error:
            outcome.left_out.refuse(f"{shape}, {name}", error)
        else:
            found[name] = engine
            print(f"{time.monotonic() - began:.0f} s until {name} is ready", flush=True)
    return found


def settings(forward: TorchForward, arguments: argparse.Namespace, *, step_tokens: int = 0) -> EngineConfig:
    kv_bytes = arguments.kv_bytes or int(0.8 * forward.free_bytes())
    sessions = max((group.sessions for group in arguments.groups), default=1)
    return EngineConfig(
        kv_bytes=kv_bytes,
        max_batch=sessions,
        max_running=2 * sessions + 1,
        step_tokens=step_tokens,
        max_first_token_seconds=0,
        share_prefixes="off",
        stall_seconds=600,
    )


def measure_shape(shape: str, outcome: Outcome, arguments: argparse.Namespace, save: Save) -> None:
    baseline = made_baseline(shape, arguments) if arguments.compiled else None
    forward, costs = opened_forward(shape, arguments)
    with ExitStack() as stack:
        own = settings(forward, arguments)
        chosen = {name for names in (*arguments.groups.values(), arguments.prefilled) for name in names}
        coded = calibrated(
            shape,
            forward,
            [parse_strategy(name) for name in sorted(chosen)],
            page_tokens=own.page_tokens,
            segment_tokens=own.segment_tokens,
        )
        engine = stack.enter_context(Engine(forward, own, **coded))
        others = other_engines(shape, arguments, outcome, stack)
        warmed = min((group for group in arguments.groups), default=None)
        if warmed is not None:
            measure(engine, Group(1, min(512, warmed.length)), [FULL], {}, arguments)
        for group, strategies in arguments.groups.items():
            where = f"{shape}, {group}"
            if outcome.left_out.is_late(where):
                continue
            compiled = {}
            if baseline is not None and group.sessions == 1 and group.length in arguments.compiled:
                steps, is_compiled = 4 + (arguments.rounds + 1) * arguments.tokens, arguments.device != "cpu"
                compiled = {
                    name: partial(CompiledStep, baseline, kind, group.length, steps, is_compiled=is_compiled)
                    for kind, name in COMPILED.items()
                }
            try:
                outcome.take(shape, costs, group, measure(engine, group, strategies, compiled, arguments, others))
            except FAILURES as error:
                outcome.left_out.refuse(where, error)
                continue
            save(outcome.payload())
            if compiled and not others:  # whose compiled layers would be forgotten, too
                torch.compiler.reset()
                gc.collect()
    release(arguments.device)
    for step_tokens in arguments.step_tokens:
        with Engine(forward, settings(forward, arguments, step_tokens=step_tokens), **coded) as engine:
            for length, strategy in itertools.product(arguments.prefill, arguments.prefilled):
                where = f"in chunks of {step_tokens or 'the default'}, 1 x {length}"
                where = where if strategy == FULL else f"{strategy}, {where}"
                if outcome.left_out.is_late(f"prefill, {shape}, {where}"):
                    continue
                try:
                    samples = [
                        rate_of_a_prefill(engine, strategy, length, seed) for seed in range(arguments.prefills + 1)
                    ][1:]
                except (InvalidArgument, NoCapacity) as refusal:
                    outcome.left_out.refuse(f"prefill, {shape}, {where}", refusal)
                    continue
                outcome.take_prefill(shape, costs, where, length, samples)
                save(outcome.payload())


def rate_of_a_prefill(engine: Engine, strategy: str, length: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, engine.info().facts.vocab_size - 5, (length,), generator=generator).tolist()
    with opened(engine, parse_strategy(strategy), length + 2) as session:
        return prefill_rate(engine, session, ids)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_made(parser, seconds=450.0)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), metavar="SESSIONSxLENGTH[/STRATEGY]")
    parser.add_argument("--compiled", type=int, nargs="*", default=[1024, 8192], help="lengths beside the baseline")
    parser.add_argument(
        "--modules", action="store_true", help="full by torch's modules, too, in engines of their own; give --kv-bytes"
    )
    parser.add_argument(
        "--invariant", action="store_true", help="full, batch-invariant, too, in an engine of its own; give --kv-bytes"
    )
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 32768, 130_000])
    parser.add_argument("--prefilled", nargs="+", default=[FULL], metavar="STRATEGY", help="of the prefills")
    parser.add_argument("--step-tokens", type=int, nargs="*", default=[0], help="prefill chunks; 0: the default")
    parser.add_argument("--prefills", type=int, default=2, help="of each length, after one that is not kept")
    parser.add_argument("--attended", type=int, default=2**17, help="longest history that a prefill attends to")
    parser.add_argument("--turns", type=int, nargs="*", default=[16, 256], help="new tokens of a turn")


def groups_of(cells: Sequence[str]) -> dict[Group, list[str]]:
    groups: dict[Group, list[str]] = {}
    for cell in cells:
        size, _, strategy = cell.partition("/")
        sessions, _, length = size.partition("x")
        groups.setdefault(Group(int(sessions), int(length)), []).append(strategy or FULL)
    return groups


def main(arguments: argparse.Namespace, save: Save) -> dict[str, Any]:
    check_rounds(arguments)
    if arguments.prefills < 1:
        raise ConfigError(f"--prefills must be at least 1, got {arguments.prefills}")
    if (arguments.modules or arguments.invariant) and not arguments.kv_bytes:
        raise ConfigError(
            "--modules and --invariant open further engines, each of which takes --kv-bytes; give it, e.g. 8589934592"
        )
    arguments.groups = groups_of(arguments.cells)
    outcome = Outcome(measure_ceilings(torch.device(arguments.device)), arguments)
    for shape in arguments.shapes:
        release(arguments.device)
        measure_shape(shape, outcome, arguments, save)
    if outcome.is_empty:
        raise KakeyaError("nothing was measured: " + "; ".join(outcome.left_out.values()))
    return outcome.payload()
