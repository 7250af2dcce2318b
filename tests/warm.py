"""A process that has imported what serves, and forks others: each begins where importing ends, two seconds later.

Requests are lines on a socket, its file descriptor the only argument: a program to start, with its arguments, three
streams and its environment (null: this one's), which is answered by its process id; or a process id, which is answered
by its status.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from importlib import import_module
from typing import Any
from unittest.mock import patch

from inference_engine.config import configure_threads_environment, forbid_model_hub, quiet_grpc

IMPORTED = (
    "inference_engine.cli.serve",
    "inference_engine.compose",
    "inference_engine.server.run",
    "laboratory.scripted",  # of tests' own servers
    # What huggingface_hub imports: itself, it reads the environment then.
    *("inference_engine.models.hub_download", "httpx2", "tqdm.auto", "yaml"),
)
MOST_BYTES = 2**20


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Returns a child's request in the child, and None at the end in the process that forks."""
    statuses: dict[int, int] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        statuses |= ended()
        if requests.fileno() not in readable:
            continue
        line, streams, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not line:
            return None
        request = json.loads(line)
        if "pid" in request:
            statuses |= ended()
            requests.send(f"{statuses.pop(request['pid'])}\n".encode())
            continue
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (woken, wakes):
                os.close(descriptor)
            requests.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            # Python's objects know what their files were, such as that one can be sought in.
            sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
            sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
            return dict(request)
        for stream in streams:
            os.close(stream)
        requests.send(f"{pid}\n".encode())


def ended() -> dict[int, int]:
    """The children that have ended since, by their process ids: with which status."""
    found = {}
    with contextlib.suppress(ChildProcessError):  # there is none
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found[one[0]] = os.waitstatus_to_exitcode(one[1])
    return found


def end_at_once(statuses: list[int]) -> None:
    """End here, after threads and all that runs at exit, with the one of `statuses`, if there is one.

    Python would now release every module, which takes a quarter of a second: a forked process copies each page for it.
    """
    with contextlib.suppress(OSError, ValueError):  # a stream is closed: end as usual
        for status in statuses:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def run(request: dict[str, Any]) -> int:
    """The exit status of a program that ends by itself or by `sys.exit` with a number."""
    try:
        run_program(request)
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            return asked.code or 0
        raise
    return 0


def run_program(request: dict[str, Any]) -> None:
    program, sys.argv = request["program"], [request["program"], *request["arguments"]]
    if request["environment"] is not None:
        patch.dict("os.environ", request["environment"], clear=True).start()
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    atexit.register(end_at_once, statuses := [])  # before all others are: it runs last
    # Libraries read it when they are imported.
    configure_threads_environment()
    forbid_model_hub()
    quiet_grpc()
    for module in IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()
    if request := serve(socket.socket(fileno=int(sys.argv[1]))):
        statuses.append(run(request))
