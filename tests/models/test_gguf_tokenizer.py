"""A tokenizer made of a GGUF header has the header's ids, whatever its tokens are spelled like; others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from inference_engine.errors import ModelError
from inference_engine.models import tokenizer_folder
from inference_engine.models.file_keys import TOKENIZER_KEYS
from inference_engine.models.gguf_header import read_gguf
from inference_engine.models.gguf_model import make_tokenizer
from inference_engine.models.gguf_tokenizer import check_made_tokenizer
from inference_engine.models.gguf_vocabulary import end_ids, vocabulary_of
from kakeya.tokenization import end_of_turn_ids, tokens_for_chat
from tests.further import further_test
from tests.models.tiny_folder import byte_tokens
from tests.models.tiny_gguf import tiny_model, write_gguf
from tests.models.vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    PACKAGES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_files,
    write_tokens,
    write_vocabulary,
)

BYTES = [(letter, NORMAL) for letter in (*byte_tokens(), "ab")]
SPELLINGS = {
    "full width": "<｜begin▁of▁sentence｜>",
    "Chinese": "<开始>",
    "Arabic": "<بداية>",
    "emoji": "<🙂👩‍👧>",
    "blanks": "< | a  b | >",
    "a blank": " ",
    "a tab and a line break": "\t\n",
    "composed otherwise": "<cafe\u0301 ﬁ ①>",
    "letters of the byte alphabet": "<Ġé>",
    "with another in it": "<<｜User｜>>",
    "plain": "<s>",
}
SENTENCEPIECE = [
    ("<unk>", UNKNOWN),
    ("<s>", CONTROL),
    ("</s>", CONTROL),
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((text, NORMAL) for text in ("▁", "[", "I", "a", "▁[", "▁a", "▁▁")),
]
SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0]


def made(path: Path) -> Any:
    make_tokenizer(path, path.parent / "tokenizer")
    return AutoTokenizer.from_pretrained(path.parent / "tokenizer", local_files_only=True)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_control_and_user_defined_token_has_its_id_whatever_its_spelling(kind: str, tmp_path: Path) -> None:
    first = [("<unk>", UNKNOWN)] if kind == "llama" else []
    tokens = [*first, ("<｜end｜>", CONTROL), ("<｜User｜>", CONTROL), *BYTES]
    tokens += [(text, CONTROL) for text in SPELLINGS.values()]
    tokens += [(f"{text}…", USER_DEFINED) for text in SPELLINGS.values()]
    values: dict[str, Any] = {"scores": [0.0] * len(tokens)} if kind == "llama" else {}
    bos, eos = len(tokens) - 3, len(first)
    values |= {"bos_token_id": bos, "eos_token_id": eos}
    write_tokens(tmp_path / "m.gguf", tokens, values, kind=kind)
    tokenizer = made(tmp_path / "m.gguf")
    for at, (text, of) in enumerate(tokens):
        if of in (CONTROL, USER_DEFINED):
            assert tokenizer.convert_tokens_to_ids(text) == at, text
            assert tokenizer.encode(text, add_special_tokens=False) == [at], text
            shown = tokenizer.decode([at], skip_special_tokens=True)
            # SentencePiece spells spaces ▁, and drops the first: some texts come back as they would have gone in.
            assert shown == ("" if of == CONTROL or at == bos else text) or kind == "llama", text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos)
    assert max(tokenizer.get_vocab().values()) < len(tokens)


def test_a_chat_has_the_ids_of_the_header(tmp_path: Path, cache: Path) -> None:
    spelled = {0: ("<｜begin｜>", 3), 1: ("<｜end｜>", 3)}
    write_gguf(tiny_model("llama"), tmp_path / "m.gguf", spelled=spelled, ids={"eot": 2})
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder(str(tmp_path / "m.gguf"), cache))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    ids = tokens_for_chat([{"role": "user", "content": "a<｜end｜>"}], tokenizer)
    assert max(ids) < 259
    assert 1 not in ids  # of the user's text no token is made
    assert end_of_turn_ids(tokenizer) == (1, 2)


def test_a_token_whose_text_ends_a_turn_is_found_as_a_whole_whatever_its_type(tmp_path: Path) -> None:
    # As some converters write it.
    write_tokens(tmp_path / "m.gguf", [("<end>", CONTROL), ("<|im_end|>", NORMAL), *BYTES], {"eos_token_id": 0})
    tokenizer = made(tmp_path / "m.gguf")
    assert tokenizer.encode("a<|im_end|>") == [tokenizer.convert_tokens_to_ids("a"), 1]
    assert json.loads((tmp_path / "tokenizer" / "generation_config.json").read_text()) == {"eos_token_id": [0, 1]}


def test_a_letter_that_pads_or_ends_a_turn_splits_no_word(tmp_path: Path) -> None:
    """As in files that pad with `!`: llama.cpp finds such a token in no other way than by merges."""
    letter = [text for text, _ in BYTES].index("b") + 1
    write_tokens(
        tmp_path / "m.gguf", [("</s>", NORMAL), *BYTES], {"padding_token_id": letter, "eos_token_id": letter - 1}
    )
    tokenizer = made(tmp_path / "m.gguf")
    ids = tokenizer.encode("ab</s>b", add_special_tokens=False)
    assert ids == [257, 0, letter]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abb"
    ends = json.loads((tmp_path / "tokenizer" / "generation_config.json").read_text())
    assert ends == {"eos_token_id": [letter - 1, 0]}
    write_tokens(tmp_path / "m.gguf", BYTES, {"bos_token_id": letter - 1, "add_bos_token": True})
    with pytest.raises(ModelError, match="adds a bos_token that is ordinary text"):
        make_tokenizer(tmp_path / "m.gguf", tmp_path / "other")


def test_a_file_as_ollama_writes_it_has_the_ends_that_it_lists(tmp_path: Path) -> None:
    values: dict[str, Any] = {"eos_token_id": 0, "eos_token_ids": [0, 3]}
    values |= {f"add_{name}_token": False for name in ("bos", "eos", "unknown", "padding")}
    write_tokens(tmp_path / "m.gguf", [("<end>", CONTROL), *BYTES], values)
    made(tmp_path / "m.gguf")
    assert json.loads((tmp_path / "tokenizer" / "generation_config.json").read_text()) == {"eos_token_id": [0, 3]}


@pytest.mark.parametrize(
    ("tokens", "values", "reason"),
    [
        ([("<a>", CONTROL), *BYTES, ("<a>", CONTROL)], {}, "the tokens 0 and 258 are both '<a>'"),
        ([("<a>", CONTROL), *BYTES], {"eos_token_id": 258}, r"eos_token_id is 258, and there are 258 tokens"),
        ([("<a>", CONTROL), *BYTES], {"bos_token_id": 2**31}, r"bos_token_id is 2147483648, and there are 258"),
        (BYTES, {"eos_token_ids": [1, 257]}, r"eos_token_ids is 257, and there are 257 tokens"),
        (BYTES, {"rows": 255}, r"257 tokens for a matrix token_embd\.weight of 255 rows"),
        (BYTES, {"of_tomorrow": True}, r"tokenizer\.ggml\.of_tomorrow: not a key that is known"),
        (BYTES, {"suppress_tokens": [1, 2]}, r"tokenizer\.ggml\.suppress_tokens: ids that are never sampled"),
        (BYTES, {"add_bos_token": "yes"}, r"add_bos_token is 'yes', not true or false"),
        (BYTES, {"kind": "t5"}, "is of the kind 't5'"),
        (SENTENCEPIECE, {"kind": "llama"}, r"tokenizer\.ggml\.scores is not 266 numbers"),
    ],
)
def test_what_does_not_fit_the_header_is_refused_with_the_way_out(
    tokens: list[tuple[str, int]], values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    options = {name: values[name] for name in ("rows", "kind") if name in values}
    keys = {name: value for name, value in values.items() if name not in options}
    write_tokens(tmp_path / "m.gguf", tokens, keys, **options)
    with pytest.raises(ModelError, match=reason) as caught:
        make_tokenizer(tmp_path / "m.gguf", tmp_path / "tokenizer")
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: its tokenizer")
    assert "beside the model's tokenizer.json" in str(caught.value)


@pytest.mark.hostile
def test_a_name_of_a_template_that_is_a_path_is_refused(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "m.gguf", BYTES, {"x" * 14: "{{ messages }}"})
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml." + b"x" * 14, b"tokenizer.chat_template./x../"))
    with pytest.raises(ModelError, match="not a name of a chat template"):
        make_tokenizer(path, tmp_path / "tokenizer")
    assert {each.name for each in tmp_path.iterdir()} <= {"m.gguf", "tokenizer"}


@pytest.mark.parametrize(
    ("part", "before", "after", "reason"),
    [
        ("tokenizer.json", '"content": "<｜User｜>"', '"content": "ab"', "is encoded as"),
        (
            "tokenizer_config.json",
            "<｜end｜>",
            "<｜User｜>",
            r"eos_token_id is 0, '<｜end｜>', and it has '<｜User｜>'",
        ),
    ],
)
def test_a_made_tokenizer_that_differs_from_its_file_is_found(
    part: str, before: str, after: str, reason: str, tmp_path: Path
) -> None:
    tokens = [("<｜end｜>", CONTROL), ("<｜User｜>", CONTROL), *BYTES]
    path = write_tokens(tmp_path / "m.gguf", tokens, {"eos_token_id": 0})
    made(path)
    check_made_tokenizer(read_gguf(path), tmp_path / "tokenizer")
    spoilt = tmp_path / "tokenizer" / part
    spoilt.write_text(spoilt.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    with pytest.raises(ModelError, match=reason):
        check_made_tokenizer(read_gguf(path), tmp_path / "tokenizer")


# -- SentencePiece ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [{}, {"add_space_prefix": True}])
def test_sentencepiece_puts_a_space_before_a_text_and_after_every_special_token(
    said: dict[str, bool], tmp_path: Path
) -> None:
    tokenizer = made(write_tokens(tmp_path / "m.gguf", SENTENCEPIECE, {"scores": SCORES, **said}, kind="llama"))
    vocab = tokenizer.get_vocab()
    space, bracket = vocab["▁"], vocab["▁["]
    ids = tokenizer.encode("<s>[a</s>a<s>", add_special_tokens=False)
    assert ids == [1, bracket, vocab["a"], 2, vocab["▁a"], 1]
    assert tokenizer.encode("</s>\n", add_special_tokens=False) == [2, space, 3 + ord("\n")]
    assert tokenizer.encode(" [", add_special_tokens=False) == [space, bracket]
    assert tokenizer.encode("[") == [1, bracket]  # without a key bos 1 is put before a text
    assert tokenizer.decode([bracket, vocab["a"]]) == "[a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


@pytest.mark.parametrize(("part", "whole"), [(NORMAL, UNUSED), (UNUSED, NORMAL)])
def test_sentencepiece_takes_an_id_that_is_none_for_absent_and_merges_what_is_unused(
    part: int, whole: int, tmp_path: Path
) -> None:
    tokens = [*SENTENCEPIECE, ("b", part), ("ab", whole), ("<unused0>", UNUSED)]
    values = {"scores": [*SCORES, -9.0, -0.5, 0.0], "bos_token_id": 2**32 - 1, "add_space_prefix": False}
    tokenizer = made(write_tokens(tmp_path / "m.gguf", tokens, values, kind="llama"))
    assert tokenizer.encode("ab") == [1, 267]
    assert 268 not in tokenizer.encode("<unused0>")


def test_sentencepiece_puts_no_space_anywhere_if_the_file_says_so(tmp_path: Path) -> None:
    said = {"add_space_prefix": False, "add_bos_token": False}
    tokenizer = made(write_tokens(tmp_path / "m.gguf", SENTENCEPIECE, {"scores": SCORES, **said}, kind="llama"))
    vocab = tokenizer.get_vocab()
    assert tokenizer.encode("<s>[a</s>a") == [1, vocab["["], vocab["a"], 2, vocab["a"]]
    assert tokenizer.decode([vocab["▁["], vocab["▁a"]]) == " [ a"


@pytest.mark.parametrize(("architecture", "name"), [("phi3", ""), ("llama", "My Phi-3"), ("llama", "")])
def test_tokens_of_phi_3_take_the_blanks_behind_them(architecture: str, name: str, tmp_path: Path) -> None:
    tokens = [*SENTENCEPIECE, ("<|user|>", CONTROL), ("<|endoftext|>", CONTROL)]
    path = write_tokens(
        tmp_path / "m.gguf",
        tokens,
        {"scores": [*SCORES, 0.0, 0.0]},
        kind="llama",
        architecture=architecture,
        general={"name": name},
    )
    tokenizer = made(path)
    vocab, user, end = tokenizer.get_vocab(), len(tokens) - 2, len(tokens) - 1
    found = tokenizer.encode("<|user|>\n [<|endoftext|> a", add_special_tokens=False)
    behind = [vocab["▁["]] if architecture == "phi3" or name else [vocab["▁"], vocab["<0x0A>"], vocab["▁["]]
    assert found == [user, *behind, end, vocab["▁"], vocab["▁a"]]


def test_gemma_4_merges_as_its_list_says_and_begins_every_text_with_bos(tmp_path: Path) -> None:
    tokens = [
        ("<unk>", UNKNOWN),
        ("<bos>", CONTROL),
        ("<turn|>", NORMAL),
        *SENTENCEPIECE[3:],
        ("\n", NORMAL),
        ("\n\n", NORMAL),
    ]
    values: dict[str, Any] = {"bos_token_id": 1, "add_bos_token": False, "unknown_token_id": 0}
    merges = ["▁ a", "▁ [", "▁ ▁", "\n \n"]
    path = write_tokens(tmp_path / "m.gguf", tokens, values, kind="gemma4", merges=merges)
    tokenizer = made(path)
    vocab = tokenizer.get_vocab()
    assert tokenizer.encode("a [  é\n\n") == [
        1,
        vocab["a"],
        vocab["▁["],
        vocab["▁▁"],
        *(vocab[f"<0x{byte:02X}>"] for byte in "é".encode()),
        vocab["\n\n"],
    ]
    assert tokenizer.encode("a<turn|> a", add_special_tokens=False) == [vocab["a"], 2, vocab["▁a"]]
    assert tokenizer.decode([vocab["▁a"], vocab["▁["]]) == " a ["
    assert json.loads((tmp_path / "tokenizer" / "generation_config.json").read_text()) == {"eos_token_id": [2]}


@pytest.mark.parametrize(
    ("texts", "values", "ends"),
    [
        (("<|end|>", "<|return|>", "<|call|>", "<|im_start|>"), {}, (1, 2)),  # gpt-oss
        (("<|end|>", "<|flush|>", "<|calls|>", "<|eot|>"), {}, (1, 2)),  # Solar Open
        (("<|end|>", "<|return|>"), {}, (0, 1)),
        (("</s>", "<|tool_response>", "<eos>", "<turn|>"), {}, (1, 2, 3)),  # Gemma 4
        (("<|fim_prefix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"), {}, (2, 3, 4)),  # Qwen
        (("<fim_suffix>", "<fim_pad>", "<reponame>"), {}, (1, 2)),  # Granite
        (("[PAD]", "[EOT]", "[BOS]", "<｜end▁of▁sentence｜>"), {}, (0, 1, 3)),  # Kimi K2, DeepSeek
        (("<p>", "<q>", "<r>"), {"fim_pad_token_id": 0, "fim_sep_token_id": 2, "fim_pre_token_id": 1}, (0, 2)),
        (("<p>", "<q>", "<r>"), {"fim_rep_token_id": 2**32 - 1, "eom_token_id": 1}, (1,)),
    ],
)
def test_a_file_ends_a_turn_where_llama_cpp_does(
    texts: tuple[str, ...], values: dict[str, int], ends: tuple[int, ...], tmp_path: Path
) -> None:
    path = write_tokens(tmp_path / "m.gguf", [*((text, NORMAL) for text in texts), *BYTES], values)
    assert sorted(end_ids(read_gguf(path))) == list(ends)
    if not values:  # what ends a turn by its text is found as a whole
        assert {*ends} - {at for at in ends if texts[at] == "<|tool_response>"} <= {
            *vocabulary_of(read_gguf(path)).wholes()
        }


def test_every_key_has_a_treatment_and_a_sentence() -> None:
    for key, (treatment, sentence) in TOKENIZER_KEYS.items():
        assert treatment in ("honoured", "refused", "no effect"), key
        assert len(sentence) > 5, key


# -- published vocabularies -------------------------------------------------------------------------------------------

TEXTS = [
    "",
    "Hello world",
    " Hello",
    "  two  spaces   three",
    "   ",
    "trailing space ",
    "a",
    "\n",
    "\n\n",
    "a\n\nb",
    "a\r\nb",
    "\t\ttabs",
    "tab\tin  the\n  middle   \n",
    "1234567890 12.5e-3",
    "don't we'll I'M",
    "naïve café",
    "cafe\u0301",
    "e\u0301\u0323",
    "ﬁ ﬂ Å",
    "日本語のテキスト",
    "中文和English混合123",
    "مرحبا بالعالم",
    "Привет, мир!",
    "한국어 문장입니다",
    "ไทยภาษา",
    "हिन्दी वाक्य",
    "ÀÉÎ õ ü ß",
    "🙂👩‍👩‍👧‍👦🇩🇪",
    "def f(x):\n    return x + 1\n",
    '{"a": [1, 2, {"b": null}]}',
    "<html><body>hi</body></html>",
    "x = a*b; // comment",
    "http://example.com/?q=1&r=2",
    "...!!!???",
    "\u00a0nbsp",
    "\u3000wide",
    "word\u200bword",
    "A" * 50,
    "{0}[INST] Hello [/INST]",
    "{0}{1}\nuser{0} there{1} \n",
]


@further_test
@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_of_a_published_vocabulary_gives_the_ids_of_its_tokenizer_json(package: str, tmp_path: Path) -> None:
    assert tokenizer_files(package).is_dir(), "make vocabularies installs them"
    make_tokenizer(write_vocabulary(package, tmp_path / "m.gguf"), tmp_path / "tokenizer")
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    published = Tokenizer.from_file(str(tokenizer_files(package) / "tokenizer.json"))
    special = [token["content"] for token in json.loads(published.to_str())["added_tokens"] if token["special"]]
    assert len(TEXTS) == 40
    for text in (text.replace("{0}", special[0]).replace("{1}", special[-1]) for text in TEXTS):
        ids = published.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == published.decode(ids, skip_special_tokens=False), text
    if package == "llama2":
        assert ours.encode("<s>[INST] Hello [/INST]", add_special_tokens=False).ids[:2] == [1, 733]
