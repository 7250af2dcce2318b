"""Training of a DFlash drafter: the target reads texts of its own, the drafter learns to say what follows.

Each step draws blocks at random anchors of a batch of texts. The loss is cross-entropy on the masked places, the nearer
the heavier: exp(−(k−1)/γ) for the k-th, because a draft token counts only if all before it were right; for the same
reason a chain is given the token that was right. The target's own distribution there is a better teacher than the one
id it happened to draw; both are used. Only the drafter learns. Source: DFlash, arXiv 2602.06036; soft targets: Hinton
et al., arXiv 1503.02531.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kv_cache_proposer.dflash.network import DFlashNetwork
from kv_cache_proposer.dflash.target import TargetWords, words_of
from kv_cache_proposer.drafter_errors import DrafterError
from laboratory.training.drafter_blocks import Blocks, draw_blocks
from laboratory.training.drafter_data import TextSet
from laboratory.training.drafter_init import tap_scales
from laboratory.training.drafter_loss import head_loss
from laboratory.training.drafter_measure import draft_states
from laboratory.training.drafter_state import Progress, load_state, save_state
from laboratory.training.drafter_taps import read_taps

LOG = "progress.jsonl"

_WARMUP, _LAST_RATE = 0.04, 0.1
_BETAS, _CLIP = (0.9, 0.95), 1.0
_ALONE = 0.25  # of a chained drafter's places, that learn without the token before them


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterPlan:
    """steps, total_seconds: training ends with whichever comes first; the rate falls towards that end.

    batch: texts a step; anchors: blocks a text. decay: γ. teacher_share: of the target's distribution in what is
    learnt; the rest is the id that it drew.
    """

    steps: int
    total_seconds: float = math.inf
    batch: int = 32
    anchors: int = 128
    rate: float = 6e-4
    decay: float = 4.0
    teacher_share: float = 0.5
    weight_decay: float = 0.01
    seed: int = 0

    def share_done(self, progress: Progress) -> float:
        return min(1.0, max(progress.steps / self.steps, progress.seconds / self.total_seconds))

    def rate_at(self, share: float) -> float:
        if share < _WARMUP:
            return self.rate * max(share / _WARMUP, 0.01)
        fall = (share - _WARMUP) / (1 - _WARMUP)
        return self.rate * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * fall)))


@dataclass(frozen=True, slots=True)
class Reading:
    """Means since the last one. accepted: draft tokens that would have been kept, of B − 1.

    tokens: of text, over all.
    """

    steps: int
    seconds: float
    tokens: int
    loss: float
    accepted: float
    rate: float


Report = Callable[[Reading, float], None]  # and tokens of text per second since the last


def train(
    model: PreTrainedModel,
    network: DFlashNetwork,
    texts: TextSet,
    plan: DrafterPlan,
    folder: Path,
    *,
    seconds: float,
    report: Report,
    begins_ready: bool = False,
    every: int = 25,
    now: Callable[[], float] = time.monotonic,
) -> Progress:
    """Train for at most `seconds` more, from where the state in `folder` stands, and leave the state there.

    network: on the model's device, in float32; it is changed in place and is ready for use afterwards. begins_ready:
    it is so before, too: it was trained, and reads taps as they are. Raises DrafterError for a state of
    another plan or of other texts, or a loss that is not finite; the state before the call stays then.
    """
    trainer = _Trainer(model, network, texts, plan)
    if begins_ready:
        trainer.take_scales_out()
    stated = {
        "plan": {**asdict(plan), "total_seconds": str(plan.total_seconds)},
        "network": asdict(network.config),
        "texts": texts.digest(),
    }
    progress = load_state(folder, network, trainer.optimizer, stated)
    if progress.is_finished:
        trainer.take_scales_in()
        return progress
    before, began = progress, now()
    readings: list[Reading] = []
    sums, last = torch.zeros(2, device=model.device), began
    while True:
        sums += trainer.step(progress.steps, plan.rate_at(plan.share_done(progress)))
        progress = Progress(progress.steps + 1, before.seconds + now() - began)
        is_over = plan.share_done(progress) >= 1.0
        is_stopped = is_over or now() - began >= seconds
        if is_stopped or progress.steps % every == 0:
            taken = progress.steps - max(before.steps, (progress.steps - 1) // every * every)
            loss, accepted = (sums / taken).tolist()
            progress = Progress(progress.steps, before.seconds + now() - began, is_over)
            if not math.isfinite(loss):
                raise DrafterError(f"the loss is {loss} after {progress.steps} steps; train with a lower --rate")
            tokens = progress.steps * trainer.step_tokens
            rate = plan.rate_at(plan.share_done(progress))
            readings.append(Reading(progress.steps, progress.seconds, tokens, loss, accepted, rate))
            report(readings[-1], taken * trainer.step_tokens / max(now() - last, 1e-9))
            last = now()
            sums.zero_()
        if is_stopped:
            break
    save_state(folder, network, trainer.optimizer, stated, progress)
    with (folder / LOG).open("a", encoding="utf-8") as log:
        log.writelines(json.dumps(asdict(reading)) + "\n" for reading in readings)
    trainer.take_scales_in()
    return progress


def read_log(folder: Path) -> list[Reading]:
    lines = (folder / LOG).read_text(encoding="utf-8").splitlines()
    return [Reading(**json.loads(line)) for line in lines]


class _Trainer:
    def __init__(self, model: PreTrainedModel, network: DFlashNetwork, texts: TextSet, plan: DrafterPlan) -> None:
        self._model, self._network, self._texts, self._plan = model, network, texts, plan
        self._words: TargetWords = words_of(model)
        head = getattr(self._words.head, "weight", None)
        if not isinstance(head, Tensor) or getattr(self._words.head, "bias", None) is not None:
            raise DrafterError(
                f"the head of {type(model).__name__} is not one matrix; a drafter cannot be trained on it"
            )
        self._head = head.detach()
        is_bfloat16 = model.dtype == torch.bfloat16
        self._autocast = torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=is_bfloat16)
        matrices = [one for one in network.parameters() if one.ndim == 2]
        vectors = [one for one in network.parameters() if one.ndim != 2]
        groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=plan.rate, betas=_BETAS, fused=model.device.type == "cuda" or None
        )
        self.step_tokens = min(plan.batch, len(texts)) * texts.length
        # The k-th draft token counts only if all before it were right.
        places = torch.arange(network.config.block_size - 1, device=model.device)
        self._weights = torch.exp(-places / plan.decay)
        first = texts.step(0, plan.batch, plan.seed).to(model.device)
        self._tap_scales = tap_scales(read_taps(model, first.token_ids, network.config.tap_layers)[0], first.answers)

    def take_scales_in(self) -> None:
        """Let the network read taps as they are: while it learns, they are scaled for it."""
        with torch.no_grad():
            self._network.fc.weight.mul_(self._tap_scales.flatten())

    def take_scales_out(self) -> None:
        with torch.no_grad():
            self._network.fc.weight.div_(self._tap_scales.flatten())

    def step(self, index: int, rate: float) -> Tensor:
        """One update. Returns the loss and the mean of accepted draft tokens, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        texts = self._texts.step(index, self._plan.batch, self._plan.seed).to(self._model.device)
        generator = torch.Generator(self._model.device).manual_seed(self._plan.seed * 1_000_003 + index)
        config = self._network.config
        blocks = draw_blocks(texts, count=self._plan.anchors, block_size=config.block_size, generator=generator)
        taps, last = read_taps(self._model, texts.token_ids, config.tap_layers)
        with self._autocast:
            states = draft_states(self._network, self._words, texts, blocks, taps * self._tap_scales.to(taps.dtype))
            states = self._chained(states, blocks, generator)
        weights = self._weights * blocks.is_learnt
        loss, is_right = head_loss(
            states.reshape(-1, config.hidden),
            self._head,
            blocks.targets.flatten(),
            (weights / weights.sum().clamp(min=1)).flatten(),
            teacher=_teacher(last, blocks) if self._plan.teacher_share else None,
            teacher_share=self._plan.teacher_share,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), _CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.detach(), _mean_accepted(blocks, is_right)])

    def _chained(self, states: Tensor, blocks: Blocks, generator: torch.Generator) -> Tensor:
        """States that know the token before them, most of them: alone, a place has to know its likeliest few, too."""
        chain, config = self._network.chain, self._network.config
        if chain is None:
            return states
        later = states[:, :, 1:]
        known = chain(later, self._words.embed(blocks.targets[:, :, :-1], config.embedding_scale))
        draws = torch.rand(later.shape[:3], generator=generator, device=states.device)
        return torch.cat([states[:, :, :1], torch.where(draws[..., None] < _ALONE, later, known)], dim=2)


def _teacher(last: Tensor, blocks: Blocks) -> Tensor:
    """The target's hidden states from which each place of each block was drawn: [N · A · (B − 1), hidden]."""
    places = blocks.positions().view(*blocks.anchors.shape, -1)[..., :-1].clamp(max=last.shape[1] - 1).flatten(1)
    return last.gather(1, places[..., None].expand(-1, -1, last.shape[2])).flatten(0, 1)


def _mean_accepted(blocks: Blocks, is_right: Tensor) -> Tensor:
    whole = blocks.is_learnt.all(-1)
    accepted = is_right.view(blocks.targets.shape).long().cumprod(-1).sum(-1)
    return (accepted * whole).sum() / whole.sum().clamp(min=1)
