"""What a drafter begins with: a shape like the target's, and weights that decide nothing yet."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kv_cache_proposer.dflash.drafter_config import DFlashConfig, spread_layers
from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import embedding_scale_of
from kv_cache_proposer.drafter_errors import DrafterError

# What the last norm multiplies by at first: at one, tokens drawn blindly would look likely.
_UNDECIDED = 0.2
_ADDING = ("o_proj.weight", "down_proj.weight")  # what a layer adds comes out of these


def config_for(
    model: PreTrainedModel,
    *,
    layers: int,
    taps: int,
    block_size: int,
    mask_token_id: int,
    context_window: int,
    chain: int = 0,
) -> DFlashConfig:
    """A drafter with layers shaped as the target's. Raises DrafterError for a model whose shape it cannot share."""
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    first, heads = text.per_layer_config[0], text.num_attention_heads  # heads are as in the first layer
    if not 0 <= mask_token_id < text.vocab_size:
        raise DrafterError(f"the mask must be one of the model's {text.vocab_size} ids, got {mask_token_id}")
    return DFlashConfig(
        hidden=text.hidden_size,
        layers=layers,
        query_heads=heads,
        kv_heads=getattr(first, "num_key_value_heads", None) or heads,
        head_dim=getattr(first, "head_dim", None) or text.hidden_size // heads,
        intermediate=text.intermediate_size,
        tap_layers=spread_layers(taps, text.num_hidden_layers),
        block_size=block_size,
        mask_token_id=mask_token_id,
        context_window=context_window,
        rope_theta=float(rope.get("rope_theta") or 10_000.0),
        norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        embedding_scale=embedding_scale_of(model),
        chain=chain,
    )


def new_network(config: DFlashConfig, *, seed: int) -> DFlashNetwork:
    """Random weights, small enough that a layer adds little to what it is given and no token seems likely."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = DFlashNetwork(config)
        for name, parameter in network.named_parameters():
            if parameter.ndim == 2:
                scale = 1 / math.sqrt(2 * config.layers) if name.endswith(_ADDING) else 1
                nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[1]))
        nn.init.constant_(network.norm.weight, _UNDECIDED)
        if network.chain is not None:
            nn.init.zeros_(network.chain.out_proj.weight)  # neighbours say nothing at first
    return network


def deepened(network: DFlashNetwork, layers: int, *, seed: int) -> DFlashNetwork:
    """The same network with more layers, which gives the same draft tokens: those that are added, after the others,
    pass on what they are given.

    They learn from the first step on: what they would add is there, and counts nothing yet.
    """
    deeper = new_network(replace(network.config, layers=layers), seed=seed)
    state = {**deeper.state_dict(), **network.state_dict()}
    deeper.load_state_dict(state)
    for layer in deeper.layers[network.config.layers :]:
        for name, parameter in layer.named_parameters():
            if name.endswith(_ADDING):
                nn.init.zeros_(parameter)
    return deeper


def tap_scales(taps: Tensor, counts: Tensor) -> Tensor:
    """What brings each number of each tap to about 1: taps [N, T, taps, hidden], counts [N, T] → [taps, hidden].

    A few numbers of a hidden state are a hundred times the others and hardly change; a layer's first position can be a
    hundred times the rest. A drafter that sees them as they are learns little else. counts: which positions to measure.
    """
    chosen = taps[counts].float()
    return chosen.square().mean(0).add(1e-8).rsqrt()
