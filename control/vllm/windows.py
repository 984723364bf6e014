"""What happened between scrapes: rates, and percentiles of histograms over a window with the error their buckets leave.

A counter that falls has begun anew with its server: what it shows then is all new. Pure, no clock and no network.
"""

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import msgspec

from schedtop.control.vllm.scrape import HISTOGRAMS, Bounds, Reading

NOW_S, MINUTE_S = 10.0, 60.0
_KEPT_S = 75.0


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A percentile out of buckets, in seconds: it lies between `low` and `high`; `value` is a straight line's guess.

    `high` is None in the last bucket, which has no upper bound: then `value` is its lower one, "more than".
    """

    value: float
    low: float
    high: float | None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles over a window with `count` observations."""

    count: int
    p50: Estimate
    p90: Estimate
    p99: Estimate


def percentile(buckets: Bounds, share: float) -> Estimate | None:
    """The bucket in which the observation at `share` (0 to 1) lies; None when there are none.

    >>> percentile(((0.1, 0), (0.2, 10), (math.inf, 10)), 0.5)
    Estimate(value=0.15000000000000002, low=0.1, high=0.2)
    >>> percentile(((0.1, 0), (math.inf, 3)), 0.5)
    Estimate(value=0.1, low=0.1, high=None)
    """
    total = buckets[-1][1] if buckets else 0
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                return Estimate(value=low, low=low, high=None)
            part = (rank - below) / (count - below)
            return Estimate(value=low + part * (bound - low), low=low, high=bound)
        low, below = bound, count
    return None


def spread(buckets: Bounds | None) -> Spread | None:
    """The percentiles of a histogram; None without observations."""
    if buckets is None:
        return None
    parts = [percentile(buckets, share) for share in (0.5, 0.9, 0.99)]
    if parts[0] is None or parts[1] is None or parts[2] is None:
        return None
    return Spread(count=round(buckets[-1][1]), p50=parts[0], p90=parts[1], p99=parts[2])


def grown(before: float | None, after: float | None) -> float | None:
    """How much a counter grew, a restart in between told by its fall.

    >>> grown(5, 8), grown(100, 3), grown(None, 3)
    (3, 3, None)
    """
    if before is None or after is None:
        return None
    return after - before if after >= before else after


def grown_buckets(before: Bounds | None, after: Bounds | None) -> Bounds | None:
    """The observations between two scrapes of a histogram; all of `after` when it began anew."""
    if before is None or after is None:
        return None
    old = dict(before)
    if any(count < old.get(bound, 0) for bound, count in after) or old.keys() != dict(after).keys():
        return after
    return tuple((bound, count - old[bound]) for bound, count in after)


class History:
    """The scrapes of one engine over the last minute."""

    def __init__(self) -> None:
        self.num_restarts = 0
        self._readings: deque[tuple[float, Reading]] = deque()

    def add(self, mono: float, reading: Reading) -> None:
        """Another scrape, at the scraper's monotonic time."""
        if self._readings and _has_restarted(self._readings[-1][1], reading):
            self.num_restarts += 1
        self._readings.append((mono, reading))
        while self._readings[0][0] < mono - _KEPT_S:
            self._readings.popleft()

    @property
    def newest(self) -> Reading:
        """The newest scrape."""
        return self._readings[-1][1]

    def rate(self, name: str, window_s: float = NOW_S) -> float | None:
        """Growth of a counter per second over the window; None while that can't be told."""
        inside = self._inside(window_s)
        total = self._sum(inside, lambda reading: reading.counters.get(name))
        span = inside[-1][0] - inside[0][0]
        return None if total is None or span <= 0 else total / span

    def increase(self, name: str, window_s: float = MINUTE_S) -> float | None:
        """Growth of a counter over the window."""
        return self._sum(self._inside(window_s), lambda reading: reading.counters.get(name))

    def spread(self, name: str, window_s: float = NOW_S) -> Spread | None:
        """Percentiles of what was observed in the window; None when nothing was, or it isn't exported."""
        inside = self._inside(window_s)
        total: dict[float, float] = {}
        for (_, old), (_, new) in pairwise(inside):
            part = grown_buckets(old.histograms.get(name), new.histograms.get(name))
            for bound, count in part or ():
                total[bound] = total.get(bound, 0) + count
        return spread(tuple(sorted(total.items())))

    def _inside(self, window_s: float) -> list[tuple[float, Reading]]:
        """The scrapes of the window, and the one before it that it starts from."""
        start = self._readings[-1][0] - window_s
        first = max((i for i, (mono, _) in enumerate(self._readings) if mono <= start), default=0)
        return list(self._readings)[first:]

    def _sum(self, inside: list[tuple[float, Reading]], value: Callable[[Reading], float | None]) -> float | None:
        parts = [grown(value(old), value(new)) for (_, old), (_, new) in pairwise(inside)]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None


def _has_restarted(before: Reading, after: Reading) -> bool:
    if any((after.counters.get(name) or 0) < (value or 0) for name, value in before.counters.items()):
        return True
    return any(
        (new := after.histograms.get(name)) and (old := before.histograms.get(name)) and new[-1][1] < old[-1][1]
        for name in HISTOGRAMS
    )
