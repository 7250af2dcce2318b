"""Sessions over the wire that outlive the server: nothing is sent before it is safe, and all that was sent is there."""

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig
from inference_engine.errors import ConfigError, SessionNotFound
from inference_engine.server.watchdog import EXIT_JOURNAL, Watchdog
from inference_engine.session.sqlite_journal import FILE
from kakeya.v1 import runtime_pb2 as pb
from tests.facade import let_leave
from tests.further import further
from tests.kept import Place, after_a_kill, gated, keeping
from tests.server.wire import HISTORY, Client, connected, read_rest, refused, serving, until

FOREVER = 30_000
LOOKS = {"GetSessionInfo", "ReadHistory"}  # calls on a session that use it not


def ids_of(frames: Sequence[Any]) -> list[int]:
    return [frame.token_id for frame in frames if frame.HasField("token_id")]


async def test_nothing_is_sent_before_it_is_safe_not_even_in_an_error(tmp_path: Path) -> None:
    with gated(tmp_path) as (engine, journal):
        async with serving(engine) as server, connected(server) as client:
            session_id = await client.open()
            stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=3))
            first = await stream.read()
            journal.gate.clear()
            append = asyncio.ensure_future(client.append(session_id, [5, 6]))
            # The engine goes on: it does not wait for the disk. No answer reports what it did.
            await until(lambda: engine.session_info(session_id).history_length == len(HISTORY) + 5)
            mismatch = asyncio.ensure_future(refused(client.append(session_id, [1], expected_history_length=99)))
            done, _ = await asyncio.wait([append, mismatch], timeout=0.3)
            assert not done, "an answer came before what it says was safe"
            # A read says what is safe.
            safe = engine.session_info(session_id).saved_tokens
            assert await client.length(session_id) == safe <= len(HISTORY) + 3
            history = await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session_id))
            assert len(history.token_ids) == safe
            assert engine.metrics.histories_behind._value.get() == 0, "what was not sent raises no alarm"
            journal.gate.set()
            assert await append == await client.length(session_id) == len(HISTORY) + 5
            assert (await mismatch).reason == "ABORTED HISTORY_LENGTH_MISMATCH"
            assert engine.metrics.histories_behind._value.get() == 1
            rest = await read_rest(stream)
            history = await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session_id))
            assert list(history.token_ids)[len(HISTORY) :][:3] == ids_of([first, *rest])


async def test_a_client_goes_on_after_a_kill_as_if_nothing_had_been(place: Place) -> None:
    with keeping(place) as engine:
        async with serving(engine) as server, connected(server) as client:
            request_id, create_id = os.urandom(16), os.urandom(16)
            opened = await client.call("CreateSession", pb.CreateSessionRequest(request_id=create_id, client_label="x"))
            assert opened.durability == pb.DURABILITY_PROCESS
            session_id = opened.session_id
            await client.append(session_id, HISTORY, request_id=request_id)
            asked = pb.GenerateRequest(
                session_id=session_id, max_tokens=40, temperature=0.9, request_id=request_id, token_details=True
            )
            stream = client.stream(asked)
            got = [(await stream.read()).token for _ in range(7)]
            killed = after_a_kill(place)
            whole = got + [frame.token for frame in await read_rest(stream) if frame.HasField("token")]
    with keeping(killed) as engine:
        async with serving(engine) as server, connected(server) as client:
            (listed,) = (await client.call("ListSessions", pb.ListSessionsRequest())).sessions
            assert (listed.session_id, listed.client_label, listed.resident) == (session_id, "x", False)
            again = await client.call("CreateSession", pb.CreateSessionRequest(request_id=create_id, client_label="x"))
            assert (again.session_id, again.replayed) == (session_id, True)
            asked.resume_from = got[-1].position + 1
            rest = [frame.token for frame in await client.call("Generate", asked) if frame.HasField("token")]
            assert got + rest == whole
            answer = await client.call(
                "AppendTokens",
                pb.AppendTokensRequest(session_id=session_id, token_ids=HISTORY, request_id=request_id),
            )
            assert (answer.history_length, answer.replayed) == (len(HISTORY), True)
            info = await client.info(session_id)
            assert info.history_length == info.saved_token_count == len(HISTORY) + 40
            assert (await client.call("GetServerInfo", pb.GetServerInfoRequest())).durability == pb.DURABILITY_PROCESS
            closed = await client.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))
            assert closed.final_history_length == info.history_length
            assert not (await client.call("ListSessions", pb.ListSessionsRequest())).sessions
        closed_again = after_a_kill(killed)
    with keeping(closed_again) as engine:
        async with serving(engine) as server, connected(server) as client:
            repeated = pb.AppendTokensRequest(session_id=session_id, token_ids=HISTORY, request_id=request_id)
            assert (await client.call("AppendTokens", repeated)).replayed
            assert (await refused(client.append(session_id, [1]))).reason == "NOT_FOUND SESSION_NOT_FOUND"


async def test_a_look_at_a_session_says_what_it_is_and_brings_none_back(place: Place) -> None:
    with keeping(place) as engine:
        async with serving(engine) as server, connected(server) as client:
            session_id = (await client.call("CreateSession", pb.CreateSessionRequest(eos_token_ids=[9, 7]))).session_id
            for _ in range(3):  # turns that are folded, and one that is not
                await client.append(session_id, HISTORY)
                await client.generate(session_id, 3)
            resident = await client.info(session_id)
            whole = await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session_id))
            let_leave(engine, session_id)
            kept = await client.info(session_id)
            for first in range(len(whole.token_ids) + 1):
                asked = pb.ReadHistoryRequest(session_id=session_id, first_position=first, max_tokens=5)
                piece = await client.call("ReadHistory", asked)
                assert list(piece.token_ids) == list(whole.token_ids)[first : first + 5]
                assert piece.history_length == whole.history_length
            again = await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session_id))
            assert again == whole, "the same ids, and which were generated"
            beyond = pb.ReadHistoryRequest(session_id=session_id, first_position=len(whole.token_ids) + 1)
            assert (await refused(client.call("ReadHistory", beyond))).fields == ["first_position"]
            assert engine.is_elsewhere(session_id), "a look has brought it back"
            for same in (
                "strategy",
                "limit_tokens",
                "eos_token_ids",
                "history_length",
                "sustained_bytes",
                "peak_bytes",
            ):
                assert getattr(kept, same) == getattr(resident, same), same
            assert kept.saved_token_count == kept.history_length == len(whole.token_ids)
            assert (kept.resident, kept.kv_live_bytes, kept.reserved_bytes, kept.history_bytes) == (False, 0, 0, 0)
            assert kept.idle_seconds >= resident.idle_seconds
            for unknown in ("no-session", ""):
                assert (await refused(client.length(unknown))).reason == "NOT_FOUND SESSION_NOT_FOUND"
            assert len(await client.generate(session_id, 2)) == 2
            assert not engine.is_elsewhere(session_id)


async def test_a_session_that_leaves_memory_between_a_calls_look_for_it_and_the_call_is_brought_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeping(place) as engine:
        is_elsewhere, recall, leaves = engine.is_elsewhere, engine.recall, list[str]()

        def leave(session_id: str) -> None:
            if session_id in leaves:
                leaves.remove(session_id)
                let_leave(engine, session_id)

        def look(session_id: str, **named: Any) -> bool:
            if found := is_elsewhere(session_id, **named):
                return found
            leave(session_id)
            return False

        def bring_back(session_id: str, **named: Any) -> None:
            recall(session_id, **named)
            leave(session_id)

        monkeypatch.setattr(engine, "is_elsewhere", look)
        monkeypatch.setattr(engine, "recall", bring_back)
        async with serving(engine) as server, connected(server) as client:
            session_id = await client.open()
            calls: list[tuple[str, Any]] = [
                ("AppendTokens", pb.AppendTokensRequest(token_ids=[1, 2], request_id=os.urandom(16))),
                ("Generate", pb.GenerateRequest(max_tokens=3, request_id=os.urandom(16))),
                ("ForkSession", pb.ForkSessionRequest(request_id=os.urandom(16))),
                ("RewindSession", pb.RewindSessionRequest(at_position=9, request_id=os.urandom(16))),
                ("CloseSession", pb.CloseSessionRequest()),
            ]
            service = pb.DESCRIPTOR.services_by_name["RuntimeService"]
            on_a_session = {rpc.name for rpc in service.methods if "session_id" in rpc.input_type.fields_by_name}
            assert on_a_session - LOOKS == {name for name, _ in calls}
            answers: dict[str, Any] = {}
            for name, asked in calls:
                asked.session_id = session_id
                leaves.append(session_id)
                answers[name] = await client.call(name, asked)
                assert not leaves, f"{name} did not look"
                if name == "RewindSession":
                    session_id = answers[name].session_id
            assert answers["AppendTokens"].history_length == len(HISTORY) + 2
            assert len(ids_of(answers["Generate"])) == 3
            assert answers["ForkSession"].history_length == len(HISTORY) + 5
            assert answers["RewindSession"].history_length == answers["CloseSession"].final_history_length == 9
            for asked in (session_id, "no-session"):
                found = await refused(client.length(asked))
                assert found.reason == "NOT_FOUND SESSION_NOT_FOUND"


async def test_a_disk_that_fails_ends_the_process_and_nothing_more_is_sent(tmp_path: Path) -> None:
    with gated(tmp_path) as (engine, journal):
        async with serving(engine) as server, connected(server) as client:
            session_id = await client.open()
            journal.raising = OSError("the disk is gone")
            append = asyncio.ensure_future(client.append(session_id, [1]))
            gave_up = await asyncio.wait_for(Watchdog(engine, 0.0, asyncio.get_running_loop().time).gave_up(), 20)
            assert (gave_up.status, "the disk is gone" in gave_up.text) == (EXIT_JOURNAL, True)
            assert f"kakeya journal backup {engine.config.state_dir} FOLDER" in gave_up.text
            assert not append.done()
            assert (await refused(client.open(()))).reason == "UNAVAILABLE ENGINE_STALLED"
            await server.abandon(gave_up.error)
            assert (await refused(append)).reason == "UNAVAILABLE DRAINING"


@pytest.mark.parametrize("how", ["moved", "replaced", further("removed"), further("log removed")])
async def test_a_folder_that_is_no_longer_there_ends_the_process_and_nothing_more_is_sent(
    how: str, tmp_path: Path
) -> None:
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    with gated(state) as (engine, _):
        async with serving(engine) as server, connected(server) as client:
            session_id = await client.open()
            if how == "log removed":
                (state / f"{FILE}-wal").unlink()
            elif how == "removed":
                shutil.rmtree(state)
            else:
                state.rename(elsewhere)
            if how == "replaced":
                shutil.copytree(elsewhere, state, ignore=shutil.ignore_patterns("probe-*"))  # there for a moment
            append = asyncio.ensure_future(client.append(session_id, [1]))
            gave_up = await asyncio.wait_for(Watchdog(engine, 0.0, asyncio.get_running_loop().time).gave_up(), 20)
            assert gave_up.status == EXIT_JOURNAL
            assert f"state_dir {state} was moved, replaced or removed" in gave_up.text
            await server.abandon(gave_up.error)
            assert (await refused(append)).reason == "UNAVAILABLE DRAINING"
    if elsewhere.exists():  # put back
        shutil.rmtree(state, ignore_errors=True)
        elsewhere.rename(state)
        with keeping(state) as engine:
            (kept,) = engine.list_sessions()
            assert (kept.session_id, kept.history_length) == (session_id, len(HISTORY))


async def test_an_invariant_that_breaks_does_not_lose_a_history_that_is_kept(place: Place) -> None:
    from tests.facade import session_of

    with keeping(place) as engine:
        async with serving(engine) as server, connected(server) as client:
            session_id = await client.open()
            said = await client.generate(session_id, 4)
            session_of(engine, session_id).cached_tokens += 1000  # so that the cache seems to have gone back
            details = await refused(client.generate(session_id, 4))
            assert details.reason == "FAILED_PRECONDITION INV2"
            assert "history is kept" in details.text
            info = await client.info(session_id)
            assert info.history_length >= len(HISTORY) + 4
            assert not info.failure_reason
            assert info.cache_invariant_inv2_violations == 1
            history = await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session_id))
            assert list(history.token_ids)[: len(HISTORY) + 4] == [*HISTORY, *said]
            assert await client.generate(session_id, 4)


@pytest.mark.parametrize("method", ["AppendTokens", "Generate", "ForkSession", "RewindSession"])
async def test_a_call_that_waits_for_a_session_finds_it_though_it_leaves_memory_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with keeping(place, max_sessions=1 + (method == "ForkSession"), session_evictable_seconds=0.0) as engine:
        when_free, waits = engine.when_free, asyncio.Event()

        def leaves_first(session_id: str, callback: Callable[[], None]) -> None:
            def leave() -> None:
                others = [engine.create_session().session_id for _ in range(engine.config.max_sessions)]
                assert engine.is_elsewhere(session_id)
                for other in others:
                    engine.close_session(other)
                callback()

            when_free(session_id, leave)
            waits.set()

        async with serving(engine, busy_wait_seconds=30.0) as server, connected(server) as client:
            session_id = await client.open_endless()
            stream = client.stream(pb.GenerateRequest(session_id=session_id, max_tokens=FOREVER))
            await stream.read()
            monkeypatch.setattr(engine, "when_free", leaves_first)
            requests: dict[str, Any] = {
                "AppendTokens": pb.AppendTokensRequest(session_id=session_id, token_ids=[5]),
                "Generate": pb.GenerateRequest(session_id=session_id, max_tokens=1),
                "ForkSession": pb.ForkSessionRequest(session_id=session_id),
                "RewindSession": pb.RewindSessionRequest(session_id=session_id, at_position=9),
            }
            call = asyncio.ensure_future(client.call(method, requests[method]))
            await asyncio.wait_for(waits.wait(), 30)
            stream.cancel()
            answer = await call
            if method == "RewindSession":
                assert answer.history_length == await client.length(answer.session_id) == 9
                return
            length = await client.length(session_id)
            assert length > len(HISTORY)
            if method != "Generate":
                assert answer.history_length == length


async def test_a_session_that_is_not_in_memory_is_closed_where_it_is(place: Place) -> None:
    """Also one that is more than its owner may hold, of which another length is expected, or of another owner."""
    with keeping(place) as engine:
        async with serving(engine) as server, connected(server) as client:
            session_id = await client.open()
    close = pb.CloseSessionRequest(session_id=session_id, request_id=b"close".ljust(16))
    wrong = pb.CloseSessionRequest(session_id=session_id, expected_history_length=3)
    with keeping(place, history_tokens_per_owner=len(HISTORY) - 1) as engine:
        async with serving(engine) as server, connected(server) as client:
            assert (await refused(client.append(session_id, [1]))).reason == "RESOURCE_EXHAUSTED QUOTA"
            assert (await refused(client.call("CloseSession", wrong))).reason == "ABORTED HISTORY_LENGTH_MISMATCH"
            assert await client.length(session_id) == len(HISTORY), "it can be looked at"
            with pytest.raises(SessionNotFound):
                engine.close_kept(session_id, owner="another")
            for is_replayed in (False, True):
                closed = await client.call("CloseSession", close)
                assert (closed.final_history_length, closed.replayed) == (len(HISTORY), is_replayed)
            assert not engine.metrics.restores.labels("restored")._value.get()
    with keeping(place) as engine:
        async with serving(engine) as server, connected(server) as client:
            assert (await client.call("CloseSession", close)).replayed
            assert (await refused(client.info(session_id))).reason == "NOT_FOUND SESSION_NOT_FOUND"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"durability": "power"}, "needs a state_dir"),
        ({"durability": "none", "state_dir": "somewhere"}, "keeps no sessions"),
        ({"durability": "always"}, "auto, none, process or power"),
        (
            {"hibernate": "always"},
            "hibernate=always: without effect.* set state_dir to a folder, or leave out hibernate$",
        ),
        ({"state_bytes": 1, "kept_tokens_per_owner": 9}, "leave out kept_tokens_per_owner, state_bytes$"),
        ({"state_bytes_per_owner": 2**30}, "state_bytes_per_owner=1GiB: without effect"),
        ({"kept_sessions_per_owner": 1}, "kept_sessions_per_owner=1: without effect"),
        ({"session_keep_seconds": 60.0}, "session_keep_seconds=60: without effect"),
        ({"hibernate_after_seconds": 60.0}, "hibernate_after_seconds=60: without effect"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig(**settings)


async def test_without_a_state_folder_sessions_end_with_the_server_and_it_says_so(client: Client) -> None:
    info = await client.call("GetServerInfo", pb.GetServerInfoRequest())
    assert info.durability == pb.DURABILITY_NONE
    assert (await client.info(await client.open())).saved_token_count == 0
