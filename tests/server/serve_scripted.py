"""A server process on the scripted model: prints where it listens, serves until it is asked to stop.

usage: serve_scripted.py <bind> <drain seconds>
"""

import sys

from inference_engine.config import ServerConfig
from inference_engine.errors import ConfigError
from inference_engine.server.run import serve
from laboratory.scripted import Script
from tests.load.scripted import scripted_engine

bind, drain_seconds = sys.argv[1:]
# Steps take a while: a Generate runs when the signal comes.
with scripted_engine(script=Script(step_seconds=0.002)) as engine:
    try:
        serve(
            engine,
            ServerConfig(bind=bind, drain_seconds=float(drain_seconds)),
            on_ready=lambda handle: print(handle.target, flush=True),
        )
    except ConfigError as error:
        sys.exit(str(error))
