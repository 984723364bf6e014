"""Recordings of an engine: what a watcher was told, in an append-only file that a crash can't spoil.

    file  = MAGIC, chunk...
    chunk = length u32, CRC-32 u32, wall time f64, step i64 (of its first entry), then one zstd frame
            that holds a msgpack array of `Recorded`

A chunk counts when it is whole and its sum is right; reading ends quietly before the first that isn't. Recording
again to the same file drops such a torn end and appends. No engine and no screen in here.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec
import zstandard

from schedtop.control.messages import EventBatch, Goodbye, SnapshotUpdate, Welcome
from schedtop.engine.errors import SchedtopError
from schedtop.engine.snapshot import StepRecord

MAGIC = b"schedtop recording 1\n"
MAX_CHUNK_BYTES = 64 << 20
"""Largest chunk, packed or unpacked, that is read: a broken length must not ask for all memory."""
CHUNK_BYTES = 1 << 20
"""A chunk is closed when it holds so many unpacked bytes, or when `flush` is called."""

_HEAD = struct.Struct("<IIdq")
RecordedMessage = Welcome | SnapshotUpdate | EventBatch | Goodbye


class Recorded(msgspec.Struct, kw_only=True):
    """One message and when it arrived: `time.time()` and `time.monotonic()` of the recorder, in seconds."""

    wall: float
    mono: float
    message: RecordedMessage


class BadRecording(SchedtopError):
    """A file that isn't a recording, or one that can't be written."""

    code = "bad_recording"


class ChunkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a chunk lies and where it begins in time: what a reader seeks by."""

    offset: int
    """Of the chunk's head, in bytes from the file's start."""
    wall: float
    step: int
    """The newest step known when it begins."""


class RecordingWriter:
    """Appends messages to a recording. A context manager; what was flushed survives a kill."""

    def __init__(self, path: Path) -> None:
        """Make the file (0600) or go on with one. Raises `BadRecording`."""
        self.path = path
        self._encoder = msgspec.msgpack.Encoder()
        self._packer = zstandard.ZstdCompressor(level=3)
        self._entries: list[bytes] = []
        self._num_bytes = 0
        self._wall = 0.0
        self._step = -1
        self._file = _open_for_append(path)

    def add(self, entry: Recorded) -> None:
        """Keep a message; it is in the file after the next `flush`."""
        if not self._entries:
            self._wall = entry.wall
        if isinstance(entry.message, SnapshotUpdate):
            self._step = max(self._step, entry.message.snapshot.step)
        encoded = self._encoder.encode(entry)
        self._entries.append(encoded)
        self._num_bytes += len(encoded)
        if self._num_bytes >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added as one chunk and hand it to the disk."""
        if not self._entries:
            return
        raw = self._encoder.encode([msgspec.Raw(entry) for entry in self._entries])
        packed = self._packer.compress(raw)
        head = _HEAD.pack(len(packed), zlib.crc32(packed), self._wall, self._step)
        try:
            self._file.write(head + packed)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise BadRecording(f"{self.path} can't be written: {error.strerror}; the recording ends there") from None
        self._entries, self._num_bytes = [], 0

    def close(self) -> None:
        """Flush and close; idempotent."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_for_append(path: Path) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadRecording(f"{path} can't be opened: {error.strerror}") from None
    file = os.fdopen(descriptor, "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the file's last descriptor, however its owner ends
    except OSError:
        file.close()
        raise BadRecording(f"{path} is being written by another recorder: end that, or name another file") from None
    if not file.read(1):
        file.write(MAGIC)
        file.flush()
        return file
    try:
        end = Recording(path).end
    except BadRecording:
        file.close()
        raise
    file.truncate(end)  # a torn chunk of an earlier recorder that was killed
    file.seek(end)
    return file


def is_recording(path: Path) -> bool:
    """Whether there is a file that begins as recordings do."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class Recording:
    """Reads a recording, which may still be growing."""

    def __init__(self, path: Path) -> None:
        """Look through the chunks' heads; nothing is unpacked. Raises `BadRecording` for another kind of file."""
        self.path = path
        self.chunks: list[ChunkInfo] = []
        self.is_torn = False
        """There is something after the last whole chunk."""
        self.end = len(MAGIC)
        """Bytes up to the end of the last whole chunk."""
        self._decoder = msgspec.msgpack.Decoder(list[Recorded])
        self._unpacker = zstandard.ZstdDecompressor()
        self.refresh()

    def refresh(self) -> int:
        """Take in chunks that were appended since; returns how many."""
        num_before = len(self.chunks)
        with _open_for_reading(self.path) as file:
            file.seek(self.end)
            while (chunk := _read_chunk(file)) is not None:
                head, _ = chunk
                self.chunks.append(ChunkInfo(offset=self.end, wall=head[2], step=head[3]))
                self.end = file.tell()
            file.seek(0, os.SEEK_END)
            self.is_torn = file.tell() > self.end
        return len(self.chunks) - num_before

    def read(self, first_chunk: int = 0, num_chunks: int | None = None) -> Iterator[Recorded]:
        """All messages from a chunk on, in order; of `num_chunks` chunks only, if given."""
        with _open_for_reading(self.path) as file:
            for info in self.chunks[first_chunk:][:num_chunks]:
                file.seek(info.offset)
                chunk = _read_chunk(file)
                if chunk is None:
                    raise BadRecording(f"{self.path} was changed while it was read")
                yield from self._unpack(chunk[1], info)

    def steps(self) -> Iterator[StepRecord]:
        """All step records, each once, in order."""
        for entry in self.read():
            if isinstance(entry.message, SnapshotUpdate):
                yield from entry.message.steps

    def _unpack(self, packed: bytes, info: ChunkInfo) -> list[Recorded]:
        try:
            if zstandard.frame_content_size(packed) > MAX_CHUNK_BYTES:
                raise BadRecording(
                    f"{self.path}: the chunk at byte {info.offset} unpacks to over {MAX_CHUNK_BYTES} bytes"
                )
            return self._decoder.decode(self._unpacker.decompress(packed, max_output_size=MAX_CHUNK_BYTES))
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise BadRecording(f"{self.path}: the chunk at byte {info.offset} can't be read: {error}") from None


def _open_for_reading(path: Path) -> BinaryIO:
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadRecording(f"{path} can't be read: {error.strerror}") from None
    if file.read(len(MAGIC)) != MAGIC:
        file.close()
        raise BadRecording(f"{path} isn't a recording of schedtop, or one of another version")
    return file


def _read_chunk(file: BinaryIO) -> tuple[tuple[int, int, float, int], bytes] | None:
    """The chunk at the file's position; None if there is no whole one."""
    raw = file.read(_HEAD.size)
    if len(raw) < _HEAD.size:
        return None
    head: tuple[int, int, float, int] = _HEAD.unpack(raw)
    if head[0] > MAX_CHUNK_BYTES:
        return None
    packed = file.read(head[0])
    if len(packed) < head[0] or zlib.crc32(packed) != head[1]:
        return None
    return head, packed
