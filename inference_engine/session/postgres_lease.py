"""This server's place among those that share a database: its lease, and the hand-over of sessions.

    registered       a new epoch, and an advisory lock of it that ends with the connection
    renewed          each quarter of the lease
    asked            another server wants a session: a notification on a channel of this one's own
    taken for dead   its lease is over or its lock is free: who claims a session raises the epoch first, so that no
                     commit of this server can be made from then on

Times of the lease are the database's; what this server is sure of is counted from before it asked, on a clock that goes
on while the machine sleeps. So no clocks are compared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import errors as pg

from inference_engine.errors import ConfigError
from inference_engine.session.clock_jumps import even_clock as now
from inference_engine.session.postgres_database import PostgresConnection, connect, place_of
from inference_engine.types import Durability

logger = logging.getLogger(__name__)

_SURE_PART = 0.8  # of the lease: clocks differ in speed, and an answer takes a moment
_RENEWALS = 4  # in a lease
_RETRY_SECONDS = 0.1
_TAKEN_SECONDS = 2.0  # a process that has just ended may have its lock for a moment


class Lease:
    """on_asked: called with a session's id, on its thread. on_lost: called when other servers have taken the place."""

    THREAD_NAME = "kakeya-lease"

    def __init__(
        self,
        dsn: str,
        replica: str,
        seconds: float,
        *,
        on_asked: Callable[[str], object],
        on_lost: Callable[[], object],
    ) -> None:
        """Raises psycopg.Error, and ConfigError if another server of this name is alive."""
        self._dsn, self._replica, self._seconds = dsn, replica, seconds
        self._on_asked, self._on_lost = on_asked, on_lost
        self._lock = threading.Lock()  # of the connection
        self._is_stopping = threading.Event()
        self.epoch = 0
        self._sure_until = 0.0
        self._has_lock = True  # of its epoch, once it has one
        self._db = self._connected()
        ends = time.monotonic() + _TAKEN_SECONDS
        while self.renew() is None:
            if time.monotonic() > ends:
                self._db.close()
                raise ConfigError(
                    f"the journal {place_of(dsn)} is in use by another server of the name {replica!r}: stop that, or "
                    "give this one a name of its own with --replica"
                )
            time.sleep(_RETRY_SECONDS)
        self._thread = threading.Thread(target=self._keep, name=self.THREAD_NAME, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_sure(self) -> bool:
        """Can no other server have taken the place?"""
        return now() < self._sure_until

    def renew(self) -> int | None:
        """Begin a new epoch; None while another server of this name is alive. Any thread. Raises psycopg.Error."""
        with self._lock:
            if not self._db.is_open:
                self._db = self._connected()
            began = now()
            ((epoch,),) = self._db.execute("select register(?, ?)", (self._replica, self._seconds))
            if epoch is not None:
                self.epoch, self._sure_until = epoch, began + self._seconds * _SURE_PART
                self._has_lock = True
            return None if epoch is None else self.epoch

    def stop(self, *, is_for_good: bool = False) -> None:
        """is_for_good: no server of this name will come again."""
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._db.release(self._replica, self.epoch, is_for_good=is_for_good)
            self._db.close()

    def _connected(self) -> PostgresConnection:
        db = connect(self._dsn, Durability.POWER, self._replica)
        db.listen(self._replica)
        return db

    # -- its thread -------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        at = 0.0
        while not self._is_stopping.is_set():
            try:
                if time.monotonic() >= at:
                    self._extend()
                    at = time.monotonic() + self._seconds / _RENEWALS
                for session_id in self._db.notified(min(_RETRY_SECONDS, self._seconds / _RENEWALS)):
                    self._on_asked(session_id)
            except pg.LockNotAvailable:  # of the row, which the commit has: none can raise the epoch
                logger.warning("the lease is not renewed yet: a commit of this server's takes long")
            except psycopg.Error as error:
                self._sure_until = at = 0.0  # its lock is free, and with it its sessions
                logger.warning("the connection that keeps the lease is lost: %s", str(error).strip())
                self._is_stopping.wait(_RETRY_SECONDS)
                self._reconnect()

    def _extend(self) -> None:
        with self._lock:
            began, epoch = now(), self.epoch
            is_ours = list(
                self._db.execute(
                    "update replicas set until = clock_timestamp() + make_interval(secs => ?) "
                    "where name = ? and epoch = ? returning epoch",
                    (self._seconds, self._replica, epoch),
                )
            )
            if is_ours and epoch == self.epoch:
                self._sure_until = began + self._seconds * _SURE_PART
            if not self._has_lock:
                self._lock_epoch()
        if not is_ours:
            self._on_lost()
            self._is_stopping.wait(_RETRY_SECONDS)

    def _reconnect(self) -> None:
        """With the lock of this epoch, if that is this server's still."""
        try:
            with self._lock:
                self._db.close()
                self._db = self._connected()
                self._lock_epoch()
        except psycopg.Error:
            self._is_stopping.wait(_RETRY_SECONDS)

    def _lock_epoch(self) -> None:
        """The connection that was lost may have the lock still, where the database has not noticed."""
        ((self._has_lock,),) = self._db.execute(
            "select pg_try_advisory_lock(lock_of(?, ?))", (self._replica, self.epoch)
        )
