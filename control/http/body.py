"""Reading a request's body: whole and in time. How large it may be is the application's setting (`app.py`)."""

import asyncio

from aiohttp import web

from schedtop.control.http.failures import ApiError

BODY_LIMIT_S = 60.0
"""How long the whole body of a request may take to arrive."""


async def body_of(request: web.Request) -> bytes:
    """The whole body. Raises `ApiError` 408 if it takes too long to come."""
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body didn't arrive within {BODY_LIMIT_S:g} s", code="body_too_slow") from None
