"""Backends: check by test whether a model can be served, take it over, run it on a device."""
