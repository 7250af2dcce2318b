"""Sessions of both clients against the real server on TinyModel: opened, appended to, refused, closed."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import kakeya

Do = Callable[..., Awaitable[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


async def test_a_new_session_reports_its_settings_and_bounds(client: Any, do: Do) -> None:
    session = await do(client.create_session, kakeya.SinkWindow(sink=2, window=30), label="test")
    assert session.strategy == kakeya.SinkWindow(sink=2, window=30)
    assert 0 < session.sustained_bytes <= session.peak_bytes
    assert session.limit_tokens is None
    assert session.history_length == 0
    assert session.mode in (kakeya.Mode.BATCHED, kakeya.Mode.FIXED_SHAPE)
    assert session.model_id == "tiny"
    await do(session.close)


async def test_a_full_session_has_a_limit_and_a_smaller_one_reserves_less(client: Any, do: Do) -> None:
    whole = await do(client.create_session, kakeya.Full())
    small = await do(client.create_session, kakeya.Full(), limit_tokens=64)
    assert (whole.limit_tokens, small.limit_tokens) == (512, 64)
    assert small.peak_bytes < whole.peak_bytes
    await do(whole.close)
    await do(small.close)


async def test_histories_are_counted_and_their_caps_are_typed_errors(run_server: Callable[..., Any]) -> None:
    from inference_engine.config import ServerConfig

    caps = {"history_tokens_per_session": 30, "history_tokens_per_owner": 50}
    with (
        run_server(ServerConfig(bind="127.0.0.1:0", drain_seconds=1.0), **caps) as target,
        kakeya.Client(target) as client,
    ):
        one, other = (client.create_session(kakeya.SinkWindow(window=32)) for _ in range(2))
        for _ in range(3):
            one.append(PROMPT)
        info = client.server_info()
        assert (info.history_tokens_per_session, info.history_tokens_per_owner) == (30, 50)
        assert info.history_tokens == 3 * len(PROMPT)
        assert one.info().history_bytes > other.info().history_bytes
        with pytest.raises(kakeya.HistoryLimit, match="history_tokens_per_session"):
            one.append(PROMPT)
        for _ in range(3):
            other.append(PROMPT)
        with pytest.raises(kakeya.QuotaExceeded, match="Close sessions") as caught:
            one.append(PROMPT[:3])
        assert (caught.value.quota, caught.value.retry_after_seconds) == ("history_tokens_per_owner", None)
        with pytest.raises(kakeya.QuotaExceeded):
            one.fork()
        other.close()
        assert one.append(PROMPT[:3]) == 27


async def test_a_tiered_session_reports_what_it_holds_off_the_device(client: Any, do: Do) -> None:
    tiered = kakeya.Tiered(block=4, sink=0, window=20, budget=40, resident_tokens=20)
    session = await do(client.create_session, tiered)
    assert session.strategy == tiered
    for _ in range(5):
        await do(session.append, PROMPT * (40 // len(PROMPT)))
    await do(session.generate(4).result)
    info = await do(session.info)
    assert 0 < info.tier_live_bytes <= info.tier_bytes == session.tier_bytes
    server = await do(client.server_info)
    assert session.tier_bytes <= server.tier_reserved_bytes <= server.tier_capacity_bytes
    await do(session.close)


async def test_a_long_append_is_split_and_arrives_whole(session: Any, client: Any, do: Do) -> None:
    ids = [n * 7 % 128 for n in range(123)]  # four requests of at most 40
    assert await do(session.append, ids) == 123
    by_hand = await do(client.create_session)
    for start in range(0, 123, 40):
        await do(by_hand.append, ids[start : start + 40])
    assert (await do(session.generate(6).result)).token_ids == (await do(by_hand.generate(6).result)).token_ids
    await do(by_hand.close)


async def test_a_wrong_expected_length_changes_nothing(session: Any, do: Do) -> None:
    await do(session.append, PROMPT)
    with pytest.raises(kakeya.HistoryLengthMismatch) as caught:
        await do(session.append, [1], expected_history_length=3)
    assert (caught.value.expected, caught.value.actual) == (3, len(PROMPT))
    assert caught.value.appended_tokens == 0
    with pytest.raises(kakeya.HistoryLengthMismatch):
        await do(session.generate(1, expected_history_length=3).result)
    assert (await do(session.info)).history_length == len(PROMPT)


async def test_closing_a_session_is_idempotent_and_final(client: Any, do: Do) -> None:
    session = await do(client.create_session)
    await do(session.append, PROMPT)
    assert await do(session.close) == len(PROMPT)
    assert await do(session.close) == len(PROMPT)
    assert session.is_closed
    with pytest.raises(kakeya.SessionClosed):
        await do(session.append, [1])
    with pytest.raises(kakeya.SessionClosed):
        session.generate(1)


async def test_a_sessions_with_closes_it_and_does_not_hide_what_went_wrong(client: Any, do: Do, flavour: str) -> None:
    session = await do(client.create_session)

    async def use() -> None:
        if flavour == "asyncio":
            async with session:
                raise RuntimeError("mine")
        with session:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await use()
    assert session.is_closed


async def test_what_the_server_refuses_names_the_field(session: Any, do: Do) -> None:
    await do(session.append, PROMPT)
    refused: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": -1.0},
        "top_p": {"top_p": 0.0},
        "repetition_penalty": {"repetition_penalty": 0},
        "max_tokens": {"max_tokens": 0},
    }
    for field, arguments in refused.items():
        with pytest.raises(kakeya.InvalidArgument) as caught:
            await do(session.generate(**{"max_tokens": 1, **arguments}).result)
        assert caught.value.field == field
        assert caught.value.reason == "INVALID_ARGUMENT"


async def test_what_would_not_survive_the_wire_is_refused_before_it(session: Any, do: Do) -> None:
    for arguments in (
        {"temperature": math.nan},
        {"top_p": math.inf},
        {"min_p": 1e300},
        {"max_tokens": 2**32},
        {"max_tokens": 1.0},
        {"seed": -1},
        {"seed": 2**64},
        {"top_k": True},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {-1: 1.0}},
        {"stop_token_ids": [2**32]},
        {"timeout": 0},
        {"expected_history_length": -1},
    ):
        with pytest.raises(kakeya.InvalidArgument) as caught:
            session.generate(**{"max_tokens": 1, **arguments})
        assert caught.value.field is not None
    with pytest.raises(kakeya.InvalidTokenIds):
        await do(session.append, [1, -1])
    assert (await do(session.info)).history_length == 0
