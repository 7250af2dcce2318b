"""Whatever a client sends, it gets a typed refusal, nothing changes, and other sessions go on (see `client`)."""

import math
from typing import Any

import pytest

from inference_engine.engine import Engine
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, connected, held, read_rest, refused, serving
from tests.tiny import VOCABULARY
from tests.tiny_native import served_engine

pytestmark = pytest.mark.hostile

NAN, INFINITY = math.nan, math.inf
UNARY_METHODS = (
    "CreateSession",
    "AppendTokens",
    "CloseSession",
    "ForkSession",
    "GetSessionInfo",
    "GetServerInfo",
    "ListSessions",
    "ReadHistory",
)


def varint(value: int) -> bytes:
    """As protobuf writes it; negative numbers take ten bytes."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def message_with_ids(session_id: str, *token_ids: int) -> bytes:
    """An AppendTokensRequest whose ids are written as they are, whether or not a stub would."""
    ids = b"".join(map(varint, token_ids))
    return pb.AppendTokensRequest(session_id=session_id).SerializeToString() + b"\x12" + varint(len(ids)) + ids


@pytest.mark.parametrize("index", [0, 3])
async def test_one_id_outside_the_vocabulary_refuses_the_whole_append(
    client: Client, index: int, subtests: pytest.Subtests
) -> None:
    for token_id in (-1, -(2**31), VOCABULARY, 2**31, 2**32 - 1):
        with subtests.test(str(token_id)):
            session_id = await client.open()
            ids = [1, 2, 3, 4]
            ids[index] = token_id
            details = await refused(client.raw("AppendTokens", message_with_ids(session_id, *ids)))
            assert details.reason == "INVALID_ARGUMENT TOKEN_OUT_OF_RANGE"
            assert details.fields == ["token_ids"]
            assert await client.length(session_id) == len(HISTORY)


OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INFINITY}, "temperature"),
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": -INFINITY}, "temperature"),
    ({"temperature": 101.0}, "temperature"),
    ({"top_p": NAN}, "top_p"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": -1.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": INFINITY}, "top_p"),
    ({"min_p": NAN}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": NAN}, "repetition_penalty"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"repetition_penalty": INFINITY}, "repetition_penalty"),
    ({"repetition_penalty": 1e-30}, "repetition_penalty"),
    ({"temperature": 1e-45}, "temperature"),
    ({"logit_bias": {1: NAN}}, "logit_bias"),
    ({"logit_bias": {1: -INFINITY}}, "logit_bias"),
    ({"logit_bias": {1: 1001.0}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 32_769}, "max_tokens"),
    ({"max_tokens": 2**32 - 1}, "max_tokens"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    ({"top_logprobs": 21, "logprobs": True, "token_details": True}, "top_logprobs"),
    ({"top_logprobs": 1, "token_details": True}, "top_logprobs"),
    ({"min_tokens": 2**32 - 1}, "min_tokens"),
    ({"allowed_token_ids": pb.TokenSet()}, "allowed_token_ids"),
    ({"allowed_token_ids": pb.TokenSet(token_ids=[VOCABULARY])}, "allowed_token_ids"),
    ({"allowed_token_ids": pb.TokenSet(ranges=[1, 2, 3])}, "allowed_token_ids.ranges"),
    ({"banned_token_ids": pb.TokenSet(ranges=[0, VOCABULARY])}, "banned_token_ids"),
    ({"banned_token_ids": pb.TokenSet(token_ids=[1] * 65_537)}, "banned_token_ids.token_ids"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": NAN}, "frequency_penalty"),
    ({"stop_sequences": [pb.TokenIds(token_ids=[1])] * 65}, "stop_sequences"),
    ({"stop_sequences": [pb.TokenIds()]}, "stop_sequences"),
    ({"stop_sequences": [pb.TokenIds(token_ids=[1] * 1025)]}, "stop_sequences"),
    ({"stop_sequences": [pb.TokenIds(token_ids=[1, VOCABULARY])]}, "stop_sequences"),
    ({"logprobs": True}, "logprobs"),
]


async def test_a_number_out_of_range_is_refused_by_name(client: Client, subtests: pytest.Subtests) -> None:
    for fields, named in OUT_OF_RANGE:
        with subtests.test(str(fields)[:60]):
            session_id = await client.open()
            details = await refused(client.generate(session_id, **{"max_tokens": 4, **fields}))
            assert details.reason in ("INVALID_ARGUMENT INVALID_ARGUMENT", "INVALID_ARGUMENT TOKEN_OUT_OF_RANGE")
            assert details.fields == [named]
            assert await client.length(session_id) == len(HISTORY)


def by_name(name: str, **options: str) -> pb.Strategy:
    return pb.Strategy(named=pb.NamedStrategy(name=name, options=options))


def layers_kept_full(*layers: int) -> pb.Strategy:
    return pb.Strategy(layer_window=pb.LayerWindowStrategy(window=32, full_layers=layers))


IMPOSSIBLE_SESSIONS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": pb.Strategy()}, "strategy"),
    ({"strategy": pb.Strategy.FromString(b"\xfa\x01\x00")}, "strategy"),  # an arm from the future
    ({"strategy": pb.Strategy(sink_window=pb.SinkWindowStrategy(window=0))}, "strategy.sink_window.window"),
    ({"strategy": pb.Strategy(sink_window=pb.SinkWindowStrategy(window=2**32 - 1))}, "strategy.sink_window.window"),
    ({"strategy": pb.Strategy(sink_window=pb.SinkWindowStrategy(sink=2**32 - 1))}, "strategy.sink_window.window"),
    ({"strategy": pb.Strategy(layer_window=pb.LayerWindowStrategy())}, "strategy.layer_window.full_layers"),
    ({"strategy": layers_kept_full(1, 1)}, "strategy.layer_window.full_layers"),
    ({"strategy": layers_kept_full(1, 3)}, "strategy.layer_window.full_layers"),  # there are three
    ({"strategy": layers_kept_full(0, 1)}, "strategy.layer_window.full_layers"),  # the first slides by itself
    ({"strategy": pb.Strategy(restored=pb.RestoredStrategy(window=0))}, "strategy.restored.window"),
    ({"strategy": pb.Strategy(restored=pb.RestoredStrategy(window=2**32 - 1))}, "strategy.restored.window"),
    ({"strategy": pb.Strategy(restored=pb.RestoredStrategy(source="dreams"))}, "strategy.restored.source"),
    # The latent codec that is loaded has fewer bytes.
    (
        {"strategy": pb.Strategy(restored=pb.RestoredStrategy(source="latent", window=32, bytes_per_token=4096))},
        "strategy.restored.bytes_per_token",
    ),
    (
        {"strategy": pb.Strategy(restored=pb.RestoredStrategy(bytes_per_token=64))},
        "strategy.restored.bytes_per_token",
    ),
    ({"strategy": pb.Strategy(restored=pb.RestoredStrategy(mode="sleepy"))}, "strategy.restored.mode"),
    # Nothing is kept that could be read chunk by chunk, or that could be put elsewhere.
    ({"strategy": pb.Strategy(restored=pb.RestoredStrategy(mode="stream"))}, "strategy.restored.mode"),
    (
        {"strategy": pb.Strategy(restored=pb.RestoredStrategy(resident_latent_bytes=2**63))},
        "strategy.restored.resident_latent_bytes",
    ),
    ({"strategy": pb.Strategy(gather=pb.GatherStrategy(block=0))}, "strategy.gather.block"),
    ({"strategy": pb.Strategy(gather=pb.GatherStrategy(block=129))}, "strategy.gather.block"),
    ({"strategy": pb.Strategy(gather=pb.GatherStrategy(budget=700))}, "strategy.gather.budget"),
    ({"strategy": pb.Strategy(gather=pb.GatherStrategy(window=2**32 - 1))}, "strategy.gather.window"),
    (
        {"strategy": pb.Strategy(gather=pb.GatherStrategy(window=8, sink=0, block=4, budget=64))},
        "strategy.gather.window",
    ),
    ({"strategy": pb.Strategy(gather=pb.GatherStrategy(scorer="luck"))}, "strategy.gather.scorer"),
    ({"strategy": pb.Strategy(tiered=pb.TieredStrategy(block=0))}, "strategy.tiered.block"),
    ({"strategy": pb.Strategy(tiered=pb.TieredStrategy(block=129))}, "strategy.tiered.block"),
    ({"strategy": pb.Strategy(tiered=pb.TieredStrategy(budget=700))}, "strategy.tiered.budget"),
    (
        {"strategy": pb.Strategy(tiered=pb.TieredStrategy(window=8, sink=0, block=4, budget=64))},
        "strategy.tiered.window",
    ),
    (
        {"strategy": pb.Strategy(tiered=pb.TieredStrategy(resident_tokens=511))},
        "strategy.tiered.resident_tokens",
    ),
    (
        {"strategy": pb.Strategy(tiered=pb.TieredStrategy(resident_tokens=2**32 - 1))},
        "strategy.tiered.resident_tokens",
    ),
    ({"strategy": pb.Strategy(full=pb.FullStrategy(exact_window=9))}, "strategy.full.exact_window"),
    ({"strategy": pb.Strategy(full=pb.FullStrategy(codec="no such"))}, "strategy.full.codec"),
    (
        {"strategy": pb.Strategy(full=pb.FullStrategy(codec="int8", exact_layers=[1, 3]))},
        "strategy.full.exact_layers",
    ),
    ({"limit_tokens": 0}, "limit_tokens"),
    ({"strategy": by_name("gone")}, "strategy"),
    ({"strategy": pb.Strategy(mac=pb.MacStrategy(ring=9))}, "strategy"),  # of a package that is not installed
    ({"strategy": by_name("gather", circle="9")}, "strategy"),
    ({"strategy": by_name("gather", block="x")}, "strategy.named.options.block"),
    ({"strategy": by_name("gather", block="99999999999999999999")}, "strategy.named.options.block"),
    ({"strategy": by_name("layer_window", window="32", full_layers="1+3")}, "strategy.named.options.full_layers"),
    ({"strategy": by_name("sink_window", window="4294967295")}, "strategy.named.options.window"),
    ({"limit_tokens": 2**64 - 1}, "limit_tokens"),
    ({"eos_token_ids": [VOCABULARY]}, "eos_token_ids"),
    ({"eos_token_ids": [2**32 - 1]}, "eos_token_ids"),
    ({"eos_token_ids": [1] * 65}, "eos_token_ids"),
    ({"client_label": "x" * 129}, "client_label"),
    ({"client_label": "two\nlines"}, "client_label"),
]


async def test_a_session_that_cannot_be_is_refused_by_the_name_of_the_field(
    engine: Engine, client: Client, subtests: pytest.Subtests
) -> None:
    for fields, named in IMPOSSIBLE_SESSIONS:
        with subtests.test(str(fields)):
            before = engine.info().kv_reserved_bytes
            details = await refused(client.open((), **fields))
            assert details.code.name == "INVALID_ARGUMENT"
            assert details.error_info is not None
            assert details.fields == [named]
            assert engine.info().kv_reserved_bytes == before


@pytest.mark.parametrize("method", [*UNARY_METHODS, "Generate"])
async def test_bytes_that_are_no_message_are_refused_without_internals(
    client: Client, method: str, subtests: pytest.Subtests
) -> None:
    wrong_fields = () if method == "GetServerInfo" else (b"\x0a\x02\xff\xfe", b"\x0a\x7fshort")  # it has none
    for message in (b"\xff", *wrong_fields):
        with subtests.test(str(message)):
            details = await refused(client.raw(method, message))
            assert details.reason == "INVALID_ARGUMENT"
            assert details.text == f"the message is not a valid kakeya.v1.{method}Request"


@pytest.mark.parametrize(
    "method", ["AppendTokens", "Generate", "CloseSession", "ForkSession", "GetSessionInfo", "ReadHistory"]
)
async def test_every_unknown_session_gets_the_same_bytes(
    client: Client, method: str, subtests: pytest.Subtests
) -> None:
    for session_id in ("", "word", "long" * 5_000, "odd\u202e\x00"):
        with subtests.test(session_id):
            details = await refused(client.call(method, getattr(pb, f"{method}Request")(session_id=session_id)))
            assert details.reason == "NOT_FOUND SESSION_NOT_FOUND"
            assert details.text == "no such session; create one with CreateSession"
            assert details.error_info is not None
            assert not details.error_info.metadata


async def test_whether_the_session_exists_is_said_before_what_is_wrong_with_the_arguments(client: Client) -> None:
    details = await refused(client.generate("unknown", 0, temperature=NAN))
    assert details.reason == "NOT_FOUND SESSION_NOT_FOUND"
    details = await refused(client.append("unknown", [VOCABULARY]))
    assert details.reason == "NOT_FOUND SESSION_NOT_FOUND"


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    with served_engine(max_running=1, max_queued=1) as engine, held(engine) as release:
        async with serving(engine) as handle, connected(handle) as client:
            request = pb.GenerateRequest(session_id=await client.open(), max_tokens=8, progress=True)
            waiting = client.stream(request)
            assert (await waiting.read()).accepted.queue_position == 1
            details = await refused(client.generate(await client.open()))
            release()
            assert details.reason == "RESOURCE_EXHAUSTED OVERLOADED"
            assert details.retry_info is not None
            assert len([frame for frame in await read_rest(waiting) if frame.HasField("token_id")]) == 8
