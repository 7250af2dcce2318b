"""Commands that documents show do what they say, in the order of each document, on a tiny model on loopback."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from kakeya import Client
from scripts.check_links import ROOT
from scripts.reference.command_line import commands
from tests.docs.test_commands import DOCUMENTS, shown_commands
from tests.docs.test_snippets import blocks
from tests.further import further_test
from tests.models.tiny_folder import write_tiny_gguf
from tests.processes import LIMIT_SECONDS, PROGRAM, Server, ending, kakeya, kakeya_serve, started
from tests.server.certificates import Authority
from tests.tiny_folder import save_tiny_chat_model

PARSERS = dict(commands())
# What is not run here, and why.
NOT_RUN = {
    r"make ": "runs what has tests, or is what runs them",
    r".*(cuda|--tensor-parallel|bfloat16)": "wants another device",
    r"kakeya models fetch |.*Qwen/": "asks the hub",
    r".*postgres:": "wants a database: tests/session, tests/replicas",
    r"kakeya (train|bench|evaluate) ": "takes minutes to hours: tests/laboratory",
    r"kakeya serve --(strategy (restored|gather)|calibrate all)": "calibrates first: tests/cli/test_first_use.py",
    r"kakeya serve --strategy (mac|full:codec=e8q31)": "wants a plugin: tests/test_packages.py",
}
LOOPBACK = ("--bind", "--metrics-bind", "--http-bind")


def is_run(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in NOT_RUN)


class Reader:
    """Types the commands of a document in a folder of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack.enter_context(ExitStack())
        self._server: Server | None = None
        self._speaks_tls = False
        self._session = ""
        self._model = save_tiny_chat_model(folder / "tiny")
        config = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = 4096  # windows of documents are as large as people's
        (self._model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_tiny_gguf(folder / "FILE.gguf")
        Authority().settings(folder)
        shutil.copy(folder / "chain.pem", folder / "cert.pem")
        kakeya("keys", "add", "bob", "--api-key-file", str(folder / "keys"))
        (folder / "metrics.token").write_text("0123456789abcdef" * 2, encoding="utf-8")

    def types(self, command: str) -> None:
        name, *words = shlex.split(command)[1:]
        words = [name, *map(self._named, words)]
        if words[0] == "serve":
            self._serves(words[1:])
            return
        if words[0] == "gateway":
            words += ["--tokenizer", str(self._model), "--port", "0"]
            with ending(started(PROGRAM, *words)) as gateway:
                assert gateway.stdout is not None and "http://127.0.0.1:" in gateway.stdout.readline()
            return
        if words[0] == "journal":
            self._stops()
        if "--target" in words and "--tls-ca-file" not in words and self._speaks_tls:
            self._serves([])  # the document means another server
            words = [name, *map(self._named, shlex.split(command)[2:])]
        done = kakeya(*words, *self._beside(f"kakeya {words[0]}", words), typed="Hello\n/quit\n")
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
        if words[:2] == ["keys", "add"]:
            (self._folder / "alice.key").write_text(done.stdout, encoding="utf-8")

    def _serves(self, words: list[str]) -> None:
        """Ports are free ones of loopback: the last of two options counts."""
        self._stops()
        self._speaks_tls = "--tls-cert-file" in words
        ports = [f"{name}=127.0.0.1:0" for name in LOOPBACK if name in words]
        self._server = self._stack.enter_context(kakeya_serve(*words, *self._beside("kakeya serve", words), *ports))
        if "--state-dir" in words and "--api-key-file" not in words:
            with Client(self._server.target) as client:
                session = client.create_session()
                session.append([1, 2, 3])
                self._session = session.id

    def _stops(self) -> None:
        if self._server is not None:
            self._server.process.send_signal(signal.SIGTERM)
            assert self._server.process.wait(LIMIT_SECONDS) == 0
            self._server = None

    def _beside(self, name: str, words: list[str]) -> list[str]:
        """A model that is there at once, for commands that take one."""
        options = PARSERS[name]._option_string_actions if name in PARSERS else {}
        ours = {"--model": str(self._model), "--cache-dir": str(self._folder / "cache"), "--kv-bytes": "64MB"}
        if "--target" in words:  # a running server has its own
            ours = {"--model": str(self._model)} if name == "kakeya chat" else {}
        if name == "kakeya doctor":
            ours["--bind"] = "127.0.0.1:0"
        return [f"{option}={value}" for option, value in ours.items() if option in options]

    def _named(self, word: str) -> str:
        """What stands for something of the reader's."""
        if self._server is not None and re.fullmatch(r"(127\.0\.0\.1|localhost):50051", word):
            return word.partition(":")[0] + ":" + self._server.target.partition(":")[2]
        if word in ("STATE_DIR", "~/kakeya-state", "/var/lib/kakeya"):
            return str(self._folder / "state")
        if word == "ID":
            return self._session
        is_file = word == "FOLDER" or (self._folder / word).is_file()
        return str(self._folder / word) if is_file else word


@further_test
@pytest.mark.parametrize(
    "document",
    [each for each in DOCUMENTS if any(map(is_run, shown_commands(each)))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_a_document_shows_can_be_done(document: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        reader = Reader(tmp_path, stack)
        for number, text in enumerate(blocks(document, "toml")):
            (tmp_path / ("kakeya.toml" if number == 0 else f"{number}.toml")).write_text(text, encoding="utf-8")
        for command in filter(is_run, shown_commands(document)):
            reader.types(command)
