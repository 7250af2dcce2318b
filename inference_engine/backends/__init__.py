"""Devices: load a model, take it over, run it."""

from __future__ import annotations

from pathlib import Path

from inference_engine.backends.base import Forward
from inference_engine.config import ModelConfig
from inference_engine.errors import BackendError


def open_backend(config: ModelConfig) -> Forward:
    """Load the model and make it ready to run. Raises ModelError or BackendError.

    The architecture is admitted by test (`backends/admission.py`) before anything is served.
    """
    import torch

    from inference_engine.backends.admission import admit_config
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
    loaded = load_model(
        config.model,
        cache=Path(config.cache_path),
        device=config.device,
        dtype=config.dtype,
        attention=ATTENTION,
    )
    admitted = admit_config(loaded.model.config, type(loaded.model))
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
