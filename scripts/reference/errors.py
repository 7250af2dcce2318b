"""The page of errors: each reason with its gRPC status, whose turn it is, and the SDK's type for it."""

from __future__ import annotations

from collections.abc import Iterator

import kakeya
from inference_engine.server.status import CODES, DOMAIN
from kakeya._status import _BY_REASON
from scripts.reference.markdown import code, one_line, page, table

INTRODUCTION = f"""
    Every error of ours carries `google.rpc.ErrorInfo` with the domain `{DOMAIN}`, the reason, and numbers as metadata;
    RetryInfo where waiting helps; BadRequest where a field is at fault. Errors of the transport itself (a message too
    large, bytes that are no message) carry none. Both SDKs have the same types.
"""

TURNS = {
    kakeya.CallerError: "the caller's: change the call",
    kakeya.RetryableError: "wait, try again",
    kakeya.QuotaExceeded: "wait where RetryInfo is sent, else close sessions",
    kakeya.ServerError: "ours: report it to the operator",
    kakeya.DeadlineExceeded: "the caller's: more time, or fewer tokens",
}


def render() -> str:
    return page(
        "Errors",
        "inference_engine/server/status.py and the SDK's errors",
        INTRODUCTION,
        table(("reason", "gRPC status", "whose turn", "in the SDKs", "says"), _rows()),
    )


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Those of one turn beside each other, in the order of the table of statuses."""
    for base, turn in TURNS.items():
        for reason, status in CODES.items():
            kind = _BY_REASON[reason]
            # The nearest of its turns: a quota's errors can be tried again, too, but not all of them by waiting.
            if next(one for one in kind.__mro__ if one in TURNS) is base:
                yield code(reason), code(status.name), turn, code(kind.__name__), one_line(kind.__doc__ or "")
