"""What breaks under a running Generate reaches its client as a typed error, and no other client."""

from dataclasses import replace

import torch

from inference_engine.backends.base import Result, Step
from inference_engine.engine import Engine
from inference_engine.kernels.sampling import draw_all
from tests.facade import forward_of, session_of, steps_run_by
from tests.server.wire import HISTORY, Client, refused


async def test_logits_that_are_not_finite_are_never_sampled(engine: Engine, client: Client) -> None:
    session_id = await client.open()
    run = forward_of(engine).run

    def broken(step: Step) -> Result:
        logits = torch.full_like(run(replace(step, needs_logits=True)).logits, torch.nan)
        return Result(logits, samples=draw_all(logits, step.draws))

    with steps_run_by(engine, broken):
        details = await refused(client.generate(session_id))
    assert details.reason == "INTERNAL NON_FINITE_LOGITS"
    assert await client.length(session_id) == len(HISTORY)
    assert await client.generate(session_id) == await client.generate(await client.open())


async def test_a_step_that_fails_shows_an_incident_id_only(engine: Engine, client: Client) -> None:
    session_id = await client.open()

    def broken(step: Step) -> Result:
        raise RuntimeError("secret-detail-of-the-device")

    with steps_run_by(engine, broken):
        details = await refused(client.generate(session_id))
    assert details.reason == "INTERNAL INTERNAL"
    assert details.text.startswith("internal error, incident ")
    assert await client.length(session_id) == len(HISTORY)


async def test_a_session_whose_cache_and_history_disagree_fails_alone_and_says_why(
    engine: Engine, client: Client
) -> None:
    session_id = await client.open()
    session_of(engine, session_id).cached_tokens = 1_000_000
    details = await refused(client.generate(session_id))
    assert details.reason == "FAILED_PRECONDITION INV2"
    for again in (client.generate(session_id), client.append(session_id, [1])):
        assert (await refused(again)).reason == "FAILED_PRECONDITION INV2"
    info = await client.info(session_id)
    assert info.failure_reason == "INV2"
    assert info.cache_invariant_inv2_violations == 1
    assert info.kv_live_bytes == 0
