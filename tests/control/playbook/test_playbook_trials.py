"""Playbooks without an engine: the same runner on scenarios in virtual time, and dry runs along a recording."""

import itertools
import time
from pathlib import Path

import pytest

from schedtop.control.messages import SnapshotUpdate, Welcome
from schedtop.control.playbook.events import CheckSeen, Progress, RunEvent, StepDone
from schedtop.control.playbook.foresee import foresee_here
from schedtop.control.playbook.plan import plan
from schedtop.control.playbook.reader import parse_playbook
from schedtop.control.playbook.report import Result, Settings
from schedtop.control.playbook.runner import PlaybookRun
from schedtop.control.playbook.simulated import MIDNIGHT, simulated
from schedtop.control.playbook.trial import try_on_recording, try_on_scenario
from schedtop.control.recorder import Recorded, Recording, RecordingWriter
from schedtop.engine.sim.scenario import Scenario, parse_scenario
from schedtop.engine.sim.summary import summarise

LOAD = b"""
name = "steady"
description = "ten requests a second"
horizon_s = 40
[engine]
num_kv_blocks = 4000
max_model_len = 8192
max_num_batched_tokens = 4096
max_num_seqs = 64
[step_time]
base_ms = 20
per_sequence_ms = 0.1
per_prefill_token_ms = 0.05
[[load]]
name = "chat"
rate_per_s = 6.0
prompt = { draw = "uniform", low = 100, high = 900 }
output = { draw = "uniform", low = 20, high = 80 }
"""


@pytest.fixture
def scenario() -> Scenario:
    return parse_scenario(LOAD, "steady")


async def test_a_scenario_is_played_by_the_same_runner_in_virtual_time(scenario: Scenario) -> None:
    book = parse_playbook(
        "name: t\nsteps:\n  - set: {max_num_seqs: 2}\n  - wait: 5s\nchecks:\n  - expect: waiting < 3 over 10s\n", "t"
    )
    events: list[RunEvent] = []
    progress = Progress.of(book)
    trial = await try_on_scenario(book, scenario, seed=3, on_event=lambda e: (events.append(e), progress.take(e))[0])
    assert [(r.result, r.settings) for r in trial.reports] == [(Result.FAIL, Settings.ROLLED_BACK)]
    assert trial.with_playbook.loads[0].ttft_p95_ms > 2 * trial.without.loads[0].ttft_p95_ms
    assert progress.phase == "ended" and progress.report == trial.reports[0]
    assert [line.state for line in progress.steps] == ["done", "done"] and progress.checks[0].state == "fail"
    seen = [event for event in events if isinstance(event, CheckSeen)]
    assert len(seen) >= 9 and seen[-1].truth is False and "waiting =" in seen[-1].detail


async def test_two_trials_of_one_draw_are_the_same(scenario: Scenario) -> None:
    book = parse_playbook("name: t\nsteps:\n  - set: {max_num_batched_tokens: budget_for(40ms)}\n", "t")
    one, two = [await try_on_scenario(book, scenario, seed=5, after_s=10) for _ in range(2)]
    assert one.reports[0].steps[0].changes == two.reports[0].steps[0].changes != {}
    assert one.with_playbook == two.with_playbook != one.without


async def test_a_budget_that_is_computed_keeps_steps_as_short_as_asked(scenario: Scenario) -> None:
    book = parse_playbook(
        "name: t\nsteps:\n  - set: {max_num_batched_tokens: budget_for(40ms)}\n"
        "checks:\n  - {expect: step_p99_ms <= 42 over 15s, min_samples: 100}\n", "t",
    )  # fmt: skip
    trial = await try_on_scenario(book, scenario, seed=6, after_s=12)
    assert trial.reports[0].result is Result.PASS, trial.reports[0]


async def test_a_scenario_of_whole_batches_is_played_in_whole_batches() -> None:
    batched = parse_scenario(LOAD.replace(b"horizon_s = 40", b'horizon_s = 40\nbatching = "request"'), "batched")
    book = parse_playbook("name: t\nsteps:\n  - wait: 1s\n", "t")
    trial = await try_on_scenario(book, batched, seed=3)
    expected = summarise(batched.simulation(seed=3).run(batched.horizon_s))
    assert trial.with_playbook == trial.without == expected


async def test_a_formula_without_data_is_no_data_and_changes_nothing(scenario: Scenario) -> None:
    book = parse_playbook("name: t\nsteps:\n  - set: {max_num_seqs: ttft_p95_ms / 100}\n", "t")
    with simulated(parse_scenario(LOAD.replace(b"6.0", b"0.001"), "idle")) as (engine, target):
        report = await PlaybookRun(book, target).run()
        assert engine.core.generation == 0
    assert (report.result, report.settings) == (Result.NO_DATA, Settings.UNCHANGED)
    assert "ttft_p95_ms has no data" in report.detail


async def test_a_sweep_chooses_the_best_value_that_keeps_its_condition(scenario: Scenario) -> None:
    book = parse_playbook(
        "name: t\nsteps:\n  - sweep:\n      knob: max_num_batched_tokens\n      values: [initial, 64, ceiling / 16]\n"
        "      keep: step_p99_ms < 45\n      best: lowest ttft_p95_ms\n      measure: 8s\n      settle: 1s\n", "t",
    )  # fmt: skip
    trial = await try_on_scenario(book, scenario, seed=2, after_s=5)
    outcome = trial.reports[0].steps[0]
    assert [(t.value, t.keeps) for t in outcome.trials] == [(4096, False), (64, True), (256, True)]
    assert outcome.changes == {"max_num_batched_tokens": (4096, 256)}
    assert outcome.did.startswith("max_num_batched_tokens = 256 is best")


async def test_a_sweep_in_which_nothing_keeps_the_condition_fails_and_restores(scenario: Scenario) -> None:
    book = parse_playbook(
        "name: t\nsteps:\n  - sweep:\n      {knob: max_num_batched_tokens, values: [128, 256], keep: step_p50_ms < 5,\n"
        "       best: highest output_tokens_per_s, measure: 3s}\n", "t",
    )  # fmt: skip
    with simulated(scenario, 2) as (engine, target):
        report = await PlaybookRun(book, target).run()
        assert engine.core.scheduler.knobs.max_num_batched_tokens == 4096
    assert (report.result, report.settings) == (Result.FAIL, Settings.ROLLED_BACK)
    assert "no value of max_num_batched_tokens keeps step_p50_ms < 5" in report.detail


async def test_a_playbook_begins_in_its_hours_and_puts_everything_back_when_they_end(scenario: Scenario) -> None:
    book = parse_playbook(
        "name: t\nschedule: mon 22:00-22:01\ntimezone: UTC\nsteps:\n  - set: {max_num_seqs: 2}\n"
        "finally:\n  - set: {max_num_seqs: initial}\n", "t",
    )  # fmt: skip
    done: list[tuple[float, str]] = []

    def note(event: RunEvent) -> None:
        if isinstance(event, StepDone):
            done.append((event.mono, event.phase))

    hours = parse_scenario(LOAD.replace(b"horizon_s = 40", b"horizon_s = 90"), "hours")
    trial = await try_on_scenario(book, hours, begins_at=MIDNIGHT + 22 * 3600 - 10, on_event=note)
    assert [r.settings for r in trial.reports] == [Settings.KEPT]
    (began, _), (ended, phase) = done
    assert 10 <= began < 11 and phase == "finally" and 70 <= ended < 71


async def test_a_playbook_whose_moment_never_comes_says_so_and_does_nothing(scenario: Scenario) -> None:
    trial = await try_on_scenario(
        parse_playbook("name: t\nwhen: waiting > 9000\nsteps:\n  - wait: 1s\n", "t"), scenario
    )
    assert trial.reports == [] and trial.with_playbook == trial.without


async def test_it_runs_again_after_its_cooldown_and_not_before(scenario: Scenario) -> None:
    begun: list[float] = []
    book = parse_playbook("name: t\nwhen: running >= 1\ncooldown: 12s\nsteps:\n  - wait: 1s\n", "t")
    await try_on_scenario(book, scenario, on_event=lambda e: begun.append(e.mono) if isinstance(e, StepDone) else None)
    gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert len(gaps) >= 2 and all(13 <= gap < 15 for gap in gaps)


async def test_a_dry_run_on_a_scenario_has_a_forecast_and_changes_nothing(scenario: Scenario) -> None:
    book = parse_playbook("name: t\nsteps:\n  - set: {max_num_seqs: 2}\n  - set: {max_num_seqs: 2}\n", "t")
    with simulated(scenario, 1) as (engine, target):
        await target.begin()
        await target.wait_until(15)
        planned = await plan(book, target, foresee_here(target))
        assert engine.core.generation == 0 and await target.audit(10) == []
    assert [step.verdict for step in planned] == ["change", "no change"]
    forecast = planned[0].forecast
    assert forecast is not None and forecast.then.ttft_p95_s is not None and forecast.now.ttft_p95_s is not None
    assert forecast.then.ttft_p95_s.mid > forecast.now.ttft_p95_s.mid


async def record(scenario: Scenario, path: Path) -> Recording:
    with simulated(scenario, 1) as (engine, target), RecordingWriter(path) as writer:

        def keep(message: Welcome | SnapshotUpdate) -> None:
            writer.add(Recorded(wall=time.time(), mono=target.history.now, message=message))

        keep(engine.welcome)
        target.listen(keep)
        await target.begin()
        await target.wait_until(30)
    return Recording(path)


async def test_a_recording_tells_when_a_playbook_would_have_begun_and_what_it_would_have_done(
    scenario: Scenario, tmp_path: Path
) -> None:
    recording = await record(scenario, tmp_path / "r.rec")
    book = parse_playbook(
        "name: t\nwhen: output_tokens_per_s > 50 over 5s\ncooldown: 10s\nsteps:\n"
        "  - set: {max_num_seqs: 2, watermark: 0}\n  - set: {max_num_batched_tokens: budget_for(40ms)}\n", "t",
    )  # fmt: skip
    moments = await try_on_recording(book, recording)
    assert 2 <= len(moments) <= 3
    assert all(later.after_s - earlier.after_s >= 10 for earlier, later in itertools.pairwise(moments))
    assert [step.verdict for step in moments[0].planned] == ["unknown", "change", "unknown"]
    assert moments[0].planned[1].changes == {"max_num_seqs": (64, 2)}


async def test_a_value_above_what_the_recorded_engine_had_is_refused(scenario: Scenario, tmp_path: Path) -> None:
    recording = await record(scenario, tmp_path / "r.rec")
    with pytest.raises(Exception, match="above its ceiling 64"):
        await try_on_recording(parse_playbook("name: t\nsteps:\n  - set: {max_num_seqs: 65}\n", "t"), recording)
