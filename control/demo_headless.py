"""The demo without a screen: a status line a second, and at the end a summary that says whether all went well."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from schedtop.control.client import Client
from schedtop.control.demo import DemoLoad
from schedtop.control.messages import Ack, GetSnapshot, SelfCheck, SnapshotReply, SnapshotUpdate, Subscribe
from schedtop.engine.snapshot import NO_ROWS, Snapshot

IDLE_LIMIT_S = 30.0
"""How long the engine may take to be idle once the load has ended."""

Decode = Callable[[list[int]], str]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a demo came to, after its load has ended. Blocks: in_use + free + cached = usable."""

    seconds: float
    """From the first step to the end of the load."""
    tokens_generated: int
    tokens_received: int
    """By the demo's own clients."""
    preemptions: int
    requests_finished: int
    in_use: int
    free: int
    """Free and holding no prefix."""
    cached: int
    """Free, but still holding a prefix that may be found again."""
    usable: int
    faults: list[str]
    """What the self-check found; empty = clean."""

    def problems(self) -> list[str]:
        """Everything that isn't as it should be."""
        found = [f"self-check: {fault}" for fault in self.faults]
        if not self.tokens_generated:
            found.append("no token was generated")
        if not self.preemptions:
            found.append("nobody was preempted: run it for longer (--seconds) or with a smaller pool")
        if self.in_use or self.free + self.cached != self.usable:
            found.append(f"blocks lost: in use {self.in_use}, free {self.free} + cached {self.cached} of {self.usable}")
        return found

    def __str__(self) -> str:
        return "\n".join(
            (
                f"tokens generated  {self.tokens_generated} in {self.seconds:.1f} s, "
                f"{self.tokens_generated / self.seconds:.1f} tokens/s",
                f"requests finished {self.requests_finished}",
                f"preemptions       {self.preemptions}",
                f"KV blocks         in use {self.in_use}, free {self.free} + cached {self.cached} "
                f"= {self.free + self.cached} of {self.usable} usable",
                f"self-check        {'; '.join(self.faults) or 'clean'}",
            )
        )


async def run_headless(
    watcher: Client, load: DemoLoad, seconds: float, decode: Decode, say: Callable[[str], None]
) -> Summary:
    """Load the engine for `seconds` after its first step, then end the load and take stock.

    `watcher` and the load's client must be two connections. Raises `Disconnected` when the engine goes away.
    """
    running = asyncio.create_task(load.run())
    watching = asyncio.create_task(_watch(watcher, load, seconds, decode, say))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        lasted = await watching
    finally:
        for task in (running, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    await load.stop()
    return await _take_stock(watcher, load, lasted)


async def _watch(watcher: Client, load: DemoLoad, seconds: float, decode: Decode, say: Callable[[str], None]) -> float:
    """A line per second until the time is up; how long it really was."""
    await watcher.request(Subscribe(interval_s=1.0, viewport=NO_ROWS, events=False))
    first: float | None = None
    async for message in watcher.messages():
        if not isinstance(message, SnapshotUpdate) or (not message.steps and first is None):
            continue
        snapshot = message.snapshot
        if first is None:
            first = message.steps[0].mono - message.steps[0].duration_s
        say(_status_line(snapshot, snapshot.mono - first, decode(load.latest)))
        if snapshot.mono - first >= seconds:
            return snapshot.mono - first
    return 0.0


def _status_line(snapshot: Snapshot, elapsed: float, text: str) -> str:
    words = " ".join(text.split())[-60:]
    return (
        f"{elapsed:5.1f} s  step {snapshot.step:4}  run {snapshot.num_running:2}  wait {snapshot.num_waiting:2}  "
        f"KV {snapshot.pool.in_use:3}/{snapshot.pool.usable}  tokens {snapshot.counters.generated_tokens:5}  "
        f"preemptions {snapshot.counters.preemptions:2}  {words}"
    )


async def _take_stock(watcher: Client, load: DemoLoad, lasted: float) -> Summary:
    """Once nothing is under way any more."""
    async with asyncio.timeout(IDLE_LIMIT_S):
        while (snapshot := await _snapshot(watcher)).num_running + snapshot.num_waiting:
            pass
    check = await watcher.request(SelfCheck())
    assert isinstance(check, Ack)
    pool, counters = snapshot.pool, snapshot.counters
    return Summary(
        seconds=lasted,
        tokens_generated=counters.generated_tokens,
        tokens_received=load.num_tokens,
        preemptions=counters.preemptions,
        requests_finished=sum(counters.finished.values()),
        in_use=pool.in_use,
        free=pool.free - pool.cached,
        cached=pool.cached,
        usable=pool.usable,
        faults=list(check.data.get("faults", [])),
    )


async def _snapshot(watcher: Client) -> Snapshot:
    reply = await watcher.request(GetSnapshot(viewport=NO_ROWS))
    assert isinstance(reply, SnapshotReply)
    return reply.update.snapshot
