"""Which addresses get no new connections, for how long, and what the system makes of it."""

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_engine.server.auth import Key, KeyRing
from inference_engine.server.ip_bans import (
    BAR_SECONDS,
    MOST_BAR_SECONDS,
    MOST_BARRED,
    OFFENCES,
    ListenerFilter,
    Offenders,
    filter_of,
    received_bytes,
)

pytestmark = pytest.mark.hostile

HERE, THERE, NETWORK = "10.0.0.1", "10.0.0.2", "2001:db8:0:1::/64"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_address_is_barred_by_its_third_offence_and_for_longer_each_time() -> None:
    clock = Clock()
    offenders = Offenders(KeyRing(), clock)
    seconds = []
    for _ in range(5):
        assert [offenders.offended(HERE) for _ in range(OFFENCES)] == [False] * (OFFENCES - 1) + [True]
        assert offenders.barred() == (HERE,)
        assert not offenders.offended(HERE)  # connections that it had before
        began = clock.now
        while offenders.barred():
            clock.now += 1.0
        seconds.append(clock.now - began)
    assert seconds == [BAR_SECONDS, 2 * BAR_SECONDS, 4 * BAR_SECONDS, MOST_BAR_SECONDS, MOST_BAR_SECONDS]


def test_an_address_is_trusted_no_longer_than_the_keys_that_were_accepted_from_it(tmp_path: Path) -> None:
    file, kept, removed = tmp_path / "keys", Key.of("k" * 32, "kept"), Key.of("r" * 32, "removed")
    file.write_text(f"{kept.line}\n{removed.line}\n", encoding="utf-8")
    keys = KeyRing.from_file(str(file))
    offenders = Offenders(keys, Clock())
    for key in (kept, removed):
        offenders.accepted(HERE, key.digest)
    offenders.accepted(THERE, removed.digest)
    assert not any(offenders.offended(address, offences=OFFENCES) for address in (HERE, THERE))
    (tmp_path / "new").write_text(f"{kept.line}\n", encoding="utf-8")
    (tmp_path / "new").replace(file)
    assert keys.changes() == 2
    assert not offenders.offended(HERE, offences=OFFENCES)
    assert offenders.offended(THERE, offences=OFFENCES)
    # A call that was let in with the key just before, and is admitted only now.
    offenders.accepted(NETWORK, removed.digest)
    assert offenders.offended(NETWORK, offences=OFFENCES)


def test_a_filter_keeps_packets_of_all_other_addresses(subtests: pytest.Subtests) -> None:
    program = filter_of((HERE, NETWORK, "192.0.2.7"))
    for source, is_kept in {
        HERE: False,
        "192.0.2.7": False,
        THERE: True,
        "2001:db8:0:1:a:b:c:d": False,
        "2001:db8:0:2::1": True,
        "2001:db9:0:1::1": True,
    }.items():
        with subtests.test(source):
            assert bool(run(program, packet_from(source))) == is_kept
    assert run(filter_of(()), packet_from(HERE))


def packet_from(source: str) -> bytes:
    """A network header, as far as filters read it."""
    packed = ipaddress.ip_address(source).packed
    return b"\x45" + bytes(11) + packed if len(packed) == 4 else b"\x60" + bytes(7) + packed


def run(program: bytes, packet: bytes) -> int:
    """What the system's interpreter returns, of the few instructions that filters use."""
    at, accumulator, network = 0, 0, 0xFFF0_0000
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from(">I", packet, value - network)[0]
        elif code == 0x30:
            accumulator = packet[value - network]
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            at += value
        elif code == 0x15:
            at += if_true if accumulator == value else if_false
        else:
            assert code == 0x06
            return int(value)


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def connects(port: int, source: str) -> bool:
    with socket.socket() as connection:
        connection.settimeout(0.3)
        connection.bind((source, 0))
        try:
            connection.connect(("127.0.0.1", port))
        except TimeoutError:
            return False
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_the_system_drops_what_comes_from_a_barred_address_and_nothing_else() -> None:
    with listening() as listener, socket.socket() as before:
        port = listener.getsockname()[1]
        before.bind(("127.0.0.3", 0))
        before.connect(("127.0.0.1", port))
        filters = ListenerFilter(port)
        every = [f"127.0.1.{number}" for number in range(MOST_BARRED - 1)]
        filters.bar((*every, "127.0.0.3"))
        assert not connects(port, "127.0.0.3")
        assert connects(port, "127.0.0.2")
        accepted, _ = listener.accept()
        with accepted:
            before.sendall(b"an older connection stays")
            assert accepted.recv(100)
            assert received_bytes(accepted.fileno()) == 25
        filters.bar(())
        assert connects(port, "127.0.0.3")
