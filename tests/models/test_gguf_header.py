"""A hostile or damaged GGUF file is a ModelError that says what is wrong, in bounded time and memory."""

from __future__ import annotations

import contextlib
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_engine.errors import ModelError
from inference_engine.models.gguf_header import MAX_HEADER_BYTES, MAX_STRINGS, read_gguf
from inference_engine.models.open_checkpoint import open_checkpoint
from tests.models.tiny_gguf import tiny_model, write_gguf

U32, STRING, ARRAY = 4, 8, 9
HUGE = 2**64 - 1


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def number(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def strings(key: str, count: int, content: bytes) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", STRING, count) + content)


def tensor(name: str = "a", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def gguf(
    *,
    pairs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 128,
) -> bytes:
    declared = counts or (len(tensors), len(pairs))
    header = magic + struct.pack("<IQQ", version, *declared) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(data)


def test_a_small_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(
        gguf(
            pairs=(
                number("n", 7),
                pair("f", 6, struct.pack("<f", 1e-5)),
                pair("t", 7, b"\1"),
                strings("words", 2, text("one") + text("zwölf")),
                pair("numbers", ARRAY, struct.pack("<IQ3i", 5, 3, -1, 0, 1)),
            ),
            tensors=(tensor("a", (2, 8)), tensor("b", (1, 32), kind=8, offset=64)),
        )
    )
    header = read_gguf(path)
    assert (header.number("n"), header.real("f"), header.values["t"]) == (7, 1e-5, True)
    assert header.strings("words") == ["one", "zwölf"]
    absent: list[object] = [read("none") for read in (header.strings, header.number, header.real, header.text)]
    assert absent == [None] * 4
    # What is there is never taken for absent because it is something else.
    for read, key in ((header.number, "words"), (header.real, "words"), (header.text, "words"), (header.strings, "n")):
        with pytest.raises(ModelError, match=rf"{key} is (an array of 2 strings|7), expected"):
            read(key)
    assert header.values["numbers"].tolist() == [-1, 0, 1]
    found = [(tensor.name, tensor.shape, tensor.encoding.name, tensor.size_bytes) for tensor in header.tensors.values()]
    assert found == [("a", (2, 8), "F32", 64), ("b", (1, 32), "Q8_0", 34)]
    assert header.tensors["b"].start + 64 == path.stat().st_size


@pytest.mark.hostile
@pytest.mark.parametrize(
    "content",
    [
        gguf(pairs=(strings("a", MAX_STRINGS, b""),)),  # and zeros: strings of no length
        gguf(pairs=(pair("a", ARRAY, struct.pack("<IQ", 10, MAX_HEADER_BYTES // 8)),)),
        gguf(counts=(0, 2**16)),
        gguf(counts=(2**16, 0)),
    ],
    ids=["strings", "numbers", "keys", "tensors"],
)
def test_a_large_file_of_zeros_takes_little_memory(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(content)
        file.truncate(2**30)
    before = _peak_bytes()
    with contextlib.suppress(ModelError):  # some of them are whole
        read_gguf(path)
    assert _peak_bytes() - before < 3 * MAX_HEADER_BYTES  # the pages of the file that were looked at count, too


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(tiny_model("llama"), path, "Q4_0")
    return path.read_bytes()


@pytest.mark.hostile
def test_a_file_cut_off_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for size in (*range(0, 400, 13), len(whole) // 2, len(whole) - 200):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"a\.gguf"):
            open_checkpoint(path)


@pytest.mark.hostile
@pytest.mark.parametrize("examples", [250, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_a_file_with_any_bytes_changed_is_read_or_refused(
    examples: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.gguf"
    header = whole.index(b"token_embd") + 2000  # what follows is numbers
    numbers = st.sampled_from([0, 1, 2, 7, 8, 9, 31, 0x7FFFFFFF, 0xFFFFFFFF, 2**40, 2**63, HUGE])
    change: st.SearchStrategy[Callable[[bytearray, int], None]] = st.one_of(
        st.binary(min_size=1, max_size=4).map(lambda value: lambda file, at: _put(file, at, value)),
        numbers.map(lambda value: lambda file, at: _put(file, at, struct.pack("<Q", value))),
        numbers.map(lambda value: lambda file, at: _put(file, at, struct.pack("<I", value & 0xFFFFFFFF))),
        st.integers(1, 40).map(lambda length: lambda file, at: file.__delitem__(slice(at, at + length))),
    )

    @given(st.lists(st.tuples(st.integers(0, header), change), min_size=1, max_size=3))
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    def run(changes: list[tuple[int, Callable[[bytearray, int], None]]]) -> None:
        content = bytearray(whole)
        for at, make in changes:
            make(content, at)
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names():
                checkpoint.tensor(name).as_float32()
            read_gguf(path).strings("tokenizer.ggml.tokens")
        except ModelError as error:
            assert "a.gguf" in str(error)  # noqa: PT017 — both are right

    run()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _put(file: bytearray, at: int, value: bytes) -> None:
    file[at : at + len(value)] = value
