"""ListSessions, ReadHistory and the route of an id: what an owner may know of his own sessions, and no other owner."""

import itertools
from typing import Any

import pytest

from inference_engine.engine import Engine
from kakeya.v1 import runtime_pb2 as pb
from tests.server.wire import HISTORY, Client, refused

ROUTE = "0123456789abcdef"


async def listed(client: Client, **fields: Any) -> Any:
    return await client.call("ListSessions", pb.ListSessionsRequest(**fields))


async def read(client: Client, session_id: str, **fields: Any) -> Any:
    return await client.call("ReadHistory", pb.ReadHistoryRequest(session_id=session_id, **fields))


async def test_pages_of_a_list_have_every_session_once_though_others_come_and_go(client: Client) -> None:
    opened = {await client.open(client_label=f"number {number}") for number in range(7)}
    before = {one.session_id for one in (await listed(client)).sessions}
    found: list[str] = []
    token = ""
    for page in itertools.count():
        answer = await listed(client, page_size=3, page_token=token)
        found += [one.session_id for one in answer.sessions]
        assert len(answer.sessions) <= 3
        if page == 0:
            await client.open()
        if not (token := answer.next_page_token):
            break
    assert opened <= before <= set(found)
    assert len(found) == len(set(found))


async def test_a_history_is_read_in_pieces_with_how_each_token_came(client: Client) -> None:
    session_id = await client.open()
    said = await client.generate(session_id, 5)
    await client.append(session_id, [1, 2])
    whole = await read(client, session_id)
    assert list(whole.token_ids) == [*HISTORY, *said, 1, 2]
    assert list(whole.run_lengths) == [len(HISTORY), 5, 2]
    assert whole.history_length == len(whole.token_ids)
    for first, most in itertools.product((0, 7, 8, 10, 13, 15), (1, 4, 100)):
        piece = await read(client, session_id, first_position=first, max_tokens=most)
        assert list(piece.token_ids) == list(whole.token_ids)[first : first + most]
        assert (piece.first_position, sum(piece.run_lengths)) == (first, len(piece.token_ids))
    generated = await read(client, session_id, first_position=9, max_tokens=2)
    assert list(generated.run_lengths) == [0, 2]


@pytest.mark.parametrize(
    ("method", "fields", "named"),
    [
        ("ListSessions", {"page_size": 1001}, "page_size"),
        ("ReadHistory", {"first_position": len(HISTORY) + 1}, "first_position"),
    ],
    ids=str,
)
async def test_what_is_out_of_range_is_said(client: Client, method: str, fields: dict[str, Any], named: str) -> None:
    if method == "ReadHistory":
        fields = {**fields, "session_id": await client.open()}
    details = await refused(client.call(method, getattr(pb, f"{method}Request")(**fields)))
    assert (details.reason, details.fields) == ("INVALID_ARGUMENT INVALID_ARGUMENT", [named])


async def test_an_id_begins_with_the_route_that_the_client_sent_and_so_do_those_of_forks(client: Client) -> None:
    metadata = (("kakeya-route", ROUTE),)
    routed = await client.stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata)
    route, _, secret = routed.session_id.partition(".")
    assert route == ROUTE
    assert len(secret) >= 22  # 128 bits and more
    await client.append(routed.session_id, HISTORY)
    fork = await client.call("ForkSession", pb.ForkSessionRequest(session_id=routed.session_id))
    assert fork.session_id.startswith(f"{ROUTE}.")
    assert await client.generate(fork.session_id)
    assert "." not in await client.open()


async def test_a_route_of_another_form_is_refused(client: Client, engine: Engine, subtests: pytest.Subtests) -> None:
    for routes in (["0123"], [ROUTE.upper()], [ROUTE + "0"], ["a.b/../c0123456"], [ROUTE, ROUTE]):
        with subtests.test(str(routes)):
            before = engine.info().kv_reserved_bytes
            metadata = tuple(("kakeya-route", route) for route in routes)
            details = await refused(client.stub.CreateSession(pb.CreateSessionRequest(), metadata=metadata))
            assert (details.reason, details.fields) == ("INVALID_ARGUMENT INVALID_ARGUMENT", ["kakeya-route"])
            assert engine.info().kv_reserved_bytes == before
