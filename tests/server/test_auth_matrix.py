"""Every method × every shape of credential × every kind of bind: which calls are let in, as one table.

The methods come from the descriptors of the services, so that a new RPC is here the moment it is in the contract.
"""

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from inference_engine.engine import Engine
from inference_engine.errors import Unauthenticated
from inference_engine.server.auth import Key
from kakeya.v1 import runtime_pb2 as pb
from tests.further import further
from tests.load.scripted import scripted_engine
from tests.server.certificates import Authority, own_address
from tests.server.wire import Details, serving

pytestmark = pytest.mark.hostile

ALICE, BOB, MALLORY = "alice-" + "a" * 32, "bob-" + "b" * 32, "mallory-" + "m" * 32
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

OPEN = "let in"
DENIED = "UNAUTHENTICATED UNAUTHENTICATED"
UNREACHABLE = "no connection"

Metadata = Sequence[tuple[str, str | bytes]]


def methods_of(descriptor: Any) -> list[str]:
    return [
        f"/{service.full_name}/{method.name}"
        for service in descriptor.services_by_name.values()
        for method in service.methods
    ]


SERVED = [*methods_of(pb.DESCRIPTOR), *methods_of(health_pb2.DESCRIPTOR), *methods_of(reflection_pb2.DESCRIPTOR)]
UNKNOWN = [
    "/kakeya.v1.RuntimeService/NoSuchMethod",
    "/kakeya.v1.RuntimeService/createsession",
    "/kakeya.v1.NoSuchService/CreateSession",
    "/no.such.Service/Method",
    "//grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Check/",
    "/grpc.health.v1.Health/Check?key",
    "/grpc.health.v1.Health/check",
    "/grpc.health.v1.Health/%43heck",
    "grpc.health.v1.Health/Check",
]

RIGHT: dict[str, Metadata] = {
    "right key": [("authorization", f"Bearer {ALICE}")],
    "key of another owner": [("authorization", f"Bearer {BOB}")],
    "right key beside other headers": [("x-api-key", "wrong"), ("authorization", f"Bearer {ALICE}")],
    "right key and a binary header": [("authorization-bin", b"\x00\xff"), ("authorization", f"Bearer {ALICE}")],
    # Schemes are names in any case (RFC 9110, section 11.1).
    "lower-case scheme": [("authorization", f"bearer {ALICE}")],
    "scheme in capitals": [("authorization", f"BEARER {ALICE}")],
}
WRONG: dict[str, Metadata] = {
    "none": [],
    "empty": [("authorization", "")],
    "scheme alone": [("authorization", "Bearer")],
    "scheme and space": [("authorization", "Bearer ")],
    "key alone": [("authorization", ALICE)],
    "wrong key": [("authorization", "Bearer " + "c" * 40)],
    "part of a key": [("authorization", f"Bearer {ALICE[:-1]}")],
    "more than a key": [("authorization", f"Bearer {ALICE}x")],
    "key in capitals": [("authorization", f"Bearer {ALICE.upper()}")],
    "other scheme": [("authorization", f"Basic {ALICE}")],
    "two spaces": [("authorization", f"Bearer  {ALICE}")],
    "space after the key": [("authorization", f"Bearer {ALICE} ")],
    "space before the scheme": [("authorization", f" Bearer {ALICE}")],
    "two keys in one header": [("authorization", f"Bearer {ALICE}, Bearer {BOB}")],
    "twice the right header": [("authorization", f"Bearer {ALICE}")] * 2,
    "right and wrong": [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {MALLORY}")],
    "wrong and right": [("authorization", f"Bearer {MALLORY}"), ("authorization", f"Bearer {ALICE}")],
    "digest of the key": [("authorization", "Bearer " + hashlib.sha256(ALICE.encode()).hexdigest())],
    "line of the file": [("authorization", f"Bearer {Key.of(ALICE, 'alice').line}")],
    "owner's name": [("authorization", "Bearer alice")],
    "another header": [("x-api-key", ALICE)],
    "binary header": [("authorization-bin", f"Bearer {ALICE}".encode())],
    "very long": [("authorization", f"Bearer {ALICE * 75}")],
    "revoked key": [("authorization", f"Bearer {MALLORY}")],
}
SHAPES = {**RIGHT, **WRONG}


@dataclass(frozen=True)
class Bind:
    """How a server is set up, and what it asks for."""

    address: str = "127.0.0.1:0"
    has_keys: bool = False
    has_tls: bool = False
    asks_clients: bool = False

    def expects(self, certificate: str, shape: str, method: str) -> str:
        """The specification."""
        if self.asks_clients and certificate != "right":
            return UNREACHABLE
        if method == HEALTH_CHECK or not self.has_keys:
            return OPEN
        return OPEN if shape in RIGHT else DENIED


BINDS = {
    "loopback": Bind(),
    "loopback with keys": Bind(has_keys=True),
    "loopback with keys and TLS": Bind(has_keys=True, has_tls=True),
    "loopback with client certificates": Bind(has_tls=True, asks_clients=True),
    "loopback with client certificates and keys": Bind(has_keys=True, has_tls=True, asks_clients=True),
    "every interface with keys and TLS": Bind("0.0.0.0:0", has_keys=True, has_tls=True),
    "every interface with client certificates": Bind("0.0.0.0:0", has_tls=True, asks_clients=True),
}
# What they ask for is among what the others do.
REPEATED = ("loopback", "loopback with keys and TLS", "loopback with client certificates")


@pytest.fixture
def engine() -> Iterator[Engine]:
    with scripted_engine() as engine:
        yield engine


@asynccontextmanager
async def channels(bind: Bind, engine: Engine, folder: Path) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """To a server of that kind, by the certificate that the client shows. One key was taken back since it started."""
    ours, others = Authority(), Authority()
    settings: dict[str, Any] = ours.settings(folder, asks_clients=bind.asks_clients) if bind.has_tls else {}
    key_file = folder / "keys"
    if bind.has_keys:
        key_file.write_text("\n".join(Key.of(key).line for key in (ALICE, BOB, MALLORY)), encoding="utf-8")
        settings["api_key_file"] = str(key_file)
    async with serving(engine, bind=bind.address, **settings) as handle:
        if bind.has_keys:
            key_file.write_text("\n".join(Key.of(key).line for key in (ALICE, BOB)), encoding="utf-8")
        target = handle.target.replace("0.0.0.0", own_address())
        clients = {"right": ours.client("alice"), "of another authority": others.client("alice"), "none": None}
        opened: dict[str, grpc.aio.Channel] = {}
        if bind.has_tls:
            opened = {
                name: grpc.aio.secure_channel(target, ours.credentials(client))
                for name, client in clients.items()
                if bind.asks_clients or name == "none"
            }
        else:
            opened = {"none": grpc.aio.insecure_channel(target)}
        try:
            yield opened
        finally:
            for channel in opened.values():
                await channel.close()


async def outcome(channel: Any, method: str, metadata: Metadata) -> str:
    """What came of a call with an empty message, in the words of the table."""
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=30.0)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return verdict(Details(error), method)
    finally:
        call.cancel()
    return OPEN


def verdict(details: Details, method: str) -> str:
    if details.code is grpc.StatusCode.UNAVAILABLE and details.error_info is None:
        return UNREACHABLE
    if details.code is grpc.StatusCode.UNAUTHENTICATED:
        assert details.text == str(Unauthenticated())
        assert details.error_info is not None and not details.error_info.metadata
        return details.reason
    # A call that is let in gets an error on its empty message, or that there is no such method here.
    is_served = method in methods_of(pb.DESCRIPTOR)
    understood = {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT}
    assert details.code in (understood if is_served else {grpc.StatusCode.UNIMPLEMENTED}), (method, details.reason)
    return OPEN


@pytest.mark.parametrize(
    "bind", [further(bind) if name in REPEATED else bind for name, bind in BINDS.items()], ids=BINDS
)
async def test_calls_are_let_in_as_the_table_says(bind: Bind, engine: Engine, tmp_path: Path) -> None:
    async with channels(bind, engine, tmp_path) as by_certificate:
        found, expected = {}, {}
        for certificate, channel in by_certificate.items():
            for shape, metadata in SHAPES.items():
                for method in (*SERVED, *UNKNOWN):
                    case = (certificate, shape, method)
                    found[case] = await outcome(channel, method, metadata)
                    expected[case] = bind.expects(*case)
    assert {case: got for case, got in found.items() if got != expected[case]} == {}
    assert len(found) == len(by_certificate) * len(SHAPES) * len([*SERVED, *UNKNOWN])


def test_the_contract_is_walked_whole() -> None:
    names = {method.name for method in pb.DESCRIPTOR.services_by_name["RuntimeService"].methods}
    assert {"CreateSession", "AppendTokens", "Generate", "CloseSession", "GetSessionInfo", "GetServerInfo"} <= names
    assert {f"/kakeya.v1.RuntimeService/{name}" for name in names} <= set(SERVED)
