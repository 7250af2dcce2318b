"""An entry of the Hugging Face hub's cache, as huggingface_hub lays it out: blobs, links to them, names of commits."""

from __future__ import annotations

import hashlib
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_entry(cache: Path, name: str, folder: Path, *, commit: str = COMMIT, revision: str | None = "main") -> Path:
    """Make `folder` the snapshot of `org/name` at `commit`; returns the snapshot's folder of links."""
    entry = cache / f"models--{name.replace('/', '--')}"
    snapshot = entry / "snapshots" / commit
    (entry / "blobs").mkdir(parents=True, exist_ok=True)
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        blob = entry / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        up = "/".join([".."] * (2 + len(link.relative_to(snapshot).parts) - 1))
        link.symlink_to(f"{up}/blobs/{blob.name}")
    if revision is not None:
        ref = entry / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return snapshot


def share(hub: Path, found: Path) -> Path:
    """Move the weights into the store that entries share, as huggingface_hub does. Returns where they are."""
    blob = (found / "model.safetensors").resolve()
    name = "ab" * 32
    shared = hub / "blobs" / name[:2] / name
    shared.parent.mkdir(parents=True)
    (hub / "blobs" / ".huggingface-shared-blobs").write_text("1")
    blob.rename(shared)
    blob.symlink_to(f"../../blobs/{name[:2]}/{name}")
    return shared
