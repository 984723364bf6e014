"""Exact latency percentiles over the last 10 and 60 seconds, from step records. Runs where watchers are served,
never in the engine's thread."""

from collections import deque
from collections.abc import Iterable, Sequence

from schedtop.control.messages import Latency, Percentiles
from schedtop.engine.snapshot import StepRecord

NOW_S = 10.0
MINUTE_S = 60.0
NUM_SAMPLES_KEPT = 20_000
"""Samples per latency: with more than that in a minute the window is shorter."""
REFRESH_S = 0.25
"""Percentiles are worked out at most this often, however many watch."""
NAMES = ("ttft", "itl", "e2e", "queue", "step")

_Sample = tuple[float, float, int]
"""(mono, seconds, how many)."""


class Latencies:
    """Rolling windows of the latencies in `NAMES`."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[_Sample]] = {name: deque(maxlen=NUM_SAMPLES_KEPT) for name in NAMES}
        self._summary: dict[str, Latency] = {}
        self._summary_at = float("-inf")

    def add(self, record: StepRecord) -> None:
        """Take in a step's samples."""
        samples = self._samples
        samples["ttft"].extend((record.mono, seconds, 1) for seconds in record.ttft)
        samples["itl"].extend((record.mono, seconds, count) for seconds, count in record.itl)
        samples["e2e"].extend((record.mono, seconds, 1) for seconds in record.e2e)
        samples["queue"].extend((record.mono, seconds, 1) for seconds in record.queue_time)
        samples["step"].append((record.mono, record.duration_s, 1))

    def summary(self, now: float) -> dict[str, Latency]:
        """Each latency's percentiles at the time `now` (mono seconds); at most `REFRESH_S` old."""
        if not 0 <= now - self._summary_at < REFRESH_S:
            self._summary_at = now
            self._summary = {name: _latency(samples, now) for name, samples in self._samples.items()}
        return self._summary


def _latency(samples: deque[_Sample], now: float) -> Latency:
    while samples and samples[0][0] < now - MINUTE_S:
        samples.popleft()
    recent = []
    for mono, seconds, count in reversed(samples):
        if mono < now - NOW_S:
            break
        recent.append((seconds, count))
    return Latency(
        now=percentiles(recent),
        minute=percentiles([(seconds, count) for _, seconds, count in samples]),
    )


def percentiles(weighted: Iterable[tuple[float, int]]) -> Percentiles | None:
    """Nearest-rank percentiles of (seconds, how many) pairs; None of nothing.

    >>> percentiles([(0.1, 98), (0.2, 1), (0.3, 1)])
    Percentiles(count=100, p50=0.1, p90=0.1, p99=0.2, max=0.3)
    """
    ordered = sorted(weighted)
    total = sum(count for _, count in ordered)
    if not total:
        return None
    p50, p90, p99 = _ranks(ordered, [-(-total * percent // 100) for percent in (50, 90, 99)])
    return Percentiles(count=total, p50=p50, p90=p90, p99=p99, max=ordered[-1][0])


def _ranks(ordered: Sequence[tuple[float, int]], ranks: Sequence[int]) -> list[float]:
    """The values at the given 1-based ranks (ascending)."""
    found: list[float] = []
    seen = 0
    for value, count in ordered:
        seen += count
        while len(found) < len(ranks) and ranks[len(found)] <= seen:
            found.append(value)
    return found
