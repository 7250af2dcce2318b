"""The part of a session shared by the blocking and the asyncio client."""

from __future__ import annotations

import enum
from typing import Any, Literal

from kakeya._append import Tail
from kakeya._errors import SessionClosed
from kakeya._strategies import Strategy, from_wire
from kakeya._values import DURABILITIES, MODES, Durability, HistoryPiece, Mode
from kakeya.v1 import runtime_pb2 as pb

# Long enough for 32k tokens at ten a second; a server that stops answering is noticed by keepalive long before.
GENERATE_SECONDS = 3600.0
CALL_SECONDS = 30.0


class Default(enum.Enum):
    """Stands for the client's own timeout, since None means no limit."""

    DEFAULT = "the client's own"


DEFAULT: Literal[Default.DEFAULT] = Default.DEFAULT
Timeout = float | None | Literal[Default.DEFAULT]


class SessionBase:
    """A session's fixed facts, and its history length as last received."""

    def __init__(
        self,
        created: pb.CreateSessionResponse,
        *,
        route: str,
        history_length: int = 0,
        shared_bytes: int = 0,
        prefill_tokens: int | None = None,
    ) -> None:
        self._created = created
        self._route = route
        self._shared_bytes = shared_bytes
        self._prefill_tokens = prefill_tokens
        self._tail = Tail(length=history_length)
        self._is_closed = False

    @property
    def id(self) -> str:
        """Opaque. It, and the key if there is one, give access to the session."""
        return self._created.session_id

    @property
    def history_length(self) -> int:
        """Tokens appended and generated, as far as this object knows; `info()` asks the server."""
        return self._tail.length

    @property
    def strategy(self) -> Strategy | None:
        """The strategy in force, with every default filled in; None if it is of a kind newer than this SDK."""
        return from_wire(self._created.strategy)

    @property
    def sustained_bytes(self) -> int:
        """K/V the session holds at most between Generates."""
        return self._created.sustained_bytes

    @property
    def reserved_bytes(self) -> int:
        """Of `sustained_bytes`, those reserved when it was opened; `info()` has the current number."""
        return self._created.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """K/V the session holds at most ever, a running Generate included."""
        return self._created.peak_bytes

    @property
    def tier_bytes(self) -> int:
        """K/V the session holds at most off the device, in the server's memory."""
        return self._created.tier_bytes

    @property
    def shared_bytes(self) -> int:
        """Of a fork: bytes of K/V shared with the parent session, when it was made."""
        return self._shared_bytes

    @property
    def prefill_tokens(self) -> int | None:
        """Of a fork or a rewound session: how many tokens its first Generate prefills at most, if nothing is appended
        before: fewer where a copy in a file has K/V of some, or another session is prefilled first that begins so.

        None: it is neither, or the server is older.
        """
        return self._prefill_tokens

    @property
    def limit_tokens(self) -> int | None:
        """The longest history the session can reach; None if there is no limit."""
        return self._created.limit_tokens if self._created.HasField("limit_tokens") else None

    @property
    def mode(self) -> Mode:
        """What equal histories promise."""
        return MODES.get(self._created.mode, Mode.UNKNOWN)

    @property
    def model_id(self) -> str:
        return self._created.model_id

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def durability(self) -> Durability:
        """What the session's history survives."""
        return DURABILITIES.get(self._created.durability, Durability.UNKNOWN)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<{type(self).__name__} {self.id[:8]}… {state}, {self.history_length} tokens>"

    def _require_open(self) -> None:
        if self._is_closed:
            raise SessionClosed(
                f"this session was closed with {self.history_length} tokens in its history; create a new one"
            )

    @staticmethod
    def _of_fork(forked: pb.ForkSessionResponse | pb.RewindSessionResponse) -> dict[str, Any]:
        """The facts of a fork as those of any new session, and its own."""
        created = pb.CreateSessionResponse(
            session_id=forked.session_id,
            strategy=forked.strategy,
            sustained_bytes=forked.sustained_bytes,
            peak_bytes=forked.peak_bytes,
            limit_tokens=forked.limit_tokens if forked.HasField("limit_tokens") else None,
            mode=forked.mode,
            model_id=forked.model_id,
            tier_bytes=forked.tier_bytes,
            reserved_bytes=forked.reserved_bytes,
            durability=forked.durability,
        )
        return {
            "created": created,
            "history_length": forked.history_length,
            "shared_bytes": forked.shared_bytes,
            "prefill_tokens": forked.prefill_token_count if forked.HasField("prefill_token_count") else None,
        }

    def _saw_piece(self, piece: HistoryPiece, request: pb.ReadHistoryRequest) -> bool:
        """Move `request` behind `piece`. False at the history's end."""
        self._tail.saw(piece.history_length)
        request.first_position = piece.first_position + len(piece.token_ids)
        return bool(piece.token_ids) and request.first_position < piece.history_length

    def _closed(self, final_length: int | None) -> int:
        self._is_closed = True
        if final_length is not None:
            self._tail.settle(final_length)
        return self._tail.length
