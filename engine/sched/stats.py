"""What the scheduler counts: totals since start, and what the current step added. No decision reads any of it."""

import time
from collections import Counter, deque

from schedtop.engine.knobs import KnobValue
from schedtop.engine.outputs import RequestOutput
from schedtop.engine.request import Request
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.snapshot import Counters, EngineCoreEvent, EventKind, Preemption

NUM_RECENT_PREEMPTIONS = 200

NUM_RECENT_REQUESTS = 512

KnobChanges = dict[str, tuple[KnobValue, KnobValue]]
"""Knob name -> (before, after)."""


class StepSamples:
    """Latencies (seconds) that one step's boundary and result produced."""

    __slots__ = ("e2e", "itl", "num_lost_tokens", "num_output_tokens", "queue_time", "ttft")

    def __init__(self) -> None:
        self.ttft: list[float] = []
        self.itl: list[tuple[float, int]] = []
        self.e2e: list[float] = []
        self.queue_time: list[float] = []
        self.num_lost_tokens = 0
        self.num_output_tokens = 0


class SchedulerStats:
    """Totals, the step at hand, recent preemptions, and the gapless event stream."""

    def __init__(self) -> None:
        self.added = 0
        self.refused = 0
        self.finished: Counter[str] = Counter()
        self.preemptions = 0
        self.lost_tokens = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.external_cache_queries = 0
        self.external_cache_hits = 0
        self.has_connector = False
        self.resumed_cache_queries = 0
        self.resumed_cache_hits = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.drafts = 0
        self.accepted_at: list[int] = []
        self.wasted_tokens = 0
        self.first_tokens = 0
        self.steps = 0
        self.samples = StepSamples()
        self.recent_preemptions: deque[Preemption] = deque(maxlen=NUM_RECENT_PREEMPTIONS)
        self.recent_arrivals: deque[tuple[float, int, int, int]] = deque(maxlen=NUM_RECENT_REQUESTS)
        """(arrived, prompt tokens, max_tokens, priority): the arrival process a forecast goes on with."""
        self.recent_ends: deque[tuple[float, int, int, int, int]] = deque(maxlen=NUM_RECENT_REQUESTS)
        """(ended, prompt tokens, max_tokens, priority, output tokens) of those that ended by themselves."""
        self.recent_hits: deque[tuple[int, int, int, bytes, int]] = deque(maxlen=NUM_RECENT_REQUESTS)
        """(prompt tokens, max_tokens, priority, hash of the first block, cached tokens) of those admitted."""
        self._events: list[EngineCoreEvent] = []
        self._num_events = 0
        self._last_result_at = 0.0

    # ---- counted by the scheduler ---------------------------------------------------------------------------

    def count_arrival(self, request: Request) -> None:
        """A request was queued."""
        self.added += 1
        self.recent_arrivals.append(
            (request.arrived, request.num_prompt_tokens, request.sampling.max_tokens, request.priority)
        )

    def count_plan(self, plan: StepPlan) -> None:
        """A step was planned."""
        self.computed_tokens += plan.total_num_scheduled_tokens

    def count_admission(self, request: Request, num_hit_tokens: int, now: float) -> None:
        """A request was admitted; hits of resumed requests say nothing about the cache's worth and count apart."""
        if request.was_admitted:
            self.resumed_cache_queries += request.num_tokens
            self.resumed_cache_hits += num_hit_tokens
            return
        request.num_cached_tokens = num_hit_tokens
        self.prompt_tokens += request.num_prompt_tokens
        self.prefix_cache_queries += request.num_prompt_tokens
        self.prefix_cache_hits += num_hit_tokens
        self.external_cache_hits += request.num_external_tokens
        if self.has_connector:
            num_local_tokens = num_hit_tokens - request.num_external_tokens
            self.external_cache_queries += request.num_prompt_tokens - num_local_tokens
        self.samples.queue_time.append(now - request.arrived)
        if request.block_hashes:
            kind = (request.num_prompt_tokens, request.sampling.max_tokens, request.priority)
            self.recent_hits.append((*kind, request.block_hashes[0], num_hit_tokens))

    def count_preemption(self, record: Preemption) -> None:
        """A request was thrown out."""
        self.preemptions += 1
        self.lost_tokens += record.num_lost_tokens
        self.samples.num_lost_tokens += record.num_lost_tokens
        self.recent_preemptions.append(record)

    def begin_result(self, now: float) -> float:
        """A result came; returns when the one before it came."""
        previous, self._last_result_at = self._last_result_at, now
        self.steps += 1
        return previous

    def count_irregular(self, request: Request, num_tokens: int, now: float) -> None:
        """Tokens of a request that didn't get exactly one token in this step and one in the step before."""
        if request.first_token_at is None:
            request.first_token_at = now
            self.first_tokens += 1
            self.samples.ttft.append(now - request.arrived)
        elif request.last_token_at is not None:
            self.samples.itl.append((now - request.last_token_at, 1))
        if num_tokens > 1:
            self.samples.itl.append((0.0, num_tokens - 1))

    def count_result(self, outputs: list[RequestOutput], num_regular: int, gap: float) -> None:
        """A step's tokens: `num_regular` of them came one step after their predecessors, `gap` seconds later."""
        if num_regular:
            self.samples.itl.append((gap, num_regular))
        num_tokens = len(outputs)
        if num_tokens != num_regular:
            num_tokens = sum(len(output.new_token_ids) for output in outputs)
        self.generated_tokens += num_tokens
        self.samples.num_output_tokens += num_tokens

    def forget_recent(self) -> None:
        """Another load begins: what is remembered of the last one says nothing about it."""
        for remembered in (self.recent_arrivals, self.recent_ends, self.recent_hits):
            remembered.clear()

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """A draft was verified."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        self.accepted_at += [0] * (num_accepted - len(self.accepted_at))
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def count_end(self, request: Request, now: float) -> None:
        """A request ended by itself."""
        self.samples.e2e.append(now - request.arrived)
        kind = (request.num_prompt_tokens, request.sampling.max_tokens, request.priority)
        self.recent_ends.append((now, *kind, request.num_output_tokens))

    # ---- events ---------------------------------------------------------------------------------------------

    def event(
        self,
        kind: EventKind,
        step: int,
        now: float,
        request_id: str | None = None,
        detail: str = "",
        preemption: Preemption | None = None,
        changes: KnobChanges | None = None,
    ) -> EngineCoreEvent:
        """Append to the event stream."""
        self._num_events += 1
        event = EngineCoreEvent(
            sequence=self._num_events,
            kind=kind,
            step=step,
            mono=now,
            wall=time.time(),
            request_id=request_id,
            detail=detail,
            preemption=preemption,
            changes=changes or {},
        )
        self._events.append(event)
        return event

    def take_events(self) -> list[EngineCoreEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def take_samples(self) -> StepSamples:
        """The latencies since the last call."""
        samples, self.samples = self.samples, StepSamples()
        return samples

    def counters(self, cache_evictions: int | None = None) -> Counters:
        """The totals, frozen; `cache_evictions` is counted by the pool."""
        names = (name for name in Counters.__struct_fields__ if name != "cache_evictions")
        values = {name: getattr(self, name) for name in names} | {"cache_evictions": cache_evictions}
        values["accepted_at"] = list(self.accepted_at)
        return Counters(**{**values, "finished": {str(key): count for key, count in self.finished.items()}})
