"""A PostgreSQL server of Debian's, on a Unix socket in a folder of its own, for as long as tests run."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

# Where Debian has the programs of a server, newest first; elsewhere they are on the path.
_FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
_MOST_SECONDS = 3600  # after that it ends by itself
_ANOTHER_USER = 65_534  # of no rights: the server refuses to run as root


def programs() -> Path | None:
    """The folder of `initdb` and `postgres`; None: this machine has none."""
    on_path = shutil.which("initdb")
    found = [*_FOLDERS, *([Path(on_path).resolve().parent] if on_path else [])]
    return next((folder for folder in found if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


class PostgresServer:
    """folder: of its socket. databases are made as they are asked for."""

    def __init__(
        self, folder: Path, bin_folder: Path, *, is_synced: bool, primary: PostgresServer | None = None
    ) -> None:
        """primary: what it is a standby of, until it is promoted."""
        self.folder, self._is_synced = folder, is_synced
        self._bin = bin_folder
        self._data = folder / "data"
        self._count = 0
        self._as_user: tuple[str, ...] = ()
        if os.geteuid() == 0:
            user = _another_user()
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._as_user = ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
        place = ("-D", str(self._data), "-U", "kakeya", "--no-sync")
        if primary is None:
            self._run("initdb", *place, "-A", "trust", "-E", "UTF8", "--no-locale")
        else:
            self._run("pg_basebackup", *place, "-h", str(primary.folder), "-R", "-X", "stream", "-c", "fast")
        settings = {
            "listen_addresses": "''",
            "unix_socket_directories": f"'{folder}'",
            "fsync": "on" if is_synced else "off",
            "max_connections": "60",
            "shared_buffers": "'16MB'",
            "autovacuum": "off",
        }
        with (self._data / "postgresql.conf").open("a") as file:  # which `alter system` has precedence over
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self.process = self._start()

    def _run(self, program: str, *arguments: str) -> None:
        command = (*self._as_user, str(self._bin / program), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120, check=False)
        assert not done.returncode, done.stderr

    def _start(self) -> subprocess.Popen[bytes]:
        program = ("timeout", "--foreground", "--signal=QUIT", str(_MOST_SECONDS), str(self._bin / "postgres"))
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*self._as_user, *program, "-D", str(self._data)], stdout=log, stderr=log, cwd="/"
            )
        self._wait(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        import psycopg

        ends = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.dsn("postgres")).close()
                return
            except psycopg.OperationalError:
                assert process.poll() is None and time.monotonic() < ends, (self.folder / "log").read_text()
                time.sleep(0.02)

    @contextmanager
    def standby(self, folder: Path) -> Iterator[PostgresServer]:
        """A server whose copy of everything is safe before a commit is answered. It lives on as its own."""
        folder.mkdir(mode=0o711)
        found = PostgresServer(folder, self._bin, is_synced=self._is_synced, primary=self)
        try:
            self.say("alter system set synchronous_standby_names = '*'")
            self.say("select pg_reload_conf()")
            ends = time.monotonic() + 60
            while self.say("select sync_state from pg_stat_replication") != [("sync",)]:
                assert time.monotonic() < ends, (folder / "log").read_text()
                time.sleep(0.02)
            yield found
        except BaseException:
            found.stop(signal.SIGQUIT)
            raise

    def promote(self) -> None:
        """From a standby to a server that can be written."""
        self.say("select pg_promote()")

    @property
    def pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def dsn(self, database: str) -> str:
        return f"host={self.folder} user=kakeya dbname={database}"

    def database(self, template: str = "") -> str:
        """The DSN of a new database. template: the DSN of one that is not in use, whose copy it is."""
        self._count += 1
        name = f"kakeya{self._count}"
        like = f" template {template.rpartition('=')[2]} strategy file_copy" if template else ""
        self.say(f"create database {name}{like}")
        return self.dsn(name)

    def say(self, statement: str, dsn: str = "") -> list[tuple[object, ...]]:
        import psycopg

        with psycopg.connect(dsn or self.dsn("postgres"), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def cut(self, dsn: str) -> None:
        """End all connections to a database."""
        name = dsn.rpartition("=")[2]
        self.say(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It keeps its connections, and answers nothing."""
        process = psutil.Process(self.pid)
        process.suspend()  # it begins others no more
        children = process.children()
        try:
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.suspend()
            yield
        finally:
            for one in (*children, process):
                with suppress(psutil.NoSuchProcess):
                    one.resume()

    def stop(self, signal_number: int = signal.SIGINT) -> None:
        """SIGINT: at once, in order. SIGQUIT: as a crash."""
        if self.process.poll() is None:
            os.kill(self.pid, signal_number)
            self.process.wait(60)

    def start(self) -> None:
        self.process = self._start()


def _another_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwuid(_ANOTHER_USER)


@contextmanager
def postgres_server(*, is_synced: bool = False) -> Iterator[PostgresServer]:
    """is_synced: each commit, as `power` needs. Skips the test where there is no server to start; `.ci/run` has one."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if (bin_folder := programs()) is None:
        pytest.skip("no PostgreSQL is installed: make postgres")
    folder = Path(tempfile.mkdtemp(prefix="kakeya-pg-"))
    folder.chmod(0o711)
    server: PostgresServer | None = None
    try:
        server = PostgresServer(folder, bin_folder, is_synced=is_synced)
        yield server
    finally:
        if server is not None:
            server.stop(signal.SIGQUIT)
        shutil.rmtree(folder, ignore_errors=True)
