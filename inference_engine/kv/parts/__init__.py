"""The parts of a session: one mechanism each, behind the interface of `kv/part.py`."""
