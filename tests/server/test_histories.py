"""Ids that are on their way into a history count, over the wire."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from laboratory.scripted import Script
from tests.facade import store_of
from tests.load.scripted import scripted_engine
from tests.server.wire import HISTORY, connected, read_rest, refused, serving, until

IDS = list(range(40))
KEYS = {owner: f"{owner}-has-a-long-key-of-her-own-0123456789" for owner in ("alice", "bob")}


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
