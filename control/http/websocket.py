"""`/control/v1/ws`: the control socket's own frames over a WebSocket, one per binary message.

Each WebSocket gets a connection to the engine of its own, so the server's rules for slow and impolite clients hold.
Two things are rewritten: the greeting asks for a read-only session where the token lacks the scope `control`, and each
command goes in the name of the token's holder, whatever it claims, after the checks that hold for every other way in.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from schedtop.control.errors import BadFrame, Disconnected, NotAllowed
from schedtop.control.framing import (
    MAX_HELLO_BYTES,
    MAX_PUBLISHED_BYTES,
    MAX_REQUEST_BYTES,
    FrameReader,
    add_header,
    decode_from_client,
    encode,
)
from schedtop.control.http.auth import Caller, Scope, check_command
from schedtop.control.http.failures import ApiError
from schedtop.control.http.keys import CALLER
from schedtop.control.http.service import Service
from schedtop.control.messages import ErrorReply, Hello

MAX_SESSIONS = 64
"""WebSockets open at once."""
HEARTBEAT_S = 20.0
WRITE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 0.5
"""How long a client may take to answer that we are closing."""
MAX_CLIENT_NAME = 64
_OVER_HTTP = " (http)"
"""Follows the name of every client that comes this way."""


class WebSocketRelay:
    """Handler of the route. `on_count` is told the number of open sessions."""

    def __init__(self, service: Service, on_count: Callable[[int], None] = lambda count: None) -> None:
        self._service = service
        self._sockets: set[web.WebSocketResponse] = set()
        self._on_count = on_count

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Relay until either side ends."""
        if len(self._sockets) >= MAX_SESSIONS:
            raise ApiError(429, f"{MAX_SESSIONS} WebSockets are open already", code="too_many", retry_after_s=10)
        try:
            reader, writer = await asyncio.open_unix_connection(target := self._service.link.target)
        except OSError as error:
            raise Disconnected(f"no engine answers at {target}: {error}") from None
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
        is_greeted = asyncio.Event()
        await _first_to_end(
            self._to_engine(socket, writer, caller, is_greeted), _to_client(reader, socket, is_greeted.set)
        )
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the engine closed the connection")

    async def _greeting(self, socket: web.WebSocketResponse, caller: Caller) -> Hello:
        message: WSMessage = await socket.receive()
        if message.type is not WSMsgType.BINARY or len(message.data) > MAX_HELLO_BYTES:
            raise BadFrame("the first message must be a Hello, in binary")
        hello = decode_from_client(message.data)
        if not isinstance(hello, Hello):
            raise BadFrame("the first message must be a Hello")
        if hello.client:
            hello.client = hello.client[: MAX_CLIENT_NAME - len(_OVER_HTTP)] + _OVER_HTTP
        hello.read_only = hello.read_only or not caller.may(Scope.CONTROL)
        return hello

    async def _to_engine(
        self, socket: web.WebSocketResponse, writer: asyncio.StreamWriter, caller: Caller, is_greeted: asyncio.Event
    ) -> None:
        await is_greeted.wait()  # nothing that is said here may overtake the engine's greeting
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                return
            checked = self._checked(message.data, caller)
            if isinstance(checked, ErrorReply):
                await socket.send_bytes(encode(checked))
                continue
            writer.write(add_header(checked))
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    def _checked(self, body: bytes, caller: Caller) -> bytes | ErrorReply:
        """A client's frame as the engine is to see it, or what it is told instead."""
        try:
            message = decode_from_client(body)
        except BadFrame as error:
            # a frame without a number the engine can't read either: it says so and ends the session
            return body if error.reply_id is None else self._refusal(error.reply_id, error.code, str(error))
        if isinstance(message, Hello):
            return body
        try:
            check_command(caller, message.command)
        except ApiError as error:
            self._service.note_refusal(caller.name, type(message.command).__name__, error.message)
            return self._refusal(message.id, NotAllowed.code, error.message)
        message.on_behalf_of = caller.name
        return encode(message)

    def _refusal(self, number: int, code: str, message: str) -> ErrorReply:
        latest = self._service.link.latest
        return ErrorReply(
            id=number, code=code, message=message, step=latest.snapshot.step if latest else -1,
            mono=time.monotonic(), wall=time.time(),
        )  # fmt: skip


async def _first_to_end(*directions: Awaitable[None]) -> None:
    """Run both directions until one of them ends, then end the other."""
    tasks = [asyncio.ensure_future(direction) for direction in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _to_client(reader: asyncio.StreamReader, socket: web.WebSocketResponse, on_sent: Callable[[], None]) -> None:
    frames = FrameReader(MAX_PUBLISHED_BYTES)
    while data := await reader.read(1 << 18):
        frames.feed(data)
        for body in frames.frames():
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await socket.send_bytes(body)
            on_sent()
