"""A server process whose engine hangs for ever at a token: prints where it listens, and `hangs` when it does.

usage: serve_hanging.py <token> <seconds for running Generates after SIGTERM> <until a stall ends it; 0: never>
"""

import sys

from inference_engine.config import ServerConfig
from inference_engine.server import run
from laboratory.scripted import Fault, Script
from tests.load.scripted import scripted_engine

token, (drain_seconds, stall_exit_seconds) = int(sys.argv[1]), map(float, sys.argv[2:])
script = Script(
    faults={token: (Fault.HANG, None)},
    on_step=lambda _step: print("hangs", flush=True),
)
engine = scripted_engine(script=script, stall_seconds=2.0)
run.STOP_SECONDS = 1.5  # a test need not wait longer
run.serve(
    engine,
    ServerConfig(bind="127.0.0.1:0", drain_seconds=drain_seconds, stall_exit_seconds=stall_exit_seconds),
    on_ready=lambda handle: print(handle.target, flush=True),
)
sys.exit("the server ended by itself")
