"""Both clients through a middle that cuts, delays and holds their calls, against the real server: what a caller gets is
what a calm line gives, or an error that says what is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import kakeya
from inference_engine.config import ServerConfig
from tests.further import one_of_each
from tests.middle import Fate, Middle, open_middle

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
# gRPC itself waits a fifth of a second and more between connections, and meanwhile fails calls at once.
STUBBORN = kakeya.RetryPolicy(attempts=100, first_delay_seconds=0.02, max_delay_seconds=0.1)
QUICK = kakeya.RetryPolicy(first_delay_seconds=0.3, patience_seconds=1.5)
SAMPLED = {"temperature": 1.5, "top_p": 0.9, "seed": 11}
REFUSED, CANCEL, INTERNAL, CALM_DOWN = 7, 8, 2, 11  # HTTP/2's codes
FATES = [
    *(Fate(when, what) for when in ("request", "answer", "headers", "done", "trailers") for what in ("cut", "close")),
    *(Fate("messages", what, messages=count) for count in (1, 2, 7) for what in ("cut", "close")),
    *(Fate("request", "reset", code=code) for code in (REFUSED, CANCEL, INTERNAL, CALM_DOWN)),
    *(Fate("headers", "reset", code=code) for code in (CANCEL, INTERNAL)),
    *(Fate("messages", "reset", messages=count, code=CANCEL) for count in (1, 2, 7)),
]


@pytest.fixture
async def middle(server_target: str) -> AsyncIterator[Middle]:
    async with open_middle(server_target) as middle:
        yield middle


@pytest.fixture
def connect(middle: Middle, flavour: str) -> Callable[..., Any]:
    kind: Any = kakeya.Client if flavour == "threads" else kakeya.AsyncClient
    return lambda retry=STUBBORN, target=middle.target: kind(target, retry=retry)


async def conversation(client: Any, do: Do, each: Callable[[], None]) -> list[Any]:
    """Every call that changes something, and one that does not; `each` comes before each of them."""
    await do(client.server_info)  # asked for once, by the first append, wherever that is
    each()
    session = await do(client.create_session, eos_token_ids=[127])
    said: list[Any] = []
    for _ in range(2):
        each()
        said.append(await do(session.append, PROMPT))
        each()
        result = await do(session.generate(12, logprobs=True, **SAMPLED).result)
        said.append((result.token_ids, result.stop_reason, result.history_length, session.history_length))
    each()
    fork = await do(session.fork)
    each()
    said.append((await do(fork.info)).history_length)
    each()
    session = await do(session.rewind, session.history_length - 5)
    said.append(((await do(session.generate(5, **SAMPLED).result)).token_ids, session.history_length))
    for closed in (fork, session):
        each()
        said.append(await do(closed.close))
    return said


def shown(fate: Fate) -> str:
    of = f"{fate.messages}" if fate.messages else ""
    return f"{fate.what}-{fate.when}{of}" + (f"-code{fate.code}" if fate.what == "reset" else "")


@pytest.fixture(scope="module")
def calm() -> list[Any]:
    """What a conversation over a calm line was, once there has been one."""
    return []


@pytest.mark.parametrize("fate", one_of_each(FATES, lambda fate: (fate.what, fate.when)), ids=shown)
async def test_whatever_becomes_of_its_calls_a_conversation_is_the_calm_one(
    server_target: str, middle: Middle, connect: Callable[..., Any], do: Do, calm: list[Any], fate: Fate
) -> None:
    if not calm:
        client = connect(target=server_target)
        calm += await conversation(client, do, lambda: None)
        await do(client.close)
    shaky = connect()
    given = await conversation(shaky, do, lambda: middle.fates.append(fate))
    assert given == calm
    assert middle.acted > 0
    await do(shaky.close)


@pytest.fixture
async def own_server(run_server: Callable[..., Any]) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """A server of this test alone, and how to drain it and end it."""
    server = run_server(ServerConfig(bind="127.0.0.1:0", drain_seconds=0.2, busy_wait_seconds=0.5))
    target = await asyncio.to_thread(server.__enter__)
    is_ended = False

    async def end() -> None:
        nonlocal is_ended
        if not is_ended:
            is_ended = True
            await asyncio.to_thread(server.__exit__, None, None, None)

    yield target, end
    await end()


@pytest.mark.parametrize(
    ("fate", "reports_progress"),
    [
        (Fate("headers", "cut"), False),  # its first message is a token
        (Fate("headers", "cut"), True),
        (Fate("messages", "close", messages=1), True),
    ],
    ids=["cut", "cut-reported", "closed-reported"],
)
async def test_a_stream_that_never_gets_to_a_token_is_tried_while_patience_lasts_and_no_more(
    server_target: str, middle: Middle, connect: Callable[..., Any], do: Do, fate: Fate, reports_progress: bool
) -> None:
    client = connect(QUICK)
    session = await do(client.create_session)
    await do(session.append, PROMPT)
    calls = middle.calls
    middle.fates.extend([fate] * 200)
    progress: list[kakeya.Progress] = []
    stream = session.generate(5, on_progress=progress.append if reports_progress else None)
    with pytest.raises(kakeya.ConnectionFailed):
        await do(stream.result)
    assert 1 < middle.calls - calls <= 10  # waits of at least 0.15, 0.3, 0.6 … s; gRPC's own calls fail unsent
    assert stream.token_ids == ()
    await do(client.close)


async def test_without_an_answer_a_call_ends_with_its_deadline_and_an_append_is_unresolved(
    middle: Middle, connect: Callable[..., Any], do: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kakeya._append.INQUIRY_SECONDS", 0.3)
    client = connect()
    session = await do(client.create_session)
    await do(session.append, PROMPT)
    middle.darken()
    with pytest.raises(kakeya.DeadlineExceeded):
        await do(session.info, timeout=0.3)
    with pytest.raises(kakeya.DeadlineExceeded):
        await do(session.generate(5, timeout=0.3).result)
    with pytest.raises(kakeya.AppendUnresolved) as caught:
        await do(session.append, [7, 8], timeout=0.3)
    assert (caught.value.appended_tokens, caught.value.history_length, caught.value.pending_tokens) == (None, 8, 2)
    assert isinstance(caught.value.__cause__, kakeya.DeadlineExceeded)
    await do(client.close)


async def test_what_a_dead_connection_holds_goes_on_over_another_one_within_the_default_timeout(
    server_target: str, middle: Middle, connect: Callable[..., Any], do: Do
) -> None:
    """Keepalive finds out that nothing comes any more. All at once, for that takes its time."""
    calm = connect(target=server_target)
    reference = await do(calm.create_session)
    await do(reference.append, PROMPT)
    expected = (await do(reference.generate(12, **SAMPLED).result)).token_ids

    async def held(fate: Fate, call: Callable[[Any], Awaitable[Any]]) -> tuple[Any, int]:
        # A middle for each: clients of one target share their connection.
        async with open_middle(server_target, [None, None, None, fate]) as own:
            client = connect(target=own.target)
            session = await do(client.create_session)
            await do(session.append, PROMPT)  # two calls: it asks for the server's limits
            result = await call(session)
            length = (await do(session.info)).history_length
            assert own.connections > 1
            await do(client.close)
            return result, length

    cut_short, complete, answered, lost = await asyncio.gather(
        held(Fate("messages", "hold", messages=4), lambda session: do(session.generate(12, **SAMPLED).result)),
        held(Fate("done", "hold"), lambda session: do(session.generate(12, **SAMPLED).result)),
        held(Fate("answer", "hold"), lambda session: do(session.append, [7, 8])),
        held(Fate("request", "hold"), lambda session: do(session.append, [7, 8])),
    )
    for result, length in (cut_short, complete):
        assert (result.token_ids, length) == (expected, 20)
    assert answered == lost == (10, 10)
    await do(calm.close)


async def test_after_a_drain_the_error_is_draining_and_not_the_refused_connection(
    own_server: tuple[str, Callable[[], Awaitable[None]]], flavour: str, do: Do
) -> None:
    target, drain = own_server
    client: Any = (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(target, retry=QUICK)
    session = await do(client.create_session, kakeya.SinkWindow(sink=4, window=32))
    await do(session.append, PROMPT)
    stream = session.generate(30_000)
    reading = asyncio.ensure_future(do(stream.result))
    while (await do(session.info)).history_length == len(PROMPT):
        pass
    await drain()
    with pytest.raises(kakeya.Draining) as caught:
        await reading
    assert isinstance(caught.value.__cause__, kakeya.ConnectionFailed)
    assert stream.token_ids
    await do(client.close)
