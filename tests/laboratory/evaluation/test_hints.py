"""What a hint saves is measured on the choices that the engine makes, and none of them is changed by watching."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_engine.errors import InvalidArgument
from inference_engine.kernels.gather import select
from inference_engine.kv.strategies.full import Full
from inference_engine.kv.strategies.gather import Gather
from inference_engine.types import GenerateParams, Mode, Sampling, TokenCommitted
from laboratory.evaluation.hints import (
    Choices,
    Watch,
    add_arguments,
    draw,
    generate,
    layer_lines,
    main,
    selecting_layers,
)
from laboratory.evaluation.models import Target
from laboratory.evaluation.record import VALUE_KEYS, write_record
from tests.tiny import PAGES, VOCABULARY, tiny_engine, tiny_forward

GATHER = Gather(block=4, sink=4, window=16, budget=36)  # three distant blocks
TEXT = [(7 * place) % VOCABULARY for place in range(301)]
SAMPLING = Sampling(temperature=1.0, seed=5)
LAYERS = selecting_layers(GATHER, tiny_forward().geometry(mode=Mode.BATCHED, **PAGES))


def tokens_of_a_generate(count: int, **extras: Any) -> list[int]:
    with tiny_engine(**extras) as engine:
        session = engine.create_session(strategy=GATHER).session_id
        engine.append(session, TEXT[:200])
        events = engine.generate(session, GenerateParams(max_tokens=count, sampling=SAMPLING))
        return [event.token_id for event in events if isinstance(event, TokenCommitted)]


def watching(found: dict[int, Choices]) -> Watch:
    watch = Watch()
    watch.begin(found)
    return watch


def test_only_layers_that_select_are_watched() -> None:
    geometry = tiny_forward().geometry(mode=Mode.BATCHED, **PAGES)
    assert LAYERS == (1, 2), "the first has a window of its own"
    assert selecting_layers(Full(), geometry) == ()


def test_watching_changes_no_token() -> None:
    found: dict[int, Choices] = {}
    assert tokens_of_a_generate(9, on_choice=watching(found).note) == tokens_of_a_generate(9)
    # The last token has no entry yet and the first none before it; each other one chooses in both KV heads.
    assert {layer: len(own.overlap) for layer, own in found.items()} == dict.fromkeys(LAYERS, 2 * 7)


def test_every_choice_is_reported_beside_chance_and_beside_a_search_without_a_hint() -> None:
    found: dict[int, Choices] = {}
    with tiny_engine(on_choice=watching(found).note) as engine:
        generate(engine, GATHER, TEXT[:200], 20, SAMPLING)
    for line in layer_lines(found):
        assert 0 <= line["overlap"] <= 1
        # Blocks between the sink's and the window's, of which three are chosen.
        assert 3 / 50 < line["by chance"] < 3 / 40
        assert line["searched"] == 1
        assert line["passes with hint"] >= 2 and line["passes without"] >= 3
        assert line["saved"] == pytest.approx(1 - line["passes with hint"] / line["passes without"])
        assert line["changed"] == 0


def test_the_same_scores_twice_overlap_wholly_and_others_by_what_they_share() -> None:
    found: dict[int, Choices] = {}
    candidates = torch.ones(1, 40, dtype=torch.bool)
    first = torch.arange(40.0).expand(1, 2, 40)
    shifted = first.roll(2, dims=-1)  # of the four largest, those at 38 and 39 are now at 0 and 1
    watch = watching(found)
    for scores in (first, first, shifted):
        watch.note(0, scores, candidates, select(scores, candidates, 4, searched=False).blocks)
    assert found[0].overlap == [1.0, 1.0, 0.5, 0.5]
    assert found[0].chance == pytest.approx([0.1] * 4)


def test_where_all_is_read_there_is_no_choice_to_report() -> None:
    found: dict[int, Choices] = {}
    with tiny_engine(on_choice=watching(found).note) as engine:
        generate(engine, GATHER, TEXT[:24], 5, SAMPLING)
    assert layer_lines(found) == []


def arguments(*typed: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(typed)


def test_a_run_leaves_a_record_and_images(tiny_torch_target: Target, tmp_path: Path) -> None:
    typed = ("--strategies", str(GATHER), "--lengths", "150", "203", "--kinds", "looped", "--count=7", "--texts=2")
    payload = main(arguments(*typed), tiny_torch_target)
    path = write_record("hints", {"command": "kakeya evaluate hints", **payload}, results_dir=tmp_path)
    draw(payload, path.parent)
    assert {image.name for image in path.parent.glob("*.png")} == {"overlap_looped.png", "passes_looped.png"}
    assert all(set(VALUE_KEYS) <= value.keys() for value in payload["values"].values())
    assert len(payload["tables"]["layers"]) == 2 * len(LAYERS)
    assert {line["choices"] for line in payload["tables"]["layers"]} == {2 * 2 * 5}
    assert payload["values"][f"choices that a hint changed, {GATHER}, looped at 203"]["median"] == 0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--strategies", "full", "--lengths=100"), "selects nothing in any layer"),
        (("--strategies", str(GATHER), "--lengths=20", "--count=3"), "is there a block to choose"),
        (("--strategies", str(GATHER), "--count=2"), "count: must be at least 3"),
        (("--strategies", str(GATHER), "--lengths=512"), "limit_tokens"),
    ],
)
def test_what_has_nothing_to_choose_is_refused(tiny_torch_target: Target, typed: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        main(arguments(*typed, "--kinds", "looped"), tiny_torch_target)


@pytest.mark.parametrize("own", [{"kernels": "triton"}, {"device": "cuda"}], ids=str)
def test_choices_that_a_kernel_makes_cannot_be_watched(tiny_torch_target: Target, own: dict[str, Any]) -> None:
    target = replace(tiny_torch_target, model=replace(tiny_torch_target.model, **own))
    with pytest.raises(InvalidArgument, match="--kernels plain"):
        main(arguments("--strategies", str(GATHER), "--lengths", "150", "--kinds", "looped"), target)


def test_choices_of_the_native_backend_cannot_be_observed(tiny_target: Target) -> None:
    with pytest.raises(InvalidArgument, match="--backend torch"):
        main(arguments("--strategies", str(GATHER), "--kinds", "looped"), tiny_target)


def test_the_choices_of_mlx_are_observed_as_those_of_torch(tiny_torch_target: Target) -> None:
    """It leaves choices to the plan."""
    target = replace(tiny_torch_target, model=replace(tiny_torch_target.model, device="mlx"))
    typed = ("--strategies", str(GATHER), "--lengths", "150", "--kinds", "looped", "--count=7", "--texts=1")
    assert main(arguments(*typed), target)["values"]
