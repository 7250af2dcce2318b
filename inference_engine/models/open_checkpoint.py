"""The weights of a model, whatever they are stored as."""

from __future__ import annotations

from pathlib import Path

from inference_engine.models.checkpoint import MLX_EXPERTS, Checkpoint, GgufCheckpoint, SafetensorsCheckpoint
from inference_engine.models.folder import grouping_of
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.grouped import GroupedCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The weights of a folder with safetensors, or of a GGUF file. Raises ModelError or OSError.

    The folder has passed the checks of `folder.py`.
    """
    if not path.is_dir():
        return GgufCheckpoint(read_gguf(path))
    plain = SafetensorsCheckpoint(path)
    if grouping_of(path) is None and not any(MLX_EXPERTS in name for name in plain.names()):
        return plain
    return GroupedCheckpoint(plain)
