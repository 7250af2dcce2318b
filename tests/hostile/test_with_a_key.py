"""An owner that sends too much, or reads nothing: others are served, and learn nothing."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import grpc
import pytest

from inference_engine.server import incoming
from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc
from tests.hostile.attacks import INFO, KEY, METADATA, OWN_KEY, STOP_IDS, WITH_KEY
from tests.hostile.conftest import VICTIM, Attacked, Victim, attack, bearer
from tests.hostile.http2 import Connection
from tests.server.wire import connected, refused, serving
from tests.tiny import tiny_engine

pytestmark = pytest.mark.hostile

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
SHORT_SECONDS, LONG_SECONDS = 0.5, 10.0
PAIRS = 4_000


def test_an_owner_is_served_beside_messages_that_are_far_too_large(attacked: Attacked) -> None:
    attack("4 MiB of stop ids", SHORT_SECONDS, attacked)


def test_an_owner_is_served_beside_forks_of_a_long_history_which_take_no_memory_for_it(attacked: Attacked) -> None:
    attack("forks of a long history", SHORT_SECONDS, attacked)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_KEY)
def test_an_owner_is_served_beside_a_long_attack_of_another(name: str, attacked: Attacked) -> None:
    attack(name, LONG_SECONDS, attacked)


def test_a_message_far_too_large_is_refused_before_it_is_parsed(attacked: Attacked, victim: Victim) -> None:
    """By the transport, and whether the session is there or not."""
    with grpc.insecure_channel(attacked.target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        request = pb.GenerateRequest(session_id="none", max_tokens=1, stop_token_ids=range(STOP_IDS))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, metadata=METADATA, timeout=60.0))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_calls_whose_message_does_not_come_are_an_owners_calls_until_their_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "MESSAGE_SECONDS", 2.0)
    path = tmp_path / "keys"
    path.write_text(f"{Key.of(KEY, 'attacker').line}\n{Key.of(VICTIM, 'victim').line}\n", encoding="utf-8")
    question = pb.GetServerInfoRequest()
    with tiny_engine() as engine:
        async with (
            serving(engine, api_key_file=str(path), max_owner_calls=4) as handle,
            connected(handle, metadata=list(METADATA), options=OWN_CONNECTION) as attacker,
            connected(handle, metadata=list(bearer(VICTIM)), options=OWN_CONNECTION) as victim,
        ):
            with await asyncio.to_thread(Connection, handle.target) as half_open:
                for _ in range(4):
                    half_open.begin(INFO, OWN_KEY)
                await asyncio.sleep(0.5)
                details = await refused(attacker.call("GetServerInfo", question))
                await victim.call("GetServerInfo", question)
                await asyncio.sleep(2.0)
                await attacker.call("GetServerInfo", question)
    assert details.reason == "RESOURCE_EXHAUSTED OVERLOADED"


@pytest.mark.long
def test_how_long_a_refusal_takes_does_not_show_whether_a_session_of_another_owner_exists(attacked: Attacked) -> None:
    with grpc.insecure_channel(attacked.target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        made = stub.CreateSession(pb.CreateSessionRequest(limit_tokens=100), metadata=bearer(VICTIM), timeout=60.0)
        there, nowhere = made.session_id, made.session_id[::-1]

        def seconds(session_id: str) -> float:
            began = time.perf_counter()
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id), metadata=METADATA, timeout=60.0)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            return time.perf_counter() - began

        # In pairs, in turns: what the machine does otherwise meets both.
        pairs = [(seconds(there), seconds(nowhere)) for _ in range(PAIRS)]
        usual = statistics.median(second for _, second in pairs)
        assert abs(statistics.median(first - second for first, second in pairs)) < 0.03 * usual
        stub.CloseSession(pb.CloseSessionRequest(session_id=there), metadata=bearer(VICTIM), timeout=60.0)
