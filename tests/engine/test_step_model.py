"""The step-time model learns what a step costs from live steps, and says how far it can be trusted."""

import random

import msgspec
import pytest

from schedtop.engine.sim.step_model import FittedModel, StepModel, StepModelFit, StepShape
from schedtop.engine.snapshot import LimitedBy, StepRecord

TRUE = StepModel(base_s=0.011, per_sequence_s=0.0004, per_prefill_token_s=0.00005, per_context_token_s=2e-8)


def record(shape: StepShape, duration_s: float, mono: float, num_running: int = 1) -> StepRecord:
    """A step record as the model reads it."""
    empty = dict.fromkeys(StepRecord.__struct_fields__, 0) | {
        "ttft": [], "itl": [], "e2e": [], "queue_time": [], "limited_by": LimitedBy.COMPUTE,
    }  # fmt: skip
    return StepRecord(**{
        **empty, "mono": mono, "duration_s": duration_s, "num_scheduled_reqs": shape.num_sequences,
        "num_prefill_tokens": shape.num_prefill_tokens, "num_context_tokens": shape.num_context_tokens,
        "num_running": num_running,
    })  # fmt: skip


def any_shape(rng: random.Random) -> StepShape:
    """A step of a mixed load."""
    prefill = rng.choice([0, 0, 0, rng.randrange(1, 1500)])
    return StepShape(rng.randrange(1, 64), prefill, rng.randrange(1_000, 400_000))


class Steps:
    """Feeds a fit with steps of a model, one after the other."""

    def __init__(self, fit: StepModelFit, seed: int) -> None:
        self.fit, self.rng, self.now = fit, random.Random(seed), 0.0

    def feed(self, model: StepModel, count: int, noise: float = 0.0, outliers: float = 0.0, shapes=any_shape) -> None:
        for _ in range(count):
            shape = shapes(self.rng)
            seconds = model.seconds(shape) * self.rng.uniform(1 - noise, 1 + noise)
            seconds *= 12 if self.rng.random() < outliers else 1
            self.now += seconds
            self.fit.add(record(shape, seconds, self.now))


def worst_error(fitted: FittedModel, truth: StepModel, seed: int) -> float:
    """Largest relative error on steps that weren't used for the fit."""
    rng = random.Random(seed)
    shapes = [any_shape(rng) for _ in range(200)]
    return max(abs(fitted.model.seconds(shape) / truth.seconds(shape) - 1) for shape in shapes)


@pytest.fixture(params=[1, 2, 3])
def steps(request) -> Steps:
    return Steps(StepModelFit(), request.param)


def fitted(steps: Steps) -> FittedModel:
    model = steps.fit.fitted()
    assert model is not None
    return model


def test_all_four_coefficients_are_found_the_context_term_included(steps: Steps) -> None:
    steps.feed(TRUE, 400)
    found = msgspec.structs.astuple(fitted(steps).model)
    assert found == pytest.approx(msgspec.structs.astuple(TRUE), rel=0.02)
    assert fitted(steps).r_squared > 0.99


def test_there_is_no_model_before_enough_steps_were_seen(steps: Steps) -> None:
    steps.feed(TRUE, 19)
    assert steps.fit.fitted() is None


def test_noise_and_outliers_leave_the_model_right_and_show_in_the_residual_spread(steps: Steps) -> None:
    steps.feed(TRUE, 1500, noise=0.1, outliers=0.04)
    assert worst_error(fitted(steps), TRUE, 7) < 0.15
    steady = Steps(StepModelFit(), 5)
    steady.feed(TRUE, 1500, noise=0.01)
    assert fitted(steps).residual_s > 3 * fitted(steady).residual_s


def test_it_forgets_what_is_no_longer_true(steps: Steps) -> None:
    steps.feed(TRUE, 1000)
    slower = StepModel(base_s=0.03, per_sequence_s=0.0008, per_prefill_token_s=0.0001, per_context_token_s=2e-8)
    steps.feed(slower, 3000, noise=0.02)
    assert worst_error(fitted(steps), slower, 8) < 0.1


def test_what_a_load_says_nothing_about_keeps_its_last_value(steps: Steps) -> None:
    steps.feed(TRUE, 600)
    steps.feed(TRUE, 1500, noise=0.02, shapes=lambda rng: StepShape(rng.randrange(8, 12), 0, 50_000))
    assert fitted(steps).model.per_prefill_token_s == pytest.approx(TRUE.per_prefill_token_s, rel=0.15)


def test_time_between_steps_that_follow_each_other_counts_and_idle_time_does_not(steps: Steps) -> None:
    now = 0.0
    for number in range(200):
        shape = any_shape(steps.rng)
        seconds = TRUE.seconds(shape)
        is_after_idle = number % 5 == 0
        now += seconds + (10.0 if is_after_idle else 0.2 * seconds)
        steps.fit.add(record(shape, seconds, now, num_running=0 if number % 5 == 4 else 3))
    assert (
        1.1 < fitted(steps).model.seconds(StepShape(20, 300, 90_000)) / TRUE.seconds(StepShape(20, 300, 90_000)) < 1.3
    )


def test_steps_planned_ahead_count_from_result_to_result(steps: Steps) -> None:
    now = 0.0
    for _ in range(100):
        shape = any_shape(steps.rng)
        now += TRUE.seconds(shape)
        steps.fit.add(record(shape, 2 * TRUE.seconds(shape), now))
    assert worst_error(fitted(steps), TRUE, 9) < 0.1


def test_what_lies_outside_everything_seen_is_told_and_what_lies_inside_is_not(steps: Steps) -> None:
    steps.feed(TRUE, 300)
    model = fitted(steps)
    low, high = model.prefill_tokens_seen
    assert model.beyond_seen(StepShape(model.sequences_seen[1], high, model.context_tokens_seen[0])) == []
    (told,) = model.beyond_seen(StepShape(model.sequences_seen[0], high + 1, model.context_tokens_seen[1]))
    assert told == f"{high + 1} prefill tokens, seen were {low} to {high}"


def test_the_budget_for_a_step_time_is_what_is_left_after_base_and_decodes() -> None:
    model = StepModel(base_s=0.011, per_sequence_s=0.0, per_prefill_token_s=0.00002)
    assert model.budget_for(0.080, 40) == pytest.approx(3450, abs=1)
    assert model.budget_for(0.010, 40) == 0
    dear = StepModel(base_s=0.011, per_sequence_s=0.001, per_prefill_token_s=0.00002)
    assert dear.budget_for(0.080, 40) == pytest.approx(1450, abs=1)
    with pytest.raises(ValueError, match="no prefill was seen"):
        StepModel(base_s=0.01, per_sequence_s=0.0, per_prefill_token_s=0.0).budget_for(0.1, 1)
