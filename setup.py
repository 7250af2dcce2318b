"""What pyproject.toml cannot say: the native library is compiled into the wheel, which is for one kind of machine then.

Without a compiler the installation has no library and says why; torch computes.
"""

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("inference_engine", "native")

# By its path: the package itself may need what is not installed yet.
_spec = importlib.util.spec_from_file_location("build_native", Path(__file__).resolve().parent / NATIVE / "build.py")
assert _spec and _spec.loader
native: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


@cache
def compiler() -> list[str] | None:
    """CXX, or the first compiler that works."""
    try:
        return list(native.find_compiler(os.environ.get("CXX", "")))
    except native.NoCompiler as missing:
        print(f"native library: none, torch computes instead: {missing}")
        return None


def is_compiled(*, every_level: bool = True) -> bool:
    """Whether `make` has compiled it in this folder. A compiler that is asked for compiles it again."""
    return "CXX" not in os.environ and bool(native.is_current(native.LIBRARY, every_level=every_level))


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether what is built is for one kind of machine."""
        return is_compiled() or compiler() is not None


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        library = native.LIBRARY if self.editable_mode else Path(self.build_lib, NATIVE, native.LIBRARY.name)
        if is_compiled(every_level=not self.editable_mode):
            if library != native.LIBRARY:
                self.copy_file(str(native.LIBRARY), str(library))
            return
        command = compiler()
        if command is None:
            return
        try:
            native.build(library, compiler=command, every_level=not self.editable_mode)
        except native.DoesNotCompile as failed:
            self.warn(f"no native library, torch computes instead: {failed}")


class WheelForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


setup(
    distclass=WithLibrary,
    ext_modules=[],  # setuptools looks into them, for has_ext_modules says that there are some
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelForAnyPython},
)
