"""Which requests run in the next step, and how many rows each: a pure function.

Decoding requests come first, one row each, so that a long prefill never keeps others from their next token. What is
left of the row budget goes to prefills, a whole chunk each: one beside decoding requests, as many as fit otherwise.
Candidates come in the order in which they were last served, longest ago first, so everybody's turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could run: the rows it wants now (1 while decoding, a chunk while prefilling)."""

    rows: int
    is_prefilling: bool


def choose(candidates: Sequence[Candidate], *, step_rows: int, max_batch: int) -> list[int]:
    """Indexes of the candidates to run, at least one and at most `max_batch`.

    Rows together stay within `step_rows`, but for one chunk beside decoders."""
    if max_batch == 1:
        return [0] if candidates else []
    decodes = [index for index, candidate in enumerate(candidates) if not candidate.is_prefilling]
    prefills = [index for index, candidate in enumerate(candidates) if candidate.is_prefilling]
    # A place is kept for a prefill, else max_batch decoders would starve it.
    chosen = decodes[: max_batch - 1 if prefills else max_batch]
    rows = sum(candidates[index].rows for index in chosen)
    # One prefill always goes along, however full the step is: decoders that keep coming must not starve it.
    for index in prefills[:1]:
        chosen.append(index)
        rows += candidates[index].rows
    if not decodes:
        for index in prefills[1:max_batch]:
            if rows + candidates[index].rows <= step_rows:
                chosen.append(index)
                rows += candidates[index].rows
    return chosen
