"""Devices: find out whether a model can be served, load it, take it over, run it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inference_engine.backends.base import Forward
from inference_engine.config import ModelConfig
from inference_engine.errors import BackendError

if TYPE_CHECKING:
    from inference_engine.backends.twin import Admitted


def admit(config: ModelConfig) -> Admitted:
    """Find out from a model's configuration whether it can be served, and how. No weights are read or hashed.

    Raises ModelError with the reason why it cannot.
    """
    from inference_engine.backends.torch_forward import use_threads
    from inference_engine.backends.twin import admit_config
    from inference_engine.models import find_model, read_config, sizes

    found = find_model(config.model, cache=config.cache_path)
    read = read_config(found)
    use_threads(config.threads)
    admitted = admit_config(read)
    sizes(read, found.folder)
    return admitted


def open_backend(config: ModelConfig, admitted: Admitted | None = None) -> Forward:
    """Load the model and make it ready to run. Raises ModelError or BackendError.

    admitted: what `admit` gave for this configuration, if it was asked already. The architecture is admitted by test
    (`backends/twin.py`) before weights are read.
    """
    import torch

    from inference_engine.backends.graphs import wants_graphs
    from inference_engine.backends.packed_linear import can_pack, pack_linears
    from inference_engine.backends.torch_forward import TorchForward, use_threads
    from inference_engine.kernels.choice import open_lane_attention, open_noise
    from inference_engine.models import load_model
    from inference_engine.models.norms import fuse_norms
    from inference_engine.models.seam import ATTENTION, Seam
    from inference_engine.types import ModelFacts

    use_threads(config.threads)
    # cuDNN's attention makes a plan for every number of keys it meets, and decoding meets a new one at every token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    admitted = admitted or admit(config)
    loaded = load_model(
        config.model,
        cache=Path(config.cache_path),
        device=config.device,
        dtype=config.dtype,
        attention=ATTENTION,
    )
    if config.linear == "packed" and not can_pack(loaded.model):
        raise BackendError(
            f"linear=packed needs oneDNN and a CPU; {loaded.dtype} on {loaded.device} is served by linear=auto"
        )
    if config.linear != "plain" and can_pack(loaded.model):
        pack_linears(loaded.model)
    if config.kernels != "plain" and torch.device(loaded.device).type == "cuda":
        fuse_norms(loaded.model)
    facts = ModelFacts(
        model_id=loaded.model_id,
        vocab_size=loaded.vocab_size,
        trained_positions=loaded.trained_positions,
        device=loaded.device,
        dtype=loaded.dtype,
        refused_strategies=admitted.refused,
    )
    device, seam = torch.device(loaded.device), Seam(loaded.model, admitted.traits)
    lane_attention = None if seam.has_head_sinks else open_lane_attention(config.kernels, device)
    records_graphs = wants_graphs(config.graphs, device, has_lanes=lane_attention is not None)
    return TorchForward(
        seam,
        facts,
        device,
        lane_attention=lane_attention,
        noise_of_all=open_noise(config.kernels, device),
        records_graphs=records_graphs,
    )
