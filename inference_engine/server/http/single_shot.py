"""One request, one session: opened, appended to, generated from, and always closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from inference_engine.engine import Engine
from inference_engine.engine.results import EngineInfo
from inference_engine.errors import InvalidArgument, NoCapacity, SessionEvicted, SessionNotFound
from inference_engine.server.http.chat_request import ChatRequest
from inference_engine.server.http.chat_text import ChatText
from inference_engine.server.http.error_replies import ContextLengthExceeded
from inference_engine.server.http.template import PromptTooLong
from inference_engine.server.stream import EventQueue
from inference_engine.session.history import TokenIds
from inference_engine.types import GenerateParams

_IDS_AT_ONCE = 16_384  # of a prompt; between two pieces the event loop runs other tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A request that is ready to run.

    limit_tokens: what its session reserves; None: a session without a length limit. end_ids: end a turn of the model.
    """

    asked: ChatRequest
    token_ids: TokenIds
    params: GenerateParams
    limit_tokens: int | None
    end_ids: frozenset[int]


def prepare(asked: ChatRequest, chat: ChatText, info: EngineInfo, *, process: int = 0) -> Prompt:
    """Render, encode and check a request, in that process of `chat`. Blocks.

    Raises InvalidArgument or ContextLengthExceeded, and what `ChatTemplate.encode` does.
    """
    most = info.config.max_generate_tokens
    if asked.max_tokens is not None and asked.max_tokens > most:
        raise InvalidArgument(
            asked.max_tokens_name,
            f"must be at most {most} on this server (max_generate_tokens), got {asked.max_tokens}",
        )
    try:
        token_ids = chat.prompt_ids(
            asked.messages,
            None if info.limit_tokens is None else info.limit_tokens - 1,
            allow_special_tokens=asked.allow_special_tokens,
            process=process,
        )
    except PromptTooLong as error:
        assert info.limit_tokens is not None
        raise ContextLengthExceeded(error.at_least, info.limit_tokens) from None
    room = most if info.limit_tokens is None else info.limit_tokens - len(token_ids)
    max_tokens = min(most, room) if asked.max_tokens is None else asked.max_tokens
    # A stop string that is a special token never appears as text.
    stop_ids = [token_id for stop in asked.stops if (token_id := chat.token_id(stop)) is not None]
    params = GenerateParams(
        max_tokens=max_tokens,
        sampling=asked.sampling,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=asked.logprobs,
    )
    # The session needs no more memory than its only Generate can use.
    return Prompt(
        asked=asked,
        token_ids=token_ids,
        params=params,
        limit_tokens=len(token_ids) + min(max_tokens, room),
        end_ids=frozenset((*chat.end_ids, *info.end_ids)),
    )


@contextlib.asynccontextmanager
async def single_shot(engine: Engine, prompt: Prompt, *, owner: str) -> AsyncIterator[EventQueue]:
    """A session that answers `prompt`, and the events of its Generate.

    Leaving closes the session; a running Generate ends at its next step. Raises what the engine does.
    """
    try:
        opened = engine.create_session(
            is_transient=True,
            eos_token_ids=sorted(prompt.end_ids),
            limit_tokens=prompt.limit_tokens,
            owner=owner,
            # An explicit max_tokens is guaranteed in full, or refused before the answer begins.
            guaranteed=None if prompt.asked.max_tokens is None else True,
        )
    except NoCapacity as error:
        if error.retry_after_seconds is not None:
            raise
        raise InvalidArgument(
            prompt.asked.max_tokens_name,
            f"messages of {len(prompt.token_ids)} tokens and an answer of at most {prompt.params.max_tokens} need more "
            f"memory than this server has; ask for fewer tokens ({error.message})",
        ) from None
    try:
        for piece in _pieces(prompt.token_ids, min(_IDS_AT_ONCE, engine.config.max_append_tokens)):
            engine.append(opened.session_id, piece, owner=owner)
            await asyncio.sleep(0)
        events = EventQueue(asyncio.get_running_loop())
        engine.generate(opened.session_id, prompt.params, listener=events.push, owner=owner, refuse_late=True)
        yield events
    finally:
        # It may have been evicted already.
        with contextlib.suppress(SessionNotFound, SessionEvicted):
            engine.close_session(opened.session_id, owner=owner)


def _pieces(token_ids: TokenIds, most: int) -> Iterator[TokenIds]:
    return (token_ids[start : start + most] for start in range(0, len(token_ids), most))
