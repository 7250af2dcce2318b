"""With keys set, every method of every service needs one of them, whatever else is sent; health alone is open."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from inference_engine.config import ServerConfig
from inference_engine.engine import Engine
from inference_engine.errors import ConfigError, Unauthenticated
from inference_engine.server.auth import KeyRing
from inference_engine.server.run import ServerHandle, start_server
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, connected, refused, serving

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32
HEALTH_CHECK = "/grpc.health.v1.Health/Check"


def methods_of(descriptor: Any, service: str) -> list[str]:
    found = descriptor.services_by_name[service]
    return [f"/{found.full_name}/{method.name}" for method in found.methods]


CLOSED_METHODS = [
    *methods_of(pb.DESCRIPTOR, "RuntimeService"),
    *(method for method in methods_of(health_pb2.DESCRIPTOR, "Health") if method != HEALTH_CHECK),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/kakeya.v1.RuntimeService/NoSuchMethod",
    "/no.such.Service/Method",
    "/grpc.health.v1.Health/Check/",
    "//grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/check",
    "/grpc.health.v1.Health/Check?key",
]
WRONG = {
    "none": [],
    "empty": [("authorization", "")],
    "scheme alone": [("authorization", "Bearer")],
    "scheme and space": [("authorization", "Bearer ")],
    "key alone": [("authorization", ALICE)],
    "another key": [("authorization", "Bearer " + "c" * 40)],
    "part of a key": [("authorization", f"Bearer {ALICE[:-1]}")],
    "more than a key": [("authorization", f"Bearer {ALICE}x")],
    "lower-case scheme": [("authorization", f"bearer {ALICE}")],
    "other scheme": [("authorization", f"Basic {ALICE}")],
    "two spaces": [("authorization", f"Bearer  {ALICE}")],
    "two keys": [("authorization", f"Bearer {ALICE}, Bearer {BOB}")],
    "twice the same": [("authorization", f"Bearer {ALICE}")] * 2,
    "right and wrong": [("authorization", f"Bearer {ALICE}"), ("authorization", "Bearer wrong")],
    "digest": [("authorization", "Bearer " + hashlib.sha256(ALICE.encode()).hexdigest())],
    "another header": [("x-api-key", ALICE)],
}


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(f"{ALICE}\n\n{BOB}\n", encoding="utf-8")
    return str(path)


@pytest.fixture
async def guarded(engine: Engine, key_file: str) -> AsyncIterator[ServerHandle]:
    async with serving(engine, api_key_file=key_file) as handle:
        yield handle


@pytest.mark.parametrize("method", CLOSED_METHODS)
async def test_no_method_answers_without_the_right_credential(guarded: ServerHandle, method: str) -> None:
    async with connected(guarded) as client:
        for name, metadata in WRONG.items():
            call = client.channel.unary_unary(method)(b"", metadata=metadata, timeout=10.0)
            details = await refused(call)
            assert details.reason == "UNAUTHENTICATED UNAUTHENTICATED", name
            assert ALICE not in details.text


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG)
async def test_health_is_open_to_everybody(guarded: ServerHandle, metadata: list[tuple[str, str]]) -> None:
    async with connected(guarded) as client:
        answer = await client.channel.unary_unary(HEALTH_CHECK)(b"", metadata=metadata)
        assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING


async def test_every_key_opens_every_method(guarded: ServerHandle) -> None:
    for key in (ALICE, BOB):
        async with connected(guarded, metadata=bearer(key)) as client:
            session_id = await client.open()
            assert len(await client.generate(session_id)) == 8
            await client.call("GetServerInfo", pb.GetServerInfoRequest())
            await client.call("CloseSession", pb.CloseSessionRequest(session_id=session_id))


@pytest.mark.parametrize("method", ["AppendTokens", "Generate", "CloseSession", "GetSessionInfo"])
async def test_another_owners_session_is_as_unknown_as_one_that_never_was(guarded: ServerHandle, method: str) -> None:
    async with connected(guarded, metadata=bearer(ALICE)) as alice, connected(guarded, metadata=bearer(BOB)) as bob:
        session_id = await alice.open()

        def request(which: str) -> object:
            fields = {"max_tokens": 4} if method == "Generate" else {}
            return getattr(pb, f"{method}Request")(session_id=which, **fields)

        foreign = await refused(bob.call(method, request(session_id)))
        unknown = await refused(bob.call(method, request("never-was")))
        assert foreign.reason == "NOT_FOUND SESSION_NOT_FOUND"
        assert (foreign.text, foreign.error_info) == (unknown.text, unknown.error_info)
        assert await alice.length(session_id) == len(HISTORY)


async def test_without_keys_a_loopback_server_is_open(client: Client) -> None:
    assert len(await client.generate(await client.open())) == 8


async def test_metadata_far_over_the_limit_is_refused_by_the_transport(client: Client) -> None:
    call = client.channel.unary_unary("/kakeya.v1.RuntimeService/GetServerInfo")
    details = await refused(call(b"", metadata=[("x-large", "x" * 64 * 1024)], timeout=10.0))
    assert details.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_owner_is_named_by_a_digest_and_the_same_on_every_start() -> None:
    owners = [KeyRing((ALICE, BOB)).owner_of(bearer(key)) for key in (ALICE, BOB)]
    assert owners == [KeyRing((BOB, ALICE)).owner_of(bearer(key)) for key in (ALICE, BOB)]
    assert len({*owners, ""}) == 3
    assert all(owner not in ALICE + BOB for owner in owners)


@pytest.mark.parametrize("value", ["Bearer \u00e4\u00f6\u00fc", b"Bearer \xff\xfe", "Bearer \udcff"], ids=repr)
def test_a_key_outside_ascii_is_wrong_and_nothing_worse(value: str | bytes) -> None:
    with pytest.raises(Unauthenticated):
        KeyRing((ALICE,)).owner_of([("authorization", value)])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no key"),
        (b"\n  \n", "holds no key"),
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


async def test_a_missing_key_file_stops_the_start(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        await start_server(engine, ServerConfig(bind="127.0.0.1:0", api_key_file=str(tmp_path / "none")))
