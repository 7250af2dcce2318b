"""What one owner can learn of another from the numbers that the server reports: nothing exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import connected, refused, serving
from tests.tiny_native import served_engine

pytestmark = pytest.mark.hostile

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(Key.of(ALICE, "alice").line + "\n" + Key.of(BOB, "bob").line + "\n", encoding="utf-8")
    return str(path)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


async def test_a_full_pool_says_nothing_of_how_full_it_is(key_file: str) -> None:
    with served_engine() as engine:
        needed = engine.create_session().bound.peak_bytes
    reported = []
    for others in (100, 200):
        with served_engine(growth="guaranteed", kv_bytes=needed) as engine:
            async with (
                serving(engine, api_key_file=key_file) as handle,
                connected(handle, metadata=bearer(ALICE)) as alice,
                connected(handle, metadata=bearer(BOB)) as bob,
            ):
                await alice.call("CreateSession", pb.CreateSessionRequest(limit_tokens=others))
                details = await refused(bob.call("CreateSession", pb.CreateSessionRequest()))
                reported.append((details.reason, details.text, str(details.error_info)))
    assert reported[0] == reported[1]
    assert reported[0][0] == "RESOURCE_EXHAUSTED NO_CAPACITY"
