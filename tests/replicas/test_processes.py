"""Two servers in processes of their own: one is killed or frozen, and the other goes on with what clients received."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc.aio

from kakeya.v1 import runtime_pb2 as pb
from tests.further import further_test
from tests.kept import Database
from tests.replicas.replicas import LEASE_SECONDS, replicas
from tests.replicas.test_ownership import ELSEWHERE, PASSING, until_there
from tests.server.wire import HISTORY, Client, Details, read_rest, refused


@further_test
async def test_a_killed_server_s_session_goes_on_and_a_frozen_one_tells_nothing_stale(database: Database) -> None:
    with replicas(database.dsn, "process") as (made, begin):
        channels = [grpc.aio.insecure_channel(one.target) for one in made]
        async with channels[0] as here, channels[1] as there:
            client, other = Client(here), Client(there)
            session, request_id, append_id = await client.open_endless(), os.urandom(16), os.urandom(16)
            asked = pb.GenerateRequest(session_id=session, max_tokens=60, request_id=request_id, temperature=0.9)
            stream = client.stream(asked)
            got = [frame.token_id for frame in [await stream.read() for _ in range(7)] if frame.HasField("token_id")]
            made[0].end_life(signal.SIGKILL)
            asked.resume_from = len(HISTORY) + len(got)
            frames = await until_there(lambda: other.call("Generate", asked))
            whole = got + [frame.token_id for frame in frames if frame.HasField("token_id")]
            kept = await other.call("ReadHistory", pb.ReadHistoryRequest(session_id=session))
            assert list(kept.token_ids) == [*HISTORY, *whole]
            assert len(whole) == 60

            begin(0)
            first = pb.AppendTokensRequest(session_id=session, token_ids=[1, 2], request_id=append_id)
            await until_there(lambda: client.call("AppendTokens", first))
            length = len(HISTORY) + 62
            streaming = await client.open_endless()
            endless = client.stream(pb.GenerateRequest(session_id=streaming, max_tokens=30_000))
            await endless.read()
            made[0].signal(signal.SIGSTOP)
            # Sent to the one that is stopped; answered when it wakes.
            calls = [
                asyncio.ensure_future(client.info(session)),
                asyncio.ensure_future(client.append(session, [9], expected_history_length=length)),
            ]
            replayed = await until_there(lambda: other.call("AppendTokens", first))
            assert (replayed.replayed, replayed.history_length) == (True, length)
            await until_there(lambda: other.append(session, range(10)))
            await until_there(lambda: other.append(streaming, [5]))
            await asyncio.sleep(LEASE_SECONDS)
            made[0].signal(signal.SIGCONT)
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(answer, grpc.aio.AioRpcError):
                    details: Any = Details(answer)
                    actual = details.error_info.metadata["actual"]
                    assert details.reason in PASSING or int(actual) == length + 10, details.reason
                else:  # it has noticed by then, and looked in the database
                    info: Any = answer
                    assert info.history_length == length + 10
            assert (await refused(read_rest(endless))).reason == ELSEWHERE
            # It has its model still, and gets the session back when it is asked.
            assert await until_there(lambda: client.append(session, [7])) == length + 11
