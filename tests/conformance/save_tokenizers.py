"""Tokenizers in folders, and what the Python SDK makes of messages with each: TypeScript has to make the same.

usage: save_tokenizers.py FOLDER

Prints {name: {"end_of_turn": ids, "chats": [{"messages", "allowed", "ids" or "error"}],
"turns": [{"messages", "after", "ids" or "error"}]}}. allowed: whether messages may hold special tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from inference_engine.config import forbid_model_hub
from kakeya import TemplateError
from kakeya.tokenization import ChatTokenizer, end_of_turn_ids, load_tokenizer, tokens_for_chat, tokens_for_next_turn

EXAMPLES = Path(__file__).parents[2] / "sdks" / "python" / "examples"
# As small instruct models have it: a default system message, and trimmed text.
TEMPLATE = """\
{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if tools is defined and tools -%}{{ tools | length }}{%- endif -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
# As Phi and GLM have it: a role between the halves of a special token, the end of a text behind a conversation.
ROLES = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>' + message.content }}{%- if message.name -%}<|{{ message.name }}|>{%- endif -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- else -%}{{ eos_token }}{%- endif -%}
"""
WORDS = ["Hi!", "What is 2 + 3? ", "naïve café 東京 🙂", "a  b\n\n c", "The weather's fine, isn't it?"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def roles() -> PreTrainedTokenizerFast:
    """One whose template makes special tokens of roles."""
    tokenizer = Tokenizer(
        BPE(vocab={c: at for at, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", chat_template=ROLES)


def byte_level() -> PreTrainedTokenizerFast:
    """With real merges, trained here."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special: list[Any] = ["<|im_start|>", "<|im_end|>"]
    corpus = [*WORDS, "The user asked about the weather in Paris, and the assistant answered the user."] * 4
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)


def rendered(tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What the Python SDK says with this tokenizer."""
    ends = end_of_turn_ids(tokenizer)
    chats = [[user(text)] for text in WORDS]
    chats.append([user("a?"), {"role": "assistant", "content": "Yes."}, user("b?")])
    specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
    chats += [[user(f"Hi {text}! {text}\n")] for text in specials]
    chats += [[{"role": role, "content": "end"}, user("end")] for role in ("end", "im_end", "tool", "critic")]
    chats += [[{"role": "user", "content": "a", "name": name}] for name in ("end", "user", "anna")]
    chats += [[user("".join(specials)), {"role": "assistant", "content": "<a> [b] |>"}, user("\ue000<|im_end|>x")]]
    spoken = [int(token_id) for token_id in tokenizer.encode("Yes.", add_special_tokens=False)]
    turns: list[dict[str, Any]] = [
        turn(tokenizer, messages, after)
        for after in ([], spoken, [*spoken, *ends])
        for messages in (
            [user("b?")],
            [user("b"), {"role": "tool", "content": "c"}],
            [user(specials[-1] + "b")],
            [user("Kqzwxjvbmx Kqzwxjvbm Vhgtfyprd")],  # what finds the place after the assistant's words
        )
    ]
    return {
        "end_of_turn": ends,
        "chats": [
            {"messages": chat, "allowed": allowed, **ids(tokenizer, chat, allowed)}
            for chat in chats
            for allowed in (False, True)
        ],
        "turns": turns,
    }


def ids(tokenizer: ChatTokenizer, chat: list[dict[str, str]], allowed: bool) -> dict[str, Any]:
    try:
        return {"ids": tokens_for_chat(chat, tokenizer, allow_special_tokens=allowed)}
    except TemplateError:
        return {"error": "TemplateError"}


def turn(tokenizer: ChatTokenizer, messages: list[dict[str, str]], after: list[int]) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = {"ids": tokens_for_next_turn(messages, tokenizer, after=after)}
    except TemplateError:
        outcome = {"error": "TemplateError"}
    return {"messages": messages, "after": after, **outcome}


def main(folder: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    from small_tokenizer import save_tokenizer
    from tokenization_per_family import FAMILIES

    for name, family in FAMILIES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        save_tokenizer(folder / name, family.template, family.special_tokens, eos_token=family.end)
    byte_level().save_pretrained(folder / "bytes")
    roles().save_pretrained(folder / "roles")
    print(json.dumps({name: rendered(load_tokenizer(folder / name)) for name in (*FAMILIES, "bytes", "roles")}))


if __name__ == "__main__":
    forbid_model_hub()
    main(Path(sys.argv[1]))
