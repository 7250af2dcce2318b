"""ForkSession over the wire: what it answers, what a retry gets, and what it refuses."""

import os
from typing import Any

import pytest

from inference_engine.engine import Engine
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, held, refused
from tests.tiny import TRAINED_POSITIONS


async def fork(client: Client, session_id: str, **fields: Any) -> Any:
    return await client.call("ForkSession", pb.ForkSessionRequest(session_id=session_id, **fields))


async def test_a_fork_says_what_it_was_promised_and_goes_on_by_itself(client: Client) -> None:
    parent = await client.open(eos_token_ids=[5], limit_tokens=200)
    said = await client.generate(parent, 6)
    forked = await fork(client, parent, client_label="a branch")
    facts = await client.info(forked.session_id)
    assert forked.session_id != parent
    assert forked.history_length == facts.history_length == len(HISTORY) + len(said)
    assert forked.strategy == facts.strategy == (await client.info(parent)).strategy
    assert (forked.sustained_bytes, forked.limit_tokens) == (facts.sustained_bytes, 200)
    assert forked.mode == pb.MODE_BATCHED
    assert forked.model_id == "tiny"
    assert not forked.replayed
    assert await client.append(forked.session_id, [1, 2, 3]) == forked.history_length + 3
    assert await client.length(parent) == forked.history_length
    assert await client.generate(forked.session_id, 4)


async def test_a_retry_gets_the_fork_that_was_made_even_when_its_parent_is_gone(client: Client) -> None:
    parent, request_id = await client.open(), os.urandom(16)
    first = await fork(client, parent, request_id=request_id)
    again = await fork(client, parent, request_id=request_id)
    assert (again.session_id, again.replayed, first.replayed) == (first.session_id, True, False)
    await client.call("CloseSession", pb.CloseSessionRequest(session_id=parent))
    assert (await fork(client, parent, request_id=request_id)).session_id == first.session_id
    details = await refused(fork(client, parent, request_id=request_id, client_label="another"))
    assert details.reason == "INVALID_ARGUMENT REQUEST_ID_REUSED"


async def test_a_fork_waits_for_what_runs_on_its_parent_and_gives_up_typed(client: Client, engine: Engine) -> None:
    parent = await client.open()
    with held(engine):
        running = client.stream(pb.GenerateRequest(session_id=parent, max_tokens=3, progress=True))
        await running.read()  # it was accepted
        details = await refused(fork(client, parent))
        assert details.reason == "ABORTED SESSION_BUSY"
    forked = await fork(client, parent)
    assert forked.history_length == len(HISTORY) + 3


WRONG_FORKS: list[tuple[dict[str, Any], str]] = [
    ({"expected_history_length": 3}, "ABORTED HISTORY_LENGTH_MISMATCH"),
    ({"limit_tokens": len(HISTORY) - 1}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
    ({"limit_tokens": TRAINED_POSITIONS + 1}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
    ({"client_label": "a\nb"}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
    ({"request_id": b"short"}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
]


async def test_what_is_wrong_is_said_and_nothing_is_forked(
    client: Client, engine: Engine, subtests: pytest.Subtests
) -> None:
    for fields, reason in WRONG_FORKS:
        with subtests.test(reason):
            parent = await client.open()
            reserved = engine.info().kv_reserved_bytes
            assert (await refused(fork(client, parent, **fields))).reason == reason
            assert engine.info().kv_reserved_bytes == reserved
            assert (await fork(client, parent, expected_history_length=len(HISTORY))).history_length == len(HISTORY)


# -- at a position, and in place of the session -----------------------------------------------------------------------


async def rewind(client: Client, session_id: str, **fields: Any) -> Any:
    return await client.call("RewindSession", pb.RewindSessionRequest(session_id=session_id, **fields))


async def test_a_fork_at_a_position_begins_there_and_says_what_its_generate_will_prefill(client: Client) -> None:
    parent = await client.open()
    said = await client.generate(parent, 6)
    fields = {"at_position": len(HISTORY) + 2, "request_id": os.urandom(16)}
    forked = await fork(client, parent, **fields)
    assert (forked.history_length, forked.prefill_token_count) == (len(HISTORY) + 2, 1)
    assert await client.generate(forked.session_id, 4) == said[2:]
    assert await client.length(parent) == len(HISTORY) + 6
    assert (await fork(client, parent, **fields)).session_id == forked.session_id
    del fields["at_position"]  # another call
    assert (await refused(fork(client, parent, **fields))).reason == "INVALID_ARGUMENT REQUEST_ID_REUSED"
    beyond = await refused(fork(client, parent, at_position=len(HISTORY) + 7))
    assert (beyond.reason, beyond.fields) == ("INVALID_ARGUMENT INVALID_ARGUMENT", ["at_position"])


async def test_a_rewound_session_is_another_in_the_place_of_the_first_and_a_retry_gets_it(client: Client) -> None:
    old = await client.open(eos_token_ids=[5], limit_tokens=200, client_label="mine")
    said, request_id = await client.generate(old, 6), os.urandom(16)
    first = await rewind(client, old, at_position=len(HISTORY) + 2, request_id=request_id)
    facts = await client.info(first.session_id)
    assert first.session_id != old
    assert first.history_length == facts.history_length == len(HISTORY) + 2
    assert (first.limit_tokens, facts.client_label, list(facts.eos_token_ids)) == (200, "mine", [5])
    assert first.strategy == facts.strategy
    assert (first.prefill_token_count, first.mode, first.model_id) == (1, pb.MODE_BATCHED, "tiny")
    assert (await refused(client.length(old))).reason == "NOT_FOUND SESSION_NOT_FOUND"
    again = await rewind(client, old, at_position=len(HISTORY) + 2, request_id=request_id)
    assert (again.session_id, again.replayed, first.replayed) == (first.session_id, True, False)
    assert await client.generate(first.session_id, 4) == said[2:]
    listed = {one.session_id for one in (await client.call("ListSessions", pb.ListSessionsRequest())).sessions}
    assert first.session_id in listed
    assert old not in listed


WRONG_REWINDS: list[tuple[dict[str, Any], str]] = [
    ({}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
    ({"at_position": len(HISTORY) + 1}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
    ({"at_position": 2**64 - 1}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
    ({"at_position": 1, "expected_history_length": 3}, "ABORTED HISTORY_LENGTH_MISMATCH"),
    ({"at_position": 1, "request_id": b"short"}, "INVALID_ARGUMENT INVALID_ARGUMENT"),
]


async def test_a_wrong_rewind_is_said_and_nothing_is_changed(client: Client, subtests: pytest.Subtests) -> None:
    session = await client.open()
    for fields, reason in WRONG_REWINDS:
        with subtests.test(str(fields)):
            assert (await refused(rewind(client, session, **fields))).reason == reason
            assert (await refused(rewind(client, "no-session", **fields))).reason in (
                "NOT_FOUND SESSION_NOT_FOUND",
                reason,
            )
            assert await client.length(session) == len(HISTORY)
