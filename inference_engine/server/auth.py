"""Authentication: bearer keys with owners, stored as SHA-256 digests only, and the subjects of certificates.

The key file is what `kakeya keys` writes, one key a line, and is read again whenever it changes:

    # comment
    sha256:<64 hexadecimal digits> alice       several lines may name one owner
    sha256:<64 hexadecimal digits>             without a name, the owner is the start of the digest
    <the key itself>                           plain text, as in older files: it works, and the log asks to hash it

A fast hash is enough here, unlike for passwords: a key is 256 random bits, so it cannot be found by trying, however
cheap one attempt is. A slow hash would cost every call, calls with wrong keys included.

Owners of keys and of certificates (`cert:…`) are disjoint. With neither (a loopback server) all callers are owner "".
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference_engine.config import in_full
from inference_engine.errors import ConfigError, Unauthenticated, counted
from inference_engine.server.file_state import state_of

MIN_KEY_CHARACTERS = 16
OWNER_CHARACTERS = 16
CERTIFICATE_OWNER_CHARACTERS = 32

OWNER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", re.ASCII)
_HASHED = re.compile(rf"sha256:([0-9a-f]{{64}})(?:\s+({OWNER_NAME.pattern}))?", re.ASCII)

_HEADER = "authorization"
_SCHEME = b"bearer "  # in any case (RFC 9110, section 11.1)

Metadata = Sequence[tuple[str, str | bytes]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """A key as the server knows it."""

    digest: bytes
    owner: str
    is_plain: bool = False  # stored in plain text

    @staticmethod
    def of(key: str, owner: str = "", *, is_plain: bool = False) -> Key:
        """owner: "" for the start of the digest."""
        digest = hashlib.sha256(key.encode()).digest()
        return Key(digest, owner or digest.hex()[:OWNER_CHARACTERS], is_plain)

    @property
    def key_id(self) -> str:
        """The start of its digest, by which it is listed and removed. It reveals nothing of the key."""
        return self.digest.hex()[:OWNER_CHARACTERS]

    @property
    def line(self) -> str:
        """Its line in a key file."""
        return f"sha256:{self.digest.hex()} {self.owner}"


NO_KEY = Key(b"", "")  # of all callers, where no key is needed


def parse_line(line: str) -> Key | None:
    """The key of a line; None if it is blank or a comment. Raises ValueError, which never shows the line."""
    text = line.strip()
    if not text or text.startswith("#"):
        return None
    if text.startswith("sha256:"):
        hashed = _HASHED.fullmatch(text)
        if hashed is None:
            raise ValueError(
                "a hashed key is sha256: and 64 lower-case hexadecimal digits, optionally followed by an owner: a "
                "letter or digit, then up to 63 letters, digits or . _ @ -"
            )
        digest = bytes.fromhex(hashed[1])
        return Key(digest, hashed[2] or hashed[1][:OWNER_CHARACTERS])
    if len(text) < MIN_KEY_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(
            f"a key is at least {MIN_KEY_CHARACTERS} printable ASCII characters without spaces; `kakeya keys add` "
            "makes one"
        )
    return Key.of(text, is_plain=True)


class KeyRing:
    """The keys that this server accepts. Without keys and without a key file, every caller is accepted.

    Safe to use from any thread.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """keys: in plain text."""
        self._keys = _by_digest(Key.of(key) for key in keys)
        self._changes = 0
        self._path: Path | None = None
        self._seen: object = None  # what the file looked like when it was last read
        self._unreadable: object = ()  # and when it could not be

    @classmethod
    def from_file(cls, path: str) -> KeyRing:
        """The keys of a file, read again whenever the file changes.

        Raises ConfigError, which never shows a key, if the file is invalid now. Later, while it may be half edited, an
        invalid line is ignored and logged by its number; an unreadable file leaves the keys unchanged and is logged; an
        empty file accepts no caller.
        """
        ring = cls()
        ring._path = in_full(path)
        ring._seen = state_of(ring._path)
        _warn_of_writers(ring._path)
        try:
            keys, wrong = _read(ring._path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {path}: {why_unreadable(error)}") from error
        if wrong:
            number, complaint = min(wrong.items())
            raise ConfigError(f"{path}, line {number}: {complaint}")
        if not keys:
            raise ConfigError(f"the key file {path} holds no key; `kakeya keys add` makes one")
        ring._take(keys)
        return ring

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_open(self) -> bool:
        """Is every caller accepted, with or without a key?"""
        return self._path is None and not self._keys

    def changes(self) -> int:
        """How often keys were added or removed so far."""
        self._refresh()
        return self._changes

    def opens(self, digest: bytes) -> bool:
        """Is the key with that digest accepted, as far as the file has been read?"""
        return self.is_open or digest in self._keys

    def key_of(self, metadata: Metadata) -> Key:
        """The key in these call headers; NO_KEY where none is needed.

        Raises Unauthenticated without saying which part was wrong.
        """
        if self.is_open:
            return NO_KEY
        self._refresh()
        values = [value for name, value in metadata if name == _HEADER]
        if len(values) != 1:
            raise Unauthenticated
        value = values[0] if isinstance(values[0], bytes) else values[0].encode("utf-8", "surrogateescape")
        if value[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated
        given = hashlib.sha256(value[len(_SCHEME) :]).digest()
        # Looked up by digest: its timing reveals digests at most, and 256 random bits cannot be derived from those.
        key = self._keys.get(given)
        if key is None:
            raise Unauthenticated
        return key

    def _refresh(self) -> None:
        """Read the file if it has changed. The check is one system call, so it is made for every call."""
        if self._path is None or (seen := state_of(self._path)) == self._seen:
            return
        try:
            keys, wrong = _read(self._path)
        except (OSError, UnicodeDecodeError) as error:
            # The next call tries again: descriptors may have run out, and the change may remove a key.
            if seen != self._unreadable:
                self._unreadable = seen
                _log.error(
                    "the key file %s cannot be read (%s); the keys stay unchanged", self._path, why_unreadable(error)
                )
            return
        self._seen, self._unreadable = seen, ()
        for number, complaint in wrong.items():
            _log.error("%s, line %d is ignored: %s", self._path, number, complaint)
        self._take(keys)
        _log.info("%s changed; accepted now: %s", self._path, counted(len(keys), "key"))

    def _take(self, keys: Sequence[Key]) -> None:
        self._keys = _by_digest(keys)
        self._changes += 1
        if plain := sum(key.is_plain for key in keys):
            _log.warning(
                "%s holds %s in plain text; `kakeya keys hash --api-key-file %s` puts digests in their place, and "
                "every key keeps working",
                self._path,
                counted(plain, "key"),
                self._path,
            )


def why_unreadable(error: OSError | UnicodeDecodeError) -> str:
    """In words, and without anything of the file."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "it is not UTF-8 text"


def _warn_of_writers(path: Path) -> None:
    """A user who can write the file can add keys."""
    with contextlib.suppress(OSError):
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            _log.warning("the key file %s is writable by other users than its owner; run chmod go-w %s", path, path)


def _by_digest(keys: Iterable[Key]) -> dict[bytes, Key]:
    """A key that is listed twice belongs to its first owner."""
    found: dict[bytes, Key] = {}
    for key in keys:
        found.setdefault(key.digest, key)
    return found


def _read(path: Path) -> tuple[list[Key], dict[int, str]]:
    """The keys, and the errors of invalid lines by line number. Raises OSError or UnicodeDecodeError."""
    keys: list[Key] = []
    wrong: dict[int, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            key = parse_line(line)
        except ValueError as complaint:
            wrong[number] = str(complaint)
        else:
            keys.extend([] if key is None else [key])
    return keys, wrong


def owner_of_certificate(facts: Mapping[str, Iterable[bytes]]) -> str:
    """The owner named by a client's certificate: its SPIFFE id if it has one, else its whole subject.

    facts: what gRPC found in a certificate it has verified. Raises Unauthenticated if they name no owner.
    """
    for name in ("peer_spiffe_id", "x509_subject"):
        values = [value for value in facts.get(name, ()) if value]
        if len(values) == 1:
            # Named by a digest: subjects are long, and personal names do not belong in logs.
            digest = hashlib.sha256(name.encode() + b"\0" + values[0]).hexdigest()
            return f"cert:{digest[:CERTIFICATE_OWNER_CHARACTERS]}"
    raise Unauthenticated
