"""Keeps what admission found out by test, so that a later start of the same model need not try again.

    <cache>/admitted/<digest of the configuration>.<name>.json    {"key": …, "verdict": …}

Models of one configuration share its verdicts, wherever they lie; those of older code are written over. The key is a
digest of all that a verdict depends on: the configuration as it is stored, Python, the processor's instructions, the
files of torch, transformers and what checks configurations with them, our own sources, and the files of the packages
that add strategies or codecs. With another key, or if anything about the file is odd, there is no verdict, and the
model is tried again. Only values are read, into frozen dataclasses, and only from a file of this user that no other
user may write.

Refusals are not kept: the next start follows a change, and the log of the trial says what to change.

Of models known by name the package brings verdicts, in `known_verdicts.json`, for the versions of libraries that are
pinned (`make verdicts`). They are found by the configuration's digest. That the code here still finds the same is for
tests to say, which try these models again at every change, not for a key that every change would make another one. One
that is in the cache comes first: after `forget`, whatever the package brings, the model is tried.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from inference_engine.config import NO_CACHE
from inference_engine.kv.installed import plugin_distributions
from inference_engine.kv.strategies import strategy_kinds
from inference_engine.models import FoundModel
from inference_engine.models.configuration import configuration_of
from inference_engine.native import build

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PACKAGES = ("torch", "transformers", "huggingface_hub", "numpy")
# Kernels that transformers runs layers with, where it finds them installed.
_OPTIONAL_PACKAGES = ("kernels", "flash-linear-attention", "fla-core", "causal-conv1d", "mamba-ssm")
BROUGHT = Path(__file__).with_name("known_verdicts.json")
_ROOT = Path(__file__).resolve().parent.parent
_MOST_BYTES = 2**24
_OTHERS_WRITE = 0o022


class Verdicts:
    """The verdicts of one configuration. Everything that fails here means that there is none."""

    def __init__(self, found: FoundModel, folder: Path) -> None:
        """folder: the cache; with NO_CACHE nothing is kept."""
        self._found = found
        configuration = _configuration(found)
        self._stem = folder / "admitted" / configuration[:32]
        self._key = None if folder == NO_CACHE else _key(configuration)

    def read(self, kind: type[T], name: str, more: str = "") -> T | None:
        """The verdict of this name, a dataclass, or None. more: what else it depends on."""
        try:
            verdict = self._kept(name, more)
            if verdict is None:
                verdict = self._brought().get(name)
            decoded: T | None = None if verdict is None else _decoded(kind, verdict)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            logger.info("%s is not used, the model is tried again: %s", self._path(name), error)
            return None
        return decoded

    def _kept(self, name: str, more: str) -> Any:
        """The cache's; None if it has none, or one of other code."""
        if self._key is None:
            return None
        try:
            content = json.loads(_own_text(self._path(name)), parse_constant=_refuse)
        except FileNotFoundError:
            return None
        if set(content) != {"key", "verdict"}:
            raise ValueError("it is not a verdict")
        return content["verdict"] if content["key"] == _with(self._key, more) else None

    def _brought(self) -> Mapping[str, Any]:
        """The package's, whatever processor they were found on: all levels of instructions compute the same."""
        if self._found.gguf is None or _installed() is None:
            return {}
        return _all_brought().get(brought_key(self._found.gguf), {})

    def keep(self, verdict: Any, name: str, more: str = "") -> None:
        """Store a dataclass, unless what it depends on has changed meanwhile or the cache cannot be written."""
        if self._key is None or _key(_configuration(self._found)) != self._key:
            return
        path = self._path(name)
        draft = path.with_suffix(f".{uuid4().hex}")
        try:
            text = json.dumps({"key": _with(self._key, more), "verdict": _encoded(verdict)}, allow_nan=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            draft.replace(path)
        except (OSError, ValueError) as error:
            logger.info("%s cannot be kept, the next start tries the model again: %s", path, error)
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def forget(self) -> None:
        """The model is tried again at its next load."""
        if self._key is None:
            return
        for path in self._stem.parent.glob(f"{self._stem.name}.*"):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for name in self._brought():
            with suppress(OSError):
                self._stem.parent.mkdir(parents=True, exist_ok=True)
                self._path(name).write_bytes(b"")  # of no use, and there: what is brought is not asked

    def _path(self, name: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{name}.json")


# -- what a verdict depends on ----------------------------------------------------------------------------------------


def _configuration(found: FoundModel) -> str:
    """A digest of what is stored of it."""
    content = configuration_of(found.stored if found.only_gguf else found.folder).content
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def brought_key(gguf: Path) -> str:
    """What a verdict that the package brings is found by: the configuration, the libraries, what there is to try."""
    versions = (importlib.metadata.version(package).partition("+")[0] for package in _PACKAGES)
    content = json.dumps(configuration_of(gguf).content, sort_keys=True)
    return hashlib.sha256("\n".join([content, *versions, *sorted(strategy_kinds())]).encode()).hexdigest()


@cache
def _all_brought() -> Mapping[str, Mapping[str, Any]]:
    """By key, then by name."""
    try:
        brought: dict[str, dict[str, Any]] = json.loads(BROUGHT.read_bytes())["verdicts"]
    except FileNotFoundError:
        return {}
    return brought


def _key(configuration: str) -> str | None:
    """None if a change of something in this installation could not be seen."""
    installed = _installed()
    return None if installed is None else _with(installed, configuration)


def _with(key: str, more: str) -> str:
    return hashlib.sha256(f"{key}\n{more}".encode()).hexdigest()


@cache
def _installed() -> str | None:
    """A digest of the code that tries models, ours and others'."""
    parts = [
        platform.python_version(),
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        build.fingerprint(),
    ]
    try:
        packages = [importlib.metadata.distribution(package) for package in _PACKAGES]
    except importlib.metadata.PackageNotFoundError:
        return None
    for package in _OPTIONAL_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages.append(importlib.metadata.distribution(package))
    for found in (*packages, *plugin_distributions()):
        listed, origin = found.read_text("RECORD"), found.read_text("direct_url.json")
        # The list has a digest of every file, unless they are edited where they lie.
        if not listed or "editable" in (origin or ""):
            return None
        parts.append(hashlib.sha256(listed.encode()).hexdigest())
    sources = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        content = path.read_bytes()
        sources.update(f"{path.relative_to(_ROOT).as_posix()}\0{len(content)}\0".encode() + content)
    return hashlib.sha256("\n".join([*parts, sources.hexdigest()]).encode()).hexdigest()


# -- what is read ------------------------------------------------------------------------------------------------------


def _own_text(path: Path) -> str:
    """Raises OSError or ValueError for a file that is not this user's own."""
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), encoding="utf-8") as file:
        stat = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and (stat.st_uid != os.geteuid() or stat.st_mode & _OTHERS_WRITE):
            raise ValueError("another user owns it or may write it")
        if stat.st_size > _MOST_BYTES:
            raise ValueError(f"{stat.st_size} bytes; the limit is {_MOST_BYTES}")
        return file.read(_MOST_BYTES)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _given(kind: Any) -> list[str]:
    """The fields of a dataclass that its caller gives; others are worked out of them."""
    return [field.name for field in fields(kind) if field.init]


def _encoded(value: Any) -> Any:
    """The inverse of `_decoded`."""
    if is_dataclass(value):
        return {name: _encoded(getattr(value, name)) for name in _given(value)}
    if isinstance(value, Mapping):
        return {name: _encoded(each) for name, each in value.items()}
    return [_encoded(each) for each in value] if isinstance(value, tuple) else value


def _decoded(kind: Any, value: Any) -> Any:
    """`value` as `kind`: a dataclass, a tuple, a mapping of texts, a union or a plain type. Raises ValueError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = _given(kind)
        if not isinstance(value, dict) or set(value) != set(names):
            raise ValueError(f"not the fields of {kind}")
        return typing.cast("Any", kind)(**{name: _decoded(hints[name], value[name]) for name in names})
    if origin is types.UnionType:
        if value is None and type(None) in arguments:
            return None
        if type(value) in arguments:  # of several plain types
            return value
        return _decoded(next(each for each in arguments if each is not type(None)), value)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is ...:
            return tuple(_decoded(arguments[0], each) for each in value)
        return tuple(_decoded(each, own) for each, own in zip(arguments, value, strict=True))
    if origin is Mapping and isinstance(value, dict):
        return {name: _decoded(arguments[1], each) for name, each in value.items()}
    if origin is None and type(value) is kind:
        return value
    raise ValueError(f"{str(value)[:40]!r} is not of the type {kind}")
