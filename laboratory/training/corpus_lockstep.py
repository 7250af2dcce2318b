"""A model that writes many texts at once, all of the same length at every moment.

    text 0   system … user │ a question ■ assistant │ an answer ■ user │ …
    text 1   system … user   Explain how … assistant │ an answer …
    text 2   a piece of a document │ that goes on …
             └── every text gets one more id per step: given, or sampled

Because no text is ahead of another there is no padding and no mask: one step reads K and V that lie side by side, with
all queries of a KV head as the rows of one product. What is given and what is sampled is decided on the device, so a
step never waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from inference_engine.errors import ModelError
from inference_engine.models.mixers import WITHOUT_EFFECT
from laboratory.training.corpus_prompts import Chat, Prompt

ATTENTION = "kakeya_lockstep"

# Not cuDNN's: it makes a plan for every length it meets, and here each step is one longer.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class Written:
    """One text. answers: which ids the model gave where a session would have it answer."""

    token_ids: Tensor  # [n] int64
    answers: Tensor  # [n] bool


class Lockstep:
    """K and V of every text, layer after layer as they arrive: [B, Hkv, capacity, D]."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # positions before this forward
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep this forward's K and V, [B, Hkv, n, D]; returns all the layer has so far."""
        batch, heads, count, size = keys.shape
        if layer not in self._states:
            shape = (batch, heads, self.capacity, size)
            self._states[layer] = (keys.new_empty(shape), values.new_empty(shape))
        held = self._states[layer]
        end = self.length + count
        for states, new in zip(held, (keys, values), strict=True):
            states[:, :, self.length : end] = new
        return held[0][:, :, :end], held[1][:, :, :end]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    lockstep: Lockstep,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, n, D], key and value [B, Hkv, n, D], rotated; returns ([B, n, Hq, D], None)."""
    unknown = [
        name
        for name, given in others.items()
        if given is not None and given is not False and name not in WITHOUT_EFFECT
    ]
    if attention_mask is not None or dropout or unknown:
        raise ModelError(f"{type(module).__name__} gives attention what cannot be honoured here: {unknown or 'a mask'}")
    keys, values = lockstep.add(cast("int", module.layer_idx), key, value)
    batch, heads, count, size = query.shape
    if count == 1:
        first = max(0, keys.shape[2] - sliding_window) if sliding_window else 0
        grouped = query.reshape(batch, key.shape[1], -1, size)
        out = F.scaled_dot_product_attention(grouped, keys[:, :, first:], values[:, :, first:], scale=scaling)
        return out.reshape(batch, 1, heads, size), None
    assert not lockstep.length, "several ids at once are given only at the start"
    distance = torch.arange(count, device=query.device)[:, None] - torch.arange(count, device=query.device)
    visible = (distance >= 0) & (distance < (sliding_window or count))
    group = heads // key.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attend)


def write(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    chat: Chat | None,
    stop_ids: Sequence[int],
    length: int,
    turn_tokens: int,
    seed: int,
) -> list[Written]:
    """One text of at most `length` ids for each prompt; the same for the same arguments on the same machine.

    model: loaded with attention=ATTENTION. turn_tokens: where a speaker goes on for longer, the turn is ended.
    A text that is no chat ends with the first stop id.
    """
    texts = _Texts(prompts, chat, stop_ids, length=length, turn_tokens=turn_tokens, device=model.device)
    generator = torch.Generator(model.device).manual_seed(seed)
    lockstep = Lockstep(length)
    start = min(len(prompt.token_ids) for prompt in prompts)
    given = texts.token_ids[:, :start]
    with torch.inference_mode(), sdpa_kernel(_KERNELS):
        while True:
            count = given.shape[1]
            positions = torch.arange(lockstep.length, lockstep.length + count, device=model.device)[None]
            logits: Tensor = model(
                input_ids=given, position_ids=positions, use_cache=False, logits_to_keep=1, lockstep=lockstep
            ).logits
            lockstep.length += count
            given = texts.advance(lockstep.length, logits[:, -1].float(), generator)[:, None]
            if lockstep.length + 1 == length:
                return texts.written()


class _Texts:
    """The ids of all texts, and the speaker of each: 0 a user, 1 the assistant; 1 for a text that is no chat."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        chat: Chat | None,
        stop_ids: Sequence[int],
        *,
        length: int,
        turn_tokens: int,
        device: torch.device,
    ) -> None:
        count = len(prompts)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        if max(lengths) >= length:
            raise ModelError(f"a prompt of {max(lengths)} tokens leaves nothing to write in texts of {length}")
        ids = torch.zeros((count, length), dtype=torch.long)
        for index, prompt in enumerate(prompts):
            ids[index, : lengths[index]] = torch.tensor(prompt.token_ids)
        self.token_ids = ids.to(device)
        self._answers = torch.zeros((count, length), dtype=torch.bool, device=device)
        self._given = torch.tensor(lengths, device=device)
        self._chats = torch.tensor([prompt.speaker != "text" for prompt in prompts], device=device)
        self._speaker = torch.tensor([int(prompt.speaker != "user") for prompt in prompts], device=device)
        self._temperatures = torch.tensor([(p.user_temperature, p.temperature) for p in prompts], device=device)
        heads = ((), ()) if chat is None else (chat.before_user, chat.before_assistant)
        self._head_lengths = torch.tensor([len(head) for head in heads], device=device)
        widest = max(1, *map(len, heads))
        self._heads = torch.tensor([[*head, *[0] * (widest - len(head))] for head in heads], device=device)
        self._head_left = torch.zeros(count, dtype=torch.long, device=device)
        self._spoken = torch.zeros(count, dtype=torch.long, device=device)
        self._ends = torch.full((count,), length, device=device)
        self._stops = torch.tensor(stop_ids, device=device)
        self._end_of_turn = stop_ids[0] if chat is None else chat.end_of_turn
        self._turn_tokens = turn_tokens

    def advance(self, column: int, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Settle the ids at `column`; logits [B, V]. Returns them, [B]."""
        temperature = self._temperatures.gather(1, self._speaker[:, None])
        # Adding Gumbel noise and taking the largest is sampling; a greedy text adds none of it.
        noise = torch.empty_like(logits).exponential_(generator=generator).clamp_(min=1e-30).log_()
        sampled = (logits - temperature * noise).argmax(-1)
        is_given = column < self._given
        is_head = (self._head_left > 0) & ~is_given
        is_free = ~is_given & ~is_head
        is_cut = is_free & self._chats & (self._spoken >= self._turn_tokens)
        place = (self._head_lengths[self._speaker] - self._head_left).clamp(0, self._heads.shape[1] - 1)
        ids = torch.where(is_head, self._heads[self._speaker, place], sampled)
        ids = torch.where(is_cut, self._end_of_turn, ids)
        ids = torch.where(is_given, self.token_ids[:, column], ids)
        self.token_ids[:, column] = ids
        self._answers[:, column] = is_free & ~is_cut & (self._speaker == 1)
        has_ended = is_free & (torch.isin(ids, self._stops) | is_cut)
        self._ends = torch.where(has_ended & ~self._chats, self._ends.clamp(max=column + 1), self._ends)
        self._spoken = torch.where(is_free & ~has_ended, self._spoken + 1, 0)
        self._speaker = torch.where(has_ended & self._chats, 1 - self._speaker, self._speaker)
        turned = self._head_lengths[self._speaker]
        self._head_left = torch.where(has_ended & self._chats, turned, self._head_left - is_head.long())
        return ids

    def written(self) -> list[Written]:
        ids, answers = self.token_ids.cpu(), self._answers.cpu()
        ends = self._ends.tolist()
        return [Written(ids[index, :end].clone(), answers[index, :end].clone()) for index, end in enumerate(ends)]
