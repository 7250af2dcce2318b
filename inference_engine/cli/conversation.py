"""A chat over one session: text in, text out, token ids in between; and the cost of each turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from inference_engine.cli.text import TextStream
from inference_engine.errors import ModelError
from inference_engine.models import tokenizer_folder
from inference_engine.server.http.turn_ends import template_of
from kakeya import (
    Client,
    GenerateResult,
    ServerInfo,
    Session,
    SessionInfo,
    Strategy,
    TemplateError,
    TokenizerError,
    tokenization,
)
from kakeya._served_tokenizer import require_served

APPEND_TOKENS = 4096  # in one call
SAID = "Hello"  # what each chat template of a model that chats renders


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One exchange. Seconds are the client's; `result` is None if the user interrupted the answer."""

    appended_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    first_token_seconds: float
    total_seconds: float
    result: GenerateResult | None
    info: SessionInfo

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: without the first token, which waits for the prefill."""
        seconds = self.total_seconds - self.first_token_seconds
        return (len(self.generated_ids) - 1) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Said:
    """An exchange in the history: where it begins, where its answer does, and the answer's ids."""

    begins: int
    answer_begins: int
    answer: tuple[int, ...]


class Conversation:
    """Renders each message once and appends it; the history is neither sent nor computed again.

    session: the current one: `back` and `retry` put another in its place, which has less of the history. Leaving its
    `with` closes it.
    """

    def __init__(self, session: Session, tokenizer: Any, *, system: str | None = None) -> None:
        self.session = session
        self._tokenizer = tokenizer
        self.system = system
        self._said: list[_Said] = []
        self._failed_at: int | None = None  # where a turn began that had no answer

    @classmethod
    def resumed(cls, session: Session, tokenizer: Any) -> Self:
        """Go on with a session that has a history, whose turns show by how their tokens came."""
        conversation = cls(session, tokenizer)
        ids: list[int] = []
        runs: list[tuple[bool, int]] = []  # whether generated, and where it ends
        for piece in session.history():
            for index, length in enumerate(piece.run_lengths):
                ends = length + (runs[-1][1] if runs else 0)
                if length and runs and runs[-1][0] == bool(index % 2):
                    runs[-1] = (runs[-1][0], ends)
                elif length:
                    runs.append((bool(index % 2), ends))
            ids += piece.token_ids
        begins = 0
        for (was_generated, answer_begins), (is_generated, ends) in pairwise(runs):
            if is_generated:
                conversation._said.append(_Said(begins, answer_begins, tuple(ids[answer_begins:ends])))
            elif was_generated:
                begins = answer_begins
        return conversation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.session.__exit__(*raised)

    @property
    def turns(self) -> int:
        """How many there are to go back."""
        return len(self._said)

    def back(self) -> int:
        """Drop the last turn. Returns how many tokens the history lost."""
        return self._rewind(self._said.pop().begins)

    def retry(self, *, max_tokens: int, show: Callable[[str], None], **sampling: Any) -> Turn:
        """As `say`: answer the last message again, without the last answer."""
        last = self._said.pop()
        self._rewind(last.answer_begins)
        return self._answer(last.begins, (), max_tokens=max_tokens, show=show, **sampling)

    def fork(self, turns: int) -> Conversation:
        """Another conversation, which begins with the first `turns` of this one; this one stays as it is."""
        at = self._said[turns].begins if turns < self.turns else None
        forked = Conversation(self.session.fork(at_position=at), self._tokenizer, system=self.system)
        forked._said = self._said[:turns]
        return forked

    def saved(self) -> dict[str, Any]:
        """What another session needs to go on from here, in values of JSON."""
        return {
            "strategy": str(self.session.info().strategy),
            "system": self.system,
            "token_ids": [token_id for piece in self.session.history() for token_id in piece.token_ids],
            "turns": [[one.begins, one.answer_begins, one.answer_begins + len(one.answer)] for one in self._said],
        }

    def take_over(self, saved: Mapping[str, Any]) -> None:
        """Append what `saved` has to this session, which is new. Its K/V is computed with the next answer."""
        ids: list[int] = saved["token_ids"]
        for first in range(0, len(ids), APPEND_TOKENS):
            self.session.append(ids[first : first + APPEND_TOKENS])
        self._said = [_Said(begins, answered, tuple(ids[answered:ends])) for begins, answered, ends in saved["turns"]]

    def _rewind(self, position: int) -> int:
        before = self.session.history_length
        self.session = self.session.rewind(position)
        return before - position

    def say(self, message: str, *, max_tokens: int, show: Callable[[str], None], **sampling: Any) -> Turn:
        """Send a message and `show` the answer piece by piece. An interrupt (Ctrl-C) ends the answer, not the chat."""
        if self._failed_at is not None and self.session.info().history_length > self._failed_at:
            self._rewind(self._failed_at)
        return self.answer(tuple(self.render(message)), max_tokens=max_tokens, show=show, **sampling)

    def answer(self, ids: tuple[int, ...], *, max_tokens: int, show: Callable[[str], None], **sampling: Any) -> Turn:
        """As `say`, of a message that is rendered."""
        return self._answer(self.session.history_length, ids, max_tokens=max_tokens, show=show, **sampling)

    def _answer(
        self, begins: int, ids: tuple[int, ...], *, max_tokens: int, show: Callable[[str], None], **sampling: Any
    ) -> Turn:
        """begins: where the turn does, of which `ids` are not appended yet."""
        began = time.perf_counter()
        self._failed_at = begins
        if ids:
            self.session.append(ids)
        answer_begins = self.session.history_length
        stream = self.session.generate(max_tokens, **sampling)
        text = TextStream(self._tokenizer)
        first_token_at: float | None = None
        result = None
        try:
            for token_id in stream:
                first_token_at = first_token_at or time.perf_counter()
                show(text.push(token_id))
            result = stream.result()
        except KeyboardInterrupt:
            stream.cancel()
        ended = time.perf_counter()
        show(text.end())
        self._said.append(_Said(begins, answer_begins, stream.token_ids))
        self._failed_at = None
        return Turn(
            appended_ids=ids,
            generated_ids=stream.token_ids,
            first_token_seconds=(first_token_at or ended) - began,
            total_seconds=ended - began,
            result=result,
            info=self.session.info(),
        )

    def render(self, message: str) -> list[int]:
        """The ids of a message, and with the first one of what stands before it."""
        if self._tokenizer.chat_template is None:
            ids: list[int] = self._tokenizer.encode(message, add_special_tokens=self.session.history_length == 0)
            return ids
        messages = [{"role": "user", "content": message}]
        if self._said:
            return tokenization.tokens_for_next_turn(messages, self._tokenizer, after=self._said[-1].answer)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return tokenization.tokens_for_chat([*system, *messages], self._tokenizer)


def open_conversation(
    client: Client, tokenizer: Any, *, strategy: str | None, system: str | None = None, label: str = ""
) -> Conversation:
    """A chat on a new session. `strategy` as on the command line; None: the server's default."""
    session = client.create_session(
        None if strategy is None else sdk_strategy(strategy),
        label=label,
    )
    return Conversation(session, tokenizer, system=system)


def load_chat_tokenizer(folder: Path, *, name: str, may_continue: bool = False) -> Any:
    """The tokenizer in a folder. name: of the model, for messages.

    Raises ModelError if it has no chat template; not with `may_continue`: then the model goes on with what is said.
    """
    tokenizer: Any = tokenization.load_tokenizer(folder)
    if not may_continue and template_of(getattr(tokenizer, "chat_template", None), name) is None:
        raise ModelError(f"{name} has no chat template, so it cannot chat; choose an instruct model")
    return tokenizer


def served_chat_tokenizer(served: ServerInfo | None, name: str | None, cache: Path, *, option: str) -> Any:
    """The tokenizer of the model that a server has, from this machine; one of a GGUF file is made.

    name: of the model or its folder, which `option` gave; None for the server's own name. served: None where the server
    does not say, so that nothing is checked. Raises ModelError if it is not here or cannot chat, TokenizerError for
    another model's.
    """
    name = name or (served.model_id if served else "")
    try:
        folder = tokenizer_folder(name, cache)
        tokenizer = load_chat_tokenizer(folder, name=name)
    except ModelError as error:
        of = f"{served.model_id}, the server's model," if served else "the server's model"
        raise ModelError(
            f"a chat needs the tokenizer of {of} here: {option} names a folder with it ({error})"
        ) from error
    if served is not None:
        require_served(tokenizer, served, folder)
    return tokenizer


def why_no_chat(folder: Path, *, name: str) -> str:
    """What keeps a model with the tokenizer in a folder from chats; "" if nothing does."""
    try:
        tokenization.tokens_for_chat([{"role": "user", "content": SAID}], load_chat_tokenizer(folder, name=name))
    except (ModelError, TokenizerError) as error:
        return str(error)
    except TemplateError as error:
        return f"{name}: {error}"
    return ""


def sdk_strategy(text: str) -> Strategy:
    """`sink_window:window=1024` as the SDK's value, by name where the SDK has no class for it. Raises ConfigError."""
    import kakeya
    from inference_engine.kv.strategies import parse_strategy  # imports torch, which a client does without

    spec = parse_strategy(text)
    kind = getattr(kakeya, type(spec).__name__, None)
    if not (isinstance(kind, type) and issubclass(kind, kakeya.Strategy)):
        texts: dict[str, Any] = spec.option_texts()
        return kakeya.Named(spec.name, **texts)
    strategy: Strategy = kind(**spec.options())
    return strategy
