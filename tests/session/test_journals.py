"""What sessions are kept in is one setting: a kind and a place, or a folder for short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_engine.config import EngineConfig
from inference_engine.errors import ConfigError
from inference_engine.metrics import EngineMetrics
from inference_engine.session.journals import open_journal
from inference_engine.types import Durability
from tests.kept import WEIGHTS
from tests.load.scripted import SMALL, scripted_engine


def kept_with(settings: dict[str, Any]) -> dict[str, int]:
    """The sessions that an engine with these settings finds, and their lengths; then it keeps one more."""
    metrics = EngineMetrics()
    journal = open_journal(EngineConfig(**{**SMALL, **settings}), weights=WEIGHTS, metrics=metrics)
    assert journal.durability is Durability.PROCESS
    with scripted_engine(journal=journal, metrics=metrics) as engine:
        found = {one.session_id: one.history_length for one in engine.list_sessions()}
        engine.append(engine.create_session().session_id, range(3 + len(found)))
    return found


def test_a_folder_is_the_short_form_of_its_journal(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert kept_with({"journal": f"sqlite:{folder}", "durability": "process"}) == {}
    (first,) = kept_with({"state_dir": str(folder), "durability": "process"}).items()
    found = kept_with({"journal": f"sqlite:{folder}", "durability": "process"})
    assert found.pop(first[0]) == first[1] == 3
    assert list(found.values()) == [4]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"journal": "sqlite:here", "state_dir": "here"}, "both set: state_dir=FOLDER is short for journal=sqlite"),
        ({"journal": "here"}, "must be KIND:PLACE, such as sqlite:FOLDER; state_dir takes a folder alone"),
        ({"journal": "sqlite:"}, "must be KIND:PLACE"),
        ({"journal": ":here"}, "must be KIND:PLACE"),
        ({"journal": "sqlite:here", "durability": "none"}, "leave journal empty"),
        ({"journal": "sqlite:here", "copies_dir": "there"}, "leave copies_dir empty"),
        ({"state_dir": "here", "copies_dir": "there"}, "leave copies_dir empty"),
        ({"journal": "postgres:dbname=x", "hibernate": "always"}, "set copies_dir"),
    ],
    ids=str,
)
def test_settings_of_a_journal_that_say_two_things_or_none_are_refused(
    settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig(**settings)


def test_a_kind_that_there_is_not_is_refused_without_the_place(tmp_path: Path) -> None:
    config = EngineConfig(journal="mysql://me:secret@database/kakeya")
    with pytest.raises(ConfigError, match="no journal of the kind 'mysql'; name one as sqlite:FOLDER or p") as refused:
        open_journal(config, weights=WEIGHTS, metrics=EngineMetrics())
    assert "secret" not in str(refused.value)


def test_the_settings_of_kept_sessions_have_effect_with_a_journal() -> None:
    assert EngineConfig(journal="sqlite:here", kept_sessions_per_owner=3).kept is Durability.POWER
