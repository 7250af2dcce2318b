"""Measurements of the engine, and the records they leave."""
