"""The report of a load: a table for the terminal, values and images for a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from laboratory.evaluation import record
from laboratory.load.phases import Played

_SHOWN = (
    ("first_token_asked", "first token, from the call"),
    ("first_token", "first token, from when it was due"),
    ("gap", "gap"),
    ("turn", "turn"),
    ("behind", "due, and the turn before not over"),
    ("fork", "fork"),
    ("refusal", "refusal"),
)


def values(played: Sequence[Played]) -> dict[str, dict[str, Any]]:
    """Values of a record. Goodput is sampled by second; a percentile is one number."""
    found: dict[str, dict[str, Any]] = {}
    goodputs = {}
    for phase in played:
        name, samples = f"{phase.load:g}x", phase.samples
        found[f"goodput_{name}"] = record.summarize(samples.goodput(phase.seconds), "tokens/s")
        goodputs[phase.load] = sum(samples.goodput(phase.seconds)) / int(phase.seconds)
        for kind, percents in samples.percentiles().items():
            for percent, seconds in percents.items():
                found[f"{kind}_{percent}_{name}"] = record.exact(1e3 * seconds, "ms")
        found[f"turns_due_{name}"] = record.exact(samples.due, "turns")
        found[f"turns_finished_{name}"] = record.exact(samples.finished, "turns")
        found[f"turns_refused_{name}"] = record.exact(samples.refused.total(), "turns")
        found[f"turns_failed_{name}"] = record.exact(samples.failed.total(), "turns")
        if len(phase.parts) > 1:
            least = min((part.received / part.fair for part in phase.parts if part.fair), default=0.0)
            found[f"least_received_over_fair_part_{name}"] = record.exact(least, "ratio")
    peak = max(goodputs.values())
    for load, goodput in goodputs.items():
        found[f"goodput_over_peak_{load:g}x"] = record.exact(goodput / peak if peak else 0.0, "ratio")
    return found


def tables(played: Sequence[Played]) -> dict[str, Any]:
    return {
        "phases": [
            {
                "load": phase.load,
                "agents": phase.agents,
                "seconds": phase.seconds,
                **phase.samples.facts(),
                "tokens_a_second_of_each_owner": [asdict(part) for part in phase.parts],
            }
            for phase in played
        ]
    }


def shown(played: Sequence[Played]) -> Table:
    """A column a phase."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("load")
    for phase in played:
        table.add_column(f"{phase.load:g}×", justify="right")
    each = [(phase, phase.samples, phase.samples.percentiles()) for phase in played]
    table.add_row("agents", *(str(phase.agents) for phase, _, _ in each))
    table.add_row("turns finished / due", *(f"{samples.finished} / {samples.due}" for _, samples, _ in each))
    table.add_row(
        "goodput, tokens/s",
        *(f"{sum(samples.goodput(phase.seconds)) / int(phase.seconds):.0f}" for phase, samples, _ in each),
    )
    for kind, name in _SHOWN:
        table.add_row(f"{name} p50 / p99, ms", *(_span(spans.get(kind)) for _, _, spans in each))
    table.add_row("refused", *(_counts(samples.refused) for _, samples, _ in each))
    table.add_row("failed", *(_counts(samples.failed) for _, samples, _ in each))
    return table


def _span(percents: Mapping[str, float] | None) -> str:
    return "–" if percents is None else f"{1e3 * percents['p50']:.0f} / {1e3 * percents['p99']:.0f}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "0"
