"""From an admitted model to one on torch, with what its device has for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from inference_engine.backends.base import Admitted, use_threads
from inference_engine.backends.graphs import should_record_graphs
from inference_engine.backends.op_list_executor import OpListExecutor
from inference_engine.backends.packed_linear import can_pack, pack_linears
from inference_engine.backends.ranks.group import RankGroup
from inference_engine.backends.ranks.leader import ALONE, Followers
from inference_engine.backends.ranks.parts import OF_COLUMNS
from inference_engine.backends.torch_forward import TorchForward
from inference_engine.backends.twin import Twin, TwinSizes, checked
from inference_engine.config import ModelConfig
from inference_engine.errors import BackendError
from inference_engine.kernels.ops import DeviceOps, open_ops
from inference_engine.kernels.prefill_attention import LongAttention, open_long_chunks
from inference_engine.kernels.quantised import GROUP, largest_of
from inference_engine.kv.geometry import LayerTraits
from inference_engine.models import LoadedModel, load_model
from inference_engine.models.families import check_family
from inference_engine.models.latent_attention import absorb_projections
from inference_engine.models.norms import fuse_norms
from inference_engine.models.operations import NoStepListError
from inference_engine.models.quantised_linear import formats_of, quantise_linears
from inference_engine.models.seam import ATTENTION, Seam
from inference_engine.types import Mode, ModelFacts

logger = logging.getLogger(__name__)

_WHOLE = "start with tensor_parallel=1"
_WITHIN = 0.25  # times as much within a recorded step
_UNRECORDED = 16  # times as much work, from which on an operation pays in a step that is not recorded
MADE = ("fp8", "int4")  # formats that weights can be quantised to when they are loaded


def open_torch(config: ModelConfig, admitted: Admitted) -> TorchForward:
    """Load the model that was admitted and make it ready to run. Raises ModelError or BackendError."""
    if config.kv_dtype not in ("auto", config.dtype):
        raise BackendError(
            f"kv_dtype={config.kv_dtype} is for the native backend; torch keeps K and V in its dtype, {config.dtype}. "
            "Start with kv_dtype=auto"
        )
    is_cuda = config.device.partition(":")[0] == "cuda"  # whether there is such a device is found out below
    if config.weights == "fp8" and not is_cuda:
        raise BackendError("weights=fp8 is for CUDA; on a CPU start with weights=int8, int4 or auto")
    for name, asked, known in (
        ("weights", config.weights, MADE if is_cuda else ()),
        ("numerics", config.numerics, ()),
    ):
        if asked not in ("auto", *known):
            way_out = "backend=auto" if config.backend == "torch" else "with backend=native to see the reason"
            why = "" if config.backend == "torch" else ", which does not run this model here"
            raise BackendError(f"{name}={asked} is for the native backend{why}; start with {name}=auto, or {way_out}")
    use_threads(config.threads)
    loaded = load_model(
        config.model,
        cache=Path(config.cache_path),
        device=config.device,
        dtype=config.dtype,
        attention=ATTENTION,
    )
    return serve_loaded(loaded, config, admitted, ops=open_ops(config.kernels, torch.device(loaded.device)))


def serve_loaded(
    loaded: LoadedModel, config: ModelConfig, admitted: Admitted, *, ops: DeviceOps, followers: Followers = ALONE
) -> TorchForward:
    """Make a model in memory ready to run with the operations of its device; it is taken over. Raises BackendError.

    followers: as TorchForward has them; then what is loaded is the first rank's part.

    config: of it, `linear`, `kernels`, `graphs`, `determinism` and `weights` are followed; "fp8" and "int4" are made
    on any device.
    """
    # cuDNN's attention builds a plan for every number of keys, and decoding has a new number at every token.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if config.linear == "packed" and not can_pack(loaded.model):
        raise BackendError(
            f"linear=packed needs oneDNN and a CPU; {loaded.dtype} on {loaded.device} is served by linear=auto"
        )
    absorb_projections(loaded.model)  # their halves are neither packed nor quantised
    if config.linear != "plain" and can_pack(loaded.model):
        pack_linears(loaded.model)
    if config.kernels != "plain" and torch.device(loaded.device).type == "cuda":
        fuse_norms(loaded.model)
    if config.weights in MADE:
        _quantise(loaded, config.weights, followers.group)
    device, seam = torch.device(loaded.device), Seam(loaded.model, admitted.traits)
    is_even = all(layer.entry.is_even for layer in seam.layers)
    is_latent = all(layer.entry.value_in_key and not layer.is_indexed for layer in seam.layers)
    is_invariant = config.mode is Mode.FIXED_SHAPE
    is_read = is_latent and not is_invariant and getattr(ops.attend_ragged, "latent", None) is not None
    if seam.has_head_sinks or not (is_read or all(layer.entry.has_one_size for layer in seam.layers)):
        ops = replace(ops, attends_together=False)
    if not is_invariant and is_even and config.kernels != "plain":
        heads = [(each.query_heads, each.kv_heads, each.head_dim) for each in seam.layers]
        long = open_long_chunks(device, seam.dtype, heads, ops.merge_two)
        if long is not None:
            ops = replace(
                ops,
                attend_causal=long,
                attend_piece=long.attend_piece,
                attend_causal_state=long.attend_causal_state,
                attend_chunks=long.chunks,
                long_reads=_long_reads(long, seam, followers.group.ranks),
            )
    # No token's bits depend on what else is in its step; where there is no list, steps are padded for it.
    invariant = replace(ops, attend_ragged=ops.attend_invariant, attends_in_one_order=True)
    group = followers.group
    used = invariant if is_invariant else ops
    listed = _listed(admitted, seam, used, device, is_invariant=is_invariant, group=group)
    if group.ranks > 1:
        ops = replace(ops, has_causal_views_only=True)  # which are a few numbers, too
    if is_invariant and listed is not None:
        ops = invariant
    records_graphs = should_record_graphs(
        config.graphs, device, has_regions=ops.attends_together, has_states=bool(seam.states) and listed is None
    )
    facts = ModelFacts(
        model_id=loaded.model_id,
        vocab_size=loaded.vocab_size,
        trained_positions=loaded.trained_positions,
        layers=len(seam.reads),
        hidden_size=loaded.model.config.get_text_config().hidden_size,
        device=loaded.device,
        dtype=loaded.dtype,
        numerics=_numerics(
            loaded, _of_modules(seam, config.mode) if listed is None else "invariant" if is_invariant else "listed"
        )
        + (f", {group.ranks} ranks" if group.ranks > 1 else ""),
        mode=config.mode,
        refused_strategies=admitted.refused,
    )
    return TorchForward(seam, facts, device, ops=ops, records_graphs=records_graphs, listed=listed, followers=followers)


def _long_reads(long: LongAttention, seam: Seam, ranks: int) -> int | None:
    """See `DeviceOps`."""
    if long.least_work is None or seam.has_softcap:
        return None
    # Of several ranks the host launches all kernels of such a step one by one; within a recorded step it launches none.
    factor = _UNRECORDED if ranks > 1 else 1 if long.chunks is None else _WITHIN
    work = int(factor * long.least_work)
    return work // max(layer.query_heads * layer.head_dim for layer in seam.layers)


def _quantise(loaded: LoadedModel, format_name: str, group: RankGroup) -> None:
    """To the numbers that one process makes of the whole matrices.

    Raises BackendError for weights that are quantised already, and for groups of inputs that ranks have a part of each.
    """
    if stored := formats_of(loaded.model):
        raise BackendError(
            f"weights={format_name}: the weights of {loaded.model_id} are stored as {stored} already; start with "
            "weights=auto"
        )

    def largest(name: str, weight: Tensor) -> Tensor | None:
        if group.ranks == 1 or name not in OF_COLUMNS:
            return None
        if format_name == "int4" and weight.shape[1] % GROUP:
            raise BackendError(
                f"weights=int4: each of {group.ranks} ranks has {weight.shape[1]} inputs of {name}, and {GROUP} share "
                "a scale: start with weights=fp8, or with fewer ranks"
            )
        return group.gather(largest_of(weight)[None]).view(group.ranks, -1).amax(dim=0)

    count = quantise_linears(loaded.model, format_name, head=loaded.model.get_output_embeddings(), largest=largest)
    logger.debug("%d matrices were quantised to %s", count, format_name)


def _of_modules(seam: Seam, mode: Mode) -> str:
    """Padded, latent attention has one order of sums; else long prompts have another one than tokens."""
    expands = mode is Mode.BATCHED and any(layer.entry.value_in_key for layer in seam.layers)
    return "torch, long prompts expanded" if expands else "torch"


def _numerics(loaded: LoadedModel, products: str) -> str:
    """The numeric identity: what adds up, and what it reads."""
    formats = formats_of(loaded.model)
    return f"{products}, {formats} weights" if formats else products


def _listed(
    admitted: Admitted, seam: Seam, ops: DeviceOps, device: torch.device, *, is_invariant: bool, group: RankGroup
) -> OpListExecutor | None:
    """What runs the steps; or None where torch's modules do, and the log says why. Ranks raise BackendError then."""
    if not ops.attends_together:
        if group.ranks > 1:
            raise BackendError(f"{_of_ranks(group)} all layers to attend by one operation; {_WHOLE}")
        return None
    try:
        check_family(seam.model.config.get_text_config())
        kind, full = type(seam.model), seam.model.config
        difference = try_listed(kind, full, admitted.traits, ops=ops, device=device, is_invariant=is_invariant)
        logger.debug("a twin's logits differ by %.3g from transformers'", difference)
        listed = OpListExecutor(seam, ops.open_invariant() if is_invariant else ops.open_fused(), group)
        listed.check()
    except NoStepListError as reason:
        if group.ranks > 1:
            raise BackendError(f"{_of_ranks(group)} a list of operations: {reason}; {_WHOLE}") from reason
        logger.info("torch's modules run all steps: %s", reason)
        return None
    except Exception as error:  # what a compiler of kernels raises for a device that they do not fit
        if group.ranks > 1:
            raise BackendError(
                f"{_of_ranks(group)} kernels, which do not run on {device} ({error}); {_WHOLE}"
            ) from error
        logger.warning("torch's modules run all steps: the kernels do not run on %s (%s)", device, error, exc_info=True)
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the matrices as they were before they were joined
    return listed


def _of_ranks(group: RankGroup) -> str:
    return f"tensor_parallel={group.ranks} needs"


def try_listed(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    traits: Sequence[LayerTraits],
    *,
    ops: DeviceOps,
    device: torch.device,
    is_invariant: bool = False,
    seed: int = 0,
) -> float:
    """The largest difference of a logit between a twin's listed steps and transformers, as a share of the largest.

    One token at a time alone, and some beside another session's. Raises NoStepListError if there is no list, or if it
    gives other logits.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin = Twin(kind, config, traits, TwinSizes())
    twin.seam.model.to(device)
    facts = replace(twin.forward.facts, device=str(device))
    listed = OpListExecutor(twin.seam, ops.open_invariant() if is_invariant else ops.open_fused())
    twin.forward = TorchForward(twin.seam, facts, device, ops=ops, listed=listed)
    twin.geometry = twin.forward.geometry(page_tokens=4, segment_tokens=16)
    difference = max(twin.difference_of_chunks(tokens=1, is_alone=True), twin.difference_of_chunks())
    if listed.states:  # a step of more tokens than there is room for beside a state goes another way
        difference = max(difference, twin.difference_of_chunks(tokens=40))
    return checked(difference, kind)
