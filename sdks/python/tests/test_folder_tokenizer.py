"""A folder's tokenizer gives the ids and the text that its files say, and transformers is not loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kakeya import TemplateError, TokenizerError
from kakeya._folder_tokenizer import FolderTokenizer
from kakeya.tokenization import end_of_turn_ids, load_tokenizer, tokens_for_chat
from sdks.python.tests.test_tokenization import CHATML, byte_level_tokenizer
from tests.models.vocabularies import tokenizer_files

TEXTS = (
    "Hello, world!",
    "  two spaces, a\ttab\n\nand lines",
    "naïve café 日本語 العربية 🙂👍🏽",
    "def f(x):\n    return x ** 2  # 12345 67.89",
    "<|im_end|> <s> [INST] </s> <|eot_id|> <bos>",
    "I'm YOU'RE it's",
    "",
    " ",
)
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and?"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_tokenizer(CHATML).save_pretrained(tmp_path)
    return tmp_path


def configured(folder: Path, **changes: Any) -> Any:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    return load_tokenizer(folder)


def same(folder: Path, texts: Sequence[str] = TEXTS) -> None:
    own, other = FolderTokenizer.of(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in texts:
        for adds in (False, True):
            ids = other.encode(text, add_special_tokens=adds)
            assert own.encode(text, add_special_tokens=adds) == ids, text
            for skips in (False, True):
                options = {"skip_special_tokens": skips, "clean_up_tokenization_spaces": False}
                assert own.decode(ids, **options) == other.decode(ids, **options), text
    assert own.eos_token_id == other.eos_token_id
    assert own.unk_token_id == other.unk_token_id
    added = [{at: token.content for at, token in each.added_tokens_decoder.items()} for each in (own, other)]
    assert added[0] == added[1]
    if own.chat_template:
        rendered = [
            each.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) for each in (own, other)
        ]
        assert rendered[0] == rendered[1]


def test_ids_and_texts_are_those_of_transformers(folder: Path) -> None:
    same(folder)


@pytest.mark.further
@pytest.mark.parametrize("package", ["qwen3", "deepseek_v3", "llama3_1", "gemma3", "gptoss", "llama2"])
def test_ids_and_texts_of_published_models_are_those_of_transformers(package: str) -> None:
    # transformers makes a tokenizer of its own of Llama 2's vocabulary. It has one blank less than SentencePiece at the
    # start of a text and behind a special token.
    is_other = package == "llama2"
    same(tokenizer_files(package), [text for text in TEXTS if not (is_other and text.startswith((" ", "<")))])


@pytest.mark.further
def test_blanks_at_the_start_are_those_of_sentencepiece() -> None:
    own = FolderTokenizer.of(tokenizer_files("llama2"))
    assert own.encode("  two", add_special_tokens=False) == [own.backend_tokenizer.token_to_id("▁▁"), 989]


def test_transformers_is_not_loaded(folder: Path) -> None:
    program = (
        "import sys; from kakeya.tokenization import load_tokenizer, tokens_for_chat; "
        "tokens_for_chat([{'role': 'user', 'content': 'a'}], load_tokenizer(sys.argv[1])); "
        "print({'transformers', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_end_of_a_text_is_the_models_where_the_tokenizer_names_none(folder: Path) -> None:
    (folder / "config.json").write_text('{"eos_token_id": [1, 2]}', encoding="utf-8")
    tokenizer = configured(folder, eos_token=None)
    assert tokenizer.eos_token_id == [1, 2]
    assert end_of_turn_ids(tokenizer) == (1, 2)


def test_tokens_that_only_the_configuration_has_are_added_and_contradictions_refused(folder: Path) -> None:
    held = len(FolderTokenizer.of(folder))
    further = {str(held): {"content": "<tool>", "special": False}}
    tokenizer = configured(folder, added_tokens_decoder=further)
    assert tokenizer.encode("a<tool>", add_special_tokens=False)[-1] == held
    with pytest.raises(TokenizerError, match=f"says that '<tool>' is 7, tokenizer.json makes it {held}"):
        configured(folder, added_tokens_decoder={"7": further[str(held)]})


@pytest.mark.parametrize(
    ("name", "holds"),
    [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]"), ("config.json", "{")],
)
def test_a_damaged_file_is_named(folder: Path, name: str, holds: str) -> None:
    (folder / name).write_text(holds, encoding="utf-8")
    with pytest.raises(TokenizerError, match="holds no tokenizer that can be loaded"):
        load_tokenizer(folder)


def rendered(folder: Path, template: str, **options: Any) -> str:
    tokenizer = load_tokenizer(folder)
    return str(tokenizer.apply_chat_template(TURNS, tokenize=False, chat_template=template, **options))


def test_templates_have_what_they_are_written_for(folder: Path) -> None:
    assert rendered(folder, "{{ eos_token }}{{ {'a': 'é<'} | tojson }}") == '<|im_end|>{"a": "é<"}'
    assert rendered(folder, "{% generation %}a{% endgeneration %}b") == "ab"
    assert rendered(folder, "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}") == "x"
    assert len(rendered(folder, "{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-01")
    given = {"role": "assistant", "content": "", "reasoning": "hm"}
    tokenizer = load_tokenizer(folder)
    for name in ("reasoning", "reasoning_content", "thinking"):
        template = f"{{{{ messages[0].{name} }}}}"
        assert tokenizer.apply_chat_template([given], tokenize=False, chat_template=template) == "hm"

    def add(first: int, second: int = 1) -> int:
        """Add."""
        return first + second

    assert '"name": "add"' in rendered(folder, "{{ tools | tojson }}", tools=[add])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set space = namespace() %}{% set space._hidden = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(folder: Path, template: str) -> None:
    with pytest.raises(TemplateError):
        tokens_for_chat(TURNS, load_tokenizer(folder), chat_template=template)


def test_of_several_templates_one_is_chosen_by_name(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    named = [{"name": "short", "template": "s"}, {"name": "tool_use", "template": "t"}]
    tokenizer = configured(folder, chat_template=named)
    assert tokenizer.apply_chat_template(TURNS, chat_template="short") == "s"
    assert tokenizer.apply_chat_template(TURNS, tools=[]) == "t"
    with pytest.raises(ValueError, match="none of the chat templates short, tool_use is the default"):
        tokenizer.apply_chat_template(TURNS)
