"""Compiles the native library: levels of instructions from the same source, into one shared library without Python.

    python -m inference_engine.native.build    says what it did; does nothing if the library is that of these sources

Each level takes the compiler half a minute, so by default only the best one of this processor is compiled. Wheels,
which run elsewhere, and tests, which compare levels, have all of them (`--every-level`).

`setup.py` and `scripts/set_up.py` load or run this file by its path: it imports nothing of the package.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
# Two dots: a file of one would be taken for a module of Python.
LIBRARY = HERE / ("libkakeya.native.dylib" if sys.platform == "darwin" else "libkakeya.native.so")

# Brings its own compiler for machines that have none (100 MB).
ZIG = "ziglang==0.17.1"
REMEDY = f"install g++ or clang, or `pip install {ZIG}`, then run `python -m inference_engine.native.build`"

# Products are rounded once where the source says so, and nowhere else: every level gives the same bits.
FLAGS = ("-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility-inlines-hidden", "-ffp-contract=off", "-fno-math-errno")
# Of two compilers' warnings: neither minds a name of the other's with the first of these.
_NOT_MINDED = ("-Wno-unused-function", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
WARNINGS = ("-Wno-unknown-warning-option", "-Wall", "-Wextra", *_NOT_MINDED)
THREADS = () if sys.platform == "darwin" else ("-pthread",)
STRIPPED = () if sys.platform == "darwin" else ("-s",)

# Plain C++ takes the compiler longest and runs where nothing fast does: a quarter of the time for the same bits.
_PLAIN = ("-O1",)
# For each level the flags it needs, the best one last; where compilers name them differently, the first understood.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
EVERY_LEVEL = "every level"
LEVELS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "x86_64": {
        "plain": (_PLAIN,),
        "avx2": (_AVX2,),
        "avxvnni": ((*_AVX2, "-mavxvnni"),),
        "avx512": ((*_AVX2, *_AVX512),),
    },
    "aarch64": {
        "plain": (_PLAIN,),
        "neon": (("-march=armv8.2-a+dotprod",), ("-mcpu=baseline+dotprod",)),
        "i8mm": (("-march=armv8.2-a+dotprod+i8mm",), ("-mcpu=baseline+dotprod+i8mm",)),
    },
}


class NoCompiler(Exception):
    """Nothing here compiles C++ for this machine, or not the compiler that was asked for."""


class DoesNotCompile(Exception):
    """The compiler works and refuses the sources."""


def machine() -> str:
    """The processor's architecture, by one name on every system."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def is_supported() -> bool:
    """Whether the library is written for this system and this processor."""
    return sys.platform != "win32" and machine() in LEVELS


def fingerprint(target: str = "") -> str:
    """Of what a library is compiled from: a library says which it was."""
    found = hashlib.sha256((target or machine()).encode())
    for path in (Path(__file__), *sources()):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def sources() -> list[Path]:
    """Every file of C++."""
    return sorted(path for path in SOURCES.glob("[!.]*") if path.suffix in {".cpp", ".h"})


def is_current(library: Path, *, every_level: bool = False) -> bool:
    """Whether `library` was compiled from the sources that are here now, with the levels that are asked for.

    every_level: all of them; else at least the best one of this processor.
    """
    content = library.read_bytes() if library.is_file() else b""
    if fingerprint().encode() not in content:
        return False
    if compiled_for(EVERY_LEVEL) in content:
        return True
    return not every_level and compiled_for(best_level(library)) in content


def compiled_for(level: str) -> bytes:
    """As a library has it (`src/api.cpp`)."""
    return f"compiled for {level}\0".encode()


def best_level(library: Path) -> str:
    """Of this processor, which a library is asked for, whatever kernels it has. "" if it cannot be opened."""
    try:
        runs = ctypes.CDLL(str(library)).kakeya_runs
    except (OSError, AttributeError):
        return ""
    return [level for level in LEVELS[machine()] if runs(level.encode())][-1]


def compiles(command: Sequence[str]) -> bool:
    """Whether `command` makes a shared library of a few lines of C++."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder, "trial.cpp")
        trial.write_text('#include <thread>\nextern "C" unsigned f() { return std::thread::hardware_concurrency(); }\n')
        # Stripped, as the library is: Zig makes its C++ runtime anew, for minutes, for each way of linking.
        linked = (*THREADS, *STRIPPED, "-shared", str(trial), "-o", f"{folder}/trial.so")
        return _succeeds((*command, "-std=c++17", "-fPIC", *linked))


def find_compiler(
    asked: str = "", works: Callable[[Sequence[str]], bool] = compiles, has_zig: bool | None = None
) -> list[str]:
    """The command of a compiler that works: the one asked for, else the system's, else Zig's if it is installed."""
    if not is_supported():
        raise NoCompiler(f"there is no native library for {platform.system()} on {machine()}")
    if asked:
        if works(command := shlex.split(asked)):
            return command
        raise NoCompiler(f"the C++ compiler {asked!r} does not work; name another one in CXX")
    for name in ("c++", "g++", "clang++"):
        if (path := shutil.which(name)) and works([path]):
            return [path]
    if importlib.util.find_spec("ziglang") if has_zig is None else has_zig:
        # Without a processor's name it compiles for the one it runs on.
        command = [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
        if works(command):
            return command
    raise NoCompiler(f"no C++ compiler works here; {REMEDY}")


def build(
    library: Path = LIBRARY,
    *,
    compiler: Sequence[str],
    target: str = "",
    flags: Sequence[str] = (),
    every_level: bool = True,
    say: Callable[[str], None] = print,
) -> tuple[str, ...]:
    """Compile `library` for `target`, this machine's architecture by default; returns its levels.

    every_level: else only the best one that this processor runs. A level whose flags the compiler does not know is left
    out. Raises DoesNotCompile with what the compiler says.
    """
    command = (*compiler, *FLAGS, *WARNINGS, *THREADS, *flags)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as jobs:
        levels = dict(_known(command, LEVELS[target or machine()], Path(folder), say))
        best = EVERY_LEVEL if every_level else _ask_for_best_level(command, Path(folder))
        if best in levels:
            levels = {best: levels[best]}
        given: tuple[str, ...] = (
            f'-DFINGERPRINT="{fingerprint(target)}"',
            f'-DCOMPILED_FOR="{best}"',
            f"-DLEVELS={' '.join(f'EACH({name})' for name in levels)}",
        )
        # What several objects hold is linked from the first of them: that must run on every processor.
        units = [(path, given) for path in sources() if path.suffix == ".cpp" and path.stem != "kernels"]
        units += [(SOURCES / "kernels.cpp", (f"-DKERNELS={name}", *own)) for name, own in levels.items()]
        objects = [f"{folder}/{index}.o" for index in range(len(units))]
        made = {
            jobs.submit(_run, (*command, *own, "-c", str(path), "-o", out)): own[0]
            for (path, own), out in zip(units, objects, strict=True)
        }
        for each in as_completed(made):
            if said := each.result():
                say(said)
            if (name := made[each].removeprefix("-DKERNELS=")) in levels:
                say(f"native library: {name} is compiled")
        library.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, to be moved there: a process that has the one before open keeps it.
        out = library.with_name(f".{library.name}.{os.getpid()}")
        try:
            _run((*compiler, *THREADS, *(flags or STRIPPED), "-shared", *objects, "-o", str(out)))
            out.replace(library)
        finally:
            out.unlink(missing_ok=True)
    return tuple(levels)


def _ask_for_best_level(command: Sequence[str], folder: Path) -> str:
    """Of this processor, by a library of the same sources without kernels: linked as ever, for Zig (`compiles`)."""
    asked = folder / "asked.so"
    nothing = ('-DFINGERPRINT=""', '-DCOMPILED_FOR=""', "-DLEVELS=", "-w")
    _run((*command, *nothing, *STRIPPED, "-shared", str(SOURCES / "api.cpp"), "-o", str(asked)))
    return best_level(asked)


def _known(
    command: Sequence[str], wanted: dict[str, tuple[tuple[str, ...], ...]], folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The levels whose flags the compiler understands, with these flags."""
    empty = folder / "empty.cpp"
    empty.touch()
    for name, alternatives in wanted.items():
        for flags in alternatives:
            if _succeeds((*command, *flags, "-c", str(empty), "-o", str(folder / "empty.o"))):
                yield name, flags
                break
        else:
            say(f"native library: without {name}, which this compiler does not know")


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(command: Sequence[str]) -> str:
    """What the compiler says. Raises DoesNotCompile with it if it fails."""
    done = subprocess.run(command, capture_output=True, check=False, text=True, errors="replace")
    if done.returncode:
        raise DoesNotCompile(f"{shlex.join(command)}\n{done.stderr}")
    return done.stderr.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status. Without a compiler that is 0: torch computes then."""
    parser = argparse.ArgumentParser(description="Compile the native library, if its sources have changed.")
    parser.add_argument("--compiler", default="", metavar="COMMAND", help="instead of the first one that works")
    parser.add_argument("--fetch", action="store_true", help=f"install {ZIG} if no compiler works (100 MB)")
    parser.add_argument("--library", type=Path, default=LIBRARY, metavar="FILE", help="what to write")
    parser.add_argument("--target", default="", choices=LEVELS, help="another architecture, for a cross-compiler")
    parser.add_argument("--every-level", action="store_true", help="not only the best one that this processor runs")
    parser.add_argument("--flag", action="append", default=[], help="one more for the compiler; always compiles")
    parser.add_argument("--quiet", action="store_true", help="say nothing if there is nothing to do")
    given = parser.parse_args(arguments)
    if not given.flag and not given.target and is_current(given.library, every_level=given.every_level):
        if not given.quiet:
            print(f"native library: {given.library} is that of these sources")
        return 0
    try:
        try:
            compiler = find_compiler(given.compiler)
        except NoCompiler:
            if not given.fetch or given.compiler or not is_supported():
                raise
            print(f"native library: no C++ compiler works here; installing {ZIG} (once, 100 MB)")
            _succeeds((sys.executable, "-m", "pip", "--no-input", "install", "--quiet", ZIG))
            compiler = find_compiler()
        print(f"native library: compiling with {shlex.join(compiler)}")
        levels = build(
            given.library,
            compiler=compiler,
            target=given.target,
            flags=given.flag,
            every_level=given.every_level or bool(given.target),
        )
    except NoCompiler as missing:
        print(f"native library: none, torch computes instead: {missing}")
        return 0
    except DoesNotCompile as failed:
        print(f"native library: {failed}", file=sys.stderr)
        return 1
    print(f"native library: {given.library.name} with {', '.join(levels)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
