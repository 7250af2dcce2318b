"""What matching saves is counted over texts, in shares; without a match nothing is saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kakeya_mac import Mac
from kakeya_mac.statistics import draw, layer_lines, overall
from laboratory.evaluation.passages import Passage, cut
from laboratory.evaluation.record import VALUE_KEYS
from tests.tiny import VOCABULARY, tiny_engine

TEXT = [int(one) for one in np.random.default_rng(3).integers(VOCABULARY, size=400)]
OFTEN = Mac(ring=24, band=6, threshold=1.0)


def passages() -> list[Passage]:
    return [cut("noise", TEXT[start:], 83, 37) for start in (0, 50)]


def test_shares_stand_for_every_forced_token_of_every_text() -> None:
    with tiny_engine() as engine:
        both = layer_lines(engine, OFTEN, passages())
        alone = [layer_lines(engine, OFTEN, [one]) for one in passages()]
    assert [line["layer"] for line in both] == [1, 2], "the first has a window of its own"
    for line, first, second in zip(both, *alone, strict=True):
        assert 0 < line["hit rate, least head"] <= line["hit rate"] <= line["hit rate, most head"] < 1
        assert 0 < line["skipped by groups"] <= line["skipped by heads"] < line["hit rate"]
        for share in ("hit rate", "skipped by heads", "skipped by groups", "band mass"):
            assert line[share] == pytest.approx((first[share] + second[share]) / 2)


def test_a_record_holds_the_means_over_layers_and_an_image(tmp_path: Path) -> None:
    with tiny_engine() as engine:
        lines = layer_lines(engine, OFTEN, passages())
    reported = overall(lines)
    assert all(set(VALUE_KEYS) <= value.keys() for value in reported.values())
    mean = sum(line["hit rate"] for line in lines) / len(lines)
    assert reported[f"hit rate, {OFTEN}, noise"]["median"] == pytest.approx(mean)
    draw({"tables": {"layers": lines}}, tmp_path)
    assert (tmp_path / "matches_noise.svg").stat().st_size > 0
