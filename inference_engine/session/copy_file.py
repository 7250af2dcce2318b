"""A copy of a session's K/V in a file, in the format of safetensors.

    8 bytes    how long the header is
    header     JSON: dtype, shape and place of each tensor; beside them what it is a copy of, the digests of what its
               history begins with (`session/prefixes.py`), and each tensor's CRC-32
    data       the tensors, one after another

It is written under another name, synced and renamed, so that a file under its own name is whole. A reader checks
every byte of it: the header must have the checksum that the journal recorded, each tensor the one in the header, and
the facts must be those of the session and of the server.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from inference_engine.kv.part import Saved
from inference_engine.session.history import History

T = TypeVar("T")
UNFINISHED = ".part"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
TENSOR_BYTES = 256  # of the header, at most, for each tensor
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFacts:
    """What a copy is of. fingerprint: what decides the bits of K/V. history: digest of the tokens, with their marks."""

    fingerprint: str
    length: int
    history: str

    @staticmethod
    def of(fingerprint: str, history: History, length: int) -> CopyFacts:
        """Of the first `length` tokens of a history."""
        digest = hashlib.sha256(history.ids(0, length).tobytes())
        digest.update(history.marks(0, length).tobytes())
        return CopyFacts(fingerprint=fingerprint, length=length, history=digest.hexdigest())

    def as_text(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


class CopyUnusable(Exception):
    """The file cannot be used, and why; then the session's K/V is computed again."""

    def __init__(self, outcome: Literal["missing", "damaged", "foreign"], detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class CopyWriter:
    """A file that is being written. Nothing is there under its name before `finish`."""

    def __init__(
        self, path: Path, facts: CopyFacts, names: Sequence[str], digests: Sequence[bytes], *, most_tensors: int
    ) -> None:
        """names: of all that the parts of a session save. digests: of its beginnings. most_tensors: how many will be
        added at most.
        """
        self._path, self._unfinished = path, path.with_name(path.name + UNFINISHED)
        begins = " ".join(digest.hex() for digest in digests)
        self._metadata = {**facts.as_text(), "names": json.dumps(list(names)), "begins": begins}
        self._tensors: dict[str, dict[str, object]] = {}
        self._checksums: dict[str, int] = {}
        self._end = 0  # of the data so far
        room = len(json.dumps(self._metadata)) + 1024 + most_tensors * TENSOR_BYTES
        self._header_bytes = -(-(8 + room) // _ALIGNMENT) * _ALIGNMENT - 8
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file: int | None = os.open(self._unfinished, flags, 0o600)

    @property
    def nbytes(self) -> int:
        return 8 + self._header_bytes + self._end

    def add(self, name: str, piece: int, tensors: Sequence[Tensor]) -> None:
        """One tuple of tensors, in host memory, of those saved under `name`. Raises OSError."""
        for index, tensor in enumerate(tensors):
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            key = f"{name}/{piece}/{index}"
            self._tensors[key] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [self._end, self._end + len(data)],
            }
            self._checksums[key] = zlib.crc32(data)
            self._write(data, self.nbytes)
            self._end += len(data)

    def finish(self) -> int:
        """Make it safe, and put it under its name. Returns the checksum of its header. Raises OSError."""
        assert self._file is not None
        metadata = {**self._metadata, "crc32": json.dumps(list(self._checksums.values()))}
        text = json.dumps({"__metadata__": metadata, **self._tensors}, separators=(",", ":")).encode()
        assert len(text) <= self._header_bytes, f"{len(text)} bytes of header, with room for {self._header_bytes}"
        header = text.ljust(self._header_bytes)
        self._write(memoryview(self._header_bytes.to_bytes(8, "little") + header), 0)
        os.fsync(self._file)
        self._close()
        self._unfinished.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return zlib.crc32(header)

    def give_up(self) -> None:
        """Remove what was written, finished or not."""
        self._close()
        for path in (self._unfinished, self._path):
            path.unlink(missing_ok=True)

    def _write(self, data: memoryview, offset: int) -> None:
        assert self._file is not None, "the file is closed"
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def read_copy(path: Path, expected: Mapping[str, str], header_crc: int) -> Saved:
    """All tensors of a copy, in host memory. expected: some of its facts, or all.

    Raises CopyUnusable unless all of it agrees.
    """
    return _opened(path, lambda file: _read(file, expected, header_crc))


def read_digests(path: Path, header_crc: int) -> list[bytes]:
    """Of what the history of a copy begins with; none, if it is of an older program. Raises CopyUnusable."""

    def read(file: int) -> list[bytes]:
        metadata = _header(file, header_crc)[0]["__metadata__"]
        return [bytes.fromhex(digest) for digest in metadata.get("begins", "").split()]

    return _opened(path, read)


def _opened(path: Path, read: Callable[[int], T]) -> T:
    try:
        with path.open("rb", buffering=0) as file:
            return read(file.fileno())
    except FileNotFoundError as error:
        raise CopyUnusable("missing", "the file is not there") from error
    except OSError as error:
        raise CopyUnusable("damaged", f"the file cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CopyUnusable("damaged", f"the header is not one of a copy: {error!r}") from error


def _header(file: int, header_crc: int) -> tuple[dict[str, Any], int]:
    """The header, and where the data begins."""
    size = os.fstat(file).st_size
    header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < header_bytes <= size - 8:
        raise CopyUnusable("damaged", f"{size} bytes have no header of {header_bytes}")
    header = bytearray(header_bytes)
    _fill(file, memoryview(header), 8)
    if zlib.crc32(header) != header_crc:
        raise CopyUnusable("damaged", "the header is not the one that was recorded")
    return json.loads(header), 8 + header_bytes


def _read(file: int, expected: Mapping[str, str], header_crc: int) -> Saved:
    tensors, begin = _header(file, header_crc)
    metadata: Mapping[str, str] = tensors.pop("__metadata__")
    for name, value in expected.items():
        if metadata[name] != value:
            raise CopyUnusable("foreign", f"its {name} is {metadata[name][:400]}, and expected is {value[:400]}")
    found: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in json.loads(metadata["names"])}
    for key, checksum, tensor in _tensors(file, begin, tensors, json.loads(metadata["crc32"])):
        if zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data) != checksum:
            raise CopyUnusable("damaged", f"the tensor {key} has another checksum")
        name, piece, _ = key.rsplit("/", 2)
        pieces = found[name]
        if int(piece) == len(pieces):
            pieces.append(())
        pieces[-1] += (tensor,)
    return found


def _tensors(
    file: int, first: int, described: Mapping[str, Mapping[str, Any]], checksums: Sequence[int]
) -> Iterator[tuple[str, int, Tensor]]:
    for (key, facts), checksum in zip(described.items(), checksums, strict=True):
        tensor = torch.empty(facts["shape"], dtype=_DTYPES[str(facts["dtype"])])
        begin, end = facts["data_offsets"]
        if end - begin != tensor.nbytes:
            raise CopyUnusable("damaged", f"the tensor {key} has {end - begin} bytes, not {tensor.nbytes}")
        _fill(file, tensor.reshape(-1).view(torch.uint8).numpy().data, first + begin)
        yield key, checksum, tensor


def _fill(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            raise CopyUnusable("damaged", f"the file ends at byte {offset}, before its data")
        data, offset = data[count:], offset + count
