"""`kakeya audit`: what keeps the promise passes, and what breaks it is found and named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from inference_engine.cli.audit import compare
from inference_engine.cli.main import main
from inference_engine.engine import Engine
from inference_engine.types import Mode
from kakeya import AsyncClient
from tests.further import further
from tests.server_thread import server_thread
from tests.tiny_native import served_engine

FEW = ("--histories", "2", "--splits", "4", "--turns", "2", "--turn-tokens", "40", "--generate-tokens", "4")
TURN = [(7, -0.5), (8, -1.5), (9, -2.5)]
CUT = [(4, 6)]


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("full", Mode.FIXED_SHAPE),
        ("sink_window:sink=4,window=16", Mode.BATCHED),
        further("full", Mode.BATCHED),
        further("sink_window:sink=4,window=16", Mode.FIXED_SHAPE),
    ],
)
def test_a_server_whose_tokens_depend_on_the_history_alone_passes(
    mode: Mode, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_engine(mode=mode) as engine, server_thread(engine) as target:
        assert main(["audit", "--target", target, "--strategy", strategy, *FEW]) == 0
    # Of each history one stream in one piece and four in pieces, each with two turns of four tokens.
    assert "10 streams of 2 histories, 80 tokens: 0 violations" in capsys.readouterr().out


def test_more_tokens_than_a_server_generates_at_once_are_refused_before_a_session_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AsyncClient, "create_session", Mock(side_effect=AssertionError("a session was opened")))
    with served_engine(max_generate_tokens=3) as engine, server_thread(engine) as target:
        assert main(["audit", "--target", target, *FEW]) == 1
    assert "--generate-tokens 4 is more than the server's limit of 3" in capsys.readouterr().err


def test_a_server_that_cares_how_ids_came_is_found_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = Engine.append_once

    def short_ones_backwards(engine: Engine, session_id: str, token_ids: Sequence[int], **options: Any) -> Any:
        ids = list(token_ids)
        return append(engine, session_id, ids[::-1] if len(ids) < 8 else ids, **options)

    monkeypatch.setattr(Engine, "append_once", short_ones_backwards)
    with served_engine() as engine, server_thread(engine) as target:
        assert main(["audit", "--target", target, *FEW]) == 1
    assert "INV-3 violated: history 0, turn " in capsys.readouterr().out


def test_log_probabilities_count_where_bits_are_promised_only() -> None:
    rounded = [(7, -0.5), (8, -1.5000001), (9, -2.5)]
    assert compare([TURN], [rounded], CUT, history=0, is_exact=False) is None
    found = compare([TURN], [rounded], CUT, history=0, is_exact=True)
    assert found is not None
    assert (found.turn, found.token, found.is_near_tie) == (0, 1, False)


@pytest.mark.parametrize(("logprob", "is_near_tie"), [(-1.5003, True), (-1.6, False)])
def test_another_token_that_was_as_likely_is_a_near_tie(logprob: float, is_near_tie: bool) -> None:
    other = [(7, -0.5), (5, logprob), (1, -3.0)]
    found = compare([TURN], [other], CUT, history=3, is_exact=False)
    assert found is not None
    assert found.is_near_tie is is_near_tie
    assert str(found) == f"history 3, turn 0, token 1: 8 (-1.5) in one piece, 5 ({logprob}) when appended in 4, 6"
