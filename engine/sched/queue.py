"""The waiting requests, in the order in which they will be admitted.

Any request joins, leaves or is found at any place in O(log n), so that an abort or a new priority costs the same
whether ten wait or a hundred thousand. Who is admitted when is decided in `waiting.py`.
"""

from collections.abc import Callable, Iterator

from sortedcontainers import SortedKeyList

from schedtop.engine.knobs import SchedulingPolicy
from schedtop.engine.request import Request

QueueKey = Callable[[Request], tuple[object, ...]]


def by_arrival(request: Request) -> tuple[object, ...]:
    """First come, first served; a preempted request's rank puts it in front of all who came later."""
    return (request.fcfs_rank,)


def by_priority(request: Request) -> tuple[object, ...]:
    """Lower priority values first, then arrival, then id."""
    return (request.priority, request.arrival_time, request.request_id)


POLICIES: dict[SchedulingPolicy, QueueKey] = {
    SchedulingPolicy.FCFS: by_arrival,
    SchedulingPolicy.PRIORITY: by_priority,
}


class RequestQueue:
    """Requests sorted by a policy's key. Change what the key reads only between `remove` and `add`."""

    def __init__(self, key: QueueKey) -> None:
        self._key = key
        self._requests: SortedKeyList[Request, tuple[object, ...]] = SortedKeyList(key=_queue_key)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        request.queue_key = self._key_of(request)
        self._requests.add(request)

    def _key_of(self, request: Request) -> tuple[object, ...]:
        """Requests that hold loaded KV go first, whatever the policy: blocks must not sit behind a blocked head."""
        return (not request.is_loaded, *self._key(request))

    def remove(self, request: Request) -> None:
        """Take a request out of its place."""
        self._requests.remove(request)

    def peek(self) -> Request:
        """The next to be admitted; the caller knows that there is one."""
        return self._requests[0]

    def __getitem__(self, place: int) -> Request:
        """The request at a place, in O(log n)."""
        return self._requests[place]

    def islice(self, start: int, stop: int | None = None) -> Iterator[Request]:
        """The requests at places `start` to `stop`, or to the end; what comes before isn't walked through."""
        return self._requests.islice(start, stop)

    def reorder(self, key: QueueKey) -> None:
        """Sort all requests anew by another policy."""
        requests = list(self._requests)
        self._requests.clear()
        self._key = key
        for request in requests:
            request.queue_key = self._key_of(request)
        self._requests.update(requests)


def _queue_key(request: Request) -> tuple[object, ...]:
    return request.queue_key
