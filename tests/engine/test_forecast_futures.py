"""What a forecast takes to come is what the engine has seen: the process of arrivals, lengths of answers, prefixes."""

import random
from itertools import pairwise

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.sim.forecast import forecast
from schedtop.engine.sim.future import Future, Lengths, in_words
from schedtop.engine.sim.outlook import weighted_percentile
from schedtop.engine.sim.scenario import load_scenario, parse_scenario
from schedtop.engine.sim.simulate import Simulation
from schedtop.engine.sim.state import ArrivalSample, EndSample, EngineState
from schedtop.engine.sim.step_model import PAPER_MODEL, FittedModel, StepModelFit
from schedtop.engine.snapshot import PauseState

ANY = FittedModel(
    model=PAPER_MODEL, num_samples=100, r_squared=1.0, residual_s=0.0, sequences_seen=(1, 500),
    prefill_tokens_seen=(0, 100_000), context_tokens_seen=(0, 1 << 40),
)  # fmt: skip
CONFIG = EngineConfig(num_kv_blocks=5000, max_num_batched_tokens=4096, max_num_seqs=256, max_model_len=16_384)


def state_with(**fields) -> EngineState:
    """A state at 100 s with nothing live."""
    from schedtop.engine.knobs import initial_knobs

    plain = {"mono": 100.0, "step": 1, "config": CONFIG, "knobs": initial_knobs(CONFIG), "pause": PauseState.RUNNING}
    return EngineState(**{**plain, "requests": [], **fields})


def drawn(state: EngineState, horizon_s: float, seed: int = 0) -> list[tuple[float, int]]:
    """(seconds from now, prompt tokens) of everything that comes."""
    future, came = Future(state, horizon_s, seed), []
    while (at := future.next_at) is not None:
        came += [(one.at - state.mono, one.like.num_prompt_tokens) for one in future.take_due(at)]
    return came


def simulated(load: str, until_s: float, seed: int = 0, **knobs) -> Simulation:
    """An engine in the middle of a load."""
    head = """name = "x"\ndescription = "x"\nhorizon_s = 300\n[[load]]\nname = "a"\n"""
    tail = """\n[engine]\nnum_kv_blocks = 5000\nmax_num_batched_tokens = 4096\nmax_model_len = 16384
[step_time]\nbase_ms = 8\nper_sequence_ms = 0.06\nper_prefill_token_ms = 0.02\n"""
    simulation = parse_scenario((head + load + tail).encode(), "x").simulation(knobs, seed)
    simulation.run(until_s)
    return simulation


# ---- arrivals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_arrivals_go_on_at_the_recent_rate(rate: float, seed: int) -> None:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0.0, 100.0) for _ in range(int(100 * rate)))
    came = drawn(state_with(arrivals=[ArrivalSample(at, 10, 10, 0) for at in times]), 60.0, seed)
    assert len(came) == pytest.approx(60 * rate, rel=0.25, abs=4)


def test_what_was_long_ago_does_not_count_beside_what_is_recent() -> None:
    times = [float(at) for at in range(-900, -700)] + [60.0 + at / 4 for at in range(160)]
    assert len(drawn(state_with(arrivals=[ArrivalSample(at, 10, 10, 0) for at in times]), 30.0)) > 30


@pytest.mark.parametrize("waited", [0.5, 3.0, 9.5])
def test_bursts_on_a_beat_stay_bursts_on_that_beat(waited: float) -> None:
    times = [100.0 - waited - 10 * beat for beat in range(8) for _ in range(7)]
    came = drawn(state_with(arrivals=[ArrivalSample(at, 10, 10, 0) for at in sorted(times)]), 25.0)
    beats = sorted({round(at, 6) for at, _ in came})
    assert beats == pytest.approx([10 - waited + 10 * n for n in range(len(beats))], abs=1.5)
    assert len(came) == 7 * len(beats)


def test_what_comes_in_a_row_comes_in_a_row() -> None:
    samples = [ArrivalSample(60.0 + at, 5000 if at % 10 == 0 else 20, 10, 0) for at in range(40)]
    places = [place for place, (_, prompt) in enumerate(drawn(state_with(arrivals=samples), 60.0)) if prompt == 5000]
    assert {later - earlier for earlier, later in pairwise(places)} == {10}


def test_two_knob_sets_see_the_same_future_and_other_draws_see_another() -> None:
    arrivals = [ArrivalSample(90 + random.Random(at).random() * 10, at, 10, 0) for at in range(1, 40)]
    state = state_with(arrivals=sorted(arrivals, key=lambda sample: sample.at))
    assert drawn(state, 20, seed=1) == drawn(state, 20, seed=1) != drawn(state, 20, seed=2)


@pytest.mark.parametrize("clients", [4, 16, 40])
def test_a_closed_loop_is_recognised(clients: int) -> None:
    state = simulated(
        f"clients = {clients}\nprompt = [20, 200]\noutput = [10, 60, 90]", 30.0, seed=clients
    ).core.state()
    assert Future(state, 10.0, 0).is_closed
    assert "closed loop" in in_words(state)


@pytest.mark.parametrize(
    "load",
    ["rate_per_s = 4\n", "rate_per_s = 0.2\n", "every_s = 0.5\n", "every_s = 5\nburst = 9\n", "rate_per_s = 30\n"],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_open_load_is_not_taken_for_a_closed_loop(load: str, seed: int) -> None:
    state = simulated(load + "prompt = 200\noutput = [10, 60, 90]", 60.0, seed).core.state()
    assert not Future(state, 10.0, 0).is_closed


def test_with_a_closed_loop_a_slower_engine_gets_less_load_and_no_queue() -> None:
    state = simulated("clients = 20\nprompt = 100\noutput = [40, 80]", 30.0).core.state()
    result = forecast(state, ANY, {"max_num_seqs": 10}, horizon_s=20, max_draws=2)
    assert result.then.finished.mid < result.now.finished.mid
    assert result.then.ttft_p95_s is not None and result.then.ttft_p95_s.mid < 3.0, "ten wait at most, ever"


def test_arrivals_to_an_idle_engine_are_served_and_a_full_queue_refuses() -> None:
    arrivals = [ArrivalSample(100.0 - 10 * n, 50, 20, 0) for n in range(8, 0, -1) for _ in range(6)]
    ends = [EndSample(99.0, 50, 20, 0, 20)] * 9
    state = state_with(arrivals=arrivals, ends=ends)
    result = forecast(state, ANY, {"max_num_queued_reqs": 2, "max_num_seqs": 1}, horizon_s=25, max_draws=1)
    assert result.now.finished.mid >= 12 > result.then.finished.mid > 0
    assert any(warning.startswith("refused at the door, per draw: 0 as it is") for warning in result.warnings)


# ---- answers ----------------------------------------------------------------------------------------------------


def test_lengths_count_those_that_are_not_over() -> None:
    """Short answers end first: judged by ends alone, everything would seem short."""
    lengths = Lengths([10] * 50, [80] * 50)
    draws = [lengths.draw(0, (place + 0.5) / 100) for place in range(100)]
    assert draws.count(10) == 50 and draws.count(None) == 50


def test_a_live_request_ends_later_than_it_is() -> None:
    lengths = Lengths([10, 20, 30, 40], [])
    assert {lengths.draw(20, u / 10) for u in range(10)} == {30, 40}
    assert lengths.draw(40, 0.5) is None


def test_an_answer_cut_by_max_tokens_does_not_make_others_short() -> None:
    ends = [EndSample(99.0, 10, limit, 0, limit) for limit in range(20, 60)]
    arrivals = [ArrivalSample(60.0 + n, 10, 55, 0) for n in range(40)]
    future = Future(state_with(ends=ends, arrivals=arrivals), 20.0, 0)
    assert {one.num_output_tokens for one in future.take_due(120.0)} == {55}


def test_kinds_of_requests_keep_their_own_lengths() -> None:
    ends = [EndSample(99.0, 10, 500, 0, 10)] * 20 + [EndSample(99.0, 10, 500, 5, 300)] * 20
    arrivals = [ArrivalSample(60.0 + n, 10, 500, 5 * (n % 2)) for n in range(40)]
    future = Future(state_with(ends=ends, arrivals=arrivals), 20.0, 0)
    assert {(one.like.priority, one.num_output_tokens) for one in future.take_due(120.0)} == {(0, 10), (5, 300)}


def test_what_clients_ask_for_is_reserved_though_answers_end_earlier() -> None:
    load = "rate_per_s = 8\nprompt = 100\noutput = 40\nmax_tokens = 4000"
    state = simulated(load, 40.0).core.state()
    result = forecast(state, ANY, {"reserve_output": True, "kv_block_limit": 600}, horizon_s=15, max_draws=2)
    assert result.then.ttft_p95_s.mid > 5 * result.now.ttft_p95_s.mid, "two fit at a time"
    assert result.now.finished.mid == pytest.approx(120, rel=0.35)


# ---- prefixes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 4])
def test_prefixes_that_requests_share_are_found_in_the_forecast_too(groups: int) -> None:
    load = f"every_s = 0.5\nprompt = 3200\nshared_prefix = 3000\nprefix_groups = {groups}\noutput = 4"
    simulation = simulated(load, 20.2)
    real = simulation.core.scheduler.stats
    before = real.computed_tokens
    simulation.run(30.2)
    state = simulated(load, 20.2).core.state()
    result = forecast(state, ANY, {"prefix_caching": False}, horizon_s=10, max_draws=2)
    assert real.computed_tokens - before < 10_000
    assert result.now.ttft_p95_s.mid < 0.03 < 0.06 < result.then.ttft_p95_s.mid


# ---- starts and cost --------------------------------------------------------------------------------------------


def test_every_waiting_request_is_told_when_it_starts_under_both_knob_sets() -> None:
    simulation = simulated("count = 12\nprompt = 100\noutput = 100", 0.05, max_num_seqs=4)
    state = simulation.core.state()
    result = forecast(state, ANY, {"max_num_seqs": 6}, horizon_s=10, max_draws=1)
    waiting = [saved.request_id for saved in state.requests if not saved.is_running]
    assert [start.request_id for start in result.starts] == waiting and len(waiting) == 8
    starts = [(start.now.mid, start.then.mid) for start in result.starts if start.now and start.then]
    assert len(starts) == 8 and starts[0][1] < 0.1 < starts[0][0]
    simulation.run(1.3)
    begun = {request.request_id for request in simulation.core.scheduler.running}
    assert begun == {s.request_id for s in result.starts if s.now and s.now.mid <= 1.2}


def test_a_request_that_does_not_start_within_the_horizon_is_told_so() -> None:
    simulation = simulated("count = 6\nprompt = 100\noutput = 1000", 0.05, max_num_seqs=4)
    result = forecast(simulation.core.state(), ANY, {"max_num_seqs": 5}, horizon_s=2.0, max_draws=1)
    assert [(start.now is None, start.then is None) for start in result.starts] == [(True, False), (True, True)]


def test_thirty_seconds_with_two_hundred_requests_are_foretold_in_whole() -> None:
    simulation = simulated("clients = 200\nprompt = [100, 400]\noutput = [50, 300]", 12.0)
    state = simulation.core.state()
    assert len(state.requests) == 200
    result = forecast(state, ANY, {"max_num_seqs": 32}, horizon_s=30.0, max_draws=1, cpu_limit_s=60.0)
    assert result.horizon_s == 30.0
    assert result.now.finished.mid > 500, "that it takes less than 2 s of CPU is measured, not tested"


# ---- against what then happens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "changes"),
    [
        ("preemption-storm", {"max_num_seqs": 16}),
        ("closed-loop-agents", {"max_num_seqs": 16}),
        ("webhooks-on-the-beat", {"max_num_batched_tokens": 256}),
        ("slot-limited", {"max_num_seqs": 6}),
    ],
)
def test_what_is_foretold_from_a_live_state_then_happens(scenario: str, changes: dict) -> None:
    fit, gaps = StepModelFit(), []
    simulation = load_scenario(scenario).simulation(
        seed=random.randrange(1000), watch=lambda core, record: (fit.add(record), gaps.extend(record.itl))
    )
    simulation.run(20.0)
    state, fitted, stats = simulation.core.state(), fit.fitted(), simulation.core.scheduler.stats
    assert fitted is not None
    gaps.clear()
    before = stats.generated_tokens
    simulation.core.set_knobs(changes)
    simulation.run(35.0)
    result = forecast(state, fitted, changes, horizon_s=15.0, max_draws=3, cpu_limit_s=60.0)
    assert result.then.output_tokens_per_s.mid == pytest.approx((stats.generated_tokens - before) / 15, rel=0.3)
    assert result.then.itl_p50_s is not None
    assert result.then.itl_p50_s.mid == pytest.approx(weighted_percentile(gaps, 0.5), rel=0.3)
