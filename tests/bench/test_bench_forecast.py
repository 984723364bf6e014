"""The forecast bench finds out whether forecasts are right: on an engine whose steps follow no simple model."""

import random

import pytest
from click.testing import CliRunner

from schedtop.cli.bench_forecast import _simulated, forecast, report
from schedtop.engine.sim.acceptance import EXPERIMENTS, Bench, Outcome, Verdict, verdicts

BUDGET_S = 2.0
"""How long to settle; horizons are five times as long. Virtual time."""


def outcome_of(bench: Bench, name: str, seed: int, repeats: int = 2) -> Outcome:
    """One experiment, its repetitions and nothing else."""
    (experiment,) = [one for one in EXPERIMENTS if one.name == name]
    trials = [bench.run(experiment, seed + number, 3 * BUDGET_S, 5 * BUDGET_S) for number in range(repeats)]
    return Outcome(name=name, changes=experiment.changes, trials=trials)


@pytest.fixture(scope="module")
def bench() -> Bench:
    bench = _simulated(random.randrange(1 << 30))
    bench.calibrate(10.0)
    return bench


def test_six_changes_are_fixed_beforehand() -> None:
    assert [experiment.name for experiment in EXPERIMENTS] == [
        "budget up", "budget down", "threshold on", "cap down", "watermark up", "priority lane",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [experiment.name for experiment in EXPERIMENTS])
def test_directions_and_sizes_of_effects_are_foretold(bench: Bench, name: str) -> None:
    rows: list[Verdict] = verdicts(outcome_of(bench, name, seed=random.randrange(1000)))
    clear = [row for row in rows if row.is_clear and abs(row.after - row.before) > 3 * row.spread]
    assert all(row.is_direction_right for row in clear)
    assert all(abs(row.error) < 0.6 for row in rows), rows


def test_the_step_model_is_judged_on_steps_after_its_fit(bench: Bench) -> None:
    (trial,) = outcome_of(bench, "budget up", seed=3, repeats=1).trials
    errors = sorted(trial.step_errors)
    assert len(errors) > 50
    assert 0.02 < errors[len(errors) // 2] < 0.15, "steps vary by -10 to +15 %, the model by less"


def test_loads_are_stretched_to_an_engine_of_another_speed() -> None:
    slow = _simulated(1)
    runner = slow._core._runner
    wait = runner.wait  # type: ignore[attr-defined]
    runner.wait = lambda seconds: wait(3 * seconds)  # type: ignore[attr-defined]
    slow.calibrate(30.0)
    assert 2.5 < slow.stretch < 3.6
    (trial,) = outcome_of(slow, "budget down", seed=5, repeats=1).trials
    assert trial.after.itl_p99_s is not None and trial.before.itl_p99_s is not None
    assert trial.after.itl_p99_s.mid < trial.before.itl_p99_s.mid / 2


def test_a_wrong_direction_and_an_effect_within_the_spread_are_called_so() -> None:
    row = Verdict(experiment="x", measure="m", before=1.0, after=2.0, spread=1.5, foretold=0.5, error=-0.75,
                  is_clear=False, is_direction_right=False)  # fmt: skip
    from schedtop.cli.bench_forecast import _row

    assert _row(row).endswith("| -75% | WRONG (effect within the spread) |")


def test_the_command_prints_the_table_for_the_documentation() -> None:
    arguments = ["--simulated", "--repeats", "1", "--settle", "2s", "--horizon", "6s", "--only", "budget up"]
    result = CliRunner().invoke(forecast, arguments)
    assert result.exit_code == 0, result.output
    assert "| budget up | TTFT p95 |" in result.output and "| budget up | ITL p99 |" in result.output
    assert "direction right in" in result.output and "step time on" in result.output


def test_the_command_names_the_changes_it_knows() -> None:
    result = CliRunner().invoke(forecast, ["--simulated", "--only", "budget"])
    assert result.exit_code == 2
    assert "no change is called 'budget'; there are budget up, budget down" in result.output


def test_the_report_counts_right_directions_and_errors(bench: Bench) -> None:
    lines = report([outcome_of(bench, "priority lane", seed=2, repeats=1)])
    assert len(lines) == 6 and "of 2;" in lines[-1]
