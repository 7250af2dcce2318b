"""The header of a GGUF file, read strictly: every count, length and offset is compared with a limit and with the file.

    "GGUF"  version  tensors  key-values     4, 4, 8, 8 bytes, little-endian
    key  type  value                         a string is its length in 8 bytes, then UTF-8; an array its type and length
    name  dimensions  type  offset           of every tensor; the dimension that lies together in memory comes first
    (up to a multiple of the alignment)      the tensors

A model may be split into files NAME-00001-of-0000N.gguf, as large ones are published: the first has the key-values,
each has a part of the tensors. Naming any of them names the model.

gguf.GGUFReader makes an object of each token (two seconds for 49,152), loops as often as a file says, and slices past
its end. Here strings of arrays are skipped, and read on request.
"""

from __future__ import annotations

import mmap
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import ModelError
from inference_engine.models.encodings import ENCODINGS, Encoding, type_name
from inference_engine.models.folder import GGUF_MAGIC, gguf_parts

# Large vocabularies with their merges take 20 MB.
MAX_HEADER_BYTES = 2**27
MAX_KEYS = 2**16
MAX_TENSORS = 2**16
# All strings of all arrays; the largest vocabularies have 262,144 tokens and 500,000 merges.
MAX_STRINGS = 2**21
MAX_STRING_BYTES = 2**22
MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20

_VERSIONS = (2, 3)
_MERGE = "or make one file of them: llama-gguf-split --merge"
_SCALARS: Mapping[int, str] = MappingProxyType(
    {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "|b1",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }
)
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """shape: the dimension that lies together in memory comes last. start: in bytes from the start of its file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StringArray:
    """place: of the first, in the file."""

    place: int
    count: int

    def __repr__(self) -> str:
        return f"an array of {self.count} strings"


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """values: numbers, truth values and strings, and arrays of numbers as numpy has them; of a StringArray `strings`
    reads the strings. tensors: by name, in the order of the file. parts: its files; `path` is the first of them.
    """

    path: Path
    parts: tuple[Path, ...]
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def number(self, key: str) -> int | None:
        """A whole number; None if there is none of this name. Raises ModelError for anything else."""
        value = self.values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise ModelError(f"{self.path}: {key} is {_shown(value)}, expected a whole number; get the file again")

    def real(self, key: str) -> float | None:
        """A finite number; None if there is none of this name. Raises ModelError for anything else."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ModelError(f"{self.path}: {key} is {_shown(value)}, expected a finite number; get the file again")
        return float(value)

    def text(self, key: str) -> str | None:
        """A string; None if there is none of this name. Raises ModelError for anything else."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise ModelError(f"{self.path}: {key} is {_shown(value)}, expected a string; get the file again")

    def strings(self, key: str) -> list[str] | None:
        """An array of strings; None if there is none of this name. Raises ModelError for anything else, and if one is
        not UTF-8."""
        array = self.values.get(key)
        if array is None:
            return None
        if not isinstance(array, StringArray):
            raise ModelError(f"{self.path}: {key} is {_shown(array)}, expected an array of strings; get the file again")
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            reader = _Reader(content, self.path)
            reader.place = array.place
            return [reader.string(f"{key}, item {item}", MAX_STRING_BYTES) for item in range(array.count)]


def read_gguf(path: Path) -> GgufHeader:
    """The header of a GGUF file, or of a model split into several, of which `path` is any; every tensor lies within
    its file. Takes a second at most for each, whatever they hold.

    Raises ModelError that names the file, the value and the way out.
    """
    parts = gguf_parts(path)
    first = _read_file(parts[0], of=len(parts))
    count = first.number("split.count") or 1
    if count < 2:
        return first if len(parts) == 1 else _read_file(path, of=1)  # named like parts of a model, which they are not
    if count != len(parts):
        raise ModelError(
            f"{path}: one of {count} parts of a model, which have names that end in -00001-of-{count:05}.gguf; rename "
            f"them, {_MERGE}"
        )
    tensors = dict(first.tensors)
    for number, part in enumerate(parts):
        header = first if number == 0 else _read_file(part, of=count)
        found = header.number("split.no"), header.number("split.count")
        if found != (number, count):
            raise ModelError(
                f"{part}: split.no and split.count are {found[0]} and {found[1]}, the name says {number} and {count}; "
                "get the files again"
            )
        if number and (twice := next((name for name in header.tensors if name in tensors), None)) is not None:
            raise ModelError(f"{part}: the tensor {twice!r} is in another part, too; get the files again")
        tensors.update(header.tensors)
        if len(tensors) > MAX_TENSORS:
            raise ModelError(f"{part}: more than the {MAX_TENSORS} tensors that are read")
    wanted = first.number("split.tensors.count")
    if wanted is not None and wanted != len(tensors):
        raise ModelError(
            f"{parts[0]}: split.tensors.count is {wanted}, the {count} parts hold {len(tensors)} tensors; get the "
            "files again"
        )
    return replace(first, parts=parts, tensors=MappingProxyType(tensors))


def _read_file(path: Path, *, of: int) -> GgufHeader:
    """of: how many files the model has, for the message about one that is missing."""
    try:
        facts = path.stat()
    except FileNotFoundError as error:
        if of == 1:
            raise
        raise ModelError(f"{path}: missing, one of the {of} files of this model; get it") from error
    if not stat.S_ISREG(facts.st_mode):
        raise ModelError(f"{path}: not a plain file; name a GGUF file")
    if facts.st_size < 24:
        raise ModelError(f"{path}: {facts.st_size} bytes, not a GGUF file: its header alone has 24; get the file again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _read(_Reader(content, path), path)


def _read(reader: _Reader, path: Path) -> GgufHeader:
    if (magic := reader.take(4, "the format")) != GGUF_MAGIC:
        raise ModelError(f"{path}: not a GGUF file: it starts with {magic!r}; name one that starts with {GGUF_MAGIC!r}")
    version = reader.number("<I", "the version")
    if version not in _VERSIONS:
        big = version.to_bytes(4, "little") in [known.to_bytes(4, "big") for known in _VERSIONS]
        raise ModelError(
            f"{path}: its numbers are big-endian, which cannot be read; use the little-endian file of the model"
            if big
            else f"{path}: version {version} of the GGUF format cannot be read; convert it to version {_VERSIONS[-1]} "
            "with llama.cpp"
        )
    tensors = reader.count("tensors", MAX_TENSORS)
    keys = reader.count("key-value pairs", MAX_KEYS)
    values = _values(reader, keys)
    alignment = values.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 8 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
        or isinstance(alignment, bool)
    ):
        raise ModelError(
            f"{path}: general.alignment is {_shown(alignment)}, expected a power of two from 8 to {MAX_ALIGNMENT}; get "
            "the file again"
        )
    found = _tensors(reader, tensors, alignment)
    return GgufHeader(
        path=path,
        parts=(path,),
        values=MappingProxyType(values),
        tensors=MappingProxyType(found),
    )


def _values(reader: _Reader, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(count):
        key = reader.string(f"key {index}", MAX_NAME_BYTES)
        if key in values:
            raise ModelError(f"{reader.path}: the key {key!r} comes twice; get the file again")
        kind = reader.number("<I", key)
        if kind == _STRING:
            values[key] = reader.string(key, MAX_STRING_BYTES)
        elif kind in _SCALARS:
            values[key] = _plain(reader.numbers(_SCALARS[kind], 1, key)[0])
        elif kind == _ARRAY:
            items, length = reader.number("<I", key), reader.number("<Q", key)
            if items == _STRING:
                values[key] = StringArray(reader.place, length)
                reader.pass_strings(length, key)
            elif items in _SCALARS:
                values[key] = reader.numbers(_SCALARS[items], length, key)
            else:
                raise ModelError(f"{reader.path}: {key} is an array of type {items}, which cannot be read")
        else:
            raise ModelError(f"{reader.path}: {key} has type {kind}, which cannot be read; get the file again")
    return values


def _tensors(reader: _Reader, count: int, alignment: int) -> dict[str, GgufTensor]:
    path = reader.path
    read = []
    for index in range(count):
        name = reader.string(f"the name of tensor {index}", MAX_NAME_BYTES)
        dimensions = reader.number("<I", name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelError(f"{path}: {name} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(reader.number("<Q", name) for _ in range(dimensions))[::-1]
        kind, offset = reader.number("<I", name), reader.number("<Q", name)
        if (encoding := ENCODINGS.get(kind)) is None:
            known = ", ".join(known.name for known in ENCODINGS.values())
            raise ModelError(
                f"{path}: {name} is stored as {type_name(kind)}, which cannot be read; use a file of the model that "
                f"has it as another type ({known})"
            )
        if min(shape) < 1 or shape[-1] % encoding.numbers:
            raise ModelError(
                f"{path}: {name} has the shape {shape}, which cannot be stored in blocks of {encoding.numbers} "
                f"({encoding.name}); get the file again"
            )
        if offset % alignment:
            raise ModelError(f"{path}: {name} starts at {offset}, not at a multiple of {alignment}; get the file again")
        read.append((name, shape, encoding, offset))
    first = -(-reader.place // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for name, shape, encoding, offset in read:
        numbers = 1
        for size in shape:
            numbers *= size  # a whole number of any size, which numpy's would not be
        start, size_bytes = first + offset, encoding.bytes_of(numbers)
        if start + size_bytes > len(reader):
            raise ModelError(
                f"{path}: truncated: {name} ends at byte {start + size_bytes}, the file has {len(reader)}; get it again"
            )
        if name in found:
            raise ModelError(f"{path}: the tensor {name!r} comes twice; get the file again")
        found[name] = GgufTensor(
            path=path, name=name, shape=shape, encoding=encoding, start=start, size_bytes=size_bytes
        )
    return found


class _Reader:
    """Reads a file from its start, and never past its end or past what a header may have."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.path = path
        self.place = 0
        self._content = content
        self._end = min(len(content), MAX_HEADER_BYTES)
        self._strings_left = MAX_STRINGS

    def __len__(self) -> int:
        return len(self._content)

    def take(self, size: int, what: str) -> bytes:
        self._check(size, what)
        taken = self._content[self.place : self.place + size]
        self.place += size
        return taken

    def number(self, form: str, what: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form), what))
        return int(value)

    def count(self, what: str, limit: int) -> int:
        count = self.number("<Q", f"the number of {what}")
        if count > limit:
            raise ModelError(
                f"{self.path}: {count} {what}, more than the {limit} that are read; the file is damaged, get it again"
            )
        return count

    def numbers(self, dtype: str, count: int, what: str) -> NDArray[Any]:
        kind = np.dtype(dtype)
        taken = self.take(count * kind.itemsize, what)
        return np.frombuffer(taken, np.uint8).astype(np.bool_) if dtype == "|b1" else np.frombuffer(taken, kind)

    def string(self, what: str, limit: int) -> str:
        length = self.number("<Q", what)
        if length > limit:
            raise ModelError(
                f"{self.path}: {what}: a string of {length} bytes, more than the {limit} that are read; the file is "
                "damaged, get it again"
            )
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what}: not UTF-8: {error.reason}; get the file again") from error

    def pass_strings(self, count: int, what: str) -> None:
        if count > self._strings_left:
            raise ModelError(
                f"{self.path}: {what}: {count} strings, more than the {MAX_STRINGS} that are read; the file is "
                "damaged, get it again"
            )
        self._strings_left -= count
        place, end, length_at = self.place, self._end, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if place + 8 > end:
                place = end + 1
                break
            place += 8 + length_at(self._content, place)[0]
        self.place = min(place, end + 1)
        self._check(0, what)

    def _check(self, size: int, what: str) -> None:
        if self.place + size > self._end:
            known = (
                f"its header has more than {MAX_HEADER_BYTES} bytes"
                if self._end < len(self._content)
                else f"truncated: the file has {len(self._content)} bytes"
            )
            raise ModelError(f"{self.path}: {known}, at {what}; get the file again")


def _plain(value: Any) -> bool | int | float:
    """A Python number. One of four bytes becomes the shortest decimal that it stands for: 1e-05, not 9.99999975e-06."""
    if isinstance(value, np.float32):
        return float(str(value))
    plain: bool | int | float = value.item()
    return plain


def _shown(value: object) -> str:
    """For a message: short, whatever it is."""
    text = f"an array of {len(value)}" if isinstance(value, np.ndarray) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
