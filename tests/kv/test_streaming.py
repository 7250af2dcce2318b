"""Old entries that are read chunk by chunk: what a session holds and a step makes does not grow with its history."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inference_engine.errors import RestorationFailed
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import SEGMENTS_IN_A_CHUNK
from inference_engine.kv.memory.tier import Tier
from inference_engine.kv.plan import SpanFailed
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from tests.further import further
from tests.laws.test_session_kv_laws import LAYERS, SEGMENT, Entries, HalfTokens, context, feed, step
from tests.tiny import LATENT_BYTES

LIMIT = 200
SHORT, LONG = 100, 190  # more than a chunk has left in both
CHUNK = SEGMENTS_IN_A_CHUNK * SEGMENT
LATENT: dict[str, Any] = {"sink": 3, "window": 13, "source": "latent", "bytes_per_token": LATENT_BYTES}
HOLD, STREAM = (make_strategy("restored", **LATENT, mode=mode) for mode in ("hold", "stream"))


class WatchedTokens(HalfTokens):
    """Notes how many entries it decodes, of which layers."""

    def __init__(self) -> None:
        self.decoded: list[tuple[int, tuple[int, ...]]] = []

    def decoder(self, layer: int) -> None:
        return None

    def at(self, bytes_per_token: int) -> WatchedTokens:
        return self

    def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        self.decoded.append((len(codes), tuple(layers or self.layers)))
        return super().decode(codes, layers)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the bytes of the largest tensor that any operation makes; a view of what was there is not made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for made in _tensors(result):
            if made.untyped_storage().data_ptr() not in there:
                self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def grown(ctx: KVContext, strategy: Any, length: int) -> SessionKV:
    kv = SessionKV(strategy, ctx, LIMIT)
    assert kv.wake(LIMIT)
    feed(kv, Entries(LIMIT), length)
    return kv


def largest_in_a_turn(strategy: Any, length: int) -> int:
    """Bytes of the largest tensor made while a session of `length` is idle, wakes and takes one token."""
    kv, entries = grown(context(), strategy, length), Entries(LIMIT)
    with LargestTensor() as largest:
        kv.idle()
        kv.wake(LIMIT)
        step(kv, entries, 1, generated=True)
    made: int = largest.nbytes
    return made


def test_no_tensor_of_a_turn_grows_with_the_evicted_entries() -> None:
    short, long = (largest_in_a_turn(STREAM, length) for length in (SHORT, LONG))
    # To decode the entries of one layer this codec makes the numbers of all layers, for one chunk.
    numbers = sum(2 * LAYERS[layer].kv_heads * LAYERS[layer].head_dim for layer in HalfTokens.layers)
    assert short == long == CHUNK * numbers * 4


def test_no_more_than_a_chunk_of_one_layer_is_ever_decoded() -> None:
    codec = WatchedTokens()
    kv = grown(replace(context(), latent=codec), STREAM, LONG)
    kv.idle()
    kv.wake(LIMIT)
    step(kv, Entries(LIMIT), 1, generated=True)
    assert codec.decoded
    assert all(entries <= CHUNK and len(layers) == 1 for entries, layers in codec.decoded)


def test_a_chunk_that_cannot_be_allocated_names_the_session_and_leaves_it_as_it_was() -> None:
    class Breaking(HalfTokens):
        is_broken = False

        def decoder(self, layer: int) -> None:
            return None

        def at(self, bytes_per_token: int) -> Breaking:
            return self

        def decode(self, codes: Tensor, layers: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
            if self.is_broken:
                raise ValueError("codes of another codec")
            return super().decode(codes, layers)

    codec = Breaking()
    ctx = replace(context(), latent=codec)
    kv = SessionKV(STREAM, ctx, LIMIT)
    kv.wake(LIMIT)
    feed(kv, Entries(LIMIT), 2 * SEGMENT)
    footprint = kv.footprint()
    codec.is_broken = True
    with pytest.raises(SpanFailed, match="could not be restored") as failed:
        step(kv, Entries(LIMIT), 1)
    assert failed.value.index == 0
    assert isinstance(failed.value.failure, RestorationFailed)
    assert str(failed.value.failure.__cause__) == "codes of another codec"
    kv.commit(kv.next_position)
    assert kv.footprint() == footprint
    kv.check()
    codec.is_broken = False
    step(kv, Entries(LIMIT), 1)


@pytest.mark.parametrize(
    ("mode", "resident_bytes"),
    [
        (mode, count) if place % 2 == number else further(mode, count)
        for number, mode in enumerate(("hold", "stream"))
        for place, count in enumerate((0, 1000, 10**6, 8000))
    ],
)
def test_latents_read_the_same_wherever_they_lie(mode: str, resident_bytes: int) -> None:
    """To the bit, through an idle time, a rejection and a replay of everything."""
    outs = []
    for limited in (make_strategy("restored", **LATENT, mode=mode, resident_latent_bytes=resident_bytes), None):
        kv = grown(context(), limited or make_strategy("restored", **LATENT, mode=mode), 70)
        entries = Entries(LIMIT)
        kv.idle()
        kv.wake(LIMIT)
        step(kv, Entries(LIMIT, seed=1), kv.room(), commit=kv.length + 1)
        reported = feed(kv, entries, 120)
        footprint = kv.footprint()
        assert footprint.tier_bytes <= kv.bound.tier_bytes
        if limited is not None:
            assert footprint.by_kind["archive"] <= resident_bytes
            assert bool(footprint.tier_bytes) == (resident_bytes < 10**6)
        kv.forget()
        assert kv.footprint().total_bytes == kv.footprint().tier_bytes == 0
        kv.wake(LIMIT)
        outs += [*reported, *feed(kv, entries, LONG)]
        ctx = kv.context
        kv.release()
        assert ctx.pool.reserved_bytes == 0
        assert ctx.tier is not None and ctx.tier.reserved_bytes == 0
    half = len(outs) // 2
    for limited_out, out in zip(outs[:half], outs[half:], strict=True):
        assert torch.equal(limited_out, out)


def test_memory_that_runs_out_fails_the_session_by_name_and_it_can_begin_again() -> None:
    strategy = make_strategy("restored", **LATENT, resident_latent_bytes=0)
    kv = SessionKV(strategy, replace(context(), tier=Tier(2**20)), LIMIT)
    kv.wake(LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tier, "allocate", _no_memory)
        with pytest.raises(RestorationFailed, match="Cannot allocate memory"):
            feed(kv, Entries(LIMIT), SHORT)
    kv.forget()
    kv.wake(LIMIT)
    feed(kv, Entries(LIMIT), SHORT)
    kv.check()
    kv.release()


def _no_memory(*_: object) -> int:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
