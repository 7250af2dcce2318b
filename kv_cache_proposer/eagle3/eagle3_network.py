"""The network of an EAGLE-3 drafter: one decoder layer, run once for each draft token.

    hidden states of p, of three layers ── fc ── fused ─┐
    embedding of the token at p + 1 ────────────────────┴─ norms ── layer ── state of p ── norm ── lm_head ── token
                                                                               │                       of p + 2, drafted
    embedding of the token of p + 2 ────────────────────┐                      │
                                         state of p ────┴─ norms ── layer ── state of p + 1 ── …

The layer is Llama's, but its queries, keys and values are made of twice as many numbers. An entry (K, V) of p is made
of the target's hidden states of p and of the token after it, so it is computed once and cached. `lm_head` scores a part
of the vocabulary, whose ids `d2t` gives as distances: id = place + d2t[place]. Parameters are named as in published
checkpoints, which call the layer `layers.0` or `midlayer`.

Only chains are drafted: the likeliest token after each, no tree of alternatives.

Sources: EAGLE-3, arXiv 2503.01840; `eagle/model/cnets.py` of SafeAILab/EAGLE; `models/llama_eagle3.py` of vLLM and of
SGLang; `models/eagle3/` of vllm-project/speculators, whose are the three ways to place a norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from kv_cache_proposer.dflash.drafter_config import MOST, are_layers
from kv_cache_proposer.dflash.network import Angles, DrafterAttention, Entries, Mlp, PlainRotation, RMSNorm
from kv_cache_proposer.drafter_errors import DrafterError


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config:
    """hidden, target_hidden: numbers of a state of the drafter's, and of the target's. vocabulary: the target's.

    draft_vocabulary: ids that it can draft. tap_layers: the target's layers whose outputs it sees, ascending. longest:
    most tokens of a draft. context_window: positions before the draft that it may look at. has_embedding: of its own,
    not the target's.

    norms_taps: are a token's hidden states normed together before `fc`? norms_residual: is what the layer adds to the
    fused state as it was normed? norms_output: is the state that the next token is drafted from the normed one?
    """

    hidden: int
    target_hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    draft_vocabulary: int
    tap_layers: tuple[int, ...]
    longest: int
    context_window: int
    rope_theta: float
    norm_eps: float
    has_embedding: bool = False
    norms_taps: bool = False
    norms_residual: bool = False
    norms_output: bool = False

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "tap_layers":
                is_right = are_layers(value)
            elif isinstance(spec.default, bool):
                is_right = isinstance(value, bool)
            elif spec.name in ("rope_theta", "norm_eps"):
                is_right = isinstance(value, (int, float)) and 0 < value < math.inf
            else:
                is_right = type(value) is int and 0 < value <= MOST
            if not is_right:
                raise DrafterError(f"an EAGLE-3 drafter's {spec.name} cannot be {value!r}")
        if self.query_heads % self.kv_heads or self.head_dim % 2:
            raise DrafterError(
                f"a drafter needs a multiple of its {self.kv_heads} K/V heads as query heads and an even head_dim, "
                f"got {self.query_heads} and {self.head_dim}"
            )
        if self.draft_vocabulary > self.vocabulary:
            raise DrafterError(f"a drafter cannot draft {self.draft_vocabulary} of {self.vocabulary} ids")


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norms_residual = config.norms_residual
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = DrafterAttention(config, inputs=2 * config.hidden, norms_heads=False)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config)

    def inputs(self, embedded: Tensor, states: Tensor) -> Tensor:
        """[N, S, 2 · hidden], of which queries and entries are made."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)

    def forward(self, inputs: Tensor, states: Tensor, angles: Angles, entries: Entries, mask: Tensor) -> Tensor:
        """inputs: those of `states`, whose entries are among `entries`."""
        residual = inputs[..., states.shape[-1] :] if self.norms_residual else states
        states = residual + self.self_attn.attend(inputs, angles, entries, mask)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Eagle3Network(nn.Module):
    """Its own weights: with its own embedding where it was trained with one, else with that of the target outside."""

    draft_ids: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        taps = len(config.tap_layers) * config.target_hidden
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden) if config.has_embedding else None
        self.input_norm = RMSNorm(taps, config.norm_eps) if config.norms_taps else None
        self.fc = nn.Linear(taps, config.hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.draft_vocabulary, bias=False)
        # Of each place of `lm_head`.
        self.register_buffer("draft_ids", torch.arange(config.draft_vocabulary), persistent=False)
        self._rotation = PlainRotation(config.head_dim, config.rope_theta)

    @property
    def layer(self) -> Eagle3Layer:
        (layer,) = self.layers
        assert isinstance(layer, Eagle3Layer)
        return layer

    def fuse(self, taps: Tensor) -> Tensor:
        """Hidden states [..., taps, target_hidden] → [..., hidden]."""
        flat = taps.flatten(-2)
        fused: Tensor = self.fc(flat if self.input_norm is None else self.input_norm(flat))
        return fused

    def entries(self, embedded: Tensor, states: Tensor, positions: Tensor) -> Entries:
        """K and V of positions [N, S]: of their states and the embeddings of the tokens after them, [N, S, hidden]."""
        return self.layer.self_attn.entries(self.layer.inputs(embedded, states), self.angles(positions))

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, context: Entries, mask: Tensor
    ) -> tuple[Tensor, Tensor, Entries]:
        """Scores [N, 1, draft_vocabulary] of the tokens two positions on, states to go on from [N, 1, hidden], and the
        context with one entry more. embedded, states, positions: as of `entries`, S = 1.

        mask: [N, 1, 1, S + 1], added to scores.
        """
        layer, angles = self.layer, self.angles(positions)
        inputs = layer.inputs(embedded, states)
        own = layer.self_attn.entries(inputs, angles)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        states = layer(inputs, states, angles, (keys, values), mask)
        normed = self.norm(states)
        return self.lm_head(normed), normed if self.config.norms_output else states, (keys, values)

    def angles(self, positions: Tensor) -> Angles:
        return self._rotation.angles(positions, self.norm.weight.dtype)
