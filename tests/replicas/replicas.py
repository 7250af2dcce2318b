"""Servers that share a database behind a front, killed and frozen by turns under agents."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.load.kills import PATIENCE_SECONDS, Agents, Nursery, nurseries

SERVERS = 2
LEASE_SECONDS = 1.0
FROZEN_SECONDS = 2.5  # past its lease
LONGEST_SECONDS = 0.5


class Front:
    """Passes connections on to servers by turns, as a proxy of TCP does. Those of a server that does not answer are
    closed on the client's side alone: what it says when it wakes reaches no client of ours."""

    def __init__(self, targets: list[str]) -> None:
        self.target = ""
        self._targets = targets
        self.out: set[int] = set()
        self._turns = itertools.cycle(range(len(targets)))
        self._clients: dict[asyncio.StreamWriter, int] = {}
        self._open: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._thread.start()
        assert self._has_begun.wait(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._begin())
        self._loop.run_forever()

    async def _begin(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._has_begun.set()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in itertools.islice(self._turns, len(self._targets)):
            if number in self.out:
                continue
            host, port = self._targets[number].split(":")
            try:
                there, to_there = await asyncio.open_connection(host, int(port))
            except OSError:
                continue
            self._clients[writer] = number
            self._open += (writer, to_there)
            await asyncio.gather(_copy(reader, to_there), _copy(there, writer))
            del self._clients[writer]
            return
        writer.close()

    def leave_out(self, number: int, *, is_out: bool) -> None:
        def act() -> None:
            if is_out:
                self.out.add(number)
                for writer in [one for one, of in self._clients.items() if of == number]:
                    writer.close()
            else:
                self.out.discard(number)

        self._loop.call_soon_threadsafe(act)

    def end(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in self._open:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextmanager
def replicas(
    dsn: str, durability: str, *, is_early: bool = False
) -> Iterator[tuple[Front, list[Nursery], Callable[[int], None]]]:
    """A front, what the servers are forked from, and a function that begins the server of a number."""
    with ExitStack() as stack:
        made = [stack.enter_context(nurseries()) for _ in range(SERVERS)]

        def begin(number: int) -> None:
            name = f"server-{number}"
            made[number].begin(dsn, durability, is_early=is_early, replica=name, lease_seconds=LEASE_SECONDS)

        for number in range(SERVERS):
            begin(number)
        front = Front([one.target for one in made])
        stack.callback(front.end)
        yield front, made, begin


def kill_replicas(
    place: Path | str,
    durability: str,
    *,
    kills: int,
    agents: int,
    seed: int,
    is_early: bool = False,
    freezes_every: int = 6,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Counter[str], list[str], list[str]]:
    """Kill one of the servers so many times, at random moments, and freeze one now and then: as `kill_often` says.

    place: the DSN of their database.
    """
    rng = random.Random(seed)
    with replicas(str(place), durability, is_early=is_early) as (front, made, begin):
        talking = Agents(front.target, agents, seed, patience_seconds=PATIENCE_SECONDS)
        try:
            until = time.monotonic() + PATIENCE_SECONDS
            while talking.counts["sessions"] < agents and not talking.wrong:
                assert time.monotonic() < until, "an agent has no session"
                time.sleep(0.01)
            for number in range(kills):
                if talking.wrong or talking.gave_up or is_over():
                    break
                time.sleep(0.05 + LONGEST_SECONDS * rng.random())
                which = rng.randrange(SERVERS)
                if freezes_every and number % freezes_every == freezes_every - 1:
                    made[which].signal(signal.SIGSTOP)
                    time.sleep(0.2)
                    front.leave_out(which, is_out=True)
                    time.sleep(FROZEN_SECONDS)
                    made[which].signal(signal.SIGCONT)
                    front.leave_out(which, is_out=False)
                    talking.counts["freezes"] += 1
                    continue
                made[which].end_life(signal.SIGKILL)
                begin(which)
                talking.counts["kills"] += 1
        except BaseException:
            talking.leave()
            raise
        found = list(talking.wrong)
        talking.finish(1.0 if found else PATIENCE_SECONDS)
        return talking.counts, found or talking.wrong, talking.gave_up
