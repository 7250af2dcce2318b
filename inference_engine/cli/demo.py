"""`kakeya demo`: an agent's conversation with a real model, over gRPC, with the cost of every turn.

Fetches the model if it is missing, starts a server, and checks what it demonstrates: a turn computes its new tokens and
nothing of the history before them.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from inference_engine.cli import auto_calibration as first_use
from inference_engine.cli import kill_demo, process, recall_demo, tool_demo
from inference_engine.cli.answers import add_max_tokens, refuse_longer
from inference_engine.cli.child import child_server
from inference_engine.cli.settings import CONVERSATION, add_config_file, add_settings, settings
from inference_engine.cli.text import shown_on
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import KakeyaError, counted

if TYPE_CHECKING:
    from inference_engine.cli.conversation import Conversation, Turn

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

SYSTEM = "You are a helpful assistant with a good memory. Answer in one sentence."
FACT = "pineapple"
SCRIPT = (
    "Hi there!",
    f"Remember this: the secret word is {FACT}.",
    "What is the capital of France?",
    "How many legs does a dog have?",
    "What is the secret word?",
    "Thank you. Goodbye!",
)
SHOWN_IDS = 6


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        usage="%(prog)s [OPTION ...]",
        help="watch a scripted conversation with a real model",
        description="Fetch the model if needed, start a server, hold a conversation of several turns, show its costs.",
    )
    add_config_file(parser)
    add_settings(parser, ModelConfig)
    add_settings(parser, EngineConfig, only=CONVERSATION)
    add_max_tokens(parser, 48)
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--kill",
        action="store_true",
        help="instead: kill the server in the middle of an answer, start it again, and watch the answer go on",
    )
    other.add_argument(
        "--recall", action="store_true", help="instead: state a fact, let it leave the window, ask for it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Hold the conversation. Raises KakeyaError if anything fails or a claim does not hold."""
    from inference_engine.models import fetch, is_known, model_folder, tokenizer_folder

    model, engine = settings(args, ModelConfig), settings(args, EngineConfig)
    refuse_longer(args.max_tokens, engine.max_generate_tokens)
    console = Console(highlight=False)
    if is_known(model.model):
        is_new = not model_folder(model.model, model.cache_path).is_dir()
        fetch(model.model, model.cache_path)
        if is_new:
            from inference_engine.compose import try_out

            try_out(model)
    folder = tokenizer_folder(model.model, model.cache_path)
    if args.kill:
        first_use.before_start(model, engine)
        from inference_engine.cli.conversation import load_chat_tokenizer

        kill_demo.run(
            model, engine, load_chat_tokenizer(folder, name=model.model), max_tokens=args.max_tokens, console=console
        )
        return 0
    if args.recall and model.latent == "auto" and first_use.is_small(model):
        first_use.run(model, ["latent"])
    first_use.before_start(model, engine)
    progress = process.progress()
    if not progress.is_terminal:  # where nothing moves
        console.print(f"Starting a server with {model.model}.", markup=False, soft_wrap=True)
    with ExitStack() as stack:
        with progress.status(f"starting a server with {model.model}"):
            child = stack.enter_context(child_server(model, engine))

            from inference_engine.cli.conversation import load_chat_tokenizer, open_conversation
            from inference_engine.compose import find_latent
            from kakeya import Client, ConstraintUnavailable

            tokenizer = load_chat_tokenizer(folder, name=model.model)
            target = child.wait_ready()
        client = stack.enter_context(Client(target))
        if args.recall:
            found = recall_demo.recall(client, tokenizer, recall_demo.strategies(find_latent(model) is not None))
            recall_demo.show(found, console)
            return 0
        conversation = open_conversation(client, tokenizer, strategy=None, system=SYSTEM, label="kakeya demo")
        with conversation.session as session:
            limit = "no length limit" if session.limit_tokens is None else f"at most {session.limit_tokens:,} tokens"
            console.print(
                f"A session with {session.model_id} at {target}: {engine.strategy}, {limit}, "
                f"{decimal(session.reserved_bytes)} of K/V reserved, {decimal(session.peak_bytes)} at most.\n",
                markup=False,
                soft_wrap=True,
            )
            turns = [
                _hold(conversation, message, conversation.render(message), console, max_tokens=args.max_tokens)
                for message in SCRIPT
            ]
        console.print("Another session, with a tool:\n", markup=False)
        calling = open_conversation(client, tokenizer, strategy=None, label="kakeya demo, with a tool")
        with calling.session:
            hold = partial(_hold, console=console)
            try:
                turns += tool_demo.hold(calling, tokenizer, system=SYSTEM, max_tokens=args.max_tokens, turn_of=hold)
            except ConstraintUnavailable as error:  # of a tokenizer that only few models have
                console.print(f"No tool is called: {error}\n", markup=False, soft_wrap=True)
    console.print(_table(turns))
    console.print(_closing(turns), markup=False, soft_wrap=True)
    console.print("\nNext:", markup=False)
    for command, what in next_commands(model.model, _program()):
        console.print(f"  {command}\n      {what}", markup=False, soft_wrap=True)
    return 0


def _hold(
    conversation: Conversation, message: str, ids: Sequence[int], console: Console, *, max_tokens: int, **options: Any
) -> Turn:
    console.print(f"> {message}", style="bold", markup=False)
    turn = conversation.answer(tuple(ids), max_tokens=max_tokens, show=shown_on(console), **options)
    console.out()
    costs = f"{_ids('in', turn.appended_ids)}; {_ids('out', turn.generated_ids)}"
    console.print(f"  {costs}\n", style="dim", markup=False, soft_wrap=True)
    check(turn)
    return turn


def check(turn: Turn) -> None:
    """Raise KakeyaError unless the turn computed its new tokens only and stayed within its bound on memory."""
    result, info = turn.result, turn.info
    if result is None:
        raise KeyboardInterrupt
    if not turn.generated_ids:
        raise KakeyaError(f"no token was generated; the Generate ended with {result.stop_reason.value}")
    # The token sampled last has no K/V yet: it is computed with the tokens appended after it.
    new = len(turn.appended_ids) + (result.cached_tokens > 0)
    # If evicted KV entries are recomputed, they are prefilled with the new tokens.
    if result.prefilled_tokens < new or (result.prefilled_tokens > new and not result.restored_positions):
        raise KakeyaError(f"{result.prefilled_tokens} tokens were prefilled, {new} were new")
    if info.kv_live_bytes > info.peak_bytes:
        raise KakeyaError(f"{info.kv_live_bytes} bytes are held, more than the {info.peak_bytes} promised")
    if violations := info.inv1_violations + info.inv2_violations + info.inv3_violations:
        raise KakeyaError(f"{violations} invariants of the session were violated")


def _ids(direction: str, ids: Sequence[int]) -> str:
    shown = ", ".join(str(token_id) for token_id in ids[:SHOWN_IDS])
    return f"{counted(len(ids), 'id')} {direction} [{shown}{', …' if len(ids) > SHOWN_IDS else ''}]"


FEW = 6  # tokens that may come in one message: their speed would be that of the message


def _table(turns: Sequence[Turn]) -> Table:
    table = Table(
        title="What each turn cost, in tokens", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("turn", "in", "cached", "prefilled", "out", "first token", "tokens/s", "history", "K/V held"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, turn in enumerate(turns, start=1):
        assert turn.result is not None
        table.add_row(
            str(number),
            str(len(turn.appended_ids)),
            str(turn.result.cached_tokens),
            str(turn.result.prefilled_tokens),
            str(len(turn.generated_ids)),
            f"{1000 * turn.first_token_seconds:.0f} ms",
            f"{turn.tokens_per_second:.1f}" if len(turn.generated_ids) > FEW else "",
            str(turn.info.history_length),
            decimal(turn.info.kv_live_bytes),
        )
    return table


def next_commands(model: str, program: str) -> list[tuple[str, str]]:
    """What to try after the demo: commands, and what each does."""
    of = "" if model == ModelConfig().model else f" --model {shlex.quote(model)}"
    return [
        (f"{program} chat{of}", "talk to the model yourself"),
        (f"{program} demo --kill{of}", "the server is killed in the middle of an answer, which goes on"),
        (f"{program} serve{of}", "a server for your own programs; docs/quickstart.md has the first one"),
    ]


def _program() -> str:
    """How this command was started, which need not be on the path: `make` does it from the virtual environment."""
    started, found = Path(sys.argv[0]), shutil.which("kakeya")
    is_found = found is not None and Path(found).resolve() == started.resolve()
    return "kakeya" if is_found or started.name != "kakeya" else shlex.quote(str(started))


def _closing(turns: Sequence[Turn]) -> str:
    results = [turn.result for turn in turns if turn.result is not None]
    paid = sum(result.prefilled_tokens for result in results)
    spared = sum(result.cached_tokens for result in results)
    evicted = max(turn.info.evicted_tokens for turn in turns)
    new = sum(len(turn.appended_ids) for turn in turns)
    begun = "Each turn prefilled its new tokens only"
    if paid > new + len(turns):
        begun = "Each turn prefilled its new tokens and recomputed evicted KV entries"
    text = (
        f"{begun}: {paid} in all, and {spared} were read from the session's K/V. "
        f"Sending the whole conversation every turn would have prefilled {paid + spared}."
    )
    if restored := max(result.restored_positions for result in results):
        text += f"\nUp to {restored} positions were read in coded or restored form."
    if evicted:
        text += f"\n{evicted} positions were evicted and can no longer be read."
    return text
