"""Attending to all tokens of a step at once, and running it as a graph, changes no token: over every strategy.

On a machine without a GPU the operation is its reference, and nothing is recorded; where there is one, the kernel runs,
with graphs and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.backends.base import Forward
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.decode.draft import Drafter
from inference_engine.engine import Engine
from inference_engine.kernels.attention import attend_causal
from inference_engine.kernels.ops import DeviceOps, open_ops
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kernels.reads import AttentionCall
from inference_engine.kv import plan
from inference_engine.kv.parts.component_index import ComponentView
from inference_engine.kv.parts.offload import OffloadedBlocks
from inference_engine.kv.parts.shared_prefix import PrefixView
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategies.tiered import Tiered
from inference_engine.kv.strategy import KVStrategy
from inference_engine.kv.views import StagedQueries, StepReads, View
from inference_engine.metrics import EngineMetrics
from inference_engine.native.library import KVType
from inference_engine.session.journal import Journal
from inference_engine.types import GenerateParams, Mode, Sampling
from kv_cache_proposer.dflash.drafter import DFlashDrafter
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import words_of
from kv_cache_proposer.ngram import NgramDrafter
from tests.facade import WatchedForward
from tests.further import FURTHER, further
from tests.kv_cache_proposer.drafter_cases import chained_network, tiny_network
from tests.laws.test_engine_laws import opened
from tests.laws.variants import (
    all_strategies,
    drain,
    each_strategy,
    each_strategy_with,
    reads_by_views,
    same,
    text,
    tokens,
)
from tests.tiny import PAGES, SMALL, tiny_components, tiny_f_theta, tiny_forward_on, tiny_latent
from tests.tiny_native import tiny_native

ON_GPU = torch.cuda.is_available()
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)
# Whether steps are recorded. Listed: they are a list of operations instead of torch's modules. Invariant: and a token's
# bits depend on nothing else in its step.
# Ahead: they are launched before the tokens of the step before have reached the host.
VARIANTS = {"regions": False, "listed": False, "invariant": False, "ahead": ON_GPU}
VARIANTS |= {"regions-graphs": True, "listed-graphs": True, "invariant-graphs": True} if ON_GPU else {}
INVARIANT = [variant for variant in VARIANTS if variant.startswith("invariant")]
BY_TOKENS = pytest.mark.skipif(not ON_GPU, reason="torch's products on a CPU depend on the number of tokens")
# K and V in 16 bits are compared with the same: session by session, they are read by torch.
ALONE = {**dict.fromkeys((*VARIANTS, "native"), "alone"), "native-float16": "native-float16-alone"}
EVERYWHERE = tuple(ALONE)
# By the references, steps of torch's modules, listed ones and those launched ahead attend alike: one of them has all.
ALIKE = () if ON_GPU else ("regions", "listed")
EACH = tuple(variant for variant in EVERYWHERE if variant not in ALIKE)
each_variant = pytest.mark.parametrize(
    "variant", [further(variant) if variant in ALIKE else variant for variant in EVERYWHERE]
)
# Likewise those that are invariant: they take turns with those launched ahead, and with native ones, which all other
# laws have (`tests/native/test_attention.py` has queries of every kind over K and V in 32 bits and in 16).
IN_TURN = {"variant": [] if ON_GPU else EACH}


def each_with(name: str, values: Mapping[str, Any], variants: Iterable[str]) -> pytest.MarkDecorator:
    """Every value with every variant; off a GPU each variant has one value, and the others are further cases."""
    cases = []
    for number, variant in enumerate(variants):
        for place, (said, value) in enumerate(values.items()):
            marks = () if ON_GPU or place == number % len(values) else FURTHER
            cases.append(pytest.param(value, variant, id=f"{said}-{variant}", marks=marks))
    return pytest.mark.parametrize((name, "variant"), cases)


def forward(variant: str) -> Forward:
    if variant == "native":
        return tiny_native()
    if variant.startswith("native-float16"):
        return tiny_native(kv_type=KVType.FLOAT16, attends_together=not variant.endswith("alone"))
    return forward_on_torch(variant)


@lru_cache(maxsize=5)
def forward_on_torch(variant: str) -> TorchForward:
    device = "cuda" if ON_GPU else "cpu"
    if variant == "alone":
        return tiny_forward_on(device)
    ops = open_ops("auto", torch.device(device)) if ON_GPU else DeviceOps(attends_together=True)
    return tiny_forward_on(
        device,
        ops=ops,
        records_graphs=VARIANTS[variant],
        is_listed=variant in ("listed", "listed-graphs", "ahead"),
        is_invariant=variant.startswith("invariant"),
    )


def engine_on(
    variant: str,
    *,
    drafter: Drafter | None = None,
    journal: Journal | None = None,
    metrics: EngineMetrics | None = None,
    **settings: Any,
) -> Engine:
    latent = tiny_latent().to(forward(variant).device)
    config = EngineConfig(**{**SMALL, "overlap": "on" if variant == "ahead" else "off", **settings})
    f_theta = tiny_f_theta().to(latent.device)
    calibrated: dict[str, Any] = {"latent": latent, "components": tiny_components(), "f_theta": f_theta}
    return Engine(forward(variant), config, **calibrated, drafter=drafter, journal=journal, metrics=metrics)


def conversation(
    variant: str, strategy: KVStrategy, *, is_alone: bool = False, **extras: Any
) -> list[list[tuple[int, float | None]]]:
    """Three turns of a session beside neighbours of other strategies and lengths, in the same forwards, or alone."""
    turns = []
    with engine_on(variant, **extras) as engine:
        session = opened(engine, strategy)
        neighbours = [
            opened(engine, neighbour, text(length, seed=length))
            for neighbour, length in ((Full(), 33), (SinkWindow(sink=2, window=9), 60), (Full(), 3))
            if not is_alone
        ]
        for turn in range(3):
            engine.append(session, text((9, 39, 24)[turn], seed=turn))
            running = [engine.generate(other, GenerateParams(max_tokens=6 + turn)) for other in neighbours]
            for count, sampling in ((5, Sampling()), (5, SAMPLED)):  # together they cross a segment's boundary
                params = GenerateParams(max_tokens=count, sampling=sampling, logprobs=True)
                turns.append(tokens(drain(engine.generate(session, params))))
            for generation in running:
                drain(generation)
    return turns


# Cases of one strategy follow each other: what it gives session by session is computed once for all of them.
conversation_alone = lru_cache(maxsize=2)(conversation)


@each_strategy_with(variant=EACH)
def test_tokens_attended_to_together_give_what_they_give_session_by_session(strategy: KVStrategy, variant: str) -> None:
    expected, found = conversation_alone(ALONE[variant], strategy), conversation(variant, strategy)

    for turn, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        assert same(wanted, got, Mode.BATCHED), turn


@each_strategy
def test_a_step_attends_in_the_native_library_while_its_sessions_hold_what_they_read(
    strategy: KVStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appending, waking, archiving and recomputing included. Layer by layer are only steps that read what lies outside
    the regions (entries that have left them, or what an earlier token read), or some queries all and others blocks.
    Tokens that choose what is restored attend there, too; appended ones read everything, if they do not choose.
    """
    native, calls, by_step = tiny_native(kv_type=KVType.FLOAT16), 0, []
    register = native.program.register

    def counted(*arguments: Any) -> Any:  # where the plan attends, it reads and writes registers
        nonlocal calls
        calls += 1
        return register(*arguments)

    monkeypatch.setattr(native.program, "register", counted)
    watched = WatchedForward(native, lambda _: by_step.append(calls))
    calibrated: dict[str, Any] = {
        "latent": tiny_latent(),
        "components": tiny_components(),
        "f_theta": tiny_f_theta(),
    }
    with Engine(watched, EngineConfig(**SMALL), **calibrated) as engine:
        session = opened(engine, strategy)
        for turn, count in enumerate((12, 61, 30)):
            engine.append(session, text(count, seed=turn))
            drain(engine.generate(session, GenerateParams(max_tokens=17)))
    counts = np.diff([*by_step, calls])

    options = strategy.options()
    reads_elsewhere = reads_by_views(strategy)
    reads_elsewhere |= options.get("scorer") == "bounds"
    geometry = native.geometry(**PAGES)
    rules = [strategy.rule(layer, geometry) for layer in range(len(geometry.layers))]
    reads_elsewhere |= any(mechanism.ends_alone for rule in rules for mechanism in rule.mechanisms)
    assert counts[0] == 0 and counts.any() == reads_elsewhere, counts
    assert options.get("mode") != "select" or not counts[-16:].any(), counts


def test_tokens_choose_in_the_native_library_whatever_is_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that was generated last is computed with those that are appended after it."""

    def refused(*_: Any) -> None:
        raise AssertionError("plain operations choose")

    monkeypatch.setattr(ComponentView, "read", refused)
    restores = [strategy for strategy in all_strategies() if strategy.options().get("mode") == "select"]
    assert {strategy.options()["appended"] for strategy in restores} == {"all", "select"}
    for strategy in restores:
        for turn in conversation("native-float16", strategy):
            assert turn


@BY_TOKENS
@pytest.mark.parametrize("variant", INVARIANT)
@each_strategy
def test_neighbours_change_no_bit_of_a_session(strategy: KVStrategy, variant: str) -> None:
    assert conversation(variant, strategy) == conversation(variant, strategy, is_alone=True)


@BY_TOKENS
@pytest.mark.parametrize("variant", INVARIANT)
@pytest.mark.parametrize(
    "strategy",
    [
        Full(),
        SinkWindow(sink=3, window=20),
        Gather(block=4, sink=4, window=16, budget=64),
        Gather(scorer="components", sink=3, window=16, budget=75, rank=5, bits=3, run=1),
    ],
    ids=str,
)
def test_neither_chunks_nor_drafts_change_a_bit_of_what_reads_regions(strategy: KVStrategy, variant: str) -> None:
    plain = conversation(variant, strategy)
    assert conversation(variant, strategy, step_tokens=16) == plain
    assert conversation(variant, strategy, drafter=NgramDrafter()) == plain


@each_variant
def test_long_chunks_without_a_mask_give_what_they_give_under_one(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a first prefill and of one that goes on, beside tokens that read regions."""
    expected = conversation(ALONE[variant], Full())
    monkeypatch.setattr(plan, "MOST_RAGGED_TOKENS", 4)

    found = conversation(variant, Full())

    for turn, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        assert same(wanted, got, Mode.BATCHED), turn


def test_a_chunk_reads_by_a_view_from_so_many_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries by the entries that they see, if it has as many queries as an operation for long chunks takes."""
    seen: list[tuple[int, int]] = []

    def attend(queries: Tensor, keys: Tensor, *others: Tensor, **options: Any) -> Tensor:
        seen.append((len(queries), keys.shape[1]))
        return attend_causal(queries, keys, *others, **options)

    def said(long_reads: int | None) -> list[list[int]]:
        ops = DeviceOps(attends_together=True, long_reads=long_reads, attend_causal=attend)
        config = EngineConfig(**{**SMALL, "step_tokens": 320, "segment_tokens": 320})
        clock = count(0.0, 1e-6).__next__  # chunks have as many tokens as fit in a time
        with Engine(tiny_forward_on("cpu", ops=ops, is_listed=True), config, clock=clock) as engine:
            session, found = opened(engine, Full(), []), []
            for ids in (text(130), text(20, seed=1), text(130, seed=2), text(100, seed=3)):
                engine.append(session, ids)
                found.append(
                    [token for token, _ in tokens(drain(engine.generate(session, GenerateParams(max_tokens=2))))]
                )
        return found

    expected = said(None)
    assert not seen
    assert said(130 * 200) == expected
    assert {queries for queries, _ in seen} == {131} and all(entries > 200 for _, entries in seen)


@each_variant
def test_forks_that_read_a_prefix_are_attended_to_with_all_others(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forks at once, in other words each, beside the session whose entries they read."""

    def said(variant: str) -> list[list[tuple[int, float | None]]]:
        with engine_on(variant) as engine:
            parent = opened(engine, Full(), text(70))
            drain(engine.generate(parent, GenerateParams(max_tokens=3)))
            sessions = [engine.fork_session(parent).session_id for _ in range(2)]
            for seed, session in enumerate(sessions):
                engine.append(session, text(40 * seed + 3, seed=seed))
            params = GenerateParams(max_tokens=20, logprobs=True)
            running = [engine.generate(session, params) for session in (*sessions, parent)]
            return [tokens(drain(generation)) for generation in running]

    expected = said(ALONE[variant])

    def read(*_: object) -> Tensor:
        raise AssertionError("a fork was attended to by itself")

    monkeypatch.setattr(PrefixView, "read", read)
    for wanted, got in zip(expected, said(variant), strict=True):
        assert same(wanted, got, Mode.BATCHED)


@each_with("drafter", {"plain": None, "drafted": NgramDrafter()}, VARIANTS)
def test_blocks_that_are_off_the_device_are_read_with_all_others(
    drafter: NgramDrafter | None, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sessions in the same steps, over boundaries at which entries leave and prefills that read all of them."""
    options = {"block": 4, "sink": 4, "window": 16, "budget": 48}
    strategies = (Gather(**options, scorer="bounds"), Tiered(**options, resident_tokens=16))

    def said(strategy: KVStrategy) -> list[list[tuple[int, float | None]]]:
        found = []
        with engine_on(variant, drafter=drafter) as engine:
            sessions = [opened(engine, strategy, text(12) * 6), opened(engine, strategy, text(50, seed=3))]
            for turn in range(2):
                running = [engine.generate(each, GenerateParams(max_tokens=16, logprobs=True)) for each in sessions]
                found += [tokens(drain(generation)) for generation in running]
                for each in sessions:
                    engine.append(each, text(9, seed=turn))
        return found

    expected = said(strategies[0])

    view = OffloadedBlocks.view

    def seen(self: OffloadedBlocks, queries: StagedQueries, step: StepReads, inner: Callable[[], View]) -> View:
        assert queries.has_appended, "the host is asked for blocks"
        return view(self, queries, step, inner)

    monkeypatch.setattr(OffloadedBlocks, "view", seen)
    for wanted, got in zip(expected, said(strategies[1]), strict=True):
        assert same(wanted, got, Mode.BATCHED)


@each_with("strategy", {str(one): one for one in (Full(), SinkWindow(sink=3, window=20))}, EVERYWHERE)
def test_drafts_verified_over_regions_change_no_token(strategy: KVStrategy, variant: str) -> None:
    """Blocks of several tokens of one session, some of which are dropped again."""
    repeated = text(12) * 4
    found = {}
    for drafter in (None, NgramDrafter()):
        with engine_on(variant, drafter=drafter) as engine:
            session = opened(engine, strategy, repeated)
            found[drafter is None] = tokens(drain(engine.generate(session, GenerateParams(max_tokens=80))))
    assert [token for token, _ in found[True]] == [token for token, _ in found[False]]


@each_with("make", {"plain": tiny_network, "chained": chained_network}, VARIANTS)
def test_a_drafter_whose_work_is_recorded_drafts_what_it_drafted_before(
    make: Callable[[], DFlashNetwork], variant: str
) -> None:
    """Several sessions, which leave one after another: other numbers of blocks and of tokens each time."""
    found = {}
    for records_graphs in {False, VARIANTS[variant]}:
        network = make().to(forward(variant).device)
        drafter = DFlashDrafter(network, words_of(forward_on_torch(variant).seam.model), records_graphs=records_graphs)
        with engine_on(variant, drafter=drafter, draft_tokens=5) as engine:
            sessions = [opened(engine, Full(), text(length, seed=length)) for length in (9, 40, 77)]
            running = [
                engine.generate(session, GenerateParams(max_tokens=count))
                for session, count in zip(sessions, (11, 23, 40), strict=True)
            ]
            ends = [list(generation) for generation in running]
            facts = [engine.session_info(session) for session in sessions]
            assert all(fact.drafted_tokens for fact in facts)
            found[records_graphs] = (
                [[token for token, _ in tokens(events)] for events in ends],
                [fact.accepted_tokens for fact in facts],
            )
    assert len({str(answer) for answer in found.values()}) == 1


@each_variant
def test_two_engines_over_one_model_do_not_see_each_other(variant: str) -> None:
    """What was recorded for one pool is not run over another."""
    ids = text(40)
    with engine_on(variant) as alone:
        expected = tokens(drain(alone.generate(opened(alone, Full(), ids), GenerateParams(max_tokens=20))))
    with engine_on(variant) as first, engine_on(variant) as second:
        for engine in (first, second, first):
            found = tokens(drain(engine.generate(opened(engine, Full(), ids), GenerateParams(max_tokens=20))))
            assert same(expected, found, Mode.BATCHED)


def test_the_tokens_of_several_sessions_are_one_operation_a_layer() -> None:
    """A step of nothing but decodes asks for each layer once, whether strategies keep every entry or a window."""
    asked: list[int] = []

    def counted(call: AttentionCall, out: Tensor) -> None:
        asked.append(len(call.queries))
        attend_ragged.regions(call, out)

    counting = replace(attend_ragged, regions=counted)
    on_regions = tiny_forward_on("cpu", ops=DeviceOps(attend_ragged=counting, attends_together=True))
    settings: dict[str, Any] = {**SMALL}
    with Engine(on_regions, EngineConfig(**settings)) as engine:
        sessions = [opened(engine, strategy, text(40)) for strategy in (Full(), SinkWindow(sink=3, window=20), Full())]
        running = [engine.generate(session, GenerateParams(max_tokens=30)) for session in sessions]
        for generation in running:
            drain(generation)
    assert asked.count(3) >= 20 * len(on_regions.seam.layers)
