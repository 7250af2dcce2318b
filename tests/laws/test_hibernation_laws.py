"""Saved to a file and read from it = never saved, over every registered strategy; a file that disagrees is not used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from inference_engine.engine import Engine
from inference_engine.kv.strategy import KVStrategy
from inference_engine.types import Finished, GenerateParams, Mode
from tests.facade import copies_known, drop_entries, kv_of, save_copies
from tests.further import further
from tests.kept import after_a_kill, keeping, saved
from tests.laws.variants import (
    MODES,
    all_strategies,
    drain,
    each_mechanism,
    each_strategy_with,
    engine_for,
    generate,
    mechanism,
    same,
    text,
    tokens,
)
from tests.tiny import SMALL

PARAMS = GenerateParams(max_tokens=8, logprobs=True)
PLACES = (109, 70)  # within the last segment of a session's history, and before
IN_TURN = {"at": PLACES}


def with_turns(engine: Engine, strategy: KVStrategy, *, seed: int = 0) -> str:
    session = engine.create_session(strategy=strategy).session_id
    for turn in range(3):
        engine.append(session, text(30 + turn, seed=seed + turn))
        generate(engine, session, 6)
    return session


def made_in(mode: Mode) -> Callable[..., Engine]:
    return lambda **settings: engine_for(mode, hibernate="always", **settings)


def go_on(engine: Engine, session: str) -> tuple[list[tuple[int, float | None]], int]:
    """Its tokens with log-probabilities, and how many tokens of the history had K/V when it began."""
    events = drain(engine.generate(session, PARAMS))
    assert isinstance(events[-1], Finished)
    return tokens(events), events[-1].cached_tokens


def reads(engine: Engine, outcome: str) -> int:
    return int(engine.metrics.copies_read.labels(outcome)._value.get())


@each_strategy_with(mode=MODES)
def test_a_session_read_from_a_file_goes_on_to_the_bit_as_one_that_never_was_in_one(
    tmp_path: Path, strategy: KVStrategy, mode: Mode
) -> None:
    """Where bits are promised: how a prefill is cut depends on what steps took."""
    with keeping(tmp_path / "state", make=made_in(mode)) as engine:
        session = with_turns(engine, strategy)
        cached = engine.session_info(session).cached_tokens
        assert len(save_copies(engine, tmp_path / "state")) == 1
        engine.append(session, text(25, seed=8))
        saved(engine)
        killed = after_a_kill(tmp_path / "state")
        never_saved = [go_on(engine, session), go_on(engine, session)]
        facts = engine.session_info(session)
    with keeping(killed, make=made_in(mode)) as engine:
        engine.recall(session)
        first = go_on(engine, session)
        assert same(first[0], never_saved[0][0], mode)
        assert first[1] == never_saved[0][1] == cached, "only what came after the copy is prefilled"
        save_copies(engine, killed)
        drop_entries(engine, session)  # within one process, too
        second = go_on(engine, session)
        assert same(second[0], never_saved[1][0], mode) and second[1] == never_saved[1][1]
        assert reads(engine, "used") == 2
        again = engine.session_info(session)
        assert (again.evicted_tokens, again.kv_live_bytes) == (facts.evicted_tokens, facts.kv_live_bytes)


@each_strategy_with(in_turn=IN_TURN)
def test_after_a_restart_a_session_goes_back_in_its_file_as_far_as_in_memory(
    tmp_path: Path, strategy: KVStrategy, at: int
) -> None:
    """Rewound before the first Generate, then given more tokens than the file has; a fork reads it, too."""
    make = made_in(Mode.BATCHED)
    folder = tmp_path / "state"
    with engine_for(Mode.BATCHED) as never_saved:
        twin = never_saved.rewind_session(with_turns(never_saved, strategy), at).session_id
        never_saved.append(twin, text(60, seed=8))
        expected, kept = go_on(never_saved, twin)
        has_states = bool(kv_of(never_saved, twin).context.geometry.states)  # which a file has of its end alone
    with keeping(folder, make=make) as engine:
        session = with_turns(engine, strategy)
        save_copies(engine, folder)
        saved(engine)
        killed = after_a_kill(folder)
    with keeping(killed, make=make) as engine:
        copies_known(engine)
        engine.recall(session)
        fork = engine.fork_session(session, at_position=at).session_id
        rewound = engine.rewind_session(session, at).session_id
        engine.append(rewound, text(60, seed=8))
        saved(engine)
        again = after_a_kill(killed)
        said, cached = go_on(engine, rewound)
        assert same(said, expected, Mode.BATCHED)
        assert (cached, reads(engine, "used")) == (kept, kept > 0) or (has_states and not cached)
        engine.append(fork, text(60, seed=8))
        assert same(go_on(engine, fork)[0], expected, Mode.BATCHED)
    with keeping(again, make=make, share_prefixes="owner") as engine:  # what was common is known by whole segments
        copies_known(engine)
        engine.recall(rewound)
        said, cached = go_on(engine, rewound)
        assert same(said, expected, Mode.BATCHED)
        assert kept - SMALL["segment_tokens"] <= cached <= kept or (has_states and not cached)


@each_mechanism
@pytest.mark.parametrize("goes_back", [True, False], ids=["rewound", "forked"])
def test_after_a_restart_what_was_appended_behind_a_cut_is_not_read_from_the_file(
    tmp_path: Path, strategy: KVStrategy, goes_back: bool
) -> None:
    make, folder = made_in(Mode.BATCHED), tmp_path / "state"
    with engine_for(Mode.BATCHED) as never_saved:
        twin = never_saved.rewind_session(with_turns(never_saved, strategy), 40).session_id
        never_saved.append(twin, text(60, seed=8))
        expected, _ = go_on(never_saved, twin)
    with keeping(folder, make=make) as engine:
        session = with_turns(engine, strategy)
        save_copies(engine, folder)
        drop_entries(engine, session)
        session = engine.rewind_session(session, 40).session_id
        engine.append(session, [*text(60, seed=8), 1, 2, 3])
    with keeping(folder, make=make) as engine:
        copies_known(engine)
        engine.recall(session)
        new = engine.rewind_session(session, 100) if goes_back else engine.fork_session(session, at_position=100)
        assert same(go_on(engine, new.session_id)[0], expected, Mode.BATCHED)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "missing": ("missing", lambda file, _: file.unlink()),
    "short": ("damaged", lambda file, _: shorten(file)),
    "empty": ("damaged", lambda file, _: file.write_bytes(b"")),
    "flipped": ("damaged", lambda file, _: flip(file, -1)),
    "flipped length": ("damaged", lambda file, _: flip(file, 5)),
    "flipped header": ("damaged", lambda file, _: flip(file, 60)),
    "of another session": ("damaged", lambda file, other: shutil.copy(other, file)),
}


# What is wrong with a file is found before its strategy matters: each kind of it is there once, in turn.
FIRST = list({mechanism(each): each for each in reversed(all_strategies())}.values())
OTHERS = [*FIRST[len(DAMAGES) :], *(each for each in all_strategies() if each not in FIRST)]
DAMAGED: list[Any] = [
    *zip(FIRST, DAMAGES, strict=False),
    *(further(*case) for case in zip(OTHERS, cycle(DAMAGES), strict=False)),
]


@pytest.mark.parametrize(("strategy", "damage"), DAMAGED, ids=str)
def test_a_file_that_does_not_agree_is_not_used_and_nothing_changes_but_the_time(
    tmp_path: Path, strategy: KVStrategy, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome, spoil = DAMAGES[damage]
    with keeping(tmp_path / "state", make=made_in(Mode.BATCHED)) as engine:
        with_turns(engine, strategy, seed=50)
        (foreign,) = save_copies(engine, tmp_path / "state")
        other = with_turns(engine, strategy)
        before = save_copies(engine, tmp_path / "state")
        session = with_turns(engine, strategy)
        (file,) = {*save_copies(engine, tmp_path / "state")} - {*before}
        expected = go_on(engine, other)
        drop_entries(engine, session)
        spoil(file, foreign)
        found = go_on(engine, session)
        assert same(expected[0], found[0], Mode.BATCHED)
        assert found[1] == 0
        assert reads(engine, outcome) == 1
        assert "is not used" in caplog.text
        assert save_copies(engine, tmp_path / "state")  # and another one is made
        drop_entries(engine, session)
        assert go_on(engine, session)[1] > 0


@each_mechanism
def test_a_fork_read_from_a_file_goes_on_as_one_that_stayed_in_memory(tmp_path: Path, strategy: KVStrategy) -> None:
    with keeping(tmp_path / "state", make=made_in(Mode.BATCHED)) as engine:
        parent = with_turns(engine, strategy)
        forks = [engine.fork_session(parent).session_id for _ in range(2)]
        for fork in forks:
            engine.append(fork, text(21, seed=9))
            generate(engine, fork, 5)
        save_copies(engine, tmp_path / "state")
        drop_entries(engine, forks[1])
        stayed, came_back = (go_on(engine, fork) for fork in forks)
        assert same(came_back[0], stayed[0], Mode.BATCHED) and came_back[1] == stayed[1]
        assert reads(engine, "used") == 1
        assert go_on(engine, parent)[1] > 0, "what the forks share is as it was"
