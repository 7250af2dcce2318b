"""Random requests: of every field the values at the edges, of every message bytes that no client would send."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.load.servicer import REQUESTS

MUTATED_SHARE = 0.35
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
        np.inf,
        -np.inf,
        np.nan,
        100.0,
        101.0,
    ),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, 1.0, -1.0, 1e308, np.inf, np.nan),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 3, 8, 9, 64, 255, 256, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 7, 8, 20, 64, 200, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: _SIGNED,
    FieldDescriptor.CPPTYPE_INT64: (*_SIGNED, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_ENUM: _SIGNED,
}
_COUNTS = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_TEXTS = ("", "a", "kakeya", "ä", "x" * 129, "\n", "\x00", "int8", "lloyd4", "latent", "recompute", "stream", "mean")


class Messages:
    """Makes requests. `session_ids` is the caller's list of sessions that exist, which it may change."""

    def __init__(self, rng: np.random.Generator, session_ids: list[str], *, vocab_size: int) -> None:
        self._rng = rng
        self._session_ids = session_ids
        self._vocab_size = vocab_size
        self._request_ids = [rng.bytes(16) for _ in range(REQUEST_IDS)]

    def next(self) -> tuple[str, bytes]:
        """A method, and bytes for it."""
        names = list(REQUESTS)
        name = names[int(self._rng.integers(len(names)))]
        message = REQUESTS[name]()
        self._fill(message)
        data = message.SerializeToString()
        return name, self._mutated(data) if self._rng.random() < MUTATED_SHARE else data

    def _fill(self, message: Message, depth: int = 0) -> None:
        for field in message.DESCRIPTOR.fields:
            # What every call needs is mostly there; other fields come now and then, so that calls also get through.
            chance = 0.97 if field.name in ("session_id", "max_tokens", "token_ids") else 0.12
            if self._rng.random() < chance:
                self._set(message, field, depth)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(int(self._rng.integers(0, 4))):
                getattr(message, field.name)[self._token()] = float(self._edge(FieldDescriptor.CPPTYPE_FLOAT))
        elif field.message_type is not None:
            if depth < 3:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self._fill(inner, depth + 1)
        elif field.is_repeated:
            count = int(self._rng.integers(0, IDS_AT_MOST))
            getattr(message, field.name).extend(self._token() for _ in range(count))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: Any) -> Any:
        if field.name == "session_id":
            return self._session_id()
        if field.name == "request_id":
            return self._request_id()
        if field.name == "max_tokens" and self._rng.random() < 0.9:
            return int(self._rng.integers(1, 5))
        if field.type == FieldDescriptor.TYPE_STRING:
            return _TEXTS[int(self._rng.integers(len(_TEXTS)))]
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._rng.bytes(int(self._rng.integers(0, 40)))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return bool(self._rng.integers(2))
        if field.cpp_type in _COUNTS and self._rng.random() < 0.4:
            return int(self._rng.integers(0, 200))
        return self._edge(field.cpp_type)

    def _edge(self, kind: int) -> Any:
        edges = _EDGES[kind]
        return edges[int(self._rng.integers(len(edges)))]

    def _token(self) -> int:
        if self._rng.random() < 0.995:
            return int(self._rng.integers(self._vocab_size))
        return int(self._edge(FieldDescriptor.CPPTYPE_UINT32))

    def _session_id(self) -> str:
        if self._session_ids and self._rng.random() < 0.93:
            return self._session_ids[int(self._rng.integers(len(self._session_ids)))]
        return _TEXTS[int(self._rng.integers(len(_TEXTS)))]

    def _request_id(self) -> bytes:
        if self._rng.random() < 0.9:
            return self._request_ids[int(self._rng.integers(REQUEST_IDS))]
        return self._rng.bytes(int(self._rng.integers(0, 40)))

    def _mutated(self, data: bytes) -> bytes:
        """Some bytes changed, lost, doubled, or put in from nowhere."""
        out = bytearray(data)
        for _ in range(int(self._rng.integers(1, 4))):
            at = int(self._rng.integers(len(out) + 1))
            match int(self._rng.integers(5)):
                case 0 if at < len(out):
                    out[at] ^= 1 << int(self._rng.integers(8))
                case 1 if at < len(out):
                    out[at] = int(self._rng.integers(256))
                case 2:
                    del out[at : at + int(self._rng.integers(1, 9))]
                case 3:
                    out[at:at] = self._rng.bytes(int(self._rng.integers(1, 9)))
                case _:
                    out[at:at] = out[at : at + int(self._rng.integers(1, 17))]
        return bytes(out)
