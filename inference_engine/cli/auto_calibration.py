"""Calibrates what a server's strategy needs of its model, where the cache has none: once for each model's weights.

    restored:source=latent     a latent codec           kakeya train latent --quick
    gather                     components of keys       kakeya train components
    restored:mode=select       both

It runs in a process of its own, before the server is ready and with its progress on standard error: the laboratory
calibrates, and serving imports nothing of it. What is made lies in the cache, where every later start finds it. If the
server is killed meanwhile, that process ends by itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from inference_engine.cli.lazy_commands import LABORATORY
from inference_engine.cli.settings import as_flags
from inference_engine.config import EngineConfig, ModelConfig, child_environment, require_cache
from inference_engine.errors import BackendError, InvalidArgument, ModelError, NotNative

if TYPE_CHECKING:
    from inference_engine.compose import DLMRestoredVerifier

# Of weights, in files. Up to it first use takes one to three minutes on two cores; longer waits are asked for.
SMALL_BYTES = 640 * 2**20
_STAGES = ("latent", "components")
_COMMANDS = {"latent": ("latent", "--quick"), "components": ("components",)}
_STANDARD_ERROR = 2


def with_calibrations(
    parts: DLMRestoredVerifier, model: ModelConfig, engine: EngineConfig, calibrate: str
) -> DLMRestoredVerifier:
    """`parts` with what the setting `calibrate` makes the server have. Raises BackendError if it cannot be made."""
    from inference_engine.compose import find_components, find_latent

    if not (stages := _missing(parts, model, engine, calibrate)):
        return parts
    run(model, stages)
    return replace(parts, latent=find_latent(model), components=find_components(model))


def before_start(model: ModelConfig, engine: EngineConfig) -> None:
    """Make what a server that is started next, as a child, would make itself. Raises what it would fail with.

    A child's progress is not seen, and it has to be ready in a time in which a slow machine calibrates nothing.
    """
    from inference_engine.compose import open_parts
    from inference_engine.kv.strategies import parse_strategy
    from inference_engine.kv.strategy import KVStrategy
    from inference_engine.models import convert_for_torch, is_known

    if is_known(model.model) and _is_for_torch(model):
        with suppress(ModelError):  # the server unpacks the file in memory instead, and says why
            convert_for_torch(model.model, model.cache_path)
    # The others decide by their own options alone, whatever the model is, which then need not be loaded here.
    depends = type(parse_strategy(engine.strategy)).resolved is not KVStrategy.resolved
    if depends and is_small(model) and not all(_is_cached(model, stage) for stage in _STAGES):
        with_calibrations(open_parts(model), model, engine, "auto")


def _is_for_torch(model: ModelConfig) -> bool:
    """By its settings, and by what is installed; a trial may still find a reason for torch."""
    from inference_engine.backends.native.loading import open_library

    if model.device == "mlx":
        return False
    if model.backend == "torch":
        return True
    try:
        open_library(model)
    except NotNative:
        return True
    return False


def run(model: ModelConfig, stages: Sequence[str]) -> None:
    """Make what the cache lacks of `stages`, one after another. Raises BackendError with the way out."""
    if find_spec(LABORATORY) is None:
        raise BackendError("the laboratory, which calibrates, is not installed; start with --calibrate never")
    cache = require_cache(model.cache_path)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for stage in stages:
            # A second server that starts meanwhile waits, and finds what the first one made.
            with _locked(model, stage):
                if not _is_cached(model, stage):
                    make(model, stage)
    except OSError as error:
        raise BackendError(
            f"what {model.model} needs for this strategy is made once and kept in {cache}, which cannot be written "
            f"({error.strerror or error}); name another folder with --cache-dir, or start with --calibrate never"
        ) from error


@contextmanager
def _locked(model: ModelConfig, stage: str) -> Iterator[None]:
    path = model.cache_path / f"calibrating-{stage}.lock"
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f"another process calibrates ({path}); waiting for it", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_small(model: ModelConfig) -> bool:
    """Is calibrating for this model quick enough to be done without being asked?"""
    from inference_engine.models import find_model

    weights = find_model(model.model, cache=model.cache_path).weights
    return sum(path.stat().st_size for path in weights) <= SMALL_BYTES


def _missing(parts: DLMRestoredVerifier, model: ModelConfig, engine: EngineConfig, calibrate: str) -> tuple[str, ...]:
    if calibrate == "never":
        return ()
    needed = set(_STAGES)
    if calibrate == "auto":
        needed = _needed(parts, engine)
        if not needed or not is_small(model):
            return ()
    has = {"latent": parts.latent is not None or model.latent != "auto", "components": bool(parts.components)}
    return tuple(stage for stage in _STAGES if stage in needed and not has[stage])


def _needed(parts: DLMRestoredVerifier, engine: EngineConfig) -> set[str]:
    """What the default strategy decides by, were it there: some of _STAGES."""
    from inference_engine.kv.strategies import parse_strategy
    from inference_engine.kv.strategy import COMPONENTS, check_strategy

    geometry = parts.forward.geometry(page_tokens=engine.page_tokens, segment_tokens=engine.segment_tokens)
    strategy = parse_strategy(engine.strategy).resolved(geometry, has_components=parts.forward.indexes_keys)
    try:
        check_strategy(strategy, geometry)
    except InvalidArgument:
        return set()  # the engine refuses it, and says why
    needed = {"components"} if COMPONENTS in strategy.calibrated else set()
    if strategy.restorer().is_calibrated:
        needed.add("latent")
    return needed


def _is_cached(model: ModelConfig, stage: str) -> bool:
    from inference_engine.compose import components_folder, latent_folder
    from inference_engine.models import check_model

    folder = {"latent": latent_folder, "components": components_folder}[stage]
    return folder(check_model(model.model, cache=model.cache_path).model_id, model.cache_path).is_dir()


def make(model: ModelConfig, stage: str) -> None:
    """In a process of the laboratory's. Raises BackendError with the way out."""
    command = ("-P", "-m", "inference_engine.cli.main", "train", *_COMMANDS[stage], *as_flags(model))
    done = subprocess.run(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=_STANDARD_ERROR,  # a server's own output is one line
        env={name: value for name, value in child_environment().items() if not name.startswith("KAKEYA_")},
        check=False,
    )
    if done.returncode != 0:
        raise BackendError(
            f"`kakeya train {' '.join(_COMMANDS[stage])}`, which calibrates for {model.model} at first use, ended with "
            f"status {done.returncode}; its reason is above. Start with --calibrate never, or with another strategy"
        )
