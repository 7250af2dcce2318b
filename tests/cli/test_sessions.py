"""`kakeya sessions`: what it shows and closes on a running server."""

from collections.abc import Iterator

import pytest

import kakeya
from inference_engine.cli.main import main
from tests.processes import Server

PROMPT = [3, 14, 15, 92]


@pytest.fixture
def client(server: Server) -> Iterator[kakeya.Client]:
    with kakeya.Client(server.target) as client:
        yield client
        for one in client.sessions():
            client.session(one.id).close()


def test_sessions_are_listed_shown_and_closed(
    server: Server, client: kakeya.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"--target={server.target}"
    session, other = client.create_session(kakeya.SinkWindow(window=64), label="a long talk"), client.create_session()
    session.append(PROMPT)
    generated = session.generate(3).result().token_ids
    assert main(["sessions", "list", target]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "TOKENS", "AGE", "IDLE", "STATE", "STRATEGY", "LABEL"]
    of_session, of_other = (next(row for row in rows if row.startswith(each.id)) for each in (session, other))
    assert of_session.split()[1] == "7" and of_session.endswith("a long talk")
    assert "sink_window:" in of_session and "window=64" in of_session
    assert of_other.split()[1] == "0"

    assert main(["sessions", "show", session.id, "--ids", target]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2:] == [
        f"appended    {' '.join(map(str, PROMPT))}",
        f"generated   {' '.join(map(str, generated))}",
    ]
    assert "durability  none" in shown and any(line.startswith("history     7 tokens") for line in shown)

    assert main(["sessions", "close", session.id, target]) == 0
    assert capsys.readouterr().out == f"closed {session.id} with 7 tokens\n"
    assert main(["sessions", "close", "--all", target]) == 0
    assert other.id in capsys.readouterr().out
    assert list(client.sessions()) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["show", "no-such-id"], "you have no session no-such-id there; `kakeya sessions list` shows yours"),
        (["close", "no-such-id", "another"], "you have no session no-such-id there"),
        (["close"], "give the ids of the sessions to close, or --all"),
        (["close", "an-id", "--all"], "give the ids of the sessions to close, or --all"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    server: Server, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert main(["sessions", *arguments, f"--target={server.target}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kakeya sessions: ") and error in said and said.count("\n") == 1
