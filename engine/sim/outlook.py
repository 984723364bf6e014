"""What a stretch of steps comes to for an operator, foreseen or measured: both are told from the same step records.

Light on purpose: the wire and the screen read these without loading a scheduler. Nothing here runs anything.
"""

from collections.abc import Callable, Sequence

import msgspec

from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import StepRecord


class Range(msgspec.Struct, frozen=True):
    """A measure over several draws of the future: median, smallest, largest."""

    mid: float
    low: float
    high: float


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The horizon under one knob set. Times in seconds; a measure without any sample is None."""

    ttft_p50_s: Range | None
    ttft_p95_s: Range | None
    itl_p50_s: Range | None
    itl_p99_s: Range | None
    output_tokens_per_s: Range
    preemptions: Range
    lost_tokens: Range
    finished: Range
    queue_drained_s: Range | None
    """When nobody waited any more; None if that didn't happen within the horizon in every draw."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """When a waiting request gets its first token of work, in seconds from now; None: not within the horizon."""

    request_id: str
    now: Range | None
    then: Range | None


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Both outlooks side by side, and what they rest on."""

    horizon_s: float
    now: Outlook
    then: Outlook
    changes: dict[str, tuple[KnobValue, KnobValue]]
    num_draws: int
    cpu_s: float
    warnings: list[str]
    mono: float = 0.0
    """Engine clock at which the horizon begins, in seconds."""
    starts: list[Start] = []
    """Of the requests that wait now, in schedule order."""
    arrivals: str = ""
    """What was taken for the arrival process, in words."""


class Tally:
    """Adds step records up."""

    def __init__(self, began: float) -> None:
        self.began = began
        """Clock at which the stretch begins, in seconds."""
        self.ttft: list[float] = []
        self.itl: list[tuple[float, int]] = []
        self.num_tokens = self.num_preemptions = self.num_lost_tokens = self.num_finished = self.num_steps = 0
        self.queue_drained_s: float | None = None
        self.most = (0, 0, 0)
        """Largest sequences, prefill tokens and context tokens of a step."""

    def add(self, record: StepRecord) -> None:
        """Take in a finished step."""
        self.ttft += record.ttft
        self.itl += record.itl
        self.num_steps += 1
        self.num_tokens += record.num_output_tokens
        self.num_preemptions += record.num_preempted
        self.num_lost_tokens += record.num_lost_tokens
        self.num_finished += record.num_finished
        sequences, prefill, context = self.most
        self.most = (
            max(sequences, record.num_scheduled_reqs),
            max(prefill, record.num_prefill_tokens),
            max(context, record.num_context_tokens),
        )
        if self.queue_drained_s is None and record.num_waiting == 0:
            self.queue_drained_s = record.mono - self.began


def outlook_over(tallies: Sequence[Tally], horizon_s: float) -> Outlook:
    """Measures of several stretches of `horizon_s` seconds, with their range."""
    drained = [tally.queue_drained_s for tally in tallies]
    known = [seconds for seconds in drained if seconds is not None]
    return Outlook(
        ttft_p50_s=_percentiles(tallies, _ttft, 0.50),
        ttft_p95_s=_percentiles(tallies, _ttft, 0.95),
        itl_p50_s=_percentiles(tallies, _itl, 0.50),
        itl_p99_s=_percentiles(tallies, _itl, 0.99),
        output_tokens_per_s=range_of([tally.num_tokens / horizon_s for tally in tallies]),
        preemptions=range_of([tally.num_preemptions for tally in tallies]),
        lost_tokens=range_of([tally.num_lost_tokens for tally in tallies]),
        finished=range_of([tally.num_finished for tally in tallies]),
        queue_drained_s=range_of(known) if len(known) == len(tallies) else None,
    )


def _ttft(tally: Tally) -> list[tuple[float, int]]:
    return [(seconds, 1) for seconds in tally.ttft]


def _itl(tally: Tally) -> list[tuple[float, int]]:
    return tally.itl


def _percentiles(
    tallies: Sequence[Tally], samples_of: Callable[[Tally], list[tuple[float, int]]], p: float
) -> Range | None:
    values = [weighted_percentile(samples, p) for tally in tallies if (samples := samples_of(tally))]
    return range_of(values) if values else None


def weighted_percentile(samples: Sequence[tuple[float, int]], p: float) -> float:
    """Element `min(n - 1, int(p * n))` of the sorted samples; each is (value, how often).

    >>> weighted_percentile([(3.0, 1), (1.0, 98), (2.0, 1)], 0.99)
    3.0
    """
    num_samples = sum(count for _, count in samples)
    place = min(num_samples - 1, int(p * num_samples))
    for value, count in sorted(samples):
        place -= count
        if place < 0:
            return value
    raise ValueError("no samples")


def range_of(values: Sequence[float]) -> Range:
    """Median, smallest and largest."""
    ordered = sorted(values)
    return Range(ordered[len(ordered) // 2], ordered[0], ordered[-1])
