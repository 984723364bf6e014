"""What the screen knows: messages folded into frozen values. Pure: no clock, no socket, no widget in here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby, takewhile
from typing import Any

from schedtop.control.messages import EventBatch, FromServer, SnapshotUpdate, Welcome
from schedtop.engine.knobs import KnobSpec, KnobValue
from schedtop.engine.snapshot import EngineCoreEvent, Snapshot, StepRecord
from schedtop.tui.foresight import Prospect
from schedtop.tui.playback import Playback
from schedtop.tui.plays import Play

SAMPLES_KEPT = 1200
EVENTS_KEPT = 500
STALE_AFTER_S = 1.5
SAMPLE_S = 0.25
"""Width of the samples that history is cut into."""


class Phase(StrEnum):
    """Where the connection stands."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LinkUp:
    """Connected and greeted."""

    target: str
    welcome: Welcome


@dataclass(frozen=True, slots=True)
class LinkDown:
    """Not connected; the link tries again in `retry_in_s`."""

    target: str
    reason: str
    retry_in_s: float


@dataclass(frozen=True, slots=True)
class Received:
    """A message of the subscription."""

    target: str
    message: FromServer


@dataclass(frozen=True, slots=True)
class Remembered:
    """Step records from before the screen connected, oldest first."""

    target: str
    steps: Sequence[StepRecord]


@dataclass(frozen=True, slots=True)
class Audited:
    """The newest rows of the engine's audit log, newest first."""

    target: str
    rows: Sequence[Mapping[str, Any]]


LinkEvent = LinkUp | LinkDown | Received | Remembered | Audited


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened since the sample before: sums over its steps, for plots and rates.

    `mono` is of the engine's monotonic clock, in seconds; `num_running` and `num_waiting` are peaks.
    """

    mono: float
    num_steps: int
    budget: int
    prefill: int
    decode: int
    draft: int
    step_s_max: float
    num_running: int
    num_waiting: int
    preemptions: int
    lost_tokens: int
    generated_tokens: int
    first_step: int | None = None
    evictions: int = 0
    """Cached blocks given up; 0 also where the engine doesn't export it."""
    cache_queries: int = 0
    cache_hits: int = 0
    """Prompt tokens looked up in the prefix cache, and those found."""
    alerts: tuple[str, ...] = ()
    """Names of the alerts that stood at its end."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """All that is known of one engine. `received_at` and `changed_at` are of the screen's own clock."""

    target: str
    phase: Phase = Phase.CONNECTING
    reason: str = ""
    changed_at: float = 0.0
    welcome: Welcome | None = None
    update: SnapshotUpdate | None = None
    received_at: float = 0.0
    samples: tuple[Sample, ...] = ()
    events: tuple[EngineCoreEvent, ...] = ()
    audit: tuple[Mapping[str, Any], ...] = ()
    """Rows of the audit log, newest first."""
    num_missed_events: int = 0
    restarted_at: float | None = None
    """When another boot id was seen under the same address."""

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest snapshot."""
        return self.update.snapshot if self.update else None

    @property
    def specs(self) -> tuple[KnobSpec, ...]:
        """The engine's knob table; empty before the welcome."""
        return tuple(self.welcome.knobs) if self.welcome else ()

    def age(self, now: float) -> float:
        """Seconds since the newest message came in."""
        return max(0.0, now - self.received_at)

    def is_stale(self, now: float) -> bool:
        """Whether what is known must be drawn as past."""
        return self.update is not None and (self.phase is not Phase.LIVE or self.age(now) > STALE_AFTER_S)

    def engine_now(self, now: float) -> float:
        """The engine's monotonic clock at the screen's time `now`; stands still once the data is stale."""
        snapshot = self.snapshot
        if snapshot is None:
            return 0.0
        return snapshot.mono + (0.0 if self.is_stale(now) else self.age(now))

    def can(self, command: str) -> bool:
        """Whether the server takes `command` from this connection."""
        return self.welcome is not None and command in self.welcome.capabilities


def fold(view: EngineView, event: LinkEvent, now: float) -> EngineView:
    """`view` after `event`, which came in at the screen's time `now`."""
    match event:
        case LinkUp(welcome=welcome):
            return _greeted(view, welcome, now)
        case LinkDown(reason=reason):
            changed_at = view.changed_at if view.phase is Phase.LOST else now
            return replace(view, phase=Phase.LOST, reason=reason, changed_at=changed_at)
        case Remembered(steps=steps):
            return _remembered(view, steps)
        case Audited(rows=rows):
            return replace(view, audit=tuple(rows))
        case Received(message=SnapshotUpdate() as update):
            return _updated(view, update, now)
        case Received(message=EventBatch() as batch):
            events = (*view.events, *batch.events)[-EVENTS_KEPT:]
            missed = view.num_missed_events + batch.dropped
            return replace(view, events=events, num_missed_events=missed, received_at=now)
    return view


def _greeted(view: EngineView, welcome: Welcome, now: float) -> EngineView:
    fresh = replace(view, phase=Phase.LIVE, reason="", changed_at=now, welcome=welcome, received_at=now, samples=())
    if view.welcome is None or view.welcome.info.boot_id == welcome.info.boot_id:
        return fresh
    return replace(fresh, update=None, events=(), audit=(), num_missed_events=0, restarted_at=now)


def _updated(view: EngineView, update: SnapshotUpdate, now: float) -> EngineView:
    snapshot, before = update.snapshot, view.snapshot
    sample = sample_of(update.steps, snapshot.mono)
    peaks = update.peaks
    counted = replace(
        sample,
        num_running=max(snapshot.num_running, peaks.running if peaks else 0),
        num_waiting=max(snapshot.num_waiting, peaks.waiting if peaks else 0),
    )
    if before is not None and view.samples:
        old, new = before.counters, snapshot.counters
        counted = replace(
            counted,
            preemptions=new.preemptions - old.preemptions,
            lost_tokens=new.lost_tokens - old.lost_tokens,
            generated_tokens=new.generated_tokens - old.generated_tokens,
            evictions=(new.cache_evictions or 0) - (old.cache_evictions or 0),
            cache_queries=new.prefix_cache_queries - old.prefix_cache_queries,
            cache_hits=new.prefix_cache_hits - old.prefix_cache_hits,
        )
    samples = (*view.samples, counted)[-SAMPLES_KEPT:]
    return replace(view, update=update, samples=samples, received_at=now)


def _remembered(view: EngineView, steps: Sequence[StepRecord]) -> EngineView:
    """What the engine did before the screen connected, in front of what the screen has seen itself."""
    first_seen = min((s.first_step for s in view.samples if s.first_step is not None), default=math.inf)
    unseen = (step for step in steps if step.step < first_seen)
    groups = [list(group) for _, group in groupby(unseen, key=lambda step: step.mono // SAMPLE_S)]
    past = [sample_of(group, group[-1].mono) for group in groups]
    return replace(view, samples=(*past, *view.samples)[-SAMPLES_KEPT:])


def sample_of(steps: Sequence[StepRecord], mono: float) -> Sample:
    """The steps up to `mono` as one sample."""
    newest = steps[-1] if steps else None
    return Sample(
        mono=mono,
        num_steps=len(steps),
        budget=sum(step.budget for step in steps),
        prefill=sum(step.num_prefill_tokens for step in steps),
        decode=sum(step.num_decode_tokens for step in steps),
        draft=sum(step.num_draft_tokens for step in steps),
        step_s_max=max((step.duration_s for step in steps), default=0.0),
        num_running=newest.num_running if newest else 0,
        num_waiting=newest.num_waiting if newest else 0,
        preemptions=sum(step.num_preempted for step in steps),
        lost_tokens=sum(step.num_lost_tokens for step in steps),
        generated_tokens=sum(step.num_output_tokens for step in steps),
        first_step=steps[0].step if steps else None,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the last seconds that were seen."""

    generated: float
    preemptions: float
    lost: float


def rates(view: EngineView, now: float, window_s: float = 10.0) -> Rates | None:
    """How fast things happen, over `window_s` of the engine's time up to now; None while that can't be told."""
    end = view.engine_now(now)
    recent = list(takewhile(lambda sample: sample.mono >= end - window_s, reversed(view.samples)))[::-1]
    if len(recent) < 2 or (span := max(end, recent[-1].mono) - recent[0].mono) <= 0.5:
        return None
    after_first = recent[1:]
    return Rates(
        generated=sum(sample.generated_tokens for sample in after_first) / span,
        preemptions=sum(sample.preemptions for sample in after_first) / span,
        lost=sum(sample.lost_tokens for sample in after_first) / span,
    )


PEAK_S = 10.0


def peaks(view: EngineView, now: float) -> tuple[int, int]:
    """The most that ran and that waited in the last `PEAK_S`: bursts that were over before the screen looked."""
    since = view.engine_now(now) - PEAK_S
    recent = list(takewhile(lambda sample: sample.mono >= since, reversed(view.samples)))
    most_running = max((sample.num_running for sample in recent), default=0)
    return most_running, max((sample.num_waiting for sample in recent), default=0)


class Outcome(StrEnum):
    """How an action of the operator stands."""

    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"
    NEWS = "news"
    """Not done from here: somebody else's change, or one that undid itself."""


@dataclass(frozen=True, slots=True)
class Action:
    """The operator's last action and what came back."""

    what: str
    outcome: Outcome
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Ui:
    """What the operator has chosen. Staged values are wishes and drawn as such, never as fact."""

    focus: str = "requests"
    is_maximised: bool = False
    cursor: str | None = None
    """Id of the selected request."""
    tags: frozenset[str] = frozenset()
    running_offset: int = 0
    waiting_offset: int = 0
    waiting_base: int = 0
    """Place of the first waiting row that the subscription delivers."""
    detail: str | None = None
    """Id of the request whose blocks are lit."""
    filter: str = ""
    prompt: str | None = None
    """The filter while it is being typed."""
    sort: str = ""
    is_descending: bool = False
    knob: int = 0
    entry: str = ""
    """A value being typed for the selected knob."""
    staged: Mapping[str, KnobValue] = field(default_factory=dict)
    prospect: Prospect | None = None
    """What is foreseen of the staged values."""
    log_offset: int = 0
    play: int = 0
    """Place of the selected playbook."""
    is_frozen: bool = False
    is_read_only: bool = False
    action: Action | None = None
    is_action_read: bool = False
    """A key was pressed since `action` was told: the line of keys is no longer needed for its rest."""
    playback: Playback | None = None
    """Where a replay stands; None = a live engine."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything a view function may look at."""

    view: EngineView
    ui: Ui = Ui()
    now: float = 0.0
    text: str = ""
    """What the request looked at closely has generated, where it can be decoded."""
    plays: Sequence[Play] = ()
    """The playbooks, and what those do that run from here."""

    @property
    def engine_now(self) -> float:
        """The engine's clock at this moment."""
        return self.view.engine_now(self.now)

    @property
    def is_stale(self) -> bool:
        """Whether the engine's data must be drawn as past."""
        return self.view.is_stale(self.now)
