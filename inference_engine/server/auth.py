"""Who is calling: one bearer key per owner, kept as SHA-256 digests only.

With no keys (a loopback server) everyone is the same owner, "". With keys, an owner is named by the start of its key's
digest, so that sessions and logs never hold the key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from inference_engine.errors import ConfigError, Unauthenticated

MIN_KEY_CHARACTERS = 16
OWNER_CHARACTERS = 16

_HEADER = "authorization"
_SCHEME = b"Bearer "


class KeyRing:
    """The keys that open this server. An empty one lets everybody in."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    @classmethod
    def from_file(cls, path: str) -> KeyRing:
        """One key a line; blank lines are skipped. Raises ConfigError, which never shows a key."""
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {path}: {type(error).__name__}") from error
        keys = {number: line.strip() for number, line in enumerate(lines, start=1) if line.strip()}
        if not keys:
            raise ConfigError(f"the key file {path} holds no key; write one a line, or leave api_key_file unset")
        for number, key in keys.items():
            if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"{path}, line {number}: a key is at least {MIN_KEY_CHARACTERS} printable ASCII characters "
                    "without spaces; `openssl rand -hex 32` makes a good one"
                )
        return cls(tuple(keys.values()))

    def __len__(self) -> int:
        return len(self._digests)

    def owner_of(self, metadata: Sequence[tuple[str, str | bytes]]) -> str:
        """The owner these call headers belong to. Raises Unauthenticated without saying which part was wrong."""
        if not self._digests:
            return ""
        values = [value for name, value in metadata if name == _HEADER]
        if len(values) != 1:
            raise Unauthenticated
        value = values[0] if isinstance(values[0], bytes) else values[0].encode("utf-8", "surrogateescape")
        if not value.startswith(_SCHEME):
            raise Unauthenticated
        given = hashlib.sha256(value[len(_SCHEME) :]).digest()
        # Every digest is compared, and in constant time, so that neither content nor order of the keys can be timed.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if not any(matches):
            raise Unauthenticated
        return given.hex()[:OWNER_CHARACTERS]
