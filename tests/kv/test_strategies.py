"""Strategy specs: text form, options, limits."""

from __future__ import annotations

import pytest

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.strategies import make_strategy, parse_strategy
from inference_engine.kv.strategy import KVStrategy
from tests.laws.variants import all_strategies, each_strategy

LAYER = LayerGeometry(query_heads=4, kv_heads=2, head_dim=16)
GEOMETRY = Geometry(layers=(LAYER,) * 3, itemsize=4, trained_positions=2048, page_tokens=16, segment_tokens=256)


@each_strategy
def test_a_strategy_survives_its_text_form(strategy: KVStrategy) -> None:
    assert parse_strategy(str(strategy)) == strategy
    assert make_strategy(strategy.name, **strategy.options()) == strategy


def test_defaults_are_filled_in() -> None:
    assert parse_strategy("sink_window:window=99").options() == {"sink": 4, "window": 99}


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("nothing", {}, "strategy"),
        ("full", {"window": 3}, "strategy"),
        ("sink_window", {"window": 0}, "window"),
        ("sink_window", {"sink": -1}, "sink"),
    ],
)
def test_a_wrong_option_is_refused_by_name(name: str, options: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        make_strategy(name, **options)
    assert refusal.value.field == field


def test_a_window_the_model_was_not_trained_for_is_refused_before_anything_is_allocated() -> None:
    make_strategy("sink_window", sink=4, window=2048 - 256 - 4).check(GEOMETRY)
    with pytest.raises(InvalidArgument, match="2048") as refusal:
        make_strategy("sink_window", sink=4, window=2048 - 256 - 3).check(GEOMETRY)
    assert refusal.value.field == "window"


@pytest.mark.parametrize("text", ["sink_window:window", "sink_window:window=x", "gone", "full:sink=1"])
def test_text_that_names_no_strategy_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="strategy"):
        parse_strategy(text)


def test_bytes_of_sink_window_do_not_grow_with_the_limit() -> None:
    spec = make_strategy("sink_window", sink=4, window=512)
    endless = spec.bound(GEOMETRY, None)
    assert spec.bound(GEOMETRY, 100_000) == endless
    assert spec.bound(GEOMETRY, 100).peak_bytes < endless.peak_bytes


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 2048])
def test_bytes_of_full_are_rows_rounded_to_pages(limit: int) -> None:
    rows = -(-limit // 16) * 16
    assert make_strategy("full").bound(GEOMETRY, limit).peak_bytes == rows * GEOMETRY.row_bytes


def test_every_strategy_has_a_small_variant_for_the_laws() -> None:
    assert {strategy.name for strategy in all_strategies()} >= {"full", "sink_window"}
