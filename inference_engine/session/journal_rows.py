"""Rows of a journal: what they are made of, and the checksums that they carry."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import apsw
import numpy as np

from inference_engine.errors import HistoryCorrupt
from inference_engine.session.journal import CopyRecord, ReplyRecord, SessionRecord, TokensRecord
from inference_engine.types import Mark

FOLD_TOKENS = 498  # of a row; two such rows fill a page of the database


@contextmanager
def damage_is_refused(position: int) -> Iterator[None]:
    """HistoryCorrupt for a row that is gone, or has a value of a type that no row has.

    One flipped bit makes a text of bytes, or a number of nothing, and the row's checksum may still be right.
    """
    try:
        yield
    except (TypeError, ValueError, StopIteration, struct.error, apsw.CorruptError) as error:
        raise HistoryCorrupt(position) from error


def crc_of(data: bytes) -> int:
    return zlib.crc32(data)


def tokens_crc(position: int, mark: int, ids: bytes, logprobs: bytes | None, number: int = 0) -> int:
    """number: of the session, for a row of the tail, which says whose it is."""
    return zlib.crc32(logprobs or b"", zlib.crc32(ids, zlib.crc32(struct.pack("<QQB", number, position, mark))))


def session_crc(number: int, owner: str, body: str, length: int) -> int:
    return crc_of(f"{number} {length} {owner} {body}".encode())


def reply_crc(record: ReplyRecord) -> int:
    return crc_of(repr(record).encode())


def copy_crc(number: int, record: CopyRecord) -> int:
    return crc_of(f"{number} {record.file} {record.length} {record.nbytes} {record.header_crc}".encode())


def session_record(body: str) -> SessionRecord:
    fields = json.loads(body)
    return SessionRecord(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})


def tokens_record(position: int, mark: int, ids: bytes, logprobs: bytes | None) -> TokensRecord:
    values = None if logprobs is None else np.frombuffer(logprobs, dtype=np.float32)
    return TokensRecord(position, np.frombuffer(ids, dtype=np.uint32), Mark(mark), values)


def in_whole_rows(rows: Sequence[TokensRecord]) -> Iterator[TokensRecord]:
    """The same tokens in rows of FOLD_TOKENS, as far as neighbours came the same way."""
    run: list[TokensRecord] = []
    for row in [*rows, None]:
        is_next = row is not None and bool(run) and _kind(row) == _kind(run[0])
        if run and not is_next:
            ids = np.concatenate([one.token_ids for one in run])
            logprobs = None if run[0].logprobs is None else np.concatenate([one.logprobs for one in run])
            for start in range(0, len(ids), FOLD_TOKENS):
                part = slice(start, start + FOLD_TOKENS)
                values = None if logprobs is None else logprobs[part]
                yield TokensRecord(run[0].position + start, ids[part], run[0].mark, values)
            run = []
        if row is not None:
            run.append(row)


def _kind(row: TokensRecord) -> tuple[Mark, bool]:
    return row.mark, row.logprobs is None
