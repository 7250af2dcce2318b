"""Everything is given as many bytes as the latent takes and no more, and is measured on the same texts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategy import KVStrategy
from laboratory.evaluation import fidelity
from laboratory.evaluation.interrupts import ended_as_interrupted
from laboratory.evaluation.models import Target, open_target
from laboratory.evaluation.record import VALUE_KEYS, write_record
from laboratory.evaluation.restoration import (
    FAMILIES,
    FULL,
    LATENT,
    Matched,
    add_arguments,
    draw,
    main,
    match,
    spec,
)
from tests.laboratory.typed import typed_for
from tests.tiny import SMALL, tiny_latent
from tests.tiny_folder import save_tiny_chat_model

WINDOW = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """TinyModel with a latent."""
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))
    settings: dict[str, Any] = SMALL
    with open_target(
        ModelConfig(model=str(folder), threads=1), EngineConfig(**settings), latent=tiny_latent()
    ) as opened:
        yield opened


def large_model() -> Geometry:
    """The size of a real one: bytes are worked out, nothing runs."""
    layer = LayerGeometry(query_heads=9, kv_heads=3, head_dim=64)
    return Geometry(layers=(layer,) * 30, itemsize=2, trained_positions=8192, segment_tokens=64)


def matched(length: int, rate: int = 1152) -> Matched:
    return match(large_model(), list(FAMILIES), length=length, rate=rate, window=64)


def sustained(strategy: KVStrategy, length: int) -> int:
    return strategy.bound(large_model(), length).sustained_bytes


def size(strategy: KVStrategy) -> int:
    """What its family spends bytes on."""
    found = strategy.options()["resident_tokens" if strategy.name == "tiered" else "window"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("length", [1001, 4096, 8000])
def test_every_family_gets_what_the_latent_holds_and_would_pass_it_with_one_more_segment(length: int) -> None:
    found = matched(length)
    assert set(found.strategies) | set(found.left_out) == {LATENT, *FAMILIES}
    assert found.allowed_bytes == sustained(found.strategies[LATENT], length)
    for family, strategy in found.strategies.items():
        assert sustained(strategy, length) <= found.allowed_bytes
        if family == LATENT:
            continue
        larger = parse_strategy(spec(family, size(strategy) + 64, window=64))
        assert sustained(larger, length) > found.allowed_bytes, family


def run(target: Target, *typed: str) -> dict[str, Any]:
    return main(typed_for(add_arguments, *typed), target)


def test_a_record_says_bytes_and_both_kinds_of_failure_side_by_side(target: Target, tmp_path: Path) -> None:
    words = ("--lengths", "301", "--kinds", "prose", "--rates", "120", "--window", str(WINDOW))
    asked = ("--task", "single", "multi", "--trials", "2")
    payload = run(target, *words, "--families", "window", "recompute", "--count", "9", "--texts", "1", *asked)
    lines = {line["family"]: line for line in payload["tables"]["equal bytes"]}
    assert set(lines) == {FULL, LATENT, "window", "recompute"}
    for family, line in lines.items():
        assert line["needles, single"].endswith(" of 2") and line["needles, multi"].endswith(" of 2")
        if family != FULL:
            assert line["bytes held"] <= line["bytes allowed"] < lines[FULL]["bytes held"]
    assert abs(lines["recompute"]["kl"]) < 1e-4 < lines["window"]["kl"]
    assert 0 < lines[LATENT]["kl"] < lines["window"]["kl"]
    assert all(set(VALUE_KEYS) <= value.keys() for value in payload["values"].values())
    assert set(payload["headlines"]) <= payload["values"].keys()
    path = write_record("restoration", {"command": "test", **payload}, results_dir=tmp_path)
    draw(payload, path.parent)
    assert (path.parent / "kl_prose_120.svg").stat().st_size > 0


@contextmanager
def python_handles(number: signal.Signals) -> Iterator[None]:
    """As in a terminal: whatever is started in a shell's background ignores SIGINT, and so do its children."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_what_is_ended_early_keeps_the_lengths_that_were_done(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    measure = fidelity.measure

    def measured(*arguments: Any, **options: Any) -> Any:
        found = measure(*arguments, **options)
        if len(arguments[2][0].prefix) == 150:
            signal.raise_signal(ending)
        return found

    monkeypatch.setattr(fidelity, "measure", measured)
    words = (
        "--kinds", "code", "--rates", "120", "--window", str(WINDOW), "--count", "5", "--texts", "1", "--trials", "0",
        "--families", "window",
    )  # fmt: skip
    with python_handles(signal.SIGINT), ended_as_interrupted():
        payload = run(target, "--lengths", "130", "150", "170", *words)
        assert payload["config"]["lengths"] == [130]
        assert {line["length"] for line in payload["tables"]["equal bytes"]} == {130}
        assert {line["length"] for line in payload["tables"]["left out"]} == {150, 170}
        write_record("restoration", {"command": "test", **payload}, results_dir=tmp_path)
        with pytest.raises(KeyboardInterrupt):
            run(target, "--lengths", "150", *words)
