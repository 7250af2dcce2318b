"""Kakeya servers on a Ray cluster: Ray finds a place for each, and Envoy, beside this program, sends calls to them.

    python replicas.py --replicas 2 --num-gpus 1 --endpoints /etc/envoy/endpoints.yaml -- \
        --model smollm2-135m --api-key-file /etc/kakeya/keys --allow-plaintext true --state-dir /mnt/kakeya/{name}

An actor for each server starts `kakeya serve` with the arguments behind `--`, in which {name} is the server's own name,
the same each time it is started. Whatever ends, the server or its machine, is started again, elsewhere if need be, and
the file of endpoints is replaced (deploy/proxies has the other files of Envoy). SIGTERM stops all servers in order.

Ray only places processes: no call of a client passes through it. Kakeya has to be installed on each machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

READY = "ready at "
LOOK_SECONDS = 1.0
STOP_SECONDS = 30.0  # beyond drain_seconds


class Server:
    """`kakeya serve` as a child of this actor's process, which ends with it."""

    def __init__(self, name: str, arguments: Sequence[str], host: str) -> None:
        """host: the address to listen on; empty: this machine's. Returns when the server is ready."""
        host = host or ray.util.get_node_ip_address()
        words = [argument.replace("{name}", name) for argument in arguments]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inference_engine.cli.main", "serve", "--until-eof", f"--bind={host}:0", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(READY):
            raise RuntimeError(f"{name} did not start, with status {self._process.wait()}: the actor's log says why")
        self._target = line.removeprefix(READY).split(": ")[0]

    def look(self) -> tuple[str, int | None]:
        """Where it listens, and its status if it has ended."""
        return self._target, self._process.poll()

    def stop(self, seconds: float) -> int:
        """Let running Generates end. Its status, after at most so long."""
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass(slots=True)
class Replica:
    """A server's name, the actor that has it, what it was last asked, and where it listens, if it does."""

    name: str
    actor: Any
    looking: Any
    target: str = ""


class Replicas:
    """Keeps so many servers, and the file of their endpoints."""

    def __init__(self, count: int, endpoints: Path, arguments: Sequence[str], host: str, **resources: float) -> None:
        self._endpoints = endpoints
        self._given = (list(arguments), host)
        self._actor = ray.remote(Server).options(**resources)
        self._written: dict[str, str] = {}
        self.replicas = [self._begin(f"replica-{number}") for number in range(count)]

    def look(self) -> None:
        """Start what has ended again; write down where all are."""
        for at, replica in enumerate(self.replicas):
            if not ray.wait([replica.looking], timeout=0)[0]:
                continue  # it starts, or its machine does not answer yet
            try:
                target, status = ray.get(replica.looking)
            except RayError as error:
                self._say(f"{replica.name} is gone: {str(error).splitlines()[-1]}")
                self.replicas[at] = self._begin(replica.name)
                continue
            if status is not None:
                self._say(f"{replica.name} ended with status {status}")
                ray.kill(replica.actor)
                self.replicas[at] = self._begin(replica.name)
                continue
            if target != replica.target:
                self._say(f"{replica.name} is ready at {target}")
            replica.target, replica.looking = target, replica.actor.look.remote()
        self._write({replica.name: replica.target for replica in self.replicas if replica.target})

    def stop(self, seconds: float) -> None:
        asked = [replica.actor.stop.remote(seconds) for replica in self.replicas if replica.target]
        for each in asked:
            with contextlib.suppress(RayError):
                ray.get(each, timeout=seconds + STOP_SECONDS)

    def _begin(self, name: str) -> Replica:
        actor = self._actor.remote(name, *self._given)
        return Replica(name, actor, actor.look.remote())

    def _write(self, targets: dict[str, str]) -> None:
        """Replace the file, by names: Envoy reads it when it is another one.

        Envoy hashes by the name, so sessions find their server where it listens now.
        """
        if targets == self._written:
            return
        lines = [
            "resources:",
            '- "@type": type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment',
            "  cluster_name: kakeya",
            "  endpoints:",
            "  - lb_endpoints:",
        ]
        for name, target in targets.items():
            host, _, port = target.rpartition(":")
            place = f"{{address: {host.strip('[]')!r}, port_value: {port}}}"
            lines += [
                f"    - endpoint: {{address: {{socket_address: {place}}}}}",
                f"      metadata: {{filter_metadata: {{envoy.lb: {{hash_key: {name}}}}}}}",
            ]
        new = self._endpoints.with_name(f"{self._endpoints.name}.new")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(self._endpoints)
        self._written = targets

    @staticmethod
    def _say(line: str) -> None:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kakeya servers as Ray actors, for an Envoy beside this program.")
    parser.add_argument("--replicas", type=int, default=1, help="servers (1)")
    parser.add_argument("--num-cpus", type=float, default=1.0, help="processors of each (1)")
    parser.add_argument("--num-gpus", type=float, default=0.0, help="GPUs of each (0)")
    parser.add_argument("--host", default="", help="address to listen on (each machine's own)")
    parser.add_argument("--endpoints", type=Path, required=True, help="file that Envoy watches")
    parser.add_argument("--address", help="of the cluster; without it the one of this machine, or a new one here")
    parser.add_argument("--drain-seconds", type=float, default=30.0, help="for running Generates at a stop (30)")
    parser.add_argument("serve", nargs="*", help="arguments of kakeya serve")
    args = parser.parse_args()
    environment = {name: value for name, value in os.environ.items() if name.startswith("KAKEYA_")}
    ray.init(args.address, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=True)
    is_over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has set its own
        signal.signal(number, lambda *_: is_over.set())
    serve = [*args.serve, f"--drain-seconds={args.drain_seconds}"]
    replicas = Replicas(args.replicas, args.endpoints, serve, args.host, num_cpus=args.num_cpus, num_gpus=args.num_gpus)
    while not is_over.is_set():
        replicas.look()
        time.sleep(LOOK_SECONDS)
    replicas.stop(args.drain_seconds + STOP_SECONDS)
    ray.shutdown()


if __name__ == "__main__":
    main()
