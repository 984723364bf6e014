"""A forecast ends in time whatever it is asked, and says how far it looked."""

import time

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim import forecast as forecasting
from schedtop.engine.sim.forecast import forecast
from schedtop.engine.sim.state import EngineState
from schedtop.engine.sim.step_model import PAPER_MODEL, FittedModel

FITTED = FittedModel(
    model=PAPER_MODEL, num_samples=100, r_squared=1.0, residual_s=0.0, sequences_seen=(1, 10),
    prefill_tokens_seen=(0, 100), context_tokens_seen=(0, 1000),
)  # fmt: skip
CHANGES = {"max_num_seqs": 2}
DAY_S = 86_400.0


@pytest.fixture
def state() -> EngineState:
    """Of an engine with a long request under way and a few arrivals seen."""
    config = EngineConfig(max_model_len=1_000_000, num_kv_blocks=100_000)
    core = EngineCore(config, FakeRunner(config.block_size))
    for number in range(4):
        core.add_request(f"r{number}", [1] * 16, SamplingParams(max_tokens=900_000, ignore_eos=True))
        core.step()
    state = core.state()
    core.shutdown()
    return state


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """CPU time that passes by 0.1 s with each look at it."""
    now = [0.0]

    def process_time() -> float:
        now[0] += 0.1
        return now[0]

    monkeypatch.setattr(time, "process_time", process_time)
    return now


def test_the_cpu_limit_cuts_the_first_draw_for_both_knob_sets_at_the_same_moment(state, clock) -> None:
    result = forecast(state, FITTED, CHANGES, horizon_s=DAY_S, cpu_limit_s=0.5)
    assert result.num_draws == 1
    assert forecasting.SLICE_S <= result.horizon_s < 10
    assert result.warnings[0].startswith(f"looks {result.horizon_s:g} s ahead, not {DAY_S:g} s")
    assert result.now.output_tokens_per_s.mid > result.then.output_tokens_per_s.mid > 0


def test_a_draw_that_is_cut_is_left_out_beside_a_whole_one(state, clock) -> None:
    result = forecast(state, FITTED, CHANGES, horizon_s=1.0, cpu_limit_s=0.7, max_draws=64)
    assert result.horizon_s == 1.0
    assert result.num_draws < 64
    assert not any(warning.startswith("looks") for warning in result.warnings)


def test_a_draw_does_not_depend_on_how_it_is_sliced(state, monkeypatch) -> None:
    whole = forecast(state, FITTED, CHANGES, horizon_s=3.0, max_draws=1, cpu_limit_s=1e9)
    monkeypatch.setattr(forecasting, "SLICE_S", 0.01)
    sliced = forecast(state, FITTED, CHANGES, horizon_s=3.0, max_draws=1, cpu_limit_s=1e9)
    assert (sliced.now, sliced.then) == (whole.now, whole.then)


@pytest.mark.parametrize("horizon_s", [0.0, -1.0, 36_000_000.0, float("nan")])
def test_a_horizon_that_makes_no_sense_is_refused_with_its_range(state, horizon_s) -> None:
    with pytest.raises(SchedtopError, match=r"horizon=.* above 0, at most 86400 s"):
        forecast(state, FITTED, CHANGES, horizon_s=horizon_s)


def test_no_cpu_time_is_refused(state) -> None:
    with pytest.raises(SchedtopError, match="give more than 0"):
        forecast(state, FITTED, CHANGES, cpu_limit_s=0.0)
