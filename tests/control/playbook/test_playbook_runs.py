"""Playbooks against an engine on a virtual clock: four results, three ways to fail, roll-backs that never overwrite."""

import asyncio

import pytest
from virtual_engine import VirtualEngine

from schedtop.control.audit import AuditLog
from schedtop.control.messages import SetKnobs
from schedtop.control.playbook.plan import plan
from schedtop.control.playbook.reader import parse_playbook
from schedtop.control.playbook.report import Report, Result, Settings
from schedtop.control.playbook.runner import PlaybookRun
from schedtop.control.playbook.schema import Playbook
from schedtop.control.playbook.target import Target
from schedtop.engine.snapshot import PauseState


def playbook(checks: str = "", steps: str = "  - set: {max_num_seqs: 4}\n  - wait: 5s\n", head: str = "") -> Playbook:
    checks = f"checks:\n{checks}" if checks else ""
    return parse_playbook(f"name: test\n{head}steps:\n{steps}{checks}", "test.yaml")


async def run(engine: VirtualEngine, book: Playbook, **options: object) -> Report:
    return await PlaybookRun(book, Target(engine), **options).run()


GOOD = "  - {expect: itl_p99_ms < 80 over 10s, min_samples: 20}\n"
BAD = "  - {expect: itl_p99_ms < 1 over 10s, on_fail: %s}\n"


async def test_a_check_that_holds_keeps_the_change_and_passes(engine: VirtualEngine) -> None:
    engine.load(8)
    report = await run(engine, playbook(GOOD))
    assert (report.result, report.settings) == (Result.PASS, Settings.KEPT)
    assert report.steps[0].changes == {"max_num_seqs": (64, 4)} and report.steps[0].applied_at_step is not None
    assert report.checks[0].num_samples >= 20
    assert engine.core.scheduler.knobs.max_num_seqs == 4


@pytest.mark.parametrize(
    ("on_fail", "result", "settings", "value"),
    [
        ("rollback", Result.FAIL, Settings.ROLLED_BACK, 64),
        ("hold", Result.FAIL, Settings.HELD, 4),
        ("ignore", Result.PASS, Settings.KEPT, 4),
    ],
)
async def test_a_failed_check_rolls_back_holds_or_is_ignored_as_it_says(
    engine: VirtualEngine, on_fail: str, result: Result, settings: Settings, value: int
) -> None:
    engine.load(8)
    report = await run(engine, playbook(BAD % on_fail))
    assert report.checks[0].result is Result.FAIL
    assert (report.result, report.settings) == (result, settings)
    assert engine.core.scheduler.knobs.max_num_seqs == value


async def test_a_hold_asks_and_does_as_told(engine: VirtualEngine) -> None:
    engine.load(8)
    report = await run(engine, playbook(BAD % "hold"), decide=lambda checks: True)
    assert (report.result, report.settings) == (Result.FAIL, Settings.ROLLED_BACK)
    assert engine.core.scheduler.knobs.max_num_seqs == 64


@pytest.mark.parametrize(("on_no_data", "settings"), [("hold", Settings.HELD), ("rollback", Settings.ROLLED_BACK),
                                                      ("ignore", Settings.KEPT)])  # fmt: skip
async def test_no_data_is_a_result_of_its_own_and_never_passes(
    engine: VirtualEngine, on_no_data: str, settings: Settings
) -> None:
    report = await run(engine, playbook(f"  - {{expect: itl_p99_ms < 80 over 10s, on_no_data: {on_no_data}}}\n"))
    assert (report.result, report.settings) == (Result.NO_DATA, settings)


async def test_too_few_samples_are_no_data(engine: VirtualEngine) -> None:
    engine.load(1)
    report = await run(engine, playbook("  - {expect: itl_p99_ms < 80 over 10s, min_samples: 1000000}\n"))
    assert report.result is Result.NO_DATA and "1000000 needed" in report.checks[0].detail


async def test_a_check_judges_only_what_happened_after_the_steps(engine: VirtualEngine) -> None:
    engine.load(40, prompt=2000, output=5)  # long prompts: gaps far above 20 ms, over before the steps are
    engine.load(2)
    report = await run(engine, playbook("  - expect: itl_p99_ms < 20 over 10s\n", steps="  - wait: 8s\n"))
    assert report.result is Result.PASS


async def test_a_failure_late_in_the_window_still_rolls_back(engine: VirtualEngine) -> None:
    engine.load(2)
    engine.at(5 + 9, lambda: engine.load(2))  # after the steps, a second before the window ends
    report = await run(engine, playbook("  - expect: running <= 2 over 10s\n"))
    assert (report.result, report.settings) == (Result.FAIL, Settings.ROLLED_BACK)


async def test_all_checks_finish_before_the_playbook_is_done(engine: VirtualEngine) -> None:
    engine.load(8)
    report = await run(engine, playbook(GOOD + "  - expect: preemptions_per_s == 0 over 30s\n" + BAD % "rollback"))
    assert [check.result for check in report.checks] == [Result.PASS, Result.PASS, Result.FAIL]
    assert engine.clock.now >= 5 + 30


async def test_a_conflict_with_another_operator_stops_and_overwrites_nothing(engine: VirtualEngine) -> None:
    engine.load(8)
    engine.at(8, lambda: engine.request(SetKnobs(changes={"max_num_seqs": 9})))
    report = await run(engine, playbook(BAD % "rollback"))
    assert (report.result, report.settings) == (Result.ERROR, Settings.CONFLICT)
    assert "max_num_seqs is 9, this playbook had set 4: somebody else has turned it" in report.detail
    assert engine.core.scheduler.knobs.max_num_seqs == 9


async def test_a_change_by_somebody_else_between_steps_is_an_error_and_ours_is_taken_back(
    engine: VirtualEngine,
) -> None:
    engine.at(2, lambda: engine.request(SetKnobs(changes={"watermark": 0.5})))
    steps = "  - set: {max_num_seqs: 4}\n  - wait: 5s\n  - set: {policy: priority}\n"
    report = await run(engine, playbook(steps=steps))
    assert (report.result, report.settings) == (Result.ERROR, Settings.ROLLED_BACK)
    knobs = engine.core.scheduler.knobs
    assert (knobs.max_num_seqs, knobs.watermark, knobs.policy) == (64, 0.5, "fcfs")


async def test_a_value_the_engine_refuses_is_an_error_before_anything_is_changed(engine: VirtualEngine) -> None:
    steps = "  - set: {max_num_seqs: 4}\n  - set: {max_num_batched_tokens: 4096}\n"
    report = await run(engine, playbook(steps=steps))
    assert (report.result, report.settings, report.steps) == (Result.ERROR, Settings.UNCHANGED, [])
    assert "above its ceiling 2048" in report.detail
    assert engine.core.generation == 0


async def test_an_engine_that_goes_away_is_an_error_that_says_so(engine: VirtualEngine) -> None:
    engine.at(3, lambda: setattr(engine, "is_gone", True))
    report = await run(engine, playbook(GOOD))
    assert report.result is Result.ERROR and "the engine is gone" in report.detail


async def test_a_cancelled_run_takes_its_changes_back(engine: VirtualEngine) -> None:
    task = asyncio.ensure_future(run(engine, playbook(GOOD)))
    engine.at(6, lambda: task.cancel() and None)

    async def until_cancelled() -> None:
        await task

    with pytest.raises(asyncio.CancelledError):
        await until_cancelled()
    assert engine.core.scheduler.knobs.max_num_seqs == 64


async def test_a_second_run_changes_nothing(engine: VirtualEngine) -> None:
    engine.load(8)
    await run(engine, playbook(GOOD))
    again = await run(engine, playbook(GOOD))
    assert (again.result, again.settings, again.steps[0].changes) == (Result.PASS, Settings.UNCHANGED, {})
    assert engine.core.generation == 1


async def test_a_playbook_waits_for_its_moment(engine: VirtualEngine) -> None:
    engine.at(20, lambda: engine.load(8))
    report = await run(engine, playbook(GOOD, head="when: running >= 4 for 5s\n"))
    assert report.result is Result.PASS
    assert engine.clock.now >= 20 + 5 + 5 + 10


async def test_initial_puts_back_what_was_there_once_its_condition_holds(engine: VirtualEngine) -> None:
    engine.load(8)
    engine.at(25, lambda: engine.core.abort([f"r{n}" for n in range(1, 9)]) and None)
    book = parse_playbook(
        "name: t\nsteps:\n  - set: {max_num_seqs: 4}\nchecks:\n" + GOOD
        + "finally:\n  - {set: {max_num_seqs: initial}, when: running == 0 for 5s}\n", "t.yaml",
    )  # fmt: skip
    report = await run(engine, book)
    assert report.result is Result.PASS and 25 + 5 <= engine.clock.now < 32
    assert engine.core.scheduler.knobs.max_num_seqs == 64


async def test_a_budget_for_a_step_time_comes_from_the_fitted_model_within_its_bounds(engine: VirtualEngine) -> None:
    engine.at(0, lambda: engine.load(8, prompt=1500, output=50))
    for second in range(1, 12):
        engine.at(second, lambda: engine.load(3, prompt=700, output=40))
    steps = "  - wait: 12s\n  - set: {max_num_batched_tokens: budget_for(20ms)}\n    within: {min: 100, max: 1000}\n"
    report = await run(engine, playbook(steps=steps))
    assert report.result is Result.PASS, report.detail
    budget = engine.core.scheduler.knobs.max_num_batched_tokens
    assert 500 < budget <= 650  # (20 - 8) ms / 0.02 ms = 600, decodes and their cost about even


async def test_pause_and_resume_are_steps_and_a_failure_resumes(engine: VirtualEngine) -> None:
    engine.load(8)
    report = await run(engine, playbook("  - expect: output_tokens_per_s > 1 over 5s\n", steps="  - pause: keep\n"))
    assert report.result is Result.NO_DATA
    report = await run(engine, playbook("  - expect: running < 1 over 5s\n", steps="  - pause: keep\n  - wait: 1s\n"))
    assert (report.result, report.settings) == (Result.FAIL, Settings.UNCHANGED), "it was paused already"
    await run(engine, playbook(steps="  - resume: true\n"))
    report = await run(engine, playbook("  - expect: running < 1 over 5s\n", steps="  - pause: keep\n  - wait: 1s\n"))
    assert report.settings is Settings.ROLLED_BACK
    assert engine.core.scheduler.pause_state is PauseState.RUNNING


async def test_a_dry_run_tells_what_a_run_then_does_and_changes_nothing(engine: VirtualEngine, audit: AuditLog) -> None:
    engine.load(8)
    steps = "  - set: {max_num_seqs: 4, policy: fcfs}\n  - wait: 5s\n  - set: {max_num_seqs: 4}\n"
    book = playbook(GOOD, steps=steps)
    planned = await plan(book, Target(engine))
    assert [step.verdict for step in planned] == ["change", "no change", "no change", "unknown"]
    assert engine.core.generation == 0 and audit.newest(10).result() == []
    report = await run(engine, book)
    assert [step.changes for step in report.steps] == [step.changes for step in planned[:3]]
    assert [row["after"] for row in audit.newest(10).result()][-1] == {"max_num_seqs": 4, "policy": "fcfs"}


async def test_a_dry_run_never_guesses_what_a_condition_or_a_model_decides(engine: VirtualEngine) -> None:
    steps = (
        "  - {set: {max_num_seqs: 4}, when: waiting > 5}\n  - set: {max_num_seqs: 8}\n"
        "  - set: {max_num_batched_tokens: budget_for(80ms)}\n"
    )
    assert [step.verdict for step in await plan(playbook(steps=steps), Target(engine))] == ["unknown"] * 3
    assert engine.core.generation == 0


async def test_a_dry_run_of_a_value_that_would_be_refused_is_refused(engine: VirtualEngine) -> None:
    from schedtop.control.client import CommandRefused

    with pytest.raises(CommandRefused, match="above its ceiling"):
        await plan(playbook(steps="  - set: {max_num_seqs: 65}\n"), Target(engine))


async def test_a_step_whose_condition_is_not_true_is_passed_over_and_says_so(engine: VirtualEngine) -> None:
    report = await run(engine, playbook(steps="  - {set: {max_num_seqs: 4}, when: running > 5}\n"))
    assert (report.result, report.settings) == (Result.PASS, Settings.UNCHANGED)
    assert "running" in report.steps[0].skipped


async def test_a_check_may_ask_that_something_holds_without_a_break(engine: VirtualEngine) -> None:
    engine.load(2)
    check = "  - {expect: running == 2 for 10s, on_fail: rollback}\n"
    assert (await run(engine, playbook(check))).result is Result.PASS
    engine.at(engine.clock.now + 5 + 6, lambda: engine.load(1))
    assert (await run(engine, playbook(check))).result is Result.FAIL
