"""`kakeya bench NAME`: how fast the runtime is; the table of benchmarks is in `laboratory.bench.experiments`."""

from __future__ import annotations

from laboratory.bench.experiments import add_parsers as add_arguments

__all__ = ["add_arguments"]
