"""`/control/v1/ws`: the control socket's own frames over a WebSocket, one per binary message.

Each WebSocket gets a connection to the engine of its own, so the server's rules for slow and impolite clients hold.
Only the greeting is rewritten: it names the token's holder, and without the scope `control` it asks for a read-only
session.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from schedtop.control.errors import BadFrame, Disconnected
from schedtop.control.framing import (
    MAX_HELLO_BYTES,
    MAX_PUBLISHED_BYTES,
    MAX_REQUEST_BYTES,
    FrameReader,
    add_header,
    decode_from_client,
    encode,
)
from schedtop.control.http.auth import Caller, Scope
from schedtop.control.http.failures import ApiError
from schedtop.control.http.keys import CALLER
from schedtop.control.messages import Hello

MAX_SESSIONS = 64
"""WebSockets open at once."""
HEARTBEAT_S = 20.0
WRITE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 0.5
"""How long a client may take to answer that we are closing."""
MAX_CLIENT_NAME = 64


class WebSocketRelay:
    """Handler of the route. `on_count` is told the number of open sessions."""

    def __init__(self, target: str, on_count: Callable[[int], None] = lambda count: None) -> None:
        self._target = target
        self._sockets: set[web.WebSocketResponse] = set()
        self._on_count = on_count

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay until either side ends."""
        if len(self._sockets) >= MAX_SESSIONS:
            raise ApiError(429, f"{MAX_SESSIONS} WebSockets are open already", code="too_many", retry_after_s=10)
        try:
            reader, writer = await asyncio.open_unix_connection(self._target)
        except OSError as error:
            raise Disconnected(f"no engine answers at {self._target}: {error}") from None
        socket = web.WebSocketResponse(
            timeout=CLOSE_TIMEOUT_S, max_msg_size=MAX_REQUEST_BYTES, heartbeat=HEARTBEAT_S, compress=False
        )
        try:
            await socket.prepare(request)
            self._sockets.add(socket)
            self._on_count(len(self._sockets))
            await self._relay(socket, reader, writer, request[CALLER])
        finally:
            self._sockets.discard(socket)
            self._on_count(len(self._sockets))
            writer.close()
        return socket

    async def close(self) -> None:
        """End all sessions, all at once: none waits for another's client."""
        goodbye = b"the gateway is shutting down"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_TIMEOUT_S), asyncio.TaskGroup() as group:
                for socket in self._sockets:
                    group.create_task(socket.close(code=WSCloseCode.GOING_AWAY, message=goodbye))

    async def _relay(
        self, socket: web.WebSocketResponse, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: Caller
    ) -> None:
        try:
            hello = await self._greeting(socket, caller)
        except BadFrame as error:
            await socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=str(error).encode()[:123])
            return
        writer.write(add_header(encode(hello)))
        await _first_to_end(_to_engine(socket, writer), _to_client(reader, socket))
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the engine closed the connection")

    async def _greeting(self, socket: web.WebSocketResponse, caller: Caller) -> Hello:
        message: WSMessage = await socket.receive()
        if message.type is not WSMsgType.BINARY or len(message.data) > MAX_HELLO_BYTES:
            raise BadFrame("the first message must be a Hello, in binary")
        hello = decode_from_client(message.data)
        if not isinstance(hello, Hello):
            raise BadFrame("the first message must be a Hello")
        hello.client = f"{hello.client} ({caller.name}, http)"[-MAX_CLIENT_NAME:]
        hello.read_only = hello.read_only or not caller.may(Scope.CONTROL)
        return hello


async def _first_to_end(*directions: Awaitable[None]) -> None:
    """Run both directions until one of them ends, then end the other."""
    tasks = [asyncio.ensure_future(direction) for direction in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _to_engine(socket: web.WebSocketResponse, writer: asyncio.StreamWriter) -> None:
    async for message in socket:
        if message.type is not WSMsgType.BINARY:
            return
        writer.write(add_header(message.data))
        with contextlib.suppress(ConnectionError):
            await writer.drain()


async def _to_client(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    frames = FrameReader(MAX_PUBLISHED_BYTES)
    while data := await reader.read(1 << 18):
        frames.feed(data)
        for body in frames.frames():
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await socket.send_bytes(body)
