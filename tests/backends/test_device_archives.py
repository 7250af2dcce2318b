"""Single tokens of streaming sessions read old entries in the step's one operation over regions, if it can; others by
views.

Here the operation is the reference; `tests/kernels/test_archived.py` compares the kernels with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from inference_engine.backends.torch_forward import TorchForward
from inference_engine.config import EngineConfig
from inference_engine.engine import Engine
from inference_engine.errors import RestorationFailed
from inference_engine.kernels import archived
from inference_engine.kv.context import LayerDecoder
from inference_engine.kv.parts import streamed
from inference_engine.kv.strategies import parse_strategy
from inference_engine.kv.views import ChunkView
from inference_engine.types import GenerateParams, TokenCommitted
from kv_cache_proposer.f_theta.codec import LatentCodec
from tests.backends.test_torch_coder import IDS, SIZES, WithoutOperations, made_forward

STREAM = parse_strategy("restored:sink=2,window=16,source=latent,bytes_per_token=96,mode=stream")
TOKENS = 40


def opened(kind: type[TorchForward] = TorchForward) -> Engine:
    forward, codec = made_forward(kind, LlamaConfig(**SIZES))
    return Engine(forward, EngineConfig(kv_bytes=2**24, segment_tokens=16, page_tokens=4), latent=codec)


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
    # Appended tokens come in several; a chunk of one there may be.
    assert by_views and by_views.count(1) == 0
    by_views.clear()

    with opened(WithoutOperations) as engine:
        expected = said(engine)

    assert by_views.count(1) >= 2 * (TOKENS - 1)
    assert [event.token_id for event in found] == [event.token_id for event in expected]
    logprobs = [torch.tensor([event.logprob for event in events]) for events in (found, expected)]
    torch.testing.assert_close(*logprobs, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("module", "name"), [(archived, "MOST_BYTES"), (streamed, "MOST_QUERIES")])
def test_without_room_for_their_numbers_and_in_wide_steps_they_read_by_views(
    module: Any, name: str, by_views: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, 0)

    with opened() as engine:
        said(engine, turns=1)

    assert by_views.count(1) >= TOKENS - 1


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
