"""Single tokens of streaming sessions read old entries in the step's one operation over regions, if it can; others by
views.

Without a GPU the operation is the reference; `tests/kernels/test_archived.py` compares the kernels with it. On a GPU
steps are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from inference_engine.backends import device_archives
from inference_engine.backends.device_archives import DeviceArchive, DeviceArchives
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import RestorationFailed
from inference_engine.kernels import archived
from inference_engine.kernels.archived import ReadFrom
from inference_engine.kernels.ops import open_ops
from inference_engine.kv.context import ArchivedLayer, LayerDecoder
from inference_engine.kv.parts import streamed
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.views import ChunkView
from inference_engine.types import Event, GenerateParams, TokenCommitted
from kv_cache_proposer.f_theta.codec import LatentCodec
from tests.backends.test_torch_coder import IDS, OPS, SIZES, WithoutOperations, made_forward
from tests.facade import forward_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
STREAM = parse_strategy("restored:sink=2,window=16,source=latent,bytes_per_token=96,mode=stream")
SMALLER = parse_strategy("restored:sink=2,window=16,source=latent,bytes_per_token=48,mode=stream")
TOKENS = 24


def opened(kind: type[TorchForward] = TorchForward) -> Engine:
    ops = open_ops("auto", torch.device(DEVICE)) if ON_GPU else OPS
    forward, codec = made_forward(kind, LlamaConfig(**SIZES), DEVICE, ops)
    settings = EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4, max_batch=8)
    return Engine(forward, settings, latent=codec)


def said(engine: Engine, turns: int = 2) -> list[TokenCommitted]:
    session = engine.create_session(strategy=STREAM, limit_tokens=400).session_id
    events: list[TokenCommitted] = []
    for turn in range(turns):
        engine.append(session, IDS.flatten()[turn * 60 : turn * 60 + 60].tolist())
        given = engine.generate(session, GenerateParams(max_tokens=TOKENS, logprobs=True))
        events += [event for event in given if isinstance(event, TokenCommitted)]
    return events


@pytest.fixture
def by_views(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each layer that reads old entries by a view, how many queries do."""
    read, counts = ChunkView.read, list[int]()

    def counted(self: ChunkView, layer: int, queries: Tensor, *others: Any) -> Tensor:
        counts.append(len(queries))
        return read(self, layer, queries, *others)

    monkeypatch.setattr(ChunkView, "read", counted)
    return counts


def test_single_tokens_read_old_entries_by_numbers_and_say_what_they_say_by_views(by_views: list[int]) -> None:
    with opened() as engine:
        found = said(engine)
    # Appended tokens come in several; one that comes alone reads by numbers, too.
    assert by_views and by_views.count(1) == 0
    by_views.clear()

    with opened(WithoutOperations) as engine:
        expected = said(engine)

    assert by_views.count(1) >= 2 * (TOKENS - 1)
    compare(found, expected)


def compare(found: Sequence[TokenCommitted], expected: Sequence[TokenCommitted]) -> None:
    assert [event.token_id for event in found] == [event.token_id for event in expected]
    logprobs = [torch.tensor([event.logprob for event in events]) for events in (found, expected)]
    torch.testing.assert_close(*logprobs, atol=2e-3, rtol=0)


def test_sessions_of_other_lengths_and_strategies_in_the_same_steps_change_nothing(
    by_views: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has few old entries, the third has smaller latents, the fourth no old entries yet, the last none at
    all."""
    monkeypatch.setattr(archived, "LEAST_ROOM", 16)  # so that they need rooms of other sizes
    monkeypatch.setattr(device_archives, "NUMBERS", 8)
    lengths = [(150, STREAM), (45, STREAM), (50, SMALLER), (20, STREAM), (100, Full())]
    events: dict[bool, list[list[TokenCommitted]]] = {}
    with opened() as engine:
        for is_alone in (True, False):
            running: list[Iterator[Event]] = []
            for length, strategy in lengths:
                session = engine.create_session(strategy=strategy, limit_tokens=400).session_id
                engine.append(session, IDS.flatten()[:length].tolist())
                own = iter(engine.generate(session, GenerateParams(max_tokens=TOKENS, logprobs=True)))
                if is_alone:
                    own = iter(list(own))
                elif not running:  # the longest comes first in each step
                    own = chain(until_a_token(own), own)
                running.append(own)
            events[is_alone] = [
                [event for event in own if isinstance(event, TokenCommitted)] for own in interleaved(running)
            ]
    for found, expected in zip(events[False], events[True], strict=True):
        assert len(expected) == TOKENS
        compare(found, expected)
    assert by_views.count(1) == 0


def until_a_token(events: Iterator[Event]) -> list[Event]:
    found = [next(events)]
    while not isinstance(found[-1], TokenCommitted):
        found.append(next(events))
    return found


def interleaved(running: Sequence[Iterator[Event]]) -> list[list[Event]]:
    """What each gives, one event of each at a time, so that none waits for its reader."""
    found: list[list[Event]] = [[] for _ in running]
    for events in zip_longest(*running):
        for own, event in zip(found, events, strict=True):
            own.extend([] if event is None else [event])
    return found


@pytest.mark.skipif(not ON_GPU, reason="steps are recorded on a GPU")
def test_steps_that_read_archives_are_recorded() -> None:
    with opened() as engine:
        said(engine, turns=1)
        forward = forward_of(engine)
        assert isinstance(forward, TorchForward)
        kinds = [kind for graphs in forward._graphs.values() for kind in graphs._tried._kept]
    assert any(isinstance(kind, tuple) and kind[-1] is not None for kind in kinds)


@pytest.mark.parametrize(("module", "name"), [(archived, "MOST_BYTES"), (streamed, "MOST_QUERIES")])
def test_without_room_for_their_numbers_and_in_wide_steps_they_read_by_views(
    module: Any, name: str, by_views: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, 0)

    with opened() as engine:
        said(engine, turns=1)

    assert by_views.count(1) >= TOKENS - 1


def test_the_room_is_for_what_is_archived_and_not_for_the_models_longest_history(
    by_views: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[ReadFrom] = []
    open_archive = DeviceArchives.open

    def watched(archives: DeviceArchives, layers: Sequence[ArchivedLayer]) -> DeviceArchive | None:
        opened = open_archive(archives, layers)
        assert opened is not None
        found.append(opened.read)
        return opened

    monkeypatch.setattr(DeviceArchives, "open", watched)
    monkeypatch.setattr(archived, "LEAST_ROOM", 16)
    with opened() as engine:
        said(engine, turns=1)
    assert len(found) == 1
    monkeypatch.setattr(archived, "MOST_BYTES", replace(found[0], tokens=64).query_bytes)
    by_views.clear()

    with opened() as engine:
        said(engine, turns=1)

    # Of positions from 96 on, 78 older ones are archived: those before the segment and its window, but the sink.
    assert by_views.count(1) == 3 * len(range(96, 60 + TOKENS - 1)), "in each of three layers"


@pytest.mark.parametrize(
    ("most_bytes", "logged"),
    [
        (archived.MOST_BYTES, []),
        (2**17, ["mode=stream: more than 64 old tokens of a session are decoded in chunks "]),
        (0, ["mode=stream: old tokens are decoded in chunks "]),
    ],
)
def test_the_log_says_once_which_histories_are_decoded_in_chunks(
    most_bytes: int, logged: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(archived, "LEAST_ROOM", 16)
    monkeypatch.setattr(archived, "MOST_BYTES", most_bytes)
    with caplog.at_level("INFO", device_archives.__name__), opened() as engine:
        said(engine, turns=1)
        said(engine, turns=1)
    found = [record.getMessage() for record in caplog.records if record.name == device_archives.__name__]
    assert [one.split("for each token")[0] for one in found] == logged


def test_an_entry_that_is_not_finite_ends_the_answer_and_keeps_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, is_broken = LatentCodec.decoder, False

    def damaged(self: LatentCodec, layer: int) -> LayerDecoder | None:
        found = decoder(self, layer)
        if found is None or layer != 1 or not is_broken:
            return found
        return replace(found, means=found.means * torch.nan)

    monkeypatch.setattr(LatentCodec, "decoder", damaged)
    with opened() as engine:
        session = engine.create_session(strategy=STREAM, limit_tokens=400).session_id
        engine.append(session, IDS.flatten()[:60].tolist())
        list(engine.generate(session, GenerateParams(max_tokens=5)))
        is_broken = True
        with pytest.raises(RestorationFailed, match="layer 1: keys and values"):
            list(engine.generate(session, GenerateParams(max_tokens=5)))
        assert engine.session_info(session).history_length == 65
        is_broken = False
        events = engine.generate(session, GenerateParams(max_tokens=5))
        assert len([event for event in events if isinstance(event, TokenCommitted)]) == 5
