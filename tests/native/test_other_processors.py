"""The NEON kernels give the bits of the others: compiled by a cross-compiler, run by qemu's user mode."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from inference_engine.native.build import SOURCES, find_compiler

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ATTENTION, PRODUCTS = (Path(__file__).with_name(name) for name in ("attention_bits.cpp", "product_bits.cpp"))
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{SOURCES}")


def printed(
    program: Path, out: Path, level: str, compiler: list[str], *flags: str, run_by: tuple[str, ...] = ()
) -> str:
    subprocess.run([*compiler, *FLAGS, *flags, f"-DKERNELS={level}", str(program), "-o", str(out)], check=True)
    return subprocess.run([*run_by, str(out)], check=True, capture_output=True, text=True).stdout


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which(CROSS) is None or shutil.which(EMULATOR) is None,
    reason="needs g++-aarch64-linux-gnu and qemu-user of Debian",
)
@pytest.mark.parametrize(("program", "lines"), [(ATTENTION, 800), (PRODUCTS, 49)], ids=["attention", "products"])
def test_kernels_on_neon_have_the_bits_of_plain_code(tmp_path: Path, program: Path, lines: int) -> None:
    expected = printed(program, tmp_path / "plain", "plain", find_compiler())
    assert len(set(expected.splitlines())) >= lines and "not packed" not in expected
    neon = printed(
        program,
        tmp_path / "neon",
        "neon",
        [CROSS],
        "-static",
        "-march=armv8.2-a+dotprod",
        run_by=(EMULATOR, "-cpu", "max"),
    )
    assert neon == expected
