"""Why the runtime takes token ids and not messages: a live look at two hazards, without a server.

A server that is given messages renders them again at every turn. For its cache to be of use, the new prompt must begin
with exactly the ids of the old one and of what the model said. Two things break that, both shown here:

1. The chat template takes an earlier turn's reasoning out once it is no longer the last one.
2. Text that is encoded again need not give the ids that were sampled.

    pip install './sdks/python[tokenization]'    # in the repository's folder
    python chat_template_hazard.py
"""

from __future__ import annotations

from collections.abc import Sequence

from small_tokenizer import small_tokenizer
from tokenization_per_family import CHATML, FAMILIES

from kakeya.tokenization import ChatTokenizer, tokens_for_chat, tokens_for_next_turn

QUESTION = {"role": "user", "content": "What is 17 + 25?"}
FOLLOW_UP = {"role": "user", "content": "Twice that?"}


def first_difference(old: Sequence[int], new: Sequence[int]) -> int | None:
    """The first index at which `new` does not continue `old`; None if it begins with all of it."""
    for index, token_id in enumerate(old):
        if index >= len(new) or new[index] != token_id:
            return index
    return None


def compare(title: str, tokenizer: ChatTokenizer, generated: Sequence[int]) -> int | None:
    """Print how turn 2 looks to a session and to a server of messages; returns where they part."""
    start = tokens_for_chat([QUESTION], tokenizer)
    history = [*start, *generated]
    said = tokenizer.decode(generated).removesuffix("<|im_end|>")
    rendered = tokens_for_chat([QUESTION, {"role": "assistant", "content": said}, FOLLOW_UP], tokenizer)
    appended = tokens_for_next_turn([FOLLOW_UP], tokenizer, after=generated)
    parted = first_difference(history, rendered)

    print(title)
    print(f"  the model said          {said!r}")
    print(f"  session, turn 2         {len(history)} ids are there already, {len(appended)} are appended")
    if parted is None:
        print(f"  messages, turn 2        {len(rendered)} ids in the prompt, and they begin with all {len(history)}")
    else:
        print(f"  messages, turn 2        {len(rendered)} ids in the prompt, and they part at index {parted}:")
        print(f"                            there   {pieces(tokenizer, history[parted : parted + 8])}")
        print(f"                            prompt  {pieces(tokenizer, rendered[parted : parted + 8])}")
        print(f"                          {len(history) - parted} ids of the cache are lost,", end=" ")
        print(f"{len(rendered) - parted} are computed in place of {len(appended)}")
    print()
    return parted


def pieces(tokenizer: ChatTokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each id stands for."""
    return [tokenizer.decode([token_id]) for token_id in token_ids]


def reasoning_is_stripped() -> int | None:
    tokenizer = FAMILIES["Qwen"].tokenizer()
    said = "<think>\n17 + 25 = 42\n</think>\n\nIt is 42.<|im_end|>"
    return compare("1. A template that strips reasoning", tokenizer, tokenizer.encode(said, add_special_tokens=False))


def text_is_encoded_differently() -> int | None:
    family = FAMILIES["ChatML"]
    tokenizer = small_tokenizer(CHATML, family.special_tokens, eos_token=family.end, merges=[("4", "2")])
    # The model sampled "4" and "2"; the tokenizer has one id for "42".
    generated = [tokenizer.encode(piece, add_special_tokens=False)[0] for piece in ("4", "2", family.end)]
    return compare("2. Text that is encoded differently than it was sampled", tokenizer, generated)


def nothing_happens() -> int | None:
    tokenizer = FAMILIES["ChatML"].tokenizer()
    generated = tokenizer.encode("It is 42.<|im_end|>", add_special_tokens=False)
    return compare("For comparison: plain ChatML, encoded as sampled", tokenizer, generated)


def main() -> None:
    reasoning_is_stripped()
    text_is_encoded_differently()
    nothing_happens()
    print("Given messages, a server computes again whatever follows the first difference, at every turn.")
    print("Given ids, and only new ones, what was said stays as it was said, and a turn costs what is new in it.")


if __name__ == "__main__":
    main()
