"""Strategy specs: text form, options, limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from inference_engine.cli.main import parser
from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.geometry import Geometry, LayerGeometry
from inference_engine.kv.strategies import check_registry, make_strategy, parse_strategy, read_strategy, strategy_names
from inference_engine.kv.strategy import KVStrategy, Option
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


def test_defaults_are_filled_in() -> None:
    assert parse_strategy("sink_window:window=99") == make_strategy("sink_window", sink=4, window=99)


def test_numbers_texts_and_lists_of_numbers_are_written_as_people_write_them() -> None:
    layers = make_strategy("layer_window", window=512, full_layers=(5, 11, 17))
    assert parse_strategy("layer_window:window=512,full_layers=5+11+17") == layers
    assert parse_strategy(" layer_window : window = 512 , full_layers = 5+11+17 ") == layers
    assert parse_strategy("layer_window:full_layers=5") == make_strategy("layer_window", full_layers=(5,))
    assert parse_strategy("restored:source=recompute") == make_strategy("restored", source="recompute")
    assert parse_strategy("mac:threshold=0.5,ring=9") == make_strategy("mac", threshold=0.5, ring=9)
    assert parse_strategy("mac:threshold=1,chain_limit=-1") == make_strategy("mac", threshold=1.0, chain_limit=-1)
    assert parse_strategy(str(make_strategy("mac", threshold=1e-7))) == make_strategy("mac", threshold=1e-7)


def test_options_that_were_not_given_are_not_written() -> None:
    assert str(make_strategy("sink_window")) == "sink_window:sink=4,window=1024"
    assert str(make_strategy("layer_window", full_layers=(5, 11))).endswith("full_layers=5+11")


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
    ("mac", {"ring": 0}, "ring"),
    ("mac", {"band": -1}, "band"),
    ("mac", {"threshold": -0.1}, "threshold"),
    ("mac", {"threshold": float("nan")}, "threshold"),
    ("mac", {"chain_limit": -2}, "chain_limit"),
]


def test_without_layers_a_strategy_that_can_be_typed_is_named_and_the_command_that_finds_them() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_strategy("layer_window")
    said = str(refusal.value)
    (example,) = re.findall(r"layer_window:\S+[^,\s]", said)
    assert parse_strategy(example) == make_strategy("layer_window", full_layers=(5, 11))
    (command,) = re.findall("`(kakeya [^`]+)`", said)
    assert parser().parse_args(command.split()[1:]).experiment == "backstop"


def test_an_unknown_name_is_said_once() -> None:
    with pytest.raises(ConfigError, match=r"^strategy 'nonsense': there is no strategy 'nonsense'; there are full, "):
        parse_strategy("nonsense")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sink_window,window=5", "options come after a colon, as in sink_window:window=5"),
        ("layer_window:full_layers=1,2", "'2' is no option with a value; several values of one are joined by +"),
    ],
)
def test_options_that_are_written_in_another_way_are_shown_as_they_are_written(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_strategy(text)


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


def test_layers_that_the_model_does_not_have_are_refused_with_their_count() -> None:
    make_strategy("layer_window", full_layers=(0, 2)).check(GEOMETRY)
    with pytest.raises(InvalidArgument, match="3 layers, 0 to 2; got 3, 9") as refusal:
        make_strategy("layer_window", full_layers=(0, 3, 9)).check(GEOMETRY)
    assert (refusal.value.field, refusal.value.metadata["layers"]) == ("full_layers", "3")


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


def test_a_window_leaves_layers_that_slide_by_themselves_alone() -> None:
    narrow = make_strategy("layer_window", window=9, full_layers=(0, 2))
    assert narrow.bound(SLIDING, 2000) == make_strategy("full").bound(SLIDING, 2000)


NO_STRATEGIES: list[str] = [
    "sink_window:window",
    "sink_window:window=x",
    "sink_window:window=²",
    "sink_window:window=1+2",
    "gone",
    "full:sink=1",
    "layer_window:full_layers=",
    "layer_window:full_layers=1++2",
    "layer_window:full_layers=1+x",
    "restored:source=",
    "mac:threshold=",
    "mac:threshold=near",
    "mac:threshold=nan",
    "mac:threshold=0.5+0.6",
    "mac:ring=9.0",
    "mac:ring=9,ring=9",
    "mac:circle=9",
    "restored:source=re\tcompute",
]


def test_text_that_names_no_strategy_is_a_config_error(subtests: pytest.Subtests) -> None:
    for text in NO_STRATEGIES:
        with subtests.test(text), pytest.raises(ConfigError, match="strategy"):
            parse_strategy(text)


WRONG_TEXTS: list[tuple[str, dict[str, str], str, str]] = [
    ("nothing", {}, "strategy", "there are full, sink_window"),
    ("mac", {"circle": "9"}, "strategy", "it has ring, band, threshold, chain_limit"),
    ("mac", {"ring": "9.5"}, "ring", "a whole number, got '9.5'"),
    ("mac", {"ring": "٩"}, "ring", "a whole number"),
    ("mac", {"ring": ""}, "ring", "a whole number"),
    ("mac", {"ring": "9" * 1025}, "ring", "at most 1024 characters, got 1025"),
    ("mac", {"threshold": "inf"}, "threshold", "a number"),
    ("mac", {"threshold": "1e999"}, "threshold", "finite"),
    ("layer_window", {"full_layers": "1+"}, "full_layers", "joined by"),
    ("restored", {"source": "a,b"}, "source", "without commas"),
    ("restored", {"source": " latent"}, "source", "without commas"),
    ("n" * 1000, {}, "strategy", "n…"),
]


def test_an_option_given_as_text_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for name, texts, field, said in WRONG_TEXTS:
        with subtests.test(name=name[:20], texts=str(texts)[:60]):
            with pytest.raises(InvalidArgument, match=said) as refusal:
                read_strategy(name, texts)
            assert refusal.value.field == field
            assert len(refusal.value.message) < 300


def test_numbers_are_read_in_every_form_in_which_they_are_written() -> None:
    for number in (0.5, 1e-7, 1e22, 123456.789):
        assert read_strategy("mac", {"threshold": str(number)}) == make_strategy("mac", threshold=number)


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


UNWRITABLE: list[tuple[type[KVStrategy], str]] = [
    (kind_with(bool, default=False), "bool"),
    (kind_with(dict[str, int], default=None), "dict"),
    (kind_with(int | str, default=3), "int | str"),
    (kind_with(tuple[str, ...], default=()), "tuple"),
    (kind_with(int), "no default"),
    (kind_with(int | None, default=7), "None is left out"),
    (kind_with(tuple[int, ...], default=(1,)), r"\(\) is left out"),
    (kind_with(str, default=""), "its default, ''"),
    (kind_with(float, default=float("inf")), "its default, inf"),
]


def test_an_option_that_cannot_be_written_is_found_at_start(subtests: pytest.Subtests) -> None:
    for kind, said in UNWRITABLE:
        expected = pytest.raises(ConfigError, match=f"newer_kind: option extra .*{said}")
        with subtests.test(said), registered(kind), expected:
            tiny_engine()


def test_a_name_that_cannot_be_written_is_found_at_start(subtests: pytest.Subtests) -> None:
    for name in ["newer-window", "Newer", "", "newer,window", "n" * 65, "9th"]:
        with subtests.test(name):
            kind = kind_with(int, default=1)
            kind.name = name
            with registered(kind), pytest.raises(ConfigError, match="rename it"):
                tiny_engine()


def test_bytes_of_sink_window_do_not_grow_with_the_limit() -> None:
    spec = make_strategy("sink_window", sink=4, window=512)
    endless = spec.bound(GEOMETRY, None)
    assert spec.bound(GEOMETRY, 100_000) == endless
    assert spec.bound(GEOMETRY, 100).peak_bytes < endless.peak_bytes


def test_bytes_of_full_are_entries_rounded_to_pages(subtests: pytest.Subtests) -> None:
    for limit in [1, 15, 16, 17, 2048]:
        with subtests.test(str(limit)):
            entries = -(-limit // 16) * 16
            assert make_strategy("full").bound(GEOMETRY, limit).peak_bytes == entries * GEOMETRY.entry_bytes


def test_every_strategy_has_a_small_variant_for_the_laws() -> None:
    assert {strategy.name for strategy in all_strategies()} == set(strategy_names())
