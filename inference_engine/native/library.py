"""The native library, as Python sees it: which levels of instructions run here, threads, and the kernels.

The structures are those of `src/types.h`. A call takes the addresses of numpy arrays and returns when the result is in
its place; other threads of Python run meanwhile.
"""

from __future__ import annotations

import ctypes
import enum
import os
import platform
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from inference_engine.errors import BackendError
from inference_engine.native import build
from inference_engine.native.cores import usable_cores

Floats = NDArray[np.float32]

# The best first.
LEVELS = ("avx512", "avxvnni", "avx2", "i8mm", "neon", "plain")


class Format(enum.IntEnum):
    """How the numbers of a matrix are stored."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3
    INT8_PAIR = 4
    INT4 = 5
    INT4_WIDE = 6
    Q5_0 = 7
    Q5_1 = 8
    Q5_K = 9
    Q6_K = 10
    Q2_K = 11
    Q3_K = 12
    IQ4_NL = 13
    IQ4_XS = 14
    MXFP4 = 15

    @property
    def is_quantised(self) -> bool:
        """Whether it holds codes and scales, not floating-point numbers."""
        return self > Format.BFLOAT16


class Source(enum.IntEnum):
    """How the numbers of a checkpoint are stored; the names of blocks are llama.cpp's. PAIRS: `pairs_of` makes them."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q8_0 = 6
    Q4_K = 7
    Q6_K = 8
    Q5_1 = 9
    Q5_K = 10
    Q2_K = 11
    Q3_K = 12
    IQ4_NL = 13
    IQ4_XS = 14
    MXFP4 = 15
    PAIRS = 16


class PackError(enum.IntEnum):
    """Why a matrix could not be packed."""

    PACKED = 0
    NO_SUCH_FORMAT = 1
    BROKEN_BLOCKS = 2
    TOO_LARGE = 3


class ProductIdentity(enum.IntEnum):
    """How activations enter a product with a quantised matrix."""

    EXACT = 0
    QUANTISED = 1


class KVType(enum.IntEnum):
    """The dtype of K and V."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


class Kind(enum.IntEnum):
    """An operation of a step, by the name of its class."""

    EMBED = 0
    NORM = 1
    PRODUCT = 2
    ROTATE = 3
    ATTEND = 4
    ADD = 5
    GATED = 6
    TAP = 7
    SELECT = 8
    SOFTCAP = 9
    EXPERTS = 10
    GIVEN = 11
    WRITE = 12
    SIGMOID_GATE = 13
    SLICE = 14
    CONVOLVE = 15
    DELTA_RULE = 16
    GATED_NORM = 17
    SELECTIVE_SCAN = 18
    MULTIPLY = 19
    SCALE = 20
    ARRANGE = 21


class Routing(enum.IntFlag):
    """Bits of the flag of a mixture of experts."""

    SUMS_TO_ONE = 1
    SIGMOID_SCORES = 2
    WITHOUT_GATE = 4


class NativeMatrix(ctypes.Structure):
    """A packed matrix. The caller keeps the array of `tiles` alive."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("format", "outputs", "inputs", "reserved")),
        ("tiles", ctypes.c_void_p),
    )
    outputs: int
    inputs: int


class AttentionArguments(ctypes.Structure):
    """Attention of `count` single queries. The caller keeps its arrays alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "regions", "head_sinks", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("count", "query_stride", "region_stride", "out_stride", "row")),
        *(
            (name, ctypes.c_int32)
            for name in ("query_heads", "kv_heads", "head_dim", "value_dim", "kv_type", "reserved")
        ),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class CodedAs(enum.IntEnum):
    """How a vector is coded."""

    FLOAT32 = 0
    BFLOAT16 = 1
    LEVELS = 2


class NativeCoding(ctypes.Structure):
    """How vectors are coded. The caller keeps the arrays of `levels` and `nearest` alive."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "bits", "group", "has_centres", "is_rotated")),
        *((name, ctypes.c_float) for name in ("middle", "spread", "outermost")),
        ("levels", ctypes.c_void_p),
        ("nearest", ctypes.c_void_p),
    )


class CodedEntries(ctypes.Structure):
    """Where entries and their codes lie. The caller keeps its arrays alive."""

    _fields_ = (
        ("coding", NativeCoding),
        *((name, ctypes.c_void_p) for name in ("codes", "means", "regions", "code_slots", "entry_slots", "turns")),
        *((name, ctypes.c_int64) for name in ("slot_bytes", "head_bytes", "region_slots", "row", "count")),
        *((name, ctypes.c_int32) for name in ("layers", "heads", "head_dim", "turned", "kv_type", "reserved")),
    )


class KeyIndex(ctypes.Structure):
    """The index of one layer's keys. The caller keeps its arrays alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("even", "odd", "rows", "middles", "tables", "frequencies", "archive")),
        *((name, ctypes.c_int32) for name in ("rank", "bits", "run", "words", "turned", "fast", "crawling")),
        ("reserved", ctypes.c_int32),
    )


class NativeLayerDecoder(ctypes.Structure):
    """How codes become the entries of one layer. The caller keeps its arrays alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("octets", "lefts", "rights", "tables")),
        *((name, ctypes.c_void_p) for name in ("levels", "scales", "means", "matrices", "whole")),
        *((name, ctypes.c_int32) for name in ("count", "chains", "first_byte", "bytes", "identity", "reserved")),
    )


class Codes(ctypes.Structure):
    """Codes of archived tokens."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "high")),
        *((name, ctypes.c_int64) for name in ("half", "first")),
    )


class Turning(ctypes.Structure):
    """A rotation."""

    _fields_ = (("fine", ctypes.c_void_p), ("coarse", ctypes.c_void_p), ("turned", ctypes.c_int64))


class RestoredRun(ctypes.Structure):
    """Entries of consecutive tokens. The caller keeps its arrays alive."""

    _fields_ = (
        ("codes", Codes),
        ("turning", Turning),
        *((name, ctypes.c_void_p) for name in ("decoder", "keys", "values", "archive", "held_keys", "held_values")),
        *((name, ctypes.c_int64) for name in ("first", "count", "apart", "row", "held_row")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "head_dim", "kv_type", "reserved")),
    )


class TrellisCodes(ctypes.Structure):
    """Numbers, and the codes to choose. The arrays must stay alive as long as this does."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "values", "weights", "first", "size", "codes")),
        *((name, ctypes.c_int64) for name in ("vectors", "count", "chains")),
    )


class NativeArchive(ctypes.Structure):
    """Archived tokens, and where those that were chosen are restored. The caller keeps its arrays alive."""

    _fields_ = (
        ("codes", Codes),
        ("turning", Turning),
        *((name, ctypes.c_void_p) for name in ("decoder", "held", "until", "clocks", "slot_of", "known", "rooms")),
        *((name, ctypes.c_int64) for name in ("most", "tokens", "first", "each")),
        *((name, ctypes.c_int32) for name in ("slots", "is_wide", "is_broken", "reserved")),
    )


class NativeOperation(ctypes.Structure):
    """One operation of a step."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "input", "second", "output", "matrix", "vector", "table")),
        *((name, ctypes.c_int32) for name in ("layer", "offset", "heads", "width", "activation", "flag")),
        *((name, ctypes.c_int32) for name in ("groups", "chosen_groups")),
        ("number", ctypes.c_float),
        ("other", ctypes.c_float),
    )


_OF_LAYER = ("query_heads", "kv_heads", "head_dim", "value_dim", "key_at", "value_at", "shared", "row")


class NativeLayer(ctypes.Structure):
    """The heads of a layer, and the rows of its entries."""

    _fields_ = tuple((name, ctypes.c_int32) for name in _OF_LAYER)


class Rotary(ctypes.Structure):
    """A rotation table. The caller keeps the arrays of frequencies alive."""

    _fields_ = (
        ("frequencies", ctypes.c_void_p),
        ("short_frequencies", ctypes.c_void_p),
        ("turned", ctypes.c_int64),
        ("trained", ctypes.c_int64),
        ("factor", ctypes.c_float),
    )


_OF_STATE = ("channels", "taps", "key_heads", "value_heads", "key_dim", "value_dim", "chunk", "room")


class NativeState(ctypes.Structure):
    """What a layer keeps of a session's history."""

    _fields_ = (*((name, ctypes.c_int32) for name in _OF_STATE), ("offset", ctypes.c_int64))


class StateSpan(ctypes.Structure):
    """The tokens of one session in a step, and where its states are. The caller keeps these alive."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("first", "count", "position")),
        *((name, ctypes.c_void_p) for name in ("before", "after")),
    )


class NativeStep(ctypes.Structure):
    """The arrays of one step. The caller keeps them alive."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "writes", "regions", "pool")),
        *((name, ctypes.c_void_p) for name in ("logit_queries", "logits", "taps", "tapped")),
        *((name, ctypes.c_void_p) for name in ("given", "spans", "largest")),
        *((name, ctypes.c_int64) for name in ("tokens", "logit_count", "vocabulary", "span_count")),
        ("tap_count", ctypes.c_int32),
    )


class Threads:
    """Threads of the library's own, the caller's among them. Used by one caller at a time: the holder of `lock`.

    They end when they are closed or not referred to any more; at the end of the process the system ends them.
    """

    def __init__(self, functions: ctypes.CDLL, count: int) -> None:
        """Raises BackendError without memory. There are fewer than `count` if the system gives no more."""
        address = functions.kakeya_open_threads(count)
        if not address:
            raise BackendError(f"no memory is left for {count} threads; start with fewer (threads)")
        self.count: int = functions.kakeya_count_threads(address)
        self._address: int = address
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._end = weakref.finalize(self, _close_threads, functions, address, self._process)
        self._end.atexit = False

    @property
    def address(self) -> int:
        self._check()
        return self._address

    @property
    def lock(self) -> threading.RLock:
        """What a caller holds from its first call to the last one that belongs to it. Raises BackendError after a fork.

        A thread that holds it may take it again.
        """
        self._check()
        return self._lock

    def close(self) -> None:
        """End them. Does nothing the second time."""
        self._end()

    def _check(self) -> None:
        assert self._end.alive, "these threads are closed"
        if os.getpid() != self._process:
            raise BackendError(
                f"the native threads of process {self._process} are not in this one, {os.getpid()}, which was forked "
                "from it; load the model here, or start processes by spawn"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Kernels:
    """The kernels of one level. All levels give the same bits."""

    def __init__(self, functions: ctypes.CDLL, level: str, address: int) -> None:
        self.level = level
        self._functions = functions
        self.address = address

    def linear(self, threads: Threads, matrix: NativeMatrix, identity: ProductIdentity, x: Floats, out: Floats) -> None:
        """out [count, outputs] = x [count, inputs] · matrix. Raises MemoryError."""
        assert x.shape[1:] == (matrix.inputs,) and out.shape == (x.shape[0], matrix.outputs)
        with threads.lock:
            fails = self._functions.kakeya_linear(
                self.address,
                threads.address,
                ctypes.byref(matrix),
                identity,
                _address_of(x),
                x.shape[0],
                _address_of(out),
            )
        if fails:
            raise MemoryError(f"no memory is left for the products of {x.shape[0]} tokens")

    def row(self, matrix: NativeMatrix, output: int, out: Floats) -> None:
        """The numbers of one output, [inputs]: an embedding."""
        assert out.shape == (matrix.inputs,) and 0 <= output < matrix.outputs
        self._functions.kakeya_row(self.address, ctypes.byref(matrix), output, _address_of(out))

    def attend(self, threads: Threads, attention: AttentionArguments) -> None:
        """Attention of single queries, each over a region of its own. Raises MemoryError."""
        with threads.lock:
            fails = self._functions.kakeya_attend(self.address, threads.address, ctypes.byref(attention))
        if fails:
            raise MemoryError(f"no memory is left for the attention of {attention.count} tokens")

    def decompress(self, threads: Threads, entries: CodedEntries) -> None:
        """Codes become entries in regions. Raises MemoryError."""
        with threads.lock:
            fails = self._functions.kakeya_decompress(self.address, threads.address, ctypes.byref(entries))
        if fails:
            raise MemoryError(f"no memory is left to decompress {entries.count} entries")

    def compress(self, threads: Threads, entries: CodedEntries) -> bool:
        """Entries in regions become codes. False if one is not finite: then these mean nothing. Raises MemoryError."""
        with threads.lock:
            fails = self._functions.kakeya_compress(self.address, threads.address, ctypes.byref(entries))
        if fails < 0:
            raise MemoryError(f"no memory is left to compress {entries.count} entries")
        return not fails

    def restore(self, threads: Threads, run: RestoredRun) -> bool:
        """Codes become entries of consecutive tokens. False if one is not finite. Raises MemoryError."""
        with threads.lock:
            fails = self._functions.kakeya_restore(self.address, threads.address, ctypes.byref(run))
        if fails < 0:
            raise MemoryError(f"no memory is left to restore {run.count} entries")
        return not fails

    def choose(self, threads: Threads, codes: TrellisCodes) -> None:
        """The codes of vectors that cost least (`kernels/trellis.py`). Raises MemoryError."""
        with threads.lock:
            fails = self._functions.kakeya_choose(self.address, threads.address, ctypes.byref(codes))
        if fails:
            raise MemoryError(f"no memory is left to choose the codes of {codes.vectors} tokens")

    def weigh(
        self,
        threads: Threads,
        rows: Sequence[Floats],
        masks: Sequence[NDArray[np.uint8] | None],
        scales: Floats,
        ids: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Of each row of logits [V]: which are heavy, e ** -8 of the largest at least, and what all others weigh.

        masks: of each row, [⌈V / 8⌉], a bit for each id, the lowest first, set if it may be one; None: all may.
        scales: float32 [n], 1 / temperature. ids: [n, room], for the heavy ones, ascending. Returns how many there are,
        more than `room` if they do not all fit, and the weights, roughly. Raises MemoryError.
        """
        assert all(len(row) == len(rows[0]) and row.dtype == np.float32 and row.flags.c_contiguous for row in rows)
        assert scales.dtype == np.float32 and ids.flags.c_contiguous and len(scales) == len(ids) == len(rows)
        assert all(mask is None or (mask.flags.c_contiguous and 8 * len(mask) >= len(rows[0])) for mask in masks)
        addresses = np.array([_address(row) for row in rows], np.int64)
        allowed = np.array([0 if mask is None else _address(mask) for mask in masks], np.int64)
        found, rest = np.empty(len(rows), np.int64), np.empty(len(rows), np.float64)
        with threads.lock:
            fails = self._functions.kakeya_weigh(
                self.address,
                threads.address,
                addresses.ctypes.data,
                allowed.ctypes.data,
                scales.ctypes.data,
                len(rows),
                len(rows[0]),
                ids.shape[1],
                ids.ctypes.data,
                found.ctypes.data,
                rest.ctypes.data,
            )
        if fails:
            raise MemoryError(f"no memory is left to weigh the logits of {len(rows)} tokens")
        return found, rest


def _address(numbers: NDArray[Any]) -> int:
    address: int = numbers.__array_interface__["data"][0]
    return address


class Library:
    """An open native library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file is not there or not for this machine, BackendError if it is of other sources."""
        self.path = path
        functions = ctypes.CDLL(str(path))
        try:
            _declare(functions)
            is_stale = functions.kakeya_sources() != build.fingerprint().encode()
        except AttributeError:
            is_stale = True
        if is_stale:
            raise BackendError(
                f"{path} was compiled from other sources than those beside it; "
                "run `python -m inference_engine.native.build`"
            )
        structures = (
            *(NativeMatrix, AttentionArguments, NativeOperation, NativeLayer, Rotary, NativeStep, CodedEntries),
            *(KeyIndex, NativeLayerDecoder, NativeArchive, RestoredRun, TrellisCodes, NativeState, StateSpan),
        )
        sizes = (ctypes.c_int64 * len(structures))()
        functions.kakeya_sizes(sizes)
        assert list(sizes) == [ctypes.sizeof(one) for one in structures], "these structures are not types.h's"
        self._functions = functions

    def packed_bytes(self, kind: Format, outputs: int, inputs: int) -> int:
        """Bytes of a packed matrix."""
        return int(self._functions.kakeya_packed_bytes(kind, outputs, inputs))

    def pack(
        self,
        kind: Format,
        source: Source,
        data: NDArray[np.uint8],
        shape: tuple[int, int],
        order: NDArray[np.int64] | None,
        tiles: NDArray[np.uint8],
    ) -> PackError:
        """Pack a matrix [outputs, inputs] into `tiles`. order: the stored row of each output; None: as they lie."""
        assert len(tiles) == self.packed_bytes(kind, *shape)
        return PackError(
            self._functions.kakeya_pack(
                kind, source, data.ctypes.data, *shape, None if order is None else order.ctypes.data, tiles.ctypes.data
            )
        )

    def open_program(
        self,
        kernels: Kernels,
        threads: Threads,
        identity: ProductIdentity,
        kv_type: KVType,
        *arrays: ctypes.Array[Any],
    ) -> int:
        """The address of a program over these arrays: operations, matrices, vectors, layers, rotations, states, widths.

        Raises MemoryError.
        """
        lengths = [argument for array in arrays for argument in (array, len(array))]
        address = self._functions.kakeya_open_program(kernels.address, threads.address, identity, kv_type, *lengths)
        if not address:
            raise MemoryError("no memory is left for the list of operations")
        return int(address)

    def close_program(self, program: int) -> None:
        """Free its registers."""
        self._functions.kakeya_close_program(program)

    def run(self, program: int, step: NativeStep, first: int, end: int) -> bool:
        """The operations [first, end) of a step. False if there is no memory for its registers."""
        return not self._functions.kakeya_run(program, ctypes.byref(step), first, end)

    def settle(self, program: int, states: int, held: int, kept: int, staged: int) -> bool:
        """The states of one session, at this address, between two steps. False if there is no memory for it."""
        return not self._functions.kakeya_settle(program, states, held, kept, staged)

    def register(self, program: int, index: int, count: int) -> Floats:
        """The first `count` numbers of a register, a view that is valid until the next step."""
        address = self._functions.kakeya_register(program, index)
        view: Floats = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (count,))
        return view

    def levels(self) -> tuple[str, ...]:
        """Those that this build has and this processor runs, the best first."""
        return tuple(level for level in LEVELS if self._functions.kakeya_kernels(level.encode()))

    def kernels(self, level: str = "auto") -> Kernels:
        """Those of `level`, or of the best that runs here."""
        chosen = self.levels()[0] if level == "auto" else level
        address = self._functions.kakeya_kernels(chosen.encode())
        if not address:
            raise BackendError(f"kernels for {level!r} do not run here; choose one of {', '.join(self.levels())}")
        return Kernels(self._functions, chosen, address)

    def open_threads(self, count: int = 0) -> Threads:
        """`count` threads; 0 means one for each core this process may use."""
        return Threads(self._functions, count or usable_cores())


def load() -> Library | None:
    """The library, or None; `why_missing` has the reason. Raises BackendError if it is of other sources."""
    found = _open(build.LIBRARY)
    return found if isinstance(found, Library) else None


def why_missing() -> str | None:
    """Why there is no library and what to do about it. None if there is one."""
    found = _open(build.LIBRARY)
    return found if isinstance(found, str) else None


@cache
def _open(path: Path) -> Library | str:
    """The library at `path`, or the reason why there is none."""
    if not path.exists():
        if not build.is_supported():
            return f"there is no native library for {platform.system()} on {build.machine()}"
        return f"{path} is not there; {build.REMEDY}"
    try:
        library = Library(path)
    except OSError as error:
        return f"{path} cannot be loaded: {error}; delete it and run `python -m inference_engine.native.build`"
    if not library.levels():
        return f"{path} was compiled for another processor; run `python -m inference_engine.native.build`"
    return library


def _declare(functions: ctypes.CDLL) -> None:
    """The types of every function of `src/api.cpp`."""
    pointer, matrix, attention = ctypes.c_void_p, ctypes.POINTER(NativeMatrix), ctypes.POINTER(AttentionArguments)
    long, integer, text = ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p
    declared: dict[str, tuple[type | None, tuple[type, ...]]] = {
        "sources": (text, ()),
        "sizes": (None, (ctypes.POINTER(long),)),
        "kernels": (pointer, (text,)),
        "open_threads": (pointer, (integer,)),
        "count_threads": (integer, (pointer,)),
        "close_threads": (None, (pointer,)),
        "linear": (integer, (pointer, pointer, matrix, integer, pointer, long, pointer)),
        "row": (None, (pointer, matrix, long, pointer)),
        "attend": (integer, (pointer, pointer, attention)),
        "decompress": (integer, (pointer, pointer, ctypes.POINTER(CodedEntries))),
        "compress": (integer, (pointer, pointer, ctypes.POINTER(CodedEntries))),
        "restore": (integer, (pointer, pointer, ctypes.POINTER(RestoredRun))),
        "choose": (integer, (pointer, pointer, ctypes.POINTER(TrellisCodes))),
        "weigh": (integer, (pointer, pointer, pointer, pointer, pointer, long, long, long, pointer, pointer, pointer)),
        "packed_bytes": (long, (integer, long, long)),
        "pack": (integer, (integer, integer, pointer, long, long, pointer, pointer)),
        "open_program": (pointer, (pointer, pointer, integer, integer, *(pointer, long) * 7)),
        "close_program": (None, (pointer,)),
        "run": (integer, (pointer, ctypes.POINTER(NativeStep), integer, integer)),
        "settle": (integer, (pointer, pointer, long, long, long)),
        "register": (pointer, (pointer, integer)),
    }
    for name, (result, arguments) in declared.items():
        function = getattr(functions, f"kakeya_{name}")
        function.restype, function.argtypes = result, arguments


def _close_threads(functions: ctypes.CDLL, address: int, process: int) -> None:
    # In a process forked from theirs they are not there to be waited for.
    if os.getpid() == process:
        functions.kakeya_close_threads(address)


def _address_of(array: Floats) -> int:
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return array.ctypes.data
