"""Run the native library's tests with the compiler's checks of addresses and of undefined behaviour.

python scripts/sanitize.py [PYTEST ARGUMENTS]    exit 0 if nothing is found, or nothing here can check
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inference_engine.config import child_environment
from inference_engine.native import build

CHECKED = ROOT / "build/sanitized" / build.LIBRARY.name
FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1")
# The library that is opened is the checked one; everything else is as always.
TESTS = (
    "import pathlib, sys, pytest; from inference_engine.native import build;"
    "build.LIBRARY = pathlib.Path(sys.argv[1]); sys.exit(pytest.main(sys.argv[2:]))"
)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status."""
    try:
        compiler = build.find_compiler()
    except build.NoCompiler as missing:
        print(f"sanitize: {missing}")
        return 0
    runtime = checker(compiler)
    if not runtime:
        print(f"sanitize: {' '.join(compiler)} on {platform.system()} brings no checks that Python can run under")
        return 0
    levels = build.build(CHECKED, compiler=compiler, flags=FLAGS)
    print(f"sanitize: {', '.join(levels)}, compiled with {' '.join(FLAGS)}")
    environment = child_environment(
        LD_PRELOAD=" ".join(map(str, runtime)),
        # Python and torch keep memory until the process ends.
        ASAN_OPTIONS="detect_leaks=0:abort_on_error=1",
        UBSAN_OPTIONS="print_stacktrace=1",
        OMP_NUM_THREADS="1",
    )
    asked = ("-p", "no:cacheprovider", "tests/native", *arguments)
    return subprocess.run(
        (sys.executable, "-c", TESTS, str(CHECKED), *asked), cwd=ROOT, env=environment, check=False
    ).returncode


def checker(compiler: list[str]) -> tuple[Path, ...]:
    """The libraries that have to be loaded before Python: what checks, and what throws exceptions, because the checks
    look for it when they are loaded, before torch brings it. Nothing if this compiler has no checks by itself.
    """
    if sys.platform != "linux":
        return ()
    checks = _found(compiler, "libasan.so", f"libclang_rt.asan-{build.machine()}.so")
    return checks and checks + _found(compiler, "libstdc++.so.6")


def _found(compiler: list[str], *names: str) -> tuple[Path, ...]:
    """The first of these libraries that the compiler finds."""
    for name in names:
        asked = subprocess.run((*compiler, f"-print-file-name={name}"), capture_output=True, check=False, text=True)
        # A name without a folder is one that was not found.
        if (found := Path(asked.stdout.strip())).is_absolute() and found.exists():
            return (found.resolve(),)
    return ()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
