"""What a knob will do before it is turned: the engine's own scheduler run forward from its live state, twice.

Both knob sets see the same future: the same arrivals and the same answer lengths, drawn from what the engine has seen
lately. Several draws give a range. Bounded in CPU time: the first draw is always finished, further ones while time is
left. Runs in a process of its own; nothing here touches a live engine.
"""

import random
import time
from collections.abc import Callable, Mapping

import msgspec

from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs, KnobValue, change_knobs, knob_table
from schedtop.engine.request import Request
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.sim.state import EngineState, RequestState, restore
from schedtop.engine.sim.step_model import FittedModel, StepModel, StepShape

PERCENTS = (50, 95, 99)


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


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Both outlooks side by side, and what they rest on."""

    horizon_s: float
    now: Outlook
    then: Outlook
    changes: dict[str, tuple[KnobValue, KnobValue]]
    num_draws: int
    cpu_s: float
    warnings: list[str]


class Run(msgspec.Struct):
    """One draw under one knob set, as measured."""

    ttft: list[float]
    itl: list[float]
    num_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_finished: int = 0
    queue_drained_s: float | None = None
    largest: StepShape = StepShape(0, 0, 0)


def forecast(
    state: EngineState,
    fitted: FittedModel,
    changes: Mapping[str, KnobValue],
    *,
    horizon_s: float = 30.0,
    max_draws: int = 8,
    cpu_limit_s: float = 1.5,
    seed: int = 0,
) -> Forecast:
    """Compare the present knobs with `changes` over the next `horizon_s` seconds. Raises `KnobRefused`."""
    knobs = change_knobs(state.knobs, changes, knob_table(state.config))
    started = time.process_time()
    runs: list[tuple[Run, Run]] = []
    while len(runs) < max_draws:
        draw = [_run(state, choice, fitted.model, horizon_s, seed + len(runs)) for choice in (state.knobs, knobs)]
        runs.append((draw[0], draw[1]))
        spent = time.process_time() - started
        if spent + spent / len(runs) > cpu_limit_s:
            break
    return Forecast(
        horizon_s=horizon_s,
        now=_outlook([run for run, _ in runs], horizon_s),
        then=_outlook([run for _, run in runs], horizon_s),
        changes={name: (getattr(state.knobs, name), getattr(knobs, name)) for name in changes},
        num_draws=len(runs),
        cpu_s=time.process_time() - started,
        warnings=_warnings(state, fitted, runs),
    )


def _run(state: EngineState, knobs: Knobs, model: StepModel, horizon_s: float, seed: int) -> Run:
    future = _Future(state, horizon_s, seed)
    clock = VirtualClock()
    clock.jump_to(state.mono)
    end = state.mono + horizon_s
    scheduler = restore(state, knobs, clock, future.output_length)
    runner = SimulatedRunner(model, clock.advance)
    runner.resume(scheduler.running)
    core = EngineCore(state.config, runner, clock=clock, scheduler=scheduler)
    run = Run([], [])
    while clock.now < end:
        if not core.has_work:
            if not future.arrivals:
                break
            clock.jump_to(future.arrivals[0].at)
        future.submit_due(core, clock.now)
        taken = core.step()
        if taken is None or taken.record is None:
            if not core.has_work and not future.arrivals:
                break
            continue
        record = taken.record
        run.ttft += record.ttft
        for gap, count in record.itl:
            run.itl += [gap] * count
        run.num_tokens += record.num_output_tokens
        run.num_finished += record.num_finished
        run.largest = _larger(
            run.largest, StepShape(record.num_scheduled_reqs, record.num_prefill_tokens, record.num_context_tokens)
        )
        if run.queue_drained_s is None and record.num_waiting == 0:
            run.queue_drained_s = clock.now - state.mono
    run.num_preemptions = scheduler.stats.preemptions
    run.num_lost_tokens = scheduler.stats.lost_tokens
    core.shutdown()
    return run


class _Arrival(msgspec.Struct, frozen=True):
    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int


class _Future:
    """One draw of what is to come, the same for every knob set: arrivals, and where each answer ends."""

    def __init__(self, state: EngineState, horizon_s: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._lengths = sorted(state.output_lengths)
        self._endings = {saved.request_id: self._draw_ending(saved) for saved in state.requests}
        self.arrivals = self._draw_arrivals(state, horizon_s)
        self._num_submitted = 0

    def output_length(self, saved: RequestState) -> int:
        """Output tokens with which a live request will end."""
        return self._endings[saved.request_id]

    def submit_due(self, core: EngineCore, now: float) -> None:
        """Hand in the arrivals up to `now`."""
        while self.arrivals and self.arrivals[0].at <= now:
            arrival = self.arrivals.pop(0)
            self._num_submitted += 1
            core.scheduler.add_request(
                Request(
                    f"forecast-{self._num_submitted}",
                    [-self._num_submitted] * arrival.num_prompt_tokens,
                    SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True),
                    priority=arrival.priority,
                    arrival_time=arrival.at,
                )
            )

    def _draw_ending(self, saved: RequestState) -> int:
        """A length seen lately that is longer than what this request has; its max_tokens if there is none."""
        longer = [length for length in self._lengths if length > saved.num_output_tokens]
        drawn = self._random.choice(longer) if longer else saved.max_output_tokens
        return min(drawn, saved.max_output_tokens)

    def _draw_arrivals(self, state: EngineState, horizon_s: float) -> list[_Arrival]:
        """A Poisson process at the recent rate, each arrival shaped like a recent one."""
        recent = state.arrivals
        if len(recent) < 2:
            return []
        rate = (len(recent) - 1) / max(1e-3, state.mono - recent[0].at)
        arrivals, at = [], state.mono
        while (at := at + self._random.expovariate(rate)) < state.mono + horizon_s:
            like = self._random.choice(recent)
            length = self._random.choice(self._lengths) if self._lengths else like.max_tokens
            arrivals.append(_Arrival(at, like.num_prompt_tokens, min(length, like.max_tokens), like.priority))
        return arrivals


def _larger(a: StepShape, b: StepShape) -> StepShape:
    return StepShape(*(max(pair) for pair in zip(msgspec.structs.astuple(a), msgspec.structs.astuple(b), strict=True)))


def _outlook(runs: list[Run], horizon_s: float) -> Outlook:
    drained = [run.queue_drained_s for run in runs]
    known = [seconds for seconds in drained if seconds is not None]
    return Outlook(
        ttft_p50_s=_percentile_range(runs, lambda run: run.ttft, 0.50),
        ttft_p95_s=_percentile_range(runs, lambda run: run.ttft, 0.95),
        itl_p50_s=_percentile_range(runs, lambda run: run.itl, 0.50),
        itl_p99_s=_percentile_range(runs, lambda run: run.itl, 0.99),
        output_tokens_per_s=_range([run.num_tokens / horizon_s for run in runs]),
        preemptions=_range([run.num_preemptions for run in runs]),
        lost_tokens=_range([run.num_lost_tokens for run in runs]),
        finished=_range([run.num_finished for run in runs]),
        queue_drained_s=_range(known) if len(known) == len(runs) else None,
    )


def _percentile_range(runs: list[Run], samples_of: Callable[[Run], list[float]], p: float) -> Range | None:
    values = [
        sorted(samples)[min(len(samples) - 1, int(p * len(samples)))] for run in runs if (samples := samples_of(run))
    ]
    return _range(values) if values else None


def _range(values: list[float] | list[int]) -> Range:
    ordered = sorted(values)
    return Range(ordered[len(ordered) // 2], ordered[0], ordered[-1])


def _warnings(state: EngineState, fitted: FittedModel, runs: list[tuple[Run, Run]]) -> list[str]:
    """What the forecast can't know: steps larger than any seen, too short a history, requests left out."""
    largest = StepShape(0, 0, 0)
    for pair in runs:
        for run in pair:
            largest = _larger(largest, run.largest)
    warnings = [f"extrapolates: {what}" for what in fitted.beyond_seen(largest)]
    if len(state.arrivals) < 2:
        warnings.append("no arrivals seen lately: assumes that none come")
    if not state.output_lengths:
        warnings.append("no request has ended yet: assumes that each runs to its max_tokens")
    if state.num_left_out:
        warnings.append(f"{state.num_left_out} waiting requests left out")
    return warnings
