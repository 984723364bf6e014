"""Server-sent events: encoding, and writing to clients that may be slow or gone. Knows nothing of what it carries."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

WRITE_TIMEOUT_S = 60.0
"""How long a client may leave one write waiting before it is cut."""
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(data: Any, name: str = "", number: int | None = None) -> bytes:
    """One event. JSON has no raw line breaks, so one `data:` line is enough."""
    head = (f"id: {number}\n" if number is not None else "") + (f"event: {name}\n" if name else "")
    return head.encode() + b"data: " + _encoder.encode(data) + b"\n\n"


class EventStream:
    """An open response of events. `send` raises `ConnectionError` when the client is gone or too slow."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response

    @classmethod
    async def open(cls, request: web.Request) -> "EventStream":
        """Send status 200 and the headers."""
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        return cls(response)

    async def send(self, data: bytes) -> None:
        """Write encoded events; waits while the client's buffers are full, but not for ever."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write(data)
        except TimeoutError:
            raise ConnectionError(f"the client didn't read for {WRITE_TIMEOUT_S:g} s") from None

    async def end(self) -> web.StreamResponse:
        """Finish the response."""
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self._response.write_eof()
        return self._response
