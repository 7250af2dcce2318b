"""Devices: find out whether a model can be served, take it over, run it."""
