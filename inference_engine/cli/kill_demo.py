"""`kakeya demo --kill`: a server is killed in the middle of an answer, started again, and the answer goes on.

    server     ■■■■■■■■■■ SIGKILL      ■■■■■■■■■■■■■■■■■     on one folder, at one address
    answer     "The capital of"   …    " France is Paris."   one stream of one client

The SDK continues the stream behind the last token that it has received. The answer is compared with that of a session
that nothing happened to.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from inference_engine.cli import process
from inference_engine.cli.child import ChildServer, child_server
from inference_engine.cli.text import shown_on
from inference_engine.config import EngineConfig, ModelConfig
from inference_engine.errors import KakeyaError

if TYPE_CHECKING:
    from kakeya import Session

SYSTEM = "You are a helpful assistant. Answer in several sentences."
SCRIPT = ("Hi there!", "Write a short story about a dog.", "Thank you. Goodbye!")
KILLED_TURN = 1
# Tokens of the answer that are shown before its server is killed.
TOKENS_BEFORE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Survived:
    """What became of the answer whose server was killed."""

    tokens: int
    gap_seconds: float
    is_as_undisturbed: bool

    def __str__(self) -> str:
        same = "the same tokens as" if self.is_as_undisturbed else "not the same tokens, by a near-tie, as"
        return (
            f"The server was killed behind {TOKENS_BEFORE} tokens of an answer and started again on the same folder. "
            f"The stream went on {self.gap_seconds:.1f} s later, to {self.tokens} tokens: {same} in a session that "
            "nothing happened to. The history on the server holds each of them once."
        )


class Servers:
    """A server on one folder, at one address: killed, and started again. `stack` ends the last one."""

    def __init__(self, stack: ExitStack, model: ModelConfig, engine: EngineConfig) -> None:
        self._stack = stack
        self._model = model
        self._engine = engine
        self._bind = "127.0.0.1:0"
        self.child = self._started()

    def wait_ready(self) -> str:
        self._bind = self.child.wait_ready()
        return self._bind

    def kill_and_start(self) -> None:
        """Returns when the new one is ready. Raises KakeyaError, with its reason, if it does not start."""
        self.child.kill()
        self.child = self._started()
        self.child.wait_ready()

    def _started(self) -> ChildServer:
        return self._stack.enter_context(child_server(self._model, self._engine, bind=self._bind))


def run(model: ModelConfig, engine: EngineConfig, tokenizer: Any, *, max_tokens: int, console: Console) -> None:
    """Hold the conversation. Raises KakeyaError if anything of it was lost, or changed in fixed-shape mode."""
    from inference_engine.cli.conversation import open_conversation
    from kakeya import Client, Mode

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="kakeya-demo-"))
        with process.progress().status(f"starting a server with {model.model}"):
            # In a stack of their own: the last one ends after the client, whichever was started when.
            servers = Servers(
                stack.enter_context(ExitStack()),
                model,
                replace(engine, journal="", state_dir=folder, share_prefixes="off"),
            )
            target = servers.wait_ready()
        client = stack.enter_context(Client(target))
        conversation = open_conversation(client, tokenizer, strategy=None, system=SYSTEM, label="kakeya demo --kill")
        session = stack.enter_context(conversation.session)
        console.print(
            f"A session with {session.model_id} at {target}: {engine.strategy}, kept in {folder}, "
            f"durability {session.durability.value}.\n",
            markup=False,
            soft_wrap=True,
        )
        survived: Survived | None = None
        for number, message in enumerate(SCRIPT):
            console.print(f"> {message}", style="bold", markup=False)
            killing = _Killing(servers, session, console, after=TOKENS_BEFORE if number == KILLED_TURN else None)
            began_at = session.history_length
            turn = conversation.say(message, max_tokens=max_tokens, show=killing.show)
            console.out("\n")
            if turn.result is None:
                raise KeyboardInterrupt
            if number == KILLED_TURN:
                if not killing.gap_seconds:
                    raise KakeyaError(
                        f"the answer has {len(turn.generated_ids)} tokens, too few to kill a server in it"
                    )
                history = [token_id for piece in session.history() for token_id in piece.token_ids]
                prompt = history[: began_at + len(turn.appended_ids)]
                if history[began_at:] != [*turn.appended_ids, *turn.generated_ids]:
                    raise KakeyaError("the history is not what was appended and received")
                with client.create_session(session.strategy) as other:
                    other.append(prompt)
                    undisturbed = other.generate(max_tokens).result().token_ids
                survived = Survived(
                    tokens=len(turn.generated_ids),
                    gap_seconds=killing.gap_seconds,
                    is_as_undisturbed=undisturbed == turn.generated_ids,
                )
                if session.mode is Mode.FIXED_SHAPE and not survived.is_as_undisturbed:
                    raise KakeyaError("the answer differs from that of a session that nothing happened to")
    assert survived is not None
    console.print(str(survived), markup=False, soft_wrap=True)


class _Killing:
    """Shows an answer, and kills its server when `after` tokens of it have come."""

    def __init__(self, servers: Servers, session: Session, console: Console, *, after: int | None) -> None:
        self._servers = servers
        self._session = session
        self._console = console
        self._show = shown_on(console)
        self._after = after
        self._tokens = 0
        self._killed_at = 0.0
        self.gap_seconds = 0.0  # from the kill to the next token

    def show(self, piece: str) -> None:
        """Of each token, the text that it completes."""
        if self._killed_at and not self.gap_seconds:
            self.gap_seconds = time.perf_counter() - self._killed_at
        self._show(piece)
        self._tokens += 1
        # Only in the middle of a Generate: what a finished one has sent needs no server.
        if self._tokens == self._after and self._session.info().is_generating:
            killed, self._killed_at = self._servers.child.pid, time.perf_counter()
            self._servers.kill_and_start()
            note = f" [process {killed} killed by SIGKILL, process {self._servers.child.pid} started] "
            self._console.print(note, style="dim", markup=False, end="", soft_wrap=True)
