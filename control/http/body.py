"""Reading a request's body: whole and in time. How large it may be is the application's setting (`app.py`)."""

import asyncio

from aiohttp import web

from schedtop.control.http.failures import ApiError

BODY_LIMIT_S = 60.0
"""How long the whole body of a request may take to arrive."""


async def body_of(request: web.Request) -> bytes:
    """The whole body. Raises `ApiError`: 408 if it takes too long to come, 413 if it grows too large."""
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(f"over {request.client_max_size}", request.client_max_size) from None
    except TimeoutError:
        raise ApiError(408, f"the body didn't arrive within {BODY_LIMIT_S:g} s", code="body_too_slow") from None


def too_large(size: int | str, limit: int) -> ApiError:
    """A body of so many bytes isn't taken."""
    return ApiError(413, f"the body has {size} bytes, the limit is {limit}", code="body_too_large")
