"""Strategy specs: text form, options, limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from inference_engine.cli.main import parser
from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.strategies import check_registry, make_strategy, parse_strategy
from inference_engine.kv.strategy import Option
from tests.laws.variants import all_strategies
from tests.newer_strategy import NewerWindow, registered
from tests.tiny import tiny_engine

LAYER = LayerGeometry(query_heads=4, kv_heads=2, head_dim=16)
GEOMETRY = Geometry(layers=(LAYER,) * 3, itemsize=4, trained_positions=2048, page_tokens=16, segment_tokens=256)
SLIDING = replace(GEOMETRY, layers=(LAYER, replace(LAYER, native_window=100), LAYER))


def test_a_strategy_survives_its_text_form(subtests: pytest.Subtests) -> None:
    for strategy in all_strategies():
        with subtests.test(str(strategy)):
            assert parse_strategy(str(strategy)) == strategy
            assert make_strategy(strategy.name, **strategy.options()) == strategy


def test_numbers_texts_and_lists_of_numbers_are_written_as_people_write_them() -> None:
    layers = make_strategy("layer_window", window=512, full_layers=(5, 11, 17))
    assert parse_strategy("layer_window:window=512,full_layers=5+11+17") == layers
    assert parse_strategy(" layer_window : window = 512 , full_layers = 5+11+17 ") == layers
    assert parse_strategy("layer_window:full_layers=5") == make_strategy("layer_window", full_layers=(5,))
    assert parse_strategy("restored:source=recompute") == make_strategy("restored", source="recompute")
    with registered(NewerWindow):
        assert parse_strategy("newer_window:factor=0.5,window=9") == NewerWindow(factor=0.5, window=9)
        assert parse_strategy("newer_window:factor=1") == NewerWindow(factor=1.0)
        assert parse_strategy(str(NewerWindow(factor=1e-7))) == NewerWindow(factor=1e-7)


WRONG_OPTIONS: list[tuple[str, dict[str, Option], str]] = [
    ("nothing", {}, "strategy"),
    ("full", {"window": 3}, "strategy"),
    ("sink_window", {"window": 0}, "window"),
    ("sink_window", {"sink": -1}, "sink"),
    ("layer_window", {"full_layers": (1,), "window": 0}, "window"),
    ("layer_window", {"full_layers": (1,), "sink": -1}, "sink"),
    ("layer_window", {}, "full_layers"),
    ("layer_window", {"full_layers": ()}, "full_layers"),
    ("layer_window", {"full_layers": (-1,)}, "full_layers"),
    ("layer_window", {"full_layers": (2, 0, 2)}, "full_layers"),
    ("full", {"codec": "int8", "exact_layers": (0, 1, 0)}, "exact_layers"),
    ("restored", {"source": "dreams"}, "source"),
    ("restored", {"source": "latent", "mode": "sleepy"}, "mode"),
    ("restored", {"mode": "stream"}, "mode"),
    ("restored", {"resident_latent_bytes": 4096}, "resident_latent_bytes"),
    ("restored", {"source": "latent", "resident_latent_bytes": -1}, "resident_latent_bytes"),
    ("restored", {"source": "latent", "mode": "select", "resident_latent_bytes": 9}, "resident_latent_bytes"),
    ("restored", {"mode": "select"}, "mode"),
    ("restored", {"source": "latent", "mode": "stream", "budget": 9}, "budget"),
    ("restored", {"source": "latent", "awake_bytes": 9}, "awake_bytes"),
    ("restored", {"source": "latent", "mode": "select", "run": 3}, "run"),
    ("restored", {"source": "latent", "mode": "select", "bits": 9}, "bits"),
    ("restored", {"source": "latent", "mode": "select", "awake_bytes": 0}, "awake_bytes"),
    ("restored", {"source": "latent", "mode": "select", "appended": "some"}, "appended"),
    ("restored", {"source": "latent", "mode": "stream", "appended": "select"}, "appended"),
    ("restored", {"appended": "all"}, "appended"),
]


def test_without_layers_a_strategy_that_can_be_typed_is_named_and_the_command_that_finds_them() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_strategy("layer_window")
    said = str(refusal.value)
    (example,) = re.findall(r"layer_window:\S+[^,\s]", said)
    assert parse_strategy(example) == make_strategy("layer_window", full_layers=(5, 11))
    (command,) = re.findall("`(kakeya [^`]+)`", said)
    assert parser().parse_args(command.split()[1:]).experiment == "backstop"


def test_a_wrong_option_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for name, options, field in WRONG_OPTIONS:
        with subtests.test(name=name, options=options, field=field):
            with pytest.raises(InvalidArgument) as refusal:
                make_strategy(name, **options)
            assert refusal.value.field == field


@pytest.mark.parametrize(("name", "rest"), [("sink_window", {}), ("layer_window", {"full_layers": (0,)})])
def test_a_window_the_model_was_not_trained_for_is_refused_before_anything_is_allocated(
    name: str, rest: dict[str, Option]
) -> None:
    make_strategy(name, sink=4, window=2048 - 256 - 4, **rest).check(GEOMETRY)
    with pytest.raises(InvalidArgument, match="2048") as refusal:
        make_strategy(name, sink=4, window=2048 - 256 - 3, **rest).check(GEOMETRY)
    assert refusal.value.field == "window"


def test_layers_that_slide_by_themselves_cannot_be_kept_full_and_those_that_can_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"got 1, .* kept full: 0, 2") as refusal:
        make_strategy("layer_window", full_layers=(0, 1)).check(SLIDING)
    assert refusal.value.field == "full_layers"


def test_layer_window_holds_every_entry_of_its_full_layers_and_of_the_others_what_sink_window_holds() -> None:
    full, window, layers = (
        make_strategy(name, **options).bound(GEOMETRY, 2000).peak_bytes
        for name, options in (
            ("full", {}),
            ("sink_window", {"window": 99}),
            ("layer_window", {"window": 99, "full_layers": (1,)}),
        )
    )
    assert layers == full // 3 + window // 3 * 2


def kind_with(hint: Any, **default: Any) -> Any:
    """The class of NewerWindow with one more option, `extra`; default: of that, if it has one."""
    body = {"__annotations__": {"extra": hint}, "name": "newer_kind"}
    if default:
        body["extra"] = default["default"]
    return dataclass(frozen=True, kw_only=True)(type("NewerKind", (NewerWindow,), body))


def test_what_is_registered_can_be_written_and_read_back() -> None:
    check_registry()
    with registered(NewerWindow, kind_with(int | None, default=None)):
        check_registry()
        newer = make_strategy("newer_window", factor=1.5, wide_layers=(0, 2), note="a=b:c")
        assert parse_strategy(str(newer)) == newer
        with tiny_engine(strategy="newer_window:window=16,wide_layers=2") as engine:
            assert "newer_window" in engine.info().strategies


def test_bytes_of_sink_window_do_not_grow_with_the_limit() -> None:
    spec = make_strategy("sink_window", sink=4, window=512)
    endless = spec.bound(GEOMETRY, None)
    assert spec.bound(GEOMETRY, 100_000) == endless
    assert spec.bound(GEOMETRY, 100).peak_bytes < endless.peak_bytes
