"""What the autopilot decides, from states of loads drawn anew: within its bounds, for a reason, and not without one."""

import random

import pytest

from schedtop.engine.sim.autopilot import BUDGET, CAP, KNOBS, THRESHOLD, Bounds, Decision, bounds_of, decide
from schedtop.engine.sim.goodput import Served, Slo, served
from schedtop.engine.sim.load import Load, Uniform
from schedtop.engine.sim.scenario import Scenario, StepTime
from schedtop.engine.sim.simulate import Simulation
from schedtop.engine.sim.step_model import FittedModel, StepModelFit

SLO = Slo(ttft_s=1.5, itl_s=0.022)
CEILING, MOST_SEQS = 8192, 256


def about(tokens: int) -> Uniform:
    return Uniform(low=tokens // 2, high=tokens * 3 // 2)


def chats(rate: float, prompt: int, output: int = 120) -> Load:
    return Load(name="chat", rate_per_s=rate, prompt=about(prompt), output=about(output))


def labels(rate: float, prompt: int) -> Load:
    return Load(name="label", rate_per_s=rate, prompt=about(prompt), output=1)


class Moment:
    """An engine some seconds into a load."""

    def __init__(self, load: Load, seed: int, after_s: float = 12.0, **knobs: int) -> None:
        scenario = Scenario(
            name="moment",
            description="",
            step_time=StepTime(base_ms=8, per_sequence_ms=0.06, per_prefill_token_ms=0.02),
            load=[load],
            engine={
                "num_kv_blocks": 8000, "max_model_len": 16_384, "max_num_batched_tokens": CEILING,
                "max_num_seqs": MOST_SEQS,
            },
            knobs=knobs,
            horizon_s=60.0,
        )  # fmt: skip
        fit = StepModelFit()
        self.simulation: Simulation = scenario.simulation(seed=seed, watch=lambda _, record: fit.add(record))
        self.simulation.run(after_s)
        self.bounds = bounds_of({spec.name: spec for spec in self.simulation.core.knob_table}, {})
        self._fit = fit

    @property
    def fitted(self) -> FittedModel:
        fitted = self._fit.fitted()
        assert fitted is not None
        return fitted

    def decide(self, slo: Slo = SLO, bounds: Bounds | None = None, cpu_limit_s: float = 1.5) -> Decision:
        return decide(
            self.simulation.core.state(), self.fitted, slo, bounds or self.bounds, cpu_limit_s=cpu_limit_s, seed=5
        )

    def go_on(self, decision: Decision, until_s: float) -> Served:
        """Set what was decided and see what comes of the whole load up to a time."""
        self.simulation.core.set_knobs(decision.changes)
        return served(self.simulation.run(until_s), SLO)


@pytest.mark.parametrize("seed", [1, 2])
def test_where_all_come_in_time_nothing_is_turned(seed: int) -> None:
    decision = Moment(chats(3.0, 100), seed, max_num_batched_tokens=512).decide()
    assert decision.changes == {} and decision.worth_now >= 0.98 * decision.num_requests


@pytest.mark.parametrize(("seed", "prompt"), [(1, 1200), (2, 900), (3, 1800)])
def test_steps_that_stretch_gaps_too_far_get_a_budget_that_keeps_them(seed: int, prompt: int) -> None:
    moment = Moment(chats(9000 / prompt, prompt), seed, max_num_batched_tokens=CEILING)
    decision = moment.decide()
    budget = decision.changes[BUDGET]
    num_running = len(moment.simulation.core.scheduler.running)
    longest = moment.fitted.model.base_s + budget * moment.fitted.model.per_prefill_token_s
    assert longest <= SLO.itl_s < moment.fitted.model.base_s + CEILING * moment.fitted.model.per_prefill_token_s
    assert num_running and decision.worth_then > 1.2 * decision.worth_now
    assert str(round(decision.worth_then)) in decision.reason


@pytest.mark.parametrize(("seed", "rate"), [(1, 30.0), (2, 26.0)])
def test_prompts_that_come_faster_than_small_steps_take_them_get_a_larger_budget(seed: int, rate: float) -> None:
    moment = Moment(labels(rate, 1000), seed, after_s=5.0, max_num_batched_tokens=256)
    assert moment.decide().changes[BUDGET] > 2 * 256


@pytest.mark.parametrize("seed", [1, 2])
def test_a_backlog_in_which_nobody_can_be_in_time_is_worked_off_faster_all_the_same(seed: int) -> None:
    moment = Moment(labels(30.0, 1000), seed, after_s=25.0, max_num_batched_tokens=256)
    assert len(list(moment.simulation.core.state().requests)) > 200, "a deep backlog"
    decision = moment.decide()
    assert decision.worth_then < 0.7 * decision.num_requests, "hardly anybody in time"
    assert decision.changes[BUDGET] > 2 * 256


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_decided_does_good_in_what_then_really_comes(seed: int) -> None:
    load = chats(9.0, 1200)
    turned, alone = (Moment(load, seed, max_num_batched_tokens=CEILING) for _ in range(2))
    better = turned.go_on(turned.decide(), 40.0)
    worse = served(alone.simulation.run(40.0), SLO)
    assert better.num_good > 1.5 * worse.num_good and better.num_refused == worse.num_refused == 0
    assert better.itl_p99_s < worse.itl_p99_s


@pytest.mark.parametrize("seed", range(4))
def test_no_value_leaves_the_operators_bounds(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.randint(64, 2000)
    given = {
        BUDGET: (low, low + rng.randint(0, 4000)),
        THRESHOLD: (100, rng.randint(100, 900)),
        CAP: (5, rng.randint(5, 99)),
    }
    load = rng.choice([chats(10.0, 1200), labels(30.0, 1000), chats(4.0, 4000)])
    moment = Moment(load, seed, after_s=8.0)
    bounds = Bounds(ranges=given)
    for name, value in moment.decide(bounds=bounds).changes.items():
        assert bounds.allows(name, value), (name, value)


def test_a_knob_without_bounds_may_go_as_far_as_the_engine_was_built_for() -> None:
    ranges = Moment(chats(1.0, 50), 1, after_s=3.0).bounds.ranges
    assert ranges == {BUDGET: (64, CEILING), THRESHOLD: (64, CEILING), CAP: (1, MOST_SEQS)}
    assert tuple(ranges) == KNOBS


def test_the_same_state_gives_the_same_decision() -> None:
    moment = Moment(chats(6.0, 1200), 4, after_s=4.0, max_num_batched_tokens=CEILING)
    first, second = (moment.decide(cpu_limit_s=60.0) for _ in range(2))
    assert (first.changes, first.num_candidates) == (second.changes, second.num_candidates)


def test_when_the_time_is_up_no_more_is_tried() -> None:
    moment = Moment(chats(9.0, 1200), 4, max_num_batched_tokens=CEILING)
    assert moment.decide(cpu_limit_s=1e-9).num_candidates == 1
    assert moment.decide(cpu_limit_s=1e-9).changes == {}


# ---- what counts as in time -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttft_s", "gaps", "is_good"),
    [
        (1.5, [0.02] * 5, True),
        (1.6, [0.02] * 5, False),
        (1.0, [], True),
        (1.0, [0.02] * 98 + [9.0] * 2, False),
        (1.0, [0.02] * 199 + [9.0], True),
    ],
)
def test_a_request_is_good_with_its_first_token_in_time_and_99_of_100_gaps_short(
    ttft_s: float, gaps: list[float], is_good: bool
) -> None:
    assert SLO.is_met(ttft_s, gaps) is is_good


def test_a_promise_that_was_not_made_is_always_kept() -> None:
    assert Slo().is_met(99.0, [99.0]) and Slo().worth(99.0, [99.0]) == 1.0
    assert Slo(ttft_s=1.0).is_met(0.5, [99.0]) and not Slo(ttft_s=1.0).is_met(1.5, [])


def test_what_is_foreseen_late_is_worth_less_the_later_it_is_and_never_nothing() -> None:
    worths = [SLO.worth(seconds, []) for seconds in (1.3, 1.5, 2.0, 4.0, 100.0)]
    assert worths[0] == 1.0 and worths == sorted(worths, reverse=True) and len(set(worths)) == 5 and worths[-1] > 0


def test_refused_requests_and_those_cut_short_are_not_in_time() -> None:
    load = Load(name="gone", rate_per_s=5.0, prompt=50, output=400, abort_after_s=0.5, abort_share=1.0)
    found = served(Moment(load, 1).simulation.run(20.0), SLO)
    assert found.num_requests > 50 and found.num_good == 0
