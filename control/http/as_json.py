"""JSON responses, the same everywhere."""

import msgspec
from aiohttp import web

_encoder = msgspec.json.Encoder()


def json_response(value: object, status: int = 200) -> web.Response:
    """Any message or plain structure as JSON."""
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")
