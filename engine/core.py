"""EngineCore: boundary calls in, one step, snapshot out. The core thread is the only one that touches it.

It ties a scheduler to a runner and keeps the books that watchers ask for. Rules of scheduling are not here
(`sched/`), nor threads (`loop.py`), nor anything about who calls.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Literal

from schedtop.engine.config import EngineConfig
from schedtop.engine.door import check_at_the_door, check_media
from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KNOB_NAMES, Knobs, KnobSpec, KnobValue, change_knobs, check_generation, knob_table
from schedtop.engine.outputs import EngineCoreOutputs, KnobChange, Touched
from schedtop.engine.publish import build_snapshot, step_record
from schedtop.engine.request import Request, State
from schedtop.engine.runner.base import ModelRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.check import find_faults
from schedtop.engine.sched.explain import status_of
from schedtop.engine.sched.interface import SchedulerInterface
from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.selection import check_max_tokens, select, touch
from schedtop.engine.sim.state import EngineState, capture
from schedtop.engine.snapshot import (
    EventKind,
    FinishReason,
    PauseState,
    Snapshot,
    StepRecord,
    Viewport,
)
from schedtop.engine.structured.backend import GrammarBackend
from schedtop.engine.structured.requests import grammars_for

NUM_STEPS_KEPT = 4096
"""Step records in memory: the flight recorder's ring."""


class EngineCore:
    """The engine: a scheduler, a runner and the books. All methods are for the core thread (see `loop.py`).

    `eos_token_ids` end every request that doesn't ignore them; `vocab_size` bounds prompt tokens (None = unchecked).
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        knobs: Knobs | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        scheduler: SchedulerInterface | None = None,
        grammar_backend: GrammarBackend | None = None,
        grammar_executor: Executor | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.scheduler: SchedulerInterface = scheduler or Scheduler(config, knobs, clock=clock)
        self.knob_table: tuple[KnobSpec, ...] = knob_table(config)
        self.generation = 0
        """Number of knob changes so far."""
        self._runner = runner
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._grammars = grammars_for(grammar_backend, self.scheduler, self.post, grammar_executor)
        self.on_mail: Callable[[], None] = lambda: None
        """Called, from any thread, when `post` left something to do: wakes a sleeping core thread."""
        self._mail: deque[Callable[[], None]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._in_flight: deque[tuple[StepPlan, Future[tuple[ModelRunnerOutput, float]]]] = deque()
        self._records: deque[StepRecord] = deque(maxlen=NUM_STEPS_KEPT)
        self._is_stuck = False
        """The last plan gave nobody anything: only a boundary call can change that, so don't spin."""

    # ---- the step -------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do something."""
        return bool(self._in_flight or self._mail or self.seconds_to_deadline == 0.0) or (
            self.scheduler.has_unfinished and not self._is_stuck
        )

    @property
    def next_step(self) -> int:
        """Number of the next step to be planned."""
        return self.scheduler.step + 1

    def step(self) -> EngineCoreOutputs | None:
        """Plan (with async scheduling: ahead), run, and take the result of the oldest step in flight."""
        self._read_mail()
        depth = self.config.async_depth if self.scheduler.knobs.async_scheduling else 1
        while len(self._in_flight) < depth and self.scheduler.has_unfinished and not self._is_stuck:
            plan = self.scheduler.schedule()
            self._is_stuck = not plan.requests and not plan.preempted
            self._launch(plan, ahead=depth > 1)
        if not self._in_flight:
            return self.take_outputs()
        return self._take_oldest()

    def _launch(self, plan: StepPlan, ahead: bool) -> None:
        """Hand a plan to the runner: to the executor thread when the next step is planned meanwhile."""
        if ahead:
            self._in_flight.append((plan, self._executor.submit(self._forward, plan)))
            return
        done: Future[tuple[ModelRunnerOutput, float]] = Future()
        try:
            done.set_result(self._forward(plan))
        except Exception as error:
            done.set_exception(error)
        self._in_flight.append((plan, done))

    def _forward(self, plan: StepPlan) -> tuple[ModelRunnerOutput, float]:
        assert plan.output is not None
        start = self.clock()
        result = self._runner.execute_model(plan.output)
        return result, self.clock() - start

    def _take_oldest(self) -> EngineCoreOutputs | None:
        plan, future = self._in_flight.popleft()
        try:
            result, forward_s = future.result()
        except Exception as error:
            self._fail(plan, error)
            return self.take_outputs()
        start = self.clock()
        outputs = self.scheduler.update_from_output(plan, result)
        taken = self.take_outputs() or EngineCoreOutputs(plan.step)
        taken.step = plan.step
        taken.outputs = outputs + taken.outputs
        if plan.requests or plan.preempted:
            self._is_stuck = False
            taken.record = step_record(self.scheduler, plan, outputs, forward_s, self.clock() - start)
            self._records.append(taken.record)
        return taken

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """The runner broke: the requests that counted on that step end with the error.

        What was planned over it meanwhile can't be trusted: the others in it start again, and lose nothing but time.
        """
        detail = f"step {plan.step} failed: {type(error).__name__}: {error}"
        self.scheduler.drop_plan(plan)
        self._is_stuck = False  # what these requests held may be what others wait for
        for request in plan.requests:
            if not request.is_finished and request.request_id not in plan.stale:
                self.scheduler.finish(request, FinishReason.ERROR, detail)
        while self._in_flight:
            later, future = self._in_flight.popleft()
            result = future.result()[0] if future.exception() is None else None
            self.scheduler.restart_all_in(later)
            self.scheduler.drop_plan(later, result)

    def take_outputs(self) -> EngineCoreOutputs | None:
        """What boundary calls produced since the last step (ends of aborted requests, events); None if nothing."""
        ended = self.scheduler.take_ended()
        events = self.scheduler.stats.take_events()
        if not ended and not events:
            return None
        return EngineCoreOutputs(self.scheduler.step, ended, events)

    def shutdown(self) -> None:
        """Wait for what is in flight and release the runner."""
        self._executor.shutdown(wait=True)
        self._grammars.shutdown()
        self._runner.shutdown()

    # ---- what background work brings ------------------------------------------------------------------------

    def post(self, operation: Callable[[], None]) -> None:
        """Have something done at the next boundary. The one method for other threads."""
        self._mail.append(operation)
        self.on_mail()

    @property
    def seconds_to_deadline(self) -> float | None:
        """When an idle engine has to look after something by itself: 0 = now, None = never."""
        deadline = self._grammars.next_deadline()
        return None if deadline is None else max(0.0, deadline - self.clock())

    def _read_mail(self) -> None:
        while self._mail:
            self._mail.popleft()()
            self._is_stuck = False
        self._grammars.expire(self.clock())

    # ---- requests -------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
        media: Sequence[MediaItem] = (),
        arrived: float | None = None,
    ) -> None:
        """Queue a request. Raises `RequestRefused` (never fits, bad settings, id in use) or `QueueFull`.

        `arrived` (engine clock, seconds) is now unless the caller knows better.
        """
        try:
            self._grammars.check(sampling)
            check_at_the_door(self.scheduler, request_id, prompt_token_ids, sampling, adapter, self._vocab_size)
            check_media(self.scheduler, media, len(prompt_token_ids))
        except SchedtopError as error:
            self.scheduler.stats.refused += 1
            self.scheduler.emit(EventKind.REFUSED, detail=f"{request_id}: {error}")
            raise
        now = self.clock()
        request = Request(
            request_id,
            prompt_token_ids,
            sampling,
            priority=priority,
            arrival_time=now if arrived is None else arrived,
            eos_token_ids=self._eos_token_ids,
            adapter=adapter,
            cache_salt=cache_salt,
            media=media,
        )
        self.scheduler.add_request(request)
        self._grammars.start(request, now)
        self._is_stuck = False

    def match(
        self,
        ids: Sequence[str] = (),
        id_prefix: str | None = None,
        priority_at_least: int | None = None,
        priority_at_most: int | None = None,
        status: str | None = None,
    ) -> list[str]:
        """Ids for which all conditions given hold; `ids` alone keeps their order and those that aren't live."""
        return select(self.scheduler.requests, status_of, ids, id_prefix, priority_at_least, priority_at_most, status)

    def abort(self, ids: Sequence[str], detail: str = "", reason: FinishReason = FinishReason.ABORT) -> Touched:
        """End requests; their ends come out of `take_outputs`. `reason` stop: the front end found a stop string."""
        return self._touch(ids, lambda request: self._abort(request, detail, reason))

    def _abort(self, request: Request, detail: str, reason: FinishReason) -> bool:
        self.scheduler.finish(request, reason, detail)
        self._grammars.forget(request.request_id)
        return True

    def set_priority(self, ids: Sequence[str], priority: int) -> Touched:
        """Give requests a new priority and re-order the queue."""
        return self._touch(ids, lambda request: self._set_priority(request, priority))

    def _set_priority(self, request: Request, priority: int) -> bool:
        before = request.priority
        if before == priority:
            return False
        self.scheduler.set_priority(request, priority)
        self.scheduler.emit(EventKind.PRIORITY_CHANGED, request, f"{before} -> {priority}")
        return True

    def preempt(self, ids: Sequence[str]) -> Touched:
        """Throw running requests back to the queue."""
        return self._touch(ids, self._preempt)

    def _preempt(self, request: Request) -> bool:
        if request.state is not State.RUNNING:
            return False
        self.scheduler.preempt(request)
        return True

    def hold(self, ids: Sequence[str]) -> Touched:
        """Keep requests from being scheduled; running ones are preempted first."""
        return self._touch(ids, self.scheduler.hold)

    def release(self, ids: Sequence[str]) -> Touched:
        """Undo `hold`."""
        return self._touch(ids, self.scheduler.release)

    def set_max_tokens(self, ids: Sequence[str], max_tokens: int) -> Touched:
        """Change how many tokens requests may generate; refused below what one has generated, then for none."""
        live = self.scheduler.requests
        check_max_tokens((live[request_id] for request_id in ids if request_id in live), max_tokens)
        return self._touch(ids, lambda request: self._set_max_tokens(request, max_tokens))

    def _set_max_tokens(self, request: Request, max_tokens: int) -> bool:
        before = request.max_total_tokens
        self.scheduler.set_max_tokens(request, max_tokens)
        return request.max_total_tokens != before

    def _touch(self, ids: Sequence[str], act: Callable[[Request], bool]) -> Touched:
        touched = touch(ids, self.scheduler.requests.get, status_of, act)
        self._is_stuck = False
        return touched

    # ---- knobs, pause, cache --------------------------------------------------------------------------------

    def set_knobs(
        self, changes: Mapping[str, KnobValue], expect_generation: int | None = None, dry_run: bool = False
    ) -> KnobChange:
        """Check and replace the knobs, all or none. Raises `KnobRefused` or `Conflict`."""
        check_generation(expect_generation, self.generation)
        old = self.scheduler.knobs
        new = change_knobs(old, changes, self.knob_table)
        names = [name for name in KNOB_NAMES if name in changes]
        change = KnobChange(
            generation=self.generation + (not dry_run and new != old),
            before={name: getattr(old, name) for name in names},
            after={name: getattr(new, name) for name in names},
            warnings=self._warnings(new),
        )
        if not dry_run and new != old:
            self.generation += 1
            self.scheduler.apply_knobs(new)
            self.scheduler.emit(
                EventKind.KNOBS_CHANGED,
                changes={name: (change.before[name], change.after[name]) for name in names},
            )
            self._is_stuck = False
        return change

    def _warnings(self, knobs: Knobs) -> list[str]:
        num_running = len(self.scheduler.running)
        warnings = []
        if knobs.max_num_batched_tokens < num_running:
            warnings.append(
                f"max_num_batched_tokens={knobs.max_num_batched_tokens} is below the {num_running} running requests: "
                "the newest ones get no token"
            )
        if knobs.max_num_seqs < num_running:
            warnings.append(f"{num_running} requests are running: nobody is admitted until it is under the new cap")
        return warnings + self._stranded(knobs)

    def _stranded(self, knobs: Knobs) -> list[str]:
        """Requests that could run before and can't under these knobs, however long they wait."""
        live, kv = self.scheduler.requests.values(), self.scheduler.kv
        limit, budget = knobs.kv_block_limit, knobs.max_num_batched_tokens
        too_big = sum(kv.blocks_for(request.num_tokens) > limit for request in live) if limit else 0
        too_long = 0
        if not knobs.enable_chunked_prefill:
            too_long = sum(r.state is not State.RUNNING and r.num_tokens > budget for r in live)
        warnings = []
        if too_big:
            warnings.append(
                f"{too_big} requests need more than kv_block_limit={limit} blocks: they wait until it is raised"
            )
        if too_long:
            warnings.append(
                f"{too_long} waiting prompts are longer than max_num_batched_tokens={budget} and may not be split "
                "(enable_chunked_prefill is off): they wait until one of the two is changed"
            )
        return warnings

    def pause(self, mode: Literal["abort", "wait", "keep"]) -> PauseState:
        """Pause; returns the state found.

        abort: end everything, then admit nobody. wait: admit nobody new; running and preempted requests end normally.
        keep: freeze everything as it is.
        """
        found = self.scheduler.pause_state
        self.scheduler.set_pause(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        if mode == "abort":
            self.abort(list(self.scheduler.requests), "paused with mode abort")
        if found is not self.scheduler.pause_state:
            self.scheduler.emit(EventKind.PAUSED, detail=mode)
        self._is_stuck = False
        return found

    def resume(self) -> PauseState:
        """Go on; returns the state found."""
        found = self.scheduler.pause_state
        self.scheduler.set_pause(PauseState.RUNNING)
        if found is not PauseState.RUNNING:
            self.scheduler.emit(EventKind.UNPAUSED)
        self._is_stuck = False
        return found

    def start_drain(self) -> int:
        """Admit nobody new but re-admit preempted requests, until `resume`; returns the number still to end."""
        self.pause("wait")
        return self.num_draining

    @property
    def num_draining(self) -> int:
        """Requests that a drain still waits for: those that have started."""
        return len(self.scheduler.running) + len(self.scheduler.preempted)

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget cached prefixes; False when blocks in use prevented it.

        With `preempt_running` the running requests are preempted, their in-flight results delivered.
        """
        if preempt_running:
            for request in reversed(self.scheduler.running.copy()):
                self.scheduler.preempt(request)
        done = self.scheduler.kv.reset()
        if done:
            self.scheduler.emit(EventKind.CACHE_RESET)
        self._is_stuck = False
        return done

    # ---- questions ------------------------------------------------------------------------------------------

    def self_check(self) -> list[str]:
        """Prove block and reference accounting; one sentence per fault, so an empty list is a clean bill."""
        return find_faults(self.scheduler)

    def snapshot(self, viewport: Viewport) -> Snapshot:
        """The engine as it stands at this boundary, cut to `viewport`."""
        return build_snapshot(self.scheduler, viewport, self.generation, self._records[-1] if self._records else None)

    def state(self) -> EngineState:
        """Everything the scheduler's next decisions depend on: what a forecast starts from."""
        return capture(self.scheduler)

    def recent_steps(self, count: int) -> list[StepRecord]:
        """The newest `count` step records, oldest first."""
        return list(self._records)[-count:] if count > 0 else []
