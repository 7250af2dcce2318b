"""The bytes of tokens, from a GGUF header and from tokenizer.json: both say the same, and it is what decoding gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from inference_engine.errors import ModelError
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.gguf_model import make_tokenizer
from inference_engine.models.gguf_vocabulary import vocabulary_of
from inference_engine.models.token_bytes import bytes_of
from inference_engine.models.tokenizer_ids import read_token_bytes
from tests.models.test_gguf_tokenizer import BYTES, SCORES, SENTENCEPIECE
from tests.models.vocabularies import CONTROL, USER_DEFINED, write_tokens
from tests.tiny_folder import save_tiny_model

KINDS: dict[str, tuple[list[tuple[str, int]], dict[str, Any]]] = {
    "gpt2": ([*BYTES, ("<end>", CONTROL), ("<größe>", USER_DEFINED)], {"eos_token_id": len(BYTES)}),
    "llama": (SENTENCEPIECE, {"scores": SCORES, "bos_token_id": 1, "eos_token_id": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_and_the_tokenizer_made_of_it_say_the_same_bytes(kind: str, tmp_path: Path) -> None:
    tokens, values = KINDS[kind]
    write_tokens(tmp_path / "m.gguf", tokens, values, kind=kind)
    found = bytes_of(vocabulary_of(read_gguf(tmp_path / "m.gguf")), is_byte_level=kind == "gpt2")
    make_tokenizer(tmp_path / "m.gguf", tmp_path / "tokenizer")
    known = LLTokenizer((tmp_path / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    for at, (text, _) in enumerate(tokens):
        # No UTF-8 has the byte 255, by which llguidance marks what stands for no text.
        if at not in found.specials and found.tokens[at] != b"\xff":
            assert found.tokens[at] == known.decode_bytes([at]), text
    assert {at for at, (_, of) in enumerate(tokens) if of == CONTROL} <= {*found.specials}
    assert {one for one in found.tokens if len(one) == 1} == {bytes([byte]) for byte in range(256)}


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        read_token_bytes(str(tmp_path / "model"), tmp_path)
