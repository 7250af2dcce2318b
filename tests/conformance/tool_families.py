"""The model families of tools.json: their tokenizers, and what the Python SDK makes of the tools with each.

usage: tool_families.py FOLDER

Saves the tokenizers in folders and prints {family: {"format", "constraints": {choice: grammar}, "chat": ids}}:
TypeScript has to make the same. In the file a family has the source of its template, its tokens, `turns` as they are
written and what is read in them, `refused` turns, which no constraint allows, and what is `appended` behind calls.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from inference_engine.config import forbid_model_hub
from kakeya.tokenization import ChatTokenizer
from kakeya.tools import Tools

FILE = json.loads((Path(__file__).parent / "tools.json").read_text(encoding="utf-8"))
FAMILIES: Mapping[str, Any] = FILE["families"]
DEFINITIONS: list[dict[str, Any]] = FILE["tools"]
CHOICES = ("auto", "required", "none", "note")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 - 3.5?"}]


@cache
def tokenizer_of(family: str) -> ChatTokenizer:
    """One token for each byte, for the pieces that JSON is written in, and for the family's markers."""
    given = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [('"', ":"), ('"', ","), ("Ġ", '"'), ('"', "}"), ("}", "}"), ("}", "Ċ"), ("l", "l")]
    pieces = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(given["special"])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in given["plain"]])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=given["end"],
        bos_token=given.get("begin"),
        chat_template="\n".join(given["template"]),
        clean_up_tokenization_spaces=False,
    )
    return cast("ChatTokenizer", fast)


def tools_of(family: str) -> Tools:
    return Tools(DEFINITIONS, tokenizer_of(family), format=FAMILIES[family].get("format"))


def main(folder: Path) -> None:
    found = {}
    for family in FAMILIES:
        tools = tools_of(family)
        cast("Any", tokenizer_of(family)).save_pretrained(folder / family)
        chat = CHAT if family not in {"mistral", "arguments marker"} else CHAT[1:]
        found[family] = {
            "format": dataclasses.asdict(tools.format),
            "constraints": {choice: tools.constraint(choice).grammar for choice in CHOICES},
            "chat": {"messages": chat, "ids": tools.tokens_for_chat(chat)},
        }
    print(json.dumps(found))


if __name__ == "__main__":
    forbid_model_hub()
    main(Path(sys.argv[1]))
