"""What every answer of the HTTP shim says about itself: deprecated since its first day, and until when it stays.

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
This HTTP interface is deprecated and frozen. It is here so that clients of chat completions can move at their own pace.

Each request opens a session, renders and computes its whole conversation again, answers, and closes the session.
The sessions that make this runtime what it is (a history that stays between calls, a known memory bound, each call
paying for its new tokens only) are reached over gRPC, through the Python and TypeScript SDKs.

It takes no new features. It may be removed from {SUNSET:%d %B %Y} on.
"""
