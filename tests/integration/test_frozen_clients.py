"""Clients that know only the frozen part of the wire contract work unchanged against the server as it is today."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from inference_engine.types import Finished, GenerateParams, Sampling, TokenCommitted
from tests.frozen_clients.build import (
    FrozenClient,
    build_python_client,
    build_typescript_client,
    protoc,
    python_client,
    typescript_client,
)
from tests.further import further
from tests.once import made_once
from tests.server.wire import HISTORY, SERVICE, TIMEOUT_SECONDS, serving
from tests.tiny_native import served_engine

FROZEN_METHODS = ["CreateSession", "AppendTokens", "Generate", "CloseSession", "GetSessionInfo"]
# Fields below are frozen or kept free, in every message a frozen client knows.
FIRST_ADDED_FIELD = 10
# Each field matters: a test below says so. Neither a double nor a signed integer holds the seed.
SAMPLED: dict[str, Any] = {"seed": str(2**64 - 1), "temperature": 4.0, "topP": 0.5, "topK": 20}
FOREVER = 30_000  # tokens; minutes of work for TinyModel
WINDOW = "sink_window:sink=4,window=32"

Turn = dict[str, Any]


CLIENTS: dict[str, tuple[Callable[[Path], None], Callable[[Path], FrozenClient]]] = {
    "python": (build_python_client, python_client),
    "typescript": (build_typescript_client, typescript_client),
}


@pytest.fixture(scope="session", params=["python", further("typescript")])
def client(request: pytest.FixtureRequest) -> FrozenClient:
    build, client_in = CLIENTS[request.param]
    return client_in(made_once(f"frozen-{request.param}", build, request))


def turn(token_ids: list[int], max_tokens: int, *, leave_after: int | None = None, **sampling: Any) -> Turn:
    """Append, then generate; requests in protobuf's JSON form, which writes 64-bit numbers as text."""
    generate = {"maxTokens": max_tokens, **sampling}
    return {"append": {"tokenIds": token_ids}, "generate": generate, "leaveAfter": leave_after}


async def play(client: FrozenClient, turns: list[Turn], *, eos: tuple[int, ...] = (), **settings: Any) -> Any:
    """What the client sees of the turns, from a server whose engine has these settings."""
    create = {"clientLabel": "frozen", "eosTokenIds": list(eos)}
    with served_engine(**settings) as engine:
        async with serving(engine) as server:
            return await asyncio.to_thread(client.play, server.target, {"create": create, "turns": turns})


def engine_tokens(turns: list[Turn], *, eos: tuple[int, ...] = (), **settings: Any) -> list[list[int]]:
    """The tokens of the same turns from an engine without a wire."""
    with served_engine(**settings) as engine:
        session_id = engine.create_session(eos_token_ids=eos).session_id
        generated = []
        for each in turns:
            engine.append(session_id, each["append"]["tokenIds"])
            events = list(engine.generate(session_id, params_of(each["generate"])))
            assert isinstance(events[-1], Finished)
            generated.append([event.token_id for event in events if isinstance(event, TokenCommitted)])
        return generated


def params_of(asked: dict[str, Any]) -> GenerateParams:
    sampling = Sampling(
        temperature=asked.get("temperature", 0.0),
        top_p=asked.get("topP", 1.0),
        top_k=asked.get("topK", 0),
        seed=int(asked["seed"]) if "seed" in asked else None,
    )
    return GenerateParams(max_tokens=asked["maxTokens"], sampling=sampling)


def kinds(frames: list[dict[str, Any]]) -> list[str]:
    return [kind for frame in frames for kind in frame]


def tokens(frames: list[dict[str, Any]]) -> list[int]:
    return [frame["tokenId"] for frame in frames if "tokenId" in frame]


async def test_a_whole_session_gives_a_frozen_client_the_engines_tokens(client: FrozenClient) -> None:
    turns = [turn([*HISTORY], 8), turn([1, 2, 0], 8, **SAMPLED)]
    seen = await play(client, turns)
    assert seen["methods"] == FROZEN_METHODS
    expected = engine_tokens(turns)
    for taken, generated, length in zip(seen["turns"], expected, (8, 19), strict=True):
        assert kinds(taken["frames"]) == ["tokenId"] * 8 + ["done"]
        assert tokens(taken["frames"]) == generated
        assert taken["appended"] == {"historyLength": str(length)}
        done = taken["frames"][-1]["done"]
        assert (done["stopReason"], done["generatedTokenCount"]) == ("STOP_REASON_MAX_TOKENS", 8)
        assert 0.0 < done["prefillDurationSeconds"] <= done["totalDurationSeconds"]
        info = taken["info"]
        assert (info["historyLength"], int(info["kvLiveBytes"]) > 0) == (str(length + 8), True)
        assert (info["cacheInvariantInv1Violations"], info["cacheInvariantInv2Violations"]) == ("0", "0")
        assert info["idleSeconds"] >= 0.0
    assert seen["closed"] == {"finalHistoryLength": "27"}
    assert seen["afterwards"] == dict.fromkeys(FROZEN_METHODS[1:], grpc.StatusCode.NOT_FOUND.value[0])


@pytest.mark.parametrize("field", SAMPLED)
def test_without_any_one_sampling_field_the_tokens_would_differ(field: str) -> None:
    fewer = {name: value for name, value in SAMPLED.items() if name != field}
    if field == "seed":
        fewer["seed"] = "0"
    assert engine_tokens([turn([*HISTORY], 8, **SAMPLED)]) != engine_tokens([turn([*HISTORY], 8, **fewer)])


async def test_a_server_that_keeps_a_window_says_truncated_once_and_first(client: FrozenClient) -> None:
    turns = [turn([*HISTORY], 2), turn([*HISTORY] * 20, 4), turn([], 4)]
    seen = await play(client, turns, strategy=WINDOW)
    short, *long = (taken["frames"] for taken in seen["turns"])
    assert kinds(short) == ["tokenId", "tokenId", "done"]
    assert [kinds(frames) for frames in long] == [["truncated", *["tokenId"] * 4, "done"]] * 2
    dropped = [int(frames[0]["truncated"]["droppedTokenCount"]) for frames in long]
    assert 0 < dropped[0] <= dropped[1] < 8 + 2 + 160 + 4
    assert [tokens(taken["frames"]) for taken in seen["turns"]] == engine_tokens(turns, strategy=WINDOW)


async def test_a_frozen_client_that_breaks_a_stream_off_goes_on_with_what_was_committed(client: FrozenClient) -> None:
    turns = [turn([*HISTORY], FOREVER, leave_after=2), turn([1, 2, 3], 4)]
    left, after = (await play(client, turns, strategy=WINDOW))["turns"]
    shown = tokens(left["frames"])
    kept = int(after["appended"]["historyLength"]) - len(HISTORY) - 3
    assert 2 <= len(shown) <= kept < FOREVER
    expected = engine_tokens([turn([*HISTORY], kept), turns[1]], strategy=WINDOW)
    assert shown == expected[0][: len(shown)]
    assert tokens(after["frames"]) == expected[1]


@pytest.fixture(scope="session")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], type[Message]]:
    """The frozen messages by name, in a pool of their own, so that they live beside the current ones."""
    compiled = tmp_path_factory.mktemp("frozen") / "contract"
    protoc(f"--descriptor_set_out={compiled}")
    pool = DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return lambda name: GetMessageClass(pool.FindMessageTypeByName(f"kakeya.v1.{name}"))


def unknown(message: Message) -> list[int]:
    """Numbers of the fields that a message carries and its contract does not know."""
    fields = UnknownFieldSet(message)
    return [fields[index].field_number for index in range(len(fields))]


async def call(channel: Any, frozen: Callable[[str], Any], method: str, **fields: Any) -> list[Any]:
    """What the bytes of an answer say by the frozen messages alone; for Generate, of every frame."""
    request = frozen(f"{method}Request")(**fields).SerializeToString()
    path, parse = SERVICE + method, frozen(f"{method}Response").FromString
    if method == "Generate":
        return [parse(frame) async for frame in channel.unary_stream(path)(request, timeout=TIMEOUT_SECONDS)]
    return [parse(await channel.unary_unary(path)(request, timeout=TIMEOUT_SECONDS))]


async def test_frames_before_done_hold_frozen_fields_alone_and_new_ones_stay_out_of_their_numbers(
    frozen: Callable[[str], Any],
) -> None:
    with served_engine(strategy=WINDOW) as engine:
        async with serving(engine) as server, grpc.aio.insecure_channel(server.target) as channel:
            ask = partial(call, channel, frozen)
            opened = await ask("CreateSession")
            session_id = opened[0].session_id
            appended = await ask("AppendTokens", session_id=session_id, token_ids=[*HISTORY] * 20)
            frames = await ask("Generate", session_id=session_id, max_tokens=3)
            reported = await ask("GetSessionInfo", session_id=session_id)
            closed = await ask("CloseSession", session_id=session_id)

    assert [frame.WhichOneof("payload") for frame in frames] == ["truncated", *["token_id"] * 3, "done"]
    assert not any(unknown(frame) for frame in [*frames, frames[0].truncated])
    assert unknown(frames[-1].done), "nothing is unknown: the messages compared with are not the frozen ones"
    for answer in [*opened, *appended, frames[-1].done, *reported, *closed]:
        assert all(number >= FIRST_ADDED_FIELD for number in unknown(answer))
