"""Calls with a request id and their answers, for as long as the server says that it remembers them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from kakeya.v1 import runtime_pb2 as pb

REMEMBERED_GENERATES = 8  # of each session; with one more, the first is forgotten
REMEMBERED_SECONDS = 600.0  # at least, even if the session ends at once


@dataclass(kw_only=True, frozen=True)
class Made:
    """A call with a request id, and its answer."""

    request: Any
    answer: Any
    made_at: float


class Answers:
    """Those that were given."""

    def __init__(self) -> None:
        self._made: list[Made] = []
        self._generates: defaultdict[str, list[bytes]] = defaultdict(list)  # session -> ids of its Generates
        self._ids = 0

    def new_id(self) -> bytes:
        """A request id."""
        self._ids += 1
        return self._ids.to_bytes(16, "big")

    def began(self, request: pb.GenerateRequest) -> None:
        """A Generate will be asked for: whether it is answered or not, earlier ones of its session may be forgotten."""
        if request.request_id:
            self._generates[request.session_id].append(request.request_id)

    def remember(self, request: Any, answer: Any, now: float) -> None:
        """Keep the answer, if the call has an id."""
        if request.request_id:
            self._made.append(Made(request=request, answer=answer, made_at=now))

    def remembered(self, now: float) -> list[Made]:
        """The calls whose answers the server has not forgotten, as it says when it forgets."""
        return [
            made
            for made in self._made
            if now - made.made_at < REMEMBERED_SECONDS
            and (
                not isinstance(made.request, pb.GenerateRequest)
                or made.request.request_id in self._generates[made.request.session_id][-REMEMBERED_GENERATES:]
            )
        ]
