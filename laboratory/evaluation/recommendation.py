"""Which strategy to use, in plain words, from measured cells alone.

The fastest strategy whose answers were shown to be good enough for the task, within the memory that there is; of those
within noise of it, the one that holds the fewest bytes. What was not measured is not recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FULL = "full"
MEMORIES = (("as much as full needs", 1.0), ("half of what full needs", 0.5), ("a tenth of what full needs", 0.1))
FACTS = "finds facts anywhere in the context"
FLUENT = "goes on fluently; far facts may be lost"
MOST_PERPLEXITY = 1.02  # ÷ full, of the worst kind of text
MOST_DIFFERING = 0.03  # of the needles may be found unlike full: 1 in 40, 3 in 100
NO_STRATEGY = "none of those measured"
_LATE = 3  # times full's
_NOISE = 0.05  # of speed: within it, fewer bytes win


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A strategy at a length, with `batch` sessions decoding at once, as measured. None: not measured.

    kv_bytes: of a session, between Generates. resume_seconds: until a later Generate has its first token.
    differing: needles found unlike full, of `trials`. perplexity: ÷ full, of the worst kind of text.
    """

    strategy: str
    length: int
    batch: int = 1
    tokens_per_second: float
    kv_bytes: int
    resume_seconds: float = 0.0
    differing: int | None = None
    trials: int = 0
    perplexity: float | None = None

    @property
    def recalls(self) -> bool:
        if self.strategy == FULL:
            return True
        return self.differing is not None and self.trials > 0 and self.differing <= MOST_DIFFERING * self.trials

    @property
    def is_fluent(self) -> bool:
        return self.strategy == FULL or (self.perplexity is not None and self.perplexity <= MOST_PERPLEXITY)

    def was_tried(self, task: str) -> bool:
        return self.strategy == FULL or (self.perplexity is not None and (task == FLUENT or self.differing is not None))

    def serves(self, task: str) -> bool:
        return self.is_fluent and (task == FLUENT or self.recalls)


def candidates(
    cost_rows: Sequence[Mapping[str, Any]],
    needles: Sequence[Mapping[str, Any]],
    fidelities: Sequence[Mapping[str, Any]],
) -> list[Candidate]:
    """What records of the three experiments say of each strategy, length and batch; of several cells the worst."""
    recall: dict[tuple[str, int], tuple[int, int]] = {}
    for row in (row for needle in needles for row in needle["tables"]["against full"]):
        trials = row["both"] + row["only full"] + row["only it"] + row["neither"]
        place = (row["strategy"], row["length"])
        worst = recall.get(place, (0, trials))
        recall[place] = max(worst, (row["discordant"], trials), key=lambda one: one[0] / one[1])
    perplexity: dict[tuple[str, int], float] = {}
    for row in (row for fidelity in fidelities for row in fidelity["tables"]["fidelity"]):
        place = (row["strategy"], row["length"])
        perplexity[place] = max(perplexity.get(place, 0.0), row["perplexity ÷ full"])
    return [
        Candidate(
            strategy=row["strategy"],
            length=row["length"],
            batch=row["batch"],
            tokens_per_second=row["batch"] / row["token_seconds"],
            kv_bytes=row["kv_bytes"],
            resume_seconds=row["resume_seconds"],
            differing=recall[place][0] if (place := (row["strategy"], row["length"])) in recall else None,
            trials=recall[place][1] if place in recall else 0,
            perplexity=perplexity.get(place),
        )
        for row in cost_rows
    ]


def recommend(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """For each context, number of sessions, memory and task, the strategy to use and why: a table in plain words.

    The fastest that serves the task wins; of those within noise of it, the one that holds the fewest bytes. Where full
    was not measured, or nothing is that small, there is nothing to choose from, and no line.
    """
    table = []
    for length, batch in sorted({(candidate.length, candidate.batch) for candidate in candidates}):
        here = [candidate for candidate in candidates if (candidate.length, candidate.batch) == (length, batch)]
        full = next((candidate for candidate in here if candidate.strategy == FULL), None)
        if full is None:
            continue
        for words, share in MEMORIES:
            small = [one for one in here if one.kv_bytes <= share * full.kv_bytes]
            for task in (FACTS, FLUENT) if small else ():
                best = _best([one for one in small if one.serves(task)])
                table.append(
                    {
                        "context, tokens": length,
                        "sessions at once": batch,
                        "memory": words,
                        "task": task,
                        "strategy": best.strategy if best else NO_STRATEGY,
                        "because": _because(best, full, small, task),
                    }
                )
    return table


def _best(able: Sequence[Candidate]) -> Candidate | None:
    if not able:
        return None
    fastest = max(one.tokens_per_second for one in able)
    near = [one for one in able if one.tokens_per_second >= (1 - _NOISE) * fastest]
    return min(near, key=lambda one: (one.kv_bytes, one.strategy != FULL))


def _because(best: Candidate | None, full: Candidate, small: Sequence[Candidate], task: str) -> str:
    unknown = [one for one in small if not one.was_tried(task)]
    if best is None:
        return "what is that small was not shown to serve the task" if unknown else "what is that small fails the task"
    if best is full:
        if any(one.tokens_per_second > full.tokens_per_second for one in unknown):
            return "what was faster was not shown to serve the task"
        return "nothing that serves the task was faster, or as fast with fewer bytes"
    said = [
        f"{best.tokens_per_second / full.tokens_per_second:.2f} × full's speed",
        f"{best.kv_bytes / full.kv_bytes:.2f} × its bytes",
    ]
    if best.perplexity is not None:
        said.append(f"{best.perplexity:.3f} × its perplexity")
    if best.differing is not None:
        said.append(f"{best.differing} of {best.trials} needles found unlike full")
    if best.resume_seconds > _LATE * full.resume_seconds:
        said.append(f"but a later Generate begins after {best.resume_seconds:.2g} s, not {full.resume_seconds:.2g}")
    return ", ".join(said)
