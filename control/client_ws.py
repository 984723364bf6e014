"""The client's connection through a gateway: the socket's frames, one per binary WebSocket message.

The only place outside `control.http` that knows aiohttp; imported when a URL is given, never by an engine.
"""

import aiohttp

from schedtop.control.discovery import TOKEN_VARIABLE, find_token, socket_folder, token_files
from schedtop.control.errors import Disconnected
from schedtop.control.framing import MAX_PUBLISHED_BYTES

WS_ROUTE = "/control/v1/ws"


async def open_websocket(url: str) -> "WebSocketStream":
    """Connect to the gateway at `url` (http or https, with or without the route). Raises `Disconnected`."""
    address = url.rstrip("/")
    if not address.endswith(WS_ROUTE):
        address += WS_ROUTE
    token = find_token(url)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    session = aiohttp.ClientSession()
    try:
        socket = await session.ws_connect(address, headers=headers, max_msg_size=MAX_PUBLISHED_BYTES, heartbeat=20.0)
    except BaseException as error:
        is_plain = isinstance(error, aiohttp.WSServerHandshakeError) and await _is_plain_server(session, url)
        await session.close()
        if is_plain:
            raise Disconnected(
                f"{url} is a vLLM or SGLang server without schedtop: `schedtop --connect {url}` shows its /metrics, "
                "read-only; start vLLM with --scheduler-cls schedtop.control.vllm.plugin.SchedtopScheduler to steer it"
            ) from None
        if isinstance(error, aiohttp.WSServerHandshakeError):
            raise Disconnected(_explain(error, url, has_token=token is not None)) from None
        if isinstance(error, aiohttp.ClientError | OSError | ValueError):
            raise Disconnected(f"no gateway answers at {url}: {error}; is it running?") from None
        raise
    return WebSocketStream(session, socket)


async def _is_plain_server(session: aiohttp.ClientSession, url: str) -> bool:
    from schedtop.control.vllm.scrape import fetch, is_plain_server

    try:
        return is_plain_server(await fetch(session, url.removesuffix(WS_ROUTE)))
    except Disconnected:
        return False


def _explain(error: aiohttp.WSServerHandshakeError, url: str, has_token: bool) -> str:
    if error.status == 401 and not has_token and len(files := token_files(url)) > 1:
        listed = "\n".join(f"  {TOKEN_VARIABLE}=$(cat {path})" for path in files)
        return f"{url} wants the token of its engine, and there are {len(files)} of them here; give one:\n{listed}"
    if error.status in (401, 403):
        have = "the token given isn't accepted" if has_token else "it wants a token"
        where = f"set {TOKEN_VARIABLE}; local tokens are {socket_folder()}/*.token"
        return f"the gateway refused ({error.status}): {have}; {where}"
    return f"the gateway answered {error.status} to {WS_ROUTE}: it isn't a schedtop gateway, or an older one"


class WebSocketStream:
    """`FrameStream` over a WebSocket."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._session = session
        self._socket = socket

    async def send(self, body: bytes) -> None:
        """Send one encoded message as a binary message."""
        try:
            await self._socket.send_bytes(body)
        except (aiohttp.ClientError, OSError) as error:
            raise Disconnected(f"the connection broke: {error}") from None

    async def receive(self) -> bytes:
        """The next binary message."""
        message = await self._socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        reason = f": {message.extra}" if message.type is aiohttp.WSMsgType.CLOSE and message.extra else ""
        raise Disconnected(f"the gateway closed the connection{reason}")

    async def close(self) -> None:
        """Close the WebSocket and its session."""
        await self._socket.close()
        await self._session.close()
