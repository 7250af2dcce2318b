"""Benchmarks: how fast the runtime is, beside something else, each a file with `add_arguments` and `main`."""
