"""Steps are counted as they were, drafters that know the text differ from those that do not, and no token changes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_engine.backends.base import Forward
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.decode.draft import Drafter, Wanted
from inference_engine.kv.strategies.full import Full
from inference_engine.types import Sampling
from laboratory.evaluation import draft_identity, draft_speed, drafting
from laboratory.evaluation.asking import Asked
from laboratory.evaluation.draft_identity import AGAIN, margin_at
from laboratory.evaluation.draft_trials import PLAIN, Cell, short_prompts
from laboratory.evaluation.drafting import accept, find
from laboratory.evaluation.models import Target, open_target
from laboratory.evaluation.record import VALUE_KEYS, write_record
from laboratory.evaluation.writing import Text, write, write_all
from tests.laboratory.typed import typed_for
from tests.laws.drafters import Failing, Plain, Wrong
from tests.tiny import SMALL, VOCABULARY, tiny_engine
from tests.tiny_folder import save_tiny_chat_model

SAMPLED = Sampling(temperature=0.7, seed=3)
LONG = 41


def random_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(int(one) for one in np.random.default_rng(seed).integers(VOCABULARY, size=count))


ASKED = [
    Asked(
        strategy=Full(), token_ids=random_ids(50 + 7 * number, number), sampling=SAMPLED if number % 2 else Sampling()
    )
    for number in range(5)
]


@dataclass
class Knowing(Plain):
    """Knows what is written after each prompt, and errs in every `errs`-th place of the history."""

    texts: Sequence[tuple[int, ...]] = ()
    errs: int = 10**9

    def draft_token(self, one: Wanted) -> list[int]:
        history = tuple(one.history[:].tolist())
        (text,) = {text for text in self.texts if text[: len(history)] == history}
        return [
            (token + (place % self.errs == 0)) % VOCABULARY
            for place, token in enumerate(text[len(history) : len(history) + one.limit], start=len(history))
        ]


def reported(texts: Sequence[Text], asked: Sequence[Asked] = ASKED, *, errs: int = 10**9) -> Knowing:
    return Knowing(texts=[(*one.token_ids, *text.token_ids) for one, text in zip(asked, texts, strict=True)], errs=errs)


def drafter_for(model: ModelConfig, forward: Forward) -> Drafter | None:
    by_name: dict[str, Drafter | None] = {"wrong": Wrong(name="wrong"), "failing": Failing(fails=2), "none": None}
    return by_name[Path(model.drafter).name]


def unidentified(_model: ModelConfig, _forward: Forward) -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    settings: dict[str, Any] = SMALL
    model = ModelConfig(model=str(save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))), threads=1)
    with open_target(
        model, EngineConfig(**settings), find_drafter=drafter_for, identify_drafter=unidentified
    ) as target:
        yield target


@pytest.fixture(scope="module")
def written() -> list[Text]:
    with tiny_engine() as engine:
        return write_all(engine, ASKED, tokens=LONG)


def arguments(*typed: str) -> argparse.Namespace:
    return typed_for(drafting.add_arguments, "--drafters", "wrong", "--length=40", *typed)


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("errs", [10**9, 3])
def test_the_steps_of_a_lone_session_give_all_its_tokens_but_the_first(written: list[Text], errs: int) -> None:
    with tiny_engine(drafter=reported(written, errs=errs), draft_tokens=4) as engine:
        for one, plain in zip(ASKED, written, strict=True):
            (text,) = write(engine, [one], tokens=LONG).texts
            assert text.token_ids == plain.token_ids
            assert sum(step.tokens for step in text.steps) == LONG - 1
            assert all(step.tokens == step.accepted + 1 for step in text.steps)
            assert sum(step.drafted for step in text.steps) == text.drafted > 0
            assert sum(step.accepted for step in text.steps) == text.accepted
            assert (text.accepted == text.drafted) == (errs > LONG * LONG)


# -- counting ---------------------------------------------------------------------------------------------------------


def test_a_drafter_that_knows_the_text_accepts_more_than_one_that_does_not(target: Target) -> None:
    asked = {("noise", "greedy"): ASKED}
    plain = write_all(target.engine, ASKED, tokens=LONG, stop_ids=target.stop_ids)
    drafters: dict[str, Drafter] = {"knows": reported(plain), "errs": reported(plain, errs=3), "wrong": Wrong()}
    found = accept(target, drafters, asked, tokens=LONG, draft_tokens=4)
    knows, errs, wrong = drafting.acceptance_table(found)
    assert knows["acceptance length"] > errs["acceptance length"] > 1.5 > wrong["acceptance length"] >= 1
    assert knows["draft tokens that are right"] == 1
    assert {line["right"] for line in drafting.place_table(found) if line["drafter"] == "knows"} == {1.0}
    assert [text.token_ids for text in found[Cell(drafter="errs", kind="noise", method="greedy")]] == [
        text.token_ids for text in plain
    ]


def test_a_ratio_is_of_one_round() -> None:
    here: dict[str, Any] = {"kind": "prose", "method": "greedy"}

    def pace(seconds: float) -> draft_speed.Pace:
        return draft_speed.Pace(
            tokens=10, seconds=seconds, decode_tokens=9, decode_seconds=seconds / 2, drafted=4, accepted=1
        )

    found = {
        Cell(drafter=PLAIN, **here): [pace(1.0), pace(3.0), pace(10.0)],
        Cell(drafter="other", **here): [pace(0.5), pace(1.5), pace(5.0)],
    }
    values = draft_speed.values(found)
    assert values["speed ÷ plain, other, prose, greedy"]["median"] == 2.0
    assert values["decode time ÷ plain, other, prose, greedy"]["low"] == 0.5
    plain, other = draft_speed.rows(found)
    assert plain["speed ÷ plain"] is None
    assert (other["speed ÷ plain"], other["time ÷ plain"]) == (2.0, 0.5)
    assert (other["draft tokens a token"], other["draft tokens that are right"]) == (0.4, 0.25)


# -- identity ---------------------------------------------------------------------------------------------------------


def test_where_texts_part_is_found_with_its_margin(written: list[Text]) -> None:
    """Two texts that really differ, as if rounding had done it."""
    one = ASKED[0]
    changed = list(written[0].token_ids)
    changed[7] = (changed[7] + 1) % VOCABULARY
    other = Text(tuple(changed), (), 0, 0)
    with tiny_engine() as engine:
        compared = draft_identity.compare_texts(engine, [one, ASKED[1]], written[:2], [other, written[1]])
        again = margin_at(engine, one, written[0].token_ids[:8], changed[7])
    (difference,) = compared.differences
    assert (difference.prompt, difference.place) == (0, 7)
    assert difference.margin == pytest.approx(again, rel=1e-3)
    assert difference.margin > draft_identity.NEAR_TIE
    assert compared.near_ties == 0


def test_no_token_changes_where_shapes_are_fixed(tmp_path: Path) -> None:
    model = ModelConfig(model=str(save_tiny_chat_model(tmp_path)), threads=1, determinism="batch-invariant")
    with open_target(model, EngineConfig(**SMALL), find_drafter=drafter_for, identify_drafter=unidentified) as target:
        short = short_prompts(target, arguments("--kinds", "looped", "tool_json", "--identity-prompts=5"))
        found = draft_identity.compare(target, find(target, ["wrong"]), short, draft_tokens=3)
    assert set(found) == {(name, method) for name in (AGAIN, "wrong") for method in ("greedy", "at 0.7")}
    for (name, _), one in found.items():
        assert (one.prompts, one.differences) == (5, ())
        assert (one.drafted > 0) == (name == "wrong")


# -- prompts ----------------------------------------------------------------------------------------------------------


# -- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_record_with_every_part_and_its_plots(target: Target, tmp_path: Path) -> None:
    typed = arguments(
        "--kinds", "chat", "looped", "--texts=3", "--tokens=12", "--timed-texts=1", "--rounds=2", "--batches", "1", "3",
        "--identity-prompts=3",
    )  # fmt: skip
    payload = drafting.main(typed, target)
    path = write_record("drafting", {"command": "kakeya evaluate drafting", **payload}, results_dir=tmp_path)
    drafting.draw(payload, path.parent)
    assert {image.name for image in path.parent.glob("*.svg")} == {
        "acceptance_length.svg",
        "by_place.svg",
        "speed.svg",
    }
    values, tables = payload["values"], payload["tables"]
    assert all(set(VALUE_KEYS) <= value.keys() for value in values.values())
    assert 1 <= values["acceptance length, wrong, looped, greedy"]["median"] < 1.5
    assert values["time ÷ plain, wrong, chat, at 0.7, batch 3"]["count"] == 2
    assert values["same ids as plain, wrong, greedy"]["median"] == 1
    assert len(tables["speed"]) == 2 * 2 * 2 * 2
    assert payload["config"]["drafters"] == {"wrong": {"kind": "wrong", "longest": 5}}
    assert target.engine.info().kv_reserved_bytes == 0
