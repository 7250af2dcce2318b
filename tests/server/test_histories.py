"""What histories take, and what happens at their caps, over the wire and over HTTP."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from laboratory.scripted import Script
from tests.facade import store_of
from tests.load.scripted import scripted_engine
from tests.server.wire import HISTORY, Client, connected, read_rest, refused, serving, until
from tests.tiny import tiny_engine

IDS = list(range(40))
KEYS = {owner: f"{owner}-has-a-long-key-of-her-own-0123456789" for owner in ("alice", "bob")}


async def fork(client: Client, session_id: str) -> str:
    return str((await client.call("ForkSession", pb.ForkSessionRequest(session_id=session_id))).session_id)


async def test_info_says_what_histories_take_and_may_take() -> None:
    with tiny_engine(history_tokens_per_session=70, history_tokens_per_owner=300) as engine:
        async with serving(engine) as handle, connected(handle) as client:
            session = await client.open_endless(IDS)
            before = (await client.info(session)).history_bytes
            assert before >= 2 * 5 * len(IDS)
            await client.append(session, IDS[:25])
            assert (await client.info(session)).history_bytes > before
            await fork(client, session)
            reported = await client.call("GetServerInfo", pb.GetServerInfoRequest())
            assert reported.history_tokens_per_session == 70
            assert reported.history_tokens_per_owner == 300
            assert reported.history_token_count == 130


@pytest.mark.parametrize(
    ("settings", "reason", "metadata"),
    [
        (
            {"history_tokens_per_session": 60},
            "RESOURCE_EXHAUSTED HISTORY_LIMIT",
            {"history_length": "40", "limit_tokens": "60", "setting": "history_tokens_per_session"},
        ),
        (
            {"history_tokens_per_owner": 60},
            "RESOURCE_EXHAUSTED QUOTA",
            {"quota": "history_tokens_per_owner", "limit": "60"},
        ),
    ],
    ids=["session", "owner"],
)
async def test_an_append_past_a_cap_is_refused_typed_and_the_session_goes_on(
    settings: dict[str, Any], reason: str, metadata: dict[str, str]
) -> None:
    with tiny_engine(**settings) as engine:
        async with serving(engine) as handle, connected(handle) as client:
            session = await client.open_endless(IDS)
            details = await refused(client.append(session, IDS))
            assert (details.reason, details.retry_info) == (reason, None)
            assert details.error_info is not None
            assert dict(details.error_info.metadata) == metadata
            assert next(iter(settings)) in details.text
            assert await client.append(session, IDS[:10]) == 50
            assert len(await client.generate(session, 5)) == 5


async def test_a_stream_that_reaches_the_quota_gives_its_tokens_and_then_ends_typed() -> None:
    with tiny_engine(history_tokens_per_owner=50) as engine:
        async with serving(engine) as handle, connected(handle) as client:
            session = await client.open_endless(IDS)
            frames: list[Any] = []
            stream = client.stream(pb.GenerateRequest(session_id=session, max_tokens=30))
            details = await refused(read_rest(stream, into=frames))
            assert details.reason == "RESOURCE_EXHAUSTED QUOTA"
            assert len([frame for frame in frames if frame.HasField("token_id")]) == 10
            assert await client.length(session) == 50
            assert (await refused(client.generate(session, 1))).reason == "RESOURCE_EXHAUSTED QUOTA"
            assert (await refused(fork(client, session))).reason == "RESOURCE_EXHAUSTED QUOTA"
            await client.call("CloseSession", pb.CloseSessionRequest(session_id=session))
            assert len(await client.generate(await client.open_endless(IDS), 5)) == 5


async def test_ids_of_appends_that_wait_count_in_their_owners_quota(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"{Key.of(key, owner).line}\n" for owner, key in KEYS.items()), encoding="utf-8")
    go_on, script = threading.Event(), Script()
    script.on_step = lambda _: assert_came(go_on)
    with scripted_engine(script=script, history_tokens_per_owner=200, stall_seconds=600.0) as engine:
        async with (
            serving(engine, api_key_file=str(path), busy_wait_seconds=60.0) as handle,
            connected(handle, metadata=bearer(KEYS["alice"])) as alice,
            connected(handle, metadata=bearer(KEYS["bob"])) as bob,
        ):
            busy, free, others = await alice.open(IDS), await alice.open(), await bob.open()
            held = engine.history_tokens_of("alice")
            running = alice.stream(pb.GenerateRequest(session_id=busy, max_tokens=1, progress=True))
            assert (await running.read()).WhichOneof("payload") == "accepted"
            waiting = asyncio.create_task(alice.append(busy, IDS * 3))
            await until(lambda: store_of(engine).held_history().tokens == held + len(HISTORY) + 120)
            details = await refused(alice.append(free, IDS[:35]))
            assert (details.reason, details.retry_info is None) == ("RESOURCE_EXHAUSTED QUOTA", False)
            assert "carry 120" in details.text
            assert await bob.append(others, IDS * 4) == len(HISTORY) + 160
            go_on.set()
            await read_rest(running)
            assert await waiting == len(IDS) + 1 + 120
            assert engine.history_tokens_of("alice") == held + 121


def assert_came(event: threading.Event) -> None:
    assert event.wait(60)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]
