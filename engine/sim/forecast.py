"""What a knob will do before it is turned: the engine's own scheduler run forward from its live state, twice.

Both knob sets see the same future: the same arrivals and the same answer lengths, drawn from what the engine has seen
lately. Several draws give a range. Bounded in CPU time: where that ends within the first draw, both knob sets stop at
the same moment and the horizon is cut there; further draws are made while time is left. Runs in a process of its own;
nothing here touches a live engine.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping

import msgspec

from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import Knobs, KnobValue, change_knobs, knob_table
from schedtop.engine.request import Request
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.sim.state import EngineState, RequestState, restore
from schedtop.engine.sim.step_model import FittedModel, StepModel, StepShape
from schedtop.engine.snapshot import StepRecord

PERCENTS = (50, 95, 99)
MAX_HORIZON_S = 86_400.0
SLICE_S = 0.5
"""Modelled time for which one knob set runs before the other catches up: how far apart a cut may find them."""


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
    """Compare the present knobs with `changes` over the next `horizon_s` seconds.

    Raises `KnobRefused`, or `SchedtopError` for a horizon or CPU limit that makes no sense.
    """
    if not 0 < horizon_s <= MAX_HORIZON_S:
        raise SchedtopError(f"horizon={horizon_s:g} s is outside its range: above 0, at most {MAX_HORIZON_S:g} s")
    if not cpu_limit_s > 0:
        raise SchedtopError(f"cpu={cpu_limit_s:g} s is no time to work in: give more than 0")
    knobs = change_knobs(state.knobs, changes, knob_table(state.config))
    started = time.process_time()
    runs: list[tuple[Run, Run]] = []
    covered_s = horizon_s
    while len(runs) < max_draws:
        pair = [_Draw(state, choice, fitted.model, horizon_s, seed + len(runs)) for choice in (state.knobs, knobs)]
        reached_s = _run_side_by_side(pair, horizon_s, started + cpu_limit_s)
        if reached_s < horizon_s and runs:
            break  # a part of a draw says nothing beside whole ones
        covered_s = min(covered_s, reached_s)
        runs.append((pair[0].run, pair[1].run))
        spent = time.process_time() - started
        if spent + spent / len(runs) > cpu_limit_s:
            break
    warnings = _warnings(state, fitted, runs)
    if covered_s < horizon_s:
        warnings.insert(
            0, f"looks {covered_s:g} s ahead, not {horizon_s:g} s: the CPU limit of {cpu_limit_s:g} s is up"
        )
    return Forecast(
        horizon_s=covered_s,
        now=_outlook([run for run, _ in runs], covered_s),
        then=_outlook([run for _, run in runs], covered_s),
        changes={name: (getattr(state.knobs, name), getattr(knobs, name)) for name in changes},
        num_draws=len(runs),
        cpu_s=time.process_time() - started,
        warnings=warnings,
    )


def _run_side_by_side(draws: list["_Draw"], horizon_s: float, deadline: float) -> float:
    """Run all draws slice by slice; returns the modelled seconds they cover. The first slice is always run."""
    reached_s = 0.0
    try:
        while reached_s < horizon_s and (not reached_s or time.process_time() < deadline):
            reached_s = min(reached_s + SLICE_S, horizon_s)
            are_live = [draw.advance(reached_s) for draw in draws]
            if not any(are_live):
                return horizon_s
    finally:
        for draw in draws:
            draw.end()
    return reached_s


class _Draw:
    """One draw of the future under one knob set."""

    def __init__(self, state: EngineState, knobs: Knobs, model: StepModel, horizon_s: float, seed: int) -> None:
        self.run = Run([], [])
        self._future = _Future(state, horizon_s, seed)
        self._began = state.mono
        self._clock = VirtualClock()
        self._clock.jump_to(state.mono)
        self._scheduler = restore(state, knobs, self._clock, self._future.output_length)
        runner = SimulatedRunner(model, self._clock.advance)
        runner.resume(self._scheduler.running)
        self._core = EngineCore(state.config, runner, clock=self._clock, scheduler=self._scheduler)

    def advance(self, until_s: float) -> bool:
        """Go on until so many seconds after the start; False when nothing is left to happen."""
        core, future, clock = self._core, self._future, self._clock
        while clock.now < self._began + until_s:
            if not core.has_work:
                if future.next is None:
                    return False
                if future.next.at >= self._began + until_s:
                    return True
                clock.jump_to(future.next.at)
            future.submit_due(core, clock.now)
            taken = core.step()
            if taken is not None and taken.record is not None:
                self._measure(taken.record)
            elif not core.has_work and future.next is None:
                return False
        return True

    def _measure(self, record: StepRecord) -> None:
        run = self.run
        run.ttft += record.ttft
        for gap, count in record.itl:
            run.itl += [gap] * count
        run.num_tokens += record.num_output_tokens
        run.num_finished += record.num_finished
        run.largest = _larger(
            run.largest, StepShape(record.num_scheduled_reqs, record.num_prefill_tokens, record.num_context_tokens)
        )
        if run.queue_drained_s is None and record.num_waiting == 0:
            run.queue_drained_s = self._clock.now - self._began

    def end(self) -> None:
        """Take the last counts and close."""
        self.run.num_preemptions = self._scheduler.stats.preemptions
        self.run.num_lost_tokens = self._scheduler.stats.lost_tokens
        self._core.shutdown()


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
        self._arrivals = self._draw_arrivals(state, horizon_s)
        self.next = next(self._arrivals, None)
        """The arrival that comes next; drawn one by one, for there may be millions."""
        self._num_submitted = 0

    def output_length(self, saved: RequestState) -> int:
        """Output tokens with which a live request will end."""
        return self._endings[saved.request_id]

    def submit_due(self, core: EngineCore, now: float) -> None:
        """Hand in the arrivals up to `now`."""
        while (arrival := self.next) is not None and arrival.at <= now:
            self.next = next(self._arrivals, None)
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

    def _draw_arrivals(self, state: EngineState, horizon_s: float) -> Iterator[_Arrival]:
        """A Poisson process at the recent rate, each arrival shaped like a recent one."""
        recent = state.arrivals
        if len(recent) < 2:
            return
        rate = (len(recent) - 1) / max(1e-3, state.mono - recent[0].at)
        at = state.mono
        while (at := at + self._random.expovariate(rate)) < state.mono + horizon_s:
            like = self._random.choice(recent)
            length = self._random.choice(self._lengths) if self._lengths else like.max_tokens
            yield _Arrival(at, like.num_prompt_tokens, min(length, like.max_tokens), like.priority)


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
