"""Contestants take turns, so that neither side of a comparison always comes first."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from inference_engine.engine import Engine
from inference_engine.kv.parts.block_index import GatherView
from inference_engine.kv.parts.streamed import StreamedEntries
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy
from inference_engine.kv.views import CausalView, ChunkView, DenseView
from laboratory.evaluation import cost, timing
from laboratory.evaluation.sessions import opened, turned
from tests.tiny import LATENT_BYTES, VOCABULARY, tiny_engine


@pytest.mark.parametrize("count", [1, 2, 5])
def test_in_as_many_rounds_as_names_each_is_once_at_every_place(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = [turned(names, number) for number in range(3, 3 + count)]
    assert all(sorted(one) == names for one in rounds)
    assert all(len({one[place] for one in rounds}) == count for place in range(count))


def test_a_first_round_warms_up_and_every_other_gives_each_side_a_sample() -> None:
    taken: list[str] = []

    def take(name: str) -> float:
        taken.append(name)
        return len(taken)

    samples = timing.in_turns({name: partial(take, name) for name in "abc"}, 2)
    assert "".join(taken) == "abc" + "bca" + "cab"
    assert samples == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}


def test_a_prompt_of_many_appends_is_prefilled_and_sessions_decode_together() -> None:
    with tiny_engine(max_append_tokens=32) as engine, ExitStack() as stack:
        sessions = [stack.enter_context(opened(engine, Full(), 100)) for _ in range(2)]
        assert all(timing.prefill_rate(engine, session, list(range(1, 71))) > 0 for session in sessions)
        assert timing.decode_milliseconds(engine, sessions, 5) > 0
        assert [engine.session_info(session).history_length for session in sessions] == [76, 76]


@pytest.mark.parametrize("strategy", ["full", "sink_window:window=16", "gather:block=16,window=16"])
def test_an_unattended_prefill_reads_nothing_and_later_steps_read_as_ever(strategy: str) -> None:
    """Its entries are others, but there are as many, and sessions that are prefilled afterwards are as those before."""
    ids = [(7 * place) % VOCABULARY for place in range(70)]
    reads: list[int] = []

    def noted(kind: type[Any]) -> Any:
        original = kind.read

        def read(view: Any, layer: int, *given: Any) -> Any:
            reads.append(layer)
            return original(view, layer, *given)

        return read

    def history(engine: Engine, *, is_attended: bool) -> tuple[int, list[int], int]:
        """Bytes, the next tokens, and how often a view was read while the history was computed."""
        with opened(engine, parse_strategy(strategy), 100) as session:
            reads.clear()
            with ExitStack() if is_attended else timing.unattended():
                timing.prefill_rate(engine, session, ids)
            in_prefill = len(reads)
            (watch,) = timing.start(engine, [session], tokens=6)
            watch.wait()
            assert len(reads) > in_prefill, "its steps attend"
            return engine.session_info(session).kv_live_bytes, watch.token_ids, in_prefill

    with ExitStack() as stack:
        for kind in (CausalView, ChunkView, DenseView, GatherView):
            stack.enter_context(patch.object(kind, "read", noted(kind)))
        engine = stack.enter_context(tiny_engine())
        before = history(engine, is_attended=True)
        quick = history(engine, is_attended=False)
        after = history(engine, is_attended=True)
    assert before == after
    assert before[2] and not quick[2]
    assert quick[0] == before[0] and quick[1] != before[1]


def test_an_unattended_prefill_restores_nothing() -> None:
    ids = [(7 * place) % VOCABULARY for place in range(120)]
    strategy = parse_strategy(f"restored:window=16,source=latent,mode=stream,bytes_per_token={LATENT_BYTES}")
    asked: list[int] = []
    original = StreamedEntries.chunk

    def chunk(entries: Any, layer: int, first: int, last: int) -> Any:
        asked.append(layer)
        return original(entries, layer, first, last)

    with tiny_engine() as engine, patch.object(StreamedEntries, "chunk", chunk):
        for is_attended in (True, False):
            with opened(engine, strategy, 160) as session:
                with ExitStack() if is_attended else timing.unattended():
                    timing.prefill_rate(engine, session, ids)
                assert bool(asked) is is_attended
                asked.clear()
                assert timing.decode_milliseconds(engine, [session], 4) > 0
                assert asked, "its steps restore"
                asked.clear()


def test_strategies_are_run_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(engine: Engine, strategy: KVStrategy, *rest: Any) -> Any:
        ran.append(str(strategy))
        return timing.run(engine, strategy, *rest)

    monkeypatch.setattr(cost, "run", noted)
    others = [parse_strategy("sink_window:window=16"), parse_strategy("sink_window:window=32")]
    ids = [(7 * place) % VOCABULARY for place in range(60)]
    with tiny_engine() as engine:
        cost.measure(engine, others, ids, lengths=[30], rounds=2, tokens=3)
    assert [ran.index(name) for name in ran[:3]] == [0, 1, 2]
    first, second, third = (ran[start : start + 3] for start in (0, 3, 6))
    assert second == [*first[1:], first[0]]
    assert third == [*second[1:], second[0]]
