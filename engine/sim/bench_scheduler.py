"""What the scheduler itself costs: workloads of decodes, queues and arrivals, timed step by step without a runner.

Only `schedule()` and `update_from_output()` are timed (and, with churn, the arrival): the stand-in result is made
outside. Telemetry is on: events and samples are drained in every step, as the engine's core does.
The same workloads on vLLM's own scheduler: `control/vllm/scheduler_alone.py`.
"""

import gc
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

import msgspec

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import Knobs, SchedulingPolicy
from schedtop.engine.request import Request
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.snapshot import FinishReason

BLOCK_SIZE = 16
CHUNK = 512
"""Tokens of a step that aren't spent on decodes: what a prefill gets."""
PROMPT = 48
LONG_PROMPT = 400 * CHUNK
FOREVER = 1 << 20
ANSWER_TOKEN = 7


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs and who waits. A step gives every running request one token."""

    running: int
    """Decoding requests."""
    waiting: int = 0
    """Requests in the queue that find no sequence slot."""
    is_async: bool = False
    policy: str = "fcfs"
    has_prefill: bool = False
    """One more request runs, a prompt of `LONG_PROMPT` tokens computed `CHUNK` tokens a step."""
    has_churn: bool = False
    """In every step one request arrives and one ends."""

    @property
    def label(self) -> str:
        """In words, short."""
        parts = ["async" if self.is_async else "sync"]
        parts += ["+ prefill"] * self.has_prefill + ["+ arrival and end"] * self.has_churn
        return " ".join(parts)

    @property
    def num_seqs(self) -> int:
        """Sequence slots: all taken."""
        return self.running + self.has_prefill

    @property
    def budget(self) -> int:
        """Tokens of a step."""
        return self.running + CHUNK

    @property
    def num_blocks(self) -> int:
        """A pool that never runs out while it is measured."""
        long_blocks = LONG_PROMPT // BLOCK_SIZE if self.has_prefill else 0
        return self.running * 64 + long_blocks + 2000

    def max_tokens(self, index: int) -> int:
        """Length of an answer: with churn such that request after request ends, one a step."""
        if not self.has_churn:
            return FOREVER
        return self.settling_steps + index + 1 if index < self.running else self.running - self.is_async

    @property
    def settling_steps(self) -> int:
        """Steps until all that run are past their prompt."""
        return self.running * (PROMPT + BLOCK_SIZE) // CHUNK + 8


class Peer(Protocol):
    """A scheduler under a workload."""

    def steps(self, count: int) -> list[float]:
        """Seconds of each of the next `count` steps."""

    def aborts(self, count: int) -> list[float]:
        """Seconds of each of `count` aborts of a random waiting request."""

    def priority_changes(self, count: int) -> list[float]:
        """Seconds of each of `count` new priorities for a random waiting request."""

    def close(self) -> None:
        """Let go of what it holds."""


class OurScheduler:
    """Our scheduler under a workload, settled: all that can run is decoding."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._depth = 1 + workload.is_async
        self._in_flight: deque[tuple[StepPlan, ModelRunnerOutput]] = deque()
        self._num_made = 0
        self._random = Random(1)
        self._sched = _make_scheduler(workload)
        self._settle()

    def _settle(self) -> None:
        for _ in range(self.workload.running):
            self._sched.add_request(self._make_request())
        for _ in range(self.workload.settling_steps):
            self._step()
        if self.workload.has_prefill:
            self._sched.add_request(self._make_request(LONG_PROMPT))
        for _ in range(self.workload.waiting):
            self._sched.add_request(self._make_request())
        for _ in range(4):
            self._step()
        gc.collect()
        gc.freeze()  # as engines do once they are up: what lives for long isn't walked again and again

    def _make_request(self, num_tokens: int = 0) -> Request:
        index = self._num_made
        self._num_made += 1
        # Prompts of different length: block borders are crossed by some requests in each step, not by all in one.
        prompt = [index + 10] * (num_tokens or PROMPT + index % BLOCK_SIZE)
        sampling = SamplingParams(max_tokens=self.workload.max_tokens(index), ignore_eos=True)
        return Request(f"request-{index}", prompt, sampling, priority=index % 3, arrival_time=float(index))

    def _step(self) -> float:
        sched, arriving = self._sched, None
        if self.workload.has_churn and self._num_made >= self.workload.running + self.workload.waiting:
            arriving = self._make_request()
        began = time.thread_time()
        if arriving is not None:
            sched.add_request(arriving)
        plan = sched.schedule()
        seconds = time.thread_time() - began
        self._in_flight.append((plan, _result_of(plan)))
        if len(self._in_flight) < self._depth:
            return seconds
        plan, result = self._in_flight.popleft()
        began = time.thread_time()
        sched.update_from_output(plan, result)
        sched.stats.take_events()
        sched.stats.take_samples()
        return seconds + time.thread_time() - began

    def steps(self, count: int) -> list[float]:
        """See `Peer`."""
        return [self._step() for _ in range(count)]

    def aborts(self, count: int) -> list[float]:
        """See `Peer`."""
        return [self._timed(lambda request: self._sched.finish(request, FinishReason.ABORT)) for _ in range(count)]

    def priority_changes(self, count: int) -> list[float]:
        """See `Peer`."""
        return [self._timed(lambda request: self._sched.set_priority(request, 1)) for _ in range(count)]

    def _timed(self, change: Callable[[Request], None]) -> float:
        place = self._random.randrange(len(self._sched.waiting))
        request = next(self._sched.waiting.islice(place, place + 1))
        began = time.thread_time()
        change(request)
        return time.thread_time() - began

    def close(self) -> None:
        """See `Peer`."""
        gc.unfreeze()


def _make_scheduler(workload: Workload) -> Scheduler:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_kv_blocks=workload.num_blocks,
        max_model_len=2 * FOREVER,
        max_num_batched_tokens=workload.budget,
        max_num_seqs=workload.num_seqs,
    )
    knobs = Knobs(
        max_num_batched_tokens=workload.budget,
        max_num_seqs=workload.num_seqs,
        policy=SchedulingPolicy(workload.policy),
        async_scheduling=workload.is_async,
    )
    return Scheduler(config, knobs, clock=time.monotonic)


def _result_of(plan: StepPlan) -> ModelRunnerOutput:
    """One token for each request that is past its prompt."""
    return ModelRunnerOutput(
        sampled_token_ids=[
            [ANSWER_TOKEN] if request.num_computed_tokens >= request.num_prompt_tokens else []
            for request in plan.requests
        ]
    )
