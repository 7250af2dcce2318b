"""One pattern for every model family: render once, then append what is new.

Shows, for the formats in which four families mark turns, the ids that a session gets: the rendered start, the words the
model generated (here made up), and what `tokens_for_next_turn` puts behind them, both when the model ended its turn and
when it was cut short. Needs no server.

    pip install './sdks/python[tokenization]'              # in the repository's folder
    python tokenization_per_family.py                      # small templates in the style of each family
    python tokenization_per_family.py --tokenizer FOLDER   # the real tokenizer in a folder
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from small_tokenizer import small_tokenizer

from kakeya.tokenization import (
    ChatTokenizer,
    end_of_turn_ids,
    load_tokenizer,
    tokens_for_chat,
    tokens_for_next_turn,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family marks turns. `end` is the token a model of it ends its turn with."""

    template: str
    special_tokens: tuple[str, ...]
    end: str

    def tokenizer(self) -> ChatTokenizer:
        return small_tokenizer(self.template, self.special_tokens, eos_token=self.end)


CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

LLAMA = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

# Calls the assistant "model" and insists that turns alternate.
GEMMA = """\
{{- '<bos>' -}}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('turns must alternate') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# Takes the reasoning out of every turn but the last, and gives the last one an empty one if it has none.
QWEN = """\
{%- for message in messages -%}
{%- set parts = message.content.split('</think>') -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last -%}
{%- set thoughts = parts[0].split('<think>')[-1] if parts | length > 1 else '' -%}
{{ '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ parts[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

FAMILIES = {
    "ChatML": Family(template=CHATML, special_tokens=("<|im_start|>", "<|im_end|>"), end="<|im_end|>"),
    "Llama": Family(
        template=LLAMA,
        special_tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        end="<|eot_id|>",
    ),
    "Gemma": Family(template=GEMMA, special_tokens=("<bos>", "<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>"),
    "Qwen": Family(
        template=QWEN, special_tokens=("<|im_start|>", "<|im_end|>", "<think>", "</think>"), end="<|im_end|>"
    ),
}


def show(name: str, tokenizer: ChatTokenizer) -> None:
    """Print the three pieces of a history."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    follow_up = [{"role": "user", "content": "And of Italy?"}]
    start = tokens_for_chat(question, tokenizer)
    words = tokenizer.encode("Paris.", add_special_tokens=False)
    ends = end_of_turn_ids(tokenizer)
    ended = tokens_for_next_turn(follow_up, tokenizer, after=[*words, ends[-1]])
    cut_short = tokens_for_next_turn(follow_up, tokenizer, after=words)
    spelled = ", ".join(tokenizer.decode([token_id]) for token_id in ends)
    print(f"{name}: a turn ends with {spelled}, so eos_token_ids={list(ends)}")
    print(f"  the start of the session       {len(start):4} ids  {tokenizer.decode(start)!r}")
    print(f"  next turn, the model ended     {len(ended):4} ids  {tokenizer.decode(ended)!r}")
    print(f"  next turn, it was cut short    {len(cut_short):4} ids  {tokenizer.decode(cut_short)!r}")
    print()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a session gets to append, for each model family.")
    parser.add_argument("--tokenizer", help="folder of a real tokenizer, in place of the small ones")
    options: Any = parser.parse_args(arguments)
    if options.tokenizer:
        show(options.tokenizer, load_tokenizer(options.tokenizer))
        return
    for name, family in FAMILIES.items():
        show(name, family.tokenizer())


if __name__ == "__main__":
    main()
