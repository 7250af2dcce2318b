"""Rows of a journal: what they are made of, and the checksums that they carry."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise

import apsw
import numpy as np

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal import APPENDED, CopyRecord, ReplyRecord, SessionRecord, TokensRecord
from inference_engine.session.replies import DIGEST_BYTES, MOST_PER_SESSION, REQUEST_ID_BYTES
from inference_engine.types import Mark

ROW_BYTES = 1992  # of ids, marks and log-probabilities in a row; two such rows fill a page of the database
# What a row raises that is gone, or has a value of a type that no row has.
DAMAGE_OF_ROWS = (TypeError, ValueError, StopIteration, struct.error, apsw.CorruptError)
_MIXED = 2  # a row's tokens have several marks
_TOKENS = struct.Struct("<QQB")
_APPEND = struct.Struct(f"<{REQUEST_ID_BYTES}s{DIGEST_BYTES}sIH")  # of a packed reply; 64 of them fill half a page


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Tokens as a row of `tokens` or `ends` has them. mark, ids: see `unpacked`. is_full: no more fit."""

    position: int
    mark: int
    ids: bytes
    logprobs: bytes | None
    tokens: int
    is_full: bool


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


def session_crc(number: int, owner: str, body: str, length: int) -> int:
    return crc_of(f"{number} {length} {owner} {body}".encode())


def reply_crc(record: ReplyRecord) -> int:
    return crc_of(repr(record).encode())


def copy_crc(number: int, record: CopyRecord) -> int:
    return crc_of(f"{number} {record.file} {record.length} {record.nbytes} {record.header_crc}".encode())


def session_record(body: str) -> SessionRecord:
    fields = json.loads(body)
    return SessionRecord(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})


def joined(rows: Sequence[tuple[int, int, bytes, bytes | None]]) -> Iterator[TokensRecord]:
    """The tokens of rows of the tail that follow each other: position, mark, ids and log-probabilities of each."""
    for (mark, has_logprobs), same in groupby(rows, lambda row: (row[1], row[3] is not None)):
        positions, _, ids, logprobs = zip(*same, strict=True)
        values = np.frombuffer(b"".join(logprobs), dtype=np.float32) if has_logprobs else None
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
    values = None if logprobs is None else np.frombuffer(logprobs, dtype=np.float32)
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
    """The same tokens, which follow each other, in rows of ROW_BYTES. Rows end where log-probabilities begin or end."""
    for has_logprobs, of_kind in groupby(records, lambda record: record.logprobs is not None):
        run = list(of_kind)
        ids = np.concatenate([record.token_ids for record in run]).astype("<u4", copy=False)
        marks = np.repeat([int(record.mark) for record in run], [len(record.token_ids) for record in run])
        values = np.concatenate(
            [record.logprobs for record in run if record.logprobs is not None] or [np.empty(0, dtype=np.float32)]
        )
        nbytes = max(1, -(-int(ids.max()).bit_length() // 8)) if len(ids) else 1
        of_token = nbytes + 4 * has_logprobs
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
                values[part].tobytes() if has_logprobs else None,
                tokens=len(ids[part]),
                is_full=start + most <= len(ids),
            )
            start += most


def appends_crc(number: int, replies: bytes) -> int:
    return zlib.crc32(replies, number & 0xFFFFFFFF)


def packed_append(record: ReplyRecord) -> bytes:
    """The reply to an append in few bytes. It says how long the history was then."""
    high, low = divmod(record.position, 2**32)
    return _APPEND.pack(record.request_id, record.digest[:DIGEST_BYTES], low, high)


def most_recent(replies: bytes) -> bytes:
    """Of packed replies, oldest first, those that are kept."""
    return replies[-_APPEND.size * MOST_PER_SESSION :]


def unpacked_appends(session_id: str, owner: str, replies: bytes) -> list[ReplyRecord]:
    found = []
    for request_id, digest, low, high in _APPEND.iter_unpack(replies):
        position = (high << 32) + low
        found.append(ReplyRecord(session_id, owner, APPENDED, request_id, digest, position, str(position)))
    return found
