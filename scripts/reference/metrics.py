"""The page of metrics: every instrument of the runtime, with its labels and their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

from inference_engine.metrics import EngineMetrics
from scripts.reference.markdown import code, page, table

INTRODUCTION = """
    `GET /metrics` on the address of [`metrics_bind`](settings.md#server), in Prometheus' text format. Labels come from
    small fixed sets; none holds an id, a label of a client's or a key. Where the system reports them there are also the
    process's own: `process_resident_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds` and others.
    Until the next release each metric is shown without the prefix `kakeya_`, too.
"""


def render() -> str:
    rows = _rows(instruments(EngineMetrics()))
    return page(
        "Metrics",
        "inference_engine/metrics.py",
        INTRODUCTION,
        table(("metric", "type", "labels", "says"), rows),
    )


def instruments(metrics: EngineMetrics) -> list[MetricWrapperBase]:
    """In the order in which they were made."""
    return [instrument for instrument in vars(metrics).values() if isinstance(instrument, MetricWrapperBase)]


def _rows(shown: Iterable[MetricWrapperBase]) -> Iterator[tuple[str, str, str, str]]:
    for instrument in shown:
        (family,) = instrument.describe()
        yield code(exposed_name(family)), family.type, _labels(instrument), family.documentation


def _labels(instrument: MetricWrapperBase) -> str:
    """Names of labels, with their values where all of them are known from the start."""
    values: dict[str, list[str]] = {name: [] for name in instrument._labelnames}
    for family in instrument.collect():
        for sample in family.samples:
            for name, known in values.items():
                if sample.labels[name] not in known:
                    known.append(sample.labels[name])
    return "; ".join(
        code(name) + (": " + ", ".join(map(code, known)) if known else "") for name, known in values.items()
    )


def exposed_name(family: Metric) -> str:
    """The name as Prometheus sees it."""
    return family.name + ("_total" if family.type == "counter" else "")
