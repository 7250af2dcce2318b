"""Rows of a journal: what they are made of, and the checksums that they carry."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import apsw
import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal import (
    APPENDED,
    CopyRecord,
    GenerateRecord,
    Logprobs,
    ReplyRecord,
    SessionRecord,
    TokensRecord,
)
from inference_engine.session.replies import DIGEST_BYTES, MOST_PER_SESSION, REQUEST_ID_BYTES
from inference_engine.types import Mark

MOST_GENERATES = 8  # of a session, that a client may continue
ROW_BYTES = 1992  # of ids, marks and log-probabilities in a row; two such rows fill a page of the database
# What a row raises that is gone, or has a value of a type that no row has.
DAMAGE_OF_ROWS = (TypeError, ValueError, StopIteration, struct.error, apsw.CorruptError)
_MIXED = 2  # a row's tokens have several marks
_TOKENS = struct.Struct("<QQB")
_APPEND = struct.Struct(f"<{REQUEST_ID_BYTES}s{DIGEST_BYTES}sIH")  # of a packed reply; 64 of them fill half a page
_GENERATE = struct.Struct(f"<QB{REQUEST_ID_BYTES}s{DIGEST_BYTES}sQ")  # of a packed Generate
# What an entry of the tail begins with: its checksum, and what is in it.
_ENTRY, _OF_ENTRY = struct.Struct("<IB"), struct.Struct("<QQ")
_BEGAN = struct.Struct(f"<{REQUEST_ID_BYTES}s{DIGEST_BYTES}sQ")
_ANSWER = struct.Struct(f"<{REQUEST_ID_BYTES}s{DIGEST_BYTES}s")
_MARKS, _HAS_LOGPROBS, _BEGINS, _IS_NAMED, _ANSWERS, _IS_ONE, _IS_WIDE = 1, 2, 4, 8, 16, 32, 64


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Tokens as a row of `tokens` or `ends` has them. mark, ids: see `unpacked`. is_full: no more fit."""

    position: int
    mark: int
    ids: bytes
    logprobs: bytes | None
    tokens: int
    is_full: bool


class Entry(NamedTuple):
    """An entry of the tail: tokens of a session, with the Generate that they are the first of, or an append's answer.

    logprobs: of each token, as bytes; as many numbers of each. answer: a packed reply.
    """

    mark: int
    ids: bytes
    logprobs: bytes | None = None
    began: GenerateRecord | None = None
    answer: bytes = b""

    @property
    def tokens(self) -> int:
        return len(self.ids) // 4


@contextmanager
def damage_is_refused(position: int) -> Iterator[None]:
    """HistoryCorrupt for a row that is gone, or has a value of a type that no row has.

    One flipped bit makes a text of bytes, or a number of nothing, and the row's checksum may still be right.
    """
    try:
        yield
    except DAMAGE_OF_ROWS as error:
        raise HistoryCorrupt(position) from error


def crc_of(data: bytes) -> int:
    return zlib.crc32(data)


def tokens_crc(position: int, mark: int, ids: bytes, logprobs: bytes | None, number: int = 0) -> int:
    """number: of the session, for a row of the tail, which says whose it is."""
    crc = zlib.crc32(ids, zlib.crc32(_TOKENS.pack(number, position, mark)))
    return crc if logprobs is None else zlib.crc32(logprobs, crc)


def session_crc(number: int, owner: str, body: str, length: int, answers: int) -> int:
    """answers: see `answers_sum`; a session without any has the checksum that older formats gave it."""
    more = f" {answers}" if answers else ""
    return crc_of(f"{number} {length} {owner} {body}{more}".encode())


def answers_sum(number: int, appends: bytes, generates: bytes) -> int:
    """What the row of a session says of the answers that are folded; 0: there are none.

    So a row of theirs that is gone is noticed as well as one that is damaged.
    """
    if not appends and not generates:
        return 0
    return 1 + zlib.crc32(generates, zlib.crc32(appends, zlib.crc32(_OF_ENTRY.pack(number, len(appends)))))


def reply_values(record: ReplyRecord) -> tuple[str, str, str, bytes, bytes, int, str]:
    """As `replies` has them. `astuple` takes ten times as long."""
    one = record
    return one.session_id, one.owner, one.kind, one.request_id, one.digest, one.position, one.body


def reply_crc(number: int | None, ended_at: float | None, *values: object) -> int:
    """number: of the session, if the row says so. Values of other types than they had have another one."""
    return crc_of(repr((number, ended_at, values)).encode())


def packed_tokens(
    number: int, position: int, mark: int, ids: bytes, logprobs: bytes | None, began: GenerateRecord | None
) -> bytes:
    """The body of a row of the tail. A lone id, which most rows have, is without the zeros at its end."""
    kind, data = mark, ids
    if len(ids) == 4:
        kind |= _IS_ONE
        data = ids.rstrip(b"\0")
    if logprobs is not None and len(logprobs) > len(ids):
        kind |= _IS_WIDE
        data = bytes([len(logprobs) // len(ids)]) + data
    if began is not None:
        assert began.position == position
        kind |= _BEGINS
        if began.request_id:
            kind |= _IS_NAMED
            data = _BEGAN.pack(began.request_id, began.digest, began.seed) + data
    if logprobs is not None:
        kind |= _HAS_LOGPROBS
        data += logprobs
    return _packed_entry(number, position, kind, data)


def packed_answer(number: int, record: ReplyRecord) -> bytes:
    """The body of a row of the tail that is the answer to an append, at the length that the history had then."""
    return _packed_entry(
        number, record.position, _ANSWERS, _ANSWER.pack(record.request_id, record.digest[:DIGEST_BYTES])
    )


def _packed_entry(number: int, position: int, kind: int, data: bytes) -> bytes:
    return _ENTRY.pack(entry_crc(number, position, kind, data), kind) + data


def entry_crc(number: int, position: int, kind: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(_OF_ENTRY.pack(number, position), kind))


def is_entry_of(number: int, position: int, body: bytes) -> bool:
    """Is this the body of such a row? False, too, for values of types that no row has."""
    try:
        head: tuple[int, int] = _ENTRY.unpack_from(body)
        crc, kind = head
        return crc == entry_crc(number, position, kind, body[_ENTRY.size :])
    except (TypeError, struct.error):
        return False


def unpacked_entry(position: int, body: bytes) -> Entry:
    """Of a body whose checksum is right. Raises struct.error or ValueError for what is none."""
    _, kind = _ENTRY.unpack_from(body)
    mark, at = kind & _MARKS, _ENTRY.size
    if kind & ~_MARKS == _IS_ONE:  # most are, of a step
        return Entry(mark, body[at:].ljust(4, b"\0"))
    if kind & _ANSWERS:
        request_id, digest = _ANSWER.unpack_from(body, at)
        return Entry(mark, b"", answer=_packed_append(request_id, digest, position))
    began: GenerateRecord | None = None
    if kind & _BEGINS:
        began = GenerateRecord(position, b"", b"", 0)
        if kind & _IS_NAMED:
            began = GenerateRecord(position, *_BEGAN.unpack_from(body, at))
            at += _BEGAN.size
    width = 1
    if kind & _IS_WIDE:
        (width,) = body[at : at + 1]
        at += 1
    data, logprobs = body[at:], None
    if kind & _HAS_LOGPROBS:
        count = 1 if kind & _IS_ONE else len(data) // (4 + 4 * width)
        data, logprobs = data[: len(data) - 4 * count * width], data[len(data) - 4 * count * width :]
    return Entry(mark, data.ljust(4, b"\0") if kind & _IS_ONE else data, logprobs, began)


def copy_crc(number: int, record: CopyRecord) -> int:
    return crc_of(f"{number} {record.file} {record.length} {record.nbytes} {record.header_crc}".encode())


def usage_crc(owner: str, body: str) -> int:
    return crc_of(f"{owner} {body}".encode())


def session_record(body: str) -> SessionRecord:
    fields = json.loads(body)
    return SessionRecord(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})


def joined(rows: Sequence[tuple[int, int, bytes, bytes | None]]) -> Iterator[TokensRecord]:
    """The tokens of entries of the tail that follow each other: position, mark, ids and log-probabilities of each."""
    for (mark, width), same in groupby(rows, lambda row: (row[1], len(row[3] or b"") // len(row[2]))):
        positions, _, ids, logprobs = zip(*same, strict=True)
        values = _of_width(np.frombuffer(b"".join(logprobs), dtype=np.float32), width) if width else None
        yield TokensRecord(positions[0], np.frombuffer(b"".join(ids), dtype=np.uint32), Mark(mark), values)


def unpacked(position: int, mark: int, ids: bytes, logprobs: bytes | None) -> list[TokensRecord]:
    """The tokens of a row of `tokens` or `ends`, one record for each stretch of equal mark.

    mark: the tokens' Mark, or _MIXED, plus four times the bytes of an id (0, of older rows, stands for four). ids:
    little-endian; of _MIXED after one bit of each token's mark. Raises TypeError or ValueError for what is no such row.
    """
    nbytes, kind = mark >> 2 or 4, mark & 3
    # With the bits, whose bytes are rounded up, one length is that of one count only.
    count = 8 * len(ids) // (8 * nbytes + 1) if kind == _MIXED else len(ids) // nbytes
    bits = -(-count // 8) if kind == _MIXED else 0
    if nbytes > 4 or kind > _MIXED or bits + count * nbytes != len(ids):
        raise ValueError(f"no row: mark {mark}, {len(ids)} bytes")
    wide = np.zeros((count, 4), dtype=np.uint8)
    wide[:, :nbytes] = np.frombuffer(ids, dtype=np.uint8, offset=bits).reshape(count, nbytes)
    found = wide.view(np.uint32)[:, 0]
    values = None
    if logprobs is not None:
        values = np.frombuffer(logprobs, dtype=np.float32)
        values = _of_width(values, len(values) // count if count else 1)
    if kind != _MIXED:
        return [TokensRecord(position, found, Mark(kind), values)]
    marks = np.unpackbits(np.frombuffer(ids[:bits], dtype=np.uint8), count=count)
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), count]
    return [
        TokensRecord(
            position + start, found[start:end], Mark(int(marks[start])), None if values is None else values[start:end]
        )
        for start, end in pairwise(edges)
    ]


def packed(records: Sequence[TokensRecord]) -> Iterator[PackedRow]:
    """The same tokens, which follow each other, in rows of ROW_BYTES. A row has so many log-probabilities a token."""
    for width, of_kind in groupby(records, lambda record: _width(record.logprobs)):
        run = list(of_kind)
        ids = np.concatenate([record.token_ids for record in run]).astype("<u4", copy=False)
        marks = np.repeat([int(record.mark) for record in run], [len(record.token_ids) for record in run])
        values = np.concatenate(
            [record.logprobs for record in run if record.logprobs is not None] or [np.empty(0, dtype=np.float32)]
        )
        nbytes = max(1, -(-int(ids.max()).bit_length() // 8)) if len(ids) else 1
        of_token = nbytes + 4 * width
        start = 0
        while start < len(ids):
            most = ROW_BYTES // of_token
            is_mixed = bool(np.ptp(marks[start : start + most]))
            if is_mixed:
                most = 8 * ROW_BYTES // (8 * of_token + 1)
            part = slice(start, start + most)
            data = ids[part].view(np.uint8).reshape(-1, 4)[:, :nbytes].tobytes()
            bits = np.packbits(marks[part].astype(np.uint8)).tobytes() if is_mixed else b""
            yield PackedRow(
                run[0].position + start,
                (_MIXED if is_mixed else int(marks[start])) + 4 * nbytes,
                bits + data,
                values[part].tobytes() if width else None,
                tokens=len(ids[part]),
                is_full=start + most <= len(ids),
            )
            start += most


def _width(logprobs: Logprobs | None) -> int:
    """Numbers of each token."""
    return 0 if logprobs is None else 1 if logprobs.ndim == 1 else logprobs.shape[1]


def _of_width(numbers: NDArray[np.float32], width: int) -> Logprobs:
    return numbers if width == 1 else numbers.reshape(-1, width)


def packed_append(record: ReplyRecord) -> bytes:
    """The reply to an append in few bytes. It says how long the history was then."""
    return _packed_append(record.request_id, record.digest[:DIGEST_BYTES], record.position)


def _packed_append(request_id: bytes, digest: bytes, position: int) -> bytes:
    high, low = divmod(position, 2**32)
    return _APPEND.pack(request_id, digest, low, high)


def most_recent(replies: bytes) -> bytes:
    """Of packed replies, oldest first, those that are kept."""
    return replies[-_APPEND.size * MOST_PER_SESSION :]


def unpacked_appends(session_id: str, owner: str, replies: bytes) -> list[ReplyRecord]:
    found = []
    for request_id, digest, low, high in _APPEND.iter_unpack(replies):
        position = (high << 32) + low
        found.append(ReplyRecord(session_id, owner, APPENDED, request_id, digest, position, str(position)))
    return found


def packed_generates(generates: Sequence[GenerateRecord]) -> bytes:
    return b"".join(
        _GENERATE.pack(one.position, bool(one.request_id), one.request_id, one.digest[:DIGEST_BYTES], one.seed)
        for one in generates
    )


def unpacked_generates(generates: bytes) -> list[GenerateRecord]:
    """In their order. Raises struct.error for what is none."""
    found = []
    for position, is_named, *identity, seed in _GENERATE.iter_unpack(generates):
        request_id, digest = identity if is_named else (b"", b"")
        found.append(GenerateRecord(position, request_id, digest, seed))
    return found


def recent_generates(generates: Sequence[GenerateRecord]) -> list[GenerateRecord]:
    """The last that a call can name, and of the others those that say where one of these ends."""
    named = [index for index, one in enumerate(generates) if one.request_id][-MOST_GENERATES:]
    return (
        [
            one
            for index, one in enumerate(generates)
            if index >= named[0] and (one.request_id or generates[index - 1].request_id)
        ]
        if named
        else []
    )
