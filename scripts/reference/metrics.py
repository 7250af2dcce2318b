"""The page of metrics: every instrument of the runtime and what the process itself shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from inference_engine.metrics import EngineMetrics
from scripts.reference.markdown import code, page, table

INTRODUCTION = """
    `GET /metrics` on the address of [`metrics_bind`](settings.md#server), in Prometheus' text format. Labels come from
    small fixed sets; none holds an id, a label of a client's or a key.
"""


def render() -> str:
    metrics = EngineMetrics()
    ours = _ours(metrics)
    known = {instrument.describe()[0].name for instrument in ours}
    process = [family for family in metrics.registry.collect() if family.name not in known]
    return page(
        "Metrics",
        "inference_engine/metrics.py",
        INTRODUCTION,
        table(("metric", "type", "labels", "says"), _rows(ours)),
        "## The process",
        table(("metric", "type", "says"), ((code(_shown(family)), family.type, family.documentation) for family in process)),
    )


def _ours(metrics: EngineMetrics) -> list[MetricWrapperBase]:
    """The instruments, in the order in which they were made."""
    return [instrument for instrument in vars(metrics).values() if isinstance(instrument, MetricWrapperBase)]


def _rows(instruments: Iterable[MetricWrapperBase]) -> Iterator[tuple[str, str, str, str]]:
    for instrument in instruments:
        (family,) = instrument.describe()
        yield code(_shown(family)), family.type, _labels(instrument), family.documentation


def _labels(instrument: MetricWrapperBase) -> str:
    """Names of labels, with their values where all of them are known from the start."""
    values: dict[str, list[str]] = {name: [] for name in instrument._labelnames}
    for family in instrument.collect():
        for sample in family.samples:
            for name in values:
                if sample.labels[name] not in values[name]:
                    values[name].append(sample.labels[name])
    return "; ".join(
        code(name) + (": " + ", ".join(map(code, known)) if known else "") for name, known in values.items()
    )


def _shown(family: Metric) -> str:
    """The name as Prometheus sees it."""
    return family.name + ("_total" if family.type == "counter" else "")
