"""The wire and the engine speak of the same things, without a line of code per strategy."""

from dataclasses import dataclass
from typing import Any

import pytest

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.strategies import make_strategy, strategy_kinds, strategy_names
from inference_engine.server.convert import (
    check_strategies,
    framer_for,
    in_strategy,
    params_from_wire,
    strategy_from_wire,
    strategy_to_wire,
)
from inference_engine.types import Finished, Sampling, StopReason
from kakeya.v1 import runtime_pb2 as pb
from tests.laws.variants import all_strategies
from tests.newer_strategy import NewerWindow, registered

ARMS: dict[str, Any] = {arm.name: arm.message_type for arm in pb.Strategy.DESCRIPTOR.oneofs_by_name["kind"].fields}

FINISHED = Finished(
    stop_reason=StopReason.EOS,
    generated_tokens=1,
    history_length=31,
    prefill_seconds=0.0,
    total_seconds=0.0,
    seed=0,
    prefilled_tokens=30,
    cached_tokens=0,
    attended_positions=30,
    evicted_positions=0,
    restored_positions=20,
    drafted_tokens=12,
    accepted_tokens=7,
    is_degraded=True,
)


def named(name: str, **options: str) -> pb.Strategy:
    return pb.Strategy(named=pb.NamedStrategy(name=name, options=options))


def test_the_wire_has_one_arm_for_each_strategy() -> None:
    assert set(ARMS) - {"named"} == set(strategy_names())


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


def test_numbers_texts_and_lists_of_numbers_are_options() -> None:
    layers = pb.Strategy(layer_window=pb.LayerWindowStrategy(full_layers=[5, 2], window=9))
    assert strategy_from_wire(layers) == make_strategy("layer_window", full_layers=(5, 2), window=9)
    source = pb.Strategy(restored=pb.RestoredStrategy(source="recompute"))
    assert strategy_from_wire(source) == make_strategy("restored", source="recompute")


def test_an_option_that_was_not_given_stays_absent() -> None:
    arm = strategy_to_wire(make_strategy("sink_window")).sink_window
    assert (arm.HasField("codec"), arm.HasField("exact_window"), list(arm.exact_layers)) == (False, False, [])
    assert (arm.sink, arm.window) == (4, 1024)


def test_an_arm_that_this_server_has_no_strategy_for_is_refused_by_name() -> None:
    refused = pytest.raises(InvalidArgument, match=r"in the package kakeya-restored, .* has full, sink_window")
    with registered(without="restored"), refused as refusal:
        strategy_from_wire(pb.Strategy(restored=pb.RestoredStrategy()))
    assert refusal.value.field == "strategy"


def test_a_wrong_list_is_refused_by_the_path_of_its_field(subtests: pytest.Subtests) -> None:
    for layers in ([], [3, 3]):
        with subtests.test(str(layers)):
            with pytest.raises(InvalidArgument) as refusal:
                strategy_from_wire(pb.Strategy(layer_window=pb.LayerWindowStrategy(full_layers=layers)))
            assert refusal.value.field == "strategy.layer_window.full_layers"


def test_an_option_that_is_zero_is_not_an_option_that_is_absent() -> None:
    message = pb.Strategy(sink_window=pb.SinkWindowStrategy(sink=0))
    assert strategy_from_wire(message) == make_strategy("sink_window", sink=0)


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


REFUSED_BY_NAME: list[tuple[pb.Strategy, str, str]] = [
    (pb.Strategy(named=pb.NamedStrategy()), "strategy", "there is no strategy ''; there are full, sink_window"),
    (named("gone"), "strategy", "there is no strategy 'gone'; there are full, sink_window"),
    (named("named"), "strategy", "there is no strategy 'named'"),
    (named("mac", rung="9"), "strategy", "mac has no option 'rung'; it has ring, band"),
    (named("mac", ring="x"), "strategy.named.options.ring", "a whole number, got 'x'"),
    (named("mac", ring="0"), "strategy.named.options.ring", "must be"),
    # What fits no field of the strategy's own arm is refused before a session is made that cannot be reported.
    (named("mac", ring=str(2**32)), "strategy.named.options.ring", "out of the range"),
    (named("mac", ring="9" * 1000), "strategy.named.options.ring", "out of the range"),
    (named("restored", source="latent", resident_latent_bytes=str(2**64)), "strategy.named.options.resident", ""),
]


def test_what_is_asked_for_by_name_is_refused_by_its_path(subtests: pytest.Subtests) -> None:
    for given, field, said in REFUSED_BY_NAME:
        with subtests.test(str(given)):
            with pytest.raises(InvalidArgument) as refusal:
                strategy_from_wire(given)
            assert refusal.value.field.startswith(field)
            assert said in refusal.value.description


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
    with pytest.raises(ConfigError, match=r"strategy mac:ring=4294967296.*out of the range"):
        check_strategies(make_strategy("mac", ring=2**32))


def test_the_arm_for_all_strategies_is_no_strategys_own() -> None:
    with registered(named=NewerWindow), pytest.raises(ConfigError, match="cannot be named named"):
        check_strategies(make_strategy("full"))


def test_an_error_about_something_else_keeps_its_field() -> None:
    error = InvalidArgument("eos_token_ids", "too many")
    for given in (pb.Strategy(sink_window=pb.SinkWindowStrategy()), named("sink_window"), named("gone")):
        assert in_strategy(error, given) is error


def test_a_renamed_error_keeps_what_else_it_says() -> None:
    given = pb.Strategy(sink_window=pb.SinkWindowStrategy())
    error = in_strategy(InvalidArgument("window", "too wide", trained_positions=512), given)
    assert error.field == error.metadata["field"] == "strategy.sink_window.window"
    assert error.metadata["trained_positions"] == "512"


def test_done_says_how_many_positions_were_read_in_another_form() -> None:
    frame = framer_for(pb.GenerateRequest())(FINISHED)
    assert frame is not None
    assert (frame.done.attended_position_count, frame.done.restored_position_count) == (30, 20)


def test_done_says_what_became_of_drafts() -> None:
    frame = framer_for(pb.GenerateRequest())(FINISHED)
    assert frame is not None
    assert (frame.done.drafted_token_count, frame.done.accepted_token_count, frame.done.degraded) == (12, 7, True)


def test_drafting_is_on_unless_it_is_switched_off() -> None:
    assert params_from_wire(pb.GenerateRequest(max_tokens=1)).drafting
    assert not params_from_wire(pb.GenerateRequest(max_tokens=1, drafting=False)).drafting


def test_a_request_that_says_nothing_is_greedy_with_everything_off() -> None:
    assert params_from_wire(pb.GenerateRequest(max_tokens=1)).sampling == Sampling()


def test_zero_is_reported_from_absent_where_they_differ() -> None:
    assert params_from_wire(pb.GenerateRequest(max_tokens=1, seed=0)).sampling.seed == 0
    assert params_from_wire(pb.GenerateRequest(max_tokens=1, expected_history_length=0)).expected_history_length == 0
    zero: Any = 0.0
    for field in ("top_p", "repetition_penalty"):
        with pytest.raises(InvalidArgument, match=field):
            params_from_wire(pb.GenerateRequest(max_tokens=1, **{field: zero}))
