"""Chat messages to ids: a history built by appends is what the template would render, where the template allows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

import kakeya
from kakeya.tokenization import (
    ChatTokenizer,
    end_of_turn_ids,
    from_openai_messages,
    load_tokenizer,
    tokens_for_chat,
    tokens_for_next_turn,
)

# ChatML with a default system message, as small instruct models have it.
CHATML = """\
{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
CORPUS = [
    "The user asked the assistant a question about the weather in Paris, and the assistant answered it.",
    "user assistant system\n\nWhat is it? It is 42. Kqzwxjvbm fox Vhgtfyprd the quick brown fox.\n",
] * 4


def byte_level_tokenizer(template: str | None, *, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with real merges, trained here."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special: list[str | AddedToken] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.train_from_iterator(
        CORPUS,
        BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, chat_template=template)


BYTE_LEVEL = byte_level_tokenizer(CHATML)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=30).filter(
    lambda text: "<" not in text
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def encode(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@given(questions=st.lists(WORDS, min_size=1, max_size=4), replies=st.lists(WORDS, min_size=4, max_size=4))
def test_a_history_built_by_appends_is_what_chatml_renders(questions: list[str], replies: list[str]) -> None:
    end = BYTE_LEVEL.convert_tokens_to_ids("<|im_end|>")
    conversation = [user(questions[0])]
    history = tokens_for_chat(conversation, BYTE_LEVEL)
    for reply, question in zip(replies, questions[1:], strict=False):
        generated = [*encode(BYTE_LEVEL, reply), end]
        history += generated + tokens_for_next_turn([user(question)], BYTE_LEVEL, after=generated)
        conversation += [assistant(reply), user(question)]
    assert history == tokens_for_chat(conversation, BYTE_LEVEL)


@given(reply=WORDS)
def test_a_reply_cut_short_gets_the_end_of_its_turn(reply: str) -> None:
    generated = encode(BYTE_LEVEL, reply)
    history = tokens_for_chat([user("a")], BYTE_LEVEL) + generated
    history += tokens_for_next_turn([user("b")], BYTE_LEVEL, after=generated)
    assert history == tokens_for_chat([user("a"), assistant(reply), user("b")], BYTE_LEVEL)


@pytest.mark.parametrize("family", ["ChatML", "Llama", "Gemma", "Qwen"])
def test_each_family_gets_its_next_turn(example: Callable[[str], ModuleType], family: str) -> None:
    chosen = example("tokenization_per_family").FAMILIES[family]
    tokenizer = chosen.tokenizer()
    (end,) = encode(tokenizer, chosen.end)
    assert end_of_turn_ids(tokenizer) == (end,)
    start = tokens_for_chat([user("a?")], tokenizer)
    generated = [*encode(tokenizer, "Yes."), end]
    history = start + generated + tokens_for_next_turn([user("b?")], tokenizer, after=generated)
    assert history == tokens_for_chat([user("a?"), assistant("Yes."), user("b?")], tokenizer)
    cut = generated[:-1]
    assert start + cut + tokens_for_next_turn([user("b?")], tokenizer, after=cut) == history


def test_the_end_of_a_text_that_a_template_puts_behind_a_conversation_is_not_the_turns() -> None:
    """As templates of Phi have it. One that has nothing else behind the last turn says two things about its end."""
    ending = CHATML + "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}"
    tokenizer = byte_level_tokenizer(ending, end="<|endoftext|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    history = tokens_for_chat([user("a")], tokenizer)
    whole = tokens_for_chat([user("a"), assistant("Yes."), user("b")], tokenizer)
    for generated in (encode(tokenizer, "Yes."), [*encode(tokenizer, "Yes."), end]):
        assert [*history, *generated, *tokens_for_next_turn([user("b")], tokenizer, after=generated)] == whole
    bare = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if not add_generation_prompt %}"
    tokenizer = byte_level_tokenizer(bare + "{{ eos_token }}{% endif %}", end="<|endoftext|>")
    with pytest.raises(kakeya.TemplateError, match="no ids can be appended that fit both"):
        tokens_for_next_turn([user("b")], tokenizer, after=[])


def test_a_template_that_reshapes_earlier_turns_does_not_touch_the_history(
    example: Callable[[str], ModuleType],
) -> None:
    """The template would strip the reasoning; the session keeps it and is given the same next turn."""
    tokenizer = example("tokenization_per_family").FAMILIES["Qwen"].tokenizer()
    end = end_of_turn_ids(tokenizer)[0]
    thoughtful = [*encode(tokenizer, "<think>\nhm\n</think>\n\nYes."), end]
    plain = [*encode(tokenizer, "Yes."), end]
    assert tokens_for_next_turn([user("b?")], tokenizer, after=thoughtful) == tokens_for_next_turn(
        [user("b?")], tokenizer, after=plain
    )


def test_a_tokenizer_that_joins_words_and_their_end_is_named(example: Callable[[str], ModuleType]) -> None:
    template = "{% for message in messages %}{{ message.content + 'mm' }}{% endfor %}"
    tokenizer = example("small_tokenizer").small_tokenizer(
        template, ["<end>"], eos_token="<end>", merges=[("m", "m"), ("d", "m")]
    )
    with pytest.raises(kakeya.TemplateError, match="joins"):
        tokens_for_next_turn([user("b")], tokenizer, after=[])


def test_what_is_no_list_of_messages_is_refused(subtests: pytest.Subtests) -> None:
    # Of a generator the second look would see nothing: the turn would be without its messages.
    wrong: list[Any] = [[], "hello", {"role": "user"}, ["hello"], (user(text) for text in "ab"), iter([user("a")]), 5]
    for messages in wrong:
        for into_ids in (tokens_for_chat, partial(tokens_for_next_turn, after=[])):
            with subtests.test(str(messages)), pytest.raises(kakeya.InvalidMessages, match=r"^messages"):
                into_ids(messages, BYTE_LEVEL)


def test_text_that_is_none_is_refused_with_its_place(subtests: pytest.Subtests) -> None:
    """Bytes would be rendered as Python shows them, and half a pair fails in the tokenizers' library."""
    wrong: list[tuple[Any, str]] = [
        (user("caf\udce9"), r"messages\[1\]: holds '\\udce9'"),
        ({"role": "user\ud800", "content": "a"}, r"messages\[1\]: holds '\\ud800'"),
        ({"role": "user", "content": [{"type": "text", "text": "\udcff"}]}, r"messages\[1\]: holds '\\udcff'"),
        ({"role": "user", "content": b"bytes"}, r"messages\[1\]: holds bytes"),
    ]
    for message, said in wrong:
        for into_ids in (tokens_for_chat, partial(tokens_for_next_turn, after=[])):
            with subtests.test(ascii(message)), pytest.raises(kakeya.InvalidMessages, match=said):
                into_ids([user("a"), message], BYTE_LEVEL)
    with pytest.raises(kakeya.TokenizerError, match=r"holds '\\udcff'"):
        tokens_for_chat([user("a")], byte_level_tokenizer("{{ word }}"), word="\udcff")


def test_end_ids_are_the_tokenizers_and_the_templates() -> None:
    tokenizer = byte_level_tokenizer(CHATML, end="<|endoftext|>")
    names = [tokenizer.decode([token_id]) for token_id in end_of_turn_ids(tokenizer)]
    assert names == ["<|endoftext|>", "<|im_end|>"]


def test_a_folder_that_holds_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(kakeya.TokenizerError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(kakeya.TokenizerError, match="not a folder"):
        load_tokenizer(tmp_path / "absent")


def test_openai_messages_become_what_templates_expect() -> None:
    assert from_openai_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Add"}, {"type": "text", "text": "2 and 3."}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
            {"role": "assistant", "content": [], "reasoning_content": "It is five."},
            {"role": "user", "content": "Thanks.", "name": "ada", "reasoning_content": None},
        ]
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add\n2 and 3."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "reasoning_content": "It is five."},
        {"role": "user", "content": "Thanks.", "name": "ada"},
    ]


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


UNRENDERABLE: list[tuple[Any, str]] = [
    ("hello", "messages[0]"),
    ({"content": "a"}, "messages[0].role"),
    ({"role": "robot", "content": "a"}, "messages[0].role"),
    ({"role": ["user"], "content": "a"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "assistant", "content": None}, "messages[0].content"),
    ({"role": "user", "content": []}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, "messages[0].content[1]"),
    ({"role": "user", "content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
    ({"role": "user", "content": "a", "reasoning_content": "b"}, "messages[0].reasoning_content"),
    ({"role": "assistant", "content": "a", "reasoning_content": ["b"]}, "messages[0].reasoning_content"),
    ({"role": "tool", "content": "5"}, "messages[0].tool_call_id"),
    (call("{"), "messages[0].tool_calls[0].function.arguments"),
    (call("[1]"), "messages[0].tool_calls[0].function.arguments"),
    (call(None), "messages[0].tool_calls[0].function.arguments"),
    ({"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom"}]}, "messages[0].tool_calls[0]"),
    ({"role": "user", "content": "a", "tool_calls": [1]}, "messages[0].tool_calls"),
]


def test_openai_messages_that_cannot_be_rendered_are_named_by_path(subtests: pytest.Subtests) -> None:
    for message, path in UNRENDERABLE:
        with subtests.test(path):
            with pytest.raises(kakeya.InvalidMessages) as caught:
                from_openai_messages([message])
            assert caught.value.path == path


@pytest.mark.parametrize("written", ["{{ message.content }}", "{{ message.role + message.content }}"])
def test_content_in_parts_is_refused_by_a_template_that_takes_it_for_text(written: str) -> None:
    tokenizer = byte_level_tokenizer("{% for message in messages %}" + written + "{% endfor %}")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    with pytest.raises(kakeya.TemplateError, match="list"):
        tokens_for_chat(parts, tokenizer)
    assert tokenizer.decode(tokens_for_chat(from_openai_messages(parts), tokenizer)).endswith("Hello!")


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_wants_parts_does_not_drop_the_words_of_a_text() -> None:
    tokenizer = byte_level_tokenizer(PARTS)
    with pytest.raises(kakeya.TemplateError, match=r"drops the words of messages\[0\]; .* a list of parts"):
        tokens_for_chat([user("Hello")], tokenizer)
    with pytest.raises(kakeya.TemplateError, match="drops the words"):
        tokens_for_chat([user("u")], tokenizer)  # a letter that the template writes, too
    in_parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    plain = byte_level_tokenizer(PARTS.replace("{% for p in m.content %}{{ p.text }}{% endfor %}", "{{ m.content }}"))
    assert tokens_for_chat([in_parts], tokenizer) == tokens_for_chat([user("Hello")], plain)
    for role in ("system", "tool"):
        with pytest.raises(kakeya.TemplateError, match=r"drops the words of messages\[1\]"):
            tokens_for_chat([in_parts, {"role": role, "content": "42"}, in_parts], tokenizer)
        with pytest.raises(kakeya.TemplateError, match=r"drops the words of messages\[2\]"):
            tokens_for_next_turn([{"role": role, "content": "42"}], tokenizer, after=[])
    after = plain.encode("answer", add_special_tokens=False)
    assert tokens_for_next_turn([in_parts], tokenizer, after=after) == tokens_for_next_turn(
        [user("Hello")], plain, after=after
    )
    assert end_of_turn_ids(tokenizer) == end_of_turn_ids(plain)


def test_named_templates_without_a_default_are_used_if_one_is_for_plain_conversations() -> None:
    tokenizer, plain = byte_level_tokenizer(CHATML), byte_level_tokenizer(CHATML)
    for templates in ({"chat": CHATML}, {"rag": "rag", "tool_use": "tools", "chat": CHATML}, {"rag": CHATML}):
        tokenizer.chat_template = templates
        assert tokens_for_chat([user("a")], tokenizer) == tokens_for_chat([user("a")], plain)
        assert end_of_turn_ids(tokenizer) == end_of_turn_ids(plain)
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(kakeya.TemplateError, match=r"named rag, tool_use, and none .*: chat_template='rag'"):
        tokens_for_chat([user("a")], tokenizer)
    assert tokens_for_chat([user("a")], tokenizer, chat_template="rag") == tokens_for_chat([user("a")], plain)


def test_a_template_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    plain = byte_level_tokenizer(CHATML)
    plain.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert getattr(load_tokenizer(tmp_path), "chat_template", None) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert tokens_for_chat([user("a")], load_tokenizer(tmp_path)) == tokens_for_chat([user("a")], plain)
