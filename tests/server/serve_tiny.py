"""A server process on TinyModel: prints where it listens, serves until it is asked to stop.

usage: serve_tiny.py <bind> <drain seconds>
"""

import sys

from inference_engine.config import ServerConfig
from inference_engine.errors import ConfigError
from inference_engine.server.run import serve
from tests.tiny import tiny_engine

bind, drain_seconds = sys.argv[1:]
with tiny_engine() as engine:
    try:
        serve(
            engine,
            ServerConfig(bind=bind, drain_seconds=float(drain_seconds)),
            on_ready=lambda handle: print(handle.target, flush=True),
        )
    except ConfigError as error:
        sys.exit(str(error))
