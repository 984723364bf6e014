"""Goodput: the requests that got what they were promised, as DistServe (Zhong et al. 2024) counts it.

A request is good if its first token came in time and 99 of 100 of its gaps between tokens were short enough. One that
was refused, was cut off, or got no token in time is not; neither is one that its client gave up.
"""

from collections.abc import Sequence

import msgspec

from schedtop.engine.sim.simulate import SimulationResult
from schedtop.engine.sim.summary import percentile, pooled_gaps
from schedtop.engine.snapshot import FinishReason

GAP_SHARE = 0.99
_IN_TIME = 0.9
"""Up to this share of a limit counts in full when it is only foreseen: forecasts err."""
_TOO_LATE = 1.15
"""From this share on it is late ..."""
_LATE = 0.3
"""... and counts for so much, less the later it is. Without that, nothing would lead out of a deep backlog, in which
nobody can be in time whatever is done."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What each request is promised, in seconds; None: no promise."""

    ttft_s: float | None = None
    """Until its first token."""
    itl_s: float | None = None
    """Between tokens, for 99 of 100 of its gaps."""

    def is_met(self, ttft_s: float, gaps_s: Sequence[float]) -> bool:
        """Whether a request with these times is good."""
        return (self.ttft_s is None or ttft_s <= self.ttft_s) and (
            self.itl_s is None or not gaps_s or percentile(sorted(gaps_s), GAP_SHARE) <= self.itl_s
        )

    def worth(self, ttft_s: float | None, gaps_s: Sequence[float]) -> float:
        """What a request foreseen so is worth: 1 in time, less when late. `ttft_s=None`: its first token was before."""
        value = 1.0
        if self.ttft_s is not None and ttft_s is not None:
            value *= _soft(ttft_s / self.ttft_s)
        if self.itl_s is not None and gaps_s:
            value *= _soft(percentile(sorted(gaps_s), GAP_SHARE) / self.itl_s)
        return value


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a load got: told together, since each alone can be bought with the others."""

    num_requests: int
    num_good: int
    num_refused: int
    goodput_per_s: float
    itl_p99_s: float | None
    """Of all gaps of all requests together."""
    ttft_p95_s: float | None


def served(result: SimulationResult, slo: Slo) -> Served:
    """Count. Good are requests that ended by themselves, in time."""
    outcomes = list(result.outcomes.values())
    num_good = sum(
        outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        and bool(outcome.token_times)
        and slo.is_met(outcome.ttft_s, outcome.gaps_s)
        for outcome in outcomes
    )
    gaps, waits = pooled_gaps(outcomes), sorted(outcome.ttft_s for outcome in outcomes if outcome.token_times)
    return Served(
        num_requests=len(outcomes),
        num_good=num_good,
        num_refused=result.num_refused,
        goodput_per_s=num_good / result.makespan_s if result.makespan_s else 0.0,
        itl_p99_s=percentile(gaps, 0.99) if gaps else None,
        ttft_p95_s=percentile(waits, 0.95) if waits else None,
    )


def _soft(share: float) -> float:
    if share <= _IN_TIME:
        return 1.0
    if share >= _TOO_LATE:
        return _LATE * _TOO_LATE / share
    return 1.0 - (1.0 - _LATE) * (share - _IN_TIME) / (_TOO_LATE - _IN_TIME)
