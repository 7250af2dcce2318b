"""Models of the Hugging Face hub: their names, and their folders in the cache on this machine. Uses no network.

    <hub cache>/models--org--name/refs/main               the commit of `main` when it was fetched
    <hub cache>/models--org--name/snapshots/<commit>/     a folder of links
    <hub cache>/models--org--name/blobs/<hash>            the files that they link to

`kakeya models fetch org/name` puts a model there (`hub_fetch.py`), and so do `hf download org/name` and transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from inference_engine.errors import ModelError

MAIN = "main"

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9_.+-]+(?:/[A-Za-z0-9_.+-]+)*))?", re.ASCII)
_LONGEST = 96
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """name: `org/name`. revision: a branch, a tag or a commit of 40 digits."""

    name: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.name if self.revision == MAIN else f"{self.name}@{self.revision}"

    def entry(self, cache: Path) -> Path:
        return cache / f"models--{self.name.replace('/', '--')}"


def hub_model(text: str) -> HubModel | None:
    """`org/name` or `org/name@revision`; None for an invalid name."""
    match = _NAME.fullmatch(text)
    if match is None or len(match["name"]) > _LONGEST or match["name"].endswith(".git"):
        return None
    if "--" in match["name"] or ".." in match["name"]:
        return None
    revision = match["revision"] or MAIN
    # It becomes a path below refs/.
    return None if {".", ".."} & set(revision.split("/")) else HubModel(match["name"], revision)


def snapshot(model: HubModel, cache: Path) -> Path:
    """The snapshot folder of this model and revision. Raises ModelError, with the command to get it, if absent."""
    entry = model.entry(cache)
    remedy = f"get it with: kakeya models fetch {model}"
    if not entry.is_dir():
        raise ModelError(f"{model.name} is not in the hub's cache on this machine ({cache}); {remedy}")
    commit = model.revision if _COMMIT.fullmatch(model.revision) else _commit_of(model, entry)
    folder = entry / "snapshots" / commit if commit else None
    if folder is None or not folder.is_dir():
        here = sorted(path.name for path in entry.glob("snapshots/*") if _COMMIT.fullmatch(path.name))
        others = f"; here are {', '.join(f'{model.name}@{name}' for name in here[:3])}" if here else ""
        raise ModelError(f"{model.name} is in {cache}, but not its revision {model.revision}; {remedy}{others}")
    return folder


def hub_names(cache: Path) -> list[str]:
    """Models with a snapshot there, whole or not."""
    entries = sorted(path.parent.name for path in cache.glob("models--*/snapshots"))
    return [name for entry in entries if hub_model(name := entry.removeprefix("models--").replace("--", "/"))]


def name_of_snapshot(folder: Path) -> str | None:
    """`org/name` if `folder`, with links resolved, is a snapshot in a hub's cache."""
    entry = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not entry.startswith("models--"):
        return None
    return entry.removeprefix("models--").replace("--", "/")


def _commit_of(model: HubModel, entry: Path) -> str | None:
    try:
        commit = (entry / "refs" / model.revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None
