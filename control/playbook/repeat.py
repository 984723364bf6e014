"""Runs a playbook again and again: at each of its moments, with its cooldown in between, until a run doesn't pass.

One run is `runner.py`'s. The command line, the gateway and trials against scenarios all go through here.
"""

from collections.abc import Callable

from schedtop.control.playbook.events import OnEvent
from schedtop.control.playbook.expr import parse_duration
from schedtop.control.playbook.report import Report, Result
from schedtop.control.playbook.runner import Decide, PlaybookRun, nobody, schedule_of
from schedtop.control.playbook.schema import Playbook
from schedtop.control.playbook.target import Target

OnReport = Callable[[Report], None]


async def keep_running(
    playbook: Playbook,
    target: Target,
    *,
    once: bool = False,
    decide: Decide | None = None,
    on_event: OnEvent = nobody,
    on_report: OnReport = nobody,
) -> Report:
    """The last run's report. `once`: a single run, now. Without `when` and `schedule` there is only one anyway."""
    repeats = not once and (playbook.when is not None or playbook.schedule is not None)
    while True:
        report = await PlaybookRun(playbook, target, decide, on_event).run(waits_for_moment=not once)
        if report.began:
            on_report(report)
        if not repeats or report.result is not Result.PASS or target.is_over():
            return report
        await _rest(playbook, target)


async def _rest(playbook: Playbook, target: Target) -> None:
    """The cooldown; without a `when` also the rest of these hours, since a run for them is done."""
    until = target.now + parse_duration(playbook.cooldown)
    hours = schedule_of(playbook) if playbook.when is None else None
    while not target.is_over() and (target.now < until or (hours is not None and hours.is_open(target.snapshot.wall))):
        await target.next_moment()
