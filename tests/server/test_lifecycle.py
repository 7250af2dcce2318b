"""An engine that stalls, runs out of memory or gives nonsense: errors, what is kept, and that others go on."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import numpy as np
import pytest
import torch

from inference_engine.engine import Engine
from inference_engine.errors import EngineStalled
from inference_engine.kv.parts.layer_entries import LayerEntries
from inference_engine.server.run import EXIT_LATE
from inference_engine.server.watchdog import EXIT_STALLED, Watchdog
from kakeya.v1 import runtime_pb2 as pb
from laboratory.scripted import Fault, Script
from tests.engine.sessions import Clock
from tests.facade import kv_of, session_of, wake
from tests.load.scripted import scripted_engine
from tests.processes import Process, ending, started
from tests.server.wire import TIMEOUT_SECONDS, Client, connected, read_rest, refused, serving

PROGRAM = Path(__file__).with_name("serve_hanging.py")
POISON = 250
HISTORY = tuple(range(40))
STALL_SECONDS = 60.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def script() -> Iterator[Script]:
    """Whatever hangs is let go at the end."""
    script = Script()
    yield script
    script.let_go.set()


@pytest.fixture
def engine(script: Script, clock: Clock) -> Iterator[Engine]:
    with scripted_engine(script=script, clock=clock, stall_seconds=STALL_SECONDS) as engine:
        yield engine
        # Before the engine is closed, which waits for its thread.
        script.let_go.set()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[Client]:
    async with serving(engine) as handle, connected(handle) as client:
        yield client
        wake(engine)


async def generated(client: Client, session_id: str) -> list[int]:
    return await client.generate(session_id, 8)


# -- memory -------------------------------------------------------------------------------------------------------


async def test_a_step_without_memory_drops_its_sessions_to_tokens_and_says_when_to_come_back(
    engine: Engine, client: Client, script: Script
) -> None:
    expected = await generated(client, await client.open(HISTORY))
    session_id = await client.open(HISTORY[:-1])
    await client.generate(session_id, 1, seed=1)
    before = await client.length(session_id)
    await client.append(session_id, [POISON])
    script.faults[POISON] = (Fault.OUT_OF_MEMORY, 1)
    details = await refused(generated(client, session_id))
    assert details.reason == "RESOURCE_EXHAUSTED OUT_OF_MEMORY"
    assert details.retry_info is not None and details.retry_info.retry_delay.seconds == 1
    info = await client.info(session_id)
    assert (info.history_length, info.cached_token_count, info.kv_live_bytes) == (before + 1, 0, 0)
    assert info.failure_reason == ""
    assert len(await generated(client, session_id)) == 8
    assert await generated(client, await client.open(HISTORY)) == expected


async def test_a_client_that_looks_at_a_session_again_and_again_does_not_keep_it_alive(
    engine: Engine, client: Client, clock: Clock
) -> None:
    watched, used = await client.open(), await client.open()
    ttl = engine.config.session_idle_ttl_seconds
    for seconds in (0.4, 0.8):
        clock.now = 1000.0 + seconds * ttl
        assert (await client.info(watched)).idle_seconds == seconds * ttl
        await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=watched))
        await client.call("ListSessions", pb.ListSessionsRequest())
        await client.append(used, [1])
    clock.now = 1000.0 + 1.1 * ttl
    await generated(client, used)
    assert (await refused(client.info(watched))).reason == "NOT_FOUND SESSION_EVICTED"


async def test_a_lack_of_memory_in_one_step_leaves_sessions_of_other_steps_alone(
    engine: Engine, client: Client, script: Script
) -> None:
    calm = await client.open(HISTORY)
    await client.generate(calm, 1)
    session_id = await client.open((*HISTORY, POISON))
    script.faults[POISON] = (Fault.OUT_OF_MEMORY, 1)
    await refused(generated(client, session_id))
    assert (await client.info(calm)).cached_token_count == len(HISTORY)
    assert engine.is_alive()


async def test_entries_that_cannot_be_zeroed_are_dropped(
    client: Client, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = (*HISTORY, POISON)
    expected = await generated(client, await client.open(history))
    session_id = await client.open(history)
    has_failed, wipe = threading.Event(), LayerEntries.wipe

    def failing(group: LayerEntries, slots: Any) -> None:
        if has_failed.is_set():
            raise torch.OutOfMemoryError("scripted: no memory to wipe with")
        wipe(group, slots)

    script.faults[POISON] = (Fault.OUT_OF_MEMORY, 1)
    script.on_step = lambda _step: has_failed.set()
    with monkeypatch.context() as patch:
        patch.setattr(LayerEntries, "wipe", failing)
        assert (await refused(generated(client, session_id))).reason == "RESOURCE_EXHAUSTED OUT_OF_MEMORY"
    assert (await client.info(session_id)).cached_token_count == 0
    assert await generated(client, session_id) == expected


# -- nonsense -----------------------------------------------------------------------------------------------------


async def test_logits_that_are_not_finite_end_their_generate_alone_and_drop_its_entries(
    engine: Engine, client: Client, script: Script
) -> None:
    history = (*HISTORY, POISON)
    expected = [await generated(client, await client.open(each)) for each in (HISTORY, history)]
    beside, session_id = await client.open(HISTORY), await client.open(history)
    script.faults[POISON] = (Fault.NON_FINITE, 1)
    others, details = await asyncio.gather(generated(client, beside), refused(generated(client, session_id)))
    assert details.reason == "INTERNAL NON_FINITE_LOGITS"
    assert others == expected[0]
    info = await client.info(session_id)
    assert (info.history_length, info.cached_token_count, info.kv_live_bytes) == (len(history), 0, 0)
    kv = kv_of(engine, session_id)
    for group in kv.groups:
        vectors = torch.from_numpy(
            (group.starts[:, None] + group.region_offsets(np.arange(group.layout.region))).reshape(-1)
        )
        assert not group.buffer.keys[vectors].any() and not group.buffer.values[vectors].any()
    assert await generated(client, session_id) == expected[1]


async def test_a_session_whose_cache_and_history_disagree_fails_alone_and_says_why(
    engine: Engine, client: Client
) -> None:
    session_id = await client.open()
    session_of(engine, session_id).cached_tokens = 1_000_000
    for call in (client.generate(session_id), client.generate(session_id), client.append(session_id, [1])):
        assert (await refused(call)).reason == "FAILED_PRECONDITION INV2"
    info = await client.info(session_id)
    assert info.failure_reason == "INV2"
    assert info.cache_invariant_inv2_violations == 1
    assert info.kv_live_bytes == 0


# -- a stall ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stalled(engine: Engine, client: Client, script: Script, clock: Clock) -> AsyncIterator[Any]:
    """A Generate in whose step the engine hangs, for longer than it may. Yields its stream."""
    hangs = threading.Event()
    script.faults[POISON] = (Fault.HANG, 1)
    script.on_step = lambda _step: hangs.set()
    stream = client.stream(pb.GenerateRequest(session_id=await client.open((*HISTORY, POISON)), max_tokens=4))
    assert await asyncio.to_thread(hangs.wait, TIMEOUT_SECONDS)
    clock.now += STALL_SECONDS + 1
    try:
        yield stream
    finally:
        script.let_go.set()


async def test_while_the_engine_stalls_work_is_refused_and_the_rest_answers(
    engine: Engine, client: Client, script: Script, clock: Clock
) -> None:
    other = await client.open(HISTORY)
    async with stalled(engine, client, script, clock) as stream:
        assert not engine.is_alive()
        for call in (client.open(()), client.append(other, [1]), generated(client, other)):
            details = await refused(call)
            assert details.reason == "UNAVAILABLE ENGINE_STALLED"
            assert details.retry_info is not None
        assert await client.length(other) == len(HISTORY)
        await client.call("GetServerInfo", pb.GetServerInfoRequest())
        await client.call("CloseSession", pb.CloseSessionRequest(session_id=other))
        script.let_go.set()
        assert len(await read_rest(stream)) == 5
    assert engine.is_alive()
    assert len(await generated(client, await client.open(HISTORY))) == 8


async def test_the_watchdog_says_where_the_engine_hangs_and_gives_up_only_if_it_does_not_come_back(
    engine: Engine, client: Client, script: Script, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog(engine, 10.0, clock)
    assert not watchdog.look()
    async with stalled(engine, client, script, clock) as stream:
        assert not watchdog.look()
        assert "the engine has stalled" in caplog.text
        assert "let_go.wait" in caplog.text
        clock.now += 9.9
        assert not watchdog.look()
        clock.now += 0.1
        assert watchdog.look()
        assert caplog.text.count("the engine has stalled") == 1
        assert not Watchdog(engine, 0.0, clock).look(), "patience without end"
        script.let_go.set()
        await read_rest(stream)
    assert not watchdog.look()
    assert "the engine has recovered" in caplog.text


async def test_calls_that_run_when_the_server_gives_up_get_the_reason(
    engine: Engine, script: Script, clock: Clock
) -> None:
    async with (
        serving(engine) as handle,
        connected(handle) as client,
        stalled(engine, client, script, clock) as stream,
    ):
        await handle.abandon(EngineStalled())
        details = await refused(read_rest(stream))
    assert details.reason == "UNAVAILABLE ENGINE_STALLED"
    assert details.retry_info is not None


@pytest.mark.parametrize("is_reported_to_end", [False, True], ids=["by itself", "while draining"])
async def test_a_process_whose_engine_does_not_come_back_ends_with_a_status_of_its_own(
    is_reported_to_end: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as stderr, _started(stderr, "600", "0.1") as child:
        assert child.stdout is not None
        target = (await asyncio.to_thread(child.stdout.readline)).strip()
        async with grpc.aio.insecure_channel(target) as channel:
            client = Client(channel)
            request = pb.GenerateRequest(session_id=await client.open((*HISTORY, POISON)), max_tokens=4)
            reading = asyncio.ensure_future(refused(read_rest(client.stream(request))))
            assert await asyncio.to_thread(child.stdout.readline) == "hangs\n"
            if is_reported_to_end:
                child.send_signal(signal.SIGTERM)
            assert (await reading).reason == "UNAVAILABLE ENGINE_STALLED"
            assert await asyncio.to_thread(child.wait, TIMEOUT_SECONDS) == EXIT_STALLED
    text = await asyncio.to_thread(log.read_text, encoding="utf-8")
    assert "the engine did not recover" in text


async def test_a_stop_that_hangs_ends_by_the_time_that_supervisors_allow(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as stderr, _started(stderr, "0.1", "0") as child:
        assert child.stdout is not None
        target = (await asyncio.to_thread(child.stdout.readline)).strip()
        async with grpc.aio.insecure_channel(target) as channel:
            client = Client(channel)
            request = pb.GenerateRequest(session_id=await client.open((*HISTORY, POISON)), max_tokens=4)
            reading = asyncio.ensure_future(refused(read_rest(client.stream(request))))
            assert await asyncio.to_thread(child.stdout.readline) == "hangs\n"
            child.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(child.wait, TIMEOUT_SECONDS) == EXIT_LATE
            await reading
    text = await asyncio.to_thread(log.read_text, encoding="utf-8")
    assert "still not stopped" in text
    assert "scripted.py" in text  # where it hangs


@contextmanager
def _started(stderr: IO[str], drain_seconds: str, stall_exit_seconds: str) -> Iterator[Process]:
    """The server process, which is gone at the end, whatever happens."""
    arguments = (str(PROGRAM), str(POISON), drain_seconds, stall_exit_seconds)
    with ending(started(*arguments, stderr=stderr)) as child:
        yield child
