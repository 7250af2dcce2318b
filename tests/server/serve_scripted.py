"""A server process on the scripted model: prints where it listens, serves until it is asked to stop.

usage: serve_scripted.py <bind> <drain seconds> [<seconds a step> [<metrics bind>]]
"""

import sys

from inference_engine.config import ServerConfig
from inference_engine.errors import ConfigError
from inference_engine.server.run import serve
from laboratory.scripted import Script
from tests.load.scripted import scripted_engine

bind, drain_seconds, *others = sys.argv[1:]
# Steps take a while: a Generate runs when the signal comes.
step_seconds, metrics_bind = (*others, *("0.002", "")[len(others) :])
with scripted_engine(script=Script(step_seconds=float(step_seconds))) as engine:
    try:
        serve(
            engine,
            ServerConfig(bind=bind, drain_seconds=float(drain_seconds), metrics_bind=metrics_bind),
            on_ready=lambda handle: print(handle.target, flush=True),
        )
    except ConfigError as error:
        sys.exit(str(error))
