"""A request's body, within a size and a time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from inference_engine.server.http.errors import BodyTooLarge, BodyTooSlow, NotJson

MAX_SECONDS = 30.0


async def read_json_body(request: Request, limit_bytes: int) -> bytes:
    """The bytes as they came. Raises NotJson, BodyTooLarge, BodyTooSlow; starlette's ClientDisconnect."""
    # Asked for by name, so that a page in a browser cannot send one here without asking first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NotJson
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise BodyTooLarge(limit_bytes)
    except TimeoutError:
        raise BodyTooSlow(MAX_SECONDS) from None
    return bytes(body)
