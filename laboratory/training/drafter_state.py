"""Where a training stands, on disk, so that the next call goes on as if there had been no break.

    state-000120-000.safetensors   weights and both moments as one float32 vector, cut into files of at most 16 MiB
    …
    state.json                     the plan, steps and seconds done, which files count

The manifest comes last and the files before it are then removed: a call that is stopped anywhere loses itself alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inference_engine.models.folder import read_json
from kv_cache_proposer.drafter_errors import DrafterError

MANIFEST = "state.json"
MAX_FILE_BYTES = 16 * 2**20

_HEADER_BYTES = 2**10
_FILE_NUMBERS = (MAX_FILE_BYTES - _HEADER_BYTES) // 4
_MOMENTS = ("exp_avg", "exp_avg_sq")
_REMEDY = "train again, in an empty folder"


@dataclass(frozen=True, slots=True)
class Progress:
    """seconds: of training, over all calls."""

    steps: int = 0
    seconds: float = 0.0
    is_finished: bool = False


def save_state(
    folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer, plan: Mapping[str, Any], progress: Progress
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parameters = list(network.parameters())
    moments = [[optimizer.state[one][name] for one in parameters] for name in _MOMENTS]
    numbers = torch.cat([part.detach().float().cpu().reshape(-1) for group in (parameters, *moments) for part in group])
    names = []
    for index, part in enumerate(torch.split(numbers, _FILE_NUMBERS)):
        names.append(f"state-{progress.steps:06d}-{index:03d}.safetensors")
        save_file({"numbers": part.clone()}, folder / names[-1])
    content = {
        "plan": dict(plan),
        "steps": progress.steps,
        "seconds": progress.seconds,
        "is_finished": progress.is_finished,
        "files": names,
    }
    draft = folder / f"{MANIFEST}.partial"
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / MANIFEST)
    for path in folder.glob("state-*.safetensors"):
        if path.name not in names:
            path.unlink()


def load_state(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer, plan: Mapping[str, Any]) -> Progress:
    """Put network and optimizer where the last call left them; nothing happens if there was none.

    Raises DrafterError for a training that was begun with another plan or other texts, or a damaged state.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return Progress()
    content = read_json(path)
    if content.get("plan") != json.loads(json.dumps(dict(plan))):
        raise DrafterError(
            f"{folder}: holds a training begun with another plan or other texts ({content.get('plan')}); {_REMEDY}"
        )
    try:
        numbers = torch.cat([load_file(folder / name)["numbers"] for name in content["files"]])
        progress = Progress(int(content["steps"]), float(content["seconds"]), bool(content["is_finished"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DrafterError(f"{path}: damaged: {type(error).__name__}: {error}; {_REMEDY}") from error
    parameters = list(network.parameters())
    if len(numbers) != 3 * sum(one.numel() for one in parameters):
        raise DrafterError(f"{folder}: {len(numbers)} numbers do not fit this drafter; {_REMEDY}")
    weights, *moments = torch.split(numbers, len(numbers) // 3)
    with torch.no_grad():
        for one, part in zip(parameters, _cut(weights, parameters), strict=True):
            one.copy_(part)
    cuts = zip(parameters, *(_cut(moment, parameters) for moment in moments), strict=True)
    for one, *parts in cuts:
        state = {name: part.to(one.device).clone() for name, part in zip(_MOMENTS, parts, strict=True)}
        optimizer.state[one] = {
            "step": torch.tensor(float(progress.steps), device=_step_device(optimizer, one)),
            **state,
        }
    return progress


def _cut(numbers: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(numbers, [one.numel() for one in parameters])
    return [part.view(one.shape) for part, one in zip(parts, parameters, strict=True)]


def _step_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    # A fused optimizer counts its steps on the device, any other on the host.
    return parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
