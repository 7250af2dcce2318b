"""The key file: what its lines mean, and that a server always has the keys that are in it, and no other."""

import hashlib
import hmac
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference_engine.errors import ConfigError, Unauthenticated
from inference_engine.server.auth import Key, KeyRing, owner_of_certificate

pytestmark = pytest.mark.hostile

ALICE, BOB, CAROL = "alice-" + "a" * 32, "bob-" + "b" * 32, "carol-" + "c" * 32


def bearer(key: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {key}")]


def opens(ring: KeyRing, key: str) -> bool:
    try:
        ring.key_of(bearer(key))
    except Unauthenticated:
        return False
    return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write(path, Key.of(ALICE, "alice").line, Key.of(BOB, "bob").line)
    return path


def write(path: Path, *lines: str) -> None:
    """As `kakeya keys` does: the whole file at once."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    new.replace(path)


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What goes to the log meanwhile, in which no key may be."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    yield caplog.records
    for secret in (ALICE, BOB, CAROL):
        assert secret not in caplog.text


def test_a_hashed_key_opens_for_its_owner(file: Path) -> None:
    ring = KeyRing.from_file(str(file))
    assert [ring.key_of(bearer(key)).owner for key in (ALICE, BOB)] == ["alice", "bob"]
    assert not opens(ring, CAROL)


def test_a_plain_key_of_an_older_file_works_and_the_log_says_what_to_do(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, ALICE, Key.of(BOB, "bob").line)
    with logged(caplog) as records:
        ring = KeyRing.from_file(str(file))
    assert opens(ring, ALICE)
    assert [record.levelname for record in records] == ["WARNING"]
    assert "holds 1 key in plain text; `kakeya keys hash" in records[0].getMessage()


@pytest.mark.parametrize(
    "line",
    [
        "sha256:" + "a" * 63,
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 64 + " two words",
        "sha256:" + "a" * 64 + " " + "x" * 65,
        "sha256:" + "a" * 64 + " über",
        "sha256:" + "a" * 64 + " cert:abc",
        "sha512:" + "a" * 64 + " alice",
        "short",
    ],
    ids=str,
)
def test_a_line_that_cannot_be_meant_stops_the_start(file: Path, line: str) -> None:
    write(file, Key.of(ALICE).line, line)
    with pytest.raises(ConfigError, match="line 2") as caught:
        KeyRing.from_file(str(file))
    assert line not in str(caught.value)


def test_a_new_key_works_and_a_removed_one_does_not_from_the_next_call_on(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing.from_file(str(file))
    with logged(caplog) as records:
        write(file, Key.of(BOB, "bob").line, Key.of(CAROL, "carol").line)
        assert [opens(ring, key) for key in (ALICE, BOB, CAROL)] == [False, True, True]
        write(file, Key.of(BOB, "bob").line)
        assert not opens(ring, CAROL)
    said = [record.getMessage() for record in records]
    assert [line.rpartition("; ")[2] for line in said] == ["accepted now: 2 keys", "accepted now: 1 key"]


def test_no_caller_is_let_in_after_the_last_key_is_removed(file: Path) -> None:
    ring = KeyRing.from_file(str(file))
    write(file)
    assert not opens(ring, ALICE)
    assert not ring.is_open
    with pytest.raises(Unauthenticated):
        ring.key_of([])
    write(file, Key.of(ALICE, "alice").line)
    assert opens(ring, ALICE)


def test_a_line_that_became_wrong_opens_nothing_and_the_others_hold(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing.from_file(str(file))
    with logged(caplog) as records:
        write(file, "short", Key.of(BOB, "bob").line)
        assert [opens(ring, key) for key in (ALICE, BOB)] == [False, True]
    assert [record.levelname for record in records] == ["ERROR", "INFO"]
    assert "line 1 is ignored" in records[0].getMessage()


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"\xff\xfe")], ids=["gone", "not text"])
def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_were_and_says_so_once(
    file: Path, caplog: pytest.LogCaptureFixture, change: object
) -> None:
    ring = KeyRing.from_file(str(file))
    assert callable(change)
    with logged(caplog) as records:
        change(file)
        assert opens(ring, ALICE) and opens(ring, BOB) and not opens(ring, CAROL)
    assert [record.levelname for record in records] == ["ERROR"]


def test_a_wrong_key_costs_as_much_with_ten_thousand_keys_as_with_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of wrong keys is paid for by the server: each is hashed once, and compared with none."""
    file.write_text(
        "".join(f"{Key.of(f'another-key-{number:06}').line}\n" for number in range(10_000)), encoding="utf-8"
    )
    ring, hashed = KeyRing.from_file(str(file)), []
    sha256 = hashlib.sha256

    def counting(data: bytes) -> Any:
        hashed.append(data)
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", counting)
    monkeypatch.setattr(hmac, "compare_digest", None)
    assert not opens(ring, CAROL)
    assert opens(ring, "another-key-009999")
    assert hashed == [CAROL.encode(), b"another-key-009999"]


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o644, False), (0o620, True), (0o666, True)])
def test_a_key_file_that_others_can_write_is_reported_of(
    file: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    file.chmod(mode)
    assert opens(KeyRing.from_file(str(file)), ALICE)
    assert any(f"chmod go-w {file}" in record.getMessage() for record in caplog.records) is warns


def test_a_certificate_names_its_owner_by_its_spiffe_id_or_else_by_its_whole_subject() -> None:
    subject = owner_of_certificate({"x509_subject": [b"CN=alice,O=agents"]})
    assert subject == owner_of_certificate({"x509_subject": [b"CN=alice,O=agents"], "x509_common_name": [b"alice"]})
    assert subject.startswith("cert:") and "alice" not in subject
    spiffe = {"x509_subject": [b"O=SPIRE"], "peer_spiffe_id": [b"spiffe://example.org/alice"]}
    others = [
        owner_of_certificate({"x509_subject": [b"CN=alice,O=others"]}),
        owner_of_certificate(spiffe),
        owner_of_certificate({**spiffe, "peer_spiffe_id": [b"spiffe://example.org/bob"]}),
        owner_of_certificate({"x509_subject": [b"spiffe://example.org/alice"]}),
    ]
    assert len({subject, *others}) == 5


@pytest.mark.parametrize("facts", [{}, {"x509_subject": [b""]}, {"x509_common_name": [b"alice"]}], ids=str)
def test_a_certificate_without_a_name_opens_nothing(facts: dict[str, list[bytes]]) -> None:
    with pytest.raises(Unauthenticated):
        owner_of_certificate(facts)
