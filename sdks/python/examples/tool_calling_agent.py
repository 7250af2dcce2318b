"""An agent with two local tools that keeps one session for its whole conversation.

Every turn appends only what is new: the question, then each tool's result. The first turn has to call a tool, in the
format and with arguments of the types that the functions have; later ones may. A call fits by construction: what
generates it can write nothing else.

    pip install './sdks/python[tokenization]'                   # in the repository's folder
    kakeya serve                                                # in another terminal
    python tool_calling_agent.py "What is 30 + 12?"             # --tokenizer FOLDER, for a model that the caches lack
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Annotated

from kakeya import Client, KakeyaError, Session, ToolFormatUnknown
from kakeya.tokenization import ChatTokenizer, end_of_turn_ids, load_tokenizer
from kakeya.tools import TextPart, ToolCall, ToolResult, Tools

# A small model follows an example better than an instruction.
SHOWN = [
    {"role": "user", "content": "What is 20 + 7?"},
    {"role": "assistant", "content": '<tool_call>\n{"name": "add", "arguments": {"a": 20, "b": 7}}\n</tool_call>'},
    {"role": "user", "content": "<tool_response>\n27\n</tool_response>"},
    {"role": "assistant", "content": "20 + 7 is 27."},
    {"role": "user", "content": "How many words are in: red green blue"},
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "count_words", "arguments": {"text": "red green blue"}}\n</tool_call>',
    },
    {"role": "user", "content": "<tool_response>\n3\n</tool_response>"},
    {"role": "assistant", "content": "There are 3 words."},
]


# Bounds keep a small model from writing on until it is cut.
Number = Annotated[int, {"minimum": -1_000_000, "maximum": 1_000_000}]
Text = Annotated[str, {"maxLength": 120}]


def add(a: Number, b: Number) -> int:
    """Add two numbers."""
    return a + b


def count_words(text: Text) -> int:
    """Count the words of a text.

    text: as it was given, without quotes
    """
    return len(text.split())


def tools_for(tokenizer: ChatTokenizer) -> tuple[Tools, list[dict[str, str]]]:
    """The tools, and what is shown of their use to a model whose template knows none."""
    try:
        return Tools([add, count_words], tokenizer), []
    except ToolFormatUnknown:
        return Tools([add, count_words], tokenizer, format="hermes"), SHOWN


def speak(session: Session, tools: Tools, choice: str, max_tokens: int) -> tuple[str, list[ToolCall], Sequence[int]]:
    """Let the model speak; returns its words, its calls, and the ids it generated."""
    stream = session.generate(max_tokens, constraint=tools.constraint(choice))
    words, calls = "", []
    for part in tools.parts(stream):
        if isinstance(part, TextPart):
            words += part.text
        elif isinstance(part, ToolCall):
            calls.append(part)
    result = stream.result()
    print(f"model  {words.strip() or ', '.join(f'{call.name}{dict(call.arguments)}' for call in calls)}")
    print(f"       {result.prefilled_tokens} tokens read, {result.generated_tokens} written", end=" ")
    print(f"in {result.total_seconds:.2f} s")
    return words.strip(), calls, result.token_ids


def answer(session: Session, tokenizer: ChatTokenizer, question: str, *, max_tokens: int, max_calls: int) -> str:
    """One question, with as many turns of tool calls as the model takes (at most `max_calls`)."""
    print(f"user   {question}")
    tools, shown = tools_for(tokenizer)
    session.append(tools.tokens_for_chat([*shown, {"role": "user", "content": question}]))
    words, calls, generated = speak(session, tools, "required", max_tokens)
    for _ in range(max_calls):
        if not calls:
            break
        results: list[ToolResult] = []
        for call in calls:
            results.append(tools.call(call))
            print(f"tool   {call.name} → {results[-1].content}")
        session.append(tools.tokens_for_next_turn(results, after=generated))
        words, calls, generated = speak(session, tools, "auto", max_tokens)
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="An agent with two local tools, on one session.")
    parser.add_argument("question", nargs="?", default="How many words are in: the quick brown fox?")
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="default: the served model's, from this machine's caches")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-calls", type=int, default=3)
    options = parser.parse_args(arguments)
    try:
        with Client(options.target) as client:
            tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else client.tokenizer()
            with client.create_session(eos_token_ids=end_of_turn_ids(tokenizer), label="agent") as session:
                answer(session, tokenizer, options.question, max_tokens=options.max_tokens, max_calls=options.max_calls)
                print(f"       {session.history_length} tokens in the history")
    except KakeyaError as error:
        print(f"error  {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
