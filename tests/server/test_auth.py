"""Owners never meet: what belongs to another is, in every byte of every answer, as unknown as what never was."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError
from inference_engine.server.auth import Key, KeyRing
from inference_engine.server.run import ServerHandle, start_server
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, connected, read_rest, refused, serving
from tests.tiny_native import served_engine

pytestmark = pytest.mark.hostile

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32
REQUEST_ID = bytes(range(16))

METHODS = {method.name: method.input_type for method in pb.DESCRIPTOR.services_by_name["RuntimeService"].methods}
OF_A_SESSION = sorted(name for name, request in METHODS.items() if "session_id" in request.fields_by_name)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def write_keys(path: str, **keys: str) -> None:
    Path(path).write_text("".join(f"{Key.of(key, owner).line}\n" for owner, key in keys.items()), encoding="utf-8")


def request(method: str, session_id: str, **fields: Any) -> Any:
    """A message of the method's that is right in itself."""
    known = METHODS[method].fields_by_name
    least = {"max_tokens": 4, "token_ids": [1], "at_position": 1, **fields}
    given = {name: value for name, value in least.items() if name in known}
    return getattr(pb, METHODS[method].name)(session_id=session_id, **given)


async def answer(client: Client, method: str, message: Any) -> tuple[Any, ...]:
    """All that the client can see of a call that is refused."""
    try:
        got = await client.call(method, message)
    except grpc.aio.AioRpcError as error:
        initial, trailing = error.initial_metadata(), error.trailing_metadata()
        return error.code(), error.details(), tuple(initial or ()), tuple(trailing or ())
    raise AssertionError(f"{method} was answered: {got!r}")


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = str(tmp_path / "keys")
    write_keys(path, alice=ALICE, bob=BOB)
    return path


@pytest.fixture
async def guarded(engine: Engine, key_file: str) -> AsyncIterator[ServerHandle]:
    async with serving(engine, api_key_file=key_file) as handle:
        yield handle


@pytest.fixture
async def owners(guarded: ServerHandle) -> AsyncIterator[tuple[Client, Client]]:
    async with AsyncExitStack() as stack:
        alice, bob = [await stack.enter_async_context(connected(guarded, metadata=bearer(key))) for key in (ALICE, BOB)]
        yield alice, bob


@pytest.mark.parametrize("method", OF_A_SESSION)
async def test_another_owners_session_is_as_unknown_as_one_that_never_was(
    owners: tuple[Client, Client], method: str
) -> None:
    alice, bob = owners
    open_one, closed = await alice.open(), await alice.open()
    await alice.call("CloseSession", pb.CloseSessionRequest(session_id=closed))
    never_was = "x" * len(open_one)
    expected = await answer(bob, method, request(method, never_was))
    assert expected[0] is grpc.StatusCode.NOT_FOUND
    for session_id in (open_one, closed, ""):
        assert await answer(bob, method, request(method, session_id)) == expected
    assert await answer(alice, method, request(method, closed)) == expected
    assert await alice.length(open_one) == len(HISTORY)


@pytest.mark.parametrize("method", OF_A_SESSION)
async def test_a_wrong_argument_reveals_nothing_of_another_owners_session(
    owners: tuple[Client, Client], method: str
) -> None:
    alice, bob = owners
    wrong = {"max_tokens": 0, "token_ids": [2**32 - 1], "expected_history_length": 1, "limit_tokens": 0}
    session_id = await alice.open()
    of_another = await answer(bob, method, request(method, session_id, **wrong))
    assert of_another == await answer(bob, method, request(method, "x" * len(session_id), **wrong))


@pytest.mark.parametrize("method", [name for name in OF_A_SESSION if "request_id" in METHODS[name].fields_by_name])
async def test_the_id_of_another_owners_request_brings_back_nothing(owners: tuple[Client, Client], method: str) -> None:
    alice, bob = owners
    session_id = await alice.open()
    message = request(method, session_id, request_id=REQUEST_ID)
    await alice.call(method, message)
    expected = await answer(bob, method, request(method, "x" * len(session_id), request_id=REQUEST_ID))
    assert await answer(bob, method, message) == expected


async def test_an_evicted_session_is_unknown_to_all_but_its_owner(key_file: str) -> None:
    now = 0.0
    with served_engine(clock=lambda: now, session_idle_ttl_seconds=10.0) as engine:
        async with (
            serving(engine, api_key_file=key_file) as handle,
            connected(handle, metadata=bearer(ALICE)) as alice,
            connected(handle, metadata=bearer(BOB)) as bob,
        ):
            session_id = await alice.open()
            now = 11.0
            # The engine's thread looks for old sessions before each step.
            await bob.generate(await bob.open())
            assert (await refused(alice.length(session_id))).reason == "NOT_FOUND SESSION_EVICTED"
            expected = await answer(bob, "GetSessionInfo", request("GetSessionInfo", "x" * len(session_id)))
            assert await answer(bob, "GetSessionInfo", request("GetSessionInfo", session_id)) == expected


async def test_no_answer_lists_or_counts_another_owners_sessions(owners: tuple[Client, Client]) -> None:
    alice, bob = owners
    session_id = await alice.open(client_label="a-secret-label")
    info = await bob.call("GetServerInfo", pb.GetServerInfoRequest())
    assert session_id not in str(info) and "a-secret-label" not in str(info)
    repeated = {field.name for field in pb.GetServerInfoResponse.DESCRIPTOR.fields if field.is_repeated}
    assert repeated == {"strategies", "eos_token_ids"}, "a list that is new here: is it of the caller's own?"


async def test_a_running_stream_goes_on_when_its_key_is_removed(guarded: ServerHandle, key_file: str) -> None:
    async with connected(guarded, metadata=bearer(ALICE)) as alice:
        session_id = await alice.open_endless()
        stream = alice.stream(pb.GenerateRequest(session_id=session_id, max_tokens=200))
        await stream.read()
        write_keys(key_file, bob=BOB)
        assert (await refused(alice.length(session_id))).reason == "UNAUTHENTICATED UNAUTHENTICATED"
        assert len(await read_rest(stream)) == 200  # one was read before, and `done` is last


def test_an_owner_without_a_name_is_named_by_a_digest_and_the_same_on_every_start() -> None:
    owners = [KeyRing((ALICE, BOB)).key_of(bearer(key)).owner for key in (ALICE, BOB)]
    assert owners == [KeyRing((BOB, ALICE)).key_of(bearer(key)).owner for key in (ALICE, BOB)]
    assert len({*owners, ""}) == 3
    assert all(owner not in ALICE + BOB for owner in owners)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no key"),
        (b"\n  \n# nothing\n", "holds no key"),
        (b"short\n", "line 1"),
        (ALICE.encode() + b"\nhas spaces in the middle of it\n", "line 2"),
        ("schlüssel-mit-umlaut-ist-zu-viel\n".encode(), "line 1"),
        (b"\xff\xfe", "cannot read"),
    ],
    ids=["empty", "blank", "short", "spaces", "not ascii", "not text"],
)
async def test_a_key_file_that_cannot_be_meant_stops_the_start(
    engine: Engine, tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        await start_server(engine, ServerConfig(bind="127.0.0.1:0", api_key_file=str(path)))
    for line in filter(str.strip, content.decode(errors="ignore").splitlines()):
        assert line not in str(caught.value)
