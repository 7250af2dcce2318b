"""What breaks under a running Generate reaches its client as a typed error, and nobody else."""

from typing import Any

import pytest
import torch

from inference_engine.backends.base import Result
from inference_engine.engine import Engine
from tests.server.wire import HISTORY, Client, refused


async def test_logits_that_are_not_finite_are_never_sampled(
    engine: Engine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await client.open()
    run = engine._forward.run

    def broken(step: Any) -> Result:
        return Result(torch.full_like(run(step).logits, torch.nan))

    with monkeypatch.context() as patch:
        patch.setattr(engine._forward, "run", broken)
        details = await refused(client.generate(session_id))
    assert details.reason == "INTERNAL NON_FINITE_LOGITS"
    assert await client.length(session_id) == len(HISTORY)
    assert await client.generate(session_id) == await client.generate(await client.open())


async def test_a_step_that_fails_shows_an_incident_id_only(
    engine: Engine, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await client.open()

    def broken(step: Any) -> torch.Tensor:
        raise RuntimeError("secret-detail-of-the-device")

    with monkeypatch.context() as patch:
        patch.setattr(engine._forward, "run", broken)
        details = await refused(client.generate(session_id))
    assert details.reason == "INTERNAL INTERNAL"
    assert details.text.startswith("internal error, incident ")
    assert await client.length(session_id) == len(HISTORY)


async def test_a_session_whose_cache_and_history_disagree_fails_alone_and_says_why(
    engine: Engine, client: Client
) -> None:
    session_id = await client.open()
    engine._store.find(session_id, "").cached_tokens = 1_000_000
    details = await refused(client.generate(session_id))
    assert details.reason == "FAILED_PRECONDITION INV2"
    for again in (client.generate(session_id), client.append(session_id, [1])):
        assert (await refused(again)).reason == "FAILED_PRECONDITION INV2"
    info = await client.info(session_id)
    assert info.failure_reason == "INV2"
    assert info.cache_invariant_inv2_violations == 1
    assert info.kv_live_bytes == 0
