"""Both clients over lines that break, against the real server: what a caller gets is what a calm line gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import kakeya
from tests.further import further
from tests.middle import Fate, Middle, open_middle

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
# gRPC itself waits a fifth of a second and more between connections, and meanwhile fails calls at once.
STUBBORN = kakeya.RetryPolicy(attempts=100, first_delay_seconds=0.02, max_delay_seconds=0.1)
SAMPLED = {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 11}
STRATEGIES = [kakeya.Full(), kakeya.SinkWindow(sink=4, window=16)]


# Of each attempt: nothing comes back, too little for an answer, or some tokens; then all. An answer of one message
# passes where the break is behind a later one.
BREAKS = [
    Fate("headers", "cut"),
    Fate("messages", "cut", messages=5),
    Fate("answer", "cut"),
    Fate("inside", "cut", messages=1),
    Fate("request", "cut"),
    *(Fate(when, "cut", messages=count) for count in (4, 9, 6, 12) for when in ("messages", "inside")),
]


@pytest.fixture
async def line(server_target: str) -> AsyncIterator[Middle]:
    async with open_middle(server_target, BREAKS) as line:
        yield line


def connect(flavour: str, target: str) -> Any:
    return (kakeya.Client if flavour == "threads" else kakeya.AsyncClient)(target, retry=STUBBORN)


async def conversation(client: Any, do: Do, strategy: kakeya.Strategy, **sampling: Any) -> list[kakeya.GenerateResult]:
    """Two turns of a session and one of its fork."""
    session = await do(client.create_session, strategy)
    results = []
    for turn in range(2):
        await do(session.append, [(7 * turn + position) % 128 for position in range(50)])  # two requests
        results.append(await do(session.generate(40, logprobs=True, **sampling).result))
    fork = await do(session.fork, expected_history_length=results[-1].history_length)
    await do(fork.append, PROMPT)
    results.append(await do(fork.generate(20, logprobs=True, **sampling).result))
    assert await do(fork.close) == results[-1].history_length
    assert await do(session.close) == results[-2].history_length
    return results


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    [
        (STRATEGIES[0], SAMPLED),
        (STRATEGIES[1], {}),
        further(STRATEGIES[0], {}),
        further(STRATEGIES[1], SAMPLED),
    ],
    ids=["full-sampled", "sink_window-greedy", "full-greedy", "sink_window-sampled"],
)
async def test_a_conversation_over_a_line_that_breaks_is_the_calm_one(
    server_target: str, line: Middle, flavour: str, do: Do, strategy: kakeya.Strategy, sampling: dict[str, Any]
) -> None:
    calm, shaky = connect(flavour, server_target), connect(flavour, line.target)
    expected = await conversation(calm, do, strategy, **sampling)
    given = await conversation(shaky, do, strategy, **sampling)
    assert line.acted > 4
    for one, other in zip(given, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert (one.stop_reason, one.history_length) == (other.stop_reason, other.history_length)
        assert one.truncated_tokens == other.truncated_tokens
    await do(calm.close)
    await do(shaky.close)


async def test_a_fork_diverges_from_its_session(server_target: str, flavour: str, do: Do) -> None:
    client = connect(flavour, server_target)
    session = await do(client.create_session, kakeya.SinkWindow(sink=4, window=32), eos_token_ids=[1])
    await do(session.append, PROMPT)
    await do(session.generate(5).result)
    fork = await do(session.fork, limit_tokens=100, label="branch")
    assert fork.id != session.id
    assert fork.strategy == session.strategy
    assert fork.limit_tokens == 100
    assert fork.history_length == session.history_length == (await do(fork.info)).history_length
    await do(fork.append, [5])
    assert (await do(session.info)).history_length == fork.history_length - 1
    with pytest.raises(kakeya.HistoryLengthMismatch):
        await do(session.fork, expected_history_length=3)
    await do(fork.close)
    await do(session.close)
    await do(client.close)
