"""`kakeya chat`: chat with a model in the terminal, or through a pipe, and see the cost of each turn.

The command renders and decodes text, with the tokenizer in the model's folder; the server sees token ids.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal

from inference_engine.cli import auto_calibration as first_use
from inference_engine.cli import process
from inference_engine.cli.answers import add_max_tokens, refuse_longer
from inference_engine.cli.child import child_server
from inference_engine.cli.connection import OWN_SERVER, add_connection, connect
from inference_engine.cli.settings import (
    CONVERSATION,
    HELP,
    add_config_file,
    add_settings,
    refuse_without_effect,
    settings,
)
from inference_engine.cli.text import shown_on
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import ConfigError, counted
from inference_engine.types import Sampling

if TYPE_CHECKING:
    from inference_engine.cli.conversation import Conversation, Turn

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

HINT = "/help lists the commands; /quit or Ctrl-D ends the chat, Ctrl-C stops an answer"
SEVERAL_LINES = '"""'
PROMPT, MORE = "> ", ". "
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")


def add_parser(subparsers: Subparsers) -> None:
    one = subparsers.add_parser(
        "run",
        usage="%(prog)s [OPTION ...] NAME|PATH",
        help="fetch a model if it is not here, start it, and chat",
        description="Fetch a model if it is not here, start a server with it, and chat as `kakeya chat` does. A model "
        "without a chat template goes on with what is typed.",
    )
    one.add_argument("model", metavar="NAME|PATH", help=HELP["model"][1])
    add_config_file(one)
    add_settings(one, ModelConfig, only=[field.name for field in fields(ModelConfig) if field.name != "model"])
    add_settings(one, EngineConfig, only=CONVERSATION)
    _add_answers(one)
    one.set_defaults(run=run_model, session=None, **OWN_SERVER)

    parser = subparsers.add_parser(
        "chat",
        usage="%(prog)s [OPTION ...]",
        help="chat with a model in the terminal",
        description="Chat with a model. /help lists the commands. Reads messages from standard input, one a line, if "
        "it is a pipe; there every line but those commands is a message, such as /etc/hosts. A second answer differs "
        "from the first if it is sampled without a seed.",
    )
    add_config_file(parser)
    add_connection(parser)
    add_settings(parser, ModelConfig)
    add_settings(parser, EngineConfig, only=CONVERSATION)
    _add_answers(parser).add_argument(
        "--session",
        metavar="ID",
        help="with --target: go on with this session of yours, or with a new one (new), and close none at the end",
    )
    parser.set_defaults(run=run)


def _add_answers(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    answer = parser.add_argument_group("answers")
    answer.add_argument("--system", metavar="TEXT", help="a system message for the start")
    add_max_tokens(answer, 512)
    answer.add_argument("--temperature", type=float, metavar="T", help="0: greedy decoding (default)")
    answer.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    answer.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    answer.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1: repeat less")
    answer.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="P", help="above 0: an answer repeats no token easily"
    )
    answer.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="F", help="the same, more for each time it comes"
    )
    answer.add_argument("--seed", type=int, metavar="N", help="equal seeds sample equal tokens")
    return answer


def run_model(args: argparse.Namespace) -> int:
    """Raises ModelError if it cannot be fetched or served, and as `run`."""
    from inference_engine.cli.models import fetched

    config = settings(args, ModelConfig)
    process.say(fetched(config, Console(stderr=True)))
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Chat until /quit or the end of standard input. Raises the SDK's errors and those of starting a server."""
    console = Console(highlight=False)
    refuse_without_effect(args, used=("model", "cache_dir", "strategy"))
    # Refused here, not with the first message: a model is loaded before that.
    Sampling(**{name: value for name, value in _sampling(args).items() if value is not None})
    if not args.target:
        engine = settings(args, EngineConfig)
        refuse_longer(args.max_tokens, engine.max_generate_tokens)
        first_use.before_start(settings(args, ModelConfig), engine)
    if args.session and not args.target:
        raise ConfigError("--session: without effect, because the server that chat starts ends with it; add --target")

    def answer(conversation: Conversation, message: str | None) -> Turn:
        return _answer(conversation, message, args, console)

    with ExitStack() as stack:

        def hold(conversation: Conversation) -> Conversation:
            return conversation if args.session else stack.enter_context(conversation)

        with process.progress().status("getting ready"):
            from inference_engine.cli.talk import Talk

            begin, resume = _open(args, stack, hold)
            conversation = resume() if args.session not in (None, "new") else begin(args.strategy, args.system)
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            console.print(HINT, style="dim")
        talk = Talk(conversation, begin, answer, hold, console, is_interactive=is_interactive)
        for message in _messages(is_interactive, console):
            if not talk.take(message):
                break
        for kept in talk.conversations if args.session else ():
            console.print(f"kept: --session {kept.session.id}", style="dim", markup=False, soft_wrap=True)
    return 0


def _open(
    args: argparse.Namespace, stack: ExitStack, hold: Callable[[Conversation], Conversation]
) -> tuple[Callable[[str | None, str | None], Conversation], Callable[[], Conversation]]:
    """Find or start the server. Returns what begins a conversation there, and what goes on with --session."""
    from inference_engine.cli.conversation import Conversation, open_conversation, served_chat_tokenizer

    model, engine = settings(args, ModelConfig), settings(args, EngineConfig)
    if args.target:
        client = stack.enter_context(connect(args, args.target))
        served = client.server_info()
        refuse_longer(args.max_tokens, served.max_generate_tokens)
        tokenizer = served_chat_tokenizer(served, args.model, model.cache_path, option="--model")
    else:
        child = stack.enter_context(child_server(model, engine))
        # The tokenizer loads while the server loads its model.
        tokenizer = _tokenizer(model.model, model, may_continue=args.run is run_model)
        client = stack.enter_context(connect(args, child.wait_ready()))

    def begin(strategy: str | None, system: str | None) -> Conversation:
        one = open_conversation(client, tokenizer, strategy=strategy, system=system, label="kakeya chat")
        return hold(one)

    def resume() -> Conversation:
        return Conversation.resumed(client.session(args.session), tokenizer)

    return begin, resume


def _tokenizer(name_or_path: str, model: ModelConfig, *, may_continue: bool = False) -> Any:
    from inference_engine.cli.conversation import load_chat_tokenizer
    from inference_engine.models import tokenizer_folder

    folder = tokenizer_folder(name_or_path, model.cache_path)
    return load_chat_tokenizer(folder, name=name_or_path, may_continue=may_continue)


def _messages(is_interactive: bool, console: Console) -> Iterator[str]:
    if not is_interactive:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    with contextlib.suppress(EOFError):
        while True:
            try:
                message = _typed()
            except KeyboardInterrupt:  # what was typed goes, and nothing else
                console.print(f"\n{HINT}", style="dim")
                continue
            yield message


def _typed() -> str:
    """A message, of several lines between two of SEVERAL_LINES."""
    text = input(PROMPT)
    if not text.startswith(SEVERAL_LINES):
        return text
    text = text.removeprefix(SEVERAL_LINES)
    while not text.rstrip().endswith(SEVERAL_LINES):
        text += "\n" + input(MORE)
    return text.rstrip().removesuffix(SEVERAL_LINES).strip("\n")


def _answer(conversation: Conversation, message: str | None, args: argparse.Namespace, console: Console) -> Turn:
    """message: None: the last one, again."""
    options: dict[str, Any] = {"max_tokens": args.max_tokens, "show": shown_on(console), **_sampling(args)}
    turn = conversation.retry(**options) if message is None else conversation.say(message, **options)
    console.out()
    console.print(cost(turn), style="dim", markup=False, soft_wrap=True)
    return turn


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """As it was typed; None: not at all."""
    return {name: getattr(args, name) for name in SAMPLING}


def cost(turn: Turn) -> str:
    """The cost of a turn, in one line."""
    ending = "stopped" if turn.result is None else turn.result.stop_reason.value
    return " · ".join(
        (
            f"{turn.total_seconds:.2f} s",
            f"first token {turn.first_token_seconds:.2f} s",
            f"{counted(len(turn.appended_ids), 'token')} in, {len(turn.generated_ids)} out ({ending})",
            f"history {turn.info.history_length}",
            f"{decimal(turn.info.kv_live_bytes)} held",
            f"{turn.info.evicted_tokens} evicted",
        )
    )
