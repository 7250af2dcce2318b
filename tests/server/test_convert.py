"""The wire and the engine speak of the same things, without a line of code per strategy."""

from typing import Any

import pytest

from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import make_strategy, strategy_names
from inference_engine.server.convert import in_strategy, params_from_wire, strategy_from_wire, strategy_to_wire
from inference_engine.types import Sampling
from kakeya.v1 import runtime_pb2 as pb

ARMS: dict[str, Any] = {arm.name: arm.message_type for arm in pb.Strategy.DESCRIPTOR.oneofs_by_name["kind"].fields}


def test_the_wire_has_one_arm_for_each_strategy() -> None:
    assert set(ARMS) == set(strategy_names())


@pytest.mark.parametrize("name", strategy_names())
def test_the_fields_of_an_arm_are_the_options_of_its_strategy(name: str) -> None:
    assert {field.name for field in ARMS[name].fields} == set(make_strategy(name).options())


@pytest.mark.parametrize("name", strategy_names())
def test_a_strategy_survives_the_wire(name: str) -> None:
    changed = {option: value + 1 for option, value in make_strategy(name).options().items()}
    for strategy in (make_strategy(name), make_strategy(name, **changed)):
        message = pb.Strategy.FromString(strategy_to_wire(strategy).SerializeToString())
        assert message.WhichOneof("kind") == name
        assert strategy_from_wire(message) == strategy


def test_an_option_that_is_zero_is_not_an_option_that_is_absent() -> None:
    message = pb.Strategy(sink_window=pb.SinkWindowStrategy(sink=0))
    assert strategy_from_wire(message) == make_strategy("sink_window", sink=0)


def test_an_error_about_something_else_keeps_its_field() -> None:
    error = InvalidArgument("eos_token_ids", "too many")
    assert in_strategy(error, "sink_window") is error


def test_a_renamed_error_keeps_what_else_it_says() -> None:
    error = in_strategy(InvalidArgument("window", "too wide", trained_positions=512), "sink_window")
    assert error.field == error.metadata["field"] == "strategy.sink_window.window"
    assert error.metadata["trained_positions"] == "512"


def test_a_request_that_says_nothing_is_greedy_with_everything_off() -> None:
    assert params_from_wire(pb.GenerateRequest(max_tokens=1)).sampling == Sampling()


def test_zero_is_told_from_absent_where_they_differ() -> None:
    assert params_from_wire(pb.GenerateRequest(max_tokens=1, seed=0)).sampling.seed == 0
    assert params_from_wire(pb.GenerateRequest(max_tokens=1, expected_history_length=0)).expected_history_length == 0
    zero: Any = 0.0
    for field in ("top_p", "repetition_penalty"):
        with pytest.raises(InvalidArgument, match=field):
            params_from_wire(pb.GenerateRequest(max_tokens=1, **{field: zero}))
