"""Entries in a second tier: where they are, what is moved, how much is reserved, and what happens when it fails."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from inference_engine.engine import Engine
from inference_engine.errors import InvalidArgument, NoCapacity, RestorationFailed
from inference_engine.kernels.ops import DeviceOps
from inference_engine.kv.memory import tier as tier_module
from inference_engine.kv.memory.tier import ChunkShape, NoTier, Tier
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import GenerateParams, Mode
from tests.further import further
from tests.laws.test_session_kv_laws import LAYERS, LIMIT, Entries, active, context, feed, step
from tests.laws.variants import drain, engine_for, generate, same, text

READING = {"block": 8, "sink": 4, "window": 16, "budget": 48}  # two distant blocks
GATHER = make_strategy("gather", **READING)
TIERED = make_strategy("tiered", **READING, resident_tokens=16)
FAR = make_strategy("tiered", **READING, resident_tokens=512)
TIERED_ENTRY_BYTES = sum(layer.entry_bytes(4) for layer in LAYERS if layer.native_window is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_store_gives_back_the_bits_that_were_put_into_it(dtype: torch.dtype) -> None:
    tier = Tier(2**24)
    shape = ChunkShape(chunks=3, layers=2, kv_heads=3, chunk_tokens=7, head_dim=5, dtype=dtype)
    store = tier.open(shape)
    entries = torch.randn(2, 2, 3, 15, 5).to(dtype)
    for chunk, first, last in ((0, 0, 4), (0, 4, 7), (1, 7, 14), (2, 14, 15)):
        store.write(chunk, first % 7, entries[:, :, :, first:last])
    assert torch.equal(store.read(0), entries[:, :, :, :7])
    assert torch.equal(store.read(1), entries[:, :, :, 7:14])
    assert torch.equal(store.read(2)[:, :, :, :1], entries[:, :, :, 14:])
    assert 15 * 60 * dtype.itemsize <= store.held_bytes(15) <= 3 * shape.chunk_bytes
    store.clear()
    assert store.held_bytes(0) == 0
    store.write(0, 0, entries[:, :, :, :2])
    assert torch.equal(store.read(0)[:, :, :, :2], entries[:, :, :, :2])
    store.close()
    store.close()


def test_a_store_without_chunks_holds_nothing() -> None:
    store = NoTier().open(replace(ONE_CHUNK, chunks=0))
    store.clear()
    assert store.held_bytes(0) == 0
    store.close()


class PinnedMemory:
    """What CUDA is asked to do with memory of the host, in order. The device is busy until a test makes it idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.idle = threading.Event()
        self.error = 0
        monkeypatch.setattr(tier_module, "_cuda_runtime", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: self.idle.wait(60))

    def cudaHostRegister(self, address: int, _count: int, _flags: int) -> int:
        self.calls.append(("pin", address))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unpin", address))
        return self.error


ONE_CHUNK = ChunkShape(chunks=1, layers=2, kv_heads=1, chunk_tokens=8, head_dim=16, dtype=torch.float32)
ENTRIES = torch.ones(2, 2, 1, 8, 16)


def test_memory_that_cannot_be_pinned_is_refused_and_what_cannot_be_unpinned_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = PinnedMemory(monkeypatch)
    cuda.idle.set()
    tier = Tier(2**20, pinned_for=torch.device("cpu"))
    first, second = tier.open(ONE_CHUNK), tier.open(ONE_CHUNK)
    first.write(0, 0, ENTRIES)
    cuda.error = 2
    first.close()
    with pytest.raises(OSError, match="CUDA error 2"):
        second.write(0, 0, ENTRIES)
    assert "cannot be unpinned: CUDA error 2" in caplog.text
    cuda.error = 0
    second.write(0, 0, ENTRIES)
    second.close()


@pytest.mark.parametrize("quanta", [further((1, 1)), (4, 32)], ids=["exact shapes", "padded shapes"])
def test_generated_tokens_read_what_gather_reads_to_the_bit(quanta: tuple[int, int]) -> None:
    entries = Entries(LIMIT)
    outs = []
    for strategy in (GATHER, TIERED, FAR):
        kv = active(strategy, context(token_quantum=quanta[0], key_quantum=quanta[1]))
        feed(kv, entries, 117)
        outs.append(feed(kv, entries, LIMIT, 1, generated=True))
    for layer in range(len(LAYERS)):
        assert torch.equal(outs[1][layer], outs[0][layer])
        assert torch.equal(outs[2][layer], outs[0][layer])


@pytest.mark.parametrize("in_order", [further(False), True], ids=["under a mask", "in order"])
def test_a_step_of_several_segments_reads_everything_and_leaves_what_short_steps_leave(*, in_order: bool) -> None:
    layers = tuple(replace(layer, native_window=None) for layer in LAYERS)
    entries = Entries(LIMIT, layers=layers)
    ops = DeviceOps(attends_together=in_order)
    full, short, long = (
        active(strategy, replace(context(layers=layers, segments_at_once=count), ops=ops))
        for strategy, count in ((make_strategy("full"), 1), (TIERED, 1), (TIERED, 3))
    )
    assert (short.room(generated=False), long.room(generated=False), long.room()) == (16, 48, 16)
    expected = feed(full, entries, 150, LIMIT)
    for kv in (short, long):
        found = feed(kv, entries, 150, LIMIT)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert long.footprint().tier_bytes == short.footprint().tier_bytes > 0
    ends = [feed(kv, entries, 180, 1, generated=True) for kv in (short, long)]
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def counted() -> tuple[SessionKV, Counter[str]]:
    """An active session, and the bytes that it moves between the tiers, by kind."""
    moved = Counter[str]()
    tier = Tier(2**24, lambda kind, nbytes: moved.update({kind: nbytes}))
    return active(TIERED, replace(context(), tier=tier)), moved


def test_appended_tokens_stream_every_offloaded_entry_once_a_layer() -> None:
    kv, moved = counted()
    feed(kv, Entries(LIMIT), 144)
    streamed = moved["streamed"]
    step(kv, Entries(LIMIT), 5)
    # A block of sink and a segment of resident entries; the rest is offloaded.
    offloaded = (144 - 16 - 8) * TIERED_ENTRY_BYTES
    assert moved["streamed"] - streamed == moved["kept"] == offloaded <= kv.footprint().tier_bytes


def test_bytes_off_the_device_are_those_of_the_offloaded_entries_and_within_the_bound() -> None:
    tier = Tier(2**24)
    ctx = replace(context(), tier=tier)
    kv = SessionKV(TIERED, ctx, LIMIT)
    assert tier.reserved_bytes == kv.bound.tier_bytes > 0
    for length in (1, 17, 60, 199):
        feed(kv, Entries(LIMIT), length, generated=length > 17)
        beyond = max(0, length // 16 * 16 - 16 - 8) * TIERED_ENTRY_BYTES
        held = kv.footprint()
        assert beyond <= held.tier_bytes <= kv.bound.tier_bytes
        assert held.total_bytes <= kv.bound.sustained_bytes
    kv.release()
    kv.release()
    assert tier.reserved_bytes == ctx.pool.reserved_bytes == 0


def test_a_session_without_room_in_the_second_tier_is_refused_and_takes_nothing() -> None:
    needed = TIERED.bound(context().geometry, LIMIT).tier_bytes
    ctx = replace(context(), tier=Tier(needed * 3 // 2))
    first = SessionKV(TIERED, ctx, LIMIT)
    before = ctx.pool.reserved_bytes
    with pytest.raises(NoCapacity, match="host memory") as refusal:
        SessionKV(TIERED, ctx, LIMIT)
    assert int(refusal.value.metadata["needed_bytes"]) == needed
    assert ctx.pool.reserved_bytes == before
    first.release()
    SessionKV(TIERED, ctx, LIMIT).release()


def test_a_rejected_draft_takes_what_it_fetched_away_with_it() -> None:
    """And what it drove out comes back: every byte of the buffers is as if it had never been."""
    entries, drafts = Entries(LIMIT), Entries(LIMIT, seed=3)
    (plain, moved_plainly), (drafted, moved) = counted(), counted()
    for kv in (plain, drafted):
        feed(kv, entries, 140)
        feed(kv, entries, 151, 1, generated=True)
    step(plain, drafts, 1, generated=True)
    step(drafted, drafts, 4, commit=152, generated=True)
    assert moved["fetched"] > moved_plainly["fetched"]
    for ours, theirs in zip(plain.context.pool.buffers, drafted.context.pool.buffers, strict=True):
        assert torch.equal(ours.vectors[1:], theirs.vectors[1:])


# -- through the engine --------------------------------------------------------------------------------------------


def opened(engine: Engine, strategy: KVStrategy, history: int = 150) -> str:
    session = engine.create_session(strategy=strategy).session_id
    engine.append(session, text(history))
    return session


def test_memory_that_runs_out_ends_the_generate_by_name_and_keeps_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    with engine_for(Mode.BATCHED) as engine:
        whole, cut = (opened(engine, TIERED, 40) for _ in range(2))
        expected = generate(engine, whole, 60)
        generate(engine, cut, 5)
        with monkeypatch.context() as patched:
            patched.setattr(Tier, "allocate", full)
            with pytest.raises(RestorationFailed, match="cannot allocate memory"):
                drain(engine.generate(cut, GenerateParams(max_tokens=55)))
        info = engine.session_info(cut)
        received = info.history_length - 45
        assert 0 < received < 55
        assert (info.failure_reason, info.tier_live_bytes) == ("", 0)
        again = generate(engine, cut, 55 - received)
        assert same(again, expected[5 + received :], Mode.BATCHED)


def test_idle_sessions_make_room_in_the_second_tier_and_no_others_do() -> None:
    now = [0.0]
    with engine_for(Mode.BATCHED) as roomy:
        needed = roomy.create_session(strategy=TIERED).bound.tier_bytes
    with engine_for(Mode.BATCHED, growth="guaranteed", tier_bytes=needed, clock=lambda: now[0]) as engine:
        plain, first = (engine.create_session(strategy=one).session_id for one in (None, TIERED))
        for session in (plain, first):
            engine.append(session, text(9))
            generate(engine, session, 1)
        with pytest.raises(NoCapacity, match="tier_bytes"):
            engine.create_session(strategy=TIERED)
        now[0] = 1000.0
        engine.create_session(strategy=TIERED)
        assert engine.session_info(plain).cached_tokens == 9
        assert engine.session_info(first).cached_tokens == 0
        with pytest.raises(NoCapacity, match="tier_bytes"):
            engine.generate(first, GenerateParams(max_tokens=1))
    with engine_for(Mode.BATCHED, tier_bytes=needed - 1) as engine, pytest.raises(NoCapacity, match="in all"):
        engine.create_session(strategy=TIERED)


def test_a_cpu_keeps_nothing_off_the_device_unless_it_is_asked_to() -> None:
    with engine_for(Mode.BATCHED, tier_bytes=0) as engine:
        with pytest.raises(InvalidArgument, match=r"strategy: .*off the device.*tenth.*full or gather.*tier_bytes"):
            engine.create_session(strategy=TIERED)
        opened(engine, FAR, 9)
