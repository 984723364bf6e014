"""Histograms that take many equal samples at once, and vLLM's bucket bounds. Rendered by prometheus-client."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_GAP_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                    40.0, 80.0)  # fmt: skip
REQUEST_TIME_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                       480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
STEP_TOKENS_BOUNDS = (1.0, *(float(1 << power) for power in range(3, 15)))
N_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS_BOUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
STEP_TIME_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
                    10.0)  # fmt: skip


def one_two_five(limit: int | None) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `limit` (the model's length), as vLLM bounds token counts."""
    limit = limit or 1_000_000
    bounds = [mantissa * 10.0**power for power in range(10) for mantissa in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= limit) or (1.0,)


class Histogram:
    """Counts per bucket, and the sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Take `times` samples of one value; one equal to a bound belongs below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_samples(self) -> int:
        """Samples taken."""
        return sum(self.counts)

    def fill(self, family: HistogramMetricFamily, labels: Mapping[str, str], created: float) -> None:
        """Add these counts to a metric, cumulated as Prometheus wants them.

        `labels` in the order the family was made with; `created`: when counting began, wall time in seconds.
        """
        cumulated, buckets = 0, []
        for bound, count in zip((*map(floatToGoString, self.bounds), "+Inf"), self.counts, strict=True):
            cumulated += count
            buckets.append((bound, float(cumulated)))
        family.add_metric(list(labels.values()), buckets, self.total)
        family.add_sample(f"{family.name}_created", dict(labels), created)
