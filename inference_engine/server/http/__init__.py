"""The parts of the HTTP shim: reading requests, rendering messages, writing answers. `http_shim.py` starts it."""
