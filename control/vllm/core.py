"""vLLM's scheduler with the methods of our `EngineCore`: what operators' commands act on inside a vLLM process.

All methods are for vLLM's engine thread, between steps. Each clamps to what was allocated at start before anything is
applied; which attribute carries which knob is in `guard.py`.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from vllm.v1.core.sched.interface import PauseState as VllmPause
from vllm.v1.core.sched.request_queue import SchedulingPolicy as VllmPolicy
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import RequestStatus as VllmStatus

from schedtop.control.vllm.rows import (
    in_schedule_order,
    kv_map,
    num_aside,
    num_waiting,
    pool_usage,
    queues,
    request_row,
    row_status,
    unordered,
    waiting_by_reason,
)
from schedtop.control.vllm.watch import Books
from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import (
    KNOB_NAMES,
    Knobs,
    KnobSpec,
    KnobValue,
    SchedulingPolicy,
    change_knobs,
    check_generation,
)
from schedtop.engine.outputs import EngineCoreOutputs, KnobChange, RequestOutput, Touched
from schedtop.engine.selection import check_max_tokens, select, touch
from schedtop.engine.sim.state import ArrivalSample, EndSample, EngineState, RequestState
from schedtop.engine.snapshot import (
    EventKind,
    FinishReason,
    PauseState,
    RequestDetail,
    RequestRow,
    Snapshot,
    StepRecord,
    Viewport,
)

NUM_PREEMPTIONS_SHOWN = 50
_PAUSES = {
    VllmPause.UNPAUSED: PauseState.RUNNING,
    VllmPause.PAUSED_NEW: PauseState.PAUSED_NEW,
    VllmPause.PAUSED_ALL: PauseState.PAUSED_ALL,
}


class VllmCore:
    """One vLLM scheduler. `books` are kept by the plugin's hooks."""

    def __init__(self, scheduler: Any, books: Books, config: EngineConfig, knob_table: tuple[KnobSpec, ...]) -> None:
        self.books = books
        self.config = config
        self.knob_table = knob_table
        self.generation = 0
        self.records: list[StepRecord] = []
        self.held: set[str] = set()
        """Requests an operator keeps from being scheduled."""
        self.aborted: list[Any] = []
        """Requests aborted here: their clients must be told with the next result."""
        self.is_draining = False
        """Admit nobody new, but let preempted requests run to their end, which vLLM's own pause doesn't."""
        self._scheduler = scheduler
        self._ended: list[RequestOutput] = []

    @property
    def next_step(self) -> int:
        """Number of the next step to be planned."""
        return self.books.step + 1

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Events since the last call."""
        ended, self._ended = self._ended, []
        events = self.books.stats.take_events()
        return EngineCoreOutputs(self.books.step, ended, events) if ended or events else None

    # ---- requests -------------------------------------------------------------------------------------------

    def match(
        self,
        ids: Sequence[str] = (),
        id_prefix: str | None = None,
        priority_at_least: int | None = None,
        priority_at_most: int | None = None,
        status: str | None = None,
    ) -> list[str]:
        """Ids for which all conditions given hold; `ids` alone keeps those that aren't live."""
        return select(
            self._scheduler.requests,
            lambda request: row_status(request, self.held),
            ids,
            id_prefix,
            priority_at_least,
            priority_at_most,
            status,
        )

    def abort(self, ids: Sequence[str], detail: str = "", reason: FinishReason = FinishReason.ABORT) -> Touched:
        """End requests; their clients hear of it with the next result."""
        return self._touch(ids, lambda request: self._abort(request, reason))

    def _abort(self, request: Any, reason: FinishReason) -> bool:
        is_stop = reason is FinishReason.STOP
        status = VllmStatus.FINISHED_STOPPED if is_stop else VllmStatus.FINISHED_ABORTED
        self.aborted += self._scheduler.finish_requests(request.request_id, status)
        self.held.discard(request.request_id)
        self._ended.append(RequestOutput(request.request_id, [], reason))
        return True

    def set_priority(self, ids: Sequence[str], priority: int) -> Touched:
        """Give requests a new priority; under policy fcfs it has no effect on the order."""
        return self._touch(ids, lambda request: self._set_priority(request, priority))

    def _set_priority(self, request: Any, priority: int) -> bool:
        before = request.priority
        if before == priority:
            return False
        request.priority = priority
        for queue in queues(self._scheduler):
            if (heap := getattr(queue, "_heap", None)) is not None:
                heapq.heapify(heap)
        self.books.note(EventKind.PRIORITY_CHANGED, request.request_id, f"{before} -> {priority}")
        return True

    def preempt(self, ids: Sequence[str]) -> Touched:
        """Throw running requests back to the queue; outputs stay the same."""
        return self._touch(ids, self._preempt)

    def _preempt(self, request: Any) -> bool:
        scheduler = self._scheduler
        if request.status != VllmStatus.RUNNING:
            return False
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return True

    def hold(self, ids: Sequence[str]) -> Touched:
        """Keep requests from being scheduled; running ones are preempted first."""
        return self._touch(ids, self._hold)

    def _hold(self, request: Any) -> bool:
        if request.request_id in self.held:
            return False
        self._preempt(request)
        self.held.add(request.request_id)
        return True

    def release(self, ids: Sequence[str]) -> Touched:
        """Undo `hold`."""
        return self._touch(ids, self._release)

    def _release(self, request: Any) -> bool:
        if request.request_id not in self.held:
            return False
        self.held.remove(request.request_id)
        return True

    def set_max_tokens(self, ids: Sequence[str], max_tokens: int) -> Touched:
        """Change how many tokens requests may generate; refused below what one has generated, then for none."""
        live = self._scheduler.requests
        check_max_tokens((live[request_id] for request_id in ids if request_id in live), max_tokens)
        return self._touch(ids, lambda request: self._set_max_tokens(request, max_tokens))

    def _set_max_tokens(self, request: Any, max_tokens: int) -> bool:
        before, request.max_tokens = request.max_tokens, max_tokens
        return bool(before != max_tokens)

    def _touch(self, ids: Sequence[str], act: Callable[[Any], bool]) -> Touched:
        return touch(ids, self._live, lambda request: row_status(request, self.held), act)

    def _live(self, request_id: str) -> Any:
        request = self._scheduler.requests.get(request_id)
        return None if request is None or request.is_finished() else request

    # ---- knobs ----------------------------------------------------------------------------------------------

    @property
    def knobs(self) -> Knobs:
        """Our knobs, read from vLLM's attributes; what vLLM doesn't have stands at our default."""
        scheduler, settings = self._scheduler, self._scheduler.scheduler_config
        read: dict[str, Callable[[], Any]] = {
            "max_num_batched_tokens": lambda: scheduler.max_num_scheduled_tokens,
            "max_num_seqs": lambda: scheduler.max_num_active_reqs,
            "long_prefill_token_threshold": lambda: settings.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": lambda: scheduler.adaptive_long_prefill_threshold,
            "watermark": self._watermark,
            "reserve_full_prompt": lambda: scheduler.scheduler_reserve_full_isl,
            "policy": lambda: SchedulingPolicy(scheduler.policy.value),
        }
        return Knobs(
            **{spec.name: read[spec.name]() for spec in self.knob_table},
            enable_chunked_prefill=bool(getattr(settings, "enable_chunked_prefill", True)),
            prefix_caching=bool(getattr(scheduler.kv_cache_manager, "enable_caching", True)),
            async_scheduling=bool(getattr(settings, "async_scheduling", False)),
        )

    @property
    def budget(self) -> int:
        """Tokens that a step may compute."""
        return int(getattr(self._scheduler, "max_num_scheduled_tokens", self.config.max_num_batched_tokens))

    @property
    def sequence_cap(self) -> int:
        """How many requests may run."""
        return int(getattr(self._scheduler, "max_num_active_reqs", self.config.max_num_seqs))

    def _watermark(self) -> float:
        blocks = self._scheduler.kv_cache_manager.watermark_blocks
        return float(min(0.9, blocks / max(1, self.config.num_kv_blocks)))

    def set_knobs(
        self, changes: Mapping[str, KnobValue], expect_generation: int | None = None, dry_run: bool = False
    ) -> KnobChange:
        """Check against the ceilings read at start, then apply; all or none."""
        check_generation(expect_generation, self.generation)
        old = self.knobs
        new = change_knobs(old, changes, self.knob_table)
        names = [name for name in KNOB_NAMES if name in changes]
        is_change = any(getattr(new, name) != getattr(old, name) for name in names)
        before = {name: getattr(old, name) for name in names}
        after = {name: getattr(new, name) for name in names}
        if is_change and not dry_run:
            self.generation += 1
            for name in names:
                self._apply(name, after[name])
            self.books.note(EventKind.KNOBS_CHANGED, changes={name: (before[name], after[name]) for name in names})
        generation = self.generation + (is_change and dry_run)
        return KnobChange(generation=generation, before=before, after=after)

    def _apply(self, name: str, value: Any) -> None:
        scheduler = self._scheduler
        match name:
            case "max_num_batched_tokens":
                scheduler.max_num_scheduled_tokens = value
            case "max_num_seqs":
                scheduler.max_num_active_reqs = value
            case "long_prefill_token_threshold":
                scheduler.scheduler_config.long_prefill_token_threshold = value
            case "long_prefill_token_threshold_adaptive":
                scheduler.adaptive_long_prefill_threshold = value
            case "watermark":
                scheduler.kv_cache_manager.watermark_blocks = int(value * self.config.num_kv_blocks)
            case "reserve_full_prompt":
                scheduler.scheduler_reserve_full_isl = value
            case "policy":
                self._set_policy(VllmPolicy(value.value))

    def _set_policy(self, policy: VllmPolicy) -> None:
        """Rebuild both queues in the new order; preempted requests stay in front under fcfs."""
        scheduler = self._scheduler
        for name in ("waiting", "kv_holding_waiting"):
            requests = list(unordered(getattr(scheduler, name)))
            if policy == VllmPolicy.FCFS:
                requests.sort(key=lambda request: (request.status != VllmStatus.PREEMPTED, request.arrival_time))
            queue = create_request_queue(policy)
            for request in requests:
                queue.add_request(request)
            setattr(scheduler, name, queue)
        scheduler.policy = policy

    # ---- pause, drain, cache --------------------------------------------------------------------------------

    @property
    def pause_state(self) -> PauseState:
        """Whether, and how, vLLM is paused."""
        if self.is_draining:
            return PauseState.PAUSED_NEW
        state = getattr(self._scheduler, "pause_state", VllmPause.UNPAUSED)
        return PauseState.RUNNING if state is VllmPause.UNPAUSED else _PAUSES[state]

    def pause(self, mode: Literal["abort", "wait", "keep"]) -> PauseState:
        """Pause; returns the state found. `wait` is our own: vLLM's would leave preempted requests stuck."""
        found = self.pause_state
        self.is_draining = mode != "keep"
        self._scheduler.set_pause_state(VllmPause.PAUSED_ALL if mode == "keep" else VllmPause.UNPAUSED)
        if mode == "abort":
            self.abort(list(self._scheduler.requests), "paused with mode abort")
        if self.pause_state is not found:
            self.books.note(EventKind.PAUSED, detail=mode)
        return found

    def resume(self) -> PauseState:
        """Go on; returns the state found."""
        found = self.pause_state
        self.is_draining = False
        self._scheduler.set_pause_state(VllmPause.UNPAUSED)
        if found is not PauseState.RUNNING:
            self.books.note(EventKind.UNPAUSED)
        return found

    def start_drain(self) -> int:
        """Admit nobody new; returns the number of requests under way."""
        self.pause("wait")
        return self.num_draining

    @property
    def num_draining(self) -> int:
        """Requests that have started and not ended."""
        live = self._scheduler.requests.values()
        return sum(request.status in (VllmStatus.RUNNING, VllmStatus.PREEMPTED) for request in live)

    def is_only_kept_back(self) -> bool:
        """Whether an operator keeps from running all there is to do: then there is no reason to spin."""
        scheduler = self._scheduler
        if self.aborted or scheduler.running or not (self.held or self.is_draining):
            return False
        return not any(self.admits(request) for queue in queues(scheduler) for request in unordered(queue))

    def admits(self, request: Any) -> bool:
        """Whether an operator lets a waiting request be scheduled."""
        if not (self.held or self.is_draining):
            return True
        if request.request_id in self.held:
            return False
        return not self.is_draining or request.status == VllmStatus.PREEMPTED or bool(request.num_preemptions)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget cached prefixes; False when blocks in use prevented it."""
        try:
            done = bool(self._scheduler.reset_prefix_cache(reset_running_requests=preempt_running))
        except RuntimeError:
            return False
        if done:
            self.books.note(EventKind.CACHE_RESET)
        return done

    # ---- questions ------------------------------------------------------------------------------------------

    def self_check(self) -> list[str]:
        """What can be checked from outside: counts against lists."""
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        in_use = sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)
        free = pool.get_num_free_blocks()
        faults = []
        if in_use + free != self.config.num_usable_blocks:
            faults.append(f"{in_use} blocks in use and {free} free don't make {self.config.num_usable_blocks}")
        if not scheduler.running and not scheduler.requests and in_use:
            faults.append(f"no request is live, but {in_use} blocks are in use")
        return faults

    def snapshot(self, viewport: Viewport) -> Snapshot:
        """vLLM as it stands at this boundary, cut to `viewport`."""
        scheduler, books = self._scheduler, self.books
        running = self._rows(
            iter(scheduler.running), viewport, viewport.running_offset, viewport.running_rows, is_waiting=False
        )
        waiting = self._rows(self._waiting(), viewport, viewport.waiting_offset, viewport.waiting_rows, is_waiting=True)
        last = self.records[-1] if self.records else None
        request = scheduler.requests.get(viewport.detail) if viewport.detail else None
        return Snapshot(
            step=books.step,
            mono=time.monotonic(),
            wall=time.time(),
            generation=self.generation,
            knobs=self.knobs,
            pause=self.pause_state,
            num_running=len(scheduler.running),
            num_waiting=num_waiting(scheduler),
            num_deferred=num_aside(scheduler),
            waiting_by_reason=waiting_by_reason(scheduler, self.held, self.pause_state, books.last_limit),
            pool=pool_usage(scheduler, self.config),
            running=running,
            waiting=waiting,
            num_running_matched=len(scheduler.running),
            num_waiting_matched=num_waiting(scheduler),
            last_step=last,
            counters=books.stats.counters(),
            recent_preemptions=list(books.stats.recent_preemptions)[-NUM_PREEMPTIONS_SHOWN:],
            last_step_mono=last.mono if last else None,
            kv_map=kv_map(scheduler, viewport.kv_cells, request) if viewport.kv_cells else None,
            detail=self._detail(request) if request is not None else None,
        )

    def _waiting(self) -> Iterator[Any]:
        for queue in queues(self._scheduler):
            yield from in_schedule_order(queue)

    def _rows(
        self, requests: Iterator[Any], view: Viewport, offset: int, count: int, is_waiting: bool
    ) -> list[RequestRow]:
        text, inverted = view.id_contains.removeprefix("!"), view.id_contains.startswith("!")
        numbered = enumerate(requests)
        if text:
            numbered = ((place, r) for place, r in numbered if (text in r.request_id) != inverted)  # type: ignore[assignment]
        return [
            self._row(request, place if is_waiting else None)
            for place, request in islice(numbered, offset, offset + count)
        ]

    def _row(self, request: Any, position: int | None) -> RequestRow:
        watched = self.books.requests.get(request.request_id)
        return request_row(self._scheduler, request, watched, self.held, self.books, position, self.pause_state)

    def _detail(self, request: Any) -> RequestDetail:
        block_ids = self._scheduler.kv_cache_manager.get_blocks(request.request_id).get_block_ids()[0]
        return RequestDetail(
            request_id=request.request_id,
            row=self._row(request, None),
            block_ids=list(block_ids),
            events=[],
            output_token_ids=list(request.output_token_ids),
        )

    def recent_steps(self, count: int) -> list[StepRecord]:
        """The newest `count` step records, oldest first."""
        return self.records[-count:] if count > 0 else []

    def state(self) -> EngineState:
        """What a forecast starts from; shared prefixes aren't told apart here."""
        stats = self.books.stats
        requests = [*self._scheduler.running, *self._waiting()]
        return EngineState(
            mono=time.monotonic(),
            step=self.books.step,
            config=self.config,
            knobs=self.knobs,
            pause=self.pause_state,
            requests=[self._request_state(request) for request in requests],
            arrivals=[ArrivalSample(*sample) for sample in stats.recent_arrivals],
            ends=[EndSample(*sample) for sample in stats.recent_ends],
        )

    def _request_state(self, request: Any) -> RequestState:
        watched = self.books.requests.get(request.request_id)
        return RequestState(
            request_id=request.request_id,
            is_running=request.status == VllmStatus.RUNNING,
            was_admitted=watched is not None and watched.was_admitted,
            is_held=request.request_id in self.held,
            priority=request.priority,
            arrived=watched.arrived if watched else 0.0,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            max_output_tokens=request.max_tokens,
            num_computed_tokens=request.num_computed_tokens - request.num_output_placeholders,
            contents=[],
            num_preemptions=request.num_preemptions,
        )
