"""The laws a user can see, over every registered strategy and both modes: through the engine, on TinyModel."""

from __future__ import annotations

import gc
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from inference_engine.engine import Engine
from inference_engine.kv.layout import Layout
from inference_engine.kv.parts.streamed import StreamedReads
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.layer_window import LayerWindow
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from inference_engine.session.journal import MemoryJournal
from inference_engine.types import Finished, GenerateParams, Mark, Mode, Sampling, Truncated
from tests.facade import on_the_engines_thread, rebuild_session
from tests.further import each_pair
from tests.garbage import leave_aside
from tests.laws.variants import (
    FEW,
    LENGTH,
    MODES,
    all_strategies,
    drain,
    each_mode,
    each_strategy,
    each_strategy_with,
    engine_for,
    generate,
    prefill,
    same,
    text,
    tokens,
)
from tests.tiny import LATENT_BYTES, NATIVE_WINDOW, PAGES, tiny_engine, tiny_forward

SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)
GUARANTEED = [False, True]
IN_TURN = {"guaranteed": GUARANTEED}
# So few that components of the codec's basis are left out.
FEWER_BYTES = make_strategy("restored", sink=2, window=13, source="latent", bytes_per_token=LATENT_BYTES // 8)


def opened(engine: Engine, strategy: KVStrategy, history: list[int] | None = None) -> str:
    session_id = engine.create_session(strategy=strategy).session_id
    if history:
        engine.append(session_id, history)
    return session_id


@each_strategy_with(mode=MODES)
def test_any_split_of_the_same_appends_gives_the_same_streams(strategy: KVStrategy, mode: Mode) -> None:
    """Grouping: with Generates in between at the same points. Each strategy has a split of its own."""
    seed = zlib.crc32(str(strategy).encode())
    rng = np.random.default_rng(seed)
    turns = [text(int(length), seed=seed * 10 + turn) for turn, length in enumerate(rng.integers(1, 70, 3))]
    with engine_for(mode) as engine:
        whole, split = opened(engine, strategy), opened(engine, strategy)
        for turn in turns:
            engine.append(whole, turn)
            cuts = sorted(rng.integers(0, len(turn) + 1, 3).tolist())
            for start, stop in zip([0, *cuts], [*cuts, len(turn)], strict=True):
                engine.append(split, turn[start:stop])
            assert same(generate(engine, whole, 6), generate(engine, split, 6), mode)


@each_strategy_with(mode=MODES)
def test_a_history_that_was_prefilled_first_gives_the_same_streams(strategy: KVStrategy, mode: Mode) -> None:
    """Grouping, too: a prefill may come at any place between appends, and has nothing to do where nothing is new."""
    with engine_for(mode) as engine:
        plain, prefilled = opened(engine, strategy), opened(engine, strategy)
        for turn, length in enumerate((LENGTH, 9)):
            ids = text(length, seed=turn)
            engine.append(plain, ids)
            engine.append(prefilled, ids[: length // 2])
            prefill(engine, prefilled)
            engine.append(prefilled, ids[length // 2 :])
            prefill(engine, prefilled)
            assert prefill(engine, prefilled).prefilled_tokens == 0
            assert same(generate(engine, prefilled, 6), generate(engine, plain, 6), mode)


@each_strategy
@each_mode
def test_a_session_in_a_batch_equals_the_session_alone(strategy: KVStrategy, mode: Mode) -> None:
    """Isolation: neighbours of other strategies, lengths and sampling run in the same forwards."""
    with engine_for(mode) as engine:
        alone = generate(engine, opened(engine, strategy, text()), sampling=SAMPLED)
        session = opened(engine, strategy, text())
        neighbours = [
            opened(engine, neighbour, text(length, seed=length))
            for neighbour, length in ((Full(), 40), (SinkWindow(sink=2, window=9), 77), (Full(), 3))
        ]
        running = [engine.generate(id_, GenerateParams(max_tokens=FEW + 2)) for id_ in neighbours]
        params = GenerateParams(max_tokens=FEW, sampling=SAMPLED, logprobs=True)
        together = tokens(drain(engine.generate(session, params)))
        for generation in running:
            drain(generation)
    assert same(alone, together, mode)


@each_strategy_with(mode=MODES)
def test_a_session_rebuilt_from_its_journal_goes_on_as_if_never_closed(strategy: KVStrategy, mode: Mode) -> None:
    """Replay, marks included."""
    journal = MemoryJournal()
    with engine_for(mode, journal=journal) as engine:
        session = opened(engine, strategy)
        for turn in range(3):
            engine.append(session, text(30 + turn, seed=turn))
            generate(engine, session, 6)
        began, records = journal.read(session)
        assert [record.mark for record in records] == [Mark.APPENDED, Mark.GENERATED] * 3
        assert began.strategy == str(strategy)
        rebuilt = rebuild_session(engine, began, records).session_id
        assert same(generate(engine, session), generate(engine, rebuilt), mode)


@each_strategy_with(mode=MODES)
def test_sampled_tokens_depend_on_seed_and_position_alone(strategy: KVStrategy, mode: Mode) -> None:
    """One Generate of 9 tokens equals three of 3: no sampler state is carried."""
    with engine_for(mode) as engine:
        once = generate(engine, opened(engine, strategy, text()), 9, sampling=SAMPLED)
        session = opened(engine, strategy, text())
        pieces = [token for _ in range(3) for token in generate(engine, session, 3, sampling=SAMPLED)]
        other_seed = generate(
            engine, opened(engine, strategy, text()), 9, sampling=Sampling(temperature=0.9, top_p=0.95, seed=8)
        )
    assert same(once, pieces, mode)
    assert [token for token, _ in other_seed] != [token for token, _ in once]


@each_strategy_with(guaranteed=GUARANTEED)
def test_the_footprint_never_passes_the_bound(strategy: KVStrategy, guaranteed: bool) -> None:
    """Bound: ≤ peak at every token, ≤ sustained between Generates, and known at creation.

    What is reserved is all of it for a session with a guarantee, and else at least what the session holds.
    """
    with engine_for(Mode.BATCHED) as engine:
        session = engine.create_session(strategy=strategy, guaranteed=guaranteed)
        seen: list[int] = []
        for turn in range(3):
            engine.append(session.session_id, text(60, seed=turn))
            events = engine.generate(session.session_id, GenerateParams(max_tokens=12))
            for _ in events:
                seen.append(engine.session_info(session.session_id).kv_live_bytes)
                assert engine.info().kv_reserved_bytes <= session.bound.peak_bytes
            info = engine.session_info(session.session_id)
            assert info.kv_live_bytes <= info.reserved_bytes <= session.bound.sustained_bytes
            assert engine.info().kv_reserved_bytes == info.reserved_bytes
        assert max(seen) <= session.bound.peak_bytes
        assert not guaranteed or engine.info().kv_reserved_bytes == session.bound.sustained_bytes


@pytest.mark.parametrize("strategy", [*all_strategies(), FEWER_BYTES], ids=str)
def test_a_session_holds_no_memory_but_what_it_reserves(strategy: KVStrategy) -> None:
    """The pool is there from the start: more sessions bring no more tensors, but for those that hold positions."""
    leave_aside()
    with engine_for(Mode.BATCHED) as engine:
        generate(engine, opened(engine, strategy, text(LENGTH)), 3)
        before, of_tier = tensor_bytes(engine), engine.info().tier_reserved_bytes
        assert before > engine.info().kv_capacity_bytes  # of the pool, at least
        for seed in range(1, 5):
            generate(engine, opened(engine, strategy, text(LENGTH, seed=seed)), 3)
        assert tensor_bytes(engine) - before <= 4 * 512 + engine.info().tier_reserved_bytes - of_tier


def tensor_bytes(engine: Engine) -> int:
    """Of all tensors that were made since and are alive, each piece of memory counted once.

    Between two steps: a client may have its last token while the thread still has the step that gave it.
    """
    pieces: dict[int, int] = {}

    def look() -> None:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whatever else is alive may mind being looked at
            alive = [
                one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.device.type == "cpu"
            ]
            # The address of what other tests packed for a CPU's library is not known.
            alive = [one for one in alive if one.layout is torch.strided]
        pieces.update((one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in alive)

    on_the_engines_thread(engine, look)
    return sum(pieces.values())


@each_pair(
    mode=MODES,
    windowed=[True, False],
    wide=[SinkWindow(sink=4, window=LENGTH + 40), LayerWindow(sink=4, window=LENGTH + 40, full_layers=(2,))],
)
def test_a_window_that_holds_the_whole_history_equals_full(mode: Mode, windowed: bool, wide: KVStrategy) -> None:
    """Degenerate: the mechanism runs, it is not switched off."""
    with engine_for(mode, windowed=windowed) as engine:
        assert same(
            generate(engine, opened(engine, wide, text())), generate(engine, opened(engine, Full(), text())), mode
        )


@each_mode
def test_gather_with_a_budget_for_everything_equals_full_and_with_less_differs(mode: Mode) -> None:
    """Degenerate and off-switch. Sums are taken in another order, so equality is up to rounding in both modes."""
    with engine_for(mode) as engine:
        wide = make_strategy("gather", block=4, sink=0, window=20, budget=400)
        narrow = make_strategy("gather", block=4, sink=0, window=20, budget=40)
        full = generate(engine, opened(engine, Full(), text()))
        assert same(generate(engine, opened(engine, wide, text())), full, Mode.BATCHED)
        assert not same(generate(engine, opened(engine, narrow, text())), full, Mode.BATCHED)


@each_mode
def test_tiered_equals_full_with_a_budget_for_everything_and_gather_with_less(mode: Mode) -> None:
    """Degenerate and off-switch: where entries are changes nothing but rounding, in both modes."""
    options = {"block": 4, "sink": 0, "window": 20}
    with engine_for(mode) as engine:
        full, gather, wide, narrow = (
            generate(engine, opened(engine, strategy, text()))
            for strategy in (
                Full(),
                make_strategy("gather", **options, budget=40),
                make_strategy("tiered", **options, budget=400, resident_tokens=20),
                make_strategy("tiered", **options, budget=40, resident_tokens=20),
            )
        )
    assert same(wide, full, Mode.BATCHED)
    assert same(narrow, gather, Mode.BATCHED)
    assert not same(narrow, full, Mode.BATCHED)


@each_mode
@pytest.mark.parametrize("restores", ["hold", "stream"])
@pytest.mark.parametrize("sink", [0, 3])
def test_restored_from_latents_without_what_comes_back_equals_sink_window(
    mode: Mode, restores: str, sink: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off-switch: evicted entries are not read. To the bit, where the same entries are in the same slots.

    But for the sink: sink_window reads it as if it stood right before the window. Here neither moves it.
    """
    narrow, latent = without_and_with_latents(restores, sink)
    visible = Layout.visible

    def visible_exactly(layout: Layout, queries: Any, held: Any) -> Any:
        seen = visible(layout, queries, held)
        horizons = queries - queries % layout.segment - narrow.window
        return seen if layout.window else seen & ((held < sink) | (held >= horizons[:, None]))

    monkeypatch.setattr(Layout, "sink_shift", lambda *_: 0)
    monkeypatch.setattr(Layout, "visible", visible_exactly)  # of the regions that they come back into
    monkeypatch.setattr(StreamedReads, "chunks", lambda *_: ())
    with tiny_engine(mode=mode) as engine:  # on torch, which reads by what is changed here
        off, lost = (opened(engine, strategy) for strategy in (latent, narrow))
        for turn in range(3):
            for session in (off, lost):
                engine.append(session, text(50, seed=turn))
            exactly = mode if restores == "stream" else Mode.BATCHED
            assert same(generate(engine, off), generate(engine, lost), exactly)


@each_mode
@pytest.mark.parametrize("restores", ["hold", "stream"])
def test_restored_from_latents_is_nearer_to_full_than_sink_window_is(mode: Mode, restores: str) -> None:
    """Off-switch, on again: what comes back is seen."""
    narrow, latent = without_and_with_latents(restores, sink=3)
    with engine_for(mode) as engine:
        full, restored, lost = (logprobs(engine, strategy) for strategy in (Full(), latent, narrow))
    far, near = (float((one - full).abs().mean()) for one in (lost, restored))
    assert 0 < near < far / 4


def without_and_with_latents(restores: str, sink: int) -> tuple[SinkWindow, KVStrategy]:
    """Both see as much exactly. The window is wider than TinyModel's own, which sink_window alone would narrow."""
    narrow = SinkWindow(sink=sink, window=NATIVE_WINDOW + 5)
    seen = {"sink": narrow.sink, "window": narrow.window}
    return narrow, make_strategy("restored", **seen, source="latent", bytes_per_token=LATENT_BYTES, mode=restores)


def logprobs(engine: Engine, strategy: KVStrategy) -> torch.Tensor:
    """What a session of the strategy says of the same tokens, [tokens, vocabulary]."""
    seen: list[torch.Tensor] = []
    session = opened(engine, strategy, text())
    drain(engine.score(session, text(40, seed=1), lambda _, logits: seen.append(logits)))
    return torch.cat(seen).log_softmax(-1)


@each_strategy_with(mode=MODES)
def test_scored_tokens_are_read_as_generated_ones_are(strategy: KVStrategy, mode: Mode) -> None:
    """Score: the same logits as sampling those tokens one by one gave, each predicted once, and the history goes on."""
    with engine_for(mode) as engine:
        sampled, scored = (opened(engine, strategy, text()) for _ in range(2))
        given = generate(engine, sampled, FEW)
        ids = [token for token, _ in given]
        seen: list[tuple[int, torch.Tensor]] = []
        drain(engine.score(scored, ids, lambda position, logits: seen.append((position, logits))))
        positions = [position + place for position, logits in seen for place in range(len(logits))]
        assert positions == list(range(LENGTH, LENGTH + FEW))
        logprobs = torch.cat([logits for _, logits in seen]).log_softmax(-1)[range(FEW), ids].tolist()
        assert same(list(zip(ids, logprobs, strict=True)), given, Mode.BATCHED)
        assert same(generate(engine, sampled), generate(engine, scored), mode)


@each_strategy
def test_truncated_is_said_once_before_any_token_and_only_when_positions_are_lost(strategy: KVStrategy) -> None:
    with engine_for(Mode.BATCHED) as engine:
        short = drain(engine.generate(opened(engine, strategy, text(5)), GenerateParams(max_tokens=3)))
        events = drain(engine.generate(opened(engine, strategy, text()), GenerateParams(max_tokens=3)))
    assert not [event for event in short if isinstance(event, Truncated)]
    said = [event for event in events if isinstance(event, Truncated)]
    done = events[-1]
    assert isinstance(done, Finished)
    geometry = tiny_forward().geometry(**PAGES)
    if any(strategy.rule(layer, geometry).window is None for layer in range(len(geometry.layers))):
        # Every position can still be read, if only by some layers.
        assert not said
        assert done.evicted_positions == 0
    else:
        assert len(said) == 1
        assert events.index(said[0]) < min(index for index, event in enumerate(events) if tokens([event]))
        assert said[0].dropped_tokens > 0
    assert done.attended_positions + done.evicted_positions == done.history_length - 1


def test_an_endless_session_passes_the_trained_positions_and_holds_constant_bytes() -> None:
    strategy = SinkWindow(sink=4, window=64)
    with engine_for(Mode.BATCHED) as engine:
        session = opened(engine, strategy)
        held = []
        for turn in range(12):
            engine.append(session, text(80, seed=turn))
            assert len(generate(engine, session, 8)) == 8
            held.append(engine.session_info(session).kv_live_bytes)
        assert engine.session_info(session).history_length == 12 * 88 > 512
        assert len(set(held[2:])) == 1
