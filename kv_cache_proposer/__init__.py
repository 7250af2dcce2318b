"""Drafters and what they need: they sit above the engine and fulfil its protocols."""
