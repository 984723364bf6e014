"""Exact latency percentiles over the last 10 and 60 seconds, from step records. Runs where watchers are served,
never in the engine's thread; but while it works the engine can't, so it works little at a time."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, islice
from operator import itemgetter

from schedtop.control.measures import Latency, Percentiles
from schedtop.engine.snapshot import StepRecord

NOW_S = 10.0
MINUTE_S = 60.0
NUM_SAMPLES_KEPT = 20_000
"""Samples per latency: with more than that in a minute the window is shorter."""
REFRESH_S = 0.25
"""Percentiles are worked out at most this often, however many watch."""
NAMES = ("ttft", "itl", "e2e", "queue", "step")

Sample = tuple[float, int]
"""(seconds, how many)."""


class Latencies:
    """Rolling windows of the latencies in `NAMES`."""

    def __init__(self) -> None:
        self._windows = {name: (_Window(NOW_S), _Window(MINUTE_S)) for name in NAMES}
        self._summary: dict[str, Latency] = {}
        self._summary_at = float("-inf")

    def add(self, record: StepRecord) -> None:
        """Take in a step's samples."""
        self._add("ttft", record.mono, [(seconds, 1) for seconds in record.ttft])
        self._add("itl", record.mono, record.itl)
        self._add("e2e", record.mono, [(seconds, 1) for seconds in record.e2e])
        self._add("queue", record.mono, [(seconds, 1) for seconds in record.queue_time])
        self._add("step", record.mono, [(record.duration_s, 1)])

    def _add(self, name: str, mono: float, samples: Sequence[Sample]) -> None:
        if samples:
            for window in self._windows[name]:
                window.add(mono, samples)

    def summary(self, now: float) -> dict[str, Latency]:
        """Each latency's percentiles at the time `now` (mono seconds); at most `REFRESH_S` old."""
        if not 0 <= now - self._summary_at < REFRESH_S:
            self._summary_at = now
            self._summary = {
                name: Latency(now=percentiles(recent.ordered(now)), minute=percentiles(minute.ordered(now)))
                for name, (recent, minute) in self._windows.items()
            }
        return self._summary


class _Window:
    """The samples of the last `length_s` seconds, by age and by size.

    Only what is new is sorted in, and nothing before somebody asks: sorting a minute anew takes as long as a step.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._by_age: deque[tuple[float, Sample]] = deque()
        self._by_size: list[Sample] = []
        """All of `by_age` but the newest `num_new`, sorted."""
        self._num_new = 0

    def add(self, mono: float, samples: Sequence[Sample]) -> None:
        """Samples of the time `mono`, which isn't before any earlier one."""
        self._by_age.extend((mono, sample) for sample in samples)
        self._num_new += len(samples)
        while len(self._by_age) > NUM_SAMPLES_KEPT:
            self._drop_oldest()

    def ordered(self, now: float) -> list[Sample]:
        """What the window holds at the time `now`, the smallest first; valid until the next call."""
        while self._by_age and self._by_age[0][0] < now - self._length_s:
            self._drop_oldest()
        self._by_size.extend(sample for _, sample in islice(reversed(self._by_age), self._num_new))
        self._by_size.sort()  # of a sorted list with a short tail: hardly more than a look at each
        self._num_new = 0
        return self._by_size

    def _drop_oldest(self) -> None:
        _, sample = self._by_age.popleft()
        if self._by_size:
            del self._by_size[bisect_left(self._by_size, sample)]
        else:
            self._num_new -= 1


def percentiles(ordered: Sequence[Sample]) -> Percentiles | None:
    """Nearest-rank percentiles of (seconds, how many) pairs, the smallest first; None of nothing.

    >>> percentiles([(0.1, 98), (0.2, 1), (0.3, 1)])
    Percentiles(count=100, p50=0.1, p90=0.1, p99=0.2, max=0.3)
    """
    if not ordered:
        return None
    seen = list(accumulate(map(itemgetter(1), ordered)))
    total = seen[-1]
    p50, p90, p99 = (ordered[bisect_left(seen, -(-total * percent // 100))][0] for percent in (50, 90, 99))
    return Percentiles(count=total, p50=p50, p90=p90, p99=p99, max=ordered[-1][0])
