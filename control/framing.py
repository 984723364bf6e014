"""Frames of the control socket: 4-byte big-endian length, then one msgpack message. Sans-I/O: bytes in, bytes out.

Length and nesting are checked before anything is decoded, and decoding is typed only. No sockets, no session rules
(`session.py`) and no engine in here.
"""

import re
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from schedtop.control.errors import BadFrame, FrameTooLong
from schedtop.control.messages import FromClient, FromServer

MAX_HELLO_BYTES = 64 << 10
"""Longest frame taken from a client that hasn't introduced itself."""
MAX_COMMAND_BYTES = 1 << 20
"""Longest frame taken from a client, unless it submits a request."""
MAX_REQUEST_BYTES = 16 << 20
"""Longest `AddRequest` frame: about five million prompt tokens."""
MAX_PUBLISHED_BYTES = 64 << 20
"""Longest frame a client takes from the server."""
MAX_DEPTH = 8
"""Deepest nesting of maps and arrays in what a client sends; the schema needs five."""

_HEADER = struct.Struct(">I")
_BULK = 256
"""Arrays longer than this are first tried as plain numbers, at the speed of the regular expression engine."""
_NUMBER = rb"(?:[\x00-\x7f\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1]..|[\xce\xd2\xca].{4}|[\xcf\xd3\xcb].{8})"

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromServer)


class _Head(msgspec.Struct):
    """The part of an envelope that says whom to answer and how long it may be; all else is skipped, not decoded."""

    id: int | None = None
    command: msgspec.Raw = msgspec.Raw()


class _Tag(msgspec.Struct):
    type: str = ""


_head = msgspec.msgpack.Decoder(_Head)
_tag = msgspec.msgpack.Decoder(_Tag)


def encode(message: msgspec.Struct) -> bytes:
    """One message without its length: what a WebSocket carries."""
    return _encoder.encode(message)


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message with its length in front."""
    buffer = bytearray(_HEADER.size)
    _encoder.encode_into(message, buffer, _HEADER.size)
    _HEADER.pack_into(buffer, 0, len(buffer) - _HEADER.size)
    return bytes(buffer)


def add_header(body: bytes) -> bytes:
    """An encoded message as a frame."""
    return _HEADER.pack(len(body)) + body


def decode_from_server(body: bytes) -> FromServer:
    """Raises `BadFrame`."""
    try:
        message: FromServer = _from_server.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadFrame(f"the server sent what this client can't read ({error}); are both of one version?") from None
    return message


def decode_from_client(body: bytes) -> FromClient:
    """One frame's message, its length and nesting checked before. Raises `BadFrame` with the envelope's number."""
    check_depth(body)
    reply_id, tag = _peek(body)
    if len(body) > MAX_COMMAND_BYTES and tag != "AddRequest":
        raise BadFrame(
            f"the frame has {len(body)} bytes, the limit is {MAX_COMMAND_BYTES} "
            f"({MAX_REQUEST_BYTES} for AddRequest); split the command",
            reply_id,
        )
    try:
        message: FromClient = _from_client.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadFrame(f"{tag or 'the frame'} can't be read: {error}", reply_id) from None
    return message


def _peek(body: bytes) -> tuple[int | None, str]:
    """The envelope's number and the command's name, where they can be read."""
    try:
        head = _head.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None, ""
    try:
        return head.id, _tag.decode(head.command).type
    except (msgspec.MsgspecError, RecursionError):
        return head.id, ""


class FrameReader:
    """Cuts a byte stream into frames. `max_bytes` may be changed between frames."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take what came from the peer."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """The next whole frame, without its length; None if there is none yet.

        Raises `FrameTooLong` as soon as one is announced.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > self.max_bytes:
            raise FrameTooLong(f"a frame of {length} bytes was announced, the limit is {self.max_bytes}")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return frame

    def frames(self) -> Iterator[bytes]:
        """All whole frames that are there."""
        return iter(self.next_frame, None)

    @property
    def num_buffered(self) -> int:
        """Bytes of a frame that isn't whole yet."""
        return len(self._buffer)


# ---- nesting ----------------------------------------------------------------------------------------------------


def _layouts() -> list[tuple[int, int, int]]:
    """Per first byte of a msgpack item: (bytes of its length field, fixed bytes that follow, items per length unit).

    Items per length unit: 0 = the length counts bytes, 1 = an array, 2 = a map; -1 = not msgpack.
    """
    table = [(0, 0, 0)] * 256
    for byte in range(0x80, 0xA0):
        table[byte] = (0, byte & 0x0F, 2 if byte < 0x90 else 1)
    for byte in range(0xA0, 0xC0):
        table[byte] = (0, byte & 0x1F, 0)
    table[0xC1] = (0, 0, -1)
    sized = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    table_of = {
        **{byte: (width, 0, 0) for byte, width in sized.items()},
        **{byte: (width, 1, 0) for byte, width in {0xC7: 1, 0xC8: 2, 0xC9: 4}.items()},
        **{byte: (width, 0, 1) for byte, width in {0xDC: 2, 0xDD: 4}.items()},
        **{byte: (width, 0, 2) for byte, width in {0xDE: 2, 0xDF: 4}.items()},
        **{0xCA + offset: (0, width, 0) for offset, width in enumerate((4, 8, 1, 2, 4, 8, 1, 2, 4, 8))},
        **{0xD4 + offset: (0, 1 + (1 << offset), 0) for offset in range(5)},
    }
    for byte, layout in table_of.items():
        table[byte] = layout
    return table


_LAYOUTS = _layouts()


def check_depth(body: bytes, limit: int = MAX_DEPTH) -> None:
    """Raise `BadFrame` if `body` nests deeper than `limit`, ends early, or isn't one msgpack item. Builds nothing."""
    position, open_items = 0, [1]
    while open_items:
        if not open_items[-1]:
            open_items.pop()
            continue
        open_items[-1] -= 1
        position, num_items = _skip_item(body, position)
        if num_items >= 0:
            if len(open_items) > limit:
                raise BadFrame(f"the frame nests deeper than {limit} maps and arrays")
            open_items.append(num_items)
    if position != len(body):
        raise BadFrame(f"{len(body) - position} bytes follow the message in its frame")


def _skip_item(body: bytes, position: int) -> tuple[int, int]:
    """Go past one item's head (and its bytes): the new position and the items inside; -1 = it isn't a container."""
    try:
        width, fixed, per_unit = _LAYOUTS[body[position]]
    except IndexError:
        raise BadFrame("the frame ends inside its message") from None
    if per_unit < 0:
        raise BadFrame(f"byte {position} of the frame isn't msgpack")
    start = position + 1 + width
    length = int.from_bytes(body[position + 1 : start], "big") + fixed
    if start > len(body) or length > len(body) - start:
        raise BadFrame("the frame ends inside its message")
    if per_unit == 0:
        return start + length, -1
    if per_unit == 1 and length > _BULK and (end := _skip_numbers(body, start, length)):
        return end, 0
    return start, length * per_unit


def _skip_numbers(body: bytes, start: int, count: int) -> int | None:
    """Where `count` numbers in a row end; None if they aren't all numbers. Prompts are long arrays of them."""
    match = re.compile(b"%s{%d}+" % (_NUMBER, count), re.DOTALL).match(body, start)
    return match.end() if match else None
