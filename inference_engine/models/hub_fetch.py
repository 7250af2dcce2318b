"""Fetch a model from the Hugging Face hub into its cache: only files that are read, weights only if it can be served.

    1  configuration, tokenizer, the list of shards           a few megabytes
    2  can it be served? checks of its configuration, and those of the caller (`admit`)
    3  the weights, at the same commit; their SHA-256 against the hub's, if it gives one

A separate process downloads (`hub_download.py`). It is killed when nothing has arrived for `STALL_SECONDS`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from inference_engine.config import child_environment, hub_cache
from inference_engine.errors import ModelError
from inference_engine.models.checksums import sha256_of
from inference_engine.models.folder import (
    CONFIGURATION_FILES,
    INDEX,
    TOKENIZER_FILES,
    WEIGHTS,
    shards_listed,
    weight_files,
)
from inference_engine.models.hub import HubModel, snapshot
from inference_engine.models.loader import check_model, find_model
from inference_engine.models.verified import look_of, remember_sha256, remembered_sha256
from inference_engine.models.wheels import bytes_in

STALL_SECONDS = 180.0
_POLL_SECONDS = 0.5
_INCOMPLETE = "blobs/*.incomplete"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch_from_hub(
    model: HubModel,
    cache: Path,
    *,
    admit: Callable[[Path], Callable[[Path], object] | None],
    console: Console | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> Path:
    """Make sure that `model` is in the hub's cache, whole, and return its folder there.

    admit: called with the folder before it has weights; raises ModelError for a model that should not be fetched, and
    returns what checks the whole folder; None: it is checked as a model's.
    cache: ours, for remembered digests. Asks the hub each time; files in the cache are not downloaded again, and
    suffice if the hub cannot be reached. Shows the library's progress if `console` (default: standard error) is a
    terminal.

    Raises ModelError if the hub cannot be reached, does not give the model, or gives damaged files; and as
    `check_model`.
    """
    try:
        return _fetch(model, cache, admit, (console or Console(stderr=True)).is_terminal, stall_seconds)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model} cannot be fetched: {error}") from error


def _fetch(
    model: HubModel,
    cache: Path,
    admit: Callable[[Path], Callable[[Path], object] | None],
    shows: bool,
    stall_seconds: float,
) -> Path:
    here = hub_cache()
    _run(model, here, (*CONFIGURATION_FILES, *TOKENIZER_FILES, INDEX), shows=shows, stall_seconds=stall_seconds)
    folder = snapshot(model, here)
    check = admit(folder)
    if check is None:
        find_model(str(folder), cache=cache)
    weights = shards_listed(folder / INDEX) if (folder / INDEX).is_file() else (WEIGHTS,)
    pinned = HubModel(model.name, folder.name)
    _run(pinned, here, weights, shows=shows, stall_seconds=stall_seconds)
    # More files may be loaded than were fetched now: another tool may have fetched the model as one file.
    for name in sorted({*weights, *weight_files(folder)}):
        if (folder / name).exists():
            _check_digest(folder / name, model, cache)
    if check is None:
        return check_model(str(folder), cache=cache).folder
    check(folder)
    return folder


def _run(model: HubModel, here: Path, files: Sequence[str], *, shows: bool, stall_seconds: float) -> None:
    entry = model.entry(here)
    before = set(entry.glob(_INCOMPLETE))
    process = start((model.name, f"--revision={model.revision}", f"--cache={here}", "--", *files), shows=shows)
    try:
        _wait(process, model, entry, stall_seconds)
        assert process.stdout is not None
        said = process.stdout.read().strip()  # at most one line, so the pipe was never full
    finally:
        process.kill()
        process.communicate()
        _remove_left_over(entry, set(entry.glob(_INCOMPLETE)) - before)
    if process.returncode != 0:
        raise ModelError(said or f"fetching {model} ended with exit status {process.returncode} and no output")


def start(arguments: Sequence[str], *, shows: bool) -> subprocess.Popen[str]:
    """A process that downloads. shows: its progress is seen."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "inference_engine.models.hub_download", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if shows else subprocess.DEVNULL,
        text=True,
        env=download_environment(shows=shows),
    )


def download_environment(*, shows: bool) -> dict[str, str]:
    return child_environment(
        HF_HUB_OFFLINE="0",
        HF_HUB_VERBOSITY="error",
        # So that removing a damaged file does not affect another model.
        HF_HUB_DISABLE_SHARED_BLOBS="1",
        **({} if shows else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}),
    )


def _remove_left_over(entry: Path, incomplete: set[Path]) -> None:
    """Remove partial files of a killed download, which later ones do not use. A running download holds a lock."""
    for path in incomplete:
        lock = FileLock(entry.parent / ".locks" / entry.name / f"{path.name.partition('.')[0]}.lock")
        with suppress(Timeout, OSError), lock.acquire(blocking=False):
            path.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[str], model: HubModel, entry: Path, stall_seconds: float) -> None:
    arrived, since = -1, time.monotonic()
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if (now := bytes_in(entry)) != arrived:
                arrived, since = now, time.monotonic()
            elif time.monotonic() - since > stall_seconds:
                raise ModelError(
                    f"nothing of {model} has arrived for {stall_seconds:g} seconds; files that are whole are kept, "
                    "try again later"
                ) from None


def _check_digest(path: Path, model: HubModel, cache: Path) -> None:
    """Check a file against the SHA-256 from the hub, by which the cache names large files; the library compares only
    sizes.

    The name is that of the first link's target: it may itself link to a shared store, with another hash as the name.
    """
    if not path.is_symlink():
        return
    blob = Path(os.path.normpath(path.parent / path.readlink()))
    if not _SHA256.fullmatch(blob.name) or remembered_sha256(path, cache) == blob.name:
        return
    look = look_of(path)
    sha256 = sha256_of(path)
    if sha256 != blob.name:
        what = f"{path.name} of {model} is damaged: its SHA-256 should be {blob.name}, it is {sha256}."
        if blob.is_symlink():
            raise ModelError(f"{what} Other models may use the same file: {path.resolve()}; remove it, and fetch again")
        path.unlink()
        blob.unlink(missing_ok=True)
        raise ModelError(f"{what} It was removed; get it again with: kakeya models fetch {model}")
    with suppress(OSError):  # the next fetch hashes it again
        remember_sha256(path, sha256, look, cache)
