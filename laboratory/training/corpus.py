"""A corpus of what the target itself says: the text a drafter learns from, batch by batch.

A draft is kept where it equals what the target says next, so a drafter has to know the target's words, not the world's.
Each batch is a function of the seed and its number. Between batches a call may stop; the next call goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from laboratory.training.corpus_lockstep import Written, write
from laboratory.training.corpus_prompts import Prompt, PromptSource
from laboratory.training.corpus_store import CorpusManifest, Text, add_texts, open_corpus

Report = Callable[[CorpusManifest, float], None]  # the corpus so far, tokens per second of the batch just written


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPlan:
    """tokens: stop when the corpus has as many. texts_at_once: how many are written together; length: ids of each, at
    most.

    turn_tokens: where a speaker goes on for longer, the turn is ended.
    """

    tokens: int
    texts_at_once: int
    length: int
    turn_tokens: int

    def recipe(self, source: PromptSource) -> dict[str, object]:
        documents = {kind: sum(map(len, found)) for kind, found in sorted(source.documents.items())}
        return {
            "rows": self.texts_at_once,
            "length": self.length,
            "turn_tokens": self.turn_tokens,
            "document_tokens": documents,
        }


def write_corpus(
    model: PreTrainedModel,
    source: PromptSource,
    plan: CorpusPlan,
    folder: Path,
    *,
    target_digest: str,
    stop_ids: Sequence[int],
    seconds: float,
    report: Report,
    now: Callable[[], float] = time.monotonic,
) -> CorpusManifest:
    """Write batches until there are `plan.tokens`, or until one more might take longer than `seconds` leave.

    model: loaded with attention=corpus_lockstep.ATTENTION. At least one batch is written if any is missing. Raises
    ModelError if the folder holds a corpus that this is no continuation of.
    """
    started = now()
    vocab_size = int(model.config.get_text_config().vocab_size)
    manifest = open_corpus(
        folder,
        CorpusManifest(
            target_digest=target_digest,
            kinds=source.kinds,
            seed=source.seed,
            vocab_size=vocab_size,
            recipe=plan.recipe(source),
        ),
    )
    longest = 0.0
    while manifest.tokens < plan.tokens and now() - started + longest <= seconds:
        began, before = now(), manifest.tokens
        prompts = source.batch(manifest.batches, plan.texts_at_once)
        written = write(
            model,
            prompts,
            chat=source.chat,
            stop_ids=stop_ids,
            length=plan.length,
            turn_tokens=plan.turn_tokens,
            seed=source.seed * 1_000_003 + manifest.batches,
        )
        manifest = add_texts(folder, manifest, [_text(*pair) for pair in zip(prompts, written, strict=True)])
        took = now() - began
        longest = max(longest, took)
        report(manifest, (manifest.tokens - before) / max(took, 1e-9))
    return manifest


def _text(prompt: Prompt, written: Written) -> Text:
    ids = written.token_ids.numpy().astype(np.uint32)
    return Text(ids, written.answers.numpy(), prompt.kind, prompt.is_held_out)
