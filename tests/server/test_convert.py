"""The wire and the engine speak of the same things, without a line of code per strategy."""

from dataclasses import dataclass
from typing import Any

import pytest

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.strategies import make_strategy, strategy_kinds, strategy_names
from inference_engine.server.convert import (
    check_strategies,
    params_from_wire,
    strategy_from_wire,
    strategy_to_wire,
)
from kakeya.v1 import runtime_pb2 as pb
from tests.laws.variants import all_strategies
from tests.newer_strategy import NewerWindow, registered

ARMS: dict[str, Any] = {arm.name: arm.message_type for arm in pb.Strategy.DESCRIPTOR.oneofs_by_name["kind"].fields}


def named(name: str, **options: str) -> pb.Strategy:
    return pb.Strategy(named=pb.NamedStrategy(name=name, options=options))


def test_the_wire_has_one_arm_for_each_strategy() -> None:
    assert set(ARMS) - {"named", "mac"} == set(strategy_names())  # that one is in a package of its own


def test_the_fields_of_an_arm_are_the_options_of_its_strategy(subtests: pytest.Subtests) -> None:
    for strategy in all_strategies():
        with subtests.test(str(strategy)):
            assert {field.name for field in ARMS[strategy.name].fields} == set(strategy.options())


def test_a_strategy_survives_the_wire(subtests: pytest.Subtests) -> None:
    for strategy in all_strategies():
        with subtests.test(str(strategy)):
            message = pb.Strategy.FromString(strategy_to_wire(strategy).SerializeToString())
            assert message.WhichOneof("kind") == strategy.name
            assert strategy_from_wire(message) == strategy


def test_an_arm_that_this_server_has_no_strategy_for_is_refused_by_name() -> None:
    refused = pytest.raises(InvalidArgument, match=r"in the package kakeya-mac, .* has full, sink_window")
    with refused as refusal:
        strategy_from_wire(pb.Strategy(mac=pb.MacStrategy(ring=9)))
    assert refusal.value.field == "strategy"


def test_a_wrong_list_is_refused_by_the_path_of_its_field(subtests: pytest.Subtests) -> None:
    for layers in ([], [3, 3]):
        with subtests.test(str(layers)):
            with pytest.raises(InvalidArgument) as refusal:
                strategy_from_wire(pb.Strategy(layer_window=pb.LayerWindowStrategy(full_layers=layers)))
            assert refusal.value.field == "strategy.layer_window.full_layers"


def test_a_strategy_can_be_asked_for_by_name_and_is_reported_by_its_own_arm(subtests: pytest.Subtests) -> None:
    for strategy in all_strategies():
        with subtests.test(str(strategy)):
            asked = strategy_from_wire(named(strategy.name, **strategy.option_texts()))
            assert asked == strategy
            assert strategy_to_wire(asked).WhichOneof("kind") == strategy.name


def test_a_strategy_without_an_arm_is_asked_for_and_reported_by_name() -> None:
    with registered(NewerWindow):
        check_strategies(make_strategy("newer_window"))
        asked = strategy_from_wire(named("newer_window", window="9", wide_layers="0+2", factor="1e-3", note="a b"))
        assert asked == NewerWindow(window=9, wide_layers=(0, 2), factor=0.001, note="a b")
        reported = pb.Strategy.FromString(strategy_to_wire(asked).SerializeToString())
        assert reported.named.name == "newer_window"
        assert dict(reported.named.options) == {
            "sink": "4", "window": "9", "factor": "0.001", "wide_layers": "0+2", "note": "a b",
        }  # fmt: skip
        assert strategy_from_wire(reported) == asked


@pytest.mark.parametrize(
    ("option", "hint", "default", "said"),
    [
        ("width", int, 3, "option width is in one of them only"),
        ("window", float, 9.0, "option window is <class 'float'>"),
        ("exact_layers", int, 3, "option exact_layers is <class 'int'>"),
        ("sink", tuple[int, ...], (), "option sink is tuple"),
    ],
)
def test_an_option_that_its_arm_cannot_carry_is_found_at_start(option: str, hint: Any, default: Any, said: str) -> None:
    kind = strategy_kinds()["sink_window"]
    other: Any = dataclass(frozen=True, kw_only=True)(
        type("Other", (kind,), {"__annotations__": {option: hint}, option: default})
    )
    check_strategies(make_strategy("full"))
    refused = pytest.raises(ConfigError, match=f"sink_window does not fit its arm.*{said}")
    with registered(sink_window=other), refused:
        check_strategies(make_strategy("full"))


def test_a_default_that_its_arm_has_no_room_for_is_found_at_start() -> None:
    with pytest.raises(ConfigError, match=r"strategy sink_window:sink=4,window=4294967296.*out of the range"):
        check_strategies(make_strategy("sink_window", window=2**32))


def test_zero_is_reported_from_absent_where_they_differ() -> None:
    assert params_from_wire(pb.GenerateRequest(max_tokens=1, seed=0)).sampling.seed == 0
    assert params_from_wire(pb.GenerateRequest(max_tokens=1, expected_history_length=0)).expected_history_length == 0
    zero: Any = 0.0
    for field in ("top_p", "repetition_penalty"):
        with pytest.raises(InvalidArgument, match=field):
            params_from_wire(pb.GenerateRequest(max_tokens=1, **{field: zero}))
