"""Random requests: of every field the values at the edges, of every message bytes that no client would send."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.load.servicer import REQUESTS

MUTATED_SHARE = 0.3
# How many of a hundred messages are for each method: most for those that do most.
WEIGHTS = {
    "Generate": 38,
    "AppendTokens": 29,
    "CreateSession": 8,
    "GetSessionInfo": 6,
    "ForkSession": 5,
    "RewindSession": 5,
    "CloseSession": 3,
    "GetServerInfo": 2,
    "ListSessions": 1,
    "ReadHistory": 3,
}
ODD_SHARES = (0.01, 0.06, 0.25)  # of the fields that need not be there: a message has few, some or many of them
IDS_AT_MOST = 40
REQUEST_IDS = 12

_SIGNED = (0, 1, -1, 7, 2**31 - 1, -(2**31))
_EDGES: dict[int, tuple[float, ...]] = {
    FieldDescriptor.CPPTYPE_FLOAT: (
        0.0,
        -0.0,
        1.0,
        0.5,
        0.99,
        -1.0,
        1e-45,
        3e38,
        math.inf,
        -math.inf,
        math.nan,
        100.0,
        101.0,
    ),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, 1.0, -1.0, 1e308, math.inf, math.nan),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 3, 8, 9, 64, 255, 256, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 7, 8, 20, 64, 200, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: _SIGNED,
    FieldDescriptor.CPPTYPE_INT64: (*_SIGNED, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_ENUM: _SIGNED,
}
_COUNTS = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_TEXTS = ("", "a", "kakeya", "ä", "x" * 129, "\n", "\x00", "int8", "lloyd4", "latent", "recompute", "stream", "mean")

# What a strategy that is asked for by its name may be called, and its options.
_STRATEGIES = ("full", "sink_window", "layer_window", "newer_than_the_server")
_OPTIONS = ("sink", "window", "codec", "exact_window", "full_layers")
_OPTION_VALUES = ("0", "2", "12", "-1", "1e9", "9" * 40, "0,1", "true")


class Messages:
    """Makes requests. `session_ids` is the caller's list of sessions that exist, which it may change."""

    def __init__(self, rng: random.Random, session_ids: list[str], *, vocab_size: int) -> None:
        assert WEIGHTS.keys() == REQUESTS.keys(), "every method is called"
        self._rng = rng
        self._session_ids = session_ids
        self._vocab_size = vocab_size
        self._request_ids = [rng.randbytes(16) for _ in range(REQUEST_IDS)]

    def next(self) -> tuple[str, bytes]:
        """A method, and bytes for it."""
        (name,) = self._rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))
        message = REQUESTS[name]()
        self._fill(message, self._rng.choice(ODD_SHARES))
        data = message.SerializeToString()
        return name, self.mutated(data) if self._rng.random() < MUTATED_SHARE else data

    def _fill(self, message: Message, share: float, depth: int = 0) -> None:
        for field in message.DESCRIPTOR.fields:
            # What every call needs is mostly there; other fields come now and then, so that calls also get through.
            chance = 0.97 if field.name in ("session_id", "max_tokens", "token_ids", "at_position") else share
            if self._rng.random() < chance:
                self._set(message, field, share, depth)

    def _set(self, message: Message, field: Any, share: float, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            entries = getattr(message, field.name)
            for _ in range(self._rng.randrange(4)):
                if key.type == FieldDescriptor.TYPE_STRING:
                    entries[self._rng.choice(_TEXTS + _OPTIONS)] = self._rng.choice(_TEXTS + _OPTION_VALUES)
                else:
                    entries[self._token()] = float(self._edge(value.cpp_type))
        elif field.message_type is not None:
            if depth < 3:
                held = getattr(message, field.name)
                for inner in [held.add() for _ in range(self._rng.randrange(4))] if field.is_repeated else [held]:
                    inner.SetInParent()
                    self._fill(inner, share, depth + 1)
        elif field.is_repeated:
            count = self._rng.randrange(IDS_AT_MOST)
            getattr(message, field.name).extend([self._token() for _ in range(count)])
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: Any) -> Any:
        if field.name == "session_id":
            return self._session_id()
        if field.name == "request_id":
            return self._request_id()
        if field.name == "max_tokens" and self._rng.random() < 0.9:
            return self._rng.randint(1, 4)
        if field.name == "at_position" and self._rng.random() < 0.5:
            return self._rng.randrange(8)
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._rng.choice(_TEXTS + _STRATEGIES if field.name == "name" else _TEXTS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._rng.randbytes(self._rng.randrange(40))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self._rng.random() < 0.5
        if field.cpp_type in _COUNTS and self._rng.random() < 0.4:
            return self._rng.randrange(200)
        return self._edge(field.cpp_type)

    def _edge(self, kind: int) -> Any:
        return self._rng.choice(_EDGES[kind])

    def _token(self) -> int:
        if self._rng.random() < 0.998:
            return int(self._rng.random() * self._vocab_size)
        return int(self._edge(FieldDescriptor.CPPTYPE_UINT32))

    def _session_id(self) -> str:
        if self._session_ids and self._rng.random() < 0.95:
            return self._rng.choice(self._session_ids)
        return self._rng.choice(_TEXTS)

    def _request_id(self) -> bytes:
        if self._rng.random() < 0.9:
            return self._rng.choice(self._request_ids)
        return self._rng.randbytes(self._rng.randrange(40))

    def mutated(self, data: bytes) -> bytes:
        """Some bytes changed, lost, doubled, or put in from nowhere."""
        out = bytearray(data)
        for _ in range(self._rng.randint(1, 3)):
            at = self._rng.randrange(len(out) + 1)
            match self._rng.randrange(5):
                case 0 if at < len(out):
                    out[at] ^= 1 << self._rng.randrange(8)
                case 1 if at < len(out):
                    out[at] = self._rng.randrange(256)
                case 2:
                    del out[at : at + self._rng.randint(1, 8)]
                case 3:
                    out[at:at] = self._rng.randbytes(self._rng.randint(1, 8))
                case _:
                    out[at:at] = out[at : at + self._rng.randint(1, 16)]
        return bytes(out)
