"""A corpus holds what the model itself says, in turns as its template has them; any number of calls write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kv_cache_proposer.drafter_errors import DrafterError
from laboratory.training import corpus_prompts
from laboratory.training.corpus import CorpusPlan, write_corpus
from laboratory.training.corpus_lockstep import ATTENTION, Written, write
from laboratory.training.corpus_prompts import Chat, Prompt, PromptSource, Speaker, read_chat
from laboratory.training.corpus_store import (
    MAX_FILE_BYTES,
    CorpusManifest,
    Text,
    add_texts,
    read_manifest,
    read_texts,
)
from laboratory.training.openings import OPENINGS
from tests.kv_cache_proposer.small_models import gemma3
from tests.tiny import VOCABULARY, tiny_model
from tests.tiny_folder import tiny_tokenizer

END, HEAD_USER, HEAD_ASSISTANT = 5, (101, 102), (103, 104, 105)
CHAT = Chat(
    opened=(1, 2, 3), asked=((1, 2, 7, 8, 9),), before_user=HEAD_USER, before_assistant=HEAD_ASSISTANT, end_of_turn=END
)
PLAN = CorpusPlan(tokens=1000, texts_at_once=4, length=110, turn_tokens=12)
DIGEST = "ab" * 32


@lru_cache(maxsize=1)
def model() -> PreTrainedModel:
    return tiny_model(attention=ATTENTION)


def prompt(ids: tuple[int, ...], speaker: Speaker = "text", temperature: float = 0.0) -> Prompt:
    return Prompt("chat", ids, speaker, "one", temperature, user_temperature=1.0)


def written(prompts: list[Prompt], *, length: int = 60, turn_tokens: int = 12, seed: int = 0) -> list[Written]:
    return write(model(), prompts, chat=CHAT, stop_ids=(END,), length=length, turn_tokens=turn_tokens, seed=seed)


def source(seed: int = 0) -> PromptSource:
    ids = torch.randint(6, 100, (3, 200), generator=torch.Generator().manual_seed(4)).tolist()
    return PromptSource({"prose": ids, "code": ids[:1]}, CHAT, seed)


def corpus(
    folder: Path, *, seconds: float = 1e9, clock: float = 0.0, plan: CorpusPlan = PLAN, seed: int = 0
) -> CorpusManifest:
    ticks = iter(range(10**6))
    return write_corpus(
        model(),
        source(seed),
        plan,
        folder,
        target_digest=DIGEST,
        stop_ids=(END,),
        seconds=seconds,
        report=lambda *_: None,
        now=lambda: next(ticks) * clock,
    )


# -- what the model says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_model, gemma3], ids=["native window", "gemma"])
def test_greedy_texts_are_what_transformers_would_say(make: Callable[[], PreTrainedModel]) -> None:
    """Longer than the models' own windows, texts of different prompts side by side."""
    plain = make()
    ours: PreTrainedModel = tiny_model() if make is tiny_model else gemma3()
    ours.set_attn_implementation(ATTENTION)
    prompts = [prompt((9, 8, 7)), prompt((1, 2, 3, 4, 5, 6, 7)), prompt((11,) * 5)]
    texts = write(ours, prompts, chat=None, stop_ids=(10**6,), length=50, turn_tokens=9, seed=0)
    for one, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([one.token_ids])
        with torch.no_grad():
            while ids.shape[1] < 50:
                ids = torch.cat([ids, plain(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(text.token_ids, ids[0])
        assert text.answers.tolist() == [place >= len(one.token_ids) for place in range(50)]


def test_speakers_take_turns_as_the_template_has_them() -> None:
    prompts = [prompt(CHAT.opened, "user", 1.0), prompt(CHAT.asked[0], "assistant", 1.0)]
    for one, text in zip(prompts, written(prompts, length=120), strict=True):
        ids, answers = text.token_ids.tolist(), text.answers.tolist()
        assert ids[: len(one.token_ids)] == list(one.token_ids)
        place, speaker, turns = len(one.token_ids), one.speaker, 0
        while place < len(ids):
            end = ids.index(END, place) if END in ids[place:] else len(ids)
            turn = end - place
            assert turn <= PLAN.turn_tokens
            assert answers[place:end] == [speaker == "assistant"] * turn
            if end < len(ids):  # a turn that was cut did not end by itself
                assert answers[end] == (speaker == "assistant" and turn < PLAN.turn_tokens)
            speaker = "user" if speaker == "assistant" else "assistant"
            head = list(HEAD_ASSISTANT if speaker == "assistant" else HEAD_USER)[: max(0, len(ids) - end - 1)]
            assert ids[end + 1 : end + 1 + len(head)] == head
            assert not any(answers[end + 1 : end + 1 + len(head)])
            place, turns = end + 1 + len(head), turns + 1
        assert turns > 3


# -- how texts begin --------------------------------------------------------------------------------------------------


def test_a_template_is_read_as_it_renders_a_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_prompts, "QUESTIONS", 2400)
    tokenizer = tiny_tokenizer()
    chat = read_chat(tokenizer, longest=1000)
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "so"},
    ]
    rendered = tokenizer.encode(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)
    hi, ho, so = (tokenizer.encode(text, add_special_tokens=False) for text in ("hi", "ho", "so"))
    end = [chat.end_of_turn]
    made = [*chat.opened, *hi, *end, *chat.before_assistant, *ho, *end, *chat.before_user, *so]
    assert rendered[: len(made)] == made
    assert len(set(chat.asked)) > 1000
    few = read_chat(tokenizer, longest=len(chat.asked[100])).asked
    assert few[: len(OPENINGS)] == chat.asked[: len(OPENINGS)]
    assert set(few) < set(chat.asked) and max(map(len, few[len(OPENINGS) :])) == len(chat.asked[100])


# -- batches, calls and files -----------------------------------------------------------------------------------------


def test_a_corpus_written_in_several_calls_is_one_written_in_one(tmp_path: Path) -> None:
    whole = corpus(tmp_path / "whole")
    calls = 0
    while corpus(tmp_path / "parts", seconds=5, clock=1.0).tokens < PLAN.tokens:
        calls += 1
    parts = read_manifest(tmp_path / "parts", target_digest=DIGEST)
    assert calls > 0 and parts == whole and whole.tokens >= PLAN.tokens
    texts = [list(read_texts(tmp_path / name, whole)) for name in ("whole", "parts")]
    assert [(t.token_ids.tolist(), t.answers.tolist(), t.kind, t.is_held_out) for t in texts[0]] == [
        (t.token_ids.tolist(), t.answers.tolist(), t.kind, t.is_held_out) for t in texts[1]
    ]


def manifest(vocab_size: int = VOCABULARY) -> CorpusManifest:
    return CorpusManifest(target_digest=DIGEST, kinds=("chat",), seed=0, vocab_size=vocab_size)


def texts(count: int, length: int, top: int = 100) -> list[Text]:
    rng = np.random.default_rng(0)
    return [
        Text(rng.integers(0, top, length).astype(np.uint32), rng.random(length) < 0.5, "chat", place % 3 == 0)
        for place in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [VOCABULARY, 2**18])
def test_texts_come_back_as_they_were_in_files_of_bounded_size(tmp_path: Path, vocab_size: int) -> None:
    first, second = texts(7, 900_001, top=vocab_size), texts(5, 800_003, top=vocab_size)
    made = add_texts(tmp_path, add_texts(tmp_path, manifest(vocab_size), first), second)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == len(made.files) > 1
    assert all(path.stat().st_size <= MAX_FILE_BYTES for path in files)
    found = list(read_texts(tmp_path, read_manifest(tmp_path, target_digest=DIGEST)))
    assert made.texts == len(found) == 12
    for one, other in zip([*first, *second], found, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.answers, other.answers)
        assert one.is_held_out == other.is_held_out


def test_a_corpus_that_lost_a_file_or_its_end_is_refused(tmp_path: Path) -> None:
    made = add_texts(tmp_path, manifest(), texts(4, 50))
    with pytest.raises(DrafterError, match="says 5"):
        list(read_texts(tmp_path, replace(made, files=((5, 250),))))
    (tmp_path / "corpus-000.safetensors").unlink()
    with pytest.raises(DrafterError, match="missing"):
        list(read_texts(tmp_path, made))
    with pytest.raises(DrafterError, match="no corpus here"):
        read_manifest(tmp_path / "nowhere", target_digest=DIGEST)
