"""Small models that recall, trained in minutes: a decoder of Qwen3's layers, and a hybrid of Qwen3.5's.

Recall emerges in short rows that are full of questions. Every stage reads longer ones, beside some of the stages
before. Matrices learn by Muon, the rest by AdamW; the loss is that of answers, and a little of all other text.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from laboratory.training.recall_text import COPY, END, KINDS, RecallText, Rows, Stage

VOCABULARY, POSITIONS = 1024, 2**17
_ROTATION = 1e8  # with this base a good third of a head's pairs turn by less than a radian in all positions
_GAIN = 1.4  # of queries and keys at first: logits reach what is surely more than the log of all positions
_OF_COPIES, _OF_TEXT = 0.5, 0.1  # weights of their loss, beside that of answers about facts
RATE, _OTHERS_RATE, _MOMENTUM = 0.02, 4e-3, 0.95
_WARM, _DECAY = 0.02, 0.5  # shares of the time
_RECENT = 16  # steps of a stage whose answers say whether it ends
_LEARNS = 0.3  # by chance a tenth
# Ids of a batch whose activations are kept for the way back; of more they are computed again.
_KEPT = {"qwen3": 2**17, "qwen3_5_text": 2**16}
_CHUNK = 64

Config: TypeAlias = Qwen3Config | Qwen3_5TextConfig


STAGES = (
    Stage(length=128, rows=512, share=0.8, until=0.25, enough=0.9),
    Stage(length=512, rows=128, share=0.8, until=0.35),
    Stage(length=2048, rows=32, share=0.6, until=0.45),
    Stage(length=8192, rows=8, share=0.4, until=0.55),
    Stage(length=32_768, rows=2, share=0.25, until=0.75),
    Stage(length=POSITIONS, rows=1, share=0.15, until=1.0, enough=2.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Of one step. right: the share of digits that were right in answers about facts, of the stage's last steps; kinds:
    of each of KINDS in this step."""

    steps: int
    seconds: float
    length: int
    loss: float
    right: float
    kinds: dict[str, float]

    @property
    def learns(self) -> bool:
        """Whether more digits are right than by chance."""
        return self.right > _LEARNS


# -- models -----------------------------------------------------------------------------------------------------------


def dense_config(*, layers: int = 14, hidden: int = 256, heads: int = 4) -> Qwen3Config:
    return Qwen3Config(**_shape(layers, hidden, heads))


def hybrid_config(*, layers: int = 12, hidden: int = 256, heads: int = 4) -> Qwen3_5TextConfig:
    linear = {f"linear_num_{part}_heads": heads for part in ("key", "value")}
    linear |= {f"linear_{part}_head_dim": hidden // heads for part in ("key", "value")}
    return Qwen3_5TextConfig(**_shape(layers, hidden, heads), **linear)


def _shape(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
        "max_position_embeddings": POSITIONS,
        "rope_theta": _ROTATION,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }


def new_model(config: Config, *, seed: int) -> PreTrainedModel:
    """With random weights in float32, on the CPU. No layer adds anything yet."""
    is_dense = isinstance(config, Qwen3Config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = (Qwen3ForCausalLM if is_dense else Qwen3_5ForCausalLM)(config)
        with torch.no_grad():
            for name, one in model.named_parameters():
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    one.fill_(_GAIN if is_dense else _GAIN - 1)  # norms of Qwen3.5 count from one
                elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    one.zero_()
                elif one.ndim == 2:
                    one.normal_(std=one.shape[1] ** -0.5)
    return model


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """A folder that is served as any other, its weights in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


def hidden_states(model: PreTrainedModel, ids: Tensor, places: Tensor) -> Tensor:
    """[rows, length, hidden], before the head. Rows are whole and causal, whatever their places leap over."""
    body: Any = model.model
    hidden = body.embed_tokens(ids)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    rotations = body.rotary_emb(hidden, places if isinstance(model, Qwen3ForCausalLM) else places[None])
    for layer in body.layers:
        through = partial(layer, position_embeddings=rotations, attention_mask=None, position_ids=places)
        is_kept = ids.numel() <= _KEPT[model.config.model_type] or not hidden.requires_grad
        hidden = through(hidden) if is_kept else checkpoint(through, hidden, use_reentrant=False)
    found: Tensor = body.norm(hidden)
    return found


# -- learning ---------------------------------------------------------------------------------------------------------


def train(
    model: PreTrainedModel,
    text: RecallText,
    stages: Sequence[Stage],
    *,
    seconds: float,
    seed: int,
    processes: int,
    device: str,
    rate: float = RATE,
    report: Callable[[Reading], object],
) -> Reading:
    """Learn until the time is over, on the device, or until it is plain that it does not: `learns` of the reading
    that is returned, the last one."""
    rng = random.Random(seed)
    steps, stage = 0, 0
    recent: deque[Tensor] = deque(maxlen=_RECENT)
    with faster_layers(), Rows(text, stages, seed=seed, processes=processes) as rows:
        rows.begin()
        optimizer = _Optimizer(model.to(device), rate)
        began = time.monotonic()
        while True:
            here = stage if stage == 0 or rng.random() < 0.6 else rng.randrange(stage)
            batch = [torch.from_numpy(part).to(device, non_blocking=True) for part in rows.next(here)]
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss, counts = _loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(min(1.0, (time.monotonic() - began) / seconds) if steps else 0.0)
            counts = counts.cpu()
            if not steps:
                began = time.monotonic()  # a GPU takes seconds for its first step
            steps += 1
            if here == stage:
                recent.append(counts[:, : KINDS.index(COPY)].sum(1))
            asked, found = sum(recent, torch.zeros(2)).tolist()
            reading = Reading(
                steps=steps,
                seconds=time.monotonic() - began,
                length=stages[here].length,
                loss=loss.item(),
                right=found / max(asked, 1),
                kinds={name: a / b for name, b, a in zip(KINDS, *counts.tolist(), strict=True) if b},
            )
            report(reading)
            along = reading.seconds / seconds
            if along >= 1 or (stage == 0 and along >= stages[0].until and not reading.learns):
                return reading
            knows = len(recent) == _RECENT and reading.right >= stages[stage].enough
            if stage < len(stages) - 1 and (knows or along >= stages[stage].until):
                stage += 1
                recent.clear()


def _loss_of(model: PreTrainedModel, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss to learn from, and [2, KINDS]: how many ids of answers were asked for, and how many were right."""
    ids, places, answers = (part.long() for part in batch)
    logits = model.lm_head(hidden_states(model, ids, places)[:, :-1]).float().flatten(0, 1)
    wanted, kinds = ids[:, 1:].flatten(), answers[:, 1:].flatten()
    each, copied = F.cross_entropy(logits, wanted, reduction="none"), KINDS.index(COPY) + 1
    of_facts = (kinds > 0) & (kinds != copied)
    loss = (each * of_facts).sum() / of_facts.sum().clamp(min=1)
    for weight, some in ((_OF_COPIES, kinds == copied), (_OF_TEXT, kinds == 0)):
        loss = loss + weight * (each * some).sum() / some.sum().clamp(min=1)
    is_right = logits.argmax(-1) == wanted
    of_kind = kinds == torch.arange(1, len(KINDS) + 1, device=kinds.device)[:, None]
    return loss, torch.stack([of_kind.sum(1), (of_kind & is_right).sum(1)])


class _Optimizer:
    """Muon for matrices, those of one shape together; AdamW for the rest."""

    def __init__(self, model: PreTrainedModel, rate: float) -> None:
        self._rate = rate
        shapes: dict[torch.Size, list[Tensor]] = {}
        others: list[Tensor] = []
        for name, one in model.named_parameters():
            (shapes.setdefault(one.shape, []) if one.ndim == 2 and "embed" not in name else others).append(one)
        self._alike = [(some, torch.zeros_like(torch.stack(some))) for some in shapes.values()]
        self._others = torch.optim.AdamW(others, lr=_OTHERS_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, along: float) -> None:
        """Rates rise, stay and fall with the time that has gone."""
        factor = min(1.0, along / _WARM + 1e-2, (1 - along) / _DECAY + 1e-2)
        for some, moments in self._alike:
            grads = torch.stack([one.grad for one in some if one.grad is not None])
            moments.lerp_(grads, 1 - _MOMENTUM)
            steps = _orthogonal(grads.lerp_(moments, _MOMENTUM)).to(moments.dtype)
            taller = max(1.0, steps.shape[1] / steps.shape[2]) ** 0.5
            torch._foreach_add_(some, list(steps.unbind()), alpha=-self._rate * taller * factor)
            for one in some:
                one.grad = None
        for group in self._others.param_groups:
            group["lr"] = _OTHERS_RATE * factor
        self._others.step()
        self._others.zero_grad(set_to_none=True)


def _orthogonal(grads: Tensor) -> Tensor:
    """Each of [n, rows, columns] with singular values of about 1 (Newton-Schulz, as in Muon)."""
    x = grads.bfloat16()
    if is_tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    found: Tensor = x.mT if is_tall else x
    return found


# -- the delta rule ---------------------------------------------------------------------------------------------------


@contextmanager
def faster_layers() -> Iterator[None]:
    """transformers' norms are many small steps, and its delta rule goes row by row through every chunk's triangle."""
    faster: list[tuple[Any, str, Any]] = [
        (modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta_rule),
        (modeling_qwen3_5, "causal_conv1d_fn", _convolved),
        (modeling_qwen3.Qwen3RMSNorm, "forward", lambda self, x: _norm(x, self.weight, self.variance_epsilon)),
        (modeling_qwen3_5.Qwen3_5RMSNorm, "forward", lambda self, x: _norm(x, 1 + self.weight, self.eps)),
    ]
    before = [getattr(owner, name) for owner, name, _ in faster]
    for owner, name, new in faster:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for (owner, name, _), old in zip(faster, before, strict=True):
            setattr(owner, name, old)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _convolved(x: Tensor, weight: Tensor, bias: None, *, activation: str, **_: Any) -> Tensor:
    """x [rows, channels, length], each channel by itself: libraries' gradients of that are slow."""
    assert bias is None and activation == "silu"
    padded, weight = F.pad(x, (weight.shape[1] - 1, 0)), weight.to(x.dtype)
    parts = [weight[:, tap, None] * padded[..., tap : tap + x.shape[2]] for tap in range(weight.shape[1])]
    return F.silu(sum(parts[1:], parts[0]))


def delta_rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """The gated delta rule from a state of zero: [rows, length, heads, width], in float32 within; g and beta are
    without width.

    Length is a multiple of a chunk. Every chunk's triangle is inverted at once, and states are a scan over chunks.
    """
    dtype = query.dtype
    with torch.autocast(query.device.type, enabled=False):
        rows, length, heads, width = query.shape
        chunk = (rows, length // _CHUNK, _CHUNK, heads)
        q, k, v = (part.float().view(*chunk, -1).permute(1, 0, 3, 2, 4) for part in (query, key, value))
        q, k = F.normalize(q, dim=-1) * width**-0.5, F.normalize(k, dim=-1)
        b = beta.float().view(chunk).permute(1, 0, 3, 2)[..., None]
        decay = g.float().view(chunk).permute(1, 0, 3, 2).cumsum(-1)
        between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        triangle = ((k * b) @ k.mT * between).tril(-1)
        # What each token writes, and what it takes from the state.
        solved = _Inverse.apply(triangle) @ torch.cat([v * b, k * b * decay[..., None].exp()], dim=-1)  # type: ignore[no-untyped-call]
        written, taken = solved.split((v.shape[-1], width), dim=-1)
        keys = (k * (decay[..., -1:] - decay)[..., None].exp()).mT
        kept = torch.eye(width, device=k.device) * decay[..., -1, None, None].exp() - keys @ taken
        states = _scan(kept, keys @ written)
        inside = (q @ k.mT * between).tril()
        out = (q * decay[..., None].exp()) @ states + inside @ (written - taken @ states)
        out = out.permute(1, 0, 3, 2, 4).reshape(rows, length, heads, -1)
    return out.to(dtype), None


class _Inverse(torch.autograd.Function):
    """Of 1 + n, n strictly lower triangular: blocks of 1, 2, 4 … rows, each from the two of half its size."""

    @staticmethod
    def forward(ctx: Any, n: Tensor) -> Tensor:
        found, places = torch.eye(n.shape[-1], device=n.device), torch.arange(n.shape[-1], device=n.device)
        for size in (2**power for power in range((n.shape[-1] - 1).bit_length())):
            block = places // size
            below = (block[:, None] == block + 1) & (block % 2 == 0)
            found = found - found @ (n * below) @ found
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = ctx.saved_tensors[0]
        return -(found.mT @ grad @ found.mT)


def _scan(kept: Tensor, new: Tensor) -> Tensor:
    """The states before each chunk: state ← kept @ state + new, from zero, in as many steps as doubling takes."""
    reach = 1
    while reach < len(new) - 1:
        new = torch.cat([new[:reach], new[reach:] + kept[reach:] @ new[:-reach]])
        kept = torch.cat([kept[:reach], kept[reach:] @ kept[:-reach]])
        reach *= 2
    return torch.cat([torch.zeros_like(new[:1]), new[:-1]])
