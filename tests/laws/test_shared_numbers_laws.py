"""The laws of KV entries whose key and value share numbers: they read as two vectors would, and take the bytes of one.

    entry   the value's first 4 | 12 of both | the key's last 4        a head of 16, of which the last 4 turn

Keys and values are given, as in `test_session_kv_laws.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference_engine.kv.context import KVContext
from inference_engine.kv.geometry import EntryShape, LayerGeometry
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.sink_window import SinkWindow
from inference_engine.kv.strategy import KVStrategy
from tests.laws import test_session_kv_laws as laws
from tests.laws.test_session_kv_laws import FIRST, LAYERS, each_part
from tests.laws.variants import LENGTH

TURNED = 4
TWICE = LAYERS
ONCE = tuple(replace(layer, shared_dim=layer.head_dim - TURNED) for layer in LAYERS)


@pytest.fixture(autouse=True)
def _turns_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last numbers of a key turn; those that are the value's, too, stay."""
    whole = laws.turn

    def in_part(keys: Tensor, shift: Tensor | int) -> Tensor:
        return torch.cat((keys[..., :-TURNED], whole(keys[..., -TURNED:], shift)), dim=-1)

    monkeypatch.setattr(laws, "turn", in_part)


def entries_of(length: int = LENGTH) -> laws.Entries:
    found = laws.Entries(length)
    for keys, values in zip(found.k, found.v, strict=True):
        values[..., TURNED:] = keys[..., :-TURNED]
    return found


def context(layers: tuple[LayerGeometry, ...]) -> KVContext:
    return laws.context(layers=layers)


def close(strategy: KVStrategy) -> float:
    """Coded apart, numbers of key and value are rounded apart."""
    return 0.06 if strategy.options().get("codec") == "int8" else laws.close(strategy)


def run(kv: SessionKV, length: int = LENGTH) -> list[Tensor]:
    """Tokens in turns: appended, then generated one by one, a draft of three that is rejected, and on."""
    entries, outs = entries_of(), []
    for end, generated in ((50, False), (60, True), (90, False), (length, True)):
        outs.append(laws.feed(kv, entries, end, 7 if not generated else 1, generated=generated))
        if room := min(3, kv.room(generated=True), length - end):
            laws.step(kv, entries, room, commit=end, generated=True)
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]


@each_part
def test_entries_that_share_numbers_read_as_those_that_do_not(strategies: tuple[KVStrategy, ...]) -> None:
    for strategy in strategies:
        once, twice = (run(laws.active(strategy, context(layers))) for layers in (ONCE, TWICE))
        for one, two in zip(once, twice, strict=True):
            assert float((one - two).abs().max()) <= close(strategy), strategy


@each_part
def test_they_take_the_bytes_of_one_vector_within_the_bound(strategies: tuple[KVStrategy, ...]) -> None:
    for strategy in strategies:
        contexts = [context(layers) for layers in (ONCE, TWICE)]
        once, twice = (laws.active(strategy, each) for each in contexts)
        for each, kv in zip(contexts, (once, twice), strict=True):
            assert each.pool.reserved_bytes == kv.bound.peak_bytes
        for length in (17, 60, LENGTH):
            for kv in (once, twice):
                laws.feed(kv, entries_of(), length, 7 if length < LENGTH else 1, generated=length == LENGTH)
            pool = contexts[0].pool
            used = int(torch.count_nonzero(pool.memory)) * pool.memory.itemsize
            assert used <= once.footprint().total_bytes <= once.bound.peak_bytes, strategy
            ours, theirs = (kv.footprint().by_kind["entries"] for kv in (once, twice))
            assert ours * contexts[1].geometry.entry_bytes == theirs * contexts[0].geometry.entry_bytes or (
                ours < theirs
            ), strategy
            assert once.footprint().tier_bytes <= twice.footprint().tier_bytes
        once.release()
        assert not contexts[0].pool.reserved_bytes


def test_the_bytes_are_those_of_numbers_stored_once() -> None:
    kv = laws.active(Full(), context(ONCE))
    laws.feed(kv, entries_of(), 100)
    assert [layer.entry.width for layer in ONCE] == [8 + 4, 8 + 4, 16 + 4, 16 + 4]
    assert kv.footprint().total_bytes == 4 * (100 * (2 * 12 + 20) + 28 * 2 * 12 + 56 * 20)


@pytest.mark.parametrize("strategy", [*FIRST, SinkWindow(sink=0, window=20)], ids=str)
def test_a_session_that_was_saved_and_its_fork_go_on(strategy: KVStrategy) -> None:
    entries, at = entries_of(), 80
    expected = laws.feed(laws.active(strategy, context(ONCE)), entries, LENGTH)
    kv = laws.active(strategy, context(ONCE))
    laws.feed(kv, entries, at)
    kv.idle()
    saved = {name: [tuple(part.clone() for part in parts) for parts in own] for name, own in kv.save().items()}
    kept = [
        tuple(part.shape[-1] for part in parts) for name, own in saved.items() if "entries" in name for _, *parts in own
    ]
    assert {*kept} <= {(layer.entry.width,) for layer in ONCE}, "one vector of a token"
    other = SessionKV(strategy, context(ONCE), laws.LIMIT)
    other.load(at, saved)
    fork = SessionKV(strategy, kv.context, laws.LIMIT, kv.share(at))
    if fork.length < at:
        fork.copy_from(kv, at)
    for each in (other, fork):
        assert each.wake(laws.LIMIT)
        outs = laws.feed(each, entries, LENGTH)
        for out, whole in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, whole[at:], atol=laws.close(strategy), rtol=0)


def test_vectors_are_split_as_they_are_joined() -> None:
    for shape in (EntryShape(16, 16, 12), EntryShape(24, 16, 16), EntryShape(16, 16), EntryShape(24, 16)):
        vectors = torch.randn(3, shape.width)
        keys, values = shape.split(vectors)
        assert torch.equal(shape.join(keys, values), vectors)
        assert keys.shape[1] == shape.key and values.shape[1] == shape.value
