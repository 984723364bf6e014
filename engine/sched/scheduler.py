"""The scheduler: who computes how many tokens in the next step, and what the step's result means.

A request has tokens (prompt + output) and tokens whose KV is computed. Each step closes that gap for as many requests
as fit: pass 1 serves running requests (`running.py`), pass 2 admits waiting ones (`waiting.py`); `update.py` takes the
result. There is no prefill phase and no decode phase.

Deterministic, torch-free, without I/O: time comes in as an argument. This file holds the state, and every change of a
request's state goes through one method here.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from schedtop.engine.config import EngineConfig
from schedtop.engine.encoder.schedule import encoder_for
from schedtop.engine.knobs import Knobs, initial_knobs
from schedtop.engine.kv.connector.base import KVConnector, NoConnector
from schedtop.engine.kv.manager import KVCacheManager
from schedtop.engine.lora.slots import AdapterSlots
from schedtop.engine.outputs import RequestOutput
from schedtop.engine.request import Request, State
from schedtop.engine.sched.compose import compose_output
from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.sched.planning import add_placeholders, limiting_cause, new_plan, note_stop, withdraw
from schedtop.engine.sched.queue import POLICIES, QueueKey, RequestQueue
from schedtop.engine.sched.running import schedule_running
from schedtop.engine.sched.stats import KnobChanges, SchedulerStats
from schedtop.engine.sched.stop import StopCondition, stop_conditions
from schedtop.engine.sched.transfers import take_transfers
from schedtop.engine.sched.update import take_result
from schedtop.engine.sched.victim import VICTIM_RULES, ChooseVictim
from schedtop.engine.sched.waiting import admit_waiting
from schedtop.engine.snapshot import (
    EventKind,
    FinishReason,
    PauseState,
    Preemption,
    WaitReason,
)

UNLIMITED = 1 << 60


class Scheduler:
    """Plans steps over the requests it holds. Not thread-safe: the core thread owns it.

    `clock` returns seconds; it is read once per step and per request that arrives. `victim_rules` and `policies` take
    the place of ours of the same name.
    """

    def __init__(
        self,
        config: EngineConfig,
        knobs: Knobs | None = None,
        *,
        clock: Callable[[], float],
        stop_conditions_extra: Sequence[StopCondition] = (),
        victim_rules: Mapping[str, ChooseVictim] | None = None,
        policies: Mapping[str, QueueKey] | None = None,
    ) -> None:
        self.config = config
        self.knobs = knobs or initial_knobs(config)
        self.clock = clock
        self.max_model_len = config.max_model_len or UNLIMITED
        self.kv = KVCacheManager(config, self.knobs)
        self.stop_conditions = stop_conditions(config, stop_conditions_extra)
        self._victim_rules = {str(name): rule for name, rule in VICTIM_RULES.items()} | dict(victim_rules or {})
        self._policies = {str(name): key for name, key in POLICIES.items()} | dict(policies or {})
        self.victim_rule = self._victim_rules[self.knobs.victim]

        self.requests: dict[str, Request] = {}
        """All live requests."""
        self.running: list[Request] = []
        """In admission order."""
        self.waiting = RequestQueue(self._policies[self.knobs.policy])
        """Ready to be admitted, in schedule order."""
        self.deferred = RequestQueue(self._policies[self.knobs.policy])
        """Waiting for something besides room; back in `waiting`, at their old place, when it is there."""
        self.deferred_by_reason: Counter[WaitReason] = Counter()
        self.preempted: dict[str, Request] = {}
        """Those among the waiting and deferred that have run before."""
        self.num_waiting_tokens = 0
        """Tokens of all requests that wait."""
        self.connector: KVConnector = NoConnector()
        self.defers_block_free = config.defers_block_free
        """On whenever something besides the ordered runner writes blocks, as a connector's loads do."""
        self.encoder = encoder_for(config)
        self.adapters = AdapterSlots(config.max_adapters)
        self.pause_state = PauseState.RUNNING
        self.in_flight: deque[StepPlan] = deque()
        """Planned steps whose result hasn't come yet, oldest first."""
        self.finished_ids: list[str] = []
        """Ended since the last plan: the runner is told with the next one."""
        self.ended: list[RequestOutput] = []
        """Ends that no step's result brought (aborts, capacity): the core hands them out and clears the list."""
        self.stats = SchedulerStats()
        self.last_plan: StepPlan | None = None
        self.step = 0
        """Number of the last planned step."""
        self._next_rank = 0
        self._front_rank = 0
        self.preempted_ids: list[str] = []
        """Preempted between steps (by an operator): reported first by the next plan."""

    # ---- the step -------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: pass 1, then pass 2 unless somebody was preempted or nobody is to be admitted."""
        self.step += 1
        self.kv.step = self.step
        plan = new_plan(self)
        self.encoder.begin_step()
        if self.pause_state is not PauseState.PAUSED_ALL:
            schedule_running(self, plan)
            if plan.preempted:
                note_stop(plan, WaitReason.PREEMPTION)
            else:
                admit_waiting(self, plan)
        plan.limited_by = limiting_cause(self, plan)
        if plan.is_async:
            add_placeholders(self, plan)
        plan.output = compose_output(self, plan)
        self.stats.count_plan(plan)
        self.in_flight.append(plan)
        self.last_plan = plan
        plan.schedule_s = self.clock() - plan.started_at
        return plan

    def update_from_output(self, plan: StepPlan, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Take the result of the oldest step in flight: append tokens, roll back rejected drafts, end what is done."""
        assert self.in_flight and self.in_flight[0] is plan, "results are taken in the order of the plans"
        self.in_flight.popleft()
        outputs = take_result(self, plan, result)
        take_transfers(self, result)
        self.kv.settle(plan.step)
        return outputs

    # ---- requests come and go -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Put a new request into the queue. Whether it can ever run has been checked at the door."""
        assert request.request_id not in self.requests
        request.max_total_tokens = min(request.max_total_tokens, self.max_model_len)
        self._next_rank += 1
        request.fcfs_rank = self._next_rank
        self.requests[request.request_id] = request
        self.num_waiting_tokens += request.num_tokens
        self.waiting.add(request)
        self.stats.count_arrival(request)
        self.emit(EventKind.QUEUED, request)

    def finish(self, request: Request, reason: FinishReason, detail: str = "") -> None:
        """End a live request, whatever its state: blocks freed, and the runner hears of it with the next plan."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._give_back_adapter(request)
        else:
            self.leave_queue(request)
        self.ended.append(RequestOutput(request.request_id, [], reason, detail))
        self.settle_end(request, reason, detail)

    def settle_end(self, request: Request, reason: FinishReason, detail: str = "") -> None:
        """The end of a request that is in no list any more."""
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finish_detail = detail
        if self.connector.request_finished(request, [block.block_id for block in request.blocks]):
            self.kv.hold_for_send(request)
        self.free(request)
        del self.requests[request.request_id]
        self.finished_ids.append(request.request_id)
        self.stats.finished[reason] += 1
        self.emit(EventKind.FINISHED, request, f"{reason}: {detail}" if detail else reason.value)

    def take_ended(self) -> list[RequestOutput]:
        """Ends that no step's result brought, each handed out once."""
        ended, self.ended = self.ended, []
        return ended

    def forget_ended(self) -> None:
        """Rebuild the list of running requests without those that a step's result has ended."""
        ended = [request for request in self.running if request.state is State.FINISHED]
        self.running[:] = [request for request in self.running if request.state is State.RUNNING]
        for request in ended:
            self._give_back_adapter(request)

    def _give_back_adapter(self, request: Request) -> None:
        self._try_slots_again(self.adapters.give_back(request))

    def _try_slots_again(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.defer_reason is WaitReason.ADAPTER_SLOTS:
                self.undefer(request)

    def start_running(self, request: Request, num_hit_tokens: int) -> None:
        """A request just admitted by pass 2 joins the running ones at the end."""
        kind = EventKind.RESUMED if request.was_admitted else EventKind.SCHEDULED
        self.stats.count_admission(request, num_hit_tokens, self.clock())
        request.was_admitted = True
        request.prefill_end = request.num_tokens
        request.state = State.RUNNING
        request.num_bypassed = 0
        self._try_slots_again(self.adapters.take(request))
        self.running.append(request)
        self.emit(kind, request)

    def preempt(self, victim: Request, beneficiary: Request | None = None, plan: StepPlan | None = None) -> None:
        """Throw a running request back to the queue: blocks freed, nothing computed, output kept.

        What the step being planned had given it goes back to the budget. A result still in flight will be delivered;
        until then it can't be admitted again.
        """
        if plan is not None:
            withdraw(self, victim, plan)
        num_lost, free_before = victim.num_computed_tokens, self.kv.pool.num_free
        num_blocks = self.free(victim)
        victim.num_computed_tokens = victim.num_external_tokens = 0
        victim.spec_token_ids = []
        victim.num_preemptions += 1
        victim.num_lost_tokens += num_lost
        victim.state = State.PREEMPTED
        self._front_rank -= 1
        victim.fcfs_rank = self._front_rank
        self.running.remove(victim)
        self._give_back_adapter(victim)
        self.num_waiting_tokens += victim.num_tokens
        self.preempted[victim.request_id] = victim
        self.waiting.add(victim)
        if self.has_result_to_come(victim):
            self.defer(victim, WaitReason.IN_FLIGHT)
        record = Preemption(
            step=self.step,
            mono=self.clock(),
            victim=victim.request_id,
            beneficiary=beneficiary.request_id if beneficiary else None,
            num_lost_tokens=num_lost,
            num_blocks_freed=num_blocks,
            free_blocks_before=free_before,
            free_blocks_after=self.kv.pool.num_free,
            num_preemptions=victim.num_preemptions,
        )
        if plan is not None:
            plan.preempted.append(victim)
            plan.preemptions.append(record)
        else:
            self.preempted_ids.append(victim.request_id)
        self.stats.count_preemption(record)
        self.emit(EventKind.PREEMPTED, victim, preemption=record)

    def has_result_to_come(self, request: Request) -> bool:
        """Whether a step in flight computes for this request and its result won't be dropped."""
        request_id = request.request_id
        return any(request_id in plan.num_scheduled_tokens and request_id not in plan.stale for plan in self.in_flight)

    def drop_in_flight(self, request: Request) -> None:
        """Discard every result of a preempted request that is still to come: its tokens will be sampled again."""
        for plan in self.in_flight:
            if request.request_id in plan.num_scheduled_tokens:
                plan.stale.add(request.request_id)
        request.num_output_placeholders = 0
        if request.defer_reason is WaitReason.IN_FLIGHT:
            self.undefer(request)

    def restart_all_in(self, plan: StepPlan) -> None:
        """The result of a step in flight won't be used: its requests go back to the queue, last one first."""
        for request in reversed(plan.requests):
            if request.is_finished or request.request_id in plan.stale:
                continue
            if request.state is State.RUNNING:
                self.preempt(request)
            self.drop_in_flight(request)

    def drop_plan(self, plan: StepPlan, result: ModelRunnerOutput | None = None) -> None:
        """Forget a step in flight that broke, or was planned over one that did: the cache must hold nothing of it.

        Its requests are the caller's to end or to restart. Others that already built on its blocks start again.
        Transfers that `result` reports have ended all the same.
        """
        self.in_flight.remove(plan)
        if result is not None:
            take_transfers(self, result)
        elif plan.output is not None:  # the runner may not have heard who ended: tell it again
            gone = [request_id for request_id in plan.output.finished_req_ids if request_id not in self.requests]
            self.finished_ids[:0] = gone
        worthless = self.kv.forget_unsettled(plan.step)
        readers = self.encoder.forget([item for items in plan.encoder_inputs.values() for item in items])
        for request in list(self.requests.values()):
            if worthless.isdisjoint(request.blocks) and request.request_id not in readers:
                continue
            if request.state is not State.RUNNING:
                self.lose_loaded(request)
            elif request.request_id not in plan.num_scheduled_tokens:
                self.preempt(request)
                self.drop_in_flight(request)
        self.kv.settle(plan.step)

    def free(self, request: Request) -> int:
        """Give a request's blocks and encoder entries back; returns the number of blocks."""
        until = None
        if self.defers_block_free and self.in_flight and request.planned_in >= self.in_flight[0].step:
            until = request.planned_in
        self.encoder.release_all(request)
        return self.kv.free(request, until)

    # ---- the queue ------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """All that wait, deferred ones included."""
        return len(self.waiting) + len(self.deferred)

    @property
    def admits_new(self) -> bool:
        """Whether pass 2 may admit requests that never ran."""
        return self.pause_state is PauseState.RUNNING

    def preempted_waiting(self) -> list[Request]:
        """Preempted requests that are ready to run again."""
        if not self.config.readmits_when_paused:
            return []
        return [request for request in self.preempted.values() if request.defer_reason is None]

    def leave_queue(self, request: Request) -> None:
        """Take a waiting or deferred request out of where it waits."""
        if request.defer_reason is not None:
            self._forget_deferral(request)
        else:
            self.waiting.remove(request)
        self.preempted.pop(request.request_id, None)
        self._try_slots_again(self.adapters.forget(request))
        self.num_waiting_tokens -= request.num_tokens

    def defer(self, request: Request, reason: WaitReason) -> None:
        """Take a waiting request out of the queue until `undefer`; it holds up nobody meanwhile."""
        if request.defer_reason is not None:
            self._forget_deferral(request)
        else:
            self.waiting.remove(request)
        request.defer_reason = reason
        self.deferred.add(request)
        self.deferred_by_reason[reason] += 1
        if request.state is State.WAITING:
            request.state = State.DEFERRED

    def undefer(self, request: Request) -> None:
        """What a deferred request waited for is there: back to its old place in the queue, unless it is held."""
        self._forget_deferral(request)
        self.waiting.add(request)
        if request.is_held:
            self._set_aside(request)

    def _set_aside(self, request: Request) -> None:
        """A held request waits without blocks: nothing that runs may have to wait for what an operator holds."""
        if request.is_loaded:
            self.lose_loaded(request)
        self.defer(request, WaitReason.HELD)

    def lose_loaded(self, request: Request) -> None:
        """Take its loaded KV from a request that waits; its place in the queue changes with it."""
        queue = self.waiting if request.defer_reason is None else self.deferred
        queue.remove(request)
        request.is_loaded = False
        request.num_computed_tokens = request.num_external_tokens = 0
        self.free(request)
        queue.add(request)

    def hold(self, request: Request) -> bool:
        """Keep a request from being scheduled until `release`, preempting it first; False if it was held already."""
        if request.is_held:
            return False
        request.is_held = True
        if request.state is State.RUNNING:
            self.preempt(request)
        if request.defer_reason in (None, WaitReason.ADAPTER_SLOTS):
            self._set_aside(request)
            self._try_slots_again(self.adapters.forget(request))
        return True

    def release(self, request: Request) -> bool:
        """Undo `hold`; False if it wasn't held."""
        if not request.is_held:
            return False
        request.is_held = False
        if request.defer_reason is WaitReason.HELD:
            self.undefer(request)
        return True

    def _forget_deferral(self, request: Request) -> None:
        assert request.defer_reason is not None
        self.deferred.remove(request)
        self.deferred_by_reason[request.defer_reason] -= 1
        request.defer_reason = None
        if request.state is State.DEFERRED:
            request.state = State.WAITING

    # ---- what operators turn --------------------------------------------------------------------------------

    def apply_knobs(self, knobs: Knobs) -> None:
        """Replace the knobs whole, at a step boundary."""
        old, self.knobs = self.knobs, knobs
        self.kv.apply(knobs)
        self.victim_rule = self._victim_rules[knobs.victim]
        if knobs.policy is not old.policy:
            self.waiting.reorder(self._policies[knobs.policy])
            self.deferred.reorder(self._policies[knobs.policy])

    def set_pause(self, state: PauseState) -> None:
        """Pause or go on."""
        self.pause_state = state

    def connect(self, connector: KVConnector) -> None:
        """Use a KV connector from now on; no request has been added yet."""
        assert not self.requests
        self.connector = connector
        self.stats.has_connector = True
        self.defers_block_free = True

    def set_priority(self, request: Request, priority: int) -> None:
        """Give a live request a new priority and its place in the queue."""
        if request.state is State.RUNNING:
            request.priority = priority
            return
        queue = self.waiting if request.defer_reason is None else self.deferred
        queue.remove(request)
        request.priority = priority
        queue.add(request)

    def set_max_tokens(self, request: Request, max_tokens: int) -> None:
        """Change where a live request ends by length."""
        request.max_total_tokens = min(request.num_prompt_tokens + max_tokens, self.max_model_len)

    # ---- questions ------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether a step now could do something: run, admit, or tell the runner who ended."""
        if self.finished_ids:
            return True
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        if self.running:
            return True
        return bool(self.waiting) if self.admits_new else bool(self.preempted_waiting())

    def emit(
        self,
        kind: EventKind,
        request: Request | None = None,
        detail: str = "",
        preemption: Preemption | None = None,
        changes: KnobChanges | None = None,
    ) -> None:
        """Record an event, for the event stream and for the request's own lifeline."""
        request_id = request.request_id if request else None
        event = self.stats.event(kind, self.step, self.clock(), request_id, detail, preemption, changes)
        if request is not None:
            request.events.append(event)
