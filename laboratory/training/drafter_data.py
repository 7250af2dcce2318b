"""Texts of a corpus as batches: every text once an epoch, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kv_cache_proposer.drafter_errors import DrafterError
from laboratory.training.corpus_store import Text
from laboratory.training.drafter_blocks import Texts

_MULTIPLE = 8  # attention kernels need each row of scores to begin at an aligned address


@dataclass(frozen=True, slots=True)
class TextSet:
    """Texts one after another. length: what batches are padded to."""

    token_ids: NDArray[np.uint32]
    answers: NDArray[np.bool_]
    starts: NDArray[np.int64]  # of each text, and the end of the last
    length: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def digest(self) -> str:
        """SHA-256 of all texts, in their order."""
        reported = hashlib.sha256()
        for part in (self.token_ids, self.answers, self.starts):
            reported.update(np.ascontiguousarray(part).data)
        return reported.hexdigest()

    def step(self, index: int, count: int, seed: int) -> Texts:
        """The batch of training step `index`."""
        count = min(count, len(self))
        per_epoch = len(self) // count
        epoch, place = divmod(index, per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(self))
        return self.batch(order[place * count : (place + 1) * count].tolist())

    def batches(self, count: int) -> Iterator[Texts]:
        """All texts, in order."""
        for first in range(0, len(self), count):
            yield self.batch(range(first, min(first + count, len(self))))

    def batch(self, places: Sequence[int]) -> Texts:
        token_ids = torch.zeros((len(places), self.length), dtype=torch.long)
        answers = torch.zeros((len(places), self.length), dtype=torch.bool)
        for index, place in enumerate(places):
            own = slice(int(self.starts[place]), int(self.starts[place + 1]))
            count = own.stop - own.start
            token_ids[index, :count] = torch.from_numpy(self.token_ids[own].astype(np.int64))
            answers[index, :count] = torch.from_numpy(self.answers[own])
        return Texts(token_ids, answers)


def text_set(texts: Iterable[Text]) -> TextSet:
    """Raises DrafterError if there is nothing to learn in them."""
    found = [text for text in texts if text.answers[1:].any()]
    if not found:
        raise DrafterError("there are no texts to learn from; write more with `kakeya train corpus`")
    lengths = [len(text.token_ids) for text in found]
    return TextSet(
        token_ids=np.concatenate([text.token_ids for text in found]),
        answers=np.concatenate([text.answers for text in found]),
        starts=np.cumsum([0, *lengths]),
        length=-(-max(lengths) // _MULTIPLE) * _MULTIPLE,
    )


def unused_id(texts: Iterable[Text], vocab_size: int) -> int:
    """The lowest token id that no text contains. Raises DrafterError if they contain all."""
    is_used = np.zeros(vocab_size, dtype=np.bool_)
    for text in texts:
        is_used[text.token_ids] = True
    if is_used.all():
        raise DrafterError("the texts contain every id of the model; say which is the mask with --mask-token-id")
    return int(np.argmin(is_used))
