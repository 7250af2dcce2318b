"""Drafters as they are published: a folder with config.json and safetensors, of DFlash or of EAGLE-3.

Only these files are read, and no code of the folder runs. The weights must be exactly those that the configuration
makes: a drafter with random parts, or one that is run otherwise than it was trained, would run without an error and
draft badly. A field that asks for what is not here is refused with its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from inference_engine.models.folder import CONFIG, read_json, weight_files
from inference_engine.models.safetensors_header import check_safetensors
from kv_cache_proposer.dflash import dflash_fields as dflash
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.drafter_errors import DrafterError
from kv_cache_proposer.eagle3 import eagle3_fields as eagle3
from kv_cache_proposer.eagle3.eagle3_network import Eagle3Network
from kv_cache_proposer.published_fields import names_in

# Published drafters were trained with whole contexts; earlier positions improve a draft little.
CONTEXT_WINDOW = 2048
DrafterNetwork = DFlashNetwork | Eagle3Network


def is_published_drafter(folder: Path) -> bool:
    """By its configuration: nothing of this kind is served as a model."""
    content = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    return dflash.ARCHITECTURE in names_in(content) or eagle3.is_eagle3(content)


def check_published(folder: Path, *, has_weights: bool) -> None:
    """Check the configuration, and, where the weights are there, their names and shapes: their headers are read alone.

    Raises ModelError as `load_published`.
    """
    found: dict[str, Any] = {}
    for name in weight_files(folder) if has_weights else ():
        found |= check_safetensors(folder / name)
    network = _network(folder, found, CONTEXT_WINDOW, None)
    if isinstance(network, Eagle3Network):
        found = {name: one for name, one in eagle3.own_names(found).items() if name not in eagle3.ID_TENSORS}
    if has_weights:
        _check_names(network, {name: torch.Size(one["shape"]) for name, one in found.items()}, folder)


def load_published(
    folder: Path,
    *,
    target_layers: int | None = None,
    context_window: int = CONTEXT_WINDOW,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DrafterNetwork:
    """target_layers: of the target; None: any. Raises ModelError naming what is missing, unknown, of wrong shape, not
    finite, or not supported.
    """
    if not (folder / CONFIG).is_file():
        raise DrafterError(f"{folder}: no {CONFIG}, so there is no published drafter here")
    tensors: dict[str, Tensor] = {}
    for name in weight_files(folder):
        check_safetensors(folder / name)
        try:
            tensors |= load_file(folder / name)
        except (SafetensorError, ValueError, KeyError) as error:
            raise DrafterError(f"{folder / name}: damaged: {error}; get it again") from error
    network = _network(folder, tensors, context_window, target_layers)
    if isinstance(network, Eagle3Network):
        tensors = eagle3.own_names(tensors)
        network.draft_ids = eagle3.take_ids(tensors, network.config, folder)
    _check_names(network, {name: found.shape for name, found in tensors.items()}, folder)
    for name, found in tensors.items():
        if not found.is_floating_point():
            raise DrafterError(f"{folder}: {name} is {found.dtype}, not floating point")
        if not bool(torch.isfinite(found).all()):
            raise DrafterError(f"{folder}: {name} holds NaN or infinity")
    network.load_state_dict(tensors, assign=True)
    return network.to(device=device, dtype=dtype).eval().requires_grad_(requires_grad=False)


def _network(
    folder: Path, tensors: Mapping[str, Any], context_window: int, target_layers: int | None
) -> DrafterNetwork:
    """The network of a configuration, without weights. tensors: by their names."""
    path = folder / CONFIG
    content = read_json(path)
    with torch.device("meta"):
        if not eagle3.is_eagle3(content):
            return DFlashNetwork(
                dflash.read_config(content, path, context_window=context_window, target_layers=target_layers)
            )
        return Eagle3Network(
            eagle3.read_config(
                content,
                path,
                context_window=context_window,
                target_layers=target_layers,
                has_embedding=eagle3.EMBEDDING in tensors,
            )
        )


def _check_names(network: DrafterNetwork, found: Mapping[str, torch.Size], folder: Path) -> None:
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    for kind, names in (("missing", set(expected) - set(found)), ("unknown", set(found) - set(expected))):
        if names:
            raise DrafterError(f"{folder}: {len(names)} weights are {kind}, first {min(names)}; is it such a drafter?")
    for name, shape in expected.items():
        if found[name] != shape:
            raise DrafterError(f"{folder}: {name} is {list(found[name])}, {CONFIG} makes it {list(shape)}")
