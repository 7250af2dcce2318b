"""The deprecation headers and page of the HTTP shim: since when it is deprecated, and when it may be removed.

Source: RFC 9745 (Deprecation), RFC 8594 (Sunset), RFC 8288 (Link).
"""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime

DEPRECATED_SINCE = datetime(2026, 11, 21, tzinfo=UTC)
SUNSET = datetime(2027, 12, 1, tzinfo=UTC)
PAGE = "/deprecation"

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"deprecation", f"@{int(DEPRECATED_SINCE.timestamp())}".encode()),
    (b"sunset", format_datetime(SUNSET, usegmt=True).encode()),
    (b"link", f'<{PAGE}>; rel="deprecation"; type="text/plain", <{PAGE}>; rel="sunset"; type="text/plain"'.encode()),
)

PAGE_TEXT = f"""\
This HTTP interface is deprecated and frozen. It lets clients of chat completions migrate at their own pace.

Each request opens a session, renders and prefills its whole conversation again, answers, and closes the session.
Persistent sessions (a history that stays between calls, a known memory bound, prefill of new tokens only) are available
over gRPC, through the Python and TypeScript SDKs.

It gets no new features. It may be removed from {SUNSET:%d %B %Y} on.
"""
