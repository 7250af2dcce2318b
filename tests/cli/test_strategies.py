"""A strategy as people write it, from the command line over the SDK to the server."""

from __future__ import annotations

import pytest

from inference_engine.cli.conversation import sdk_strategy
from inference_engine.errors import ConfigError
from inference_engine.kv.strategies import parse_strategy
from inference_engine.server.convert import strategy_from_wire
from tests.laws.variants import all_strategies
from tests.newer_strategy import NewerWindow, registered


def test_what_was_written_arrives(subtests: pytest.Subtests) -> None:
    for strategy in all_strategies():
        with subtests.test(str(strategy)):
            assert strategy_from_wire(sdk_strategy(str(strategy))._to_wire()) == strategy


def test_what_is_no_strategy_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match="full_layers"):
        sdk_strategy("layer_window:window=9")


def test_a_strategy_that_the_sdk_has_no_class_for_is_asked_for_by_name() -> None:
    with registered(NewerWindow):
        text = "newer_window:window=9,wide_layers=0+2,note=any"
        assert strategy_from_wire(sdk_strategy(text)._to_wire()) == parse_strategy(text)
