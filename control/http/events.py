"""The engine's events for many HTTP followers, each with a bounded queue of its own.

A follower that doesn't read loses the oldest events and is told how many; it never holds up anybody, and ending it
never waits for it.
"""

import asyncio
from collections import deque

from schedtop.control.http import sse
from schedtop.control.http.link import EngineLink
from schedtop.control.messages import EventBatch, Welcome
from schedtop.engine.snapshot import EngineCoreEvent

MAX_QUEUED_EVENTS = 256
"""Events that may wait for one follower."""
NUM_EVENTS_REMEMBERED = 1024
"""Events from which a follower that comes back can resume."""
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": still here\n\n"


class Follower:
    """One client's queue. `take` gives bytes to write, None at the end."""

    def __init__(self) -> None:
        self._queue: deque[EngineCoreEvent] = deque()
        self._num_dropped = 0
        self._is_ended = False
        self._news = asyncio.Event()

    def put(self, event: EngineCoreEvent) -> None:
        """Never waits; drops the oldest event when the queue is full."""
        if len(self._queue) >= MAX_QUEUED_EVENTS:
            self._queue.popleft()
            self._num_dropped += 1
        self._queue.append(event)
        self._news.set()

    def count_dropped(self, number: int) -> None:
        """Events lost before they came here."""
        self._num_dropped += number

    def end(self) -> None:
        """No more events; never waits, whatever is queued."""
        self._is_ended = True
        self._news.set()

    async def take(self) -> bytes | None:
        """All that is queued; a comment when nothing came for a while."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await self._news.wait()
        except TimeoutError:
            return _KEEP_ALIVE
        if self._is_ended:
            return None
        self._news.clear()
        parts = []
        if self._num_dropped:
            parts.append(sse.event({"dropped": self._num_dropped}, "dropped"))
            self._num_dropped = 0
        parts += [sse.event(event, event.kind.value, event.sequence) for event in self._queue]
        self._queue.clear()
        return b"".join(parts)


class EventHub:
    """Hands the link's events to all followers."""

    def __init__(self, link: EngineLink) -> None:
        self._followers: set[Follower] = set()
        self._remembered: deque[EngineCoreEvent] = deque(maxlen=NUM_EVENTS_REMEMBERED)
        self._boot_id = ""
        link.on_events.append(self._take)
        link.on_welcome.append(self._welcome)

    @property
    def num_followers(self) -> int:
        """Clients that follow now."""
        return len(self._followers)

    def follow(self, after: int | None = None) -> Follower:
        """A new follower; with `after`, first the remembered events past that number."""
        follower = Follower()
        if after is not None:
            missed = [event for event in self._remembered if event.sequence > after]
            if missed and missed[0].sequence > after + 1:
                follower.count_dropped(missed[0].sequence - after - 1)
            for event in missed:
                follower.put(event)
        self._followers.add(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """The client is gone."""
        self._followers.discard(follower)

    def end(self) -> None:
        """End all followers."""
        for follower in self._followers:
            follower.end()

    def _take(self, batch: EventBatch) -> None:
        self._remembered.extend(batch.events)
        for follower in self._followers:
            if batch.dropped:
                follower.count_dropped(batch.dropped)
            for event in batch.events:
                follower.put(event)

    def _welcome(self, welcome: Welcome) -> None:
        """Another engine numbers its events anew."""
        if welcome.info.boot_id != self._boot_id:
            self._remembered.clear()
        self._boot_id = welcome.info.boot_id
