"""The laws of KV entries where attention is latent: one vector a token, whose first numbers are the value.

    entry   compressed 64 | rotated 16        key: all of it · value: the first 64 · read by all query heads

Keys and values are given, as in `test_session_kv_laws.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from inference_engine.errors import InvalidArgument
from inference_engine.kernels.by_session import attend_by_session
from inference_engine.kernels.ops import REFERENCE, DeviceOps
from inference_engine.kernels.ragged_attention import attend_ragged
from inference_engine.kv.compressors import make_compressor
from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import IMMOVABLE, LayerGeometry
from inference_engine.kv.parts.restored_entries import RestoredEntries
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.codec_options import EXACT_SINK
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.restored import Restored
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy, check_strategy
from tests.laws import test_session_kv_laws as laws

HEADS, RANK, ROTATED = 4, 64, 16
LATENT = LayerGeometry(query_heads=HEADS, kv_heads=1, head_dim=RANK + ROTATED, value_dim=RANK, shared_dim=RANK)
# Beside it a layer whose values have a size of their own.
NARROW = LayerGeometry(query_heads=4, kv_heads=2, head_dim=24, value_dim=16)
LAYERS = (LATENT, NARROW, LATENT)
LENGTH = 120
STRATEGIES = (Full(), SinkWindow(sink=4, window=24), SinkWindow(sink=0, window=20))
OPERATIONS = {
    "views": REFERENCE,
    "by session": DeviceOps(attends_together=True, attend_ragged=attend_by_session),
    "by query": DeviceOps(attends_together=True, attend_ragged=attend_ragged),
}


def turn(keys: Tensor, shift: Tensor | int) -> Tensor:
    """The last numbers of a key turn; what the value is made of stays."""
    still, turned = keys[..., :-ROTATED], keys[..., -ROTATED:]
    return torch.cat((still, laws.turn(turned, shift)), dim=-1)


@pytest.fixture(autouse=True)
def _turns_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = laws.turn

    def in_part(keys: Tensor, shift: Tensor | int) -> Tensor:
        if keys.shape[-1] == ROTATED:
            return whole(keys, shift)
        return torch.cat((keys[..., :-ROTATED], whole(keys[..., -ROTATED:], shift)), dim=-1)

    monkeypatch.setattr(laws, "turn", in_part)


def context(operations: str = "views") -> KVContext:
    return replace(laws.context(layers=LAYERS), ops=OPERATIONS[operations])


def entries_of(length: int = LENGTH, layers: tuple[LayerGeometry, ...] = LAYERS) -> laws.Entries:
    found = laws.Entries(length, layers=layers)
    for index, layer in enumerate(layers):
        found.v[index] = (found.k if layer.entry.value_in_key else found.v)[index][..., : layer.value_dim]
    return found


def by_hand(strategy: KVStrategy, entries: laws.Entries, layer: int) -> Tensor:
    """[length, Hq, Dv], token by token."""
    rule, outs = strategy.rule(layer, context().geometry), []
    for i in range(LENGTH):
        b = i - i % laws.SEGMENT
        window = i if rule.window is None else rule.window
        seen = [j for j in range(i + 1) if j < rule.sink or j >= b - window]
        shift = 0 if rule.window is None else max(0, b - window - rule.sink)
        at = torch.tensor([j + shift if j < rule.sink else j for j in seen])
        keys, values = laws.turn(entries.k[layer][:, seen], at), entries.v[layer][:, seen]
        query = laws.turn(entries.q[layer][:, [i]], torch.tensor([i]))
        grouped = query.view(len(keys), -1, keys.shape[-1])
        weights = (grouped @ keys.mT * 0.35).softmax(dim=-1)
        outs.append((weights @ values).reshape(LAYERS[layer].query_heads, -1))
    return torch.stack(outs)


@pytest.mark.parametrize("operations", OPERATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_query_sees_what_the_mask_law_says(strategy: KVStrategy, operations: str) -> None:
    entries = entries_of()
    outs = laws.feed(laws.active(strategy, context(operations)), entries, LENGTH, 7)
    for layer, out in enumerate(outs):
        torch.testing.assert_close(out, by_hand(strategy, entries, layer), atol=2e-5, rtol=0)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_is_reserved_is_the_bound_and_what_is_written_the_footprint(strategy: KVStrategy) -> None:
    """A latent vector counts once: its value takes no bytes of its own."""
    ctx = context()
    kv = laws.active(strategy, ctx)
    assert ctx.pool.reserved_bytes == kv.bound.peak_bytes
    assert LATENT.entry_bytes(4) == 4 * (RANK + ROTATED) and NARROW.entry_bytes(4) == 4 * 2 * (24 + 16)
    for length in (1, 17, 60, 199):
        laws.feed(kv, entries_of(laws.LIMIT), length)
        used = int(torch.count_nonzero(ctx.pool.memory)) * ctx.pool.memory.itemsize
        assert used <= kv.footprint().total_bytes <= kv.bound.peak_bytes
    if strategy == Full():
        pages = -(-199 // ctx.geometry.opening_tokens) * ctx.geometry.opening_tokens
        assert kv.footprint().total_bytes == pages * ctx.geometry.entry_bytes
    kv.release()
    assert not ctx.pool.reserved_bytes


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_fork_reads_what_its_parent_reads(strategy: KVStrategy) -> None:
    """Where every entry stays in the parent's rows, else in its own copies."""
    entries, at = entries_of(), 50
    expected = laws.feed(laws.active(strategy, context()), entries, LENGTH)
    ctx = context()
    parent = laws.active(strategy, ctx)
    laws.feed(parent, entries, at)
    fork = SessionKV(strategy, ctx, laws.LIMIT, parent.share(at))
    assert fork.wake(laws.LIMIT)
    if fork.length < at:
        fork.copy_from(parent, at)
    outs = laws.feed(fork, entries, LENGTH)
    for out, whole in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, whole[at:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_session_that_was_saved_goes_on_elsewhere(strategy: KVStrategy) -> None:
    entries, at = entries_of(), 75
    ctx = context()
    kv = laws.active(strategy, ctx)
    laws.feed(kv, entries, at)
    expected = laws.feed(kv, entries, LENGTH)
    other = laws.active(strategy, context())
    again = laws.active(strategy, context())
    laws.feed(again, entries, at)
    saved = {name: [tuple(part.clone() for part in parts) for parts in own] for name, own in again.save().items()}
    other.load(at, saved)
    for out, whole in zip(laws.feed(other, entries, LENGTH), expected, strict=True):
        torch.testing.assert_close(out, whole, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gather", "Layer 0 has a key of 80 numbers and a value of 64 inside it. .* with a codec or without"),
        ("tiered", "Layer 0 has a key of 80 numbers and a value of 64 inside it"),
        # Entries of two sizes, side by side, have no codec; the others do.
        ("full:codec=int8", "Layer 1 has a key of 24 numbers and a value of 16. .* with no codec"),
    ],
)
def test_what_codes_or_chooses_entries_is_refused_by_name(spec: str, said: str) -> None:
    geometry = context().geometry
    with pytest.raises(InvalidArgument, match=said):
        check_strategy(parse_strategy(spec), geometry)
    for strategy in (*STRATEGIES, Restored(sink=2, window=8)):
        check_strategy(strategy, geometry)


def test_where_keys_cannot_be_moved_a_codec_serves_all_entries_and_none_in_a_window_behind_a_sink() -> None:
    geometry = laws.context(layers=(replace(LATENT, rotary=IMMOVABLE),)).geometry
    for spec in ("full:codec=int8", "sink_window:sink=0,window=64,codec=int8,exact_window=20"):
        check_strategy(parse_strategy(spec), geometry)
    for spec in ("sink_window:sink=2,window=64", "sink_window:sink=2,window=64,codec=int8,exact_window=20"):
        with pytest.raises(InvalidArgument, match="needs keys at other positions"):
            check_strategy(parse_strategy(spec), geometry)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_codec_codes_the_compressed_numbers_and_keeps_the_rotated_ones_to_the_bit(codec: str) -> None:
    """Bytes as well: codes of one vector of the compressed numbers, and the others as they lie."""
    window, length = 24, 118
    strategy = Full(codec=codec, exact_window=window)
    ctx, entries = laws.context(layers=(LATENT,)), entries_of(layers=(LATENT,))
    kv = laws.active(strategy, ctx)
    laws.feed(kv, entries, length)
    kv.idle()
    archive = kv.footprint().by_kind["archive"]
    assert kv.wake(laws.LIMIT)
    (part,) = [part for part in kv.parts if isinstance(part, RestoredEntries)]
    coded = range(EXACT_SINK, length - length % laws.SEGMENT - window)
    keys, values = part.regions[0].read_entries(np.array(coded))
    assert torch.equal(keys[0, ..., RANK:], laws.turn(entries.k[0], torch.arange(LENGTH))[0, coded, None, RANK:])
    assert torch.equal(keys[..., :RANK], values)
    error = (values[0, :, 0] - entries.v[0][0, coded]).norm(dim=-1) / entries.v[0][0, coded].norm(dim=-1)
    assert 1e-4 < float(error.max()) < {"int8": 0.01, "int4": 0.12}[codec]
    page = ctx.geometry.page_tokens
    vector = make_compressor(codec).vector_bytes(RANK) + 4 * ROTATED
    assert archive == 4 * RANK + -(-len(coded) // page) * page * vector


def test_a_rejected_draft_leaves_no_byte() -> None:
    for strategy in STRATEGIES:
        plain, drafted = (laws.active(strategy, context()) for _ in range(2))
        for kv in (plain, drafted):
            laws.feed(kv, entries_of(), 94)
        laws.step(drafted, entries_of(), 2, commit=94, generated=True)
        ours, theirs = (kv.context.pool.memory[LATENT.entry.width :] for kv in (plain, drafted))
        assert torch.equal(ours, theirs)
