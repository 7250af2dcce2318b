"""Calls carry the current trace on, and need no tracing library to be there."""

import importlib.util
import sys
from types import ModuleType

import pytest
from opentelemetry import trace

from kakeya import _trace


def loaded_anew() -> ModuleType:
    """The module as a process of its own would load it."""
    assert _trace.__spec__ is not None and _trace.__spec__.loader is not None
    module = importlib.util.module_from_spec(_trace.__spec__)
    _trace.__spec__.loader.exec_module(module)
    return module


def test_without_opentelemetry_calls_carry_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert loaded_anew().trace_metadata() == ()


def test_outside_of_a_span_calls_carry_nothing_more() -> None:
    assert loaded_anew().trace_metadata() == ()


def test_within_a_span_calls_carry_its_traceparent() -> None:
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert loaded_anew().trace_metadata() == (("traceparent", f"00-{0xABC:032x}-{0xDEF:016x}-01"),)
