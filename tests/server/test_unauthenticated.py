"""Which connections are dropped: those on which no call was accepted, the oldest first, and never an owner's."""

from pathlib import Path

import pytest

from inference_engine.server.auth import Key, KeyRing
from inference_engine.server.preauth_limits import (
    ADDRESS_REFUSALS,
    KEPT,
    MOST_OF_ADDRESS,
    MOST_REFUSALS,
    PATIENCE_SECONDS,
    Peer,
    UnauthenticatedPeers,
)

pytestmark = pytest.mark.hostile

HERE, THERE = "10.0.0.1", "10.0.0.2"
ALICE, BOB = ("alice-" + "a" * 32, "bob-" + "b" * 32)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def door_with(
    clock: Clock, *, most: int = 10_000, most_of_address: int = 0, keys: KeyRing | None = None
) -> UnauthenticatedPeers:
    return UnauthenticatedPeers(keys or KeyRing((ALICE,)), most=most, most_of_address=most_of_address, clock=clock)


def digest(key: str) -> bytes:
    return Key.of(key).digest


def write(path: Path, *keys: str) -> None:
    path.write_text("".join(f"{Key.of(key).line}\n" for key in keys), encoding="utf-8")


def opened(door: UnauthenticatedPeers, count: int, address: str = HERE, first_port: int = 1) -> list[Peer]:
    peers = [(address, first_port + number) for number in range(count)]
    for peer in peers:
        door.opened(peer)
    return peers


def test_unauthenticated_beyond_the_few_that_are_kept_are_dropped_after_a_while() -> None:
    clock = Clock()
    door = door_with(clock)
    peers = opened(door, KEPT + 5)
    assert door.to_drop() == []
    clock.now += PATIENCE_SECONDS
    assert door.to_drop() == peers[:5]


def test_an_address_has_so_many_unauthenticated_peers_and_the_oldest_go_first() -> None:
    door = door_with(Clock())
    peers = opened(door, MOST_OF_ADDRESS + 3)
    opened(door, MOST_OF_ADDRESS, THERE)
    assert door.to_drop() == peers[:3]


def test_half_of_all_connections_are_not_for_unauthenticated_peers() -> None:
    door = door_with(Clock(), most=100)
    first = opened(door, 30, HERE)
    second = opened(door, 30, THERE)
    assert door.to_drop() == first[:10]
    for peer in (*first[:10], *second):
        door.closed(peer)
    assert door.to_drop() == []


def test_beyond_the_limit_of_an_address_unauthenticated_peers_go_first_and_then_the_newest() -> None:
    door = door_with(Clock(), most_of_address=10)
    known = opened(door, 8)
    for peer in known:
        door.accepted(peer, digest(ALICE))
    unknown = opened(door, 4, first_port=100)
    assert door.to_drop() == unknown[:2]
    for peer in unknown:
        door.closed(peer)
    late = opened(door, 3, first_port=200)
    for peer in late:
        door.accepted(peer, digest(ALICE))
    assert door.to_drop() == [late[-1]]


def test_a_peer_whose_key_was_removed_is_unauthenticated_again(tmp_path: Path) -> None:
    write(tmp_path / "keys", ALICE, BOB)
    door = door_with(Clock(), keys=KeyRing.from_file(str(tmp_path / "keys")))
    first, second = opened(door, 2)
    door.accepted(first, digest(ALICE))
    door.accepted(second, digest(BOB))
    write(tmp_path / "keys", BOB)
    assert [door.refused(first) for _ in range(MOST_REFUSALS)] == [False] * (MOST_REFUSALS - 1) + [True]
    assert not any(door.refused(second) for _ in range(2 * MOST_REFUSALS))


def test_a_connection_of_several_owners_is_authenticated_until_the_last_of_their_keys_is_removed(
    tmp_path: Path,
) -> None:
    write(tmp_path / "keys", ALICE, BOB)
    door = door_with(Clock(), keys=KeyRing.from_file(str(tmp_path / "keys")))
    (proxy,) = opened(door, 1)
    for key in (ALICE, BOB):
        door.accepted(proxy, digest(key))
    write(tmp_path / "keys", BOB)
    assert not any(door.refused(proxy) for _ in range(2 * MOST_REFUSALS))
    write(tmp_path / "keys", ALICE)  # put back; no call has shown it since
    assert len(door) == 0
    door.to_drop()
    assert len(door) == 1
    door.accepted(proxy, digest(ALICE))
    assert len(door) == 0


def test_connections_of_a_removed_key_are_dropped_like_new_ones_though_no_call_comes(tmp_path: Path) -> None:
    write(tmp_path / "keys", ALICE, BOB)
    clock = Clock()
    door = door_with(clock, keys=KeyRing.from_file(str(tmp_path / "keys")))
    peers = opened(door, KEPT + 5)
    for peer in peers:
        door.accepted(peer, digest(ALICE))
    clock.now += 10 * PATIENCE_SECONDS
    write(tmp_path / "keys", BOB)
    assert door.to_drop() == []
    clock.now += PATIENCE_SECONDS
    assert door.to_drop() == peers[:5]


@pytest.mark.parametrize("hosts", ["2001:db8:1:2::{:x}", "2001:db8:1:2:{:x}::", "fe80::{:x}%eth0"])
def test_all_addresses_in_a_network_of_64_bits_are_one(hosts: str) -> None:
    clock = Clock()
    door = door_with(clock, most_of_address=KEPT)
    peers = [(hosts.format(number), 5_000) for number in range(1, KEPT + 4)]
    for peer in peers:
        door.opened(peer)
    door.opened(("2001:db8:1:3::1", 5_000))
    assert door.to_drop() == peers[:3]
    assert peers[0] in door.here_before(clock())  # a connection is called by its whole name
    for peer in peers[:3]:
        door.closed(peer)
    for peer in peers[3:]:
        door.accepted(peer, digest(ALICE))
    assert len(door) == 1
    late = (hosts.format(0xFFFF), 5_000)
    door.accepted(late, digest(ALICE))
    assert door.to_drop() == [late]
    for number in range(ADDRESS_REFUSALS + 50):
        door.refused((hosts.format(0x1000 + number), 1))
    assert door.refused((hosts.format(0x2000), 1))
    assert not door.refused(("2001:db8:1:3::2", 1))


def test_an_unauthenticated_peer_that_reconnects_repeatedly_is_dropped_at_once_and_others_are_not() -> None:
    clock = Clock()
    door = door_with(clock)
    for port in range(ADDRESS_REFUSALS + 50):
        door.refused((HERE, port))
    assert door.refused((HERE, 60_000))
    assert not door.refused((THERE, 60_000))
    clock.now += 3_600.0
    assert not door.refused((HERE, 60_001))


def test_what_is_remembered_of_addresses_is_forgotten() -> None:
    clock = Clock()
    door = door_with(clock)
    for number in range(1_000):
        peer = (f"10.1.{number // 256}.{number % 256}", 1)
        door.refused(peer)
        door.closed(peer)
    clock.now += 3_600.0
    door.to_drop()
    assert (len(door), door.here_before(clock.now), len(door._allowances)) == (0, [], 0)
