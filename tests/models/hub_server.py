"""As much of the Hugging Face hub's HTTP interface as huggingface_hub needs to download files, on loopback.

GET       /api/models/<org>/<name>[/revision/<revision>]       which commit that is
GET       /api/models/<org>/<name>/tree/<commit>               its files, with sizes and digests
GET HEAD  /<org>/<name>/resolve/<commit>/<file>                a file; a large one is redirected to
GET HEAD  /large/<sha256>                                      where the hub keeps those
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass(kw_only=True)
class Hub:
    """What is served, and what was asked. files: content by path; those of SafeTensors are large ones.

    status: given in place of every answer. gated: the files need a token. spoilt: large files come with a byte changed.
    stalls: large files begin and never end.
    """

    name: str
    commit: str
    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    status: int = 0
    gated: bool = False
    spoilt: bool = False
    stalls: bool = False
    url: str = ""
    elsewhere: str = ""
    asked: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def large(self) -> dict[str, bytes]:
        return {
            hashlib.sha256(content).hexdigest(): content
            for path, content in self.files.items()
            if path.endswith((".safetensors", ".bin"))
        }

    def fetched(self) -> set[str]:
        """The files that were asked for."""
        return {path.split("/", 5)[5] for path in self.asked if path.startswith(f"/{self.name}/resolve/")}


@contextmanager
def served(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    port = server.server_address[1]
    # Redirections to another host are kept apart: what stands in their headers is about the file, not the host.
    hub.url, hub.elsewhere = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    of: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.of.asked.append(path)
        if self.of.status:
            self._answer(self.of.status, b"{}")
        elif path.startswith("/large/"):
            self._large(path.removeprefix("/large/"))
        elif path.startswith(f"/api/models/{self.of.name}"):
            self._api(path.removeprefix(f"/api/models/{self.of.name}"))
        elif path.startswith(f"/{self.of.name}/resolve/{self.of.commit}/"):
            self._file(path.split("/", 5)[5])
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _api(self, rest: str) -> None:
        if rest.startswith("/tree/"):
            self._answer(200, json.dumps([_entry(path, content) for path, content in self.of.files.items()]).encode())
        elif (rest.removeprefix("/revision/") or "main") in (*self.of.revisions, self.of.commit):
            siblings = [{"rfilename": path} for path in self.of.files]
            about = {"id": self.of.name, "modelId": self.of.name, "sha": self.of.commit, "siblings": siblings}
            self._answer(200, json.dumps(about).encode())
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    def _file(self, path: str) -> None:
        content = self.of.files.get(path)
        commit = {"X-Repo-Commit": self.of.commit}
        if self.of.gated and "Authorization" not in self.headers:
            self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif content is None:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound", **commit})
        elif (digest := hashlib.sha256(content).hexdigest()) in self.of.large():
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
            self._answer(302, b"", {**commit, **linked, "Location": f"{self.of.elsewhere}/large/{digest}"})
        else:
            self._answer(200, content, {**commit, "ETag": f'"{_git_digest(content)}"'})

    def _large(self, digest: str) -> None:
        content = self.of.large()[digest]
        if self.of.spoilt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if self.of.stalls and self.command == "GET":
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:10])
            self.wfile.flush()
            self.of.ended.wait(60.0)
            self.close_connection = True
            return
        self._answer(200, content, {"ETag": f'"{digest}"'})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _git_digest(content)}
    if path.endswith((".safetensors", ".bin")):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
