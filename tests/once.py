"""What takes long to make is made by one of pytest's processes, once in a run, for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest
from filelock import FileLock


def made_once(name: str, make: Callable[[Path], object], request: pytest.FixtureRequest) -> Path:
    """The folder `name`, new and empty when `make` is called with it. Where `make` fails, the next process tries."""
    folders: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    if not hasattr(request.config, "workerinput"):  # there is one process
        make(folder := folders.mktemp(name))
        return folder
    shared = folders.getbasetemp().parent  # of this run; each process has a folder of its own in it
    made = shared / f"{name}.made"
    with FileLock(shared / f"{name}.lock"):
        if not made.exists():
            make(folder := Path(mkdtemp(prefix=f"{name}-", dir=shared)))
            made.write_text(str(folder), encoding="utf-8")
    return Path(made.read_text(encoding="utf-8"))
