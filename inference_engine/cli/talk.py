"""What is typed into `kakeya chat`: messages, and commands about the conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.filesize import decimal

import kakeya
from inference_engine.cli.conversation import Conversation, Turn
from inference_engine.config import in_full
from inference_engine.errors import ConfigError, KakeyaError, counted

COMMANDS = {
    "/info": "shows the session",
    "/back": "drops the last turn",
    "/retry": "answers it again",
    "/fork N": "goes on behind turn N in another session (no N: behind the last)",
    "/strategy SPEC": "goes on in another session with this strategy",
    "/system TEXT": "begins another session with this system message",
    "/save FILE": "writes the conversation to a new file",
    "/load FILE": "goes on with one that was saved, in another session",
    "/switch": "goes to the next session",
    "/help": "shows this",
    "/quit": "ends the chat, as Ctrl-D does",
}


class Talk:
    """Conversations, one of them the current, and what is said in it.

    begin: opens one, given its strategy as text and its system message, either None. answer: as `Conversation.say`,
    or `retry` where the message is None. hold: keeps a fork until the chat ends.
    """

    def __init__(
        self,
        first: Conversation,
        begin: Callable[[str | None, str | None], Conversation],
        answer: Callable[[Conversation, str | None], Turn],
        hold: Callable[[Conversation], Conversation],
        console: Console,
        *,
        is_interactive: bool,
    ) -> None:
        self.conversations = [first]
        self.current = first
        self._begin = begin
        self._answer = answer
        self._hold = hold
        self._console = console
        self._is_interactive = is_interactive

    def take(self, message: str) -> bool:
        """False ends the chat. At a terminal what went wrong is said, and the conversation goes on."""
        try:
            return self._take(message)
        except (kakeya.NoCapacity, kakeya.QuotaExceeded) as error:
            if not message.startswith(("/fork", "/strategy", "/system", "/load")) and not self._is_interactive:
                raise
            self._say(f"no room: {error}")
        except (KakeyaError, kakeya.KakeyaError, OSError) as error:
            if not self._is_interactive:
                raise
            self._say(str(error))
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._say("stopped; /info shows where the session is")
        return True

    def _take(self, message: str) -> bool:
        match message.split(maxsplit=1) if "\n" not in message else [message]:
            case []:
                pass
            case ["/quit"]:
                return False
            case ["/help"]:
                width = max(map(len, COMMANDS))
                self._say("\n".join(f"{name:<{width}}  {said}" for name, said in COMMANDS.items()))
                self._say('Ctrl-C stops an answer. """ begins a message of several lines, and """ ends it.')
            case ["/info"]:
                self._say(self._facts())
            case ["/back" | "/retry"] if not self.current.turns:
                self._say("there is no turn to go back to")
            case ["/back"]:
                dropped = self.current.back()
                self._say(f"{counted(dropped, 'token')} dropped · history {self.current.session.history_length}")
            case ["/retry"]:
                self._turn(None)
            case ["/fork"]:
                self._fork(self.current.turns)
            case ["/fork", number] if number.strip().isdecimal():
                self._fork(int(number))
            case ["/strategy"]:
                self._say(str(self.current.session.info().strategy))
            case ["/strategy", spec] if len(spec.split()) == 1:
                self._go_on(self._copied(self.current, spec.strip()))
            case ["/system", text]:
                self._go_on(self._begin(None, text))
            case ["/save", name] if len(name.split()) == 1 or self._is_interactive:
                self._save(name.strip())
            case ["/load", name] if len(name.split()) == 1 or self._is_interactive:
                self._load(name.strip())
            case ["/switch"]:
                index = (self.conversations.index(self.current) + 1) % len(self.conversations)
                self.current = self.conversations[index]
                self._say(self._place())
            case [word, *_] if self._is_interactive and word.startswith("/") and "/" not in word[1:]:
                self._say(f"unknown command {word}; /help lists them")
            case _:
                self._turn(message)
        return True

    def _turn(self, message: str | None) -> None:
        if self._answer(self.current, message).result is None and not self._is_interactive:
            raise KeyboardInterrupt

    def _fork(self, turns: int) -> None:
        if turns > self.current.turns:
            self._say(f"there is no turn {turns}: this session has {counted(self.current.turns, 'turn')}")
            return
        self._go_on(self._hold(self.current.fork(turns)))

    def _go_on(self, conversation: Conversation) -> None:
        self.conversations.append(conversation)
        self.current = conversation
        self._say(self._place())

    def _copied(self, of: Conversation, strategy: str) -> Conversation:
        copy = self._begin(strategy, of.system)
        copy.take_over(of.saved())
        return copy

    def _save(self, name: str) -> None:
        saved = {"model": self.current.session.model_id, **self.current.saved()}
        path = in_full(name)
        with path.open("x", encoding="utf-8") as file:  # what is there is not written over
            json.dump(saved, file)
        self._say(f"saved {counted(len(saved['token_ids']), 'token')} to {path}")

    def _load(self, name: str) -> None:
        path = in_full(name)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            model, strategy, system = (saved[name] for name in ("model", "strategy", "system"))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no conversation that /save wrote: {error}") from error
        if model != self.current.session.model_id:
            raise ConfigError(f"{path} is of {model}, and this server has {self.current.session.model_id}")
        loaded = self._begin(strategy, system)
        loaded.take_over(saved)
        self._go_on(loaded)

    def _place(self) -> str:
        number, length = self.conversations.index(self.current) + 1, self.current.session.history_length
        turns = counted(self.current.turns, "turn")
        return f"session {number} of {len(self.conversations)} · {turns} · history {length}"

    def _facts(self) -> str:
        session = self.current.session
        info = session.info()
        limit = "no limit" if info.limit_tokens is None else f"at most {info.limit_tokens}"
        return "\n".join(
            (
                f"session   {session.id[:8]}… on {session.model_id}, {info.strategy}, {session.mode.value}",
                f"history   {counted(info.history_length, 'token')} ({limit}); {info.evicted_tokens} evicted",
                f"K/V       {decimal(info.kv_live_bytes)} held, at most {decimal(info.peak_bytes)}",
            )
        )

    def _say(self, text: Any) -> None:
        self._console.print(text, style="dim", markup=False, soft_wrap=True)
