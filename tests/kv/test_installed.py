"""What other installed packages add by their entry points: known by name, refused by name, never in another's place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from inference_engine.errors import ConfigError, InvalidArgument
from inference_engine.kv.compressors import COMPRESSORS
from inference_engine.kv.strategies import STRATEGIES, check_registry, make_strategy, parse_strategy, strategy_names
from inference_engine.kv.strategies.full import Full
from inference_engine.server.convert import strategy_from_wire, strategy_to_wire
from kakeya.v1 import runtime_pb2 as pb
from tests.tiny import tiny_engine

KEEPS_LAST = """
    from dataclasses import dataclass
    from typing import ClassVar
    from inference_engine.kv.layout import LayerRule
    from inference_engine.kv.strategy import KVStrategy, require

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Last(KVStrategy):
        name: ClassVar[str] = "{name}"
        window: int = 32

        def __post_init__(self):
            require(self.window >= 1, "window", f"must be ≥ 1, got {{self.window}}")

        def rule(self, layer, geometry):
            return LayerRule(window=self.window)
"""


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(package, name, code): a package that adds a strategy, as pip leaves it."""
    for registry in (STRATEGIES, COMPRESSORS):
        vars(registry).pop("_found", None)
    monkeypatch.syspath_prepend(tmp_path)

    def install(package: str, name: str, code: str, *, group: str = "strategies", thing: str = "Last") -> None:
        (tmp_path / f"{package}.py").write_text(dedent(code), encoding="utf-8")
        facts = tmp_path / f"{package}-1.2.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n", encoding="utf-8")
        (facts / "entry_points.txt").write_text(f"[kakeya.{group}]\n{name} = {package}:{thing}\n", encoding="utf-8")

    yield install
    for registry in (STRATEGIES, COMPRESSORS):
        vars(registry).pop("_found", None)
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_a_strategy_of_another_package_is_served_like_our_own(install: Install) -> None:
    install("other_last", "other_last", KEEPS_LAST.format(name="other_last"))
    strategy = parse_strategy("other_last:window=7")
    assert STRATEGIES.package("other_last") == "other_last 1.2"
    message = strategy_to_wire(strategy)
    assert message == pb.Strategy(named=pb.NamedStrategy(name="other_last", options={"window": "7"}))
    assert strategy_from_wire(message) == strategy
    with tiny_engine() as engine:
        assert "other_last" in engine.info().strategies
        opened = engine.create_session(strategy=strategy)
        assert opened.strategy == strategy
    with pytest.raises(InvalidArgument, match="must be ≥ 1, got 0"):
        make_strategy("other_last", window=0)


def test_a_package_that_cannot_be_imported_is_named_and_the_others_are_served(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("halved", "halved", "import not_there_at_all")
    install("whole", "whole", KEEPS_LAST.format(name="whole"))
    check_registry()
    assert "whole" in strategy_names() and "halved" not in strategy_names()
    why = "strategy halved of the installed package halved 1.2 cannot be used: ModuleNotFoundError: No module named"
    with pytest.raises(InvalidArgument, match=why):
        make_strategy("halved")
    assert why in caplog.text


def test_what_is_no_strategy_is_not_taken_for_one(install: Install) -> None:
    install("number", "number", "Last = 7")
    with pytest.raises(InvalidArgument, match=r"number 1\.2 cannot be used: TypeError: 7 is no strategy"):
        make_strategy("number")


@pytest.mark.parametrize("name", ["full", "twice"])
def test_a_name_that_is_there_twice_stops_the_start(install: Install, name: str) -> None:
    for package in ("one_package", "second_package"):
        install(package, name, KEEPS_LAST.format(name=name))
    with pytest.raises(ConfigError, match=rf"strategy {name} is in .* and in \w+ 1.2; uninstall one of them"):
        check_registry()
    assert name == "twice" or STRATEGIES.get("full") is Full


def test_codecs_come_alone_or_several_at_once(install: Install) -> None:
    codecs = """
        from dataclasses import dataclass
        from inference_engine.kv.compressors.integer import Integer
        Last = Integer(bits=2), Integer(bits=1)
    """
    install("few_bits", "few_bits", codecs, group="compressors")
    assert COMPRESSORS.package("int2") == COMPRESSORS.package("int1") == "few_bits 1.2"
    assert str(parse_strategy("full:codec=int2")) == "full:codec=int2,exact_window=128"
