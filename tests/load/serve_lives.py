"""A server that is killed again and again: lives forked from one process that has imported everything.

usage: serve_lives.py <address> <address of metrics> <seconds>

Sessions that are idle for so many seconds leave memory, and come back when they are used.

A line on standard input begins a life: a list of its state folder, or the DSN of its database, its durability, and
whether it is the control that answers before anything is recorded; of a database also whether it is the one that does
not ask for its lease, the name of its replica and its lease. Its process id and its readiness are lines on standard
output. The input's end ends all.
"""

import json
import os
import sys
import traceback
from typing import Any

import torch

from inference_engine.config import ServerConfig
from inference_engine.metrics import EngineMetrics
from inference_engine.server.run import serve
from inference_engine.types import Durability
from laboratory.scripted import Script
from tests.load.early import opened
from tests.load.scripted import scripted_engine

bind, metrics_bind, idle_seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
settings: dict[str, Any] = {"session_idle_ttl_seconds": idle_seconds, "hibernate_after_seconds": idle_seconds / 2}
torch.set_num_threads(1)


def live(folder: str, durability: str, is_early: bool, is_unproved: bool, replica: str, lease_seconds: float) -> None:
    metrics = EngineMetrics()
    of = {"replica": replica, "lease_seconds": lease_seconds, "is_unproved": is_unproved}
    journal = opened(folder, Durability(durability), metrics, is_early=is_early, of_database=of)
    kept = settings | {"journal": journal, "metrics": metrics, "state_dir": folder}
    with scripted_engine(script=Script(step_seconds=0.002), **kept) as engine:
        serve(
            engine,
            ServerConfig(bind=bind, metrics_bind=metrics_bind, drain_seconds=5.0),
            on_ready=lambda _: print("ready", flush=True),
        )


for line in sys.stdin:
    if (life := os.fork()) == 0:
        status = 1
        try:
            print(os.getpid(), flush=True)
            live(*json.loads(line))
            status = 0
        except Exception:  # noqa: BLE001 - whatever it was, it is why the life ended
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(life, 0)
    print(f"ended {status}", flush=True)
