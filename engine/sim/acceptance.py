"""How far forecasts can be trusted: knob changes forecast from the live state, applied, and measured, again and again.

For each of six changes, fixed here, a load runs until it has settled; the state is taken, the knobs are changed, and
what then happens is compared with what is forecast from that state: nothing from later enters the forecast. It is
computed afterwards, so that it doesn't slow down what it foretells. Nothing is printed here.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import KnobValue, initial_knobs
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.forecast import forecast
from schedtop.engine.sim.load import Load, Uniform, arrivals_of
from schedtop.engine.sim.outlook import Forecast, Outlook, Tally, outlook_over
from schedtop.engine.sim.simulate import Arrival
from schedtop.engine.sim.state import EngineState
from schedtop.engine.sim.step_model import FittedModel, StepModel, StepModelFit, StepShape
from schedtop.engine.snapshot import StepRecord

WRITTEN_FOR = StepModel(base_s=0.025, per_sequence_s=0.005, per_prefill_token_s=0.0015)
"""The step times that the loads below were written for: SmolLM2-135M on two CPU cores. Elsewhere they are stretched."""
TYPICAL_STEPS = (StepShape(4, 0, 800), StepShape(8, 0, 1600), StepShape(6, 64, 3000), StepShape(6, 256, 40_000))
CALIBRATION = Load(name="any", every_s=0.35, prompt=[10, 40, 120, 300], output=[5, 20, 60])
NUM_BLOCKS, MAX_TOKENS, MAX_SEQS, MAX_LEN = 800, 1024, 16, 4096
"""What the engine must be started with at least."""


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """One knob change on one load. Times as for `WRITTEN_FOR`."""

    name: str
    knobs: dict[str, KnobValue] = {}
    """At the start, over the engine's own."""
    changes: dict[str, KnobValue]
    loads: tuple[Load, ...]
    background: tuple[Load, ...] = ()
    """What came long before: it runs, but isn't among the recent arrivals."""


def _about(num_tokens: int, share: float = 0.25) -> Uniform:
    spread = round(share * num_tokens)
    return Uniform(low=max(1, num_tokens - spread), high=num_tokens + spread)


_LONG_BETWEEN_CHATS = (
    Load(name="chat", every_s=0.75, prompt=_about(30), output=_about(40)),
    Load(name="long", at_s=0.4, every_s=2.7, prompt=_about(600, 0.07), output=8),
)
EXPERIMENTS = (
    Experiment(
        name="budget up",
        knobs={"max_num_batched_tokens": 64},
        changes={"max_num_batched_tokens": 1024},
        loads=_LONG_BETWEEN_CHATS,
    ),
    Experiment(
        name="budget down",
        knobs={"max_num_batched_tokens": 1024},
        changes={"max_num_batched_tokens": 64},
        loads=_LONG_BETWEEN_CHATS,
    ),
    Experiment(
        name="threshold on",
        knobs={"max_num_batched_tokens": 256},
        changes={"long_prefill_token_threshold": 64},
        loads=(
            Load(name="chat", every_s=0.25, prompt=_about(12), output=_about(16)),
            Load(name="long", at_s=1.0, every_s=7.5, prompt=_about(1000, 0.04), output=4),
        ),
    ),
    Experiment(
        name="cap down",
        changes={"max_num_seqs": 4},
        loads=(Load(name="chat", every_s=0.46, prompt=_about(8), output=_about(56)),),
    ),
    Experiment(
        name="watermark up",
        knobs={"kv_block_limit": 44, "prefix_caching": False},
        changes={"watermark": 0.035},
        loads=(Load(name="burst", every_s=7.5, burst=6, prompt=_about(50), output=_about(100, 0.1)),),
    ),
    Experiment(
        name="priority lane",
        knobs={"max_num_seqs": 5},
        changes={"policy": "priority", "preempt_on_arrival": True},
        background=(Load(name="bulk", count=4, prompt=50, output=2000, priority=5),),
        loads=(Load(name="urgent", at_s=1.0, every_s=1.0, burst=3, prompt=_about(9), output=4),),
    ),
)


class Clock(NamedTuple):
    """The engine's clock, and how to let time pass when nothing is to do: real, or virtual."""

    now: Callable[[], float] = time.monotonic
    wait_until: Callable[[float], None] = lambda moment: time.sleep(max(0.0, moment - time.monotonic()))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition: before the change, forecast and measured after it; and how long steps then took."""

    before: Outlook
    forecast: Forecast
    after: Outlook
    step_errors: list[float]
    """Relative error of the step model, fitted before, on each step after the change."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All repetitions of one experiment."""

    name: str
    changes: dict[str, KnobValue]
    trials: list[Trial]


class Bench:
    """Drives an engine, in this thread, through experiments. `vocab_size`: prompts are random tokens below it."""

    def __init__(self, core: EngineCore, vocab_size: int, clock: Clock | None = None) -> None:
        self._core = core
        self._clock = clock or Clock()
        self._vocab_size = vocab_size
        self._fit = StepModelFit()
        self._num_runs = 0
        self._knobs = msgspec.to_builtins(initial_knobs(core.config))
        self.stretch = 1.0
        """How much slower this engine's steps are than those the loads were written for."""

    def calibrate(self, seconds: float) -> FittedModel:
        """Learn the step model on a mixed load, and from it how far to stretch the loads."""
        self._begin({})
        self._serve(self._arrivals([CALIBRATION], seconds, 0), self._clock.now(), seconds)
        fitted = self._fit.fitted()
        if fitted is None:
            return self.calibrate(2 * seconds)
        self.stretch = statistics.median(fitted.model.seconds(s) / WRITTEN_FOR.seconds(s) for s in TYPICAL_STEPS)
        return fitted

    def run(self, experiment: Experiment, seed: int, settle_s: float, horizon_s: float) -> Trial:
        """One repetition. Times as for `WRITTEN_FOR`, stretched."""
        settle_s, horizon_s = settle_s * self.stretch, horizon_s * self.stretch
        self._begin(experiment.knobs)
        began = self._clock.now()
        for arrival in reversed(self._arrivals(experiment.background, 1.0, seed)):
            self._submit(arrival, began)
        self._core.scheduler.stats.forget_recent()
        arrivals = self._arrivals(experiment.loads, settle_s + 2 * horizon_s, seed)
        self._serve(arrivals, began, settle_s)
        before = self._serve(arrivals, began, settle_s + horizon_s)
        state, fitted = self._core.state(), self._fit.fitted()
        assert fitted is not None, "calibrated"
        self._core.set_knobs(experiment.changes)
        steps: list[StepRecord] = []
        after = self._serve(arrivals, began, settle_s + 2 * horizon_s, steps)
        return Trial(
            before=outlook_over([before], horizon_s),
            forecast=_foretell(state, fitted, experiment.changes, horizon_s),
            after=outlook_over([after], horizon_s),
            step_errors=_step_errors(fitted.model, steps),
        )

    def _begin(self, knobs: Mapping[str, KnobValue]) -> None:
        """An empty engine with these knobs, and nothing remembered of the last load."""
        core = self._core
        core.abort(list(core.scheduler.requests))
        while core.has_work:
            core.step()
        core.set_knobs({**self._knobs, **knobs})
        core.reset_prefix_cache()
        core.scheduler.stats.forget_recent()
        self._num_runs += 1

    def _arrivals(self, loads: Sequence[Load], seconds: float, seed: int) -> list[Arrival]:
        """In order of time, newest first, stretched."""
        rng = random.Random(seed)
        drawn = [
            arrival
            for index, load in enumerate(loads)
            for arrival in arrivals_of(_shifted(load, rng), index, rng, seconds / self.stretch)
        ]
        return sorted(drawn, key=lambda arrival: -arrival.at_s)

    def _serve(
        self, arrivals: list[Arrival], began: float, until_s: float, steps: list[StepRecord] | None = None
    ) -> Tally:
        """Hand in what is due and step on, to a moment after the start."""
        core, clock, end = self._core, self._clock, began + until_s
        tally = Tally(clock.now())
        while (now := clock.now()) < end:
            while arrivals and (due := began + arrivals[-1].at_s * self.stretch) <= now:
                self._submit(arrivals.pop(), due)
            if not core.has_work:
                due = began + arrivals[-1].at_s * self.stretch if arrivals else end
                clock.wait_until(min(due, end))
                continue
            taken = core.step()
            if taken is not None and taken.record is not None:
                tally.add(taken.record)
                self._fit.add(taken.record)
                if steps is not None:
                    steps.append(taken.record)
        return tally

    def _submit(self, arrival: Arrival, arrived: float) -> None:
        request_id = f"{self._num_runs}-{arrival.request_id}"
        rng = random.Random(request_id)
        prompt = [rng.randrange(self._vocab_size) for _ in arrival.token_ids]
        sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True, temperature=0.0)
        self._core.add_request(request_id, prompt, sampling, arrival.priority, arrived=arrived)


def _shifted(load: Load, rng: random.Random) -> Load:
    """Another phase against the other loads in each repetition."""
    return msgspec.structs.replace(load, at_s=load.at_s + rng.random() * load.every_s * 0.5)


def _foretell(state: EngineState, fitted: FittedModel, changes: Mapping[str, KnobValue], horizon_s: float) -> Forecast:
    return forecast(state, fitted, changes, horizon_s=horizon_s, max_draws=8, cpu_limit_s=5.0)


def _step_errors(model: StepModel, steps: Sequence[StepRecord]) -> list[float]:
    return [abs(model.seconds(StepShape.of(record)) / record.duration_s - 1) for record in steps]


# ---- the verdict ------------------------------------------------------------------------------------------------


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of one experiment, in seconds: medians over the repetitions."""

    experiment: str
    measure: str
    before: float
    after: float
    spread: float
    """Half of what repetitions differ by, the larger of before and after."""
    foretold: float
    error: float
    """Of the forecast against what was measured after, as a share of the latter."""
    is_clear: bool
    """Whether the real effect exceeds the spread of repeated runs."""
    is_direction_right: bool


MEASURES = {"TTFT p95": "ttft_p95_s", "ITL p99": "itl_p99_s"}


def verdicts(outcome: Outcome) -> list[Verdict]:
    """What came of an experiment, per measure."""
    return [_verdict(outcome, measure, field) for measure, field in MEASURES.items()]


def _verdict(outcome: Outcome, measure: str, field: str) -> Verdict:
    before = [_value(trial.before, field) for trial in outcome.trials]
    after = [_value(trial.after, field) for trial in outcome.trials]
    foretold = statistics.median(_value(trial.forecast.then, field) for trial in outcome.trials)
    unchanged = statistics.median(_value(trial.forecast.now, field) for trial in outcome.trials)
    real = statistics.median(after) - statistics.median(before)
    spread = max(max(values) - min(values) for values in (before, after)) / 2
    return Verdict(
        experiment=outcome.name,
        measure=measure,
        before=statistics.median(before),
        after=statistics.median(after),
        spread=spread,
        foretold=foretold,
        error=foretold / statistics.median(after) - 1,
        is_clear=abs(real) > spread,
        is_direction_right=(foretold - unchanged) * real > 0,
    )


def _value(outlook: Outlook, field: str) -> float:
    value = getattr(outlook, field)
    return float("nan") if value is None else float(value.mid)
