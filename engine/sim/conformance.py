"""Replays a recorded scheduler trace through our scheduler and compares record for record.

A trace holds a configuration, requests, operator actions and what vLLM's own scheduler did. The format is described
in `tests/conformance/README.md`. The driver here is the engine loop of the recording, sync or with two steps in
flight; it bypasses the refusals at the door.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import Knobs, SchedulingPolicy
from schedtop.engine.request import Request, State
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import UNKNOWN_DRAFT, ModelRunnerOutput
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.sched.queue import POLICIES
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.snapshot import FinishReason, PauseState

EOS = 50000
_PAUSE = {0: PauseState.RUNNING, 1: PauseState.PAUSED_NEW, 2: PauseState.PAUSED_ALL}
_STATE_KEYS = ("tok", "run", "wait", "free", "kvw", "def")
Json = dict[str, Any]


class TraceConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The configuration of a recording, with its defaults."""

    block_size: int = 16
    num_blocks: int = 1000
    max_num_batched_tokens: int = 512
    max_num_scheduled_tokens: int | None = None
    max_num_seqs: int = 16
    max_num_active_seqs: int | None = None
    max_model_len: int = 4096
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    num_speculative_tokens: int = 0

    def engine_config(self) -> EngineConfig:
        """The sizes; what vLLM does and our default doesn't is switched to vLLM's way."""
        return EngineConfig(
            block_size=self.block_size,
            num_kv_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_speculative_tokens=self.num_speculative_tokens,
            ends_outgrown=False,
            padding_may_block=True,
            unhashes_withdrawn=False,
            readmits_when_paused=False,
        )

    def knobs(self) -> Knobs:
        """The start values of the live settings."""
        return Knobs(
            max_num_batched_tokens=self.max_num_scheduled_tokens or self.max_num_batched_tokens,
            max_num_seqs=self.max_num_active_seqs or self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.policy,
            watermark=self.watermark,
            reserve_full_prompt=self.scheduler_reserve_full_isl,
            prefix_caching=self.enable_prefix_caching,
            num_speculative_tokens=self.num_speculative_tokens,
            async_scheduling=self.async_scheduling,
        )


class TraceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a recording; `prompt` is a list of (seed, number of tokens)."""

    id: str
    arrival: int
    arrival_time: float
    prompt: list[tuple[int, int]]
    seed: int
    max_tokens: int
    priority: int = 0
    stop_after: int | None = None

    def request(self) -> Request:
        """The request as the scheduler takes it."""
        return Request(
            self.id,
            [token(seed, i) for seed, count in self.prompt for i in range(count)],
            SamplingParams(max_tokens=self.max_tokens),
            priority=self.priority,
            arrival_time=self.arrival_time,
            eos_token_ids=[EOS],
        )


class Trace(msgspec.Struct):
    """A recording without its result."""

    config: TraceConfig
    requests: list[TraceRequest]
    max_iters: int
    actions: list[Json] = []


class TraceFile(msgspec.Struct):
    """A recording and what vLLM's scheduler did (None: not recorded yet)."""

    trace: Trace
    expect: Json | None = None


def token(seed: int, position: int) -> int:
    """The token that the recording's model gives at an absolute position."""
    return (((seed * 2654435761 + position * 40503 + 12345) & 0xFFFFFFFF) >> 7) % (EOS)


def load(path: Path) -> TraceFile:
    """Read a trace file. Raises `msgspec.DecodeError` naming what is wrong in it."""
    return msgspec.json.decode(path.read_bytes(), type=TraceFile)


def replay(trace: Trace, make_scheduler: Callable[..., Any] = Scheduler) -> Json:
    """Run a trace; the result has exactly the shape of a file's `expect`."""
    return _Replay(trace, make_scheduler).run()


def first_difference(ours: Json, expected: Json) -> str | None:
    """The first record (or total) that differs, in words; None when all is equal."""
    for index, (mine, theirs) in enumerate(zip(ours["records"], expected["records"], strict=False)):
        if mine != theirs:
            keys = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
            pairs = ", ".join(f"{key}: expected {theirs.get(key)}, got {mine.get(key)}" for key in keys)
            return f"record {index} (iteration {theirs['i']}): {pairs}"
    if len(ours["records"]) != len(expected["records"]):
        return f"expected {len(expected['records'])} records, got {len(ours['records'])}"
    for key in ("iters", "stalled", "unfinished"):
        if ours[key] != expected[key]:
            return f"{key}: expected {expected[key]}, got {ours[key]}"
    return None


class _Replay:
    """One run of one trace: the loop, the stand-in model, and the recorder."""

    def __init__(self, trace: Trace, make_scheduler: Callable[..., Any]) -> None:
        self.trace = trace
        self.iteration = 0
        settings = trace.config.engine_config(), trace.config.knobs()
        self.sched: Scheduler = make_scheduler(*settings, clock=lambda: float(self.iteration))
        self.numbers = {request.id: number for number, request in enumerate(trace.requests)}
        self.specs = {request.id: request for request in trace.requests}
        self.arrivals = deque(sorted(trace.requests, key=lambda request: request.arrival))
        self.actions = deque(sorted(trace.actions, key=lambda action: int(action["at"])))
        self.queue: deque[tuple[int, StepPlan, list[list[int]]]] = deque()
        self.records: list[Json] = []
        self.state: Json = {"tok": [], "run": [], "wait": [], "free": None, "kvw": [], "def": []}
        self.tables: dict[str, int] = {}
        self.sequence = 0
        self.walked: set[str] = set()
        """Deferred requests that an admission walk has met: vLLM keeps them apart until they are admitted."""

    def run(self) -> Json:
        depth = 2 if self.trace.config.async_scheduling else 1
        stalled, num_empty = False, 0
        while self.iteration < self.trace.max_iters:
            self._inputs()
            has_requests = self._has_requests()
            if not has_requests and not self.queue:
                if not (self.arrivals or self.actions):
                    break
                self.iteration = min(
                    [r.arrival for r in list(self.arrivals)[:1]] + [int(a["at"]) for a in list(self.actions)[:1]]
                )
                continue
            record: Json = {"i": self.iteration}
            num_tokens = None
            if has_requests:
                num_tokens = self._schedule(record)
            waits_for_more = depth > 1 and len(self.queue) < depth and bool(num_tokens or self._has_requests())
            if self.queue and not (waits_for_more and num_tokens is not None):
                self._update(record)
            self._close(record)
            self.iteration += 1
            if num_tokens is not None:
                num_empty = 0 if num_tokens else num_empty + 1
            if num_empty >= 4 and not (self.arrivals or self.actions):
                stalled = True
                break
        return {
            "records": self.records,
            "iters": self.iteration,
            "stalled": stalled,
            "unfinished": sorted(self.numbers[request_id] for request_id in self.sched.requests),
        }

    def _has_requests(self) -> bool:
        """vLLM plans a step for anybody who waits, also if he can't be admitted; our engine lets such a step out."""
        return self.sched.has_unfinished or (self.sched.admits_new and self.sched.num_waiting > 0)

    # ---- inputs ---------------------------------------------------------------------------------------------

    def _inputs(self) -> None:
        while self.arrivals and self.arrivals[0].arrival <= self.iteration:
            self.sched.add_request(self.arrivals.popleft().request())
        while self.actions and int(self.actions[0]["at"]) <= self.iteration:
            self._act(self.actions.popleft())

    def _act(self, action: Json) -> None:
        sched = self.sched
        request = sched.requests.get(action.get("id", ""))
        match action["op"]:
            case "set":
                self._set_knob(action["knob"], action["value"])
            case "pause":
                sched.set_pause(_PAUSE[action["value"]])
            case _ if request is None:
                return
            case "abort":
                sched.finish(request, FinishReason.ABORT)
            case "prio":
                sched.set_priority(request, action["value"])
            case "max_tokens":
                sched.set_max_tokens(request, action["value"])
            case "preempt" if request.state is State.RUNNING:
                sched.preempt(request)
                if action["drop"]:
                    sched.drop_in_flight(request)

    def _set_knob(self, name: str, value: Any) -> None:
        ours = {
            "max_num_scheduled_tokens": "max_num_batched_tokens",
            "max_num_active_reqs": "max_num_seqs",
        }.get(name, name)
        self.sched.apply_knobs(msgspec.structs.replace(self.sched.knobs, **{ours: value}))

    # ---- the stand-in model ---------------------------------------------------------------------------------

    def _sample(self, plan: StepPlan) -> list[list[int]]:
        return [self._sample_one(plan, request) for request in plan.requests]

    def _sample_one(self, plan: StepPlan, request: Request) -> list[int]:
        spec = self.specs[request.request_id]
        drafts = plan.spec_token_ids.get(request.request_id, [])
        position = request.num_computed_tokens - len(drafts)
        pending = request.num_output_placeholders
        if plan.is_async and not pending:
            return []  # a prompt chunk
        if plan.is_async and drafts:
            return [UNKNOWN_DRAFT]
        if position < request.num_tokens + pending - (1 + len(drafts)) * plan.is_async:
            return []
        sampled = []
        for draft in [*drafts, None]:
            sampled.append(self._token_at(spec, request, position))
            if draft != sampled[-1]:
                break
            position += 1
        return sampled

    def _sample_late(self, plan: StepPlan, request: Request) -> list[int]:
        """Async, the drafts that a step verifies are known when the result of the step before is taken."""
        spec, start = self.specs[request.request_id], request.num_tokens
        drafts = plan.spec_token_ids[request.request_id]
        right = (spec.seed + start) % (self.trace.config.num_speculative_tokens + 1)
        is_padding = any(admission.request is request for admission in plan.admissions)
        num_accepted = 0 if is_padding else min(len(drafts), right)
        return [self._token_at(spec, request, start + j) for j in range(num_accepted + 1)]

    def _token_at(self, spec: TraceRequest, request: Request, position: int) -> int:
        if spec.stop_after is not None and position == request.num_prompt_tokens + spec.stop_after - 1:
            return EOS
        return token(spec.seed, position)

    def _drafts(self, plan: StepPlan) -> dict[str, list[int]]:
        count = self.trace.config.num_speculative_tokens
        drafts: dict[str, list[int]] = {}
        for request in plan.requests:
            if not count or plan.is_async or request.request_id not in self.sched.requests:
                continue
            if request.num_computed_tokens < request.prefill_end:
                continue
            spec, start = self.specs[request.request_id], request.num_tokens
            right = (spec.seed + start) % (count + 1)
            drafts[request.request_id] = [
                self._token_at(spec, request, start + j) if j < right else 49999 - j for j in range(count)
            ]
        return drafts

    # ---- steps and records ----------------------------------------------------------------------------------

    def _schedule(self, record: Json) -> int:
        plan = self.sched.schedule()
        output = plan.output
        assert output is not None
        self.sequence += 1
        record["s"] = self.sequence
        self._note_walked(plan)
        self.queue.append((self.sequence, plan, self._sample(plan)))
        num, events = self.numbers, self._events(plan)
        record.update({key: value for key, value in events.items() if value})
        self._set_state(record, "tok", [[num[r], n] for r, n in output.num_scheduled_tokens.items()])
        return output.total_num_scheduled_tokens

    def _note_walked(self, plan: StepPlan) -> None:
        """Which deferred requests vLLM's walk through the queue has met: those before the place where it stopped."""
        sched, key = self.sched, POLICIES[self.sched.knobs.policy]
        self.walked -= {admission.request.request_id for admission in plan.admissions}
        if plan.preempted or not sched.admits_new:
            return
        num_admitted = sum(plan.num_scheduled_tokens[a.request.request_id] for a in plan.admissions)
        for request in sched.deferred:
            ahead = [a for a in plan.admissions if key(a.request) < key(request)]
            budget = plan.budget + num_admitted - sum(plan.num_scheduled_tokens[a.request.request_id] for a in ahead)
            num_running = len(sched.running) - len(plan.admissions) + len(ahead)
            stopped = plan.blocked and plan.blocked.request and key(plan.blocked.request) < key(request)
            if budget > 0 and num_running < sched.knobs.max_num_seqs and not stopped:
                self.walked.add(request.request_id)

    def _events(self, plan: StepPlan) -> Json:
        output, num = plan.output, self.numbers
        assert output is not None
        tables = {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
        tables.update({r: ids for r, ids in output.scheduled_cached_reqs.new_block_ids.items() if r not in tables})
        return {
            "new": [num[a.request.request_id] for a in plan.admissions if not a.is_resumed],
            "res": [num[request_id] for request_id in output.resumed_req_ids],
            "pre": [num[request_id] for request_id in output.preempted_req_ids],
            "fin": sorted(num[request_id] for request_id in output.finished_req_ids),
            "hit": [[num[a.request.request_id], a.num_hit_tokens] for a in plan.admissions],
            "spec": [[num[r], len(ids)] for r, ids in output.scheduled_spec_decode_tokens.items()],
            "nb": {str(num[request_id]): ids for request_id, ids in tables.items()},
        }

    def _update(self, record: Json) -> None:
        sequence, plan, sampled = self.queue.popleft()
        late = zip(plan.requests, sampled, strict=True)
        sampled = [self._sample_late(plan, r) if tokens == [UNKNOWN_DRAFT] else tokens for r, tokens in late]
        outputs = self.sched.update_from_output(plan, ModelRunnerOutput(sampled_token_ids=sampled))
        for request_id, drafts in self._drafts(plan).items():
            self.sched.requests[request_id].spec_token_ids = drafts
        record["u"] = sequence
        record["nout"] = sum(len(output.new_token_ids) for output in outputs)
        done = [[self.numbers[o.request_id], o.finish_reason.value] for o in outputs if o.finish_reason]
        if done:
            record["done"] = done

    def _close(self, record: Json) -> None:
        sched, num = self.sched, self.numbers
        waiting = sorted([*sched.waiting, *sched.deferred], key=POLICIES[sched.knobs.policy])
        self._set_state(record, "run", [num[request.request_id] for request in sched.running])
        self._set_state(record, "wait", [num[request.request_id] for request in waiting])
        self._set_state(record, "free", sched.kv.pool.num_free)
        self._set_state(record, "def", sorted(num[request_id] for request_id in self.walked & sched.requests.keys()))
        tables = {request_id: len(request.blocks) for request_id, request in sched.requests.items()}
        changed = {
            str(num[request_id]): tables.get(request_id, 0)
            for request_id in self.numbers
            if tables.get(request_id, 0) != self.tables.get(request_id, 0)
        }
        if changed:
            record["blk"] = changed
        self.tables = tables
        self.records.append(record)

    def _set_state(self, record: Json, key: str, value: Any) -> None:
        if self.state[key] != value:
            self.state[key] = value
            record[key] = value
