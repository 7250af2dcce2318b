"""An owner that sends too much, or reads nothing: others are served, and learn nothing."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from inference_engine.config import EngineConfig, ServerConfig
from inference_engine.server import message_limits as incoming
from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc
from laboratory.load.scripted_server import scripted_child
from tests.further import further_test
from tests.hostile.attacks import INFO, KEY, METADATA, OWN_KEY, WITH_KEY
from tests.hostile.conftest import MEMORY_BYTES, VICTIM, Attacked, attack, bearer
from tests.hostile.http2 import Connection
from tests.server.wire import connected, refused, serving
from tests.tiny import tiny_engine

pytestmark = pytest.mark.hostile

OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
SHORT_SECONDS, LONG_SECONDS = 0.5, 10.0
APPENDS = 100


def test_an_owner_is_served_beside_messages_that_are_far_too_large(attacked: Attacked) -> None:
    attack("4 MiB of stop ids", SHORT_SECONDS, attacked)


def test_an_owner_is_served_beside_forks_of_a_long_history_which_take_no_memory_for_it(attacked: Attacked) -> None:
    attack("forks of a long history", SHORT_SECONDS, attacked)


def test_an_owner_is_served_beside_constraints_that_take_work_to_compile_and_to_match(attacked: Attacked) -> None:
    # An owner's last grammars are kept, of MOST_SOURCE_BYTES_PER_OWNER together; compiling takes more for a moment.
    attack("constraints that are dear", SHORT_SECONDS, attacked, memory_bytes=2 * MEMORY_BYTES)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_KEY)
def test_an_owner_is_served_beside_a_long_attack_of_another(name: str, attacked: Attacked) -> None:
    attack(name, LONG_SECONDS, attacked)


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


@further_test
def test_appends_that_wait_hold_their_ids_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message takes three times the memory of its ids."""
    # glibc gives back what is freed of allocations this large. Else holes stay between the ids, as many as messages
    # were parsed before their ids were taken, which on a busy machine may be as much memory as the messages.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
    ids = range(65_536)
    config = ServerConfig(bind="127.0.0.1:0", metrics_bind=f"127.0.0.1:{free_port()}", busy_wait_seconds=60.0)
    with scripted_child(EngineConfig(kv_bytes=2**26), config, step_seconds=0.05) as child:
        server = Attacked(child.wait_ready(), child.pid)
        with grpc.insecure_channel(server.target, options=OWN_CONNECTION) as channel:
            stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
            endless = pb.Strategy(sink_window=pb.SinkWindowStrategy(sink=4, window=32))
            session_id = stub.CreateSession(pb.CreateSessionRequest(strategy=endless), timeout=60.0).session_id
            vocabulary = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60.0).vocab_size
            append = pb.AppendTokensRequest(session_id=session_id, token_ids=[each % vocabulary for each in ids])
            stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=[1, 2, 3]), timeout=60.0)
            running = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=10_000), timeout=120.0)
            next(running)
            before, ends = server.resident_bytes, time.monotonic() + 60.0
            appends = [stub.AppendTokens.future(append, timeout=60.0) for _ in range(APPENDS)]
            while held_tokens(config.metrics_bind) < APPENDS * len(ids):
                assert time.monotonic() < ends, "not all of them wait"
                time.sleep(0.1)
            # 1.2 times their bytes. It is 3.4 if the messages are held, too.
            while server.resident_bytes - before > APPENDS * 2 * 4 * len(ids):
                assert time.monotonic() < ends, f"{(server.resident_bytes - before) >> 20} MiB"
                time.sleep(0.1)
            assert not any(each.done() for each in appends)
            running.cancel()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def held_tokens(metrics_target: str) -> float:
    """Token ids in memory, of histories and of appends under way, as an operator sees them."""
    with urllib.request.urlopen(f"http://{metrics_target}/metrics", timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("session_history_held_tokens "))
