"""Contestants take turns, so that neither side of a comparison always comes first."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from inference_engine.engine import Engine
from inference_engine.kv.parts.block_index import GatherView
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.views import CausalView, ChunkView, DenseView
from laboratory.evaluation import timing
from laboratory.evaluation.sessions import opened, turned
from tests.tiny import VOCABULARY, tiny_engine


@pytest.mark.parametrize("count", [1, 2, 5])
def test_in_as_many_rounds_as_names_each_is_once_at_every_place(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = [turned(names, number) for number in range(3, 3 + count)]
    assert all(sorted(one) == names for one in rounds)
    assert all(len({one[place] for one in rounds}) == count for place in range(count))


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
