"""Calibration text: what the model says to itself, calls of tools, several languages, and files or installed text.

Of every kind a share, for what calibration never saw is restored worst. Nothing that is evaluated on is among it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from inference_engine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from laboratory.evaluation.models import Target

T = TypeVar("T", str, list[int])

_log = logging.getLogger(__name__)

# Of the tokens; prose and code, or the user's own files, are the rest.
_CONVERSATION, _TOOL_CALLS, _LANGUAGES = 0.25, 0.1, 0.1
_TURNS = 6
_LONGEST = 2048  # tokens taken of one text, from its middle


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Token ids of texts by kind."""

    kinds: dict[str, list[list[int]]]

    def tokens(self) -> dict[str, int]:
        return {kind: sum(map(len, texts)) for kind, texts in self.kinds.items()}

    def sequences(self, tokens: int, length: int) -> Tensor:
        """[n, length]: the texts one after another. Raises ConfigError if they do not fill two sequences."""
        import torch

        ids = [token for texts in self.kinds.values() for text in texts for token in text][:tokens]
        count = len(ids) // length
        if count < 2:
            raise ConfigError(f"the text has {len(ids)} tokens, at least {2 * length} are needed")
        return torch.tensor(ids[: count * length]).view(count, length)


def conversations_in(tokens: int, length: int) -> int:
    """How many conversations of `length` tokens are in `tokens` of text."""
    return max(1, int(tokens * _CONVERSATION) // length)


def gather(target: Target, *, tokens: int, length: int, files: Sequence[Path], seed: int) -> CalibrationText:
    """About `tokens` of it; conversations of `length` each. Raises ConfigError for files that cannot be read."""
    from laboratory.training.openings import converse

    tokenizer = target.tokenizer
    found: dict[str, list[list[int]]] = {}
    if target.can_chat:
        found["conversation"] = converse(
            target.engine,
            tokenizer,
            stop_ids=target.stop_ids,
            count=conversations_in(tokens, length),
            turns=_TURNS,
            tokens=length,
            seed=seed,
        )
    return _with_plain(found, tokenizer, tokens=tokens, files=files, seed=seed)


def gather_plain(tokenizer: Any, *, tokens: int, files: Sequence[Path], seed: int) -> CalibrationText:
    """The same without conversations: no engine is needed. Raises ConfigError for files that cannot be read."""
    return _with_plain({}, tokenizer, tokens=tokens, files=files, seed=seed)


def _with_plain(
    found: dict[str, list[list[int]]], tokenizer: Any, *, tokens: int, files: Sequence[Path], seed: int
) -> CalibrationText:
    from laboratory.evaluation.haystack import calibration_texts
    from laboratory.training.made_text import paragraphs, tool_calls

    found["tool calls"] = _take(tokenizer, tool_calls(seed), int(tokens * _TOOL_CALLS))
    found["languages"] = _take(tokenizer, paragraphs(seed), int(tokens * _LANGUAGES))
    rest = tokens - sum(len(ids) for part in found.values() for ids in part)
    if files:
        found["files"] = _share(tokenizer, [*read(files)], rest)
        if (given := sum(map(len, found["files"]))) < rest:
            _log.warning(
                "the files have %d of %d tokens that were asked of them, so calls of tools and languages count for "
                "more: name longer files, or ask for fewer --tokens",
                given,
                rest,
            )
    else:
        for kind in ("prose", "code"):
            found[kind] = _take(tokenizer, iter(_mixed(calibration_texts(kind), seed)), rest // 2)
    return CalibrationText(found)


def _mixed(texts: Sequence[str], seed: int) -> list[str]:
    mixed = list(texts)
    random.Random(seed).shuffle(mixed)
    return mixed


def read(files: Sequence[Path]) -> Iterator[str]:
    """The text of each. Raises ConfigError for one that cannot be read."""
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {file}: cannot be read as UTF-8 text: {error}") from error


def _take(tokenizer: Any, texts: Iterator[str], count: int) -> list[list[int]]:
    """Token ids of the texts until there are `count`, or no more texts. Long texts give a stretch of their middle."""
    found: list[list[int]] = []
    for text in texts:
        found.append(_middle(tokenizer.encode(text, add_special_tokens=False), _LONGEST))
        count -= len(found[-1])
        if count <= 0:
            break
    return found


def _share(tokenizer: Any, texts: Sequence[str], count: int) -> list[list[int]]:
    """As many tokens of each text, from its middle; what a short one lacks, the others give."""
    found: list[list[int]] = []
    for place, ids in enumerate(sorted((tokenizer.encode(text, add_special_tokens=False) for text in texts), key=len)):
        found.append(_middle(ids, count // (len(texts) - place)))
        count -= len(found[-1])
    return found


def _middle(whole: T, length: int) -> T:
    start = max(0, (len(whole) - length) // 2)
    return whole[start : start + length]
