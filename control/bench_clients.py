"""The benchmark's clients: `python -m schedtop.control.bench_clients SOCKET`, a process of its own.

Told by lines on standard input what to be, each answered by one line when it is so. Nothing is measured here but the
round trip of commands; the engine's side is in `bench.py`.
"""

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from schedtop.control.client import Client
from schedtop.control.framing import encode_frame
from schedtop.control.messages import AnyCommand, Envelope, GetSnapshot, Hello, SetKnobs, Subscribe
from schedtop.engine.snapshot import NO_ROWS, Viewport

AS_THE_SCREEN = Subscribe(interval_s=0.1, viewport=Viewport(running_rows=50, waiting_rows=10, kv_cells=400))
"""What a screen of usual size asks for, ten times a second."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients are to be until the next order. `num_commands` of each kind are timed once they are."""

    num_reading: int = 0
    num_stalled: int = 0
    num_commands: int = 0


class RoundTrips(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from sending a command to its reply. `audited`: with a row on disk before the reply."""

    plain: list[float] = []
    audited: list[float] = []


class Clients:
    """Connections to one engine, as ordered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = AsyncExitStack()

    async def obey(self, order: Order) -> RoundTrips:
        """Let the clients there are go, and be others."""
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        for _ in range(order.num_stalled):
            self._stack.enter_context(stalled(self._path))
        for _ in range(order.num_reading):
            client = await self._connect()
            reading = asyncio.create_task(_read(client))
            self._stack.callback(reading.cancel)
            await client.request(AS_THE_SCREEN)
        return await self._time_commands(order.num_commands) if order.num_commands else RoundTrips()

    async def _connect(self) -> Client:
        return await self._stack.enter_async_context(await Client.connect(str(self._path), name="bench"))

    async def _time_commands(self, count: int) -> RoundTrips:
        client = await self._connect()
        plain, audited = GetSnapshot(viewport=NO_ROWS), SetKnobs(changes={"max_preemptions": 0})
        trips = RoundTrips()
        for _ in range(count):
            trips.plain.append(await _timed(client, plain))
            trips.audited.append(await _timed(client, audited))
        return trips


async def _read(client: Client) -> None:
    async for _ in client.messages():
        pass


async def _timed(client: Client, command: AnyCommand) -> float:
    start = time.perf_counter()
    await client.request(command)
    return time.perf_counter() - start


@contextlib.contextmanager
def stalled(path: Path) -> Iterator[None]:
    """A client that asks for much, very often, and never reads."""
    command = Subscribe(interval_s=0.02, viewport=Viewport(running_rows=1000, waiting_rows=1000, kv_cells=4096))
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(path))
        one.sendall(encode_frame(Hello(client="stalled")) + encode_frame(Envelope(id=1, command=command)))
        yield


async def main(path: Path) -> None:
    """Obey until standard input ends."""
    clients = Clients(path)
    while line := await asyncio.to_thread(sys.stdin.readline):
        trips = await clients.obey(msgspec.json.decode(line, type=Order))
        print(msgspec.json.encode(trips).decode(), flush=True)
    await clients.obey(Order())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
