"""What pip builds with: setuptools, and a compiler from the index where this machine has none.

pip asks for requirements first, and installs them beside setuptools in the environment that it builds in. There
`setup.py` finds Zig's compiler as it would find one of the system.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# By its path: the package itself may need what is not installed yet.
_BUILD = Path(__file__).resolve().parent / "inference_engine" / "native" / "build.py"
_spec = importlib.util.spec_from_file_location("build_native", _BUILD)
assert _spec and _spec.loader
native: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)

Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """setuptools' own, and Zig's compiler if it is needed."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *compiler_requirement()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """setuptools' own, and Zig's compiler if it is needed."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *compiler_requirement(every_level=False)]


def compiler_requirement(*, every_level: bool = True) -> list[str]:
    """Zig's compiler (100 MB), unless the library is compiled, a compiler works here, or nothing could compile it.

    every_level: as a wheel has them; what stays here needs the best one alone. A compiler that CXX names and that does
    not work is not replaced by another.
    """
    asked = os.environ.get("CXX", "")
    if not native.is_supported() or asked or native.is_current(native.LIBRARY, every_level=every_level):
        return []
    try:
        native.find_compiler(has_zig=False)
    except native.NoCompiler:
        print(f"native library: no C++ compiler works here; building with {native.ZIG} (100 MB)")
        return [native.ZIG]
    return []
