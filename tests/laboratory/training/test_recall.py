"""Models that recall: rows hold what they ask for, the layers are transformers' own, and training makes a folder."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5

from inference_engine.cli.main import main
from laboratory.evaluation.tasks import TASKS
from laboratory.training.recall import (
    Config,
    delta_rule,
    dense_config,
    faster_layers,
    hidden_states,
    hybrid_config,
    new_model,
)
from laboratory.training.recall_text import KINDS, RecallText, Rows, Stage, train_tokenizer

POSITIONS = 4096


@lru_cache
def made() -> tuple[Tokenizer, RecallText]:
    tokenizer = train_tokenizer(600)
    return tokenizer, RecallText(tokenizer, positions=POSITIONS)


@pytest.mark.parametrize("length", [128, 1500])
def test_what_a_row_asks_for_stands_in_it_before(length: int) -> None:
    tokenizer, text = made()
    asked = 0
    for seed in range(30):
        row = text.row(length, random.Random(seed), share=0.5)
        assert len(row.ids) == len(row.places) == len(row.answers) == length
        assert row.places[0] == 0 and (row.places[1:] > row.places[:-1]).all() and row.places[-1] < POSITIONS
        for number, kind in enumerate(KINDS, start=1):
            if kind not in TASKS or not (of_kind := (row.answers == number).nonzero()[0]).size:
                continue
            before = tokenizer.decode(row.ids[: of_kind[0]].tolist())
            answer = tokenizer.decode(row.ids[of_kind[0] : of_kind[0] + 5].tolist())
            if answer.isdigit() and len(answer) == 5:  # the row's end may cut one
                assert answer in before, f"{kind}: {answer}"
                asked += 1
    assert asked >= 10


def test_digits_between_pieces_change_no_id() -> None:
    tokenizer, text = made()
    sentence = "\n\nThe pass key of Alice is 48213. Remember it. 48213 is the pass key.\n\n"
    assert text._encode(sentence).tolist() == tokenizer.encode(sentence).ids


def test_the_delta_rule_and_its_gradient_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 640, 3, 16, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(2, 640, 3), torch.rand(2, 640, 3)
    own, _ = delta_rule(q, k, v, g=g, beta=beta)
    theirs, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(own, theirs)
    for one, other in zip(*(torch.autograd.grad((out**2).sum(), (q, k, v)) for out in (own, theirs)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("config", [dense_config, hybrid_config])
def test_what_is_trained_is_what_transformers_runs(config: type[Config]) -> None:
    model = new_model(config(layers=4, hidden=64, heads=2), seed=0).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn_like(one) * 0.1)
        ids = torch.randint(0, 1024, (2, 128))
        places = torch.arange(128).expand(2, -1)
        theirs = model(ids).logits
        torch.testing.assert_close(model.lm_head(hidden_states(model, ids, places)), theirs)
        with faster_layers():
            torch.testing.assert_close(model.lm_head(hidden_states(model, ids, places)), theirs, atol=1e-4, rtol=1e-4)


def test_rows_made_in_processes_are_those_made_here() -> None:
    stages = (Stage(length=128, rows=2, share=0.8, until=0.5), Stage(length=256, rows=1, share=0.5, until=1.0))
    with Rows(made()[1], stages, seed=3, processes=2) as ahead, Rows(made()[1], stages, seed=3, processes=0) as here:
        ahead.begin()
        for stage in (0, 0, 1, 0):
            for one, other in zip(ahead.next(stage), here.next(stage), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", [[], ["--hybrid"]])
def test_a_training_that_learned_nothing_leaves_nothing(
    kind: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    few = ("--device", "cpu", "--layers", "4", "--hidden", "32", "--heads", "2", "--most", "128", "--batch", "256")
    assert main(["train", "recall", str(folder), *kind, *few, "--seconds", "0.1"]) == 1
    assert "has not learned to recall" in capsys.readouterr().err
    assert not folder.exists()
