"""The engine: what the server, the tests and the laboratory call."""

from inference_engine.engine.engine import Engine

__all__ = ["Engine"]
