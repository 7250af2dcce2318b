"""The kernels for ARM give the bits of the others: compiled by a cross-compiler, run by qemu's user mode."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from inference_engine.native import build
from inference_engine.native.build import SOURCES, find_compiler
from inference_engine.native.library import LEVELS

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# What Debian's cross-compiler links with.
LIBRARIES = "/usr/aarch64-linux-gnu"
ATTENTION, PRODUCTS, RESTORING, LEVELS_OF_LIBRARY = (
    Path(__file__).with_name(name)
    for name in ("attention_bits.cpp", "product_bits.cpp", "restoring_bits.cpp", "library_levels.cpp")
)
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{SOURCES}")
ARM = build.LEVELS["aarch64"]
# Processors that qemu knows, and what each of them has.
PROCESSORS = {"max": ("i8mm", "neon", "plain"), "cortex-a76": ("neon", "plain"), "cortex-a72": ("plain",)}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which(CROSS) is None or shutil.which(EMULATOR) is None,
        reason="needs g++-aarch64-linux-gnu and qemu-user of Debian",
    ),
]


def compiled(program: Path, out: Path, level: str, compiler: list[str], *flags: str) -> Path:
    subprocess.run([*compiler, *FLAGS, *flags, f"-DKERNELS={level}", str(program), "-o", str(out)], check=True)
    return out


def printed(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("program", "lines"),
    [(ATTENTION, 800), (PRODUCTS, 112), (RESTORING, 192)],
    ids=["attention", "products", "restoring"],
)
def test_kernels_on_arm_have_the_bits_of_plain_code(
    tmp_path: Path, program: Path, lines: int, subtests: pytest.Subtests
) -> None:
    expected = printed(compiled(program, tmp_path / "plain", "plain", find_compiler()))
    assert len(set(expected.splitlines())) >= lines and "not packed" not in expected
    for level in ("neon", "i8mm"):
        with subtests.test(level):
            on_arm = compiled(program, tmp_path / level, level, [CROSS], "-static", *ARM[level][0])
            assert printed(EMULATOR, "-cpu", "max", on_arm) == expected


def test_the_emulator_refuses_instructions_that_a_processor_does_not_have(tmp_path: Path) -> None:
    """Otherwise the test below would prove nothing."""
    program = compiled(PRODUCTS, tmp_path / "i8mm", "i8mm", [CROSS], "-static", *ARM["i8mm"][0])
    without = subprocess.run([EMULATOR, "-cpu", "cortex-a76", str(program)], check=False, capture_output=True)
    assert without.returncode == -signal.SIGILL


def test_a_library_for_arm_runs_the_levels_of_its_processor_with_the_same_bits(tmp_path: Path) -> None:
    library = tmp_path / "libkakeya.so"
    assert build.build(library, compiler=[CROSS], target="aarch64") == tuple(ARM)
    program = tmp_path / "levels"
    linked = (str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(program))
    subprocess.run([CROSS, "-std=c++17", f"-I{SOURCES}", str(LEVELS_OF_LIBRARY), *linked], check=True)
    bits = set()
    for processor, levels in PROCESSORS.items():
        lines = printed(EMULATOR, "-L", LIBRARIES, "-cpu", processor, program, *LEVELS).splitlines()
        assert tuple(line.split()[0] for line in lines) == levels, processor
        bits |= {line.split()[1] for line in lines}
    assert len(bits) == 1
