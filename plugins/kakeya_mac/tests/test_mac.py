"""`mac` as a strategy of an installed package: by its name, by its arm of the wire contract, and beside `full`."""

from __future__ import annotations

import math

import pytest

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument
from inference_engine.kv.strategies import STRATEGIES, make_strategy, parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategy import KVStrategy, Option
from inference_engine.server.convert import check_strategies, strategy_from_wire, strategy_to_wire
from inference_engine.types import Mode
from kakeya.v1 import runtime_pb2 as pb
from kakeya_mac import Mac
from tests.laws.variants import generate, same, text
from tests.tiny_native import served_engine


def test_clients_that_send_its_arm_are_served_once_it_is_installed() -> None:
    assert STRATEGIES.package("mac").startswith("kakeya-mac ")
    check_strategies(Mac())
    message = pb.Strategy(mac=pb.MacStrategy(ring=9, threshold=0.5))
    assert strategy_from_wire(message) == Mac(ring=9, threshold=0.5)
    assert strategy_to_wire(Mac(ring=9)).WhichOneof("kind") == "mac"
    named = pb.Strategy(named=pb.NamedStrategy(name="mac", options={"ring": "9", "chain_limit": "-1"}))
    assert strategy_from_wire(named) == parse_strategy("mac:ring=9,chain_limit=-1")


WRONG: list[tuple[str, Option]] = [
    ("ring", 0),
    ("band", -1),
    ("threshold", -0.1),
    ("threshold", math.nan),
    ("threshold", math.inf),
    ("chain_limit", -2),
]


def test_a_wrong_option_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for option, value in WRONG:
        with subtests.test(option, value=value):
            with pytest.raises(InvalidArgument) as refusal:
                make_strategy("mac", **{option: value})
            assert refusal.value.field == option


def opened(engine: Engine, strategy: KVStrategy, history: list[int]) -> str:
    session = engine.create_session(strategy=strategy).session_id
    engine.append(session, history)
    return session


@pytest.mark.parametrize("mode", Mode)
def test_without_matches_equals_full_and_with_them_differs(mode: Mode) -> None:
    """Degenerate and off-switch. Sums are taken in another order, so equality is up to rounding in both modes."""
    with served_engine(mode=mode) as engine:
        never, often = (make_strategy("mac", ring=30, band=6, threshold=threshold) for threshold in (0.0, 1.5))
        full = generate(engine, opened(engine, Full(), text()))
        assert same(generate(engine, opened(engine, never, text())), full, Mode.BATCHED)
        assert not same(generate(engine, opened(engine, often, text())), full, Mode.BATCHED)
