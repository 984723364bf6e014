"""The one client of the control protocol: over a unix socket, or over a gateway's WebSocket with the same frames.

It sends commands and sorts what comes back: replies to whoever asked, everything else into `messages()`. It knows no
engine, no screen and no retry policy: when the connection is gone, it says why and is done.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from schedtop.control.coalesce import TokenBuffer
from schedtop.control.discovery import check_path_length, is_url
from schedtop.control.errors import BadFrame, CommandRefused, Disconnected, NoReply, SocketRefused
from schedtop.control.framing import (
    MAX_PUBLISHED_BYTES,
    FrameReader,
    add_header,
    decode_from_server,
    encode,
)
from schedtop.control.messages import (
    Ack,
    AnyCommand,
    Envelope,
    ErrorReply,
    EventBatch,
    FromServer,
    Goodbye,
    Hello,
    KnobsAck,
    SnapshotReply,
    SnapshotUpdate,
    TokenBatch,
    Welcome,
)

__all__ = ["Client", "CommandRefused", "Disconnected", "Message", "NoReply"]

NUM_STEPS_HELD = 4096
"""Step records kept in a snapshot that nobody has taken yet."""
NUM_EVENTS_HELD = 65_536
"""Events kept that nobody has taken yet; older ones count as dropped."""

CLOSE_LIMIT_S = 1.0
"""How long a server may take to read what was sent last."""

Message = SnapshotUpdate | EventBatch | TokenBatch | Goodbye


class FrameStream(Protocol):
    """Whole messages over some connection. Each method raises `Disconnected` when it is gone."""

    async def send(self, body: bytes) -> None:
        """Send one encoded message."""
        ...

    async def receive(self) -> bytes:
        """The next encoded message."""
        ...

    async def close(self) -> None:
        """Close; idempotent."""
        ...


class Client:
    """A connection after the greeting. Make one with `connect`; use it as an async context manager."""

    def __init__(self, stream: FrameStream, welcome: Welcome) -> None:
        self.welcome = welcome
        self._stream = stream
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Ack | KnobsAck | SnapshotReply]] = {}
        self._inbox = _Inbox()
        self._gone: str | None = None
        """Why the connection ended; None while it is up."""
        self._reader = asyncio.create_task(self._read(), name="control-client")

    @classmethod
    async def connect(cls, target: str, *, name: str, read_only: bool = False, timeout_s: float = 5.0) -> Self:
        """Connect to a socket path or an http(s) URL and introduce this client as `name`.

        Raises `Disconnected` when nobody answers and `CommandRefused` when the server won't have us.
        """
        try:
            async with asyncio.timeout(timeout_s):
                stream = await _open_stream(target)
                try:
                    welcome = await _greet(stream, Hello(client=name, read_only=read_only))
                except BaseException:
                    await stream.close()
                    raise
        except TimeoutError:
            raise Disconnected(f"{target} didn't answer within {timeout_s:g} s") from None
        return cls(stream, welcome)

    async def request(
        self, command: AnyCommand, timeout_s: float | None = 30, *, on_behalf_of: str = ""
    ) -> Ack | KnobsAck | SnapshotReply:
        """Send a command and wait for its reply. `on_behalf_of` goes into the audit log beside this client's name.

        Raises `CommandRefused`, `Disconnected`, or `NoReply` after `timeout_s`.
        """
        if self._gone is not None:
            raise Disconnected(self._gone)
        number = next(self._ids)
        reply: asyncio.Future[Ack | KnobsAck | SnapshotReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.send(_encode(Envelope(id=number, command=command, on_behalf_of=on_behalf_of)))
                return await reply
        except TimeoutError:
            raise NoReply(
                f"no reply to {type(command).__name__} within {timeout_s:g} s; it may still take effect"
            ) from None
        finally:
            del self._waiting[number]
            if reply.done() and not reply.cancelled():
                reply.exception()  # mark it as seen, should sending have failed first

    async def messages(self) -> AsyncIterator[Message]:
        """What the server publishes to this connection, until it ends (a `Goodbye` comes last, made up if need be).

        A slow consumer gets the newest snapshot, with the step records of those it missed, and joined tokens.
        """
        while True:
            message = await self._inbox.take()
            yield message
            if isinstance(message, Goodbye):
                return

    async def close(self) -> None:
        """Close the connection; idempotent."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._end("closed by this client")
        await self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self) -> None:
        try:
            while self._gone is None:
                self._take(decode_from_server(await self._stream.receive()))
        except (Disconnected, BadFrame) as error:
            self._end(str(error))

    def _take(self, message: FromServer) -> None:
        match message:
            case Ack() | KnobsAck() | SnapshotReply():
                if (reply := self._waiting.get(message.id)) and not reply.done():
                    reply.set_result(message)
            case ErrorReply():
                self._refuse(message)
            case Goodbye():
                self._end(message.reason)
            case SnapshotUpdate() | EventBatch() | TokenBatch():
                self._inbox.put(message)
            case Welcome():
                self.welcome = message

    def _refuse(self, message: ErrorReply) -> None:
        if message.id is None:
            self._end(message.message)
        elif (reply := self._waiting.get(message.id)) and not reply.done():
            reply.set_exception(CommandRefused(message.code, message.message))

    def _end(self, reason: str) -> None:
        if self._gone is not None:
            return
        self._gone = reason
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(Disconnected(reason))
        self._inbox.put(Goodbye(reason=reason))


class _Inbox:
    """What was published and not taken yet: joined tokens, joined events, one snapshot, the end."""

    def __init__(self) -> None:
        self._tokens = TokenBuffer()
        self._events: EventBatch | None = None
        self._snapshot: SnapshotUpdate | None = None
        self._goodbye: Goodbye | None = None
        self._filled = asyncio.Event()

    def put(self, message: Message) -> None:
        match message:
            case TokenBatch():
                self._tokens.add(message.step, message.outputs)
            case EventBatch():
                self._events = _join_events(self._events, message) if self._events else message
            case SnapshotUpdate():
                if self._snapshot is not None:
                    message.steps = (self._snapshot.steps + message.steps)[-NUM_STEPS_HELD:]
                    if self._snapshot.peaks is not None:
                        message.peaks = self._snapshot.peaks.joined(message.peaks)
                self._snapshot = message
            case Goodbye():
                self._goodbye = message
        self._filled.set()

    async def take(self) -> Message:
        await self._filled.wait()
        if self._tokens:
            return self._tokens.take()
        if (events := self._events) is not None:
            self._events = None
            return events
        if (snapshot := self._snapshot) is not None:
            self._snapshot = None
            return snapshot
        if self._goodbye is not None:
            return self._goodbye
        self._filled.clear()
        return await self.take()


def _encode(envelope: Envelope) -> bytes:
    """Encode; raises `CommandRefused` for a number that no message can carry."""
    try:
        return encode(envelope)
    except OverflowError:
        limits = f"{-(1 << 63)} to {(1 << 64) - 1}, which is what a message can carry"
        number = next(_too_large(msgspec.to_builtins(envelope.command)))
        raise CommandRefused(
            "bad_command", f"{type(envelope.command).__name__}: {number} is outside {limits}"
        ) from None


def _too_large(value: Any) -> Iterator[int]:
    """The whole numbers in a command that don't fit 64 bits."""
    match value:
        case dict():
            yield from (number for inner in value.values() for number in _too_large(inner))
        case list():
            yield from (number for inner in value for number in _too_large(inner))
        case int() if not -(1 << 63) <= value < 1 << 64:
            yield value


def _join_events(first: EventBatch, second: EventBatch) -> EventBatch:
    events = first.events + second.events
    num_cut = max(0, len(events) - NUM_EVENTS_HELD)
    return EventBatch(events=events[num_cut:], dropped=first.dropped + second.dropped + num_cut)


async def _open_stream(target: str) -> FrameStream:
    if is_url(target):
        from schedtop.control.client_ws import open_websocket  # aiohttp only for those who need it

        return await open_websocket(target)
    try:
        check_path_length(Path(target))
        reader, writer = await asyncio.open_unix_connection(target)
    except SocketRefused as error:
        raise Disconnected(str(error)) from None
    except (OSError, ValueError) as error:
        raise Disconnected(f"no engine answers on {target}: {error}; is it running?") from None
    return _UnixStream(reader, writer)


async def _greet(stream: FrameStream, hello: Hello) -> Welcome:
    await stream.send(encode(hello))
    match answer := decode_from_server(await stream.receive()):
        case Welcome():
            return answer
        case ErrorReply():
            raise CommandRefused(answer.code, answer.message)
        case Goodbye():
            raise Disconnected(answer.reason)
        case _:
            raise Disconnected(f"the server answered the greeting with {type(answer).__name__}")


class _UnixStream:
    """`FrameStream` over a unix socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader(MAX_PUBLISHED_BYTES)
        self._whole: list[bytes] = []

    async def send(self, body: bytes) -> None:
        try:
            self._writer.write(add_header(body))
            await self._writer.drain()
        except OSError as error:
            raise Disconnected(f"the connection broke: {error}") from None

    async def receive(self) -> bytes:
        while not self._whole:
            try:
                data = await self._reader.read(1 << 18)
            except OSError as error:
                raise Disconnected(f"the connection broke: {error}") from None
            if not data:
                raise Disconnected("the server closed the connection without a goodbye: it was killed, or it crashed")
            self._frames.feed(data)
            self._whole = list(self._frames.frames())[::-1]
        return self._whole.pop()

    async def close(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self._writer.wait_closed()
        except TimeoutError:  # the server doesn't read what was sent last
            self._writer.transport.abort()
        except OSError:
            pass
