"""Strategies as values: what they say on the wire, what they refuse, how they read."""

from __future__ import annotations

import copy
import pickle
import typing
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

import kakeya
from kakeya._strategies import from_wire
from kakeya.v1 import runtime_pb2 as pb

ARMS: dict[str, Any] = {
    arm.name: arm.message_type
    for arm in pb.Strategy.DESCRIPTOR.oneofs_by_name["kind"].fields
    if arm.name != "named"  # the options of which are the server's to know
}
CODING: dict[str, Any] = {"codec": "int8", "exact_window": 64, "exact_layers": (0, 29)}
EVERY_OPTION = [
    kakeya.Full(**CODING),
    kakeya.SinkWindow(sink=0, window=9, **CODING),
    kakeya.LayerWindow(full_layers=(11, 5), sink=0, window=9, **CODING),
    kakeya.Restored(
        sink=0,
        window=9,
        source="latent",
        bytes_per_token=192,
        mode="select",
        resident_latent_bytes=2**40,
        budget=784,
        rank=16,
        bits=3,
        run=4,
        awake_bytes=2**40,
        appended="select",
    ),
    kakeya.Gather(budget=300, block=16, sink=0, window=256, scorer="bounds", rank=8, bits=4, run=1),
    kakeya.Tiered(budget=300, block=16, sink=0, window=256, resident_tokens=512),
    kakeya.Mac(ring=128, band=0, threshold=0.55, chain_limit=-1),
]
NAMED = kakeya.Named("newer", ring=128, threshold=1e-7, full_layers=(5, 11), source="latent", limit=None)
FEWEST_OPTIONS = [
    kakeya.Full(),
    kakeya.SinkWindow(),
    kakeya.LayerWindow(full_layers=(5,)),
    kakeya.Restored(),
    kakeya.Gather(),
    kakeya.Tiered(),
    kakeya.Mac(),
]


def test_a_strategy_survives_the_wire(subtests: pytest.Subtests) -> None:
    for strategy in [*EVERY_OPTION, *FEWEST_OPTIONS, NAMED, kakeya.Named("newer")]:
        with subtests.test(repr(strategy)):
            message = pb.Strategy.FromString(strategy._to_wire().SerializeToString())
            assert from_wire(message) == strategy


def test_there_is_a_value_for_every_arm_with_an_option_for_every_field() -> None:
    values = {str(strategy._to_wire().WhichOneof("kind")): strategy for strategy in EVERY_OPTION}
    assert set(values) == set(ARMS)
    for name, arm in ARMS.items():
        sent = getattr(values[name]._to_wire(), name)
        assert {field.name for field, _ in sent.ListFields()} == {field.name for field in arm.fields}
        assert {field.name for field in fields(typing.cast(Any, values[name]))} == {field.name for field in arm.fields}


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (kakeya.SinkWindow, {"window": 0}, "window"),
    (kakeya.SinkWindow, {"sink": -1}, "sink"),
    (kakeya.SinkWindow, {"window": 2.0}, "window"),
    (kakeya.SinkWindow, {"window": 2**32}, "window"),
    (kakeya.LayerWindow, {"full_layers": [5, 11]}, "full_layers"),
    (kakeya.LayerWindow, {"full_layers": 5}, "full_layers"),
    (kakeya.LayerWindow, {"full_layers": (5, True)}, "full_layers[1]"),
    (kakeya.LayerWindow, {"full_layers": (-1,)}, "full_layers[0]"),
    (kakeya.Restored, {"source": ""}, "source"),
    (kakeya.Restored, {"bytes_per_token": 0}, "bytes_per_token"),
    (kakeya.Restored, {"mode": ""}, "mode"),
    (kakeya.Restored, {"resident_latent_bytes": -1}, "resident_latent_bytes"),
    (kakeya.Restored, {"resident_latent_bytes": 2**63}, "resident_latent_bytes"),
    (kakeya.Restored, {"awake_bytes": 0}, "awake_bytes"),
    (kakeya.Restored, {"appended": ""}, "appended"),
    (kakeya.Restored, {"budget": 0}, "budget"),
    (kakeya.Gather, {"budget": 0}, "budget"),
    (kakeya.Gather, {"block": 1.5}, "block"),
    (kakeya.Tiered, {"block": 0}, "block"),
    (kakeya.Tiered, {"resident_tokens": 0}, "resident_tokens"),
    (kakeya.Mac, {"ring": 0}, "ring"),
    (kakeya.Mac, {"band": -1}, "band"),
    (kakeya.Mac, {"threshold": -0.1}, "threshold"),
    (kakeya.Mac, {"threshold": float("nan")}, "threshold"),
    (kakeya.Mac, {"threshold": True}, "threshold"),
    (kakeya.Mac, {"chain_limit": -2}, "chain_limit"),
    (kakeya.Mac, {"chain_limit": 2**31}, "chain_limit"),
    (kakeya.Full, {"codec": 8}, "codec"),
    (kakeya.Full, {"codec": "int8", "exact_window": 0}, "exact_window"),
    (kakeya.Full, {"codec": "int8", "exact_layers": (2**32,)}, "exact_layers[0]"),
]


def test_what_would_not_survive_the_wire_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for kind, options, named in REFUSED:
        with subtests.test(kind=kind.__name__, options=options):
            with pytest.raises(kakeya.InvalidArgument) as refusal:
                kind(**options)
            assert refusal.value.field == named


def test_options_of_a_named_strategy_are_kept_as_the_server_reads_them() -> None:
    texts: dict[str, Any] = {"ring": "128", "threshold": "1e-07", "full_layers": "5+11", "source": "latent"}
    assert (NAMED.name, NAMED.options) == ("newer", texts)
    assert kakeya.Named("newer", **texts) == NAMED
    assert hash(kakeya.Named("newer", **texts)) == hash(NAMED)
    assert repr(kakeya.Named("newer", window=9, band=0)) == "Named('newer', band='0', window='9')"
    assert kakeya.Named("newer") != kakeya.Named("older")
    assert copy.deepcopy(NAMED) == pickle.loads(pickle.dumps(NAMED)) == NAMED
    # Names that are words of Python, or of the class itself.
    words: dict[str, Any] = {"from": 2, "name": "a", "self": 1}
    assert kakeya.Named("newer", **words).options == {"from": "2", "name": "a", "self": "1"}
    with pytest.raises(FrozenInstanceError):
        NAMED.name = "older"  # type: ignore[misc]


NO_TEXT: list[tuple[Any, Any, str]] = [
    ("", {}, "name"),
    (7, {}, "name"),
    ("newer", {"ring": True}, "ring"),
    ("newer", {"ring": float("nan")}, "ring"),
    ("newer", {"ring": ""}, "ring"),
    ("newer", {"ring": b"9"}, "ring"),
    ("newer", {"ring": {9: 1}}, "ring"),
    ("newer", {"ring": ()}, "ring"),
    ("newer", {"ring": (1, 2.5)}, "ring[1]"),
]


def test_an_option_of_a_named_strategy_that_cannot_be_text_is_refused(subtests: pytest.Subtests) -> None:
    for name, options, refused in NO_TEXT:
        with subtests.test(refused):
            with pytest.raises(kakeya.InvalidArgument) as refusal:
                kakeya.Named(name, **options)
            assert refusal.value.field == refused


def test_a_strategy_is_shown_as_the_server_takes_it() -> None:
    shown = {
        kakeya.Full(): "full",
        kakeya.SinkWindow(window=64, codec="int8"): "sink_window:window=64,codec=int8",
        kakeya.LayerWindow(window=8, full_layers=(1, 2)): "layer_window:window=8,full_layers=1+2",
        kakeya.Named("mac", ring=128): "mac:ring=128",
    }
    assert {strategy: str(strategy) for strategy in shown} == shown
