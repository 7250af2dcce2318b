"""The verifier composed with a restorer, driven by hand, is what an engine with the same codec is."""

from __future__ import annotations

import numpy as np
import pytest

from inference_engine.decode.sampling import Sampler
from inference_engine.decode.verifier import Block, Verifier
from inference_engine.errors import InvalidArgument
from inference_engine.kv.context import KVContext
from inference_engine.kv.session_kv import SessionKV
from inference_engine.kv.strategies import make_strategy
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Mode, Sampling
from kv_cache_proposer.restored_verifier import DLMRestoredVerifier
from tests.laws.variants import LATENT, engine_for, generate, text
from tests.tiny import PAGES, VOCABULARY, tiny_forward, tiny_latent

COUNT = 12


def tiny_context(*, windowed: bool = True) -> KVContext:
    forward = tiny_forward(windowed=windowed)
    return forward.open(forward.geometry(mode=Mode.BATCHED, **PAGES), 2**22)


def greedy(verifier: Verifier, kv: SessionKV, history: list[int], count: int) -> list[int]:
    """What the target says after `history`, `count` tokens of it."""
    ids, told = np.array(history, dtype=np.uint32), len(history)
    sampler = Sampler.start(Sampling(), 0, ids, VOCABULARY, verifier.context.device)
    while len(ids) < told + count:
        pending = ids[kv.next_position :][: kv.room()]
        is_last = kv.next_position + len(pending) == len(ids)
        generated = np.arange(kv.next_position, kv.next_position + len(pending)) >= told
        block = Block(kv=kv, token_ids=pending, generated=generated, sampler=sampler if is_last else None)
        [outcome] = verifier.run([block])
        kv.commit(kv.next_position + len(pending))
        ids = np.append(ids, [sample.token_id for sample in outcome.samples]).astype(np.uint32)
    return [int(token) for token in ids[told:]]


@pytest.mark.parametrize("mode", ["hold", "stream"])
def test_driven_by_hand_it_says_what_an_engine_with_the_codec_says(mode: str) -> None:
    strategy: KVStrategy = make_strategy("restored", **{**LATENT, "window": 16, "mode": mode})
    verifier = DLMRestoredVerifier(tiny_forward(), tiny_context(), tiny_latent())
    kv = SessionKV(strategy, verifier.context, 200)
    kv.wake(200)
    ours = greedy(verifier, kv, text(), COUNT)
    with engine_for(Mode.BATCHED) as engine:
        session = engine.create_session(strategy=strategy).session_id
        engine.append(session, text())
        theirs = [token for token, _ in generate(engine, session, COUNT)]
        lost = engine.create_session(strategy=make_strategy("sink_window", sink=2, window=16)).session_id
        engine.append(lost, text())
        without = [token for token, _ in generate(engine, lost, COUNT)]
    assert ours == theirs != without


def test_a_codec_made_for_other_layers_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="layers") as refusal:
        DLMRestoredVerifier(tiny_forward(windowed=False), tiny_context(windowed=False), tiny_latent())
    assert refusal.value.field == "source"
