"""Idle sessions are counted in an engine of their own, and every method of continuing starts from the same history."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.types import GenerateParams, TokenCommitted
from laboratory.evaluation import waking
from laboratory.evaluation.arguments import geometry_of
from laboratory.evaluation.idle import fill
from laboratory.evaluation.models import Target, open_target
from laboratory.evaluation.record import VALUE_KEYS, write_record
from laboratory.evaluation.saved_entries import CAN_DROP, SavedEntries, filesystem
from laboratory.evaluation.timing import Watch, start
from laboratory.evaluation.waking import ANEW, KEPT, add_arguments, draw, main, wake_all
from tests.laboratory.typed import typed_for
from tests.tiny import SMALL, VOCABULARY, tiny_latent
from tests.tiny_folder import save_tiny_chat_model

TEXT = [(7 * place) % VOCABULARY for place in range(400)]
RESTORED = parse_strategy("restored:sink=2,window=16")
LATENT = parse_strategy("restored:sink=2,window=16,source=latent,bytes_per_token=40")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One that can restore from latents."""
    settings: dict[str, Any] = SMALL
    model = ModelConfig(model=str(save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))), threads=1)
    with open_target(model, EngineConfig(**settings), latent=tiny_latent()) as target:
        yield target


def test_idle_sessions_hold_what_they_were_promised_and_fill_their_pool(target: Target) -> None:
    full = fill(target, Full(), 150, sessions=5, appended=7, token_ids=TEXT)
    restored = fill(target, RESTORED, 150, sessions=5, appended=7, token_ids=TEXT)
    latent = fill(target, LATENT, 150, sessions=5, appended=7, token_ids=TEXT)
    for one in (full, restored, latent):
        assert 0 < one.reported_bytes <= one.reserved_bytes == one.bound.sustained_bytes
        assert one.reported_bytes <= one.peak_bytes <= one.bound.peak_bytes
        assert one.transient_bytes is None
    assert restored.reported_bytes < latent.reported_bytes < full.reported_bytes
    assert restored.peak_bytes > restored.bound.sustained_bytes, "active, it has regions"
    assert target.engine.info().kv_reserved_bytes == 0


@pytest.mark.parametrize("drop_cache", [False, True] if CAN_DROP else [False])
def test_entries_read_from_a_file_go_on_as_the_engine_does(target: Target, tmp_path: Path, drop_cache: bool) -> None:
    saved = SavedEntries(target.forward, geometry_of(target), TEXT[:150], room=9, path=tmp_path / "entries")
    session = target.engine.create_session(limit_tokens=200).session_id
    target.engine.append(session, TEXT[:159])
    (expected, *_) = [
        event.token_id
        for event in target.engine.generate(session, GenerateParams(max_tokens=1))
        if isinstance(event, TokenCommitted)
    ]
    target.engine.close_session(session)
    for _ in range(2):  # it is as it was, after
        token, seconds = saved.first_token(TEXT[150:159], drop_cache=drop_cache)
        assert token == expected
        assert seconds > 0
    geometry = geometry_of(target)
    entry_bytes = geometry.layers[0].entry_bytes(geometry.itemsize)
    # The layer that slides by itself holds its window's ring.
    assert 2 * 150 * entry_bytes < saved.file_bytes <= 3 * 150 * entry_bytes
    saved.close()
    assert not list(tmp_path.iterdir())


def test_entries_added_to_a_file_are_as_if_written_with_it(target: Target, tmp_path: Path) -> None:
    grown = SavedEntries(target.forward, geometry_of(target), TEXT[:100], room=60, path=tmp_path / "grown")
    grown.extend(TEXT[100:131])
    grown.extend(TEXT[131:150])
    whole = SavedEntries(target.forward, geometry_of(target), TEXT[:150], room=10, path=tmp_path / "whole")
    assert grown.file_bytes == whole.file_bytes
    assert (
        grown.first_token(TEXT[150:159], drop_cache=False)[0] == whole.first_token(TEXT[150:159], drop_cache=False)[0]
    )


def test_a_session_that_is_given_everything_again_gets_what_full_holds(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round all of them give the token that full's session gives, from as long a history."""
    started: list[tuple[str, Watch]] = []
    lengths: list[int] = []
    saved_say: list[int] = []
    first_token = SavedEntries.first_token

    def starting(engine: Any, sessions: Any, **rest: Any) -> list[Watch]:
        lengths.append(engine.session_info(sessions[0]).history_length + 1)  # with the token it will give
        watches = start(engine, sessions, **rest)
        started.append((sessions[0], watches[0]))
        return watches

    def reading(saved: SavedEntries, ids: Any, **rest: Any) -> tuple[int, float]:
        reported = first_token(saved, ids, **rest)
        saved_say.append(reported[0])
        return reported

    monkeypatch.setattr(waking, "start", starting)
    monkeypatch.setattr(SavedEntries, "first_token", reading)
    wake_all(target, {KEPT: Full()}, TEXT, 90, rounds=3, appended=5, folder=tmp_path)
    kept = started[0][0]
    session_says = [watch.token_ids[0] for session, watch in started if session == kept]
    anew = [watch.token_ids[0] for session, watch in started if session != kept]
    assert session_says[1:] == anew
    methods = 2 if CAN_DROP else 1
    assert saved_say == [token for token in anew for _ in range(methods)]
    assert sorted(lengths) == [91, 97, 97, 103, 103, 109, 109, 115, 115]


def arguments(*typed: str) -> argparse.Namespace:
    return typed_for(add_arguments, *typed)


def test_a_run_leaves_a_record_and_images(tiny_target: Target, tmp_path: Path) -> None:
    typed = ("--strategies", str(RESTORED), str(LATENT), "--lengths", "90", "203", "--sessions=2", "--rounds=2")
    payload = main(arguments(*typed, "--appended=5", "--kind=looped", "--disk", str(tmp_path)), tiny_target)
    path = write_record("waking", {"command": "kakeya evaluate waking", **payload}, results_dir=tmp_path)
    draw(payload, path.parent)
    assert {image.name for image in path.parent.glob("*.svg")} == {"waking.svg", "idle.svg"}
    reported = payload["values"]
    assert all(set(VALUE_KEYS) <= value.keys() for value in reported.values())
    assert reported[f"first token ÷ ({ANEW}), {RESTORED}, at 203"]["count"] == 2
    assert payload["config"]["saved_on"] == filesystem(tmp_path)
    # This engine has no latent codec: the strategy that needs one is reported as left out.
    assert {one["cell"] for one in payload["tables"]["left out"]} == {f"{LATENT}, at 90", f"{LATENT}, at 203"}
    assert {line["strategy"] for line in payload["tables"]["idle"]} == {"full", str(RESTORED)}
