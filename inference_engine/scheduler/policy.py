"""Scheduling policy of continuous batching: which requests begin, which run, with how many tokens. Pure functions.

Owners take turns, and the Generates of one owner take turns: an owner with a hundred Generates gets as much as one with
a single Generate.

    begin   the owner with the fewest running Generates comes first; an owner with none running never waits for others
    step    decoding requests first, one token each, so that a long prefill never delays their next token. Beside them
            one chunk of prefill, or several short ones of at most the same total length. Without decoding requests as
            many chunks as fit. The owner that waited longest comes first

Candidates come in the order in which they were last served, longest ago first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could run, and the tokens it has for the step (1 while decoding, a chunk while prefilling).

    turn: the number of the last step that served its owner a request of this kind; smaller ones come first.
    """

    tokens: int
    is_prefilling: bool
    owner: str = ""
    turn: int = 0


def choose(
    candidates: Sequence[Candidate], *, step_tokens: int, max_batch: int, prefill_tokens_beside: int = 0
) -> list[int]:
    """Indexes of the candidates to run, at least one and at most `max_batch`.

    All tokens together stay within `step_tokens`, but for one chunk beside decoders. Further chunks join a step with
    decoders if prefills together have at most `prefill_tokens_beside` tokens: run one by one, each would cost a step.
    """
    if max_batch == 1:
        return _in_turn(candidates, range(len(candidates)))[:1]
    decodes = _in_turn(candidates, [index for index, one in enumerate(candidates) if not one.is_prefilling])
    prefills = _in_turn(candidates, [index for index, one in enumerate(candidates) if one.is_prefilling])
    # One place is kept for a prefill, else max_batch decoders would starve it.
    chosen = decodes[: max_batch - 1 if prefills else max_batch]
    if not prefills:
        return chosen
    tokens = sum(candidates[index].tokens for index in chosen)
    # One prefill always joins, however full the step is: a stream of new decoders must not starve it.
    for index in prefills[:1]:
        chosen.append(index)
        tokens += candidates[index].tokens
    most = len(decodes) + prefill_tokens_beside if decodes else step_tokens
    # Where several owners wait, no request passes an earlier one of its owner that does not fit: that would count as
    # the owner's turn, and the earlier one would never come first.
    has_turns = len({candidates[index].owner for index in prefills}) > 1
    passed_over: set[str] = set()
    for index in prefills[1:]:
        one = candidates[index]
        if one.owner in passed_over:
            continue
        if len(chosen) < max_batch and tokens + one.tokens <= most:
            chosen.append(index)
            tokens += one.tokens
        elif has_turns:
            passed_over.add(one.owner)
    return chosen


def _in_turn(candidates: Sequence[Candidate], indexes: Sequence[int]) -> list[int]:
    """The candidates `indexes`, round-robin over owners, the owner that was served longest ago first."""
    lines: dict[str, list[int]] = {}
    for index in indexes:
        lines.setdefault(candidates[index].owner, []).append(index)
    owners = sorted(lines.values(), key=lambda line: candidates[line[0]].turn)
    return [index for turn in zip_longest(*owners) for index in turn if index is not None]


def admit(waiting: Sequence[str], running: Mapping[str, int], *, most: int, most_per_owner: int) -> list[int]:
    """Indexes of the waiting requests to begin now, in this order.

    waiting: the owner of each, in order of arrival. running: how many of each owner run already. most: how many may run
    in total; beyond it, one of each owner that has none running. most_per_owner: 0 for no limit.
    """
    counts = Counter(running)
    lines: dict[str, deque[int]] = {}
    for index, owner in enumerate(waiting):
        lines.setdefault(owner, deque()).append(index)
    total, begun = sum(counts.values()), []
    while lines:
        owner = min(lines, key=lambda owner: (counts[owner], lines[owner][0]))
        if counts[owner] and total >= most:
            break  # every other owner has at least as many
        if most_per_owner and counts[owner] >= most_per_owner:
            break
        begun.append(lines[owner].popleft())
        counts[owner] += 1
        total += 1
        if not lines[owner]:
            del lines[owner]
    return begun


def places(owner: str, running: Mapping[str, int], *, most: int, most_per_owner: int) -> int:
    """How many more requests of `owner` could begin now, if other owners sent none."""
    own = running.get(owner, 0)
    left = max(most - sum(running.values()), 0 if own else 1)
    return max(0, min(left, most_per_owner - own) if most_per_owner else left)


def may_join(owner: str, counts: Mapping[str, int], *, most: int) -> bool:
    """May one more of `owner` join a line, of whose `most` places `counts` are taken?

    Where all are taken, an owner still gets its even share of them, and one at least: no owner keeps others out.
    """
    own = counts.get(owner, 0)
    owners = sum(count > 0 for count in counts.values()) + (not own)
    return not own or sum(counts.values()) < most or (own + 1) * owners <= most


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Latency targets in seconds; 0 for no target."""

    first_token_seconds: float = 0.0
    inter_token_seconds: float = 0.0


def chunk_beside_decoders(
    targets: Targets,
    *,
    pending: int,
    waited_seconds: float,
    least_tokens: int,
    segment_tokens: int,
    most_queries: int,
    seconds_of_chunk: float | None,
    tokens_in_time: int | None,
) -> int:
    """Most tokens of a prefill of `pending` tokens to run beside decoding requests.

    One segment; `most_queries` if segments would miss the target for the first token. Never so many that decoding
    requests miss their inter-token target, but at least `least_tokens`. seconds_of_chunk: what a step with a segment
    takes. tokens_in_time: how many tokens a step of `inter_token_seconds` holds. Both None while unknown.
    """
    tokens = segment_tokens
    if targets.first_token_seconds and seconds_of_chunk is not None:
        steps = -(-pending // segment_tokens)
        if waited_seconds + steps * seconds_of_chunk > targets.first_token_seconds:
            tokens = most_queries
    if targets.inter_token_seconds and tokens_in_time is not None:
        tokens = min(tokens, tokens_in_time)
    return max(least_tokens, tokens)


def cut(position: int, tokens: int, unit: int) -> int:
    """`tokens` from `position` on, or fewer, so that they end at a multiple of `unit` if they contain one."""
    end = (position + tokens) // unit * unit
    return end - position if end > position else tokens
