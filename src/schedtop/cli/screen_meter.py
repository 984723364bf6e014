"""Measures a terminal program under a pseudo-terminal: CPU time, memory, bytes written, time to answer a key.

It knows nothing of what the program shows but the words to wait for. Linux only: figures come from `/proc`.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

WAIT_S = 60.0
SETTLE_S = 3.0
QUIET_S = 0.3
BETWEEN_BURSTS_S = 0.05
"""Output after so long a silence is another refresh."""
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>78]|\x1b\][^\x07]*\x07")


class Screen(msgspec.Struct, frozen=True, kw_only=True):
    """A program to measure and what tells that it has done something."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    size: tuple[int, int]
    """Columns, lines."""
    first_data: str = ""
    """Words that only data bring to the screen; empty: not known, so that time is left out."""
    key: str = ""
    """A key to time; empty = none."""
    answered_by: str = ""
    key_back: str = ""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a program cost; None where it wasn't measured. `fault` says why when it ended early."""

    name: str
    first_data_cpu_s: float | None = None
    core_percent: float | None = None
    memory_mb: float | None = None
    refreshes_per_s: float | None = None
    """Bursts of output, as they came: fewer than asked for when the machine or the engine is slow."""
    bytes_per_refresh: float | None = None
    kilobytes_per_s: float | None = None
    key_p50_s: float | None = None
    key_p99_s: float | None = None
    fault: str = ""


class Ended(Exception):
    """The program has ended; the message holds its last words."""


class Watched:
    """A program in a pseudo-terminal."""

    def __init__(self, screen: Screen) -> None:
        self._master, slave = pty.openpty()
        columns, lines = screen.size
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._process = subprocess.Popen(
            screen.command, env=screen.environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.num_bytes = 0
        self.num_bursts = 0
        self._wrote_at = 0.0
        self._seen = b""

    def read(self, limit_s: float) -> bytes:
        """What it writes next, waiting up to `limit_s`; nothing if it is quiet. Raises `Ended`."""
        if not select.select([self._master], [], [], max(0.0, limit_s))[0]:
            return b""
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # the other side is closed
            raise Ended(_ESCAPES.sub(b"", self._seen).decode(errors="replace").strip()[-200:]) from None
        self.num_bytes += len(data)
        now = time.monotonic()
        self.num_bursts += now - self._wrote_at > BETWEEN_BURSTS_S
        self._wrote_at = now
        self._seen = (self._seen + data)[-400_000:]
        return data

    def read_for(self, seconds: float) -> None:
        """Take what it writes for some time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read(left)

    def read_until(self, words: str) -> None:
        """Take what it writes until `words` come. Raises `Ended`, also when they don't come in time."""
        end = time.monotonic() + WAIT_S
        self._seen = b""
        while words.encode() not in _ESCAPES.sub(b"", self._seen):
            if time.monotonic() > end:
                raise Ended(f"it didn't show {words!r} within {WAIT_S:g} s")
            self.read(end - time.monotonic())

    def write(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def cpu_s(self) -> float:
        """CPU time of the program and its threads so far."""
        fields = self._told("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """Resident memory that is its own: shared libraries count once per user."""
        lines = self._told("smaps_rollup").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024

    def _told(self, name: str) -> str:
        """A file of the program's in `/proc`."""
        try:
            return Path(f"/proc/{self._process.pid}/{name}").read_text()
        except OSError:
            raise Ended("it is gone") from None

    def end(self) -> None:
        """End it, whatever it takes."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(Ended):
            self.read_for(QUIET_S)
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@contextlib.contextmanager
def watched(screen: Screen) -> Iterator[Watched]:
    """The program, running."""
    program = Watched(screen)
    try:
        yield program
    finally:
        program.end()


def measure(screen: Screen, seconds: float, num_keys: int) -> Cost:
    """Start a program, let it settle, watch it for `seconds`, then time keys."""
    with watched(screen) as program:
        try:
            return _measured(program, screen, seconds, num_keys)
        except Ended as end:
            return Cost(name=screen.name, fault=f"ended early: {end}")


def _measured(program: Watched, screen: Screen, seconds: float, num_keys: int) -> Cost:
    first_data = None
    if screen.first_data:
        program.read_until(screen.first_data)
        first_data = program.cpu_s()
    program.read_for(SETTLE_S)
    cpu, num_bytes, num_bursts, started = program.cpu_s(), program.num_bytes, program.num_bursts, time.monotonic()
    program.read_for(seconds)
    lasted = time.monotonic() - started
    core, written = (program.cpu_s() - cpu) / lasted, program.num_bytes - num_bytes
    bursts = program.num_bursts - num_bursts
    memory = program.memory_mb()
    delays = sorted(_key_delays(program, screen, num_keys)) if screen.key else []
    return Cost(
        name=screen.name,
        first_data_cpu_s=first_data,
        core_percent=core * 100,
        memory_mb=memory,
        refreshes_per_s=bursts / lasted,
        bytes_per_refresh=written / bursts if bursts else None,
        kilobytes_per_s=written / lasted / 1000,
        key_p50_s=delays[len(delays) // 2] if delays else None,
        key_p99_s=delays[min(len(delays) - 1, int(0.99 * len(delays)))] if delays else None,
    )


def _key_delays(program: Watched, screen: Screen, count: int) -> Iterator[float]:
    """Seconds from a key press to the words that answer it."""
    for _ in range(count):
        pressed = time.monotonic()
        program.write(screen.key)
        program.read_until(screen.answered_by)
        yield time.monotonic() - pressed
        program.write(screen.key_back)
        program.read_for(QUIET_S)
