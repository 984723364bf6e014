"""Signals: what a playbook can watch, by name, with unit and meaning; and their values over a window of time.

Fed with snapshots and step records, from a live engine, a recording or a simulation; it asks nobody for anything.
A window without samples has no value, and no value is never taken for a good one.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from schedtop.engine.snapshot import Snapshot, StepRecord

KEPT_S = 600.0
"""The longest window an expression may ask for, in seconds."""
DEFAULT_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A signal's value and how many samples it rests on."""

    value: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class SignalSpec:
    """A signal's name, unit and meaning. `is_gauge`: it has a value at a moment; the others need a window."""

    name: str
    unit: str
    meaning: str
    is_gauge: bool


class SignalHistory:
    """Snapshots and steps of the last `kept_s` seconds, and every signal's value over a window of them.

    Times are the engine's `mono` seconds.
    """

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._steps: deque[StepRecord] = deque()
        self._snapshots: deque[Snapshot] = deque()
        self.now = 0.0

    def add_steps(self, records: Iterable[StepRecord]) -> None:
        """Take finished steps, oldest first."""
        for record in records:
            self._steps.append(record)
            self.now = max(self.now, record.mono)
        while self._steps and self._steps[0].mono < self.now - self._kept_s:
            self._steps.popleft()

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Take the engine's state at a moment; it also moves the time on an idle engine."""
        self._snapshots.append(snapshot)
        self.now = max(self.now, snapshot.mono)
        while self._snapshots[0].mono < self.now - self._kept_s:
            self._snapshots.popleft()

    def read(self, name: str, window_s: float | None = None) -> Reading | None:
        """A signal's value: a gauge's latest (or its mean over a window), another's over a window. None = no data."""
        _, gauge, windowed = _SIGNALS[name]
        if gauge is not None:
            return self._read_gauge(gauge, window_s)
        assert windowed is not None
        window_s = window_s or DEFAULT_WINDOW_S
        return windowed(self.recent_steps(window_s), window_s)

    def recent_steps(self, window_s: float) -> list[StepRecord]:
        """The steps of the last so many seconds, oldest first."""
        return _since(self._steps, self.now - window_s)

    def _read_gauge(self, gauge: "Callable[[Snapshot], float]", window_s: float | None) -> Reading | None:
        if not self._snapshots:
            return None
        if window_s is None:
            return Reading(gauge(self._snapshots[-1]), 1)
        values = [gauge(snapshot) for snapshot in _since(self._snapshots, self.now - window_s)]
        return Reading(sum(values) / len(values), len(values)) if values else None


_Timed = TypeVar("_Timed", Snapshot, StepRecord)


def _since(entries: deque[_Timed], moment: float) -> list[_Timed]:
    """Those after a moment, oldest first: costs what it returns, not what is kept."""
    found = list(itertools.takewhile(lambda entry: entry.mono > moment, reversed(entries)))
    found.reverse()
    return found


Gauge = Callable[[Snapshot], float]
Windowed = Callable[[list[StepRecord], float], Reading | None]


def _percentile(samples: Callable[[StepRecord], Iterable[tuple[float, int]]], p: float) -> Windowed:
    """Weighted percentile, in milliseconds: the smallest value that at least a share `p` of the samples reach."""

    def read(records: list[StepRecord], window_s: float) -> Reading | None:
        weighted = sorted(pair for record in records for pair in samples(record))
        total = sum(count for _, count in weighted)
        rank, seen = min(total - 1, int(p * total)), 0
        for seconds, count in weighted:
            seen += count
            if seen > rank:
                return Reading(seconds * 1e3, total)
        return None

    return read


def _rate(amount: Callable[[StepRecord], int]) -> Windowed:
    """Amount per second over the window."""

    def read(records: list[StepRecord], window_s: float) -> Reading | None:
        return Reading(sum(map(amount, records)) / window_s, len(records)) if records else None

    return read


def _share(part: Callable[[StepRecord], float]) -> Windowed:
    """Mean over the window's steps."""

    def read(records: list[StepRecord], window_s: float) -> Reading | None:
        return Reading(sum(map(part, records)) / len(records), len(records)) if records else None

    return read


def _each(values: Callable[[StepRecord], list[float]]) -> Callable[[StepRecord], list[tuple[float, int]]]:
    return lambda record: [(value, 1) for value in values(record)]


_Entry = tuple[SignalSpec, Gauge | None, Windowed | None]


def _gauge(name: str, unit: str, meaning: str, gauge: Gauge) -> _Entry:
    return SignalSpec(name, unit, meaning, True), gauge, None


def _windowed(name: str, unit: str, meaning: str, windowed: Windowed) -> _Entry:
    return SignalSpec(name, unit, meaning, False), None, windowed


def _latency(name: str, meaning: str, samples: Callable[[StepRecord], Iterable[tuple[float, int]]]) -> list[_Entry]:
    return [
        _windowed(f"{name}_p{percent}_ms", "ms", f"{meaning}, p{percent}", _percentile(samples, percent / 100))
        for percent in (50, 90, 95, 99)
    ]


_ENTRIES: list[_Entry] = [
    _gauge("running", "requests", "Requests running.", lambda s: s.num_running),
    _gauge("waiting", "requests", "Requests waiting, for whatever reason.", lambda s: s.num_waiting),
    _gauge("deferred", "requests", "Requests waiting for something besides room.", lambda s: s.num_deferred),
    _gauge("kv_usage", "share", "Share of the KV blocks in use.", lambda s: 1 - s.pool.free / max(1, s.pool.usable)),
    _gauge("kv_free", "blocks", "Free KV blocks, cached ones included.", lambda s: s.pool.free),
    _gauge("budget", "tokens/step", "The token budget in force.", lambda s: s.knobs.max_num_batched_tokens),
    *_latency("itl", "Time between two tokens of a request", lambda record: record.itl),
    *_latency("ttft", "Time from arrival to first token", _each(lambda record: record.ttft)),
    *_latency("e2e", "Time from arrival to the end", _each(lambda record: record.e2e)),
    *_latency("queue", "Time from arrival to admission", _each(lambda record: record.queue_time)),
    *_latency("step", "Duration of a step", _each(lambda record: [record.duration_s])),
    _windowed("preemptions_per_s", "1/s", "Requests preempted per second.", _rate(lambda r: r.num_preempted)),
    _windowed("lost_tokens_per_s", "tokens/s", "Computed tokens lost per second.", _rate(lambda r: r.num_lost_tokens)),
    _windowed("output_tokens_per_s", "tokens/s", "Tokens generated per second.", _rate(lambda r: r.num_output_tokens)),
    _windowed("finished_per_s", "requests/s", "Requests ended per second.", _rate(lambda r: r.num_finished)),
    _windowed(
        "budget_used", "share", "Share of the token budget that steps used.",
        _share(lambda r: (r.num_decode_tokens + r.num_prefill_tokens + r.num_draft_tokens) / max(1, r.budget)),
    ),
]  # fmt: skip
_SIGNALS: dict[str, _Entry] = {entry[0].name: entry for entry in _ENTRIES}

SIGNALS: dict[str, SignalSpec] = {name: entry[0] for name, entry in _SIGNALS.items()}
"""Every signal by name."""
