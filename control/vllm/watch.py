"""What the plugin remembers about vLLM's requests and steps: times, losses, counts. Fed by the plugin's hooks.

Plain memory, written by the engine thread. A step in which the same requests decode on costs no work per request
beyond a few passes over lists and sets: everybody's gap is the same then, and is kept once.
"""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from schedtop.engine.sched.stats import SchedulerStats
from schedtop.engine.snapshot import EventKind, LimitedBy, Preemption, StepRecord

_ID, _NEW_TOKENS, _REASON = attrgetter("request_id"), attrgetter("new_token_ids"), attrgetter("finish_reason")
_COMPUTED = attrgetter("num_computed_tokens")


class Watched:
    """One live request's times and losses."""

    __slots__ = (
        "arrived", "first_token_at", "last_token_at", "num_cached", "num_lost", "request", "was_admitted",
    )  # fmt: skip

    def __init__(self, now: float, request: Any) -> None:
        self.arrived = now
        self.request = request
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_lost = 0
        self.num_cached = 0
        self.was_admitted = False


class PlannedStep:
    """A step between its planning and its result."""

    __slots__ = (
        "budget",
        "largest_chunk",
        "limited_by",
        "num_admitted",
        "num_context",
        "num_decodes",
        "num_drafts",
        "num_lost",
        "num_preempted",
        "num_resumed",
        "num_scheduled",
        "schedule_s",
        "started_at",
        "step",
        "total",
    )  # fmt: skip

    def __init__(self, step: int, started_at: float) -> None:
        self.step = step
        self.started_at = started_at
        self.schedule_s = 0.0
        self.budget = self.total = self.num_scheduled = self.num_decodes = self.num_drafts = 0
        self.num_admitted = self.num_resumed = self.num_preempted = self.num_lost = 0
        self.num_context = self.largest_chunk = 0
        self.limited_by = LimitedBy.NOTHING_WAITING


class Books:
    """Everything remembered. `stats` are the same totals and events that our own engine keeps."""

    def __init__(self) -> None:
        self.requests: dict[str, Watched] = {}
        self.stats = SchedulerStats()
        self.step = 0
        self.in_flight: deque[PlannedStep] = deque()
        self.last_limit = LimitedBy.NOTHING_WAITING
        self.scheduled: Mapping[str, int] = {}
        """Tokens that the newest step gave to each request."""
        self.prefilling: dict[str, Any] = {}
        """Requests admitted whose context isn't computed yet."""
        self._answered: list[str] = []
        """Requests, live or just ended, that got a token each at `_answered_at`, in the newest result."""
        self._answered_at = 0.0
        self._answered_set: set[str] | None = None
        """The same, made when somebody looks rows up."""

    def queued(self, request: Any) -> None:
        """A request came."""
        now = time.monotonic()
        self.requests[request.request_id] = Watched(now, request)
        self.stats.added += 1
        sample = (now, request.num_prompt_tokens, request.max_tokens, request.priority)
        self.stats.recent_arrivals.append(sample)
        self.note(EventKind.QUEUED, request.request_id)

    def admitted(self, request_id: str, num_prompt_tokens: int, num_cached: int, plan: PlannedStep) -> None:
        """vLLM admitted a request, for the first time or again."""
        watched = self.requests.get(request_id)
        if watched is None:
            return
        self.prefilling[request_id] = watched.request
        if watched.was_admitted:
            plan.num_resumed += 1
            self.note(EventKind.RESUMED, request_id)
            return
        watched.was_admitted = True
        watched.num_cached = num_cached
        plan.num_admitted += 1
        self.stats.prompt_tokens += num_prompt_tokens
        self.stats.samples.queue_time.append(time.monotonic() - watched.arrived)
        self.note(EventKind.SCHEDULED, request_id)

    def preempted(self, record: Preemption) -> None:
        """vLLM threw a request out."""
        watched = self.requests.get(record.victim)
        if watched is not None:
            watched.num_lost += record.num_lost_tokens
        self.prefilling.pop(record.victim, None)
        self.stats.count_preemption(record)
        self.note(EventKind.PREEMPTED, record.victim, preemption=record)

    def count_scheduled(self, plan: PlannedStep, scheduled: Mapping[str, int], running: Sequence[Any]) -> None:
        """Split a step's tokens into prefill and decode. `running` are vLLM's, their counts moved on already."""
        self.scheduled = scheduled
        plan.num_scheduled = len(scheduled)
        if len(scheduled) == len(running):
            plan.num_context = sum(map(_COMPUTED, running))
        else:
            plan.num_context = sum([r.num_computed_tokens for r in running if r.request_id in scheduled])
        num_prefill = 0
        for request_id, request in list(self.prefilling.items()):
            if not (num_tokens := scheduled.get(request_id, 0)):
                continue
            num_prefill += num_tokens
            plan.largest_chunk = max(plan.largest_chunk, num_tokens)
            # Tokens of a chunk attend to half of it on average, and to all before it.
            plan.num_context += num_tokens * (request.num_computed_tokens - num_tokens // 2)
            plan.num_context -= request.num_computed_tokens
            if not request.is_prefill_chunk:
                del self.prefilling[request_id]
        plan.num_decodes = plan.total - num_prefill - plan.num_drafts

    def got(self, outputs: Sequence[Any], now: float) -> int:
        """A step's result: vLLM's output per request. Returns how many requests ended with it."""
        ids = list(map(_ID, outputs))
        sizes = list(map(len, map(_NEW_TOKENS, outputs)))
        is_one_each = sizes.count(1) == len(sizes)
        if is_one_each and ids == self._answered:
            self._got_one_each(len(ids), now)
        else:
            self._got_some(ids, sizes, is_one_each, now)
        self._answered_at = now
        reasons = list(map(_REASON, outputs))
        if (num_ended := len(reasons) - reasons.count(None)) > 0:
            for request_id, reason in zip(ids, reasons, strict=True):
                if reason is not None:
                    self.ended(request_id, str(reason))
        return num_ended

    def _got_one_each(self, count: int, now: float) -> None:
        """Another token for as many requests as got one in the result before."""
        if count:
            self.stats.samples.itl.append((now - self._answered_at, count))
            self.stats.generated_tokens += count
            self.stats.samples.num_output_tokens += count

    def _got_some(self, ids: list[str], sizes: list[int], is_one_each: bool, now: float) -> None:
        before = set(self._answered)
        goes_on = before.intersection(ids) if is_one_each else set()
        for request_id in before - goes_on:
            if (watched := self.requests.get(request_id)) is not None:
                watched.last_token_at = self._answered_at
        self._got_one_each(len(goes_on), now)
        for request_id, size in zip(ids, sizes, strict=True):
            if request_id not in goes_on:
                self._got_tokens(request_id, size, now)
        self._answered, self._answered_set = ids if is_one_each else [], None

    def _got_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        watched = self.requests.get(request_id)
        if watched is None or not num_tokens:
            return
        samples = self.stats.samples
        if watched.first_token_at is None:
            watched.first_token_at = now
            self.stats.first_tokens += 1
            samples.ttft.append(now - watched.arrived)
        elif watched.last_token_at is not None:
            samples.itl.append((now - watched.last_token_at, 1))
        if num_tokens > 1:
            samples.itl.append((0.0, num_tokens - 1))
        watched.last_token_at = now
        self.stats.generated_tokens += num_tokens
        samples.num_output_tokens += num_tokens

    def last_token_at(self, request_id: str) -> float | None:
        """When a live request got its newest token."""
        if (watched := self.requests.get(request_id)) is None:
            return None
        if self._answered_set is None:
            self._answered_set = set(self._answered)
        return self._answered_at if request_id in self._answered_set else watched.last_token_at

    def ended(self, request_id: str, reason: str) -> None:
        """A request is gone; idempotent."""
        self.prefilling.pop(request_id, None)
        watched = self.requests.pop(request_id, None)
        if watched is None:
            return
        self.stats.finished[reason] += 1
        if reason in ("stop", "length"):
            self.stats.samples.e2e.append(time.monotonic() - watched.arrived)
            ended = watched.request
            kind = (ended.num_prompt_tokens, ended.max_tokens, ended.priority)
            self.stats.recent_ends.append((time.monotonic(), *kind, ended.num_output_tokens))
        self.note(EventKind.FINISHED, request_id, reason)

    def note(
        self, kind: EventKind, request_id: str | None = None, detail: str = "", preemption: Preemption | None = None,
        changes: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Add to the event stream."""
        self.stats.event(kind, self.step, time.monotonic(), request_id, detail, preemption, changes)

    def record(self, plan: PlannedStep, counts: "Counts", num_finished: int, update_s: float) -> StepRecord:
        """A finished step, for watchers."""
        now = time.monotonic()
        samples = self.stats.take_samples()
        self.stats.steps += 1
        return StepRecord(
            step=plan.step,
            mono=now,
            wall=time.time(),
            duration_s=now - plan.started_at,
            schedule_s=plan.schedule_s,
            forward_s=max(0.0, now - plan.started_at - plan.schedule_s - update_s),
            update_s=update_s,
            budget=plan.budget,
            num_decode_tokens=plan.num_decodes,
            num_prefill_tokens=plan.total - plan.num_decodes - plan.num_drafts,
            num_draft_tokens=plan.num_drafts,
            num_scheduled_reqs=plan.num_scheduled,
            largest_prefill_chunk=plan.largest_chunk,
            num_running=counts.running,
            num_waiting=counts.waiting,
            num_deferred=counts.deferred,
            blocks_free=counts.free,
            blocks_in_use=counts.usable - counts.free,
            num_admitted=plan.num_admitted,
            num_resumed=plan.num_resumed,
            num_preempted=plan.num_preempted,
            num_finished=num_finished,
            num_lost_tokens=plan.num_lost,
            num_output_tokens=samples.num_output_tokens,
            limited_by=plan.limited_by,
            ttft=samples.ttft,
            itl=_joined(samples.itl),
            e2e=samples.e2e,
            queue_time=samples.queue_time,
            num_context_tokens=plan.num_context,
        )


class Counts:
    """Sizes at a moment."""

    __slots__ = ("deferred", "free", "running", "usable", "waiting")

    def __init__(self, running: int, waiting: int, deferred: int, free: int, usable: int) -> None:
        self.running = running
        self.waiting = waiting
        self.deferred = deferred
        self.free = free
        self.usable = usable


def _joined(gaps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Equal gaps counted together: most requests of a step waited equally long for their token."""
    if len(gaps) < 2:
        return gaps
    joined: Counter[float] = Counter()
    for gap, count in gaps:
        joined[gap] += count
    return list(joined.items())
