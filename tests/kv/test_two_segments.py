"""Appended tokens of two segments in one step: old entries are restored once for both, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.errors import RestorationFailed
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kv.context import KVContext
from inference_engine.kv.layout import Positions
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.kv.views import Region
from inference_engine.native.library import KVType
from tests.facade import drop_entries
from tests.laws.test_session_kv_laws import COMPONENTS, LAYERS, SEGMENT, Entries, HalfTokens, context, step
from tests.laws.variants import generate, text
from tests.tiny import LATENT_BYTES, tiny_engine
from tests.tiny_native import tiny_native

LIMIT = 200
LATENT: dict[str, Any] = {"sink": 3, "window": SEGMENT + 4, "source": "latent", "bytes_per_token": LATENT_BYTES}
CHOICE: dict[str, Any] = {"mode": "select", "budget": 3 + SEGMENT + 4 + 32 + 20, "rank": 4, "bits": 4, "run": 1}
SELECT = make_strategy("restored", **LATENT, **CHOICE)
OWN = (LAYERS[0], LAYERS[2])  # of other shapes, so two sets; without native windows
ENTRIES = Entries(LIMIT, layers=OWN)


class OwnTokens(HalfTokens):
    geometries = OWN
    layers = (0, 1)

    def __init__(self) -> None:
        self.decoded = 0

    def at(self, bytes_per_token: int) -> OwnTokens:
        return self

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        self.decoded += len(codes)
        return super().decode(codes, layers)


def joining(*, joins: bool = True, layers: Any = OWN, segment: int = SEGMENT) -> KVContext:
    ctx = context(layers=layers)
    return replace(
        ctx,
        geometry=replace(ctx.geometry, joins_segments=joins, segment_tokens=segment),
        ops=DeviceOps(attends_together=True),
        latent=OwnTokens() if layers == OWN else ctx.latent,
        components={0: COMPONENTS[0], 1: COMPONENTS[2]} if layers == OWN else COMPONENTS,
    )


def decoded_by(kv: SessionKV) -> int:
    """How many codes its codec has decoded."""
    latent = kv.context.latent
    assert isinstance(latent, OwnTokens)
    return latent.decoded


def awake(strategy: KVStrategy, ctx: KVContext) -> SessionKV:
    kv = SessionKV(strategy, ctx, LIMIT)
    assert kv.wake(LIMIT)
    return kv


def fed(strategy: KVStrategy, length: int, *, joins: bool = True, chunk: int = LIMIT) -> tuple[SessionKV, list[Tensor]]:
    """A session of the first `length` entries, appended in the longest steps that it takes; the outputs by layer."""
    kv, outs = awake(strategy, joining(joins=joins)), []
    while kv.length < length:
        outs.append(step(kv, ENTRIES, min(kv.room(generated=False), chunk, length - kv.length)))
        kv.check()
    return kv, [torch.cat([out[layer] for out in outs]) for layer in range(len(OWN))]


def assert_alike(one: SessionKV, other: SessionKV) -> None:
    """To the byte, in every slot of the regions, wiped ones among them, and in all that is kept elsewhere."""
    assert (one.length, one.footprint()) == (other.length, other.footprint())
    for ours, theirs in zip(one.groups, other.groups, strict=True):
        assert np.array_equal(ours.held, theirs.held)
        for own, its in ((ours.buffer.keys, theirs.buffer.keys), (ours.buffer.values, theirs.buffer.values)):
            for region, as_it in zip(ours.regions(own), theirs.regions(its), strict=True):
                assert torch.equal(region, as_it)
    one.idle()
    other.idle()
    saved, same_saved = one.save(), other.save()
    assert saved.keys() == same_saved.keys()
    for name, parts in saved.items():
        for some, same_parts in zip(parts, same_saved[name], strict=True):
            assert all(torch.equal(part, as_it) for part, as_it in zip(some, same_parts, strict=True)), name


@pytest.mark.parametrize("length", [95, 96, 97, 113, 130])
def test_a_step_of_two_segments_gives_what_one_of_each_gives(length: int) -> None:
    (joined, outs), (alone, expected) = (fed(SELECT, length, joins=joins) for joins in (True, False))
    for ours, theirs in zip(outs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    assert decoded_by(joined) < decoded_by(alone)
    assert_alike(joined, alone)


@pytest.mark.parametrize("first", [64, 67])
def test_of_a_step_of_two_segments_any_part_can_be_kept(first: int) -> None:
    """None of it, some of the open segment, all of that, some of the next one."""
    end = 64 + 2 * SEGMENT
    for kept in (first, first + 5, 64 + SEGMENT - 1, 64 + SEGMENT, 64 + SEGMENT + 1, end - 1):
        joined, clean = (fed(SELECT, first)[0] for _ in range(2))
        drafts = Entries(LIMIT, seed=1, layers=OWN)
        assert joined.room(generated=False) == end - first
        step(joined, drafts, end - first, commit=kept)
        joined.check()
        if kept > first:
            step(clean, drafts, kept - first)
        for kv in (joined, clean):  # and it goes on from there
            step(kv, ENTRIES, 1)
        assert_alike(joined, clean)


@pytest.mark.parametrize("fails", ["archiving", "moving", "staging"])
def test_a_step_that_cannot_be_staged_leaves_everything_as_it_was(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, clean = (fed(SELECT, 67)[0] for _ in range(2))
    last, move_out, stage = kv.groups[-1], LayerEntries.move_out, LayerEntries.stage

    def broken(*_: Any) -> Tensor:
        raise MemoryError

    def moved(self: LayerEntries, staged: Positions, to: Region) -> None:
        if self is last:  # after another one
            raise MemoryError
        move_out(self, staged, to)

    def staged(self: LayerEntries, *args: Any) -> int:
        if self is last:
            raise MemoryError
        return stage(self, *args)

    with monkeypatch.context() as patch:
        if fails == "archiving":
            patch.setattr(OwnTokens, "encode", broken)
        elif fails == "moving":
            patch.setattr(LayerEntries, "move_out", moved)
        else:
            patch.setattr(LayerEntries, "stage", staged)
        with pytest.raises(MemoryError if fails == "staging" else RestorationFailed):
            kv.stage(kv.room(generated=False))
    assert kv.staged == 0
    kv.discard_staged()
    for one in (kv, clean):
        step(one, ENTRIES, 20)
    assert_alike(kv, clean)


def test_a_step_whose_discard_fails_on_the_device_has_its_entries_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verifier.discard` relies on the tables."""
    kv, clean = (fed(SELECT, 67)[0] for _ in range(2))
    settle = LayerEntries.settle

    def broken(self: LayerEntries, *args: Any, **named: Any) -> None:
        settle(self, *args, **named)
        raise RuntimeError

    kv.stage(kv.room(generated=False))
    with monkeypatch.context() as patch:
        patch.setattr(LayerEntries, "settle", broken)
        with pytest.raises(RuntimeError):
            kv.discard_staged()
    for ours, theirs in zip(kv.groups, clean.groups, strict=True):
        assert np.array_equal(ours.held, theirs.held)
    kv.idle()
    clean.idle()
    assert [len(list(parts)) for parts in kv.save().values()] == [len(list(parts)) for parts in clean.save().values()]


def test_a_history_that_is_prefilled_again_has_long_steps_up_to_its_first_answer() -> None:
    counts: list[int] = []
    make = partial(tiny_native, kv_type=KVType.FLOAT16)
    with tiny_engine(make=make, windowed=False, on_step=lambda step: counts.append(step.plan.query_count)) as engine:
        session = engine.create_session(strategy=SELECT).session_id
        for turn in range(2):
            engine.append(session, text(140, seed=turn))
            generate(engine, session, 6)
        drop_entries(engine, session)
        counts.clear()
        engine.append(session, text(1))
        generate(engine, session, 1)
    # From the fifth segment on there are chunks to read.
    assert counts[:6] == [SEGMENT] * 4 + [2 * SEGMENT] * 2
