"""`kakeya bench serve`: a load that does not wait for the server, and what is said of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from inference_engine.cli.main import main
from inference_engine.errors import ConfigError
from kakeya import AsyncClient
from laboratory.evaluation.record import load
from laboratory.load.driver import NO_RETRIES, Driver, Phase
from laboratory.load.phases import Plan, Played, crews_of, fair_parts, play
from laboratory.load.samples import Samples
from laboratory.load.schedule import Agent, Shape, Turn, schedule
from laboratory.scripted import Script
from tests.further import further_test
from tests.load.scripted import scripted_engine
from tests.server_thread import server_thread

SHAPE = Shape(turns=6, prompt_tokens=30, append_tokens=8, generate_tokens=4, interval_seconds=2.0)


def agents(seconds: float, *, seed: int = 0, count: int = 20) -> list[Agent]:
    return list(schedule(SHAPE, agents=count, seconds=seconds, seed=seed))


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"append_tokens": 0}, {"interval_seconds": 0.0}], ids=str)
def test_a_shape_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Shape(**wrong)  # type: ignore[arg-type]


def test_goodput_counts_tokens_in_the_seconds_they_came_and_none_before_or_after_the_phase() -> None:
    samples = Samples()
    samples.tokens_by_second.update({-1: 2, 0: 3, 1: 5, 7: 11})
    assert samples.goodput(3.0) == [3.0, 5.0, 0.0]


@pytest.fixture
def target() -> Iterator[str]:
    with (
        scripted_engine(max_sessions=4, script=Script(step_seconds=0.001)) as engine,
        server_thread(engine) as target,
    ):
        yield target


def played(target: str, agents: list[Agent], *, warm_seconds: float = 0.0) -> Samples:
    phase = Phase(seconds=60.0, warm_seconds=warm_seconds, strategy=None, limit_tokens=300, vocab_size=256)

    async def drive() -> Samples:
        async with AsyncClient(target, retry=NO_RETRIES) as client:
            return await Driver(client, phase).run(agents)

    return asyncio.run(drive())


def turn(due_seconds: float, *, tokens: int = 5) -> Turn:
    return Turn(due_seconds=due_seconds, append_tokens=6, generate_tokens=tokens)


def test_a_turn_is_timed_from_when_it_was_due_not_from_when_it_could_begin(target: str) -> None:
    """Two turns of one agent at the same time: the second waits for the first, and its wait counts."""
    samples = played(target, [Agent(number=0, turns=(turn(0.0, tokens=40), turn(0.0)))])
    assert samples.finished == 2
    assert len(samples.first_token) == 2
    assert samples.first_token[1] > samples.turn[0]
    # Most of that is the turn before, and reported as such.
    assert samples.first_token[1] == pytest.approx(samples.behind[1] + samples.first_token_asked[1], abs=0.2)


def test_refusals_are_counted_by_reason_and_end_their_turn_alone(target: str) -> None:
    """There is room for four sessions: turns of the other agents are refused, each anew."""
    many = [Agent(number=number, turns=(turn(0.0, tokens=40), turn(0.0, tokens=40))) for number in range(12)]
    samples = played(target, many)
    assert samples.due == 24 == samples.finished + samples.refused.total()
    assert samples.refused.total() > 0
    assert set(samples.refused) <= {"NO_CAPACITY", "QUOTA_EXCEEDED"}
    assert not samples.failed
    assert len(samples.refusal) == samples.refused.total()


def test_parts_say_what_the_agents_of_each_owner_asked_for_and_received(target: str) -> None:
    plan = Plan(shape=SHAPE, agents=4, loads=(0.5, 1.0), seconds=4.0, warm_seconds=0.0, seed=1, limit_tokens=300)

    async def drive() -> Sequence[Played]:
        async with AsyncClient(target, retry=NO_RETRIES) as one, AsyncClient(target, retry=NO_RETRIES) as other:
            return (await play(plan, one, other))[1]

    few, all_agents = asyncio.run(drive())
    crews = crews_of(schedule(SHAPE, agents=4, seconds=4.0, seed=1), 4, 2)
    tokens = [sum(turn.generate_tokens for agent in crew for turn in agent.turns) for crew in crews]
    assert [4.0 * part.asked for part in all_agents.parts] == tokens
    for phase in (few, all_agents):
        received = sum(part.received for part in phase.parts)
        assert received == pytest.approx(sum(phase.samples.goodput(4.0)) / 4.0)
        assert sum(part.fair for part in phase.parts) == pytest.approx(received)
        assert all(part.fair <= part.asked for part in phase.parts)
    assert sum(part.asked for part in all_agents.parts) > sum(part.asked for part in few.parts)


@pytest.mark.parametrize(
    ("asked", "received", "fair"),
    [
        ((90.0, 10.0, 10.0), (40.0, 10.0, 10.0), (40.0, 10.0, 10.0)),
        ((90.0, 50.0, 4.0), (50.0, 10.0, 0.0), (28.0, 28.0, 4.0)),
        ((5.0,), (4.0,), (4.0,)),
        ((10.0, 20.0), (20.0, 20.0), (20.0, 20.0)),
        ((10.0, 20.0), (0.0, 0.0), (0.0, 0.0)),
    ],
    ids=str,
)
def test_a_fair_part_is_what_was_asked_for_or_as_much_as_others_have(
    asked: tuple[float, ...], received: tuple[float, ...], fair: tuple[float, ...]
) -> None:
    assert tuple(part.fair for part in fair_parts(asked, received, 1.0)) == fair


@further_test
def test_the_command_plays_each_load_and_writes_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    status = main(
        [
            *("bench", "serve", "--target", target, "--agents", "2", "--loads", "1", "2", "--seconds", "1.5"),
            *("--warm-seconds", "0.2", "--interval-seconds", "0.4", "--prompt-tokens", "10", "--append-tokens", "4"),
            *("--generate-tokens", "3", "--limit-tokens", "300", "--results", str(tmp_path)),
        ]
    )
    assert status == 0
    (path,) = tmp_path.glob("serve_load/*/record.json")
    record = load(path)
    assert [phase["agents"] for phase in record["tables"]["phases"]] == [2, 4]
    assert {"goodput_1x", "first_token_p99_2x", "goodput_over_peak_2x"} <= set(record["values"])
    assert target not in path.read_text(encoding="utf-8")
    assert "goodput" in capsys.readouterr().out
