"""The network of a DFlash drafter.

    taps of a token ── fc ── norm ── one context vector ── k_proj, v_proj of every layer ── entries (K, V)
                                                                                             │ read by
    [last token, MASK, MASK, …] ── target's embedding ── layers ── norm ── (chain) ── target's head ── the draft tokens

Layers are those of Qwen3 (norm of each query and key head before rotation). Queries come from the block alone; keys and
values from the context and the block, with no causal mask within the block, unless the configuration has a window or a
causal mask for a layer. A token's entries depend only on its own taps, so they are computed once and cached. Parameters
are named as in published checkpoints; these have no chain.
Source: DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache_proposer.dflash.drafter_config import DFlashConfig

Entries = tuple[Tensor, Tensor]  # K, rotated, and V: [N, Hkv, S, D] each
Angles = tuple[Tensor, Tensor]  # cos, and sin with the sign of what it adds: [N, 1, S, D] each


class RMSNorm(nn.Module):
    """Root mean square normalisation, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        if states.dtype == self.weight.dtype:
            return F.rms_norm(states, self.weight.shape, self.weight, self.eps)
        # In training the weights have a wider dtype than the states.
        return F.rms_norm(states.float(), self.weight.shape, self.weight.float(), self.eps).to(states.dtype)


class LayerSizes(Protocol):
    """What the layers of drafters are made by."""

    @property
    def hidden(self) -> int: ...
    @property
    def query_heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...


class DrafterAttention(nn.Module):
    def __init__(self, config: LayerSizes, *, inputs: int | None = None, norms_heads: bool = True) -> None:
        """inputs: numbers of a state that it reads; None: those that it gives. norms_heads: as Qwen3 does."""
        super().__init__()
        inputs = inputs or config.hidden
        self.head_dim = config.head_dim
        self.group = config.query_heads // config.kv_heads
        self.q_proj = nn.Linear(inputs, config.query_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.query_heads * config.head_dim, config.hidden, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.norm_eps) if norms_heads else nn.Identity() for _ in range(2)
        )

    def entries(self, states: Tensor, angles: Angles) -> Entries:
        """K and V of states [N, S, hidden]."""
        return rotate(self.k_norm(self._split(self.k_proj(states))), angles), self._split(self.v_proj(states))

    def forward(self, states: Tensor, angles: Angles, context: Entries, mask: Tensor) -> Tensor:
        own = self.entries(states, angles)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        return self.attend(states, angles, (keys, values), mask)

    def attend(self, states: Tensor, angles: Angles, entries: Entries, mask: Tensor) -> Tensor:
        """entries: all that may be read, those of `states` among them."""
        queries = rotate(self.q_norm(self._split(self.q_proj(states))), angles)
        keys, values = entries
        if mask.shape[2] == 1:  # the same for every query, so all that share keys are one head's
            together = queries.reshape(*keys.shape[:2], -1, self.head_dim)
            # Few queries of few heads: products over all keys at once are faster than one fused kernel.
            scores = torch.add(mask, together @ keys.transpose(-1, -2), alpha=self.head_dim**-0.5)
            out = scores.softmax(-1) @ values
            heads = out.view(*keys.shape[:2], self.group, -1, self.head_dim).permute(0, 3, 1, 2, 4)
        else:
            keys, values = keys.repeat_interleave(self.group, dim=1), values.repeat_interleave(self.group, dim=1)
            heads = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(1, 2)
        projected: Tensor = self.o_proj(heads.flatten(2))
        return projected

    def _split(self, states: Tensor) -> Tensor:
        """[N, S, H · D] → [N, H, S, D]."""
        return states.view(*states.shape[:-1], -1, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, config: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class DrafterLayer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, states: Tensor, angles: Angles, context: Entries, mask: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), angles, context, mask)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Chain(nn.Module):
    """Conditions a place on the draft token before it, which the layers, computing all places at once, cannot do.

    Adding it to a place's state adds a score to each pair of neighbours: a bigram model that the state steers.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.chain, bias=False)
        self.word_proj = nn.Linear(config.hidden, config.chain, bias=False)
        self.out_proj = nn.Linear(config.chain, config.hidden, bias=False)

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        """States of places [..., hidden], as the head takes them; before: embeddings of the tokens before them."""
        out: Tensor = states + self.out_proj(F.silu(self.gate_proj(states)) * self.word_proj(before))
        return out


class DFlashNetwork(nn.Module):
    """Its own weights only: the embedding and the head are the target's and stay outside."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_layers) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = RMSNorm(config.hidden, config.norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.chain = Chain(config) if config.chain else None
        self._rotation = PlainRotation(config.head_dim, config.rope_theta)

    def context(self, taps: Tensor, positions: Tensor) -> list[Entries]:
        """Every layer's K and V of tokens: taps [N, S, taps, hidden], positions [N, S] absolute."""
        vectors = self.hidden_norm(self.fc(taps.flatten(2)))
        angles = self.angles(positions)
        return [layer.self_attn.entries(vectors, angles) for layer in self._layers()]

    def forward(
        self,
        block: Tensor,
        positions: Tensor,
        context: Sequence[Entries],
        mask: Tensor,
        held: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states of blocks [N, T, hidden], of embeddings, at `positions` [N, T]; before any chain.

        mask: [N or 1, 1, T or 1, S + T], what may be seen of context and block: bool. held: [N, S], positions of the
        context, which layers with a window need.
        """
        angles = self.angles(positions)
        states = block
        masks = {
            reach: additive(self._narrowed(mask, positions, held, *reach), block.dtype)
            for reach in dict.fromkeys(self.config.reaches)
        }
        for layer, entries, reach in zip(self._layers(), context, self.config.reaches, strict=True):
            states = layer(states, angles, entries, masks[reach])
        out: Tensor = self.norm(states)
        return out

    @staticmethod
    def _narrowed(mask: Tensor, positions: Tensor, held: Tensor | None, window: int, is_causal: bool) -> Tensor:
        """What a layer sees of `mask`: with a window, what is fewer positions away; if it is causal, nothing behind."""
        if not window and not is_causal:
            return mask
        if held is None:
            raise ValueError("layers that see less need the positions of their context")
        away = positions[:, :, None] - torch.cat([held, positions], dim=1)[:, None]  # [N, T, S + T]
        seen = away >= 0 if is_causal else torch.ones_like(away, dtype=torch.bool)
        if window:
            seen = seen & (away.abs() < window)
        return mask & seen[:, None]

    def angles(self, positions: Tensor) -> Angles:
        return self._rotation.angles(positions, self.norm.weight.dtype)

    def _layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask for all queries as it is added to scores: what takes a bool makes it so again in every layer."""
    if mask.shape[2] != 1:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


class PlainRotation:
    """RoPE with one base, and no scaling."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._turns: Tensor | None = None

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """In float64 until the cosine: far positions keep exact distances. positions: [N, S]."""
        if self._turns is None or self._turns.device != positions.device:
            # Once, where it is used: a buffer would be rounded with the weights.
            exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float64, device=positions.device)
            self._turns = self._theta ** -(exponents / self._head_dim)
        angle = positions[:, None, :, None] * self._turns
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(states: Tensor, angles: Angles) -> Tensor:
    """states [N, H, S, D], rotated by their positions' angles; dimension i turns with i + D/2."""
    cos, sin = (part.to(states.dtype) for part in angles)
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, dims=-1), sin)
