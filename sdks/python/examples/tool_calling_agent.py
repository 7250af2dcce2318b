"""An agent with two local tools that keeps one session for its whole conversation.

Every turn appends only what is new: the question, then each tool's result. The model asks for a tool by writing a JSON
object; small models write it in many forms, so it is read leniently, and what cannot be used is reported to the model.

    pip install './sdks/python[tokenization]'                   # in the repository's folder
    kakeya serve                                                # in another terminal
    kakeya models show smollm2-135m                             # prints the model's folder
    python tool_calling_agent.py --tokenizer FOLDER "What is 30 + 12?"
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from kakeya import Client, KakeyaError, Session
from kakeya.tokenization import (
    ChatTokenizer,
    end_of_turn_ids,
    load_tokenizer,
    tokens_for_chat,
    tokens_for_next_turn,
)

SYSTEM = """\
You answer with the help of tools. To use one, write only its JSON object:
{"tool": "add", "arguments": {"a": 2, "b": 3}}
{"tool": "count_words", "arguments": {"text": "three short words"}}
Once the tool has answered, answer the question in plain text."""

# A small model follows an example better than an instruction.
SHOWN = [
    {"role": "user", "content": "What is 20 + 7?"},
    {"role": "assistant", "content": '{"tool": "add", "arguments": {"a": 20, "b": 7}}'},
    {"role": "user", "content": "The tool answered: 27"},
    {"role": "assistant", "content": "20 + 7 is 27."},
    {"role": "user", "content": "How many words are in: red green blue"},
    {"role": "assistant", "content": '{"tool": "count_words", "arguments": {"text": "red green blue"}}'},
    {"role": "user", "content": "The tool answered: 3"},
    {"role": "assistant", "content": "There are 3 words."},
]


def add(a: float, b: float) -> str:
    return f"{float(a) + float(b):g}"


def count_words(text: str) -> int:
    return len(str(text).split())


TOOLS: dict[str, Callable[..., object]] = {"add": add, "count_words": count_words}


def find_tool_call(text: str) -> dict[str, Any] | None:
    """The first JSON object in `text` that names a tool, wherever it stands and however it spells its keys."""
    decoder = json.JSONDecoder()
    start = text.find("{")
    while start >= 0:
        try:
            found, _ = decoder.raw_decode(text, start)
        except ValueError:
            found = None
        if isinstance(found, dict):
            function = found["function"] if isinstance(found.get("function"), dict) else found
            name = next((function[key] for key in ("tool", "name", "function") if key in function), None)
            arguments: Any = next((function[key] for key in ("arguments", "parameters", "args") if key in function), {})
            if isinstance(name, str):
                return {"tool": name, "arguments": arguments}
        start = text.find("{", start + 1)
    return None


def use_tool(call: dict[str, Any]) -> str:
    """The tool's result, or what was wrong with the call: both are for the model to read."""
    tool = TOOLS.get(call["tool"])
    if tool is None:
        return f"there is no tool {call['tool']!r}; there are {', '.join(TOOLS)}"
    try:
        arguments = call["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(tool(**arguments))
    except (TypeError, ValueError) as error:
        return f"the call failed: {error}"


def speak(session: Session, tokenizer: ChatTokenizer, max_tokens: int) -> tuple[str, tuple[int, ...]]:
    """Let the model speak; returns its words and the ids it generated."""
    result = session.generate(max_tokens).result()
    words = tokenizer.decode(list(result.token_ids), skip_special_tokens=True).strip()
    print(f"model  {words}")
    print(f"       {result.prefilled_tokens} tokens read, {result.generated_tokens} written", end=" ")
    print(f"in {result.total_seconds:.2f} s")
    return words, result.token_ids


def answer(session: Session, tokenizer: ChatTokenizer, question: str, *, max_tokens: int, max_calls: int) -> str:
    """One question, with as many tool calls as the model asks for (at most `max_calls`)."""
    print(f"user   {question}")
    start = [{"role": "system", "content": SYSTEM}, *SHOWN, {"role": "user", "content": question}]
    session.append(tokens_for_chat(start, tokenizer))
    words, generated = speak(session, tokenizer, max_tokens)
    for _ in range(max_calls):
        call = find_tool_call(words)
        if call is None:
            break
        result = use_tool(call)
        print(f"tool   {call['tool']} → {result}")
        # Every family's template knows the role "user"; few know "tool".
        answer = [{"role": "user", "content": f"The tool answered: {result}"}]
        session.append(tokens_for_next_turn(answer, tokenizer, after=generated))
        words, generated = speak(session, tokenizer, max_tokens)
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="An agent with two local tools, on one session.")
    parser.add_argument("question", nargs="?", default="How many words are in: the quick brown fox?")
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER", help="the served model's folder")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-calls", type=int, default=3)
    options = parser.parse_args(arguments)
    try:
        tokenizer = load_tokenizer(options.tokenizer)
        with (
            Client(options.target) as client,
            client.create_session(eos_token_ids=end_of_turn_ids(tokenizer), label="agent") as session,
        ):
            answer(session, tokenizer, options.question, max_tokens=options.max_tokens, max_calls=options.max_calls)
            print(f"       {session.history_length} tokens in the history")
    except KakeyaError as error:
        print(f"error  {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
